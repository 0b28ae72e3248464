"""The sync policy: the settings of both hooks, and pure functions that decide by them.

Names and meanings come from Trinity-RFT's Synchronizer, Trainer and Explorer. Versions are compared
by sequence, never by step, because a trainer that resumes may return to a lower step. Steps measure
only within a run (:func:`lag`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum, StrEnum
from numbers import Integral, Real
from typing import Final, Self, TypeVar

from syncd.protocol.errors import InvalidSettingsError, InvalidTransitionError
from syncd.protocol.records import Latest, Manifest, SaveId, Tip

#: The names that users may rely on; the other names are for syncd itself.
__all__ = [
    "Pull",
    "RunningStatus",
    "SyncMethod",
    "SyncSettings",
    "SyncStyle",
    "TrainerDecision",
    "Version",
    "explorer_sync_is_due",
    "explorer_syncs",
    "may_produce",
    "must_wait_for_explorers",
    "pull_decision",
    "trainer_decision",
]


class RunningStatus(StrEnum):
    """The status of a trainer or an explorer."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"


#: The statuses that may follow each one: only a running participant can require a sync.
_NEXT: Final = {
    RunningStatus.STOPPED: {RunningStatus.RUNNING},
    RunningStatus.RUNNING: {RunningStatus.REQUIRE_SYNC, RunningStatus.STOPPED},
    RunningStatus.REQUIRE_SYNC: {RunningStatus.RUNNING, RunningStatus.STOPPED},
}


def check_transition(
    now: RunningStatus, status: RunningStatus, old_status: RunningStatus | None = None
) -> None:
    """Check that a participant may go from status ``now`` to ``status``.

    ``old_status`` is the status that the caller expects as ``now``. If ``old_status`` is None,
    ``status`` is also allowed to equal ``now``.

    Raises:
        InvalidTransitionError: ``status`` cannot follow ``now``, or ``now`` is not ``old_status``.
    """
    if old_status is not None and old_status is not now:
        raise InvalidTransitionError(
            f"the status cannot go from {old_status} to {status}: the present status is {now}"
        )
    if status not in _NEXT[now] and not (status is now and old_status is None):
        raise InvalidTransitionError(
            f"the status cannot go from {now} to {status}, only to "
            f"{' or '.join(sorted(_NEXT[now]))}"
        )


class _Choice(StrEnum):
    @classmethod
    def parse(cls, value: object, setting: str = "the choice") -> Self:
        """The choice with this name or alias, ignoring case; the error names the ``setting``.

        Raises:
            InvalidSettingsError: no choice has the name or alias ``value``.
        """
        name = value.lower() if isinstance(value, str) else str(value)
        name = _ALIASES.get(name, name)
        try:
            return cls(name)
        except ValueError:
            meant = get_close_matches(name, (*cls, *_ALIASES), n=1)
            hint = f"; did you mean {str(meant[0])!r}?" if meant else ""
            raise InvalidSettingsError(
                f"{setting} is {value!r}: it must be one of {', '.join(cls)}, or an alias{hint}"
            ) from None


class SyncMethod(_Choice):
    """The way in which weights travel from the trainer to explorers.

    - ``nccl`` (or ``online``): by a broadcast.
    - ``checkpoint`` (or ``offline``): each rank writes its shards, and the daemon merges them.
    - ``memory``: rank 0 gathers the full state dict into one safetensors file, and the daemon links
      that file. If all processes share a host, the file can be on a tmpfs.
    """

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(_Choice):
    """The side that decides when weights travel."""

    FIXED = "fixed"
    TRAINER_DRIVEN = "trainer_driven"
    EXPLORER_DRIVEN = "explorer_driven"
    FULLY_ASYNC = "fully_async"


_ALIASES: Final[Mapping[str, str]] = {
    "online": "nccl",
    "offline": "checkpoint",
    "dynamic_by_trainer": "trainer_driven",
    "dynamic_by_explorer": "explorer_driven",
}


#: The whole numbers that begin at 1; all others begin at 0.
_FROM_1: Final = {
    "sync_interval",
    "trainer_sync_interval",
    "explorer_sync_interval",
    "checkpoint_every",
    "broadcast_bucket",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """Settings: when a trainer syncs and saves, when an explorer pulls, and how long both wait.

    Attributes:
        method: how weights travel: ``checkpoint`` (or ``offline``), ``memory``, ``nccl`` (or
            ``online``).
        style: who decides when to sync: ``fixed``, ``trainer_driven`` (or ``dynamic_by_trainer``),
            ``explorer_driven`` (or ``dynamic_by_explorer``), ``fully_async``.
        sync_interval: steps between two syncs.
        trainer_sync_interval, explorer_sync_interval: one side's own interval; None =
            ``sync_interval``.
        sync_offset: steps that explorers do before their first interval begins, for pipelines in
            which they run ahead.
        sync_timeout: the most seconds that trainer and explorers wait for each other.
        save_interval: steps between two full checkpoints; 0 = none.
        save_timeout: seconds that rank 0 waits for all ranks' receipts before it gives up a save.
        max_staleness: the most steps that an explorer may lag behind the newest save that LATEST
            names, and still produce rollouts; None = any. If the two saves are of different runs,
            the lag is the larger of the steps and the versions between them. Until a resumed
            trainer saves, it is the steps between the served save and the one it resumed from.
        max_explorer_lag: the trainer waits while the slowest live explorer lags by more steps,
            counted likewise, behind the newest save that LATEST names and it can serve; None = any.
            The save made last counts only once LATEST names it: to wait for it, call
            ``wait_served``.
        checkpoint_every: every n-th sync is also saved as files, for late joiners.
        broadcast_timeout: the most seconds for each of handshake, setup and transfer; after it,
            explorers load the step from files.
        broadcast_bucket: bytes of tensors that are sent together.
        broadcast_digests: explorers check a digest of each bucket; None = only if weights are sent
            from the CPU.
        master_address: the address at which explorers reach rank 0; None = this host's address.
        deltas: a trainer's save holds only what changed since the save before, if the daemon and an
            explorer can use that. Needs the extra ``deltas``.

    Raises:
        InvalidSettingsError: a value is out of its range, or is no known method or style.
    """

    method: SyncMethod = SyncMethod.CHECKPOINT
    style: SyncStyle = SyncStyle.FIXED
    sync_interval: int = 1
    trainer_sync_interval: int | None = None
    explorer_sync_interval: int | None = None
    sync_offset: int = 0
    sync_timeout: float = 3600.0
    save_interval: int = 0
    save_timeout: float = 300.0
    max_staleness: int | None = None
    max_explorer_lag: int | None = None
    checkpoint_every: int = 10
    broadcast_timeout: float = 120.0
    broadcast_bucket: int = 256 * 1024 * 1024
    broadcast_digests: bool | None = None
    master_address: str | None = None
    deltas: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value, least = each.name, getattr(self, each.name), int(each.name in _FROM_1)
            if isinstance(each.default, _Choice):
                # The class is frozen, except here.
                object.__setattr__(self, name, each.default.parse(value, name))
            elif isinstance(each.default, float):
                check_above_0(name, value, "seconds")
            elif isinstance(each.default, bool) and not isinstance(value, bool):
                raise InvalidSettingsError(f"{name} is {value!r}: it must be a bool")
            elif "int" in str(each.type) and (value is not None or each.default is not None):
                _check(name, value, least, f"{least} or more")

    @property
    def trainer_interval(self) -> int:
        """Steps between two syncs of the trainer."""
        return self.trainer_sync_interval or self.sync_interval

    @property
    def explorer_interval(self) -> int:
        """Steps between two syncs of an explorer."""
        return self.explorer_sync_interval or self.sync_interval

    def normalised(
        self, *, lora: bool = False, tinker: bool = False
    ) -> tuple[SyncSettings, str | None]:
        """These settings, but with method ``checkpoint`` if method ``nccl`` is impossible.

        Method ``nccl`` is impossible with LoRA (``lora``), and with a remote trainer that only
        gives paths (``tinker``).

        Returns:
            The settings, and a warning for the caller to log; None if no setting was changed.
        """
        reasons = {"with LoRA": lora, "with a Tinker trainer": tinker}
        why = [reason for reason, holds in reasons.items() if holds]
        if self.method is not SyncMethod.NCCL or not why:
            return self, None
        warning = f"method nccl cannot be used {' or '.join(why)}: using method checkpoint"
        return replace(self, method=SyncMethod.CHECKPOINT), warning


#: A class of settings; every field has a default.
Given = TypeVar("Given")


def given_or_default(name: str, kind: type[Given], value: object) -> Given:
    """The settings ``value``, or the defaults if ``value`` is None. ``name`` is for error messages.

    Raises:
        InvalidSettingsError: ``value`` is neither None nor of the class ``kind``.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise InvalidSettingsError(
            f"{name} is of type {type(value).__name__}: it must be a {kind.__name__}(...)"
        )
    return value


def _check(name: str, value: object, least: int, needed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InvalidSettingsError(f"{name} is {value!r}: it must be a whole number ({needed})")


def check_above_0(name: str, value: object, unit: str) -> None:
    """Raise InvalidSettingsError unless ``value`` is a number above 0, in ``unit``."""
    if not isinstance(value, Real) or not float(value) > 0:
        raise InvalidSettingsError(
            f"{name} is {value!r}: it must be a number of {unit}, more than 0"
        )


def check_step(step: object) -> None:
    """Raise InvalidSettingsError unless ``step`` is a whole number, 0 or more."""
    _check("step", step, 0, "the number of the training step, such as 2")


def check_timeout(timeout: object) -> None:
    """Raise InvalidSettingsError unless ``timeout`` is a number of seconds, or None."""
    if timeout is not None and not isinstance(timeout, Real):
        raise InvalidSettingsError(
            f"timeout is {timeout!r}: it must be a number of seconds, or None"
        )


@dataclass(frozen=True, slots=True)
class TrainerDecision:
    """The actions that a trainer must take now.

    Attributes:
        sync: send the weights of this step to the explorers.
        full_save: write a full checkpoint. With method ``checkpoint``, a sync and a full checkpoint
            of the same step are one save.
        nothing_new: tell waiting explorers that no newer weights will follow.
    """

    sync: bool
    full_save: bool
    nothing_new: bool = False


def trainer_decision(
    settings: SyncSettings,
    *,
    step: int,
    last_sync_step: int | None,
    requested: bool = False,
    on_its_way: bool = False,
    waiting: bool = False,
) -> TrainerDecision:
    """The trainer's actions after ``step``, or while the trainer waits for data.

    Args:
        settings: the settings of the job.
        step: the step that was finished last; 0 if nothing was trained yet.
        last_sync_step: the step that was synced last; None before the first sync.
        requested: True if a live explorer waits for an answer to its request for a sync.
        on_its_way: True if there is an announced save that the daemon has neither published nor
            refused yet. Waiting explorers will get that save.
        waiting: True if the trainer waits for data, so that no full checkpoint is due.
    """
    new = step > 0 and step != last_sync_step
    if settings.style is not SyncStyle.EXPLORER_DRIVEN:
        sync, nothing_new = new and step % settings.trainer_interval == 0, False
    elif settings.method is SyncMethod.NCCL:
        # The asking explorer waits for a transfer, and may never have had these weights.
        sync, nothing_new = requested, False
    else:
        sync = requested and new
        nothing_new = requested and not sync and not on_its_way
    due = step > 0 and settings.save_interval > 0 and step % settings.save_interval == 0
    return TrainerDecision(sync=sync, full_save=due and not waiting, nothing_new=nothing_new)


def explorer_sync_is_due(settings: SyncSettings, step: int) -> bool:
    """True if an explorer should finish its work in flight after ``step``, and then sync.

    ``step`` is the step that the explorer began last. With style ``fully_async`` of ``settings``
    the result is always False, because a background thread pulls.
    """
    if settings.style is SyncStyle.FULLY_ASYNC:
        return False
    since = step - settings.sync_offset
    return since > 0 and since % settings.explorer_interval == 0


def explorer_syncs(
    settings: SyncSettings, step: int, *, trainer_requires_sync: bool | None
) -> bool:
    """True if an explorer that has no work in flight should sync now.

    ``settings`` and ``step`` are as in :func:`explorer_sync_is_due`. ``trainer_requires_sync``
    is True if the trainer's status is ``require_sync``; None if the trainer has stopped.
    """
    if not explorer_sync_is_due(settings, step):
        return False
    by_trainer = settings.style is SyncStyle.TRAINER_DRIVEN and settings.method is SyncMethod.NCCL
    return trainer_requires_sync is True if by_trainer else True


@dataclass(frozen=True, slots=True)
class Version:
    """A version that an engine serves: its sequence, which only grows, and the trainer's step.

    The sequence is 0 if the engine evaluates a step that was not published as a version. Two
    versions are equal whatever their ``save_id``, which is None if it is not known. ``is_first`` if
    this version was found in a job that took the place of the explorer's job.
    """

    sequence: int
    step: int
    save_id: str | None = field(default=None, compare=False, repr=False)
    is_first: bool = field(default=False, compare=False, repr=False)

    @classmethod
    def of(cls, named: Latest | Tip | Manifest) -> Self:
        """The version in a record."""
        return cls(named.sequence, named.step, named.save_id)

    def is_same(self, other: Version) -> bool:
        """True unless the sequences, the steps or the known saves differ, as in another job."""
        saves = {self.save_id, other.save_id} - {None}
        return self == other and len(saves) < 2

    @property
    def run(self) -> str | None:
        """The run id of the trainer that saved it; None if it is not known."""
        saved = SaveId.parse(self.save_id or "")
        return saved.run if saved else None


class Pull(Enum):
    """The action of an explorer on the newest version."""

    LOAD = "load"
    ADOPT = "adopt"
    NOTHING_NEW = "nothing new"


def pull_decision(held: Version | None, newest: Version | None) -> Pull:
    """The action of an explorer on the newest version.

    An explorer never loads a lower sequence than it holds, except of another job. ``ADOPT`` means
    that the explorer need not load its first version: the version has step 0, and the engine began
    with these weights. An ``ExplorerHook`` loads this version nevertheless. ``held`` is None before
    the engine's first version; ``newest`` is None before any publication.
    """
    if held is not None and newest is not None and newest.is_first and not newest.is_same(held):
        return Pull.LOAD
    if newest is None or (held is not None and newest.sequence <= held.sequence):
        return Pull.NOTHING_NEW
    return Pull.ADOPT if held is None and newest.step == 0 else Pull.LOAD


def may_produce(
    settings: SyncSettings,
    held: Version | None,
    newest: Version | None,
    *,
    resumed: Version | None = None,
) -> bool:
    """True if an explorer may go on producing with its version (``settings.max_staleness``).

    ``held`` is None before the explorer's first version; ``newest`` is None before any publication.
    ``resumed`` is the save from which a live trainer has resumed, until it saves itself.
    """
    most = settings.max_staleness
    return most is None or lag(held, newest, resumed=resumed) <= most


def must_wait_for_explorers(
    settings: SyncSettings, newest: Version | None, held: Iterable[Version | None]
) -> bool:
    """True if the trainer must wait for the slowest explorer (``settings.max_explorer_lag``).

    ``held`` has the versions of the explorers to wait for. ``newest`` must be one that they
    can load, or the trainer would wait for ever.
    """
    most = settings.max_explorer_lag
    return most is not None and any(lag(version, newest) > most for version in held)


def after_broadcast(held: Version, newest: Version) -> Version:
    """The version to assume for an explorer that received a broadcast of the present run.

    ``held`` has the broadcast's step, and the newest sequence whose files the explorer loaded. If
    ``newest`` is of an earlier run, or has no later step, the explorer lacks nothing, so the result
    is ``newest``.
    """
    return held if _is_later(newest, held) else newest


def with_sent(newest: Version, run: str, step: int) -> Version:
    """The newest weights, if the trainer's ``run`` has also sent those of ``step``.

    They count as one version more if LATEST's are of an earlier run.
    """
    sent = Version(newest.sequence + (newest.run != run), step, str(SaveId(run, step, 0)))
    return newest if _is_later(newest, sent) else sent


def _is_later(published: Version, sent: Version) -> bool:
    return published.run == sent.run and published.step > sent.step


def lag(held: Version | None, newest: Version | None, *, resumed: Version | None = None) -> int:
    """The steps by which an explorer's weights lag behind the newest ones.

    Within a run these are its steps. Between saves of different runs, or of unknown ones, steps are
    only labels, and the lag is the larger of the difference in steps and the number of versions.

    Args:
        held: what the explorer serves; None before its first version. After a broadcast an old
            sequence has a new step, perhaps of a new run.
        newest: the newest save that LATEST names, which never lags; None before any publication.
        resumed: the save from which a live trainer has resumed, if it has not saved yet. It counts
            instead of ``newest``. Its sequence does not count.
    """
    step, run = (held.step, held.run) if held else (0, None)
    if resumed is not None:
        known = held and (held.save_id if resumed.run is None else run)
        return max(abs(resumed.step - step), int(known != (resumed.run or resumed.save_id)))
    if newest is None:
        return 0
    ahead = newest.step - step
    if held is None:
        return max(1, ahead)
    versions = newest.sequence - held.sequence
    if run is not None and run == newest.run:
        # At least 1 for a newer version, because a rollback may have a lower step. One that no
        # longer follows the tip can serve a version above LATEST.
        return 0 if versions < 0 else max(ahead, min(versions, 1))
    if versions == 0 and None in {run, newest.run}:  # else the lost one of a restored copy
        return max(0, ahead)
    return max(abs(ahead), versions, 1)


K = TypeVar("K")


def unanswered(requests: Mapping[K, int], answered: Mapping[K, int]) -> set[K]:
    """The participants with more ``requests`` than were ``answered``."""
    return {who for who, asked in requests.items() if asked > answered.get(who, 0)}
