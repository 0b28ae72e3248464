"""``syncd merge``: merge one checkpoint without a daemon."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import LOOKED_FOR, Unfinished, look_at_save
from syncd.checkpoint.tensor_rules import Cast
from syncd.cli import options
from syncd.cli.bars import bar
from syncd.cli.signals import cleaned_up
from syncd.protocol.errors import InvalidSettingsError, SaveNotReadyError
from syncd.protocol.names import ACTOR, TEMPORARY, parse_step_folder, printable
from syncd.storage.errnos import NOT_EMPTY
from syncd.storage.fsio import Storage
from syncd.torch_extra import require_torch


@options.as_command(
    "merge global_step_100/actor /tmp/step-100", keys=("digests", "cast", "max_shard_size")
)
def command(
    actor_dir: options.Existing,
    out_dir: Path,
    *,
    digests: str,
    cast: Cast | None,
    max_shard_size: int,
    prefix: options.Prefix = None,
    names: options.TensorNames = "hub",
    fsync: Annotated[bool, "Wait until the result survives a power loss."] = True,
) -> options.Answer:
    """Merge the shards in ACTOR_DIR into OUT_DIR, a complete Hugging Face model folder.

    ACTOR_DIR can also be a checkpoint of torch.distributed.checkpoint. If the shards belong to a
    PEFT model, or lora_adapter/ is all there is, OUT_DIR becomes the adapter's folder.

    OUT_DIR must be missing or empty. It appears complete or not at all.
    """
    if cast is not None:
        require_torch("--dtype")
    storage = Storage(durable=fsync)
    actor = actor_dir.resolve()
    out = out_dir.resolve()
    if storage.names(out):
        raise InvalidSettingsError(f"{out_dir} is not empty: give a new folder")
    save = look_at_save(storage, actor, parse_step_folder(actor.parent.name) or 0)
    if isinstance(save, Unfinished):
        saved = storage.names(actor)
        reason = save.reason if saved else f"{actor} is empty: looked for {LOOKED_FOR}"
        if ACTOR in saved:
            reason += f"; give its {ACTOR} folder instead: {actor / ACTOR}"
        raise SaveNotReadyError(reason)
    room = out.with_name(f"{TEMPORARY}{out.name}-{secrets.token_hex(6)}")
    storage.make_folder(room, below=Path(out.anchor))
    with cleaned_up():
        try:
            with bar(out.name) as progress:
                manifest = build_model_folder(
                    storage,
                    actor,
                    save,
                    room,
                    options=MergeOptions(
                        max_file_size=max_shard_size,
                        digests=digests == "on",
                        cast=cast,
                        prefix=prefix,
                        names=names,
                    ),
                    work=Work(lambda: None, progress),
                )
            try:
                storage.rename(room, out)
            except OSError as error:
                if error.errno in NOT_EMPTY:
                    raise InvalidSettingsError(
                        f"another process wrote to {out_dir} during the merge: give a new folder"
                    ) from error
                raise
            storage.sync_folder(out.parent)
        finally:
            storage.remove_tree(room)
    merged = manifest.size
    base = manifest.base_model
    answer = {
        "folder": str(out),
        "step": manifest.step,
        "kind": manifest.kind,
        "base_model": None if base is None else base.name,
        "tensors": len(manifest.tensors),
        "files": [file.name for file in manifest.files],
        "bytes": merged,
        "seconds": round(manifest.timings["build"], 3),
        "checked": manifest.checked,
        "names": manifest.names,
    }
    of = "" if base is None else f" for {printable(base.name)}"
    what = "" if manifest.kind == "full" else f", a LoRA {manifest.kind}{of},"
    return answer, (
        f"merged {len(manifest.tensors)} tensors, {merged / 1e6:.1f} MB, into {out_dir}{what} in "
        f"{manifest.timings['build']:.2f} s (checked by {manifest.checked})"
    )
