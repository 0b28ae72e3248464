"""``syncd convert``: merge a full checkpoint into a Hugging Face model."""

from __future__ import annotations

import click

from syncd.checkpoint.convert import convert_step, has_weights, look_at_step, weight_sizes
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.tensor_rules import Cast
from syncd.cli import options
from syncd.cli.bars import bar
from syncd.cli.signals import cleaned_up
from syncd.protocol.amounts import size, span
from syncd.protocol.names import (
    HUGGINGFACE,
    MODEL_CONFIG,
    parse_step_folder,
    printable,
)
from syncd.storage.job import Job
from syncd.torch_extra import require_torch


@options.as_command(
    "convert /shared/jobs/qwen-grpo/global_step_100", keys=("cast", "max_shard_size")
)
def command(
    step_dir: options.Existing,
    *,
    cast: Cast | None,
    max_shard_size: int,
    prefix: options.Prefix = None,
    names: options.TensorNames = "hub",
) -> options.Answer:
    """Merge the full checkpoint in STEP_DIR (global_step_N) into its actor/huggingface/ folder.

    With the config and the tokenizer that the trainer saved there, the result is a complete Hugging
    Face model. Weights that are there already are kept; to replace them, for example by another
    --dtype, first delete them and manifest.json. LoRA adapters, and steps with .saving, are
    refused.

    The trainer and the daemon can run at the same time. After an interruption the folder holds a
    complete model or none, and the next call finishes the work. If this command runs twice at the
    same time, one of the two fails.
    """
    if cast is not None:
        require_torch("--dtype")
    step_dir = step_dir.resolve()
    step = parse_step_folder(step_dir.name)
    if step is None:
        raise click.UsageError(f"{step_dir} is not the folder of a step, global_step_N.")
    job = Job.at(step_dir.parent)
    merging = MergeOptions(max_file_size=max_shard_size, cast=cast, prefix=prefix, names=names)
    result: dict[str, object] = {"step": step, "outcome": "done before"}
    details = ""
    with cleaned_up():
        save = look_at_step(job, step)
        folder = job.layout.actor(step) / HUGGINGFACE
        if not has_weights(job.storage, folder, save):
            with bar(step_dir.name) as progress:
                manifest = convert_step(job, save, merging, progress=progress)
            written = sum(weight_sizes(manifest).values())
            seconds = round(manifest.timings["build"], 3)
            result |= {"outcome": "converted", "bytes": written, "seconds": seconds}
            details = f", {size(written)} in {span(seconds)}"
    if not job.storage.exists(folder / MODEL_CONFIG):
        details += f" (no {MODEL_CONFIG}: copy the base model's files except weights into {folder})"
    return result, f"step {step}: {result['outcome']}{printable(details)}"
