"""Who syncs when: the settings both hooks share, and the decisions made from them. Pure.

The names and meanings are those of Trinity-RFT's Synchronizer, Trainer and Explorer. A version is
compared by its sequence, never by its step: a trainer that resumes goes back in steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Final, Self, TypeVar

from syncd.protocol.errors import InvalidSettingsError, InvalidTransitionError


class RunningStatus(StrEnum):
    """What a trainer or an explorer is doing."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"


#: What may come after each status: nobody requires a sync who is not running.
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
        now: what its status is.
        status: what it is to be; the same as now is fine where no old status is given.
        old_status: what the caller believes that it is.

    Raises:
        InvalidTransitionError: it may not, or the caller is wrong about what the status is.
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
    """A setting's choices, with the other names that they have."""

    @classmethod
    def parse(cls, value: str) -> Self:
        """The choice of a name or an alias, upper or lower case.

        Raises:
            InvalidSettingsError: there is no such choice.
        """
        name = value.lower()
        name = _ALIASES.get(name, name)
        try:
            return cls(name)
        except ValueError:
            raise InvalidSettingsError(
                f"{value!r} is none of {', '.join(cls)}, or their older names"
            ) from None


class SyncMethod(_Choice):
    """How weights travel.

    ``nccl`` (``online``): by a broadcast. ``checkpoint`` (``offline``): each rank writes its
    shards, the daemon merges them. ``memory``: rank 0 gathers the full state dict into one
    safetensors file, which the daemon links; on a tmpfs where all share a host.
    """

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(_Choice):
    """Who decides when weights travel."""

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
    """When a trainer syncs and saves, when an explorer pulls, and how long anyone waits.

    Attributes:
        method: how weights travel; a name or an alias of it will do.
        style: who decides; likewise.
        sync_interval: steps between two syncs.
        trainer_sync_interval, explorer_sync_interval: those of one side; None = sync_interval.
        sync_offset: steps that explorers do before the first sync counts (a step-ahead pipeline).
        sync_timeout: seconds that anyone waits for the other side.
        save_interval: steps between two full checkpoints; 0 = none.
        save_timeout: seconds that rank 0 waits for the receipts of all ranks before it gives a save
            up.
        max_staleness: steps that an explorer may lag before it must not produce; None = any.
        max_explorer_lag: steps that the slowest explorer may lag before the trainer waits for it;
            None = any.
        checkpoint_every: of method ``nccl``: of so many syncs one is saved by the checkpoint path
            too, for explorers that come late.
        broadcast_timeout: seconds that a broadcast's handshake, its setup and its transfer may take
            each, before that step goes by the checkpoint path instead.
        broadcast_bucket: bytes of the buckets that a broadcast packs tensors into.
        broadcast_digests: whether explorers check a digest of each bucket; None = where the weights
            are on the CPU.
        master_address: where explorers reach rank 0 of the trainer; None = this host's address.

    Raises:
        InvalidSettingsError: a value out of its range, or no such method or style.
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
        # Frozen for all but its own beginning.
        object.__setattr__(self, "method", SyncMethod.parse(self.method))
        object.__setattr__(self, "style", SyncStyle.parse(self.style))
        for name in ("sync_interval", "trainer_sync_interval", "explorer_sync_interval"):
            _check(name, getattr(self, name), 1, "1 or more steps")
        _check("checkpoint_every", self.checkpoint_every, 1, "1 or more syncs")
        _check("broadcast_bucket", self.broadcast_bucket, 1, "1 or more bytes")
        _check("save_interval", self.save_interval, 0, "0 (never) or more steps")
        for name in ("sync_offset", "max_staleness", "max_explorer_lag"):
            _check(name, getattr(self, name), 0, "0 or more steps")
        for name in ("sync_timeout", "save_timeout", "broadcast_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidSettingsError(
                    f"{name} is {getattr(self, name)}: it must be more than 0 seconds"
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
        """The settings that can be served, and why they are others, for the caller to log.

        Args:
            lora: whether the model is trained with LoRA.
            tinker: whether the trainer is a remote one that only gives paths.
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


def _check(name: str, value: int | None, least: int, needed: str) -> None:
    if value is not None and value < least:
        raise InvalidSettingsError(f"{name} is {value}: it must be {needed}")


@dataclass(frozen=True, slots=True)
class TrainerDecision:
    """What a trainer does now.

    Attributes:
        sync: let the weights of this step travel.
        full_save: write a full checkpoint. With ``sync`` under ``checkpoint``, both are one save.
        nothing_new: tell the explorers that wait that there is nothing newer to wait for.
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
    """What to do after ``step``, or while the trainer waits for data.

    Args:
        settings: of the job.
        step: the last step that is finished; nothing was trained at 0.
        last_sync_step: the step that was synced last; None before the first.
        requested: whether a live explorer requires a sync that was not answered yet.
        on_its_way: whether a save was announced that the daemon has neither published nor refused:
            whoever waits gets that one.
        waiting: whether the trainer waits for data: a full checkpoint is of no use to anyone then.
    """
    new = step > 0 and step != last_sync_step
    if settings.style is not SyncStyle.EXPLORER_DRIVEN:
        sync, nothing_new = new and step % settings.trainer_interval == 0, False
    elif settings.method is SyncMethod.NCCL:
        # Whoever asks waits for a transfer, and may never have had these weights.
        sync, nothing_new = requested, False
    else:
        sync = requested and new
        nothing_new = requested and not sync and not on_its_way
    due = step > 0 and settings.save_interval > 0 and step % settings.save_interval == 0
    return TrainerDecision(sync=sync, full_save=due and not waiting, nothing_new=nothing_new)


def explorer_sync_is_due(settings: SyncSettings, step: int) -> bool:
    """Whether an explorer is to finish its work in flight after ``step``, and then to sync.

    Never under ``fully_async``: a watcher behind the explorer pulls by itself.
    """
    if settings.style is SyncStyle.FULLY_ASYNC:
        return False
    since = step - settings.sync_offset
    return since > 0 and since % settings.explorer_interval == 0


def explorer_syncs(
    settings: SyncSettings, step: int, *, trainer_requires_sync: bool | None
) -> bool:
    """Whether an explorer whose work in flight is finished syncs now.

    Args:
        settings: of the job.
        step: the last step that it began.
        trainer_requires_sync: None where the trainer has stopped.
    """
    if not explorer_sync_is_due(settings, step):
        return False
    by_trainer = settings.style is SyncStyle.TRAINER_DRIVEN and settings.method is SyncMethod.NCCL
    return trainer_requires_sync is True if by_trainer else True


@dataclass(frozen=True, slots=True)
class Version:
    """What an engine serves: the sequence, which only grows, and the trainer's step."""

    sequence: int
    step: int


class Pull(Enum):
    """What an explorer does with the newest version."""

    LOAD = "load"
    ADOPT = "adopt"
    NOTHING_NEW = "nothing new"


def pull_decision(held: Version | None, newest: Version | None) -> Pull:
    """What to do with the newest version, by what is held.

    An engine begins with the weights of step 0: a first version of that step is adopted without
    being loaded. Of versions of one step, the higher sequence is newer; a lower one is never taken.

    Args:
        held: what the engine serves; None before its first version.
        newest: what is published; None before the first.
    """
    if newest is None or (held is not None and newest.sequence <= held.sequence):
        return Pull.NOTHING_NEW
    return Pull.ADOPT if held is None and newest.step == 0 else Pull.LOAD


def may_produce(settings: SyncSettings, held: Version | None, newest: Version | None) -> bool:
    """Whether an explorer is fresh enough to go on producing (``max_staleness``)."""
    return settings.max_staleness is None or _lag(held, newest) <= settings.max_staleness


def must_wait_for_explorers(
    settings: SyncSettings, newest: Version | None, held: Iterable[Version | None]
) -> bool:
    """Whether the trainer waits for the slowest explorer (``max_explorer_lag``).

    Only what is published counts: for anything else an explorer would wait for the trainer.
    """
    most = settings.max_explorer_lag
    return most is not None and any(_lag(version, newest) > most for version in held)


def after_broadcast(held: Version, newest: Version) -> Version:
    """What an explorer counts as serving whose weights came by a broadcast of the present run.

    Where the newest version is of the step that it has, or of one before, that brings nothing new.
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
    # At least one: after a trainer has resumed, what is newer may be of a lower step.
    return max(1, newest.step - (held.step if held else 0))


K = TypeVar("K")


def unanswered(requests: Mapping[K, int], answered: Mapping[K, int]) -> set[K]:
    """Who has asked since it was last answered.

    Args:
        requests: who requires a sync now → how often it has asked so far.
        answered: who → how often it had asked when it was answered last.
    """
    return {who for who, asked in requests.items() if asked > answered.get(who, 0)}
