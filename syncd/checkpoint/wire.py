"""What a parsing child and its parent say to each other: requests as bytes, answers as JSON.

A request is a kind, the number of bytes, and the bytes. An answer is frames: any number of ``ROWS``
and one ``DONE``, or one ``FAILED``. The child may have been taken over by what it read, so that
the parent takes nothing from it but JSON of a limited length, and checks every value.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final

from syncd.checkpoint import placement
from syncd.checkpoint.pieces import Piece
from syncd.checkpoint.placement import Sharding, Unmergeable
from syncd.checkpoint.safetensors_header import Entry, checked_entry
from syncd.checkpoint.tensor_rules import (
    ITEMSIZE,
    NUMBER_LIMIT,
    is_offset,
    name_fault,
    shape_of,
    shown,
)
from syncd.protocol.errors import PlacementError, ShardFormatError

REQUEST: Final = struct.Struct("<cQ")
PICKLE: Final = b"P"
HEADER: Final = b"H"

FRAME: Final = struct.Struct("<cI")
READY: Final = b"+"
ROWS: Final = b"R"
DONE: Final = b"."
FAILED: Final = b"!"
#: The most bytes of one frame: a batch, and the longest row that there can be behind it.
FRAME_LIMIT: Final = 1024 * 1024
_BATCH: Final = 64 * 1024
_TEXT_LIMIT: Final = 200

#: What a child says by ``FAILED``. Others are a mistake of ours or a lie, and of no kind.
ERRORS: Final = {kind.__name__: kind for kind in (ShardFormatError, PlacementError)}
OUT_OF_MEMORY: Final = "MemoryError"

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode

#: Any JSON.
Row = Any


def frames(rows: Iterable[Row]) -> Iterator[bytes]:
    """The ``ROWS`` frames of an answer, each with a batch of rows, and ``DONE``."""
    batch: list[str] = []
    size = 0
    for row in rows:
        text = _encode(row)
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield frame(ROWS, f"[{','.join(batch)}]".encode())
            batch, size = [], 0
    if batch:
        yield frame(ROWS, f"[{','.join(batch)}]".encode())
    yield frame(DONE, b"")


def frame(tag: bytes, content: bytes) -> bytes:
    """One frame."""
    return FRAME.pack(tag, len(content)) + content


def failure(kind: str, message: str) -> bytes:
    """The ``FAILED`` frame."""
    return frame(FAILED, json.dumps([kind, shown(message, 2000)]).encode())


def read_failure(content: bytes) -> tuple[str, str]:
    """The kind of error and what it says.

    Raises:
        ValueError: it is not what :func:`failure` writes.
    """
    match _json(content):
        case [str(kind), str(message)]:
            return kind, shown(message, 2000)
    raise ValueError("is no failure")


def read_rows(content: bytes) -> list[Row]:
    """The rows of a ``ROWS`` frame, each to be read by one of the functions below.

    Raises:
        ValueError: they are no list.
    """
    rows = _json(content)
    if not isinstance(rows, list):
        raise ValueError("is no list of rows")  # noqa: TRY004 - all that a child says is a value
    return rows


def _json(content: bytes) -> Row:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("is nested too deep") from None


def piece_row(name: str, piece: Piece | Unmergeable) -> Row:
    """A named piece as JSON."""
    if isinstance(piece, Unmergeable):
        return [name, piece.reason]
    dtype, shape, key, offset, layout = piece
    if layout is None:
        return [name, dtype, shape, key, offset, None]
    placements = list(map(_placement_json, layout.placements))
    where = [layout.global_shape, layout.mesh_shape, layout.coordinate, placements]
    return [name, dtype, shape, key, offset, where]


def read_piece(row: Row, layouts: dict[Hashable, Sharding]) -> tuple[str, Piece | Unmergeable]:
    """The name and the piece of a row.

    Args:
        row: any JSON.
        layouts: those that were read before, to be had again without all the checks.

    Raises:
        ValueError: it is not what :func:`piece_row` writes.
    """
    match row:
        case [str(name), str(reason)] if name_fault(name) is None:
            return name, Unmergeable(shown(reason, 1000))
        case [str(name), str(dtype), sizes, str(key), offset, where]:
            shape = shape_of(sizes)
            if (
                name_fault(name) is None
                and dtype in ITEMSIZE
                and shape is not None
                and len(key) <= _TEXT_LIMIT
                and is_offset(offset)
            ):
                layout = None if where is None else _sharding(where, layouts)
                return name, Piece(dtype, shape, key, offset, layout)
    raise ValueError("is no piece of a tensor")


def read_entry(row: Row) -> Entry:
    """The entry of a row, which is its five values.

    Raises:
        ValueError: it is none.
    """
    entry = checked_entry(*row) if isinstance(row, list) and len(row) == 5 else None
    if entry is None:
        raise ValueError("is no entry of a header")
    return entry


def _sharding(row: Row, known: dict[Hashable, Sharding]) -> Sharding:
    match row:
        case [list(shape), list(mesh), list(at), list(placements)]:
            key = (tuple(shape), tuple(mesh), tuple(at), tuple(placements))
            try:
                layout = known.get(key)
            except TypeError:
                raise ValueError("is no layout") from None
            if layout is None:
                layout = known[key] = _checked_sharding(shape, mesh, at, placements)
            return layout
    raise ValueError("is no layout")


def _checked_sharding(
    shape: list[Row], mesh: list[Row], at: list[Row], placements: list[Row]
) -> Sharding:
    whole, ranks, coordinate = shape_of(shape), shape_of(mesh), shape_of(at)
    if whole is not None and ranks is not None and coordinate is not None:
        placed = tuple(map(_read_placement, placements))
        if len(ranks) == len(coordinate) == len(placed) and all(
            place < size for place, size in zip(coordinate, ranks, strict=True)
        ):
            return Sharding(whole, ranks, coordinate, placed)
    raise ValueError("is no layout")


def _placement_json(value: placement.Placement) -> Row:
    match value:
        case placement.Shard(dim):
            return dim
        case placement.Replicate():
            return None
    return value.text


def _read_placement(value: Row) -> placement.Placement:
    if value is None:
        return placement.Replicate()
    if type(value) is int and abs(value) < NUMBER_LIMIT:
        return placement.Shard(value)
    if isinstance(value, str):
        return placement.Other(shown(value))
    raise ValueError("is no placement")
