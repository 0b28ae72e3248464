"""Running several tasks at once in threads, so that they can be cancelled together."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Final, TypeVar

T = TypeVar("T")
#: A task must call this often. The call raises an error to stop the task.
Check = Callable[[], None]

#: Seconds between two calls of ``look``.
_LOOK: Final = 0.05


def threads_here(most: int) -> int:
    """The smaller of ``most`` and the number of processors that this process may use."""
    return min(most, len(os.sched_getaffinity(0)))


class _StoppedError(Exception):
    """Ends a thread because another thread has failed."""


def run_side_by_side(
    tasks: Sequence[Callable[[Check], T]], *, threads: int, look: Check
) -> list[T]:
    """Run tasks, up to ``threads`` at once, wait for all, and return their results in order.

    Each task gets a check function that it must call often. ``look`` is called in the calling
    thread, at least every 50 ms, and raises an error to stop all tasks. With one thread or one
    task, the tasks run in the calling thread, and ``look`` is the check function. The first error
    is raised after all tasks have ended; OSError (``EAGAIN``) if no thread can be started.
    """
    if min(threads, len(tasks)) <= 1:
        return [task(look) for task in tasks]
    stopped = Event()

    def check() -> None:
        if stopped.is_set():
            raise _StoppedError

    with ThreadPoolExecutor(min(threads, len(tasks)), "syncd-copy") as pool:
        futures: list[Future[T]] = []
        try:
            try:
                futures.extend(pool.submit(task, check) for task in tasks)
            except RuntimeError as error:  # a limit on processes, which count threads
                raise OSError(errno.EAGAIN, str(error)) from error
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=_LOOK)
                for future in done:
                    future.result()
                look()
        except BaseException:
            stopped.set()
            for future in futures:
                future.cancel()
            raise  # leaving the pool waits for the rest
    return [future.result() for future in futures]
