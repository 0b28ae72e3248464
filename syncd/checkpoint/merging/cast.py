"""Casting tensors with torch, in a child process.

This process never imports torch. It exchanges bytes with the child through shared memory. Each
thread has two slots there, and fills one while the child casts the other.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

from syncd.checkpoint.parallel import Check
from syncd.checkpoint.sandbox.child_process import SAME_MODULES, ChildProcess, EndedError, described
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.closing import Closing

#: The most bytes of a tile, before and after the cast.
TILE: Final = 1024 * 1024
#: Bytes of a slot: the input of a cast, and then its output.
SLOT: Final = 2 * TILE
_SLOTS_EACH: Final = 2
#: The most threads that can cast at a time; one child keeps up with two threads.
THREADS: Final = 4
_SIZE: Final = THREADS * _SLOTS_EACH * SLOT
#: A slot, the number of elements, their dtype, and the wanted dtype. The answer is the slot.
REQUEST: Final = struct.Struct("<BQ8s8s")
#: The child's first message, once it has imported torch.
READY: Final = b"\xff"
#: Importing torch from slow storage takes long.
_WALL_SECONDS: Final = 300.0


class Caster(Closing):
    """A child process that casts tensors, for :data:`THREADS` threads. The caller must close it.

    Raises:
        OSError: the child cannot be started.
    """

    def __init__(self, where: str, *, python: str = sys.executable) -> None:
        self._where = where
        self._started = False
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(THREADS):
            self._free.put(number * _SLOTS_EACH)
        self._asking, self._hearing = threading.Lock(), threading.Lock()
        self._answered: set[int] = set()
        with ExitStack() as stack:
            fd = os.memfd_create("syncd-cast")
            stack.callback(os.close, fd)
            os.ftruncate(fd, _SIZE)
            # Never closed, because an error may still hold a view. The last view frees the memory.
            self._memory = memoryview(mmap.mmap(fd, _SIZE))
            self._child = ChildProcess(
                "checkpoint.merging.cast_child",
                (fd,),
                where,
                task="cast",
                flags=SAME_MODULES,
                pass_fds=(fd,),
                cancel=lambda: None,  # each call passes its own
                wall_seconds=_WALL_SECONDS,
                python=python,
            )
            stack.callback(self._child.close)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Kill the child."""
        self._stack.close()

    def cast(
        self,
        read: Callable[[memoryview], object],
        count: int,
        given: str,
        wanted: str,
        *,
        cancel: Check,
    ) -> Iterator[memoryview]:
        """Cast ``count`` elements from dtype ``given`` to ``wanted``. ``read`` fills input buffers.

        Each yielded buffer is valid until the next one is yielded. ``cancel`` is called every 50 ms
        while the child works; it raises an error to stop.

        Raises:
            OSError: the child has ended, or did not answer; the file may be intact.
        """
        before, after = ITEMSIZE[given], ITEMSIZE[wanted]
        most = TILE // max(before, after)
        pending: deque[tuple[int, int]] = deque()
        sent = 0
        first = self._free.get()
        while sent < count or pending:
            if sent < count and len(pending) < _SLOTS_EACH:
                tile = min(most, count - sent)
                slot = first + sent // most % _SLOTS_EACH
                read(self._memory[slot * SLOT : slot * SLOT + tile * before])
                self._ask(REQUEST.pack(slot, tile, given.encode(), wanted.encode()), cancel)
                pending.append((slot, tile))
                sent += tile
                continue
            slot, tile = pending.popleft()
            self._wait(slot, cancel)
            begin = slot * SLOT + TILE
            yield self._memory[begin : begin + tile * after]
        # Not reached if the caller stops half way: answers for these slots may still come.
        self._free.put(first)

    def _ask(self, request: bytes, cancel: Check) -> None:
        with self._asking:
            if not self._started:
                with self._hearing:
                    if self._hear(cancel) != READY:
                        raise self._failed()
                self._started = True
            try:
                self._child.write(request, cancel=cancel)
            except EndedError:
                raise self._failed() from None

    def _wait(self, slot: int, cancel: Check) -> None:
        """Wait for a slot's answer; keep earlier answers for the other threads."""
        with self._hearing:
            while slot not in self._answered:
                answer = self._hear(cancel)
                if not answer:
                    raise self._failed()
                self._answered.add(answer[0])
            self._answered.remove(slot)

    def _hear(self, cancel: Check) -> bytes:
        self._child.expect(self._where)
        try:
            return self._child.read(1, cancel=cancel)
        except EndedError:
            return b""

    def _failed(self) -> OSError:
        return OSError(
            errno.EAGAIN,
            "the process that casts the weights of this path ended with "
            f"{described(self._child.end())}: check that 'python -c \"import torch\"' "
            "works, and that memory is free",
            self._where,
        )
