"""The folder of a delta: the format of its files, and their checks.

::

    delta.json   the record
    index        an entry of 24 bytes for each block that changed
    blocks       the encoded blocks, one after the other, in the order of the index

Each block has 2^20 elements of one tensor, except the last block of a tensor, which can be shorter.
A block without changes has no entry.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import xxhash

from syncd.deltas.ends import NoDeltaError
from syncd.protocol.names import DELTA
from syncd.protocol.records import Delta, VersionFile, parse
from syncd.storage.fsio import Storage

INDEX: Final = "index"
BLOCKS: Final = "blocks"
#: The number of elements of a block.
BLOCK: Final = 2**20
#: An entry of the index, little endian: the number of the tensor in the order of the names, the
#: number of the block in the tensor, the size in bytes of the encoded block, the number of elements
#: that changed in the block, and the xxh3-64 of the encoded block.
ENTRY: Final = struct.Struct("<IIIIQ")
#: If more than this fraction of the elements changes, no delta is made: it would save little.
DENSEST: Final = 0.30
_BUFFER: Final = 1024 * 1024


def read_delta(storage: Storage, folder: Path) -> Delta:
    """Read the record in a delta's folder; raise RecordError if it is damaged."""
    path = folder / DELTA
    return parse(Delta, storage.read(path), path)


def verify_delta(storage: Storage, folder: Path, delta: Delta) -> None:
    """Raise NoDeltaError if the size or digest of a delta's file differs from the record."""
    for file in checked_files(delta, folder).values():
        path = folder / file.name
        hasher = xxhash.xxh3_128()
        fd = storage.open_read(path)
        try:
            size = storage.fstat(fd).st_size
            while size == file.size and (part := storage.read_part(fd, _BUFFER)):
                hasher.update(part)
        finally:
            storage.release(fd)
        if size != file.size or hasher.hexdigest() != file.digest:
            raise NoDeltaError(f"{path} does not have the size and the digest that {DELTA} records")


def checked_files(delta: Delta, folder: Path) -> dict[str, VersionFile]:
    """The files ``index`` and ``blocks``; raise NoDeltaError unless the record lists just these."""
    files = {file.name: file for file in delta.files}
    if (
        sorted(files) != [BLOCKS, INDEX]
        or len(delta.files) != len(files)
        or any(file.digest is None for file in delta.files)
    ):
        raise NoDeltaError(
            f"{folder / DELTA} must list exactly two files, {INDEX} and {BLOCKS}, with their "
            "digests, but does not"
        )
    return files
