"""Casting tensors as torch does, in a child process that imports it.

This process never imports torch. Bytes are exchanged through memory that both have mapped, in two
slots, so that one tile is read and another written while the child works on a third.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final, Self

from syncd.checkpoint.child_process import ChildProcess, EndedError, described
from syncd.checkpoint.tensor_rules import ITEMSIZE

#: Bytes of the wider of two dtypes that are cast at once.
TILE: Final = 1024 * 1024
#: Bytes of a slot: what is cast, and behind it what has become of it.
SLOT: Final = 2 * TILE
SLOTS: Final = 2
#: Which slot, how many elements, from which dtype to which.
REQUEST: Final = struct.Struct("<BQ8s8s")
DONE: Final = b"."
#: Importing torch from slow storage takes long.
_WALL_SECONDS: Final = 900.0


class Caster:
    """A child that casts. Close it, or use it as a context manager.

    Args:
        where: the save that it is started for, for messages.
        cancel: called every 50 ms while it works; it raises to stop.
        python: the interpreter.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, where: str, *, cancel: Callable[[], None], python: str = sys.executable
    ) -> None:
        self._where = where
        self._started = False
        with ExitStack() as stack:
            fd = os.memfd_create("syncd-cast")
            stack.callback(os.close, fd)
            os.ftruncate(fd, SLOTS * SLOT)
            # It is given back with the last view of it: an error may hold one.
            self._memory = memoryview(mmap.mmap(fd, SLOTS * SLOT))
            self._child = ChildProcess(
                "cast_child",
                (fd,),
                where,
                task="cast",
                flags="-I",
                pass_fds=(fd,),
                cancel=cancel,
                wall_seconds=_WALL_SECONDS,
                python=python,
            )
            stack.callback(self._child.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        self._stack.close()

    def cast(
        self, read: Callable[[memoryview], object], count: int, given: str, wanted: str
    ) -> Iterator[memoryview]:
        """Cast elements as they are read.

        Args:
            read: fills a buffer with the next ones.
            count: how many there are in all.
            given: their dtype, by safetensors' name.
            wanted: what they are to become.

        Yields:
            What has become of them, in order; each is gone with the next one.

        Raises:
            OSError: the child has ended, or did not work: nothing is known of the file.
        """
        before, after = ITEMSIZE[given], ITEMSIZE[wanted]
        most = TILE // max(before, after)
        pending: deque[tuple[int, int]] = deque()
        sent = 0
        while sent < count or pending:
            if sent < count and len(pending) < SLOTS:
                tile = min(most, count - sent)
                slot = sent // most % SLOTS
                read(self._memory[slot * SLOT : slot * SLOT + tile * before])
                self._ask(REQUEST.pack(slot, tile, given.encode(), wanted.encode()))
                pending.append((slot, tile))
                sent += tile
                continue
            slot, tile = pending.popleft()
            self._wait()
            begin = slot * SLOT + TILE
            yield self._memory[begin : begin + tile * after]

    def _ask(self, request: bytes) -> None:
        if not self._started:
            self._wait()  # until it has imported torch
            self._started = True
        try:
            self._child.write(request)
        except EndedError:
            raise self._failed() from None

    def _wait(self) -> None:
        self._child.expect(self._where)
        try:
            answer = self._child.read(len(DONE))
        except EndedError:
            answer = b""
        if answer != DONE:
            raise self._failed()

    def _failed(self) -> OSError:
        return OSError(
            errno.EAGAIN,
            f"the process to cast it ended with {described(self._child.end())}: see that "
            "'python -c \"import torch\"' works and that there is memory",
            self._where,
        )
