"""``SaveSettings``: how saves are written, what happens while one is, and which are kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from syncd.protocol.errors import InvalidSettingsError


class SaveLayout(StrEnum):
    """In how many files the weights of a save are."""

    SHARDED = "sharded"
    FULL = "full"


class WhenBusy(StrEnum):
    """What a save does that is due while the one before it is still being written."""

    SKIP = "skip"
    WAIT = "wait"


class SaveAsHf(StrEnum):
    """Which full checkpoints have the weights as a Hugging Face model too."""

    NEVER = "never"
    LAST = "last"
    ALWAYS = "always"


class SaveLora(StrEnum):
    """What explorers get of a model with LoRA adapters (PEFT)."""

    AUTO = "auto"
    ADAPTER = "adapter"
    MERGED = "merged"


class WriteConcurrency(StrEnum):
    """How many ranks write at a time."""

    UNRESTRICTED = "unrestricted"
    PER_NODE = "per_node"
    ONE_AT_A_TIME = "one_at_a_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """How saves are written, and which are kept. A choice may be given by its name.

    Attributes:
        layout: ``sharded``: each rank its own file, nothing is gathered. ``full``: rank 0 gathers
            the weights into one safetensors file, tensor by tensor, while training waits.
        when_busy_sync: what a sync does that is due while the save before it is being written.
            ``skip``: nothing is copied, it is counted, and it stays due: the next step that finds
            the writer free saves. ``wait``: training waits, once two saves are under way.
        when_busy_full: the same for full checkpoints.
        save_as_hf: which full checkpoints have the full weights in ``actor/huggingface/``.
        max_to_keep: how many full checkpoints stay, the newest; 0 = all.
        keep_every: full checkpoints of steps that are multiples of this stay besides; 0 = none.
        write_concurrency: how many ranks write at a time, for storage that collapses under all of
            them: ``per_node``: one on each host. ``one_at_a_time``: in the order of the ranks.
        lora: of a model with PEFT adapters. ``adapter``: the active adapter alone, in
            ``actor/lora_adapter/``. ``merged``: the full model with the adapter merged into it.
            ``auto``: the adapter where it is all that is trained, else ``merged``. Either is
            gathered on rank 0 while training waits, whatever ``layout`` says.

    Raises:
        InvalidSettingsError: a value out of its range, or no such choice.
    """

    layout: SaveLayout = SaveLayout.SHARDED
    when_busy_sync: WhenBusy = WhenBusy.SKIP
    when_busy_full: WhenBusy = WhenBusy.WAIT
    save_as_hf: SaveAsHf = SaveAsHf.NEVER
    max_to_keep: int = 0
    keep_every: int = 0
    write_concurrency: WriteConcurrency = WriteConcurrency.UNRESTRICTED
    lora: SaveLora = SaveLora.AUTO

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, StrEnum):
                # Frozen for all but its own beginning.
                object.__setattr__(
                    self, field.name, _choice(field.name, type(field.default), value)
                )
            elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidSettingsError(f"{field.name} is {value!r}: it must be 0 or more")


def _choice(name: str, kind: type[StrEnum], value: object) -> StrEnum:
    try:
        return kind(str(value).lower())
    except ValueError:
        raise InvalidSettingsError(f"{name} is {value!r}: it must be {' or '.join(kind)}") from None
