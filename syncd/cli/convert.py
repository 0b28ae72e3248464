"""``syncd convert``: full checkpoints as Hugging Face models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from syncd.checkpoint.convert import Found, convert_step, full_steps, look_at_step
from syncd.checkpoint.merge import Progress
from syncd.checkpoint.tensor_rules import Cast
from syncd.cli import options
from syncd.cli.amounts import size, span
from syncd.cli.bars import bar, cleaned_up
from syncd.protocol.errors import SaveNotReadyError, SyncdError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import HUGGINGFACE, MODEL_CONFIG, is_weights_name, printable
from syncd.protocol.records import Manifest
from syncd.storage.fsio import Storage

#: Merges one step, and says how far it is.
_Convert = Callable[[Found, Progress], Manifest | None]


@dataclass(frozen=True, slots=True)
class _Result:
    """What became of one full checkpoint; ``outcome`` is one of the words in docs/cli.md."""

    step: int
    outcome: str
    why: str = ""
    bytes: int | None = None
    seconds: float | None = None


@click.command("convert", epilog="Example: syncd convert /shared/jobs/qwen-grpo --dtype bf16")
@options.job
@click.option(
    "--step",
    type=click.IntRange(min=0),
    default=None,
    help="Only this one, which must be there.  [default: all full checkpoints]",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be converted.")
@click.option("--again", is_flag=True, help="Replace weights that are there already.")
@options.dtype
@options.max_shard_size
@options.copy_threads
@options.prefix
@options.as_json
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: Path,
    step: int | None,
    cast: Cast | None,
    max_shard_size: int,
    copy_threads: int,
    prefix: str | None,
    *,
    dry_run: bool,
    again: bool,
    as_json: bool,
) -> None:
    """Merge every full checkpoint of JOB into its own actor/huggingface/ folder.

    With the config and the tokenizer that its trainer left there it is a whole Hugging Face model.
    What was converted before is left out, as is what its trainer writes at this moment; trainer and
    daemon may work meanwhile. Exits with the number of the first error's class, once all others
    were tried.
    """
    storage, layout = Storage(job), JobLayout(job)

    def convert(found: Found, progress: Progress) -> Manifest | None:
        return convert_step(
            storage,
            layout,
            found,
            max_file_size=max_shard_size,
            cast=cast,
            prefix=prefix,
            threads=copy_threads,
            progress=progress,
        )

    results: list[_Result] = []
    code = 0
    with cleaned_up():
        for one in full_steps(storage, layout) if step is None else [step]:
            try:
                found = look_at_step(storage, layout, one)
                if found.why_not and step is not None:
                    raise SaveNotReadyError(f"{layout.step(one)} is left out: {found.why_not}")
                result = _result(found, convert, dry_run=dry_run, again=again)
            except (SyncdError, OSError) as error:
                code = code or (error.exit_code if isinstance(error, SyncdError) else 1)
                result = _Result(one, "failed", str(error))
            results.append(result)
            if not as_json:
                click.echo(_line(storage, layout, result), err=result.outcome == "failed")
    if as_json:
        told = [asdict(result) for result in results]
        click.echo(json.dumps({"job": str(job), "steps": told}, indent=2))
    elif not results:
        click.echo(f"{job} holds no full checkpoint")
    ctx.exit(code)


def _result(found: Found, convert: _Convert, *, dry_run: bool, again: bool) -> _Result:
    if found.why_not:
        return _Result(found.step, "left out", found.why_not)
    if found.has_weights and not again:
        return _Result(found.step, "done before")
    if dry_run:
        return _Result(found.step, "to do")
    with bar(f"step {found.step}") as progress:
        manifest = convert(found, progress)
    if manifest is None:
        return _Result(found.step, "left out", "its shards hold a LoRA adapter")
    written = sum(file.size for file in manifest.files if is_weights_name(file.name))
    return _Result(
        found.step, "converted", bytes=written, seconds=round(manifest.timings["build"], 3)
    )


def _line(storage: Storage, layout: JobLayout, result: _Result) -> str:
    told = f"step {result.step}: {result.outcome}"
    if result.why:
        told += f": {printable(result.why)}"
    if result.bytes is not None and result.seconds is not None:
        told += f", {size(result.bytes)} in {span(result.seconds)}"
        folder = layout.actor(result.step) / HUGGINGFACE
        if not storage.exists(folder / MODEL_CONFIG):
            told += f" (no {MODEL_CONFIG} there: copy the base model's)"
    return told
