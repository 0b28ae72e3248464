"""Writing a planned file: byte ranges of the shards, in order, and the digest of each tensor.

Each range is written in the cheapest possible way (``docs/performance.md`` has measurements):

- With reflinks (XFS, btrfs, NFS 4.2), the output *shares* blocks with the shard, if the range
  begins at a page in both files. Therefore our trainer hook and the merge begin large tensors at
  pages. Shards without our hook's receipts are not shared, because another trainer may still change
  them.
- The kernel copies the bytes if a file server can do the copy and nothing is computed from the
  bytes.
- Otherwise the bytes are copied through a buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

import xxhash

from syncd.checkpoint.merging.cast import cast_reader
from syncd.checkpoint.merging.options import Checked, MergeOptions
from syncd.checkpoint.merging.plan import PlannedTensor
from syncd.checkpoint.merging.source_reader import Source, SourceReader, shorter
from syncd.checkpoint.merging.tiling import Bytes, Run, Tile, Weave, leaves, source_at
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.safetensors_header import PAGE
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.protocol.errors import CoverageError, SyncdError
from syncd.protocol.names import ADAPTER_WEIGHTS
from syncd.storage.fsio import Storage

#: Formats of ``memoryview.cast`` by their size in bytes.
_FORMATS: Final[dict[int, Literal["Q", "I", "H", "B"]]] = {8: "Q", 4: "I", 2: "H", 1: "B"}
#: Rows of up to this many elements are moved column by column, which is faster in Python.
_FEW_COLUMNS: Final = 32
BUFFER: Final = 1024 * 1024
#: The kernel copies at most this many bytes before ``cancel`` is called again.
_CHUNK: Final = 64 * 1024 * 1024
#: Bytes between two calls of fsync.
_SYNC_EVERY: Final = 256 * 1024 * 1024
#: Shorter runs go through the buffer: each copy in the kernel may be a round trip to a server.
_WORTH_A_CALL: Final = 512 * 1024


@dataclass
class FileCopy:
    """Copies bytes from the shards to one output file.

    ``checked`` is as in :func:`~syncd.checkpoint.merging.merge.run_plan`. ``advanced`` is called
    after each write with the number of bytes.
    """

    storage: Storage
    reader: SourceReader
    sources: Sequence[Source]
    options: MergeOptions
    checked: Checked
    cancel: Check
    advanced: Callable[[int], None]

    def __post_init__(self) -> None:
        self._computes = self.options.digests or self.checked == "crc32"
        self._shares = self.checked == "receipt"
        self._view = memoryview(bytearray(BUFFER))
        self._filled = 0  # bytes of the buffer that are not written yet
        self._unsynced = 0
        self._fd, self._at = -1, 0  # the output, and the buffer's offset in it

    def write(self, tensors: Sequence[PlannedTensor], fd: int, at: int) -> list[bytes]:
        """Write tensors from offset ``at`` on; return their 16-byte digests, if these are on."""
        self._fd, self._at = fd, at
        in_kernel = not self._computes and self.options.in_kernel(fd)
        found = []
        for tensor in tensors:
            self.cancel()
            hasher = xxhash.xxh3_128() if self.options.digests else None
            if tensor.dtype != tensor.source_dtype:
                self._cast(tensor, hasher)
            elif tensor.copies:
                self._gather(self._compared(tensor).read_into, tensor.length, hasher)
            else:
                self._parts(tensor.parts, hasher, in_kernel=in_kernel)
            if hasher is not None:
                found.append(hasher.digest())
        self._flush()
        return found

    def _parts(
        self, parts: Iterable[Tile], hasher: xxhash.xxh3_128 | None, *, in_kernel: bool
    ) -> None:
        for part in parts:
            left = part
            if isinstance(left, Run) and left.length >= _WORTH_A_CALL:
                shared = self._share(left, hasher)
                left = Run(left.source, left.offset + shared, left.length - shared)
                if in_kernel:
                    self._kernel_copies(left)
                    continue
            self._gather(TensorStream(self.reader, (left,)).read_into, left.length, hasher)

    def _share(self, run: Run, hasher: xxhash.xxh3_128 | None) -> int:
        """Share the first blocks of a run with the output; return the number of shared bytes."""
        to = self._at + self._filled
        count = run.length // PAGE * PAGE
        if not self._shares or run.offset % PAGE or to % PAGE:
            return 0
        self._flush()
        stream = TensorStream(self.reader, (run,))
        source = self.sources[run.source].fd
        done = 0
        while done < count:
            self.cancel()
            part = min(count - done, _SYNC_EVERY)
            if not self.storage.share_range(source, self._fd, part, run.offset + done, self._at):
                self._shares = False  # the next call would fail too
                break
            if hasher is not None:
                self._digest(stream, part, hasher)
            self._advance(part)
            done += part
        return done

    def _digest(self, stream: TensorStream, length: int, hasher: xxhash.xxh3_128) -> None:
        left = length
        while left:
            self.cancel()
            view = self._view[:left]
            stream.read_into(view)
            hasher.update(view)
            left -= len(view)

    def _kernel_copies(self, run: Run) -> None:
        self._flush()
        source = self.sources[run.source]
        _, offset, left = run
        while left:
            self.cancel()
            count = self.storage.copy_range(
                source.fd, self._fd, min(left, _CHUNK), offset, self._at
            )
            if count == 0:
                raise shorter(source.path)
            offset += count
            left -= count
            self._advance(count)

    def _compared(self, tensor: PlannedTensor) -> TensorStream | ComparedStream:
        stream = TensorStream(self.reader, tensor.parts)
        if not tensor.copies:
            return stream
        copies = [TensorStream(self.reader, copy.parts) for copy in tensor.copies]
        return ComparedStream(
            stream,
            copies,
            lambda number, at: difference(tensor, number, at, self.sources),
            self.cancel,
        )

    def _gather(
        self,
        read_into: Callable[[memoryview], None],
        length: int,
        hasher: xxhash.xxh3_128 | None,
    ) -> None:
        left = length
        while left:
            view = self._view[self._filled : self._filled + left]
            read_into(view)
            if hasher is not None:
                hasher.update(view)
            left -= len(view)
            self._filled += len(view)
            if self._filled == BUFFER:
                self._flush()

    def _cast(self, tensor: PlannedTensor, hasher: xxhash.xxh3_128 | None) -> None:
        size = ITEMSIZE[tensor.dtype]
        if self._filled % size:
            self._flush()  # so that no element is cut
        read = self._compared(tensor).read_into
        count = tensor.length // size
        read_into = cast_reader(read, count, tensor.source_dtype, tensor.dtype)
        self._gather(read_into, tensor.length, hasher)

    def _flush(self) -> None:
        self.cancel()
        if self._filled:
            filled, self._filled = self._filled, 0
            self._write(self._view[:filled])

    def _write(self, view: memoryview) -> None:
        self.storage.pwrite_all(self._fd, view, self._at)
        self._advance(len(view))

    def _advance(self, count: int) -> None:
        self._at += count
        self._unsynced += count
        if self._unsynced >= _SYNC_EVERY:
            # One fsync of gigabytes at the end could not be interrupted.
            self.cancel()
            self.storage.fsync(self._fd)
            self._unsynced = 0
        self.advanced(count)


class TensorStream:
    """Reads the bytes of parts in order, into buffers of any size.

    A weave is read in tiles of as many whole rows as fit into the buffer, with one read for each
    source. A tile is at most as large as the buffer.
    """

    def __init__(self, reader: SourceReader, parts: Iterable[Tile]) -> None:
        self._reader = reader
        self._leaves = leaves(parts)
        self._leaf: Bytes = Run(0, 0, 0)
        self._length = self._done = 0  # bytes of the leaf, and those that were read
        self._stops: list[int] = []  # where the slices end in a row of the leaf, if it is a weave

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes. There must be enough bytes left."""
        while view:
            if self._done == self._length:
                self._leaf, self._done = next(self._leaves), 0
                self._length = self._leaf.length
                if isinstance(self._leaf, Weave):
                    turns = self._leaf.turns
                    self._stops = list(accumulate(one.length // turns for one in self._leaf.parts))
            if isinstance(self._leaf, Run):
                source, offset, length = self._leaf
                count = min(len(view), length - self._done)
                self._reader.read_into(source, offset + self._done, view[:count])
            else:
                count = self._weave(self._leaf, view)
            self._done += count
            view = view[count:]

    def _weave(self, weave: Weave, view: memoryview) -> int:
        """Read the next rows, or a part of a row if no row fits; return the bytes read."""
        width = self._stops[-1]
        row, within = divmod(self._done, width)
        rows = 0 if within else min(len(view) // width, weave.turns - row)
        if not rows:
            number = bisect_right(self._stops, within)
            part, left = weave.parts[number], self._stops[number] - within
            assert isinstance(part, Run)  # noqa: S101 - leaves() gives no others
            count = min(left, len(view))
            end = part.offset + (row + 1) * (part.length // weave.turns)
            self._reader.read_into(part.source, end - left, view[:count])
            return count
        begin = 0  # the offset of the part's bytes in a row
        for part, end in zip(weave.parts, self._stops, strict=True):
            assert isinstance(part, Run)  # noqa: S101 - leaves() gives no others
            own = end - begin
            tile = memoryview(bytearray(rows * own))
            self._reader.read_into(part.source, part.offset + row * own, tile)
            _scatter(tile, own, view[: rows * width], begin, width)
            begin = end
        return rows * width


@dataclass
class ComparedStream:
    """A stream of bytes that is compared with copies, which must be equal.

    ``differs`` makes the error from the number of the copy that differs, and the offset in bytes.
    ``cancel`` is called for each copy, because there can be thousands.
    """

    stream: TensorStream
    copies: Sequence[TensorStream]
    differs: Callable[[int, int], SyncdError]
    cancel: Check
    _done: int = 0

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes; raise the error of ``differs`` if a copy differs."""
        self.stream.read_into(view)
        other = memoryview(bytearray(len(view)))
        for number, copy in enumerate(self.copies):
            self.cancel()
            copy.read_into(other)
            if other != view:
                at = next(at for at in range(len(view)) if other[at] != view[at])
                raise self.differs(number, self._done + at)
        self._done += len(view)


def difference(
    tensor: PlannedTensor, number: int, offset: int, sources: Sequence[Source]
) -> CoverageError:
    """The error if a tensor and its copy of this number differ in the byte at ``offset``."""
    copy = tensor.copies[number]
    name = shown(tensor.name)
    if copy.tied is not None:
        return CoverageError(
            f"{shown(copy.tied)} and {name} differ, but config.json says that these tensors "
            "are tied. Set tie_word_embeddings to false in config.json, or tie the tensors in "
            "the trainer"
        )
    ranks = source_at(tensor.parts, offset), source_at(copy.parts, offset)
    first, other = (sources[rank].path for rank in ranks)
    if other.name == ADAPTER_WEIGHTS:
        return CoverageError(
            f"{name} differs between {first} and {other}. Remove what an older save has left"
        )
    return CoverageError(
        f"{name} differs between ranks {ranks[0]} and {ranks[1]}, in {first} and {other}, "
        "but must be the same on all ranks. Broadcast the tensor before saving. If the ranks hold "
        "different tensors on purpose, give each tensor its own name, or shard one tensor over a "
        "device mesh with all of these ranks"
    )


def _scatter(tile: memoryview, own: int, view: memoryview, begin: int, width: int) -> None:
    """Copy rows of ``own`` bytes to offset ``begin`` in rows of ``width`` bytes."""
    unit = next(size for size in _FORMATS if not (own % size or begin % size or width % size))
    columns = own // unit
    if columns <= _FEW_COLUMNS:
        letter = _FORMATS[unit]
        source, target = tile.cast(letter), view.cast(letter)
        first, step = begin // unit, width // unit
        for column in range(columns):
            target[first + column :: step] = source[column::columns]
        return
    at = begin
    for start in range(0, len(tile), own):
        view[at : at + own] = tile[start : start + own]
        at += width
