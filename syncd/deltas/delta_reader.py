"""Read a delta, and check it against its target version.

The delta can be damaged or hostile. Before the reader allocates memory, it compares every length
with the largest length that the version's tensors allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.closing import Closing
from syncd.deltas.delta_folder import BLOCK, BLOCKS, ENTRY, INDEX, checked_files
from syncd.deltas.encoding import BlockError, Decoder, Elements
from syncd.deltas.ends import NoDeltaError, elements_of
from syncd.protocol.names import DELTA
from syncd.protocol.records import Delta, TensorEntry
from syncd.storage.fsio import Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENTRIES: Final = np.dtype(
    [("tensor", "<u4"), ("block", "<u4"), ("length", "<u4"), ("count", "<u4"), ("digest", "<u8")]
)


class DeltaReader(Closing):
    """An open delta with a checked index. Close it, or use it in ``with``.

    ``tensors`` must be the target's tensors, sorted by name. Methods take a tensor's index in this
    list, and raise NoDeltaError if a block is damaged. Several threads can share a reader, if each
    has its own :class:`~syncd.deltas.encoding.Decoder`.

    Raises:
        NoDeltaError: the delta is damaged, or does not fit these tensors.
        OSError: a file is missing, or cannot be read.
    """

    def __init__(
        self, storage: Storage, folder: Path, delta: Delta, tensors: Sequence[TensorEntry]
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._tensors = tensors
        files = checked_files(delta, folder)
        counts = np.array([elements_of(tensor) for tensor in tensors], np.int64)
        widths = np.array([ITEMSIZE[tensor.dtype] for tensor in tensors], np.int64)
        if files[INDEX].size > int(-(-counts // BLOCK).sum()) * ENTRY.size:
            raise self._broken("its index has more entries than the version has blocks")
        index = storage.read(folder / INDEX, files[INDEX].size)
        if xxhash.xxh3_128_hexdigest(index) != files[INDEX].digest:
            raise self._broken(f"the digest of its index is not the digest in {DELTA}")
        if len(index) % ENTRY.size:
            raise self._broken("its index does not hold a whole number of entries")
        self._entries = np.frombuffer(index, _ENTRIES)
        self._offsets = self._checked(delta, counts, widths, files[BLOCKS].size)
        keys = (self._entries["tensor"].astype(np.int64) << 32) | self._entries["block"]
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        if (self._keys[1:] == self._keys[:-1]).any():
            raise self._broken("its index has a block twice")
        status = storage.status(folder / BLOCKS)
        if status is None or status.st_size != files[BLOCKS].size:
            raise self._broken(f"the size of the file {BLOCKS} is not the size in {DELTA}")
        self._fd = storage.open_read(folder / BLOCKS)

    def _checked(
        self, delta: Delta, counts: NDArray[Any], widths: NDArray[Any], size: int
    ) -> NDArray[np.int64]:
        """Check the index; return the offset of each entry's block."""
        tensors, blocks = self._entries["tensor"], self._entries["block"].astype(np.int64)
        lengths = self._entries["length"].astype(np.int64)
        changed = self._entries["count"].astype(np.int64)
        if (tensors >= len(counts)).any():
            raise self._broken("its index names a tensor that the version does not have")
        left = counts[tensors] - blocks * BLOCK
        if (left <= 0).any():
            raise self._broken("its index has a block beyond the end of the tensor")
        inside = np.minimum(left, BLOCK)
        if (changed < 1).any() or (changed > inside).any():
            raise self._broken("its index has a block with no change or with too many changes")
        if (lengths < 1).any() or (lengths > inside * widths[tensors] + 1).any():
            raise self._broken("a block in its index is empty, or longer than its elements allow")
        if int(lengths.sum()) != size:
            raise self._broken("its blocks together are not as long as the file that holds them")
        if int(changed.sum()) != delta.changed or int(counts.sum()) != delta.elements:
            raise self._broken(
                f"the numbers of elements in {DELTA} do not fit the index or the version"
            )
        return np.cumsum(lengths) - lengths

    def close(self) -> None:
        """Close the file of blocks."""
        self._storage.release(self._fd)

    def apply(self, tensor: int, block: int, elements: Elements, decoder: Decoder) -> bool:
        """Replace a block's old elements by the new ones, in place; return False if none changed.

        After an error, ``elements`` can be a mixture of old and new values.
        """
        found = self._load(tensor, block)
        if found is None:
            return False
        encoded, count = found
        try:
            decoder.apply(encoded, count, elements)
        except BlockError as error:
            raise self._broken_block(tensor, block, error) from None
        return True

    def _load(self, tensor: int, block: int) -> tuple[memoryview, int] | None:
        """A block's encoded bytes and number of changes; None if it did not change."""
        key = tensor << 32 | block
        at = int(np.searchsorted(self._keys, key))
        if at == len(self._keys) or self._keys[at] != key:
            return None
        row = int(self._order[at])
        entry = self._entries[row]
        encoded = self._storage.pread_all(self._fd, int(entry["length"]), int(self._offsets[row]))
        if xxhash.xxh3_64_intdigest(encoded) != int(entry["digest"]):
            raise self._broken_block(tensor, block, "its digest is not the digest in the index")
        return memoryview(encoded), int(entry["count"])

    def _broken_block(self, tensor: int, block: int, why: object) -> NoDeltaError:
        return self._broken(f"block {block} of {shown(self._tensors[tensor].name)}: {why}")

    def _broken(self, why: str) -> NoDeltaError:
        return NoDeltaError(f"the delta {self._folder} cannot be used: {why}")
