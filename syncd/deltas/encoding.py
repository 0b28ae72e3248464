"""The encoding of one block of a delta: which elements changed, and by how much.

An encoded block is a byte that says its kind, and:

- ``0``: the new bytes of the whole block.
- ``1``: three lengths (u32, little endian) and three parts. Each part is one zstd frame with its
  size in the header, or raw bytes if a frame is not shorter; a length below the part's own says
  that it is a frame.

The parts of kind 1, for changes at positions p₁ < p₂ < …:

1. *gaps*: pᵢ - pᵢ₋₁ - 1 (p₀ = -1), each as bytes 255 that add up, and a last byte below 255.
   Its own length, the fourth number of the header, cannot be known otherwise.
2. *changes*: min(z - 1, 255), one byte each; z is the zigzag of (new - old) mod 2^w, with w the
   bits of an element: z = 2d for 0 ≤ d < 2^(w-1), else 2(2^w - d) - 1.
3. *large changes*: z - 1 as an element of w bits, for each byte 255 of the changes.

Bits are compared and nothing else: NaN and -0 are exact.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from syncd.deltas.delta_folder import BLOCK

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import zstandard

#: Elements as unsigned integers of their width.
Elements = NDArray[np.unsignedinteger[Any]]
Positions = NDArray[np.uint32]
_Bytes = NDArray[np.uint8]

_RAW: Final = 0
_SPARSE: Final = 1
#: Kind, then the stored lengths of gaps, changes and large changes, and the gaps' own length.
_HEAD: Final = struct.Struct("<BIIII")
_MORE: Final = 255
#: A block that does not shrink below this part of its bytes is stored as it is.
_WORTH: Final = 0.6
_LEVEL: Final = 1
#: Shorter parts gain nothing by a frame.
_SHORT: Final = 32

#: The unsigned integer of each width in bytes.
UINT: Final[dict[int, np.dtype[Any]]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


class BlockError(ValueError):
    """Raised when an encoded block is not one; the text says why."""


def longest(elements: int, width: int) -> int:
    """The most bytes that an encoded block can have."""
    return 1 + elements * width


class Encoder:
    """Encodes blocks, one after the other."""

    def __init__(self) -> None:
        self._pack = _packer()

    def encode(self, old: Elements, new: Elements) -> tuple[bytes, int]:
        """Encode one block.

        Args:
            old: the elements, at most :data:`BLOCK`.
            new: as many, of the same width.

        Returns:
            The encoded block, and the number of elements that differ; nothing and 0 if none does.
        """
        positions = changed_positions(old, new)
        count = len(positions)
        if count == 0:
            return b"", 0
        width = new.itemsize
        gaps = _gap_bytes(positions)
        zigzag = _zigzag(new[positions] - old[positions], width)
        changes = np.minimum(zigzag, _MORE).astype(np.uint8)
        large = zigzag[changes == _MORE]
        parts = [self._part(part.tobytes()) for part in (gaps, changes, large)]
        size = _HEAD.size + sum(map(len, parts))
        if size >= _WORTH * new.nbytes:
            return bytes((_RAW,)) + new.tobytes(), count
        head = _HEAD.pack(_SPARSE, *map(len, parts), len(gaps))
        return b"".join((head, *parts)), count

    def _part(self, part: bytes) -> bytes:
        if len(part) < _SHORT:
            return part
        packed = self._pack(part)
        return packed if len(packed) < len(part) else part


def as_elements(memory: memoryview, width: int) -> Elements:
    """Bytes as elements, in the same memory."""
    found: Elements = np.frombuffer(memory, UINT[width])
    return found


def count_changed(old: Elements, new: Elements) -> int:
    """How many elements of two blocks differ."""
    return int(np.count_nonzero(old != new))


def changed_positions(old: Elements, new: Elements) -> Positions:
    """The positions at which two blocks differ, ascending."""
    return np.flatnonzero(old != new).astype(np.uint32)


def _gap_bytes(positions: Positions) -> _Bytes:
    gaps = np.diff(positions, prepend=np.uint32(0xFFFFFFFF)) - np.uint32(1)
    more = gaps // np.uint32(_MORE)
    longer = np.flatnonzero(more)
    if not len(longer):
        return gaps.astype(np.uint8)
    last = (gaps - more * np.uint32(_MORE)).astype(np.uint8)
    found = np.full(len(gaps) + int(more[longer].sum()), _MORE, np.uint8)
    found[np.cumsum(more, dtype=np.uint32) + np.arange(len(gaps), dtype=np.uint32)] = last
    return found


def _zigzag(difference: Elements, width: int) -> Elements:
    """Zigzag of differences mod 2^w, less 1: none of them is 0."""
    one = UINT[width].type(1)
    sign = difference >> UINT[width].type(8 * width - 1)
    found: Elements = ((difference << one) ^ (~sign + one)) - one
    return found


def _unzigzag(zigzag: Elements, width: int) -> Elements:
    one = UINT[width].type(1)
    zigzag = zigzag + one
    found: Elements = (zigzag >> one) ^ (~(zigzag & one) + one)
    return found


class Decoder:
    """Decodes blocks, one after the other. It believes nothing that a block says."""

    def __init__(self) -> None:
        self._unpack = _unpacker()

    def apply(self, block: memoryview, count: int, elements: Elements) -> None:
        """Make the new elements of a block out of the old ones, in place.

        Args:
            block: as :meth:`Encoder.encode` made it.
            count: the elements that changed.
            elements: the old ones; after an error they are neither the old ones nor the new.

        Raises:
            BlockError: it is not such a block.
        """
        sparse = self._sparse(block, count, len(elements), elements.itemsize)
        if sparse is None:
            elements[:] = np.frombuffer(block[1:], elements.dtype)
            return
        positions, changes, large = sparse
        width = elements.itemsize
        zigzag = changes.astype(UINT[width])
        if len(large):
            zigzag[changes == _MORE] = large
        elements[positions] += _unzigzag(zigzag, width)

    def positions(self, block: memoryview, count: int, elements: int, width: int) -> Positions:
        """The positions of the elements that a block changes, ascending.

        All of them, if the block holds new bytes and no changes.

        Raises:
            BlockError: it is not such a block.
        """
        sparse = self._sparse(block, count, elements, width)
        return np.arange(elements, dtype=np.uint32) if sparse is None else sparse[0]

    def _sparse(
        self, block: memoryview, count: int, elements: int, width: int
    ) -> tuple[Positions, _Bytes, Elements] | None:
        """The positions, changes and large changes of a checked block; None of one of kind 0."""
        if not 1 <= count <= elements <= BLOCK:
            raise BlockError(f"{count} of {elements} elements are said to change")
        if not block:
            raise BlockError("it is empty")
        if block[0] == _RAW:
            if len(block) != longest(elements, width):
                raise BlockError(f"it has {len(block) - 1} bytes for {elements} elements")
            return None
        if block[0] != _SPARSE or len(block) < _HEAD.size:
            raise BlockError("it begins with no kind of block that is known")
        _, *stored, gap_length = _HEAD.unpack_from(block)
        if _HEAD.size + sum(stored) != len(block):
            raise BlockError("the lengths of its parts do not sum up to its own")
        # A gap takes one byte, and one more for each 255 elements that are skipped.
        if not count <= gap_length <= count + elements // _MORE:
            raise BlockError(f"its gaps have {gap_length} bytes for {count} changes")
        begin = _HEAD.size
        gaps = self._part(block[begin : begin + stored[0]], gap_length)
        begin += stored[0]
        changes = self._part(block[begin : begin + stored[1]], count)
        begin += stored[1]
        positions = _positions(gaps, count, elements)
        more = int(np.count_nonzero(changes == _MORE))
        if more and width == 1:
            raise BlockError("it has changes of more than one byte, but its elements have one byte")
        large = self._part(block[begin:], more * width).view(UINT[width])
        if more and (large.min() < _MORE or large.max() == np.iinfo(large.dtype).max):
            raise BlockError("a large change is none")
        return positions, changes, large

    def _part(self, stored: memoryview, length: int) -> _Bytes:
        """The bytes of a part, of a length that is bounded already."""
        if len(stored) > length:
            raise BlockError("a part is longer than its content")
        if len(stored) == length:
            return np.frombuffer(stored, np.uint8)
        return np.frombuffer(self._unpack(stored, length), np.uint8)


def _positions(gaps: _Bytes, count: int, elements: int) -> Positions:
    ends = gaps != _MORE
    if int(np.count_nonzero(ends)) != count or not ends[-1]:
        raise BlockError("its gaps are not those of so many changes")
    reached = np.cumsum(gaps, dtype=np.uint32)
    if len(gaps) != count:
        reached = reached[ends]
    reached += np.arange(count, dtype=np.uint32)
    if int(reached[-1]) >= elements:
        raise BlockError("a change is outside the block")
    return reached


def _packer() -> Callable[[bytes], bytes]:
    if sys.version_info >= (3, 14):
        options = {zstd.CompressionParameter.compression_level: _LEVEL}
        return lambda data: zstd.compress(data, options=options)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    return compressor.compress


def _unpacker() -> Callable[[memoryview, int], bytes]:
    """A function that makes a frame's content of a length that its header must say too.

    The frame's own header is asked before anything is allocated: zstandard ignores
    ``max_output_size`` if the frame declares a size.
    """
    if sys.version_info >= (3, 14):

        def unpack(frame: memoryview, length: int) -> bytes:
            try:
                if zstd.get_frame_info(frame).decompressed_size != length:
                    raise BlockError("a part declares another length than it has")
                decompressor = zstd.ZstdDecompressor()
                found = decompressor.decompress(frame, max_length=length + 1)
            except zstd.ZstdError as error:
                raise BlockError(f"a part is no zstd frame: {error}") from None
            if len(found) != length or not decompressor.eof or decompressor.unused_data:
                raise BlockError("a part is no whole zstd frame")
            return found

        return unpack

    decompressor = zstandard.ZstdDecompressor()

    def unpack(frame: memoryview, length: int) -> bytes:
        try:
            if zstandard.frame_content_size(frame) != length:
                raise BlockError("a part declares another length than it has")
            found = decompressor.decompress(frame, length, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BlockError(f"a part is no zstd frame: {error}") from None
        if len(found) != length:
            raise BlockError("a part is no whole zstd frame")
        return found

    return unpack
