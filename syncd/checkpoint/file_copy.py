"""Writing one planned file: byte ranges of the shards, in order, and the digest of each tensor.

Three ways, the cheapest that is right for a range:

- Where the filesystem can, blocks are *shared* (a reflink: XFS, btrfs, NFS 4.2): nothing is copied.
  That takes ranges that begin at a page in both files: what our trainer hook saves is laid out for
  it, and so are merged files. What a foreign trainer may still be writing is never shared.
- The kernel copies (``Storage.copy_range``), where a server may do it and nothing is computed of
  the bytes.
- Bytes go through one buffer.

Which is the fastest where was measured: ``docs/performance.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import xxhash

from syncd.checkpoint.cast import Caster
from syncd.checkpoint.plan import PlannedFile, PlannedTensor
from syncd.checkpoint.safetensors_header import PAGE
from syncd.checkpoint.source_reader import Source, SourceReader, shorter
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.checkpoint.tensor_stream import ComparedStream, TensorStream
from syncd.checkpoint.tiling import Part, Run, source_at
from syncd.protocol.errors import CoverageError
from syncd.storage.fsio import Storage

BUFFER: Final = 1024 * 1024
#: The kernel copies at most so much before ``cancel`` is asked again.
_CHUNK: Final = 64 * 1024 * 1024
#: So many bytes are made durable at a time.
_SYNC_EVERY: Final = 256 * 1024 * 1024
#: Shorter runs are gathered: a copy in the kernel may be a round trip to a server each.
_WORTH_A_CALL: Final = 512 * 1024


def may_copy_remotely(fd: int) -> bool:
    """Whether a copy inside the kernel into this file may be handed on to a server (NFS 4.2, SMB).

    Not on a block device, where the kernel goes page by page.
    """
    return os.major(os.fstat(fd).st_dev) == 0


class FileCopy:
    """The buffer between the shards and one output file, and what is done to the bytes in it.

    Args:
        storage: the storage to write to.
        reader: of the sources.
        sources: the open shards.
        digests: whether to compute the tensors' digests.
        shares: whether blocks may be shared with the sources, which nobody writes to any more.
        in_kernel: whether the kernel copies into a file; never where there are digests or checks.
        caster: casts; needed where the plan says so.
        cancel: called often; it raises to stop.
        advanced: called with each number of bytes that are done.
    """

    def __init__(
        self,
        storage: Storage,
        reader: SourceReader,
        sources: Sequence[Source],
        *,
        digests: bool,
        shares: bool,
        in_kernel: Callable[[int], bool],
        caster: Caster | None,
        cancel: Callable[[], None],
        advanced: Callable[[int], None],
    ) -> None:
        self._storage = storage
        self._reader = reader
        self._sources = sources
        self._digests = digests
        self._shares = shares
        self._in_kernel = in_kernel
        self._caster = caster
        self._cancel = cancel
        self._advanced = advanced
        self._view = memoryview(bytearray(BUFFER))
        self._filled = 0  # bytes of the buffer that are not written yet
        self._unsynced = 0
        self._fd, self._at = -1, 0  # the output, and where the buffer goes in it

    def write(self, file: PlannedFile, fd: int) -> list[bytes]:
        """Write the file; returns each tensor's 16-byte digest, or nothing when they are off."""
        self._fd, self._at = fd, len(file.header)
        self._storage.pwrite_all(fd, file.header, 0)
        in_kernel = self._in_kernel(fd)
        found = []
        for tensor in file.tensors:
            hasher = xxhash.xxh3_128() if self._digests else None
            if tensor.dtype != tensor.source_dtype:
                self._cast(tensor, hasher)
            elif tensor.copies:
                self._gather(self._compared(tensor), tensor.length, hasher)
            else:
                self._parts(tensor.parts, hasher, in_kernel=in_kernel)
            if hasher is not None:
                found.append(hasher.digest())
        self._flush()
        return found

    def _parts(
        self, parts: Iterable[Part], hasher: xxhash.xxh3_128 | None, *, in_kernel: bool
    ) -> None:
        for part in parts:
            left = part
            if isinstance(left, Run) and left.length >= _WORTH_A_CALL:
                shared = self._share(left, hasher)
                left = Run(left.source, left.offset + shared, left.length - shared)
                if in_kernel:
                    self._kernel_copies(left)
                    continue
            self._gather(TensorStream(self._reader, (left,)), left.length, hasher)

    def _share(self, run: Run, hasher: xxhash.xxh3_128 | None) -> int:
        """Let the output have the blocks of a run that begin it; returns how many bytes they are.

        They are read for their digest alone.
        """
        to = self._at + self._filled
        count = run.length // PAGE * PAGE
        if not self._shares or run.offset % PAGE or to % PAGE:
            return 0
        self._flush()
        stream = TensorStream(self._reader, (run,))
        source = self._sources[run.source].fd
        done = 0
        while done < count:
            self._cancel()
            part = min(count - done, _SYNC_EVERY)
            if not self._storage.share_range(source, self._fd, part, run.offset + done, self._at):
                self._shares = False  # nor will it the next one
                break
            if hasher is not None:
                self._digest(stream, part, hasher)
            self._advance(part)
            done += part
        return done

    def _digest(self, stream: TensorStream, length: int, hasher: xxhash.xxh3_128) -> None:
        left = length
        while left:
            self._cancel()
            view = self._view[:left]
            stream.read_into(view)
            hasher.update(view)
            left -= len(view)

    def _kernel_copies(self, run: Run) -> None:
        self._flush()
        source = self._sources[run.source]
        _, offset, left = run
        while left:
            self._cancel()
            count = self._storage.copy_range(
                source.fd, self._fd, min(left, _CHUNK), offset, self._at
            )
            if count == 0:
                raise shorter(source.path)
            offset += count
            left -= count
            self._advance(count)

    def _compared(self, tensor: PlannedTensor) -> TensorStream | ComparedStream:
        stream = TensorStream(self._reader, tensor.parts)
        if not tensor.copies:
            return stream
        copies = [TensorStream(self._reader, copy.parts) for copy in tensor.copies]
        return ComparedStream(
            stream, copies, lambda *found: self._differs(tensor, *found), self._cancel
        )

    def _gather(
        self,
        stream: TensorStream | ComparedStream,
        length: int,
        hasher: xxhash.xxh3_128 | None,
    ) -> None:
        """Copy so many bytes through the buffer."""
        left = length
        while left:
            view = self._view[self._filled : self._filled + left]
            stream.read_into(view)
            if hasher is not None:
                hasher.update(view)
            left -= len(view)
            self._filled += len(view)
            if self._filled == BUFFER:
                self._flush()

    def _cast(self, tensor: PlannedTensor, hasher: xxhash.xxh3_128 | None) -> None:
        """Copy a tensor through the child that casts it; small ones through the buffer too."""
        assert self._caster is not None  # noqa: S101 - as run_plan asks for
        stream = self._compared(tensor)
        count = tensor.length // ITEMSIZE[tensor.dtype]
        dtypes = tensor.source_dtype, tensor.dtype
        for tile in self._caster.cast(stream.read_into, count, *dtypes, cancel=self._cancel):
            if hasher is not None:
                hasher.update(tile)
            if len(tile) > BUFFER - self._filled or len(tile) >= BUFFER // 4:
                self._flush()
            if len(tile) >= BUFFER // 4:
                self._write(tile)
            else:
                self._view[self._filled : self._filled + len(tile)] = tile
                self._filled += len(tile)

    def _differs(self, tensor: PlannedTensor, number: int, offset: int) -> CoverageError:
        """The error for a tensor that is not what a copy of it is, at an offset in bytes."""
        copy = tensor.copies[number]
        name = shown(tensor.name)
        if copy.tied is not None:
            return CoverageError(
                f"{shown(copy.tied)} and {name} differ, and config.json says that they are tied: "
                "set tie_word_embeddings to false there, or tie them in the trainer"
            )
        first, other = source_at(tensor.parts, offset), source_at(copy.parts, offset)
        return CoverageError(
            f"{name} differs between ranks {first} and {other}, in {self._sources[first].path} and "
            f"{self._sources[other].path}, which should both have the same of it: broadcast it "
            "before saving, or give what is not the same on all ranks a name of its own, or a "
            "device mesh with all of them"
        )

    def _flush(self) -> None:
        self._cancel()
        if self._filled:
            filled, self._filled = self._filled, 0
            self._write(self._view[:filled])

    def _write(self, view: memoryview) -> None:
        self._storage.pwrite_all(self._fd, view, self._at)
        self._advance(len(view))

    def _advance(self, count: int) -> None:
        self._at += count
        self._unsynced += count
        if self._unsynced >= _SYNC_EVERY:
            # One fsync of gigabytes at the end could not be interrupted.
            self._cancel()
            self._storage.fsync(self._fd)
            self._unsynced = 0
        self._advanced(count)
