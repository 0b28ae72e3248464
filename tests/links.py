"""Links for tests: pieces of random bytes, written to a file and read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncd.checkpoint.boxes import Box
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.deltas.delta_folder import BLOCK
from syncd.deltas.encoding import Decoder
from syncd.deltas.folding import LinkFolder
from syncd.deltas.link_index import Link, read_index
from syncd.deltas.links import Content, LinkReader, Piece, WrittenLink, write_link
from syncd.protocol.names import DELTA
from syncd.protocol.records import ReceiptFile, VersionFile, encode
from syncd.storage.fsio import Draft, Storage
from tests.deltas import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

STORAGE = Storage()


def written(path: Path, pieces: Sequence[Piece]) -> WrittenLink:
    """Write a link durably under this path."""
    with Draft(STORAGE, path) as draft:
        result = write_link(draft.write, pieces)
        draft.commit()
    return result


def blocks_of(content: bytes | bytearray, width: int) -> Iterator[memoryview]:
    """The old bytes of a piece, each block in memory of its own."""
    for begin in range(0, len(content), BLOCK * width):
        yield memoryview(bytearray(content[begin : begin + BLOCK * width]))


def applied(path: Path, digest: str, olds: dict[str, bytes]) -> dict[str, bytes]:
    """The new bytes of all pieces that have blocks or a base, by their names."""
    pieces = read_index(STORAGE, path, path.stat().st_size, digest)
    with LinkReader(STORAGE, path, pieces) as reader:
        return {
            piece.name: b"".join(
                reader.apply(number, blocks_of(olds[piece.name], ITEMSIZE[piece.dtype]), Decoder())
            )
            for number, piece in enumerate(pieces)
            if not piece.is_replica
        }


def write_links(
    folder: Path, old: Tensors | None, new: Tensors, world_size: int, names: Sequence[str]
) -> list[ReceiptFile]:
    """Write the link files of all ranks, each with uneven rows of the tensors.

    Tensors without rows are replicas on all ranks but the first. ``old`` is None for raw blocks.
    """
    listed = []
    for rank, file in enumerate(names):
        pieces = []
        for tensor, (dtype, values) in new.items():
            rows = values.shape[0] if values.shape else 0
            begin, end = (-(-rows // world_size) * r for r in (rank, rank + 1))
            box = Box((0,) * values.ndim, values.shape)
            if rows:
                box = Box(
                    (begin, *box.offsets[1:]), (max(0, min(end, rows) - begin), *box.shape[1:])
                )
                if not box.size:
                    continue
            part = slice(begin, end) if rows else ...
            before = None if old is None else _bytes(old[tensor][1][part])
            is_replica = not rows and rank > 0
            pieces.append(Piece(tensor, dtype, box, _bytes(values[part]), before, is_replica))
        result = written(folder / file, pieces)
        size = (folder / file).stat().st_size
        listed.append(ReceiptFile(name=file, size=size, digest=result.digest, over="index"))
    return listed


def _bytes(values: NDArray[Any]) -> Content:
    content = memoryview(values.tobytes())
    return lambda begin, end: content[begin:end]


def link_folder(
    folder: Path, base: str, target: str, old: Tensors | None, new: Tensors, world_size: int = 1
) -> LinkFolder:
    """A link as the daemon makes it."""
    folder.mkdir()
    names = [f"rank-{rank}" for rank in range(world_size)]
    files = tuple(
        VersionFile(name=one.name, size=one.size, digest=one.digest)
        for one in write_links(folder, old, new, world_size, names)
    )
    link = Link(base=base, target=target, files=files)
    (folder / DELTA).write_bytes(encode(link))
    return LinkFolder(folder, link)
