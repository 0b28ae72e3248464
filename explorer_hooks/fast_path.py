"""An explorer's part in broadcasts (method ``nccl``): join the group, and receive transfers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from explorer_hooks.engines.base import WeightTaker
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import BroadcastError, EngineMismatchError
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Rendezvous

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Weights of the save ``save_id`` that are about to arrive.

    ``take`` lets the engine receive them. It raises the errors of
    :meth:`~explorer_hooks.engines.base.WeightTaker.receive`.
    """

    save_id: SaveId
    take: Callable[[], None]


class ExplorerBroadcasts:
    """Lets one engine take part in transfers.

    Attributes:
        fits: False after a transfer whose tensors did not fit, until the engine has loaded a
            version.
        group: the weight group that the engine's workers are in, if any.
    """

    def __init__(self, sync: ExplorerSynchronizer, engine: WeightTaker) -> None:
        self.fits = True
        self.group: str | None = None
        self._sync = sync
        self._engine = engine
        self._deadline = sync.settings.broadcast_timeout

    @property
    def workers(self) -> int:
        """The number of the engine's ranks in the weight group."""
        return self._engine.workers

    def meet(self, cancel: Cancellation) -> Transfer:
        """Wait for the group of the agreed broadcast."""
        rendezvous, rank_offset = self._sync.rendezvous(cancel=cancel)
        save_id = SaveId.parse(rendezvous.save_id)
        if save_id is None:
            raise BroadcastError(
                f"the announced save id is {rendezvous.save_id!r}, but a TrainerHook makes no such "
                "save ids"
            )
        return Transfer(save_id, lambda: self._take(rendezvous, rank_offset))

    def _take(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        group, self.group = self.group, None
        try:
            self._engine.receive(rendezvous, rank_offset, self._deadline)
        except BroadcastError as error:
            self.fits = not isinstance(error.__cause__, EngineMismatchError)
            raise
        if group != rendezvous.group_name:
            log.info("%s has joined weight group %s", self._sync.name, rendezvous.group_name)
        self.group = rendezvous.group_name

    def close(self) -> None:
        """Leave the weight group, without waiting for other members."""
        self.group = None
        self._engine.leave()
