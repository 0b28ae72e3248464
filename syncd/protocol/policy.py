"""Who syncs when: the settings both hooks share, and the decisions made from them. Pure.

The names and meanings are those of Trinity-RFT's Synchronizer. What is decided here today is the
``fixed`` style of the ``checkpoint`` method; the settings refuse what is not served yet, rather
than take it and do something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from syncd.protocol.errors import InvalidSettingsError


class RunningStatus(StrEnum):
    """What a trainer or an explorer is doing."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"


class SyncMethod(StrEnum):
    """How weights travel."""

    CHECKPOINT = "checkpoint"


class SyncStyle(StrEnum):
    """Who decides when weights travel."""

    FIXED = "fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """When a trainer syncs and saves, and how long anyone waits.

    Attributes:
        method: how weights travel.
        style: who decides.
        sync_interval: steps between two syncs.
        save_interval: steps between two full checkpoints; 0 = none.
        save_timeout: seconds that rank 0 waits for the receipts of all ranks before it gives a save
            up.

    Raises:
        InvalidSettingsError: an interval below its least value.
    """

    method: SyncMethod = SyncMethod.CHECKPOINT
    style: SyncStyle = SyncStyle.FIXED
    sync_interval: int = 1
    save_interval: int = 0
    save_timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.sync_interval < 1:
            raise InvalidSettingsError(
                f"sync_interval is {self.sync_interval}: it must be 1 or more steps"
            )
        if self.save_interval < 0:
            raise InvalidSettingsError(
                f"save_interval is {self.save_interval}: it must be 0 (never) or more steps"
            )
        if not self.save_timeout > 0:
            raise InvalidSettingsError(
                f"save_timeout is {self.save_timeout}: it must be more than 0 seconds"
            )


@dataclass(frozen=True, slots=True)
class TrainerDecision:
    """What a trainer does after a step. Both at once is one save."""

    sync: bool
    full_save: bool


def trainer_decision(
    settings: SyncSettings, *, step: int, last_sync_step: int | None
) -> TrainerDecision:
    """What to do after ``step``: a step is synced once, and saved in full when it is due."""
    return TrainerDecision(
        sync=step != last_sync_step and step % settings.sync_interval == 0,
        full_save=settings.save_interval > 0 and step % settings.save_interval == 0,
    )
