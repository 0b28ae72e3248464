"""The ranks of a training: they agree, and rank 0 decides for all."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from syncd.coordination.broadcast.group_backends import within
from syncd.protocol.errors import (
    CheckpointError,
    OutOfStepError,
    SaveFailedError,
    SyncdError,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The longest timeout, in seconds. torch limits timeouts, and no training waits for longer.
_LONGEST: Final = 30 * 24 * 3600.0
#: Seconds between two checks of a meeting.
_POLL: Final = 0.05
#: Seconds after which a meeting names the ranks that are missing.
_WORD: Final = 10.0
#: All ranks make their hooks in the same order, so the number of a hook names its meeting.
_number = itertools.count()
#: Seconds that the store of the process group may take to answer.
_ANSWER: Final = 10.0
#: The outcome of a meeting that all ranks came to. Any other outcome is the reason of a failure.
_ALL: Final = "all"
#: Sent in place of the step if there is none.
_NO_STEP: Final = -1


class Due(IntFlag):
    """The actions that all ranks take now.

    - ``SYNC``: save the weights for explorers.
    - ``FULL``: save a full checkpoint. With ``SYNC``, both are one save, except if there is a
      memory folder.
    - ``COMPLETE``: with ``FULL``, extend the existing save of this step.
    - ``AGAIN``: like ``COMPLETE``, but also write the weights again, because files are missing.
    - ``HUGGING_FACE``: add the weights as a Hugging Face model to the full checkpoint. Without
      ``FULL``, add it to the existing full checkpoint of this step.
    - ``SYNC_SKIPPED``, ``FULL_SKIPPED``: the writer is busy, so the save stays due.
    - ``BROADCAST``: send the weights to the weight group. In the decision after a broadcast: the
      weights have arrived.
    - ``UNDECIDED``: rank 0 could not decide.
    - ``DELTA``: write only what changed since the newest save for explorers.
    - ``PROMISE``: with ``FULL``, plan how it will be loaded.
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
    DELTA = 512
    PROMISE = 1024


class Ranks:
    """The ranks of a process group; only this process if torch.distributed is not initialized."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._grouped else 0
        self.world_size = dist.get_world_size() if self._grouped else 1

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order. Collective; values are pickled."""
        if not self._grouped:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Run rank-local work. If the work fails on any rank, every rank raises an error.

        Raises:
            Exception: this rank's error, or else the first error of another rank: of its class if
                it is a :class:`SyncdError`, otherwise as a :class:`CheckpointError`.
        """
        result: T | None = None
        failure: tuple[type[SyncdError], str] | None = None
        raised: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - any error, because the other ranks must not wait
            kind = type(error) if isinstance(error, SyncdError) else CheckpointError
            raised, failure = error, (kind, str(error) or type(error).__name__)
        failures = self.gathered(failure)
        if raised is not None:
            raise raised
        for rank, other in enumerate(failures):
            if other is not None:
                raise other[0](f"rank {rank}: {other[1]}")
        return result  # type: ignore[return-value]  # nothing was raised, so work returned it

    def of_first(self, work: Callable[[], T]) -> T:
        """Return rank 0's result of ``work`` on all ranks, or raise its error on all ranks."""
        mine = self.together(lambda: work() if self.rank == 0 else None)
        return self.gathered(mine)[0]  # type: ignore[return-value]  # rank 0 has worked


class LedRanks(Ranks):
    """Ranks for which rank 0 decides.

    A separate gloo group sends the decisions, so they do not delay the training's messages. Rank 0
    waits for no rank. If rank 0 has died, the other ranks wait at most ``timeout`` seconds.
    ``save_timeout`` is the longest wait for ranks that must meet, in seconds.

    Raises:
        SaveFailedError: a rank did not make its hook within the ``save_timeout``.
    """

    def __init__(self, *, timeout: float, save_timeout: float) -> None:
        super().__init__()
        self._save_timeout = min(save_timeout, _LONGEST)
        announced = os.environ.get("WORLD_SIZE", "")
        if not self._grouped and announced.isdecimal() and int(announced) > 1:
            log.warning(
                "the environment has WORLD_SIZE=%s, but torch.distributed is not initialized, so "
                "this process saves as the only rank. If there are more ranks, call "
                "torch.distributed.init_process_group before you make the hook",
                announced,
            )
        if self.world_size > 1:
            if reason := self.meet(f"hook-{next(_number)}", act="make its hook"):
                raise SaveFailedError(f"{reason}. Make the hook on every rank, not on rank 0 alone")
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=min(timeout, _LONGEST))
            )
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def agree(self, decide: Callable[[], Due], *, step: int | None = None) -> Due:
        """Return rank 0's decision on all ranks; ``decide`` is called only on rank 0.

        Raises:
            SaveFailedError: on other ranks, if rank 0 could not decide or sent no decision.
            OutOfStepError: on other ranks, if rank 0 has another ``step``.
        """
        if self._group is None:
            return decide()
        if self.rank == 0:
            plan = Due.UNDECIDED
            try:
                plan = decide()
            finally:
                self._send(plan, step)
            return plan
        word = torch.zeros(2, dtype=torch.int64, device="cpu")
        try:
            dist.broadcast(word, src=0, group=self._group)
        except RuntimeError as error:
            raise SaveFailedError(
                f"rank 0 did not send its decision about what to save: {error}. Check whether "
                "rank 0 has ended"
            ) from error
        decided, first = word.tolist()
        if step is not None and first not in (step, _NO_STEP):
            raise OutOfStepError(
                f"rank 0 called the hook with step {first}, but rank {self.rank} with step "
                f"{step}. End this training, and call the hook with the same step on all ranks"
            )
        if Due(decided) & Due.UNDECIDED:
            raise SaveFailedError("rank 0 could not decide what to save. See the log of rank 0")
        return Due(decided)

    def wait_until_sent(self) -> None:
        """On rank 0, wait until all decisions are sent; warn if one takes too long."""
        failed: RuntimeError | None = None
        for work, _ in self._sent:
            try:
                work.wait(timedelta(seconds=self._save_timeout))
            except RuntimeError as error:
                failed = error
        self._sent = []
        if failed is not None:
            log.warning(
                "rank 0 cannot confirm that all ranks received its decisions about what to save: "
                "%s. Check whether another rank has ended, and call the hook on all ranks",
                failed,
            )

    def meet(self, name: str, *, act: str) -> str | None:
        """Wait until all ranks have called this method; return None, or the reason of a failure.

        The first outcome in the process group's store counts for all ranks, so no rank enters a
        collective alone. Use each ``name`` only once. ``act`` is what a missing rank did not do.
        """
        if self._has_lost_its_group():
            return "the process group was destroyed before close() was called"
        if self.world_size == 1:
            return None
        end = time.monotonic() + self._save_timeout
        try:
            outcome = within(end + _ANSWER, lambda: self._meet(name, end, act))
        except (RuntimeError, TimeoutError) as error:
            said = (str(error).strip() or "the store did not answer in time").splitlines()[0]
            return f"the store of the process group is out of reach: {said}"
        return None if outcome == _ALL else outcome

    def call_off(self, name: str, why: str) -> None:
        """Tell the other ranks that this rank will not call :meth:`meet`."""
        if self._group is None or self._has_lost_its_group():
            return
        store, end = self._store(name), time.monotonic() + _ANSWER
        with suppress(RuntimeError, TimeoutError):  # the other ranks wait in vain then
            within(end, lambda: store.compare_set("outcome", "", f"rank {self.rank} {why}"))

    def _meet(self, name: str, end: float, act: str) -> str:
        word = time.monotonic() + _WORD
        store, rank, world_size = self._store(name), self.rank, self.world_size
        store.set(f"{rank}", "")
        if store.add("come", 1) == world_size:
            store.compare_set("outcome", "", _ALL)
        while not store.check(["outcome"]):
            time.sleep(_POLL)
            now = time.monotonic()
            if now < min(word, end):
                continue
            word = math.inf
            late = ", ".join(f"{one}" for one in range(world_size) if not store.check([f"{one}"]))
            if late and now >= end:
                reason = f"rank {late} did not {act} within {self._save_timeout:g} s"
                store.compare_set("outcome", "", reason)
            elif late:
                log.warning("rank %s did not %s within %g s; waiting on", late, act, _WORD)
        outcome: str = store.get("outcome").decode()
        read = store.add("read", 1)
        # Usually rank 0 holds the store, so rank 0 stays until all ranks have read it.
        while rank == 0 and outcome == _ALL and read < world_size and time.monotonic() < end:
            time.sleep(_POLL)
            read = store.add("read", 0)
        return outcome

    def _store(self, name: str) -> Store:
        store = _get_default_store()
        return dist.PrefixStore(f"syncd/{name}", store)  # type: ignore[attr-defined] # public

    def _has_lost_its_group(self) -> bool:
        if not (self._grouped and dist.is_initialized()):
            return self._grouped
        try:
            return self._group is not None and dist.get_group_rank(self._group, 0) < 0
        except ValueError:
            return True  # another group has replaced it

    def _send(self, plan: Due, step: int | None) -> None:
        told = [plan.value, _NO_STEP if step is None else step]
        word = torch.tensor(told, dtype=torch.int64, device="cpu")
        # The sent memory must stay unchanged until it has arrived.
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        try:
            work = dist.broadcast(word, src=0, group=self._group, async_op=True)
        except RuntimeError as error:
            # If a rank has died, the save reports that, because the rank's receipt is missing.
            log.warning(
                "rank 0 could not send its decision about what to save: %s. Check whether another "
                "rank has ended",
                error,
            )
        else:
            self._sent.append((work, word))
