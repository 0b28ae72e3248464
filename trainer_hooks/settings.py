"""``SaveSettings``: settings for writing and keeping saves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args

from syncd.checkpoint.tensor_rules import short_dtype
from syncd.protocol.errors import InvalidSettingsError

#: The dtypes that explorers' weights can be cast to.
SyncDtype = Literal["bf16", "fp16"]


class SaveLayout(StrEnum):
    """The files of a save's weights: one shard for each rank, or one full file."""

    SHARDED = "sharded"
    FULL = "full"


class WhenBusy(StrEnum):
    """The treatment of a save that is due while the previous save is still being written."""

    SKIP = "skip"
    WAIT = "wait"


class SaveAsHf(StrEnum):
    """The full checkpoints that also hold the weights as a Hugging Face model."""

    NEVER = "never"
    LAST = "last"
    ALWAYS = "always"


class SaveLora(StrEnum):
    """The weights that explorers get from a model with LoRA adapters (PEFT)."""

    AUTO = "auto"
    ADAPTER = "adapter"
    MERGED = "merged"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """Settings for writing and keeping saves. A choice can be given as text, e.g. ``"full"``.

    Attributes:
        layout: ``sharded``: each rank writes its own file, and nothing is gathered. ``full``: rank
            0 gathers all weights into host memory while training waits, and writes one file.
        when_busy_sync: the treatment of a sync that is due while the previous save is still being
            written. ``skip``: nothing is copied. The sync is counted as skipped, and stays due
            until a step at which the writer is free. ``wait``: training waits if two saves are
            unfinished.
        when_busy_full: like ``when_busy_sync``, but for full checkpoints.
        save_as_hf: which full checkpoints also have the full weights in ``actor/huggingface/``.
        max_to_keep: how many of the newest full checkpoints to keep; 0 = all.
        keep_every: also keep full checkpoints of steps that are multiples of this number; 0 = none.
        lora: the weights that explorers get from a model with PEFT adapters. ``adapter``: only the
            active adapter, in ``actor/lora_adapter/``. ``merged``: the full model with the adapter
            merged into it. ``auto``: the adapter if nothing else is trained, otherwise ``merged``.
            Rank 0 gathers these weights while training waits; ``layout`` is ignored.
        sync_dtype: the dtype to which floating tensors are cast for explorers; None to keep the
            model's dtypes. The cast gives the same bits as ``Tensor.to``. Integers and bool are not
            cast, what a model of transformers keeps in fp32 is fp32, and a quantized model is
            refused at its first save. Full checkpoints also keep the weights in the model's dtype,
            and training resumes only from these uncast weights.
        final: whether ``close`` saves the last step's weights, if they are not in files yet. Set it
            to False if the model no longer has these weights at ``close``.
        memory_dir: a second job directory for syncs, on a memory filesystem of rank 0's host; only
            with method ``memory``. Full checkpoints stay in the job directory.
        name: the name of the trainer; a job has one trainer.

    Raises:
        InvalidSettingsError: a value is out of range, or not one of the choices.
    """

    layout: SaveLayout = SaveLayout.SHARDED
    when_busy_sync: WhenBusy = WhenBusy.SKIP
    when_busy_full: WhenBusy = WhenBusy.WAIT
    save_as_hf: SaveAsHf = SaveAsHf.NEVER
    max_to_keep: int = 0
    keep_every: int = 0
    lora: SaveLora = SaveLora.AUTO
    sync_dtype: SyncDtype | None = None
    final: bool = True
    memory_dir: str | Path | None = None
    name: str = "trainer"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, StrEnum):
                kind = type(field.default)
                try:
                    object.__setattr__(self, field.name, kind(str(value).lower()))
                except ValueError:
                    raise InvalidSettingsError(
                        f"{field.name} is {value!r}: it must be {' or '.join(kind)}"
                    ) from None
            elif field.name == "sync_dtype":
                value = short_dtype(value)
                object.__setattr__(self, field.name, value)
                if value is not None and value not in get_args(SyncDtype):
                    raise InvalidSettingsError(
                        f"{field.name} is {value!r}: it must be "
                        f"{' or '.join(map(repr, get_args(SyncDtype)))}, or None for no cast"
                    )
            elif isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise InvalidSettingsError(f"{field.name} is {value!r}: it must be a bool")
            elif field.name == "memory_dir":
                if value is not None and not (isinstance(value, str | Path) and str(value)):
                    raise InvalidSettingsError(f"memory_dir is {value!r}: it must be a folder")
            elif field.default == 0 and (type(value) is not int or value < 0):
                raise InvalidSettingsError(f"{field.name} is {value!r}: it must be 0 or more")
