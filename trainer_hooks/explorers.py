"""Rank 0's communication with the explorers during training."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.errors import BroadcastError, SaveFailedError, SyncdError
from syncd.protocol.records import SaveId

if TYPE_CHECKING:
    import torch

    from syncd.coordination.broadcast.group import WeightGroup

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def tried(
    method: Callable[Concatenate[TrainerSynchronizer, P], T],
) -> Callable[Concatenate[Explorers, P], T | None]:
    """Make a method of rank 0's Synchronizer log storage errors, and then return None."""

    @functools.wraps(method)
    def call(self: Explorers, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.synchronizer is None or self.is_closed:
            return None  # if a save ended late, another trainer may have this name by now
        try:
            return method(self.synchronizer, *args, **kwargs)
        except (OSError, SyncdError) as error:
            log.warning("cannot communicate with explorers now: %s", error)
            return None

    return call


@dataclass
class Explorers:
    """Calls rank 0's Synchronizer so that storage errors do not end the training.

    :meth:`begin_save` raises storage errors. The other methods log them and return None, and the
    next call tries again. For most of them see :class:`.TrainerSynchronizer`. The other ranks have
    no ``synchronizer``, so their calls do nothing.
    """

    synchronizer: TrainerSynchronizer | None = None
    is_closed: bool = False

    def begin_save(self, save_id: SaveId, base: SaveId | None) -> None:
        """Announce that a save begins, before its first byte is written.

        Raises:
            OSError: storage failed, so the save must not be written.
            NameTakenError: another trainer works in this job.
            SaveFailedError: this trainer has stopped.
        """
        if self.synchronizer is None:
            return
        if self.is_closed:
            raise SaveFailedError(
                f"step {save_id.step} is not saved, because this trainer has stopped"
            )
        self.synchronizer.begin_save(save_id.step, save_id, base)

    set_model_state_dict = tried(TrainerSynchronizer.set_model_state_dict)
    serve_resumed = tried(TrainerSynchronizer.serve_resumed)
    explorer_requires_sync = tried(TrainerSynchronizer.explorer_requires_sync)
    save_is_on_its_way = tried(TrainerSynchronizer.save_is_on_its_way)
    takes_deltas = tried(TrainerSynchronizer.takes_deltas)
    say_no_deltas = tried(TrainerSynchronizer.say_no_deltas)
    say_nothing_new = tried(TrainerSynchronizer.notify_no_new_model_state_dict)
    takers = tried(TrainerSynchronizer.takers)
    have_received = tried(TrainerSynchronizer.have_received)
    has_missed = tried(TrainerSynchronizer.has_missed)
    ready_to_nccl_sync = tried(TrainerSynchronizer.ready_to_nccl_sync)
    nccl_sync_succeeded = tried(TrainerSynchronizer.nccl_sync_succeeded)
    group_failed = tried(TrainerSynchronizer.group_failed)
    goes_by_files = tried(TrainerSynchronizer.goes_by_files)
    wait_for_explorers = tried(TrainerSynchronizer.wait_for_explorers)

    def open_group(self, save_id: SaveId, device: torch.device, timeout: float) -> WeightGroup:
        """Wait until all receivers are ready, and form the weight group.

        Raises:
            BroadcastError: an explorer is not ready within ``timeout`` seconds, or the group cannot
                be formed.
        """
        synchronizer = self.synchronizer
        if synchronizer is None or self.ready_to_nccl_sync(save_id.step, timeout=timeout) is None:
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

    def close(self) -> None:
        """Report that this trainer has stopped. Safe to call twice."""
        self.is_closed = True
        if self.synchronizer is not None:
            self.synchronizer.close()
