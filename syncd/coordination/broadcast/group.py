"""The weight group of the trainer's rank 0 and all explorers' workers.

A weight group is a process group with its own TCPStore, and disturbs no other process group.
Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from syncd.coordination.broadcast.group_backends import (
    connect,
    in_words,
    make_backend,
    release,
    serve,
    torch_time,
    within,
)
from syncd.protocol.errors import BroadcastError
from syncd.protocol.reports import Rendezvous

if TYPE_CHECKING:
    import socket

    from torch import Tensor
    from torch._C._distributed_c10d import Store

_YES: Final = "yes"
#: The most seconds between two checks for the end of a broadcast.
_LOOK: Final = 0.001
#: Seconds after the deadline to read the decision that was made at the deadline.
_GRACE: Final = 1.0


@dataclass
class Broadcasting:
    """A broadcast in progress.

    Attributes:
        wait: waits until the tensor can be used again (rank 0) or has arrived (other ranks).
    """

    wait: Callable[[], None]


@dataclass
class WeightGroup:
    """One rank's membership in one generation of a weight group; made by :meth:`join`.

    In a transfer all ranks do the same broadcasts in the same order, and then call :meth:`agree`.
    Tensors have the right content only if :meth:`agree` returns True.

    No call waits longer than the transfer's deadline plus one second. A BroadcastError ends the
    group for this rank; the other ranks end the group at their own deadlines.

    Any process that can reach the store can take part, as in any torch.distributed job.

    Only one thread at a time may call methods; any thread may call :meth:`close`.
    """

    rendezvous: Rendezvous
    rank: int
    backend: Any
    stores: list[Store]
    deadline: float
    device: torch.device

    def __post_init__(self) -> None:
        self.world_size = self.rendezvous.world_size
        self.generation = self.rendezvous.generation
        self.name = self.rendezvous.group_name
        self._deadline = time.monotonic() + self.deadline
        self._unfinished: list[dist.Work] = []
        self._agreements = 0
        self._failure: str | None = None
        self._lock = threading.Lock()

    @classmethod
    def join(
        cls,
        rendezvous: Rendezvous,
        rank: int,
        *,
        deadline: float,
        device: torch.device,
        listening: socket.socket | None = None,
    ) -> WeightGroup:
        """Form the group together with all other ranks, and begin a transfer.

        ``deadline`` is a number of seconds. It begins anew for each transfer. For ``nccl``
        the device must be a GPU. Only rank 0 gives ``listening``, a socket for :func:`.serve`.

        Raises:
            BroadcastError: not all ranks connected in time, or the group cannot be formed.
        """
        if not 0 <= rank < rendezvous.world_size:
            raise BroadcastError(
                f"there is no rank {rank} in a weight group of {rendezvous.world_size} ranks"
            )
        end = time.monotonic() + deadline
        where = f"{rendezvous.address} port {rendezvous.port}"

        servers: list[Store] = []

        def form() -> tuple[Any, Store]:
            # Two, because a call that waits on a connection blocks all other calls on it.
            ours, theirs = (connect(rendezvous, deadline) for _ in range(2))
            backend = make_backend(rendezvous, rank, theirs, deadline=deadline, device=device)
            return backend, ours

        try:
            if listening is not None:
                servers.append(serve(rendezvous, listening, deadline))
            backend, store = within(end + _GRACE, form)
            return cls(
                rendezvous, rank, backend, [store, *servers], deadline=deadline, device=device
            )
        except TimeoutError:
            raise BroadcastError(
                f"the weight group {rendezvous.group_name} was not formed at {where} within "
                f"{deadline:g} s: not all of its {rendezvous.world_size} ranks connected, or a "
                "rank stopped"
            ) from None
        except (RuntimeError, OSError, ValueError) as error:
            raise BroadcastError(
                f"the weight group {rendezvous.group_name} cannot be formed at {where}: "
                f"{in_words(error)}"
            ) from error
        finally:
            servers.clear()  # frees the port if forming failed, even if the caller keeps the error

    @property
    def has_failed(self) -> bool:
        """True if the group has failed or is closed."""
        return self._failure is not None

    def begin(self) -> None:
        """Begin a transfer, with a new deadline."""
        self._deadline = time.monotonic() + self.deadline

    def broadcast(self, tensor: Tensor) -> Broadcasting:
        """Begin to broadcast a tensor from rank 0.

        The tensor must be uint8, contiguous, on the group's device, and equally long on all ranks.
        Do not read or change the tensor until :meth:`Broadcasting.wait` has returned.
        """
        self._check()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = torch_time(self._left())
        try:
            work = self.backend.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._fail(f"a broadcast failed: {in_words(error)}") from error
        self._unfinished.append(work)
        return Broadcasting(lambda: self._finish(work))

    def agree(self, ok: bool) -> bool:
        """Tell the other ranks if all weights arrived here; learn if they arrived at all ranks.

        All ranks that get an answer get the same answer. Rank 0 gets True only after all other
        ranks got True.

        Raises:
            BroadcastError: not all ranks answered within the transfer's deadline, or the store is
                gone. This rank does not know the outcome, and must not use the weights.
        """
        self._check()
        key = f"agree/{self._agreements}"
        self._agreements += 1
        store = self.stores[0]
        try:
            verdict, late = within(
                self._deadline + _GRACE,
                # A rank that was paused until the deadline must not say yes: the others gave up.
                lambda: self._decide(store, key, ok=ok and self._left() > 0),
            )
            if not verdict and self._left() <= 0:
                raise self._fail(
                    f"{self._named(late)} did not confirm in time that all weights arrived"
                )
            if not verdict:
                return False
            if self.rank:
                store.set(f"{key}/read/{self.rank}", _YES)
                return True
            within(self._deadline + _GRACE, lambda: self._wait_for_readers(store, key))
        except TimeoutError:
            raise self._fail(
                "this rank could not read the outcome of the broadcast before the "
                "deadline: the trainer's host is stopped or unreachable"
            ) from None
        except RuntimeError as error:
            raise self._fail(
                f"not all ranks have read the outcome of the broadcast: {in_words(error)}"
            ) from error
        return True

    def close(self) -> None:
        """Leave the group, without waiting for anybody. Safe to call twice."""
        with self._lock:
            self._failure = self._failure or "the group was closed"
            backend, self.backend = self.backend, None
            self.stores.clear()  # rank 0's store frees its port with its last reference
        if backend is not None:
            backends = [backend]
            del backend  # the last reference goes in the background
            release(backends, self._unfinished)

    def _finish(self, work: dist.Work) -> None:
        """Wait by polling, so that signals are handled and torch's timeouts do not matter."""
        self._check()
        pause = 0.0
        try:
            while not work.is_completed():
                if self._left() <= 0:
                    raise self._fail(f"a broadcast did not end within {self.deadline:g} s")
                time.sleep(pause)
                pause = min(_LOOK, pause + _LOOK / 50)
            work.wait()
        except RuntimeError as error:
            raise self._fail(f"a broadcast failed: {in_words(error)}") from error
        self._unfinished.remove(work)

    def _decide(self, store: Store, key: str, *, ok: bool) -> tuple[bool, list[int]]:
        """The verdict; and, after a no, the ranks that have not confirmed the arrival."""
        if ok:
            store.set(f"{key}/yes/{self.rank}", _YES)
            if store.add(f"{key}/yes", 1) == self.world_size:
                store.compare_set(key, "", _YES)
            with contextlib.suppress(dist.DistStoreError):  # the deadline
                store.wait([key], torch_time(self._left()))
        # The first verdict counts. If there is none yet, make it "no".
        verdict = store.compare_set(key, "", "no") == _YES.encode()
        ranks = [] if verdict else range(self.world_size)
        return verdict, [rank for rank in ranks if not store.check([f"{key}/yes/{rank}"])]

    def _wait_for_readers(self, store: Store, key: str) -> None:
        others = range(1, self.world_size)
        if others:
            store.wait([f"{key}/read/{rank}" for rank in others], torch_time(self._left()))
        store.delete_key(key)
        store.delete_key(f"{key}/yes")
        for rank in range(self.world_size):
            store.delete_key(f"{key}/yes/{rank}")
            store.delete_key(f"{key}/read/{rank}")

    def _named(self, ranks: list[int]) -> str:
        names = {0: "the trainer"} | {
            member.rank_offset + worker: f"explorer {member.name} (worker {worker})"
            for member in self.rendezvous.members
            for worker in range(member.workers)
        }
        return ", ".join(names[rank] for rank in ranks)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _check(self) -> None:
        if self._failure is not None:
            raise BroadcastError(f"the weight group {self.name} has failed: {self._failure}")

    def _fail(self, why: str) -> BroadcastError:
        self._failure = why
        self.close()
        return BroadcastError(f"{why} (weight group {self.name})")


class KeptGroup:
    """A worker's weight group, kept for the next transfer."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    def open(
        self,
        rendezvous: Rendezvous,
        rank: int,
        *,
        deadline: float,
        device: torch.device,
        listening: socket.socket | None = None,
    ) -> WeightGroup:
        """Open a rendezvous's group, and begin a transfer in it; see :meth:`WeightGroup.join`."""
        group = self._group
        if group is not None and group.name == rendezvous.group_name and not group.has_failed:
            group.begin()
            return group
        self.close()
        self._group = WeightGroup.join(
            rendezvous, rank, deadline=deadline, device=device, listening=listening
        )
        return self._group

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
