"""From a thread that has tensors to one that writes their bytes, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from syncd.coordination.host_memory import HostMemory, wait_for_copies
from syncd.protocol.errors import SaveFailedError
from trainer_hooks.state.full_plan import FullPlan
from trainer_hooks.state.gather import flat_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LIMIT: Final = 256 * 1024 * 1024
#: How many pieces that is, so that some are filled while others are written.
_PIECES: Final = 8


class BytePipe:
    """The bytes of the tensors, end to end, from the thread that gathers to the one that writes.

    Args:
        limit: how many bytes there may be between them.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._plan: FullPlan | None = None
        self._size = max(1, limit // _PIECES)
        self._unmade = max(1, limit // self._size)
        self._free: deque[HostMemory] = deque()
        self._ready: deque[tuple[HostMemory, int]] = deque()
        # The gathering thread's own: what it fills, and how many bytes of that it has filled.
        self._filling: HostMemory | None = None
        self._filled = 0
        self._sources: set[torch.device] = set()
        # The writing thread's own: what it reads, and what of that is left.
        self._reading: HostMemory | None = None
        self._rest = memoryview(b"")

    def announce(self, plan: FullPlan) -> None:
        """Say what will come."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def plan(self) -> FullPlan:
        """Wait for what was announced."""
        with self._changed:
            self._changed.wait_for(lambda: self._plan is not None or self._error is not None)
            if self._error is None and self._plan is not None:
                return self._plan
        raise self._not_gathered()

    def abort(self, error: BaseException) -> None:
        """Let neither side wait any more: what is put is dropped, and nothing is to be had."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def put(self, whole: Tensor) -> None:
        """Copy a tensor's bytes; they are dropped where nobody reads any more."""
        flat = flat_bytes(whole)
        while flat.numel():
            if self._filling is None:
                self._filling = self._next_free(whole.device)
                if self._filling is None:
                    return
            room = self._filling.content[self._filled :]
            part = flat[: room.numel()]
            room[: part.numel()].copy_(part, non_blocking=True)
            self._sources.add(whole.device)
            self._filled += part.numel()
            flat = flat[part.numel() :]
            if self._filled == self._size:
                self.flush()

    def flush(self) -> None:
        """Hand over what was put."""
        if self._filling is None:
            return
        wait_for_copies(self._sources)
        with self._changed:
            self._ready.append((self._filling, self._filled))
            self._changed.notify_all()
        self._filling, self._filled = None, 0

    def take(self, count: int) -> Iterator[memoryview]:
        """The next bytes; a part is whole until the next one is asked for."""
        while count:
            if not self._rest:
                self._reading, filled = self._next_ready()
                self._rest = self._reading.content.numpy().data[:filled]
            part, self._rest = self._rest[:count], self._rest[count:]
            count -= len(part)
            yield part

    def _next_free(self, source: torch.device) -> HostMemory | None:
        """Memory to fill, or None where nobody will read it."""
        with self._changed:
            if not self._free and self._error is None and self._unmade:
                self._unmade -= 1
                return HostMemory(self._size, source)
            self._changed.wait_for(lambda: self._free or self._error is not None)
            return self._free.popleft() if self._error is None else None

    def _next_ready(self) -> tuple[HostMemory, int]:
        """Memory to read; what was read before it is free again."""
        with self._changed:
            if self._reading is not None:
                self._free.append(self._reading)
                self._reading = None
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._error is not None)
            if self._error is None:
                return self._ready.popleft()
        raise self._not_gathered()

    def _not_gathered(self) -> SaveFailedError:
        failed = SaveFailedError(f"the full state dict was not gathered: {self._error}")
        failed.__cause__ = self._error
        return failed
