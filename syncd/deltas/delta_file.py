"""Write the pieces of one rank into a delta, and make their new bytes from the old ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import xxhash

from syncd.checkpoint.parallel import threads_here
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.closing import Closing
from syncd.deltas.delta_index import LENGTH, DeltaBlock, DeltaIndex, DeltaPiece, SavedPiece
from syncd.deltas.encoding import BlockError, Decoder, Encoder, as_elements, whole_block
from syncd.deltas.limits import BLOCK, DeltaError
from syncd.protocol.records import encode
from syncd.storage.fsio import Storage

#: The most threads that encode a file; a trainer has one file for each rank.
_MOST_THREADS: Final = 4


def write_delta(write: Callable[[bytes], object], pieces: Iterable[SavedPiece]) -> str:
    """Write a delta's blocks and index, and return the xxh3-128 of the index.

    ``write`` appends to the file. New bytes are asked for in their order, in this thread; threads
    ask for the old ones, and encode.
    """
    threads = threads_here(_MOST_THREADS)
    encoders = [Encoder() for _ in range(threads + 1)]
    written: list[tuple[SavedPiece, str, list[DeltaBlock]]] = []
    pending: deque[tuple[int, list[DeltaBlock], Future[tuple[bytes, int]]]] = deque()
    has_threads = True

    def encode_block(piece: SavedPiece, begin: int, end: int, new: memoryview) -> tuple[bytes, int]:
        width = ITEMSIZE[piece.dtype]
        if piece.old is None:
            return whole_block(new), (end - begin) // width
        encoder = encoders.pop()
        try:
            old = as_elements(piece.old(begin, end), width)
            return encoder.encode(old, as_elements(new, width))
        finally:
            encoders.append(encoder)

    def begin_block(task: Callable[[], tuple[bytes, int]]) -> Future[tuple[bytes, int]]:
        nonlocal has_threads
        if has_threads:
            try:
                return pool.submit(task)
            except RuntimeError:  # at a limit on processes, or when the interpreter ends
                has_threads = False
        block: Future[tuple[bytes, int]] = Future()
        block.set_result(task())
        return block

    def write_next() -> None:
        number, blocks, block = pending.popleft()
        encoded, count = block.result()
        if count:
            write(encoded)
            digest = xxhash.xxh3_64_hexdigest(encoded)
            blocks.append(DeltaBlock(number, len(encoded), count, digest))

    with ThreadPoolExecutor(threads, "syncd-encode") as pool:
        for piece in pieces:
            hasher, blocks = xxhash.xxh3_128(), list[DeltaBlock]()
            width = ITEMSIZE[piece.dtype]
            size = piece.box.size * width
            for number, begin in enumerate(range(0, size, BLOCK * width)):
                end = min(begin + BLOCK * width, size)
                new = piece.new(begin, end)
                if not piece.is_replica:
                    task = partial(encode_block, piece, begin, end, new)
                    pending.append((number, blocks, begin_block(task)))
                hasher.update(new)
                if len(pending) > 2 * threads:
                    write_next()
            written.append((piece, hasher.hexdigest(), blocks))
        while pending:
            write_next()
    index = encode(
        DeltaIndex(
            pieces=tuple(
                DeltaPiece(name, dtype, box, digest, tuple(blocks), is_replica)
                for (name, dtype, box, _, _, is_replica), digest, blocks in written
            )
        )
    )
    write(index)
    write(LENGTH.pack(len(index)))
    return xxhash.xxh3_128_hexdigest(index)


class DeltaReader(Closing):
    """An open delta file, and its ``pieces`` (:func:`~.delta_index.read_index`).

    Several threads can share a reader, if each has its own :class:`~.encoding.Decoder`. Unless it
    ``stays_open``, the file is opened for each block.
    """

    def __init__(
        self,
        storage: Storage,
        path: Path,
        pieces: Sequence[DeltaPiece],
        *,
        stays_open: bool = True,
    ) -> None:
        self._storage = storage
        self._path = path
        self.pieces = pieces
        lengths = (sum(block.length for block in piece.blocks) for piece in pieces)
        self._offsets = list(accumulate(lengths, initial=0))
        self._fd = storage.open_read(path) if stays_open else 0

    def close(self) -> None:
        """Close the file."""
        if self._fd:
            self._storage.release(self._fd)

    def apply(
        self, number: int, old: Iterable[memoryview], decoder: Decoder
    ) -> Iterator[memoryview]:
        """Yield the new bytes of a piece, block by block, in the memory of the old ones.

        The memory must be writable; its content does not matter if the piece needs no base. Readers
        of consecutive deltas can be nested, if their pieces have the same box.

        Raises:
            DeltaError: the delta is damaged, or the old bytes are not the base's: at the latest
                after the last block.
        """
        piece = self.pieces[number]
        width, offset = ITEMSIZE[piece.dtype], self._offsets[number]
        blocks = {block.number: block for block in piece.blocks}
        hasher = xxhash.xxh3_128()
        for at, content in enumerate(old):
            if (block := blocks.get(at)) is not None:
                reading = self._storage.reading
                with nullcontext(self._fd) if self._fd else reading(self._path) as fd:
                    encoded = self._storage.pread_all(fd, block.length, offset)
                offset += block.length
                if xxhash.xxh3_64_hexdigest(encoded) != block.digest:
                    raise self._damaged(piece, f"block {at} does not have the digest in the index")
                try:
                    elements = as_elements(content, width)
                    decoder.apply(memoryview(encoded), block.changed, elements)
                except BlockError as error:
                    raise self._damaged(piece, f"block {at}: {error}") from None
            hasher.update(content)
            yield content
        if hasher.hexdigest() != piece.digest:
            raise self._damaged(piece, "the new bytes do not have the digest in the index")

    def _damaged(self, piece: DeltaPiece, why: str) -> DeltaError:
        return DeltaError(f"the delta {self._path} cannot be used: {shown(piece.name)}: {why}")
