"""The parts of a weight group: rank 0's store, connections to it, and a torch backend."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import torch
import torch.distributed as dist

from syncd.coordination.broadcast.addresses import address_towards
from syncd.protocol.reports import Rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The shortest timeout in seconds, because torch rounds down, and 0 means no limit.
_SHORTEST: Final = 0.01
#: Seconds between two checks that a closed group's work has ended.
_REAP: Final = 0.1
#: The shortest timeout of a connection in seconds, because torch rounds down to whole seconds.
_CONNECT: Final = 1.0
#: With this variable, NCCL raises errors to the caller; without it, a watchdog ends the process.
_BLOCKING: Final = "TORCH_NCCL_BLOCKING_WAIT"
_ENVIRONMENT: Final = threading.Lock()

#: Held by the thread that ends a backend. The interpreter's end waits for this lock, because the
#: process crashes (std::terminate) if a thread is in torch then.
_ENDING: Final = threading.Lock()
_exiting: Final = threading.Event()
#: The most seconds of that wait: in a fork the thread that holds the lock can be missing.
_PATIENCE: Final = 10.0

Name = Literal["nccl", "gloo"]


def backend_for(device: torch.device) -> Name:
    """The backend that broadcasts tensors of a device."""
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def serve(rendezvous: Rendezvous, listening: socket.socket, deadline: float) -> Store:
    """Start rank 0's store, which stays open while the returned object exists.

    The store takes over ``listening``, a socket that must listen at the rendezvous's address and
    port. ``deadline`` is the store's timeout, in seconds.
    """
    return dist.TCPStore(  # type: ignore[attr-defined] # public, but not in torch's stub
        rendezvous.address,
        rendezvous.port,
        is_master=True,
        timeout=torch_time(deadline),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def connect(rendezvous: Rendezvous, deadline: float) -> Store:
    """Connect to this group's keys in rank 0's store. A waiting call blocks all later calls."""
    store = dist.TCPStore(  # type: ignore[attr-defined] # likewise
        rendezvous.address,
        rendezvous.port,
        is_master=False,
        timeout=torch_time(max(_CONNECT, deadline)),
        wait_for_workers=False,
    )
    return dist.PrefixStore(rendezvous.group_name, store)  # type: ignore[attr-defined] # likewise


def make_backend(
    rendezvous: Rendezvous, rank: int, store: Store, *, deadline: float, device: torch.device
) -> Any:
    """Make a backend that is connected to all other ranks."""
    if rendezvous.backend == "nccl":
        return _nccl(rendezvous, rank, store, deadline, device)
    # By address, because this host's name cannot always be resolved.
    address = address_towards(rendezvous.address, rendezvous.port) if rank else rendezvous.address
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 # torch has no other name for it
    options._timeout = torch_time(deadline)  # noqa: SLF001 # likewise
    options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001 # likewise
    return gloo(store, rank, rendezvous.world_size, options)


def release(backends: list[Any], unfinished: list[dist.Work]) -> None:
    """Destroy a backend in the background, because its destructor waits for unfinished work.

    ``backends`` is a list with the only reference to the backend.
    """

    def work() -> None:
        backend = backends.pop()
        is_aborted = backend.name() != "nccl"  # gloo cannot be aborted
        while True:
            with _ENDING:
                if _exiting.is_set():
                    break
                if not is_aborted:
                    is_aborted = True
                    _abort(backend)
                if all(map(_has_ended, unfinished)):
                    unfinished.clear()
                    del backend
                    return
            time.sleep(_REAP)
        threading.Event().wait()  # forever: the process's end frees what this frame holds

    threading.Thread(target=work, name="syncd-weight-group-end", daemon=True).start()


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning(
            "NCCL could not abort an old weight group. syncd frees the group when its transfers "
            "have ended; you need not act. NCCL's error: %s",
            error,
        )


def _has_ended(work: dist.Work) -> bool:
    try:
        return work.is_completed()
    except RuntimeError:
        return True  # CUDA's own errors come from here


@atexit.register
def _end_no_more() -> None:
    held = _ENDING.acquire(timeout=_PATIENCE)
    _exiting.set()
    if held:
        _ENDING.release()


def in_words(error: Exception) -> str:
    """An error of torch in one line, without its stack."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, dist.DistNetworkError):
        return f"the trainer's store is gone or cannot be reached ({said})"
    if isinstance(error, dist.DistStoreError):
        return f"not all ranks connected to the trainer's store in time ({said})"
    return said


def _nccl(
    rendezvous: Rendezvous, rank: int, store: Store, deadline: float, device: torch.device
) -> Any:
    if device.type != "cuda" or not torch.cuda.is_available() or not dist.is_nccl_available():
        raise ValueError("the weight group uses nccl, and this process has no GPU for the weights")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = torch_time(deadline)  # noqa: SLF001 # torch has no other name for it
    options.group_name = rendezvous.group_name
    with torch.cuda.device(device):
        with _blocking():
            backend = nccl(store, rank, rendezvous.world_size, options)
        try:
            # The first operation makes the communicator: do it here, with a deadline.
            work = backend.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)])
            work.wait(torch_time(deadline))
        except BaseException:
            # In the background, because its destructor can be slow, and can then end the process.
            backends = [backend]
            del backend
            release(backends, [])
            raise
    return backend


@contextlib.contextmanager
def _blocking() -> Iterator[None]:
    """Turn NCCL's watchdog off for the group that the block makes."""
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


def within(end: float, call: Callable[[], T]) -> T:
    """Run a call in a new thread; return the call's result or raise its error.

    At ``end``, by the monotonic clock, this function abandons the thread and raises TimeoutError,
    because some calls into torch have no timeout. The call must release the interpreter's lock
    while it waits.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 # raised again, by the waiting thread
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="syncd-weight-group", daemon=True).start()
    if not done.wait(max(0.0, end - time.monotonic())):
        raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


def torch_time(seconds: float) -> timedelta:
    """A timeout for torch, never 0."""
    return timedelta(seconds=max(_SHORTEST, seconds))
