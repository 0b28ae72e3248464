"""Fill tensors in place, through reused host memory or directly from the files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from explorer_hooks.engines.targets import Target
from explorer_hooks.weights import WeightsReader
from syncd.checkpoint.boxes import Box
from syncd.checkpoint.parallel import Check, run_side_by_side, threads_here
from syncd.coordination.broadcast.weight_meta import padded
from syncd.coordination.host_memory import HostMemory
from syncd.coordination.tensors import bytes_of

#: The approximate number of bytes that one thread reads or copies at a time.
_BATCH: Final = 16 * 1024 * 1024
#: The most temporary host memory, except for a single larger tensor.
_BOUND: Final = 256 * 1024 * 1024

_CPU: Final = torch.device("cpu")


class HostBuffer:
    """Host memory for new content, kept between uses, and pinned if the targets are not on the CPU.

    Attributes:
        views: a tensor in this memory for each target, set by :meth:`lay_out`.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory: HostMemory | None = None
        self._device = _CPU
        self.views: list[Tensor] = []

    def lay_out(self, targets: Sequence[Target]) -> Tensor:
        """Set ``views`` for the targets, and return the memory of all views as uint8.

        Each view begins at a multiple of 64 bytes.
        """
        content = self._memory_for(targets)
        self.views, at = [], 0
        for target in targets:
            memory = content[at : at + target.nbytes]
            self.views.append(memory.view(target.dtype).view(target.box.shape))
            at += padded(target.nbytes)
        return content[:at]

    def read(self, reader: WeightsReader, targets: Sequence[Target]) -> None:
        """Read the new content into ``views``, without changing the targets."""
        self.lay_out(targets)
        parts = [
            _Part(target.name, target.box, bytes_of(view))
            for target, view in zip(targets, self.views, strict=True)
        ]
        _read_parts(reader, parts, self._threads)

    @torch.no_grad()
    def copy(self, targets: Sequence[Target]) -> None:
        """Copy ``views`` into the targets, after earlier work on the devices, such as a forward.

        On return, every device has the new content. The targets must have the dtypes and shapes of
        those in :meth:`lay_out`.
        """
        devices = {target.tensor.device for target in targets} - {_CPU}
        synchronize(devices)
        moves: list[_Move] = []
        for target, view in zip(targets, self.views, strict=True):
            if _is_plain(target):
                moves.append(_Move(bytes_of(view), bytes_of(target.tensor)))
            else:
                target.tensor.copy_(view, non_blocking=True)
        _move(moves, self._threads)
        synchronize(devices)

    def close(self) -> None:
        """Release the memory."""
        self.views = []
        self._memory = None

    def _memory_for(self, targets: Sequence[Target]) -> Tensor:
        size = _size(targets)
        devices = {target.tensor.device for target in targets} - {_CPU}
        device = min(devices, key=str, default=_CPU)
        memory = self._memory
        if memory is None or memory.content.nbytes < size or device.type != self._device.type:
            self.close()  # the old block must not be held beside the new one
            memory = self._memory = HostMemory(size, device)
            self._device = device
        return memory.content


def fill_directly(
    reader: WeightsReader, targets: Sequence[Target], buffer: HostBuffer, threads: int
) -> None:
    """Read directly into the targets. An error can leave the targets partly filled.

    Contiguous targets on the CPU with the version's dtype are filled without a copy. The others are
    filled through ``buffer``, in batches of at most 256 MiB or of one larger target.
    """
    parts: list[_Part] = []
    others: list[Target] = []
    for target in targets:
        if _is_plain(target):
            parts.append(_Part(target.name, target.box, bytes_of(target.tensor)))
        else:
            others.append(target)
    _read_parts(reader, parts, threads)
    # The largest batch comes first: its memory is enough for the others.
    for batch in sorted(_bounded(others), key=_size, reverse=True):
        buffer.read(reader, batch)
        buffer.copy(batch)


class _Part(NamedTuple):
    name: str
    box: Box
    into: memoryview


def _read_parts(reader: WeightsReader, parts: Sequence[_Part], threads: int) -> None:
    reader.open(part.name for part in parts)  # before the threads, which share the reader
    tasks = [partial(_read, reader, batch) for batch in _batches(parts)]
    run_side_by_side(tasks, threads=threads_here(threads), look=lambda: None)


def _read(reader: WeightsReader, batch: Sequence[_Part], check: Check) -> None:
    for part in batch:
        for span in reader.spans(*part):
            check()
            span.read()


def _batches(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Group parts, or slices of large parts, into batches of about 16 MiB."""
    batch: list[_Part] = []  # parts, not reads: a part can need one read for each row
    size = 0
    for part in parts:
        for cut in _cut(part):
            batch.append(cut)
            size += len(cut.into)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _cut(part: _Part) -> Iterator[_Part]:
    """Cut a part along its first dimension into parts of about 16 MiB."""
    if len(part.into) <= _BATCH or not part.box.shape:
        yield part
        return
    (first, *offsets), (count, *shape) = part.box
    step = max(1, _BATCH * count // len(part.into))
    row = len(part.into) // count
    for at in range(0, count, step):
        end = min(at + step, count)
        box = Box((first + at, *offsets), (end - at, *shape))
        yield _Part(part.name, box, part.into[at * row : end * row])


class _Move(NamedTuple):
    source: memoryview
    target: memoryview


def _move(moves: Sequence[_Move], threads: int) -> None:
    """Copy memory in batches.

    ``Tensor.copy_`` would be many times slower on busy processors, because its threads wait for one
    another after each tensor.
    """
    tasks = []
    batch: list[_Move] = []
    size = 0
    for source, target in moves:
        for at in range(0, len(source), _BATCH):
            batch.append(_Move(source[at : at + _BATCH], target[at : at + _BATCH]))
            size += len(batch[-1].source)
            if size >= _BATCH:
                tasks.append(partial(_move_batch, batch))
                batch, size = [], 0
    tasks.append(partial(_move_batch, batch))
    run_side_by_side(tasks, threads=threads_here(threads), look=lambda: None)


def _move_batch(batch: Sequence[_Move], check: Check) -> None:
    del check  # no copy is stopped half-way, because no copy can fail
    for source, target in batch:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _is_plain(target: Target) -> bool:
    """True if the target is contiguous host memory with the version's dtype."""
    tensor = target.tensor
    return tensor.device == _CPU and tensor.is_contiguous() and tensor.dtype == target.dtype


def _bounded(targets: Sequence[Target]) -> Iterator[list[Target]]:
    group: list[Target] = []
    size = 0
    for target in targets:
        if group and size + target.nbytes > _BOUND:
            yield group
            group, size = [], 0
        group.append(target)
        size += padded(target.nbytes)
    if group:
        yield group


def _size(targets: Sequence[Target]) -> int:
    return sum(padded(target.nbytes) for target in targets)


def synchronize(devices: set[torch.device]) -> None:
    """Wait for all work on these devices."""
    for device in devices:
        torch.accelerator.synchronize(device)
