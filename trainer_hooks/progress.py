"""The outcomes of saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncd.protocol.records import SaveId


@dataclass
class Progress:
    """The outcomes of saves; the writing thread records them, the training thread reads them.

    Only rank 0 knows which saves are announced. Each rank knows only its own failures. It needs no
    lock, because each access is one operation of a set or an attribute.

    Attributes:
        announced: the newest save whose weights explorers can get.
        checkpoint: the newest announced full checkpoint.
        without_hugging_face: full checkpoints to which the full weights could not be added.
    """

    announced: SaveId | None = None
    checkpoint: SaveId | None = None
    failed: set[SaveId] = field(default_factory=set)
    without_hugging_face: set[SaveId] = field(default_factory=set)
