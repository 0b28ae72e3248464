"""Rank 0 decides, and all ranks do the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from enum import IntFlag
from typing import Any, Final

import torch
import torch.distributed as dist

from syncd.protocol.errors import SaveFailedError
from trainer_hooks.agreement import Ranks

log = logging.getLogger(__name__)

#: Seconds: what torch takes for a timeout has an upper bound, and no training waits for longer.
_LONGEST: Final = 30 * 24 * 3600.0


class Plan(IntFlag):
    """What all ranks do now.

    ``SYNC`` and ``FULL`` are one save, unless the sync goes to a memory folder. ``COMPLETE``: the
    full checkpoint is made of the save that this step has already. ``AGAIN``: the same, and its
    weights are written again. ``HUGGING_FACE``: with its full weights; without ``FULL``, beside a
    full checkpoint that is there. ``SYNC_SKIPPED``, ``FULL_SKIPPED``: it is due, and stays so,
    since the writer is busy. ``BROADCAST``: the weights are sent to the weight group that rank
    0 has opened; said after that, they have arrived. ``UNDECIDED``: rank 0 could not say.
    """

    NOTHING = 0
    SYNC = 1
    FULL = 2
    COMPLETE = 4
    HUGGING_FACE = 8
    SYNC_SKIPPED = 16
    FULL_SKIPPED = 32
    AGAIN = 64
    UNDECIDED = 128
    BROADCAST = 256


class Decisions:
    """The ranks of the default process group, and what rank 0 says to them.

    Over a gloo group of its own: nothing that the training sends waits behind it, and no
    accelerator takes part.

    Promised: :meth:`agree` is the same on all ranks. It is no barrier: rank 0 waits for nobody, the
    others for rank 0 (and, in gloo's tree, for the ranks between). Not promised: that it ends where
    rank 0 is gone before its time is over; a connection that was closed ends it at once.

    Args:
        timeout: seconds that the others wait for rank 0.

    Attributes:
        ranks: what they say to each other besides.
    """

    def __init__(self, *, timeout: float) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=min(timeout, _LONGEST))
            )
        self.ranks = Ranks(self._group)
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def agree(self, decide: Callable[[], Plan]) -> Plan:
        """What rank 0 decides.

        Args:
            decide: called on rank 0 alone.

        Raises:
            SaveFailedError: on other ranks: rank 0 did not decide.
        """
        if self._group is None:
            return decide()
        if self.ranks.rank == 0:
            plan = Plan.UNDECIDED
            try:
                plan = decide()
            finally:
                self._send(plan)
            return plan
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            dist.broadcast(word, src=0, group=self._group)
        except RuntimeError as error:
            raise SaveFailedError(
                f"rank 0 did not say what to save: {error}; is its process gone?"
            ) from error
        plan = Plan(int(word.item()))
        if plan & Plan.UNDECIDED:
            raise SaveFailedError("rank 0 could not decide what to save: see its log")
        return plan

    def _send(self, plan: Plan) -> None:
        word = torch.tensor([plan.value], dtype=torch.int64, device="cpu")
        # What is sent must stay where it is until it has arrived.
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        try:
            work = dist.broadcast(word, src=0, group=self._group, async_op=True)
        except RuntimeError as error:
            # Of a rank that is gone the save says so, which will miss its receipt.
            log.warning("not all ranks can be told what to save: %s", error)
        else:
            self._sent.append((work, word))
