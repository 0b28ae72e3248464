"""Blocking calls, awaited: nothing goes on in a thread beside a task that believes it over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from syncd.coordination.waiting import Cancellation

T = TypeVar("T")

#: One wait, and what else is asked meanwhile.
_THREADS: Final = 4


class Threads:
    """Threads that calls are made in. They end with :meth:`close`, or the process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="syncd-synchronizer")

    async def run(self, call: Callable[..., T], *given: Any) -> T:
        """What a call returns, or raises."""
        return await finished(self._submit(partial(call, *given)))

    async def wait(self, call: Callable[..., T]) -> T:
        """The same of a wait, which is given a ``cancel`` to end with the task."""
        cancel = Cancellation()
        return await finished(self._submit(partial(call, cancel=cancel)), cancel.cancel)

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False)

    def _submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call)


def elsewhere(call: Callable[[], T]) -> asyncio.Future[T]:
    """A call in a thread of the event loop's: ours may all be busy, or have ended."""
    return asyncio.get_running_loop().run_in_executor(None, call)


async def finished(future: asyncio.Future[T], cancel: Callable[[], None] = lambda: None) -> T:
    """What a thread is at; a cancellation is raised once it is done, however often it comes.

    Not before: its caller would go on beside it, and the event loop might be closed by then.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            cancel()
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # looked at: asyncio complains of what nobody has seen
    raise cancelled
