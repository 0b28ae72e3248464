"""Observations: a job at one moment, as the daemon knows and sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from syncd.checkpoint.save import Save, WholeSave
from syncd.daemon.chains import Chain, DeltaSeen
from syncd.protocol.records import SaveOutcome, Tip
from syncd.protocol.requests import Pause, RollbackRequest


class PointerState(Enum):
    """The states of a pointer file."""

    STEP = "names a step"
    MISSING = "is not there"
    EMPTY = "is empty"
    TORN = "is not a number"
    UNREADABLE = "cannot be read"
    NEGATIVE = "is negative: no step yet"


@dataclass(frozen=True)
class Pointer:
    """The content of a pointer file. ``why`` is the error if the file cannot be read."""

    state: PointerState
    step: int | None = None
    why: str = ""


@dataclass(frozen=True)
class LeaseSeen:
    """A lease, of the explorer with this ``session`` if syncd made it.

    ``dead_for``: seconds since the session was found dead; None if it is not dead.
    """

    sequence: int
    marker: str
    dead_for: float | None
    session: str = ""


@dataclass(frozen=True)
class StepSeen:
    """A step folder with a recorded outcome of its last save.

    Attributes:
        found: the identity of the save in the folder now; None if that save is not complete, or if
            the folder cannot be pruned anyway.
        has_receipts: True if syncd's hook wrote the save.
        full, retired, saving, pinned: True if the folder has the mark of this name.
        resumable: True if the folder holds more than weights, so that training may resume from it.
        unread: True if the daemon must still read the save's ``.metadata`` to set the outcome's
            ``model_only``. Until then ``resumable`` is True.
    """

    step: int
    outcome: SaveOutcome
    found: str | None
    has_receipts: bool
    full: bool
    retired: bool
    saving: bool
    resumable: bool
    critic: bool
    pinned: bool = False
    unread: bool = False


@dataclass(frozen=True)
class Known:
    """The daemon's own knowledge of a job.

    Attributes:
        latest: LATEST's sequence; 0 before the first version.
        published_save: the identity of the save that LATEST was made from; a rollback keeps it.
        outcomes: of each step's last save.
        served_request: the id of the rollback request that LATEST results from, if any.
        full_bytes, nonfinite: the bytes of LATEST's files, and its tensors with NaN or Inf.
        sessions: of participants to judge, beside those with a lease or a build → what names them.
        save_id: the save of LATEST's version.
        tip, no_deltas: as in LATEST; ``no_deltas`` is also set while LATEST is a rollback.
        making: the save that is merged beside the loop, if any.
        takes_tips: True if a live explorer follows whole saves, and the settings allow it.
        untaken: the identity, or the run, of the last save that must be merged to be served.
        preparing: the whole save that is prepared beside the loop, if any.
        must_fold: True if a live explorer cannot follow the tip now, a fold has begun, or all
            serve the whole save that the tip rests on, or it is due.
        may_fold: False if a delta to the tip is damaged.
        in_use: the numbers of deltas that are folded or fetched.
    """

    latest: int = 0
    published_save: str | None = None
    outcomes: Mapping[int, SaveOutcome] = field(default_factory=dict)
    served_request: str | None = None
    full_bytes: int | None = None
    nonfinite: int = 0
    sessions: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    save_id: str | None = None
    tip: Tip | None = None
    no_deltas: bool = False
    making: WholeSave | None = None
    takes_tips: bool = False
    untaken: str = ""
    preparing: WholeSave | None = None
    must_fold: bool = False
    may_fold: bool = False
    in_use: Collection[int] = ()


@dataclass(frozen=True, kw_only=True)
class Observation(Known):
    """A job at one moment: what the daemon knows, and what it sees.

    Attributes:
        pointer: the pointer that names the step to publish.
        checkpoint: the pointer that names the step to resume from.
        instead: a hint if ``pointer`` is missing: the other pointer, or a subfolder like a job.
        save: the save that ``pointer`` names, if any.
        save_still_for: seconds since ``save`` was first seen in its present state.
        lease_folders: the sequences of versions that can be leased.
        unrecorded: complete saves of steps below the pointer, without a recorded outcome.
        vanished: steps with a recorded outcome but without a folder.
        benched: the steps that explorers build or evaluate.
        announced_step: the step that the trainer began to save last; None without its report, 0
            if the report names no step or is unreadable.
        living: the sessions with a heartbeat, of those that have a lease, a build or a report.
        chain: the chain back from the pointer's save.
        deltas_to: the deltas above LATEST's version that lead to each save, oldest first. The first
            one's base is that version's save, or it is a whole save itself.
        outcome: of the pointer's save, if any.
    """

    pointer: Pointer
    checkpoint: Pointer = Pointer(PointerState.MISSING)
    instead: str = ""
    save: Save | None = None
    save_still_for: float = 0.0
    versions: tuple[int, ...] = ()
    deltas: tuple[DeltaSeen, ...] = ()
    lease_folders: tuple[int, ...] = ()
    leases: tuple[LeaseSeen, ...] = ()
    steps: tuple[StepSeen, ...] = ()
    unrecorded: tuple[Save, ...] = ()
    vanished: tuple[int, ...] = ()
    benched: frozenset[int] = frozenset()
    announced_step: int | None = None
    living: Collection[str] = ()
    pause: Pause | None = None
    rollbacks: Sequence[RollbackRequest] = ()
    chain: Chain = field(default_factory=Chain)
    deltas_to: Mapping[str, Sequence[DeltaSeen]] = field(default_factory=dict)
    outcome: str = ""

    @property
    def no_step(self) -> str:
        """Why the pointer names no step."""
        why = self.pointer.why and f": {self.pointer.why}"
        return self.pointer.state.value + why + (self.instead and f", but {self.instead}")
