"""The encoding of one block of a delta: which elements changed, and by how much.

An encoded block is a byte for its kind, followed by:

- kind ``0``: the new bytes of the whole block.
- kind ``1``: four numbers (u32, little endian) and three parts. The first three numbers are the
  stored lengths of the parts; the fourth number is the unpacked length of the first part. A part is
  one zstd frame if its stored length is less than its unpacked length; otherwise the part is raw
  bytes. The header of a frame has the unpacked length.

The parts of kind ``1``, for changes at positions p₁ < p₂ < …:

1. *gaps*: for each change the number pᵢ - pᵢ₋₁ - 1 (with p₀ = -1), as bytes whose sum is this
   number: as many bytes 255 as fit, and a last byte below 255. Example: 300 is 255, 45.
2. *changes*: for each change one byte, min(z - 1, 255). z is the zigzag of d = (new - old) mod 2^w,
   where w is the number of bits of an element: z = 2d if d < 2^(w-1), otherwise 2(2^w - d) - 1.
3. *large changes*: for each byte 255 in part 2, z - 1 as an element of w bits.

Bits are compared, not numbers, so NaN and -0 are exact.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from syncd.deltas.limits import BLOCK

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import zstandard

#: Elements of a tensor, as unsigned integers of the same width.
Elements = NDArray[np.unsignedinteger[Any]]
Positions = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

_RAW: Final = 0
_SPARSE: Final = 1
#: The kind; the stored lengths of gaps, changes and large changes; the unpacked length of the gaps.
_HEAD: Final = struct.Struct("<BIIII")
_MORE: Final = 255
#: Kind 0 is used unless kind 1 is smaller than this fraction of the block's bytes.
_WORTH: Final = 0.6
#: If more than one flag in this many is set, NumPy's own search is fast.
_DENSE: Final = 10
#: If less than this fraction of the words differs, only the elements in these words are compared.
_FEW: Final = 0.35
#: A part of fewer bytes is not packed, because a frame would not be shorter.
_SHORT: Final = 32

#: A width in bytes → the unsigned integer of that width.
UINT: Final[dict[int, np.dtype[Any]]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


class BlockError(ValueError):
    """Raised if a block is damaged; the message is the reason."""


def longest(elements: int, width: int) -> int:
    """The most bytes that an encoded block can have."""
    return 1 + elements * width


def whole_block(new: memoryview) -> bytes:
    """Encode a block without its old elements."""
    return b"".join((bytes((_RAW,)), new))


class Encoder:
    """Encodes blocks, one after the other."""

    def __init__(self) -> None:
        self._pack = _packer()
        self._memory = np.empty(8 * BLOCK, np.uint8)

    def encode(self, old: Elements, new: Elements) -> tuple[bytes, int]:
        """Encode a block of at most :data:`BLOCK` elements.

        Returns the encoded block, and the number of elements that differ. If none differ, the block
        is empty.
        """
        positions, differences = self._changes(old, new)
        count = len(positions)
        if count == 0:
            return b"", 0
        width = new.itemsize
        gaps = _gap_bytes(positions)
        zigzag = _zigzag(differences, width)
        changes = np.minimum(zigzag, _MORE).astype(np.uint8, copy=False)
        large = zigzag[changes == _MORE]
        parts = [self._part(part.tobytes()) for part in (gaps, changes, large)]
        size = _HEAD.size + sum(map(len, parts))
        if size >= _WORTH * new.nbytes:
            return bytes((_RAW,)) + new.tobytes(), count
        return b"".join((_HEAD.pack(_SPARSE, *map(len, parts), len(gaps)), *parts)), count

    def _changes(self, old: Elements, new: Elements) -> tuple[Positions, Elements]:
        """The ascending positions at which two blocks differ, and ``new - old`` there."""
        difference: Elements = self._memory[: new.nbytes].view(new.dtype)
        np.subtract(new, old, out=difference)
        if new.nbytes % 8 == 0:
            # If few elements differ, equal words of eight bytes are skipped.
            words = difference.view(np.uint64)
            differ = words != 0
            if np.count_nonzero(differ) < _FEW * len(differ):
                at = _nonzero(differ)
                difference = words.take(at).view(new.dtype)
                inside = np.flatnonzero(difference != 0)
                shift = 4 - new.itemsize.bit_length()  # a word has 2**shift elements
                positions: Positions = (at.take(inside >> shift) << shift) | (
                    inside & ((1 << shift) - 1)
                )
                return positions, difference.take(inside)
        positions = np.flatnonzero(difference != 0)
        return positions, difference.take(positions)

    def _part(self, part: bytes) -> bytes:
        if len(part) < _SHORT:
            return part
        packed = self._pack(part)
        return packed if len(packed) < len(part) else part


def as_elements(memory: memoryview, width: int) -> Elements:
    """Bytes as elements of ``width`` bytes, in the same memory."""
    found: Elements = np.frombuffer(memory, UINT[width])
    return found


def _nonzero(flags: NDArray[np.bool_]) -> Positions:
    """The positions of all true flags.

    If few flags are true, NumPy's search is slow, because it tests each flag by a branch. This
    function tests groups of eight flags first.
    """
    if len(flags) % 8 or np.count_nonzero(flags) * _DENSE > len(flags):
        return np.flatnonzero(flags)
    eights = flags.view(np.uint64)
    groups = _nonzero(eights != 0)
    inside = np.flatnonzero(eights[groups].view(np.bool_))
    positions: Positions = (groups[inside >> 3] << 3) | (inside & 7)
    return positions


def _gap_bytes(positions: Positions) -> _Bytes:
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    if gaps.max() < _MORE:
        return gaps.astype(np.uint8)
    more = gaps // _MORE
    last = (gaps + more).astype(np.uint8)  # gaps - 255 more, mod 256
    more += 1
    ends = np.cumsum(more)
    found = np.full(int(ends[-1]), _MORE, np.uint8)
    ends -= 1
    found[ends] = last
    return found


def _zigzag(difference: Elements, width: int) -> Elements:
    """The zigzag of differences mod 2^w, minus 1. Every difference must be nonzero."""
    one = UINT[width].type(1)
    sign = difference >> UINT[width].type(8 * width - 1)
    found: Elements = ((difference << one) ^ (~sign + one)) - one
    return found


def _unzigzag(zigzag: Elements) -> Elements:
    """The inverse of :func:`_zigzag`, in the same memory."""
    zigzag += 1
    sign = zigzag & 1
    zigzag >>= 1
    zigzag ^= np.negative(sign, out=sign)
    return zigzag


class Decoder:
    """Decodes blocks, one after the other.

    Methods raise BlockError if a block is damaged, or does not fit the other arguments.
    """

    def __init__(self) -> None:
        self._unpack = _unpacker()
        self._numbers = np.arange(0)

    def apply(self, block: memoryview, count: int, elements: Elements) -> None:
        """Replace the old elements of a block by the new elements, in place.

        ``count`` is the number of elements that changed. After an error, ``elements`` can be a
        mixture of old and new values.
        """
        sparse = self._sparse(block, count, len(elements), elements.itemsize)
        if sparse is None:
            elements[:] = np.frombuffer(block[1:], elements.dtype)
            return
        positions, changes, large = sparse
        zigzag = changes.astype(elements.dtype)
        if len(large):
            zigzag[changes == _MORE] = large
        np.add.at(elements, positions, _unzigzag(zigzag))

    def _sparse(
        self, block: memoryview, count: int, elements: int, width: int
    ) -> tuple[Positions, _Bytes, Elements] | None:
        """Check a block, and return its positions, changes and large changes; None for kind 0."""
        if not 1 <= count <= elements <= BLOCK:
            raise BlockError(
                f"it declares {count} changes for {elements} elements, which is impossible"
            )
        if not block:
            raise BlockError("it is empty")
        if block[0] == _RAW:
            if len(block) != longest(elements, width):
                raise BlockError(
                    f"it has {len(block) - 1} bytes for {elements} elements, which is impossible"
                )
            return None
        if block[0] != _SPARSE or len(block) < _HEAD.size:
            raise BlockError("it is an unknown kind of block, or is too short")
        _, *stored, gap_length = _HEAD.unpack_from(block)
        if _HEAD.size + sum(stored) != len(block):
            raise BlockError("the lengths of its parts do not sum up to its own length")
        # A gap takes one byte, and one more byte for each 255 elements that it skips.
        if not count <= gap_length <= count + elements // _MORE:
            raise BlockError(
                f"its gaps have {gap_length} bytes for {count} changes, which is impossible"
            )
        begin = _HEAD.size
        gaps = self._part(block[begin : begin + stored[0]], gap_length)
        begin += stored[0]
        changes = self._part(block[begin : begin + stored[1]], count)
        begin += stored[1]
        more = int(np.count_nonzero(changes == _MORE))
        if more and width == 1:
            raise BlockError("it has changes of more than one byte, but its elements have one byte")
        large = self._part(block[begin:], more * width).view(UINT[width])
        if more and (large.min() < _MORE or large.max() == np.iinfo(large.dtype).max):
            raise BlockError("a value in the part for large changes is out of range")
        return self._positions(gaps, count, elements), changes, large

    def _part(self, stored: memoryview, length: int) -> _Bytes:
        """The unpacked bytes of a part. The caller must have checked ``length`` (bytes)."""
        if len(stored) > length:
            raise BlockError("a part is longer than its unpacked content")
        part = stored if len(stored) == length else self._unpack(stored, length)
        return np.frombuffer(part, np.uint8)

    def _positions(self, gaps: _Bytes, count: int, elements: int) -> Positions:
        ends = gaps != _MORE
        if int(np.count_nonzero(ends)) != count or not ends[-1]:
            raise BlockError("its gaps do not match its number of changes")
        reached = np.cumsum(gaps, dtype=np.int64)
        if len(gaps) != count:
            reached = reached[ends]
        reached += self._first(count)
        if reached[-1] >= elements:
            raise BlockError("a change is outside the block")
        return reached

    def _first(self, count: int) -> Positions:
        """The numbers from 0 to ``count - 1``, from an array that is kept for the next call.

        It grows on demand: for a whole block it takes 8 MiB in each thread.
        """
        if len(self._numbers) < count:
            self._numbers = np.arange(count)
        return self._numbers[:count]


def _packer() -> Callable[[bytes], bytes]:
    """A function that makes a zstd frame, with options that allow few matches.

    Repeated sequences in gaps and changes are accidental, so a match saves less than entropy
    coding. These options take half the time of zstd's level 1, and make smaller frames.
    """
    if sys.version_info >= (3, 14):
        options = {
            zstd.CompressionParameter.strategy: zstd.Strategy.fast,
            zstd.CompressionParameter.window_log: 20,
            zstd.CompressionParameter.hash_log: 6,
            zstd.CompressionParameter.min_match: 7,
        }
        return lambda data: zstd.compress(data, options=options)
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=20, hash_log=6, min_match=7
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress


def _unpacker() -> Callable[[memoryview, int], bytes]:
    """A function that unpacks a zstd frame; the frame's header must declare the given length.

    The function checks this before it allocates memory, because zstandard ignores
    ``max_output_size`` if the header declares a length.
    """
    if sys.version_info >= (3, 14):

        def unpack(frame: memoryview, length: int) -> bytes:
            try:
                if zstd.get_frame_info(frame).decompressed_size != length:
                    raise BlockError("a part declares an unexpected length")
                decompressor = zstd.ZstdDecompressor()
                found = decompressor.decompress(frame, max_length=length + 1)
            except zstd.ZstdError as error:
                raise BlockError(f"a part is not a zstd frame: {error}") from None
            if len(found) != length or not decompressor.eof or decompressor.unused_data:
                raise BlockError("a part is not exactly one complete zstd frame")
            return found

        return unpack

    decompressor = zstandard.ZstdDecompressor()

    def unpack(frame: memoryview, length: int) -> bytes:
        try:
            if zstandard.frame_content_size(frame) != length:
                raise BlockError("a part declares an unexpected length")
            return decompressor.decompress(frame, length, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BlockError(f"a part is not a zstd frame: {error}") from None

    return unpack
