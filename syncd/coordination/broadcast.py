"""The weight group: the trainer's rank 0 and all explorers' workers, beside any other group.

One process group of its own over a TCPStore of its own; every wait in it has a deadline. Whatever
torch does that could wait for a peer longer than that is done in a thread that is left to itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist

from syncd.coordination.addresses import address_towards
from syncd.protocol.errors import BroadcastError
from syncd.protocol.participants import Rendezvous

if TYPE_CHECKING:
    import socket

    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")

_YES: Final = "yes"
_NO: Final = "no"
#: Seconds between two looks whether a broadcast is done, at most.
_LOOK: Final = 0.001
#: Seconds between two looks whether what a closed group was at has ended.
_REAP: Final = 0.1
#: Seconds beyond the deadline for the store to say what was decided at it.
_GRACE: Final = 1.0
#: torch takes 0 for no limit, and rounds down.
_SHORTEST: Final = 0.01
#: A group's NCCL errors are the caller's, and not for a watchdog that would end the process.
_BLOCKING: Final = "TORCH_NCCL_BLOCKING_WAIT"
_ENVIRONMENT: Final = threading.Lock()


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
    this rank, and peers that are waited in vain for end theirs at their deadlines. Not promised:
    anything about a tensor of a transfer that was not agreed; that strangers on the network keep
    out: whoever can reach the store can take part, as in any torch.distributed job.

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
        stores: list[dist.Store],
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

        def form() -> tuple[Any, dist.Store]:
            # What one of them waits for must not hold up the other.
            ours, theirs = (_connect(rendezvous, deadline) for _ in range(2))
            make = _MAKERS[rendezvous.backend]
            return make(rendezvous, rank, theirs, deadline, device), ours

        stores: list[dist.Store] = []
        try:
            if listening is not None:
                stores.append(_serve(rendezvous, listening, deadline))
            backend, ours = _within(end + _GRACE, form)
            stores.insert(0, ours)
            return cls(rendezvous, rank, backend, stores, deadline=deadline, device=device)
        except TimeoutError:
            raise BroadcastError(
                f"the weight group {rendezvous.group_name} was not formed at {where} within "
                f"{deadline:g} s: not all of its {rendezvous.world_size} ranks came, or one stopped"
            ) from None
        except (RuntimeError, OSError, ValueError) as error:
            raise BroadcastError(
                f"the weight group {rendezvous.group_name} cannot be formed at {where}: "
                f"{_in_words(error)}"
            ) from error
        finally:
            if sys.exception() is not None:
                stores.clear()  # the port is free at once, whoever keeps the error

    @property
    def has_failed(self) -> bool:
        """Whether it is of no more use."""
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
        options.timeout = _time(self._left())
        try:
            work = self._backend.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._fail(f"a broadcast failed: {_in_words(error)}") from error
        self._unfinished.append(work)
        return Broadcasting(lambda: self._finish(work))

    def agree(self, ok: bool) -> bool:  # noqa: FBT001 # a vote
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
            verdict, late = _within(
                self._deadline + _GRACE,
                # Whoever was stopped until the deadline must not say yes: the others have given up.
                lambda: self._decide(store, key, ok=ok and self._left() > 0),
            )
            if late:
                raise self._fail(f"{self._named(late)} did not say in time that all has arrived")
            if not verdict:
                return False
            if self.rank:
                store.set(f"{key}/read/{self.rank}", _YES)
                return True
            _within(self._deadline + _GRACE, lambda: self._wait_for_readers(store, key))
        except TimeoutError:
            raise self._fail(
                "what was agreed was not known at the deadline: the trainer's host is stopped, or "
                "not to be reached"
            ) from None
        except RuntimeError as error:
            raise self._fail(
                f"what was agreed is not known everywhere: {_in_words(error)}"
            ) from error
        return True

    def close(self) -> None:
        """Leave the group, without waiting for anybody. Safe to call twice."""
        with self._lock:
            self._failure = self._failure or "it is closed"
            backend, self._backend = self._backend, None
            self._stores.clear()  # rank 0's store ends with its last reference: its port is free
        if backend is not None:
            threading.Thread(
                target=_reap, args=([backend], self._unfinished), name="syncd-reaper", daemon=True
            ).start()

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
                    raise self._fail(f"a broadcast was not done within {self._patience:g} s")
                time.sleep(pause)
                pause = min(_LOOK, pause + _LOOK / 50)
            work.wait()
        except RuntimeError as error:
            raise self._fail(f"a broadcast failed: {_in_words(error)}") from error
        self._unfinished.remove(work)

    def _decide(self, store: dist.Store, key: str, *, ok: bool) -> tuple[bool, list[int]]:
        """The verdict, and which ranks had not spoken when it was made at the deadline here."""
        if ok:
            store.set(f"{key}/yes/{self.rank}", _YES)
            if store.add(f"{key}/yes", 1) == self.world_size:
                store.compare_set(key, "", _YES)
            with contextlib.suppress(dist.DistStoreError):  # the deadline
                store.wait([key], _time(self._left()))
        # The first verdict counts. Where there is none by now, ours is: no.
        verdict = store.compare_set(key, "", _NO) == _YES.encode()
        if verdict or not ok or self._left() > 0:
            return verdict, []
        ranks = range(self.world_size)
        return verdict, [rank for rank in ranks if not store.check([f"{key}/yes/{rank}"])]

    def _wait_for_readers(self, store: dist.Store, key: str) -> None:
        others = range(1, self.world_size)
        if others:
            store.wait([f"{key}/read/{rank}" for rank in others], _time(self._left()))
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


def backend_for(device: torch.device) -> str:
    """The backend that broadcasts tensors of a device."""
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def _serve(rendezvous: Rendezvous, listening: socket.socket, deadline: float) -> dist.Store:
    return dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        is_master=True,
        timeout=timedelta(seconds=deadline),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _connect(rendezvous: Rendezvous, deadline: float) -> dist.Store:
    """A connection to rank 0's store, of whoever makes it alone: one waits for the answer."""
    store = dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        is_master=False,
        timeout=timedelta(seconds=max(1.0, deadline)),
        wait_for_workers=False,
    )
    return dist.PrefixStore(rendezvous.group_name, store)


def _gloo(
    rendezvous: Rendezvous, rank: int, store: dist.Store, deadline: float, device: torch.device
) -> Any:
    # By an address, and not by this host's name, which need not lead anywhere.
    address = address_towards(rendezvous.address, rendezvous.port) if rank else rendezvous.address
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 # torch has no other name for it
    options._timeout = timedelta(seconds=deadline)  # noqa: SLF001 # likewise
    options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001 # likewise
    return gloo(store, rank, rendezvous.world_size, options)


def _nccl(
    rendezvous: Rendezvous, rank: int, store: dist.Store, deadline: float, device: torch.device
) -> Any:
    if device.type != "cuda" or not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ValueError("it is NCCL's, and here is no GPU to take weights")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=deadline)  # noqa: SLF001 # torch has no other name for it
    options.group_name = rendezvous.group_name
    with torch.cuda.device(device):
        with _blocking():
            backend = nccl(store, rank, rendezvous.world_size, options)
        # The communicator is made by the first operation: here, where that has a deadline.
        work = backend.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)])
        work.wait(timedelta(seconds=deadline))
    return backend


_MAKERS: Final = {"gloo": _gloo, "nccl": _nccl}


@contextlib.contextmanager
def _blocking() -> Iterator[None]:
    """Let the NCCL group that is made meanwhile have no watchdog, and leave all others theirs."""
    with _ENVIRONMENT:
        before = os.environ.get(_BLOCKING)
        os.environ[_BLOCKING] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING]
            else:
                os.environ[_BLOCKING] = before


def _within(end: float, call: Callable[[], T]) -> T:
    """What a call returns, or raises; it is left to itself where it takes longer.

    Args:
        end: until when, by the monotonic clock.
        call: what may wait for a peer that has stopped; torch has no limit for some of that.

    Raises:
        TimeoutError: it has not returned.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 # raised again, by who waits
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="syncd-weight-group", daemon=True).start()
    if not done.wait(max(0.0, end - time.monotonic())):
        raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


def _reap(backends: list[Any], unfinished: list[dist.Work]) -> None:
    """Let a backend go once nothing is under way in it: its destructor waits for that."""
    backend = backends.pop()
    if backend.name() == "nccl":
        backend.abort()
    while not all(work.is_completed() for work in unfinished):
        time.sleep(_REAP)
    unfinished.clear()
    del backend


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=max(_SHORTEST, seconds))


def _in_words(error: Exception) -> str:
    """What went wrong in torch, in one line, without its stack."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, dist.DistNetworkError):
        return f"the trainer's store is gone or cannot be reached ({said})"
    if isinstance(error, dist.DistStoreError):
        return f"the others did not come to the trainer's store in time ({said})"
    return said
