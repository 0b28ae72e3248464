"""``syncd convert``: merge full checkpoints into Hugging Face models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from syncd.checkpoint.convert import (
    FoundCheckpoint,
    convert_step,
    full_steps,
    lacks_config,
    look_at_step,
    take_model_files,
)
from syncd.checkpoint.merging.options import MergeOptions, Progress
from syncd.checkpoint.tensor_rules import Cast
from syncd.cli import options
from syncd.cli.bars import bar
from syncd.cli.signals import cleaned_up
from syncd.protocol.amounts import size, span
from syncd.protocol.errors import SaveNotReadyError, SyncdError
from syncd.protocol.names import (
    MODEL_CONFIG,
    is_weights_name,
    parse_step_folder,
    printable,
)
from syncd.protocol.records import Manifest, Names
from syncd.storage.job import Job
from syncd.storage.step_folders import holds_job
from syncd.torch_extra import require_torch

_Convert = Callable[[FoundCheckpoint, Progress], Manifest | None]


@dataclass(frozen=True, slots=True)
class _Converted:
    """The result for one full checkpoint; docs/cli.md lists the values of ``outcome``."""

    step: int
    outcome: str
    why: str = ""
    bytes: int | None = None
    seconds: float | None = None


@click.command("convert", epilog="Example: syncd convert /shared/jobs/qwen-grpo --dtype bf16")
@options.job
@click.option(
    "--base-model-dir",
    "base",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=None,
    help=f"A folder with {MODEL_CONFIG} and the tokenizer, if the trainer saved no {MODEL_CONFIG}.",
)
@click.option(
    "--step",
    type=options.CountRange(min=0),
    default=None,
    help="Convert only this step; it must exist.  [default: all full checkpoints]",
)
@click.option("--dry-run", is_flag=True, help="Print what would be converted, and convert nothing.")
@click.option("--again", is_flag=True, help="Also convert checkpoints that were converted before.")
@options.dtype
@options.max_shard_size
@options.copy_threads
@options.prefix
@options.names
@options.as_json
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: Path,
    base: Path | None,
    step: int | None,
    cast: Cast | None,
    max_shard_size: int,
    copy_threads: int,
    prefix: str | None,
    names: Names,
    *,
    dry_run: bool,
    again: bool,
    as_json: bool,
) -> None:
    """Merge every full checkpoint of JOB into its own actor/huggingface/ folder.

    JOB can also be the folder of one step, global_step_N.

    With the config and the tokenizer that the trainer saved in this folder, the result is a
    complete Hugging Face model. Checkpoints that were converted before, and checkpoints that the
    trainer is writing now, are skipped. The trainer and the daemon can run at the same time. If a
    checkpoint fails, the other checkpoints are still converted; the exit code is the code of the
    first error.
    """
    if base is not None and not (base / MODEL_CONFIG).is_file():
        raise click.UsageError(f"--base-model-dir: {base} has no {MODEL_CONFIG}.")
    if cast is not None:
        require_torch("--dtype")
    job, step = _alone(job, step)
    source = Job.at(job)
    merging = MergeOptions(
        max_file_size=max_shard_size, cast=cast, prefix=prefix, names=names, threads=copy_threads
    )

    def convert(found: FoundCheckpoint, progress: Progress) -> Manifest | None:
        return convert_step(source, found, merging, progress=progress)

    def complete(found: FoundCheckpoint) -> str:
        actor = source.layout.actor(found.step)
        if base is None or not lacks_config(source.storage, actor):
            return ""
        taken = [MODEL_CONFIG] if dry_run else take_model_files(source.storage, actor, base)
        return f"with {', '.join(taken)} of {base}"

    results: list[_Converted] = []
    code = 0
    with cleaned_up():
        for one in full_steps(source) if step is None else [step]:
            try:
                found = look_at_step(source, one)
                if found.why_not and step is not None:
                    raise SaveNotReadyError(f"skipping {source.layout.step(one)}: {found.why_not}")
                completed = "" if found.why_not else complete(found)
                if completed and not dry_run:
                    found = look_at_step(source, one)  # it may count as another save now
                result = _result(found, convert, completed, dry_run=dry_run, again=again)
            except (SyncdError, OSError) as error:
                code = code or (error.exit_code if isinstance(error, SyncdError) else 1)
                result = _Converted(one, "failed", str(error))
            results.append(result)
            if not as_json:
                click.echo(_line(source, result), err=result.outcome == "failed")
    if as_json:
        told = [asdict(result) for result in results]
        click.echo(json.dumps({"job": str(job), "steps": told}, indent=2))
    elif not results:
        click.echo(f"{job} has no full checkpoint")
    ctx.exit(code)


def _alone(folder: Path, step: int | None) -> tuple[Path, int | None]:
    """The job and the step of a folder, which can be a job or a step folder."""
    found = parse_step_folder(folder.resolve().name)
    if found is None or holds_job(Job.at(folder)):
        return folder, step
    if step not in {None, found}:
        raise click.UsageError(f"{folder} is the folder of one step: leave out --step {step}.")
    return folder.resolve().parent, found


def _result(
    found: FoundCheckpoint, convert: _Convert, completed: str, *, dry_run: bool, again: bool
) -> _Converted:
    if found.why_not:
        return _Converted(found.step, "left out", found.why_not)
    is_done = found.has_weights and not again
    if is_done and not completed:
        return _Converted(found.step, "done before")
    if dry_run:
        return _Converted(found.step, "to do", completed)
    if is_done:
        return _Converted(found.step, "converted", completed)
    with bar(f"step {found.step}") as progress:
        manifest = convert(found, progress)
    if manifest is None:
        return _Converted(found.step, "left out", "its shards hold a LoRA adapter")
    written = sum(file.size for file in manifest.files if is_weights_name(file.name))
    return _Converted(
        found.step,
        "converted",
        completed,
        bytes=written,
        seconds=round(manifest.timings["build"], 3),
    )


def _line(job: Job, result: _Converted) -> str:
    told = f"step {result.step}: {result.outcome}"
    if result.why:
        told += f": {printable(result.why)}"
    if result.bytes is not None and result.seconds is not None:
        told += f", {size(result.bytes)} in {span(result.seconds)}"
    if result.outcome in {"converted", "done before"} and lacks_config(
        job.storage, job.layout.actor(result.step)
    ):
        told += f" (no {MODEL_CONFIG} there: give the base model's folder with --base-model-dir)"
    return told
