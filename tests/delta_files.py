"""Deltas for tests: pieces of random bytes, written to a file and read back."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.deltas.delta_file import DeltaReader, write_delta
from syncd.deltas.delta_index import SavedPiece, read_index
from syncd.deltas.encoding import Decoder
from syncd.deltas.limits import BLOCK
from syncd.storage.fsio import Draft, Storage

STORAGE = Storage()


def written(path: Path, pieces: Sequence[SavedPiece]) -> str:
    """Write a delta durably under this path; return the digest of its index."""
    with Draft(STORAGE, path) as draft:
        digest = write_delta(draft.write, pieces)
        draft.commit()
    return digest


def blocks_of(content: bytes | bytearray, width: int) -> Iterator[memoryview]:
    """The old bytes of a piece, each block in memory of its own."""
    for begin in range(0, len(content), BLOCK * width):
        yield memoryview(bytearray(content[begin : begin + BLOCK * width]))


def applied(path: Path, digest: str, olds: dict[str, bytes]) -> dict[str, bytes]:
    """The new bytes of all pieces that have blocks or a base, by their names."""
    pieces = read_index(STORAGE, path, path.stat().st_size, digest)
    with DeltaReader(STORAGE, path, pieces) as reader:
        return {
            piece.name: b"".join(
                reader.apply(number, blocks_of(olds[piece.name], ITEMSIZE[piece.dtype]), Decoder())
            )
            for number, piece in enumerate(pieces)
            if not piece.is_replica
        }
