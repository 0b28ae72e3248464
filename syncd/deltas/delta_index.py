"""A delta: the file in which one rank saves what changed since an earlier save, its base.

::

    blocks   the encoded blocks, one after the other, in the order of the index
    index    a DeltaIndex, as JSON
    length   of the index in bytes: 8 bytes, little endian

A piece is a part of a tensor. Its elements in C order are divided into blocks of 2^20; the last can
be shorter. A block without changes has no entry. Nothing here imports NumPy.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Container
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import pydantic
import xxhash
from pydantic import FailFast, Field

from syncd.checkpoint.boxes import Box, holds
from syncd.checkpoint.tensor_rules import ITEMSIZE, NUMBER_LIMIT, name_fault, shape_of, shown
from syncd.deltas.limits import BLOCK, LONGEST_CHAIN, DeltaError
from syncd.protocol.errors import ProtocolMismatchError, RecordError
from syncd.protocol.names import DELTA
from syncd.protocol.records import Digest, NonFinite, Record, Size, VersionFile, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage
from syncd.storage.job import IF_ANY, Job, delta_folders

log = logging.getLogger(__name__)

#: The most bytes of an index: enough for 5 * 10^11 elements, and parsed in 0.5 GB.
INDEX_LIMIT: Final = 32 * 1024 * 1024
LENGTH: Final = struct.Struct("<Q")


class DeltaBlock(NamedTuple):
    """An entry: a block of a piece in which ``changed`` elements changed.

    ``length`` is that of the encoded block in bytes, and ``digest`` its xxh3-64.
    """

    number: Size
    length: Size
    changed: Size
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class DeltaPiece:
    """A part of a tensor on one rank; ``digest`` is the xxh3-128 of its new bytes.

    If ``is_replica``, another rank has the blocks of this part, and this rank none.
    """

    name: str
    dtype: str
    box: Box
    digest: Digest
    blocks: Annotated[tuple[DeltaBlock, ...], FailFast()] = ()
    is_replica: bool = False

    @property
    def needs_base(self) -> bool:
        """False if each block has all its new elements."""
        size = self.box.size * ITEMSIZE[self.dtype]
        return sum(one.length - 1 for one in self.blocks) < size


class DeltaIndex(Record):
    """The pieces of one rank."""

    pieces: Annotated[tuple[DeltaPiece, ...], FailFast()]


class DeltaRecord(Record):
    """``delta.json`` of a delta: the save ``target``, as changes against the save ``base``.

    ``files`` has ``rank-R`` for each rank, in order; ``digest`` is the xxh3-128 of a file's index.
    """

    base: str
    target: str
    files: Annotated[tuple[VersionFile, ...], FailFast()]
    nonfinite: NonFinite | None = None


class DeltaFolder(NamedTuple):
    """A delta's folder and its record."""

    folder: Path
    record: DeltaRecord


#: The bytes of a piece from one offset to another.
Content = Callable[[int, int], memoryview]


class SavedPiece(NamedTuple):
    """A part of a tensor to save; ``dtype`` is safetensors' name.

    Attributes:
        old: the bytes in the base; None if they are not known, so that all of ``new`` is written.
        is_replica: whether another rank writes the changes of this part.
    """

    name: str
    dtype: str
    box: Box
    new: Content
    old: Content | None
    is_replica: bool = False


class RawIndex(NamedTuple):
    """An index that is not parsed yet; ``blocks`` is the size of all blocks in its file."""

    path: Path
    blocks: int
    content: bytes


def read_index(storage: Storage, path: Path, size: int, digest: str) -> tuple[DeltaPiece, ...]:
    """Read and check the pieces in a delta file, but none of its blocks.

    For the arguments and errors see :func:`load_index`.
    """
    return parse_index(load_index(storage, path, size, digest))


def load_index(storage: Storage, path: Path, size: int, digest: str) -> RawIndex:
    """Read the index of a delta file.

    ``size`` is the file's, ``digest`` the xxh3-128 of its index, as the receipt has them.

    Raises:
        DeltaError: the file is damaged, or another one.
        OSError: it is missing, or cannot be read.
    """
    with storage.reading(path) as fd:
        end = size - LENGTH.size
        if storage.fstat(fd).st_size != size or end < 0:
            raise DeltaError(f"{path} does not have {size} bytes, as its receipt says")
        (length,) = LENGTH.unpack(storage.pread_all(fd, LENGTH.size, end))
        if length > min(end, INDEX_LIMIT):
            raise DeltaError(f"{path} declares an index of {length} bytes, which is too long")
        content = storage.pread_all(fd, length, end - length)
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise DeltaError(f"the index of {path} does not have the digest in its receipt")
    return RawIndex(path, end - length, content)


def parse_index(index: RawIndex) -> tuple[DeltaPiece, ...]:
    """Parse and check an index; raises DeltaError."""
    path, blocks, content = index
    try:
        pieces = parse(DeltaIndex, content, path).pieces
    except (ProtocolMismatchError, RecordError) as error:
        raise DeltaError(str(error)) from None
    names = set()
    for piece in pieces:
        fault = name_fault(piece.name)
        if fault is None and not _is_possible(piece):
            fault = "has an impossible dtype, box or block"
        if fault is None and (piece.name, piece.box.offsets) in names:
            fault = "comes twice"
        if fault is not None:
            raise DeltaError(f"{path}: {shown(piece.name)} {fault}")
        names.add((piece.name, piece.box.offsets))
    if sum(block.length for piece in pieces for block in piece.blocks) != blocks:
        raise DeltaError(f"the blocks of {path} are not as long as its index says")
    return pieces


def _is_possible(piece: DeltaPiece) -> bool:
    ends = piece.box.ends if len(piece.box.offsets) == len(piece.box.shape) else None
    width, last = ITEMSIZE.get(piece.dtype), -1
    if width is None or ends is None or shape_of(ends) is None or not holds(ends, piece.box):
        return False
    for block in piece.blocks:
        inside = min(piece.box.size - block.number * BLOCK, BLOCK)
        if not (last < block.number and 1 <= block.changed <= inside):
            return False
        if not 1 < block.length <= 1 + inside * width:
            return False
        last = block.number
    return piece.box.size < NUMBER_LIMIT and not (piece.is_replica and piece.blocks)


def find_deltas(
    job: Job, sequence: int, save_id: str, bases: Container[str], others: Container[str]
) -> list[DeltaFolder]:
    """The deltas from one of the saves ``bases`` to the save of a version, in order.

    If there are none, those from one of the saves ``others``.

    Raises:
        DeltaError: there are none, or more than :data:`LONGEST_CHAIN`.
        OSError: storage failed.
    """
    _refresh(job)
    chain: list[DeltaFolder] = []
    wanted, count = save_id, 0
    # A delta comes after the delta to its base, so this ends even if deltas lead in a circle.
    for number in (one for one in reversed(delta_folders(job)) if one <= sequence):
        folder = job.layout.delta(number)
        # The daemon can delete it any time, and one that cannot be read may be of no use here.
        delta = job.read(DeltaRecord, folder / DELTA, IF_ANY)
        if delta is not None and delta.target == wanted:
            chain.append(DeltaFolder(folder, delta))
            wanted = delta.base
            if wanted in bases:
                return chain[::-1]
            if wanted in others:
                count = len(chain)
            if len(chain) == LONGEST_CHAIN:
                break
    if count:
        return chain[:count][::-1]
    raise DeltaError(f"no deltas lead to v{sequence} from a version on this host")


def _refresh(job: Job) -> None:
    """Make this host ask the server for the names of deltas."""
    for folder in (job.layout.deltas, job.layout.root):  # the second if the first is not known yet
        try:
            job.storage.refresh(folder)
        except OSError as error:
            log.debug("cannot refresh the cached list of the files in %s: %s", folder, error)
            if is_gone(error):
                continue
        break
