"""The weight group: the trainer's rank 0 and all explorers' workers, beside any other group.

One process group of its own over a TCPStore of its own; every wait in it has a deadline. Whatever
torch does that could wait for a peer longer than that is done in a thread that is left to itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
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
from syncd.protocol.participants import Rendezvous

if TYPE_CHECKING:
    import socket

    from torch import Tensor
    from torch._C._distributed_c10d import Store

_YES: Final = "yes"
_NO: Final = "no"
#: Seconds between two looks whether a broadcast is done, at most.
_LOOK: Final = 0.001
#: Seconds beyond the deadline for the store to give the decision made at it.
_GRACE: Final = 1.0


class Broadcasting:
    """A broadcast under way.

    Args:
        finish: waits for it.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until the tensor may be used again (rank 0), or has arrived (the others).

        Raises:
            BroadcastError: not within the transfer's deadline, or a peer is gone. The group has
                failed by that.
        """
        self._finish()


class WeightGroup:
    """One generation of a weight group, as one of its ranks; :meth:`join` makes it.

    It works beside a default process group and without one. A transfer is: the same broadcasts on
    all ranks in the same order, and :meth:`agree` on whether they have arrived. Promised: no method
    waits for longer than the transfer's deadline, and a second; an error ends the generation for
    this rank, and peers that wait for this rank end theirs at their deadlines. Not promised:
    anything about a tensor of a transfer that was not agreed; that strangers on the network keep
    out: any process that can reach the store can take part, as in any torch.distributed job.

    Its methods are for one thread at a time; :meth:`close` for any.

    Attributes:
        rank, world_size, generation, name: its own.
        device: where tensors must be.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        backend: Any,
        stores: list[Store],
        *,
        deadline: float,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.world_size = rendezvous.world_size
        self.generation = rendezvous.generation
        self.name = rendezvous.group_name
        self.device = device
        self._rendezvous = rendezvous
        self._backend = backend
        self._stores = stores
        self._patience = deadline
        self._deadline = time.monotonic() + deadline
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
        """Form the group together with all its other ranks, and begin a transfer.

        Args:
            rendezvous: where they meet.
            rank: ours.
            deadline: seconds, for this, and again for each transfer.
            device: where the tensors that are broadcast are: for ``nccl`` a GPU.
            listening: rank 0's, at the address and port of the rendezvous: where its store listens.
                It is taken over.

        Raises:
            BroadcastError: they did not all come in time, or it cannot be formed here.
        """
        if not 0 <= rank < rendezvous.world_size:
            raise BroadcastError(
                f"there is no rank {rank} in a weight group of {rendezvous.world_size}"
            )
        end = time.monotonic() + deadline
        where = f"{rendezvous.address} port {rendezvous.port}"

        servers: list[Store] = []

        def form() -> tuple[Any, Store]:
            # Two connections: what waits on one of them must not hold up the other.
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
                f"{deadline:g} s: not all of its {rendezvous.world_size} ranks came, or one stopped"
            ) from None
        except (RuntimeError, OSError, ValueError) as error:
            raise BroadcastError(
                f"the weight group {rendezvous.group_name} cannot be formed at {where}: "
                f"{in_words(error)}"
            ) from error
        finally:
            servers.clear()  # of one that was not formed the port is free, whoever keeps the error

    @property
    def has_failed(self) -> bool:
        """True if it is of no more use."""
        return self._failure is not None

    def begin(self) -> None:
        """Begin a transfer: its deadline is that of the constructor from now."""
        self._deadline = time.monotonic() + self._patience

    def broadcast(self, tensor: Tensor) -> Broadcasting:
        """Begin to broadcast a tensor from rank 0; all ranks do so in the same order.

        Args:
            tensor: uint8, contiguous, on the group's device, of the same size on all ranks. It must
                neither be changed nor be read until the broadcast is waited for.

        Raises:
            BroadcastError: the group has failed.
        """
        self._check()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = torch_time(self._left())
        try:
            work = self._backend.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._fail(f"a broadcast failed: {in_words(error)}") from error
        self._unfinished.append(work)
        return Broadcasting(lambda: self._finish(work))

    def agree(self, ok: bool) -> bool:
        """Say whether all is well here, and learn whether it is everywhere.

        Promised: all ranks that come back with an answer have the same one, and rank 0 comes back
        with True only when all others have. So what one of them may have missed is an error there,
        and the files bring it to all.

        Returns:
            True only where all said yes.

        Raises:
            BroadcastError: not all have said so within the transfer's deadline, or the store is
                gone: what the others have agreed on is not known here, and nothing is committed.
        """
        self._check()
        key = f"agree/{self._agreements}"
        self._agreements += 1
        store = self._stores[0]
        try:
            verdict, late = within(
                self._deadline + _GRACE,
                # Whoever was stopped until the deadline must not say yes: the others have given up.
                lambda: self._decide(store, key, ok=ok and self._left() > 0),
            )
            if not verdict and self._left() <= 0:
                raise self._fail(f"{self._named(late)} did not confirm in time that all arrived")
            if not verdict:
                return False
            if self.rank:
                store.set(f"{key}/read/{self.rank}", _YES)
                return True
            within(self._deadline + _GRACE, lambda: self._wait_for_readers(store, key))
        except TimeoutError:
            raise self._fail(
                "the outcome was not known at the deadline: the trainer's host is stopped or "
                "unreachable"
            ) from None
        except RuntimeError as error:
            raise self._fail(f"not all ranks know the outcome: {in_words(error)}") from error
        return True

    def close(self) -> None:
        """Leave the group, without waiting for anybody. Safe to call twice."""
        with self._lock:
            self._failure = self._failure or "it is closed"
            backend, self._backend = self._backend, None
            self._stores.clear()  # rank 0's store ends with its last reference: its port is free
        if backend is not None:
            backends = [backend]
            del backend  # the last reference goes in the background
            release(backends, self._unfinished)

    def _finish(self, work: dist.Work) -> None:
        """Wait for a broadcast.

        By looks, for both backends alike: a signal is heard meanwhile, and no time of torch's
        counts. gloo ends its side of the operation at the group's timeout.
        """
        self._check()
        pause = 0.0
        try:
            while not work.is_completed():
                if self._left() <= 0:
                    raise self._fail(f"a broadcast did not end within {self._patience:g} s")
                time.sleep(pause)
                pause = min(_LOOK, pause + _LOOK / 50)
            work.wait()
        except RuntimeError as error:
            raise self._fail(f"a broadcast failed: {in_words(error)}") from error
        self._unfinished.remove(work)

    def _decide(self, store: Store, key: str, *, ok: bool) -> tuple[bool, list[int]]:
        """The verdict, and which ranks had not said yes when it was made."""
        if ok:
            store.set(f"{key}/yes/{self.rank}", _YES)
            if store.add(f"{key}/yes", 1) == self.world_size:
                store.compare_set(key, "", _YES)
            with contextlib.suppress(dist.DistStoreError):  # the deadline
                store.wait([key], torch_time(self._left()))
        # The first verdict counts. Where there is none by now, ours is: no.
        verdict = store.compare_set(key, "", _NO) == _YES.encode()
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
        """Ranks as people know them."""
        names = {0: "the trainer"} | {
            member.rank_offset + worker: f"explorer {member.name} (worker {worker})"
            for member in self._rendezvous.members
            for worker in range(member.workers)
        }
        return ", ".join(names[rank] for rank in ranks)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _check(self) -> None:
        if self._failure is not None:
            raise BroadcastError(f"the weight group {self.name} has failed: {self._failure}")

    def _fail(self, why: str) -> BroadcastError:
        """The error of this generation, which ends here."""
        self._failure = why
        self.close()
        return BroadcastError(f"{why} (weight group {self.name})")


class KeptGroup:
    """A worker's weight group from one transfer to the next: formed anew where it has to be."""

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
        """The group of a rendezvous, and a new transfer in it.

        Args and errors are those of :meth:`WeightGroup.join`.
        """
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
        """Leave the group: at the end, or where a transfer failed. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
