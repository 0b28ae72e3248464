"""Rank 0's communication with the explorers during training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from syncd.coordination.broadcast.offer import Takers
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.errors import BroadcastError, SaveFailedError, SyncdError
from syncd.protocol.policy import (
    RunningStatus,
    SyncSettings,
    SyncStyle,
    TrainerDecision,
    trainer_decision,
)
from syncd.protocol.records import SaveId

if TYPE_CHECKING:
    import torch

    from syncd.coordination.broadcast.group import WeightGroup

log = logging.getLogger(__name__)

T = TypeVar("T")


class Explorers:
    """Calls rank 0's Synchronizer so that storage errors do not end the training.

    The constructor and :meth:`begin_save` raise storage errors. The other methods log them, and the
    next call tries again.
    """

    def __init__(self, synchronizer: TrainerSynchronizer) -> None:
        self.synchronizer = synchronizer
        self._closed = False
        synchronizer.set_trainer_status(RunningStatus.RUNNING)

    def decide(
        self, settings: SyncSettings, *, step: int, last_sync_step: int | None, waiting: bool
    ) -> TrainerDecision:
        """Decide whether to sync; tell explorers if no new weights will come."""
        requested = on_its_way = False
        if settings.style is SyncStyle.EXPLORER_DRIVEN:
            asked = self._tried(self.synchronizer.explorer_requires_sync)
            coming = self._tried(self.synchronizer.save_is_on_its_way) if asked else None
            if asked is not None and coming is not None:
                requested, on_its_way = asked, coming
        due = trainer_decision(
            settings,
            step=step,
            last_sync_step=last_sync_step,
            requested=requested,
            on_its_way=on_its_way,
            waiting=waiting,
        )
        if due.nothing_new:
            self._tried(self.synchronizer.notify_no_new_model_state_dict)
        return due

    def begin_save(self, step: int) -> None:
        """Announce that a save begins, before its first byte is written.

        Raises:
            OSError: storage failed, so the save must not be written.
            NameTakenError: another trainer works in this job.
            SaveFailedError: this trainer has stopped.
        """
        if self._closed:
            raise SaveFailedError(f"step {step} is not saved, because this trainer has stopped")
        self.synchronizer.begin_save(step)

    def weights_announced(self, step: int) -> None:
        """Answer the explorers' requests: the pointer names the step."""
        self._tried(lambda: self.synchronizer.set_model_state_dict(None, step))

    def say_nothing_new(self) -> None:
        """Tell waiting explorers that no newer weights come."""
        self._tried(self.synchronizer.notify_no_new_model_state_dict)

    def takers(self) -> Takers | None:
        """The explorers that take broadcasts; None if storage fails."""
        return self._tried(self.synchronizer.takers)

    def have_received(self, save_id: SaveId) -> bool:
        """True if all receivers of broadcasts serve this save."""
        return self._tried(lambda: self.synchronizer.have_received(save_id)) is True

    def has_missed(self, save_id: SaveId) -> bool:
        """True if an explorer missed this broadcast and is too stale."""
        return self._tried(lambda: self.synchronizer.has_missed(save_id)) is True

    def open_group(self, step: int, save_id: SaveId, device: torch.device) -> WeightGroup:
        """Wait until all receivers are ready, and form the weight group.

        Raises:
            BroadcastError: an explorer is not ready in time, or the group cannot be formed.
        """
        synchronizer = self.synchronizer
        timeout = synchronizer.settings.broadcast_timeout
        agreed = self._tried(lambda: synchronizer.ready_to_nccl_sync(step, timeout=timeout))
        if agreed is None:
            raise BroadcastError(
                f"not all explorers were ready for the broadcast within {timeout:g} s"
            )
        try:
            return synchronizer.open_group(save_id, device)
        except BroadcastError:
            raise
        except (OSError, SyncdError) as error:
            raise BroadcastError(
                f"cannot announce the address of the weight group to explorers: {error}"
            ) from error

    def transferred(self) -> None:
        """Answer the explorers' requests: the broadcast weights have arrived."""
        self._tried(self.synchronizer.nccl_sync_succeeded)

    def group_failed(self) -> None:
        """Note that the next broadcast needs another weight group."""
        self._tried(self.synchronizer.group_failed)

    def goes_by_files(self, step: int) -> None:
        """Tell explorers that the weights of a step come as files."""
        self._tried(lambda: self.synchronizer.goes_by_files(step))

    def wait_for_slowest(self) -> None:
        """Wait while the slowest explorer lags too far."""
        self._tried(self.synchronizer.wait_for_explorers)

    def close(self) -> None:
        """Report that this trainer has stopped. Safe to call twice."""
        self._closed = True
        self.synchronizer.close()

    def _tried(self, work: Callable[[], T]) -> T | None:
        if self._closed:
            return None  # a save ended late; another trainer may have this name by now
        try:
            return work()
        except (OSError, SyncdError) as error:
            log.warning("cannot communicate with explorers now: %s", error)
            return None
