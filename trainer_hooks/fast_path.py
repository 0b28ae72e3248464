"""Weights by broadcast (method ``nccl``), or by the files: which sync goes how, and its sending."""

from __future__ import annotations

import logging
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import torch

from syncd.coordination.broadcast import WeightGroup
from syncd.protocol.errors import BroadcastError, OutOfStepError, SaveFailedError, SyncdError
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import SaveId
from trainer_hooks.agreement import Ranks
from trainer_hooks.broadcast import WeightSender
from trainer_hooks.explorers import Explorers

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

#: Syncs that go by the files, at most, between two broadcasts that fail.
_LONGEST_BACK_OFF: Final = 15


class Way(Enum):
    """How the weights of a sync travel. ``FALLBACK``: by the files, in place of a broadcast."""

    BROADCAST = auto()
    FILES = auto()
    FALLBACK = auto()
    NOT_AT_ALL = auto()


class Cadence:
    """Counts syncs: which may be tried by broadcast, and which are saved by the checkpoint path.

    After n broadcasts in a row that failed, the next 2**(n-1) - 1 syncs, at most 15, are not tried.

    Args:
        checkpoint_every: of so many syncs one is saved.
    """

    def __init__(self, checkpoint_every: int) -> None:
        self._checkpoint_every = checkpoint_every
        self._failures = 0
        self._not_tried = 0
        self._passed: int | None = None
        self._step: int | None = None

    @property
    def is_save_due(self) -> bool:
        """Whether this sync is to be saved, whether or not it was broadcast."""
        return self._passed is None or self._passed + 1 >= self._checkpoint_every

    def may_try(self) -> bool:
        """Whether this sync may be broadcast; each that may not brings the next try nearer."""
        if not self._not_tried:
            return True
        self._not_tried -= 1
        return False

    def failed(self) -> None:
        """A broadcast did not come to its end."""
        self._failures += 1
        self._not_tried = min(2 ** (self._failures - 1) - 1, _LONGEST_BACK_OFF)

    def succeeded(self) -> None:
        """A broadcast did."""
        self._failures = 0

    def passed(self, step: int) -> None:
        """The sync of a step was not saved."""
        if self._passed is not None and step != self._step:
            self._passed += 1
        self._step = step

    def saved(self, step: int) -> None:
        """The weights of a step were saved."""
        self._passed = 0
        self._step = step


class FastPath:
    """The broadcasts of a trainer: rank 0 opens them, all ranks send.

    Promised: no error of a broadcast ends a training; it is logged once, with its reason, and
    counted, and the step is for the files to carry. Not promised: that a training goes on where a
    collective of its own ranks fails.

    Args:
        model: whose weights are sent.
        settings: of the job.
        explorers: rank 0's; None on other ranks.

    Attributes:
        cadence: what rank 0 decides by.
        broadcasts, failures: how many there were, as far as this rank knows.
    """

    def __init__(
        self, model: nn.Module, settings: SyncSettings, explorers: Explorers | None
    ) -> None:
        self.cadence = Cadence(settings.checkpoint_every)
        self.broadcasts = 0
        self.failures = 0
        self._model = model
        self._explorers = explorers
        self._sender = WeightSender(
            model, bucket_bytes=settings.broadcast_bucket, digests=settings.broadcast_digests
        )
        self._group: WeightGroup | None = None

    def has_arrived(self, sent: SaveId | None, step: int) -> bool:
        """On rank 0: whether all who take broadcasts have had this step by one, and still do."""
        if sent is None or sent.step != step or self._explorers is None:
            return False
        return self._explorers.have_received(sent)

    def open(self, step: int, save_id: SaveId) -> Way:
        """On rank 0: how a sync travels; by broadcast where all who take part are ready for it."""
        explorers = self._explorers
        takers = explorers.takers() if explorers is not None else None
        if explorers is None or takers is None:
            return Way.FILES
        if not takers.working and not self.cadence.is_save_due:
            self.cadence.passed(step)
            return Way.NOT_AT_ALL
        if not takers.by_broadcast:
            return Way.FILES
        if not self.cadence.may_try():
            explorers.goes_by_files(step)
            return Way.FILES
        try:
            self._group = explorers.open_group(step, save_id, _device_of(self._model))
        except Exception as error:  # noqa: BLE001 - whatever it is, the files bring that step
            self._failed(step, error)
            explorers.goes_by_files(step)
            return Way.FALLBACK
        return Way.BROADCAST

    def send(self, step: int) -> bool:
        """Send the weights. Collective: to be called on all ranks, once rank 0 has opened.

        Returns:
            On rank 0, whether they have arrived at all who take part; on others, True.

        Raises:
            OutOfStepError: a gathering failed, it may be on this rank alone: the training's ranks
                may be out of step, and must not go on.
        """
        group, self._group = self._group, None
        try:
            self._sender.send(group)
        except Exception as error:
            self._failed(step, error)
            # Those two all ranks have alike, or rank 0 alone, which has left nobody waiting.
            is_alike = isinstance(error, BroadcastError | SaveFailedError)
            if not is_alike and Ranks().world_size > 1:
                raise OutOfStepError(
                    f"the weights could not be gathered for a broadcast: {error}; the ranks may "
                    "be out of step: end this training, and resume it"
                ) from error
            if self._explorers is not None:
                self._explorers.goes_by_files(step)
            return False
        if self._explorers is not None:
            self._explorers.transferred()
        self.cadence.succeeded()
        self.broadcasts += 1
        return True

    def close(self) -> None:
        """Let the buckets go. Safe to call twice."""
        self._sender.close()

    def _failed(self, step: int, error: Exception) -> None:
        log.warning(
            "step %d is not broadcast, and goes by the files: %s",
            step,
            error,
            exc_info=not isinstance(error, SyncdError),
        )
        self.cadence.failed()
        self.failures += 1
        if self._explorers is not None:
            self._explorers.group_failed()


def _device_of(model: nn.Module) -> torch.device:
    """Where the weights are, and so where they are broadcast from."""
    devices = (parameter.device for parameter in model.parameters())
    return next((one for one in devices if one.type != "meta"), torch.device("cpu"))
