"""The sync policy: the settings both hooks share, and the decisions made from them. Pure.

Names and meanings come from Trinity-RFT's Synchronizer, Trainer and Explorer. Versions are compared
by sequence, never by step, because a trainer that resumes goes back in steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum, StrEnum
from numbers import Integral, Real
from typing import Final, Self, TypeVar

from syncd.protocol.errors import InvalidSettingsError, InvalidTransitionError

#: The names that users may rely on; the rest is for syncd itself.
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
    """Check that a participant may go from one status to another.

    Args:
        now: its status.
        status: its next status; may equal ``now`` if no old status is given.
        old_status: its status as the caller believes.

    Raises:
        InvalidTransitionError: it may not, or its present status is not ``old_status``.
    """
    if old_status is not None and old_status is not now:
        raise InvalidTransitionError(
            f"the status cannot go from {old_status} to {status}: it is {now}"
        )
    if status not in _NEXT[now] and not (status is now and old_status is None):
        raise InvalidTransitionError(
            f"the status cannot go from {now} to {status}: from there it goes to "
            f"{' or '.join(sorted(_NEXT[now]))}"
        )


class _Choice(StrEnum):
    """A setting's choices, with their aliases."""

    @classmethod
    def parse(cls, value: object, setting: str = "the choice") -> Self:
        """The choice with this name or alias, in upper or lower case.

        Args:
            value: the name.
            setting: which setting it is, for the message.

        Raises:
            InvalidSettingsError: there is no such choice.
        """
        name = value.lower() if isinstance(value, str) else str(value)
        name = _ALIASES.get(name, name)
        try:
            return cls(name)
        except ValueError:
            meant = get_close_matches(name, (*cls, *_ALIASES), n=1)
            hint = f"; did you mean {str(meant[0])!r}?" if meant else ""
            raise InvalidSettingsError(
                f"{setting} is {value!r}: it must be one of {', '.join(cls)}, or an older "
                f"name{hint}"
            ) from None


class SyncMethod(_Choice):
    """The way that weights travel.

    ``nccl`` (``online``): by a broadcast. ``checkpoint`` (``offline``): each rank writes its
    shards, the daemon merges them. ``memory``: rank 0 gathers the full state dict into one
    safetensors file, which the daemon links; on a tmpfs if all share a host.
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
    """The times for a trainer to sync and save, for an explorer to pull, and limits of waits.

    Attributes:
        method: how weights travel; a name or an alias.
        style: the side that decides; a name or an alias.
        sync_interval: steps between two syncs.
        trainer_sync_interval, explorer_sync_interval: the interval of one side; None =
            sync_interval.
        sync_offset: steps that explorers do before the first sync counts (a step-ahead pipeline).
        sync_timeout: seconds that anyone waits for the other side.
        save_interval: steps between two full checkpoints; 0 = none.
        save_timeout: seconds that rank 0 waits for all ranks' receipts before it gives up a save.
        max_staleness: steps that an explorer may lag before it must not produce; None = any.
        max_explorer_lag: steps that the slowest explorer may lag before the trainer waits for it;
            None = any.
        checkpoint_every: with method ``nccl``, every n-th sync is also saved by the checkpoint
            path, for late joiners.
        broadcast_timeout: seconds that a broadcast's handshake, its setup and its transfer may take
            each, before that step goes by the checkpoint path instead.
        broadcast_bucket: bytes of the buckets that a broadcast packs tensors into.
        broadcast_digests: whether explorers check a digest of each bucket; None = only if the
            weights are on the CPU.
        master_address: the address at which explorers reach rank 0 of the trainer; None = this
            host's.

    Raises:
        InvalidSettingsError: a value is out of its range, or there is no such method or style.
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
        """The settings that are possible, and a warning for the caller to log if they differ.

        Args:
            lora: whether the model is trained with LoRA.
            tinker: whether the trainer is remote and only gives paths.
            alone: whether there is no trainer, or no explorer (bench, serve, train alone).
        """
        reasons = {
            "with LoRA": lora,
            "with a Tinker trainer": tinker,
            "where one side is absent": alone,
        }
        why = [reason for reason, holds in reasons.items() if holds]
        if self.method is not SyncMethod.NCCL or not why:
            return self, None
        warning = f"method nccl cannot be used {' or '.join(why)}: it is changed to checkpoint"
        return replace(self, method=SyncMethod.CHECKPOINT), warning


#: A class of settings; every field has a default.
Given = TypeVar("Given")


def given_or_default(name: str, kind: type[Given], value: object) -> Given:
    """Settings that someone gave as an argument, or the defaults if that is None.

    Args:
        name: the name of the argument.
        kind: the class of the settings.
        value: the argument.

    Raises:
        InvalidSettingsError: it is neither None nor of that class.
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
        raise InvalidSettingsError(f"{name} is {value!r}: it must be a whole number, {needed}")


def check_step(step: object) -> None:
    """Check that the argument ``step`` of a hook's method is a training step.

    Raises:
        InvalidSettingsError: it is not a whole number, or below 0.
    """
    _check("step", step, 0, "the number of the training step, such as 2")


@dataclass(frozen=True, slots=True)
class TrainerDecision:
    """The actions of a trainer now.

    Attributes:
        sync: send the weights of this step to the explorers.
        full_save: write a full checkpoint. With ``sync`` under ``checkpoint``, both are one save.
        nothing_new: tell waiting explorers that nothing newer will come.
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
        step: the last finished step; at 0 nothing was trained yet.
        last_sync_step: the step that was synced last; None before the first.
        requested: whether a live explorer waits for an answer to its request for a sync.
        on_its_way: whether the daemon has yet to publish or refuse an announced save, which waiting
            explorers will get.
        waiting: whether the trainer waits for data: then a full checkpoint would help nobody.
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

    Never under ``fully_async``: there a thread in the background pulls.

    Args:
        settings: the settings of the job.
        step: the last step that it began.
    """
    if settings.style is SyncStyle.FULLY_ASYNC:
        return False
    since = step - settings.sync_offset
    return since > 0 and since % settings.explorer_interval == 0


def explorer_syncs(
    settings: SyncSettings, step: int, *, trainer_requires_sync: bool | None
) -> bool:
    """True if an explorer whose work in flight is finished syncs now.

    Args:
        settings: the settings of the job.
        step: the last step that it began.
        trainer_requires_sync: None if the trainer has stopped.
    """
    if not explorer_sync_is_due(settings, step):
        return False
    by_trainer = settings.style is SyncStyle.TRAINER_DRIVEN and settings.method is SyncMethod.NCCL
    return trainer_requires_sync is True if by_trainer else True


@dataclass(frozen=True, slots=True)
class Version:
    """A version that an engine serves: the sequence, which only grows, and the trainer's step.

    The sequence is 0 for a step that is evaluated without being a published version.
    """

    sequence: int
    step: int


class Pull(Enum):
    """An explorer's action on the newest version."""

    LOAD = "load"
    ADOPT = "adopt"
    NOTHING_NEW = "nothing new"


def pull_decision(held: Version | None, newest: Version | None) -> Pull:
    """The action on the newest version, given the version that is held.

    An engine begins with the weights of step 0, so a first version of that step is adopted without
    loading it. Among versions of one step, the higher sequence is newer; a lower one is never
    taken.

    Args:
        held: the version that the engine serves; None before its first.
        newest: the newest published version; None before the first.
    """
    if newest is None or (held is not None and newest.sequence <= held.sequence):
        return Pull.NOTHING_NEW
    return Pull.ADOPT if held is None and newest.step == 0 else Pull.LOAD


def may_produce(settings: SyncSettings, held: Version | None, newest: Version | None) -> bool:
    """True if an explorer is fresh enough to go on producing (``max_staleness``).

    Args:
        settings: the settings of the job.
        held: the version that its engine serves; None before its first.
        newest: the newest published version; None before the first.
    """
    return settings.max_staleness is None or _lag(held, newest) <= settings.max_staleness


def must_wait_for_explorers(
    settings: SyncSettings, newest: Version | None, held: Iterable[Version | None]
) -> bool:
    """True if the trainer waits for the slowest explorer (``max_explorer_lag``).

    Only published versions count: for anything else an explorer would wait for the trainer.

    Args:
        settings: the settings of the job.
        newest: the newest published version; None before the first.
        held: the version of each explorer that the trainer waits for.
    """
    most = settings.max_explorer_lag
    return most is not None and any(_lag(version, newest) > most for version in held)


def after_broadcast(held: Version, newest: Version) -> Version:
    """The version that an explorer counts as serving after a broadcast of the present run.

    If the newest version has that step or an earlier one, it brings nothing new.
    """
    return (
        Version(max(held.sequence, newest.sequence), held.step)
        if (held.step >= newest.step)
        else held
    )


def _lag(held: Version | None, newest: Version | None) -> int:
    """Steps by which a newer version is ahead, or a broadcast that came after the same version."""
    if held is not None and newest is not None and held.sequence == newest.sequence:
        return max(0, newest.step - held.step)
    if pull_decision(held, newest) is not Pull.LOAD or newest is None:
        return 0
    # At least one: after a trainer has resumed, a newer version may have a lower step.
    return max(1, newest.step - (held.step if held else 0))


K = TypeVar("K")


def unanswered(requests: Mapping[K, int], answered: Mapping[K, int]) -> set[K]:
    """The participants that have asked since their last answer.

    Args:
        requests: waiting participant → how often it has asked so far.
        answered: participant → how often it had asked at its last answer.
    """
    return {who for who, asked in requests.items() if asked > answered.get(who, 0)}
