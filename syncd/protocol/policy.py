"""The sync policy: the settings of both hooks, and the decisions that follow from them. Pure.

Names and meanings come from Trinity-RFT's Synchronizer, Trainer and Explorer. Versions are compared
by sequence, never by step, because a trainer that resumes may return to a lower step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum, StrEnum
from numbers import Integral, Real
from typing import Final, Self, TypeVar

from syncd.protocol.errors import InvalidSettingsError, InvalidTransitionError

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
    """Check that a participant may change its status.

    Args:
        now: the present status.
        status: the next status. The next status is allowed to equal ``now`` if no old status is
            given.
        old_status: the status that the caller believes to be the present status.

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
    """A setting's choices, with their aliases."""

    @classmethod
    def parse(cls, value: object, setting: str = "the choice") -> Self:
        """The choice with this name or alias, in upper or lower case.

        Args:
            value: the name or alias.
            setting: the name of the setting, for the error message.

        Raises:
            InvalidSettingsError: no choice has this name or alias.
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
      that file. The file may be on a tmpfs if all processes share a host.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """Settings: when a trainer syncs and saves, when an explorer pulls, and how long both wait.

    Attributes:
        method: the way in which weights travel; a name or an alias.
        style: the side that decides when to sync; a name or an alias.
        sync_interval: steps between two syncs.
        trainer_sync_interval, explorer_sync_interval: the interval of only the trainer or only the
            explorer; None = sync_interval.
        sync_offset: steps that explorers do before they count the steps of ``sync_interval`` (a
            step-ahead pipeline).
        sync_timeout: the most seconds that a trainer waits for explorers, or an explorer for the
            trainer.
        save_interval: steps between two full checkpoints; 0 = no full checkpoints.
        save_timeout: seconds that rank 0 waits for all ranks' receipts before it gives up a save.
        max_staleness: the most steps by which a producing explorer may lag behind the newest
            version; None = no limit.
        max_explorer_lag: the most steps by which the slowest explorer may lag before the trainer
            waits for this explorer; None = no limit.
        checkpoint_every: with method ``nccl``, every n-th sync also saves the weights by the
            checkpoint path, for late joiners.
        broadcast_timeout: the most seconds that each of three parts of a broadcast may take: the
            handshake, the setup and the transfer. If a part takes longer, the weights of the step
            travel by the checkpoint path.
        broadcast_bucket: the size in bytes of the buckets into which a broadcast packs tensors.
        broadcast_digests: True if explorers check a digest of each bucket; None = only if the
            weights are on the CPU.
        master_address: the address at which explorers reach rank 0 of the trainer; None = the
            address of this host.

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

    def __post_init__(self) -> None:
        # The class is frozen, except here.
        object.__setattr__(self, "method", SyncMethod.parse(self.method, "method"))
        object.__setattr__(self, "style", SyncStyle.parse(self.style, "style"))
        _check("sync_interval", self.sync_interval, 1, "1 or more steps")
        for name in ("trainer_sync_interval", "explorer_sync_interval"):
            _check(name, getattr(self, name), 1, "1 or more steps", or_none=True)
        _check("checkpoint_every", self.checkpoint_every, 1, "1 or more syncs")
        _check("broadcast_bucket", self.broadcast_bucket, 1, "1 or more bytes")
        _check("save_interval", self.save_interval, 0, "0 (never) or more steps")
        _check("sync_offset", self.sync_offset, 0, "0 or more steps")
        for name in ("max_staleness", "max_explorer_lag"):
            _check(name, getattr(self, name), 0, "0 or more steps", or_none=True)
        for name in ("sync_timeout", "save_timeout", "broadcast_timeout"):
            seconds = getattr(self, name)
            if not isinstance(seconds, Real) or not float(seconds) > 0:
                raise InvalidSettingsError(
                    f"{name} is {seconds!r}: it must be a number of seconds, more than 0"
                )

    @property
    def trainer_interval(self) -> int:
        """Steps between two syncs of the trainer."""
        return self.trainer_sync_interval or self.sync_interval

    @property
    def explorer_interval(self) -> int:
        """Steps between two syncs of an explorer."""
        return self.explorer_sync_interval or self.sync_interval

    def normalised(
        self, *, lora: bool = False, tinker: bool = False, alone: bool = False
    ) -> tuple[SyncSettings, str | None]:
        """These settings, but with method ``checkpoint`` if method ``nccl`` is impossible.

        Args:
            lora: True if the model is trained with LoRA.
            tinker: True if the trainer is remote and only gives paths.
            alone: True if there is no trainer or no explorer (bench, serve, train alone).

        Returns:
            The settings, and a warning for the caller to log. The warning is None if no setting was
            changed.
        """
        reasons = {
            "with LoRA": lora,
            "with a Tinker trainer": tinker,
            "without a trainer or an explorer": alone,
        }
        why = [reason for reason, holds in reasons.items() if holds]
        if self.method is not SyncMethod.NCCL or not why:
            return self, None
        warning = f"method nccl cannot be used {' or '.join(why)}: using method checkpoint"
        return replace(self, method=SyncMethod.CHECKPOINT), warning


#: A class of settings; every field has a default.
Given = TypeVar("Given")


def given_or_default(name: str, kind: type[Given], value: object) -> Given:
    """The settings that a user gave as an argument, or the defaults if the argument is None.

    Args:
        name: the name of the argument.
        kind: the class of the settings.
        value: the argument.

    Raises:
        InvalidSettingsError: ``value`` is neither None nor of the class ``kind``.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise InvalidSettingsError(
            f"{name} is a {type(value).__name__}: it must be a {kind.__name__}(...)"
        )
    return value


def _check(name: str, value: object, least: int, needed: str, *, or_none: bool = False) -> None:
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InvalidSettingsError(f"{name} is {value!r}: it must be a whole number ({needed})")


def check_step(step: object) -> None:
    """Check that the argument ``step`` of a hook's method is a training step.

    Raises:
        InvalidSettingsError: ``step`` is not a whole number, or is below 0.
    """
    _check("step", step, 0, "the number of the training step, such as 2")


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
    """The trainer's actions after ``step``, or while it waits for data.

    Args:
        settings: the settings of the job.
        step: the step that was finished most recently; 0 if nothing was trained yet.
        last_sync_step: the step that was synced most recently; None before the first sync.
        requested: True if a live explorer waits for an answer to its request for a sync.
        on_its_way: True if there is an announced save that the daemon has neither published nor
            refused yet. Waiting explorers will get that save.
        waiting: True if the trainer waits for data. In that case the decision never asks for a full
            checkpoint.
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

    With style ``fully_async`` the result is always False, because a background thread pulls.

    Args:
        settings: the settings of the job.
        step: the step that the explorer began most recently.
    """
    if settings.style is SyncStyle.FULLY_ASYNC:
        return False
    since = step - settings.sync_offset
    return since > 0 and since % settings.explorer_interval == 0


def explorer_syncs(
    settings: SyncSettings, step: int, *, trainer_requires_sync: bool | None
) -> bool:
    """True if an explorer that has no work in flight should sync now.

    Args:
        settings: the settings of the job.
        step: the step that the explorer began most recently.
        trainer_requires_sync: True if the status of the trainer is ``require_sync``; None if the
            trainer has stopped.
    """
    if not explorer_sync_is_due(settings, step):
        return False
    by_trainer = settings.style is SyncStyle.TRAINER_DRIVEN and settings.method is SyncMethod.NCCL
    return trainer_requires_sync is True if by_trainer else True


@dataclass(frozen=True, slots=True)
class Version:
    """A version that an engine serves: its sequence, which only grows, and the trainer's step.

    The sequence is 0 if the engine evaluates a step that was not published as a version.
    """

    sequence: int
    step: int


class Pull(Enum):
    """The action of an explorer on the newest version."""

    LOAD = "load"
    ADOPT = "adopt"
    NOTHING_NEW = "nothing new"


def pull_decision(held: Version | None, newest: Version | None) -> Pull:
    """The action of an explorer on the newest version.

    An engine begins with the weights of step 0. So if the first version is of step 0, the explorer
    adopts this version without loading its files. Among versions of one step, the version with the
    higher sequence is newer. An explorer never loads a version with a lower sequence than the
    version it holds.

    Args:
        held: the version that the engine serves; None before the engine's first version.
        newest: the newest published version; None if no version was published yet.
    """
    if newest is None or (held is not None and newest.sequence <= held.sequence):
        return Pull.NOTHING_NEW
    return Pull.ADOPT if held is None and newest.step == 0 else Pull.LOAD


def may_produce(settings: SyncSettings, held: Version | None, newest: Version | None) -> bool:
    """True if an explorer may go on producing with its version (``max_staleness``).

    Args:
        settings: the settings of the job.
        held: the version that the explorer serves; None before its first version.
        newest: the newest published version; None if no version was published yet.
    """
    return settings.max_staleness is None or _lag(held, newest) <= settings.max_staleness


def must_wait_for_explorers(
    settings: SyncSettings, newest: Version | None, held: Iterable[Version | None]
) -> bool:
    """True if the trainer waits for the slowest explorer (``max_explorer_lag``).

    Only published versions count. If unpublished weights counted too, the explorer and the trainer
    could wait for each other.

    Args:
        settings: the settings of the job.
        newest: the newest published version; None if no version was published yet.
        held: the version of each explorer that the trainer may have to wait for.
    """
    most = settings.max_explorer_lag
    return most is not None and any(_lag(version, newest) > most for version in held)


def after_broadcast(held: Version, newest: Version) -> Version:
    """The version to assume for an explorer that received a broadcast of the present run.

    Args:
        held: the sequence of the newest version whose files the explorer loaded, and the step of
            the broadcast.
        newest: the newest published version. If its step is not after the step of the broadcast,
            this version brings nothing new. In that case the result has the higher of the two
            sequences.
    """
    return (
        Version(max(held.sequence, newest.sequence), held.step)
        if (held.step >= newest.step)
        else held
    )


def _lag(held: Version | None, newest: Version | None) -> int:
    """The number of steps by which ``newest`` is ahead of ``held``.

    Even if the sequences are equal, the steps may differ, because a broadcast raises only the step.
    """
    if held is not None and newest is not None and held.sequence == newest.sequence:
        return max(0, newest.step - held.step)
    if pull_decision(held, newest) is not Pull.LOAD or newest is None:
        return 0
    # At least 1, because a newer version may have a lower step after a trainer has resumed.
    return max(1, newest.step - (held.step if held else 0))


K = TypeVar("K")


def unanswered(requests: Mapping[K, int], answered: Mapping[K, int]) -> set[K]:
    """The participants that have asked again since their last answer.

    Args:
        requests: waiting participant → the number of its requests so far.
        answered: participant → the number of its requests at its last answer.
    """
    return {who for who, asked in requests.items() if asked > answered.get(who, 0)}
