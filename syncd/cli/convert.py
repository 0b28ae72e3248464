"""``syncd convert``: merge a full checkpoint into a Hugging Face model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import click

from syncd.checkpoint.convert import (
    convert_step,
    has_weights,
    lacks_config,
    look_at_step,
    take_model_files,
)
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.tensor_rules import Cast
from syncd.cli import options
from syncd.cli.bars import bar
from syncd.cli.signals import cleaned_up
from syncd.protocol.amounts import size, span
from syncd.protocol.names import (
    HUGGINGFACE,
    MODEL_CONFIG,
    is_weights_name,
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
    base: Annotated[
        options.Existing | None,
        "--base-model-dir",
        f"A folder with {MODEL_CONFIG} and the tokenizer, if the trainer saved no {MODEL_CONFIG}.",
    ] = None,
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
    complete model or none, and the next call finishes the work.
    """
    if base is not None and not (base / MODEL_CONFIG).is_file():
        raise click.UsageError(f"--base-model-dir: {base} has no {MODEL_CONFIG}.")
    if cast is not None:
        require_torch("--dtype")
    folder = step_dir.resolve()
    step = parse_step_folder(folder.name)
    if step is None:
        raise click.UsageError(f"{step_dir} is not the folder of a step, global_step_N.")
    job = Job.at(folder.parent)
    merging = MergeOptions(max_file_size=max_shard_size, cast=cast, prefix=prefix, names=names)
    actor = job.layout.actor(step)
    result: dict[str, object] = {"step": step, "outcome": "done before"}
    said = ""
    with cleaned_up(), ExitStack() as stack:
        save = look_at_step(job, step)
        if base is not None and lacks_config(job.storage, actor):
            taken = stack.enter_context(take_model_files(job.storage, actor, base))
            result["taken"] = taken
            said = f", with {', '.join(taken)} of {base}"
            save = look_at_step(job, step)  # it may count as another save now
        if not has_weights(job.storage, actor / HUGGINGFACE, save):
            with bar(folder.name) as progress:
                manifest = convert_step(job, save, merging, progress=progress)
            written = sum(file.size for file in manifest.files if is_weights_name(file.name))
            seconds = round(manifest.timings["build"], 3)
            result |= {"outcome": "converted", "bytes": written, "seconds": seconds}
            said += f", {size(written)} in {span(seconds)}"
    if lacks_config(job.storage, actor):
        said += f" (no {MODEL_CONFIG} there: give the base model's folder with --base-model-dir)"
    return result, f"step {step}: {result['outcome']}{printable(said)}"
