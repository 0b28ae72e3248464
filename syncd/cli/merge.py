"""``syncd merge``: one checkpoint, without a daemon."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import click

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.tensor_rules import Cast
from syncd.cli import options
from syncd.cli.bars import bar, cleaned_up
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import TEMPORARY, parse_step_folder, printable
from syncd.storage.errnos import NOT_EMPTY
from syncd.storage.fsio import Storage


@click.command("merge", epilog="Example: syncd merge global_step_100/actor /tmp/step-100")
@click.argument("actor_dir", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("out_dir", type=click.Path(path_type=Path, file_okay=False))
@options.digest
@options.dtype
@options.max_shard_size
@options.copy_threads
@options.prefix
@click.option(
    "--fsync/--no-fsync",
    default=True,
    show_default=True,
    help="Wait until the result would survive a power loss.",
)
@options.as_json
def command(
    actor_dir: Path,
    out_dir: Path,
    digest: str,
    cast: Cast | None,
    max_shard_size: int,
    copy_threads: int,
    prefix: str | None,
    *,
    fsync: bool,
    as_json: bool,
) -> None:
    """Merge the shards in ACTOR_DIR into OUT_DIR, a complete Hugging Face model folder.

    ACTOR_DIR may be a folder of torch.distributed.checkpoint too.

    Where they are of a PEFT model, or an adapter is beside them in lora_adapter/, OUT_DIR becomes
    the folder of that LoRA adapter.

    OUT_DIR must be new or empty; it appears whole or not at all.
    """
    storage = Storage(durable=fsync)
    actor = actor_dir.resolve()
    out = out_dir.resolve()
    if storage.names(out):
        raise InvalidSettingsError(f"{out_dir} is not empty: give a new folder")
    room = out.with_name(f"{TEMPORARY}{out.name}-{secrets.token_hex(6)}")
    storage.make_folder(room, below=Path(out.anchor))
    with cleaned_up():
        try:
            with bar(out.name) as progress:
                manifest = build_model_folder(
                    storage,
                    actor,
                    look_at_save(storage, actor, parse_step_folder(actor.parent.name) or 0),
                    room,
                    sequence=0,
                    digests=digest == "on",
                    max_file_size=max_shard_size,
                    threads=copy_threads,
                    cast=cast,
                    prefix=prefix,
                    cancel=lambda: None,
                    progress=progress,
                )
            try:
                storage.rename(room, out)
            except OSError as error:
                if error.errno in NOT_EMPTY:
                    raise InvalidSettingsError(f"{out_dir} was filled by someone else") from error
                raise
            storage.sync_folder(out.parent)
        finally:
            storage.remove_tree(room)
    merged = sum(file.size for file in manifest.files)
    base = manifest.base_model
    if as_json:
        told = {
            "folder": str(out),
            "step": manifest.step,
            "kind": manifest.kind,
            "base_model": None if base is None else base.name,
            "tensors": len(manifest.tensors),
            "files": [file.name for file in manifest.files],
            "bytes": merged,
            "seconds": round(manifest.timings["build"], 3),
            "checked": manifest.checked,
        }
        click.echo(json.dumps(told, indent=2))
        return
    of = "" if base is None else f" for {printable(base.name)}"
    what = "" if manifest.kind == "full" else f", a LoRA {manifest.kind}{of},"
    click.echo(
        f"merged {len(manifest.tensors)} tensors, {merged / 1e6:.1f} MB, into {out_dir}{what} in "
        f"{manifest.timings['build']:.2f} s (checked by {manifest.checked})"
    )
