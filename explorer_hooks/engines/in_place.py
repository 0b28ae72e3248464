"""Fill tensors in place, through reused host memory or directly from the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple, TypeVar

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

CPU: Final = torch.device("cpu")

T = TypeVar("T")


class HostBuffer:
    """Host memory for new content, kept between uses, and pinned if the targets are not on the CPU.

    Attributes:
        views: a tensor in this memory for each target, set by :meth:`lay_out`.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._memory: HostMemory | None = None
        self._device = CPU
        self.views: list[Tensor] = []

    def lay_out(self, targets: Sequence[Target]) -> Tensor:
        """Set ``views`` for the targets, and return the memory of all views as uint8.

        Each view begins at a multiple of 64 bytes.
        """
        size = _size(targets)
        device = min({target.tensor.device for target in targets} - {CPU}, key=str, default=CPU)
        memory = self._memory
        if memory is None or memory.content.nbytes < size or device.type != self._device.type:
            self.close()  # the old block must not be held beside the new one
            memory = self._memory = HostMemory(size, device)
            self._device = device
        self.views, at = [], 0
        for target in targets:
            flat = memory.content[at : at + target.nbytes]
            self.views.append(flat.view(target.dtype).view(target.box.shape))
            at += padded(target.nbytes)
        return memory.content[:at]

    def read(self, reader: WeightsReader, targets: Sequence[Target]) -> None:
        """Read the new content into ``views``, without changing the targets."""
        self.lay_out(targets)
        parts = [
            _Part(target.name, target.box, bytes_of(view))
            for target, view in zip(targets, self.views, strict=True)
        ]
        self._read_parts(reader, parts)

    @torch.inference_mode()  # only in it can tensors be filled that were made in it
    def copy(self, targets: Sequence[Target]) -> None:
        """Copy ``views`` into the targets, after earlier work on the devices, such as a forward.

        On return, every device has the new content. The targets must have the dtypes and shapes of
        those in :meth:`lay_out`.
        """
        tensors = [target.tensor for target in targets]
        synchronize(tensors)
        moves: list[tuple[memoryview, memoryview]] = []
        for target, view in zip(targets, self.views, strict=True):
            if _is_plain(target):
                moves.append((bytes_of(view), bytes_of(target.tensor)))
            else:
                target.tensor.copy_(view, non_blocking=True)
        cuts = (
            (source[at : at + _BATCH], target[at : at + _BATCH])
            for source, target in moves
            for at in range(0, len(source), _BATCH)
        )
        # Tensor.copy_ would be many times slower on busy processors, because its threads wait for
        # one another after each tensor.
        self._run(
            partial(_move, batch) for batch in _batches(cuts, lambda move: len(move[0]), _BATCH)
        )
        synchronize(tensors)

    def fill(self, reader: WeightsReader, targets: Sequence[Target]) -> None:
        """Read directly into the targets. An error can leave the targets partly filled.

        Contiguous targets on the CPU with the version's dtype are filled without a copy. The others
        are filled through this buffer, in batches of at most 256 MiB or of one larger target.
        """
        plain = [target for target in targets if _is_plain(target)]
        parts = [_Part(target.name, target.box, bytes_of(target.tensor)) for target in plain]
        self._read_parts(reader, parts)
        others = [target for target in targets if not _is_plain(target)]
        # The largest batch comes first: its memory is enough for the others.
        for batch in sorted(
            _batches(others, lambda target: target.nbytes, _BOUND), key=_size, reverse=True
        ):
            self.read(reader, batch)
            self.copy(batch)

    def close(self) -> None:
        """Release the memory."""
        self.views = []
        self._memory = None

    def _read_parts(self, reader: WeightsReader, parts: Sequence[_Part]) -> None:
        reader.open(part.name for part in parts)  # before the threads, which share the reader
        cuts = chain.from_iterable(map(_cut, parts))
        # Batches of parts, not of reads: a part can need one read for each row.
        batches = _batches(cuts, lambda part: len(part.into), _BATCH)
        self._run(partial(_read, reader, batch) for batch in batches)

    def _run(self, tasks: Iterable[Callable[[Check], None]]) -> None:
        run_side_by_side(list(tasks), threads=threads_here(self._threads), look=lambda: None)


class _Part(NamedTuple):
    name: str
    box: Box
    into: memoryview


def _read(reader: WeightsReader, batch: Sequence[_Part], check: Check) -> None:
    for part in batch:
        for span in reader.spans(*part):
            check()
            span.read()


def _batches(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group items into batches of at most ``limit`` bytes, or of one larger item."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
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


def _move(batch: Sequence[tuple[memoryview, memoryview]], check: Check) -> None:
    del check  # no copy is stopped half-way, because no copy can fail
    for source, target in batch:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _is_plain(target: Target) -> bool:
    """True if the target is contiguous host memory with the version's dtype."""
    tensor = target.tensor
    return tensor.device == CPU and tensor.is_contiguous() and tensor.dtype == target.dtype


def _size(targets: Iterable[Target]) -> int:
    return sum(padded(target.nbytes) for target in targets)


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for all work on the tensors' devices."""
    for device in {tensor.device for tensor in tensors} - {CPU}:
        torch.accelerator.synchronize(device)
