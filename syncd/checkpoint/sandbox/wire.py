"""The child process that reads untrusted pickles and JSON, and its messages with the parent.

If the child exceeds its limits of memory or processor time, only it fails.


A request is a kind, the number of bytes, and the bytes. An answer is any number of ``ROWS`` frames,
then a ``DONE`` or a ``FAILED`` frame. A malicious file may have taken control of the child.
Therefore the parent accepts only JSON of limited length, and checks every value. The functions that
read an answer raise ValueError if a value is invalid.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import resource
import struct
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import starmap
from typing import Any, Final

from syncd.checkpoint.dcp.dcp_metadata import (
    Chunk,
    Stored,
    StoredModel,
    is_distcp,
    read_chunked_fields,
    read_metadata,
)
from syncd.checkpoint.placement import Position, Shape
from syncd.checkpoint.safetensors_header import HeaderEntry, checked_entry, read_fields
from syncd.checkpoint.sandbox.confinement import address_space, confine, limit
from syncd.checkpoint.tensor_rules import (
    ITEMSIZE,
    PART_LIMIT,
    is_offset,
    name_fault,
    shape_of,
    shown,
)
from syncd.checkpoint.torch_files.pieces import Piece, Pieces, read_pieces, read_tensor
from syncd.protocol.errors import (
    CheckpointError,
    CoverageError,
    PlacementError,
    ShardFormatError,
)

REQUEST: Final = struct.Struct("<cQ")
PICKLE: Final = b"P"
HEADER: Final = b"H"
#: A safetensors header that has the places of chunks.
CHUNKED_HEADER: Final = b"C"
#: These two requests begin with a word (:func:`asked`): a tensor's name, or a prefix of names.
TENSOR: Final = b"T"
METADATA: Final = b"M"
NAME_MAP: Final = b"N"

FRAME: Final = struct.Struct("<cI")
READY: Final = b"+"
ROWS: Final = b"R"
DONE: Final = b"."
FAILED: Final = b"!"
#: The most bytes of one frame: a batch, and the longest possible row after it.
FRAME_LIMIT: Final = 1024 * 1024
_BATCH: Final = 64 * 1024
_TEXT_LIMIT: Final = 200
_NO_PIECE: Final = "the answer lists something that is not a piece of a tensor"

#: The kinds of error in ``FAILED``. Any other kind is a bug in syncd, or a lie.
ERRORS: Final = {
    kind.__name__: kind
    for kind in (ShardFormatError, PlacementError, CoverageError, CheckpointError)
}
OUT_OF_MEMORY: Final = "MemoryError"

#: Names were checked before, so none has half a surrogate pair, which UTF-8 cannot encode.
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

#: Any JSON.
Row = Any


def asked(word: str | None, data: bytes) -> bytes:
    """The content of a request: a tensor's name or a prefix, then the bytes."""
    return json.dumps(word).encode() + b"\n" + data


def read_asked(request: bytes) -> tuple[str | None, bytes]:
    """Split the result of :func:`asked`."""
    word, _, data = request.partition(b"\n")
    told: str | None = json.loads(word)
    return told, data


def frames(rows: Iterable[Row]) -> Iterator[bytes]:
    """The frames of an answer: batches of rows, and ``DONE``."""
    batch: list[str] = []
    size = 0
    for row in rows:
        text = _encode(row)
        batch.append(text)
        size += len(text)  # characters, of four bytes at most
        if size >= _BATCH:
            yield frame(ROWS, f"[{','.join(batch)}]".encode())
            batch, size = [], 0
    if batch:
        yield frame(ROWS, f"[{','.join(batch)}]".encode())
    yield frame(DONE, b"")


def frame(tag: bytes, content: bytes) -> bytes:
    """The tag, the length, and the content as bytes."""
    return FRAME.pack(tag, len(content)) + content


def failure(kind: str, message: str) -> bytes:
    """The ``FAILED`` frame for an error."""
    return frame(FAILED, json.dumps([kind, shown(message, 2000)]).encode())


def read_failure(content: bytes) -> tuple[str, str]:
    """The kind and the message of the error in a ``FAILED`` frame."""
    match _json(content):
        case [str(kind), str(message)]:
            return kind, shown(message, 2000)
    raise ValueError("the answer is an error without a message")


def read_rows(content: bytes) -> list[Row]:
    """The rows of a ``ROWS`` frame."""
    rows = _json(content)
    if not isinstance(rows, list):
        raise ValueError("the answer has a frame that is not a list")  # noqa: TRY004 - all that a child says is a value
    return rows


def _json(content: bytes) -> Row:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the answer is JSON with too many nested lists") from None


def piece_row(name: str, piece: Piece | Pieces) -> Row:
    """The piece or pieces of a named tensor, as a row."""
    if isinstance(piece, Piece):
        return [name, *piece]
    return [name, piece.dtype, piece.shape, list(map(list, piece.pieces))]


def read_piece(row: Row, known: dict[Hashable, Any]) -> tuple[str, Piece | Pieces]:
    """The name and the piece or pieces in a row.

    ``known`` has the positions and shapes of earlier rows, so that equal objects are kept once.
    """
    if isinstance(row, list) and row and name_fault(row[0]) is None:
        name, *fields = row
        if len(fields) == 5:
            return name, _read_piece(fields, known)
        match fields:
            case [str(dtype), sizes, list(parts)] if dtype in ITEMSIZE:
                shape = shape_of(sizes)
                pieces = tuple(_read_piece(part, known) for part in parts)
                if shape is not None and all(
                    piece.dtype == dtype and piece.position and piece.position.global_shape == shape
                    for piece in pieces
                ):
                    return name, Pieces(dtype, shape, pieces)
    raise ValueError(_NO_PIECE)


def read_bare(row: Row) -> Piece:
    """The piece in a row. The row must have no name and no position."""
    if isinstance(row, list) and row[:1] == [""]:
        piece = _read_piece(row[1:], {})
        if piece.position is None:
            return piece
    raise ValueError("the answer is not one whole, unnamed tensor")


def _read_piece(fields: Row, known: dict[Hashable, Any]) -> Piece:
    if isinstance(fields, list) and len(fields) == 5:  # faster than a pattern
        dtype, sizes, key, offset, where = fields
        shape = shape_of(sizes)
        is_text = isinstance(dtype, str) and isinstance(key, str) and len(key) <= _TEXT_LIMIT
        if is_text and dtype in ITEMSIZE and shape is not None and is_offset(offset):
            shape = known.setdefault(shape, shape)
            position = None if where is None else _position(where, shape, known)
            return Piece(sys.intern(dtype), shape, sys.intern(key), offset, position)
    raise ValueError(_NO_PIECE)


def read_entry(row: Row) -> HeaderEntry:
    """The header entry in a row."""
    entry = checked_entry(*row) if isinstance(row, list) and len(row) == 5 else None
    if entry is None:
        raise ValueError("the answer lists something that is not an entry of the file's header")
    return entry


def read_chunked(row: Row) -> tuple[HeaderEntry, Shape]:
    """The entry and its offsets in a row."""
    if isinstance(row, list) and row:
        entry, offsets = read_entry(row[:-1]), shape_of(row[-1])
        if offsets is not None and len(offsets) == len(entry.shape):
            return entry, offsets
    raise ValueError("the answer has a header entry with wrong offsets")


def name_map_rows(content: bytes) -> Iterator[Row]:
    """The fields of a name map, as rows: the tensors come last, each in a row."""
    try:
        fields = json.loads(content)
        tensors = fields.pop("tensors", {}).items()
    except (ValueError, AttributeError, RecursionError) as error:
        raise ShardFormatError(f" is not a name map: {error}") from None
    yield {name: fields[name] for name in ("protocol", "refused") if name in fields}
    yield from map(list, tensors)


def read_name_map(rows: Iterable[Row]) -> dict[str, Row]:
    """The fields of a name map from all rows of an answer; only their number is checked."""
    left = iter(rows)
    fields, tensors, count = next(left, None), {}, 0
    for row in left:
        match row:
            case [str(name), tensor]:
                tensors[name] = tensor
                count += len(tensor.get("pieces", ())) if isinstance(tensor, dict) else 1
            case _:
                raise ValueError("the answer lists something that is not a tensor's names")
        if count > PART_LIMIT:
            raise ValueError(f"it lists more than {PART_LIMIT} tensors")
    if not isinstance(fields, dict):
        raise ValueError("the answer does not begin with the map's fields")  # noqa: TRY004 - all that a child says is a value
    return {**fields, "tensors": tensors}


def contents_rows(contents: StoredModel) -> Iterator[Row]:
    """A checkpoint's model, as rows. The rows of a tensor's chunks follow the tensor's row."""
    yield [contents.is_model_only]
    for name, (dtype, shape, chunks) in contents.tensors.items():
        yield [name, dtype, shape]
        yield from map(list, chunks)


def read_contents(rows: Iterable[Row]) -> StoredModel:
    """The model from all rows of an answer."""
    read: dict[str, tuple[str, Shape, list[Chunk]]] = {}
    left = iter(rows)
    match next(left, None):
        case [bool(is_model_only)]:
            pass
        case _:
            raise ValueError("the answer does not begin with a description of the checkpoint")
    name = ""
    for row in left:
        match row:
            case [str(name), str(dtype), list(sizes)]:
                shape = shape_of(sizes)
                known = name_fault(name) is None and name not in read and dtype in ITEMSIZE
                if shape is None or not known:
                    raise ValueError("the answer has an invalid tensor")
                read[name] = dtype, shape, []
            case [begin, sizes, file, at, length] if name in read:
                offsets, shape = shape_of(begin), shape_of(sizes)
                if (
                    offsets is None
                    or shape is None
                    or not len(offsets) == len(shape) == len(read[name][1])
                    or not (is_distcp(file) and is_offset(at) and is_offset(length))
                ):
                    raise ValueError("the answer has an invalid chunk")
                read[name][2].append(Chunk(offsets, shape, sys.intern(file), at, length))
            case _:
                raise ValueError("the answer lists something that is neither a tensor nor a chunk")
    tensors = {
        name: Stored(dtype, shape, tuple(chunks)) for name, (dtype, shape, chunks) in read.items()
    }
    return StoredModel(tensors, is_model_only)


def _position(row: Row, shape: Shape, known: dict[Hashable, Any]) -> Position:
    match row:
        case [list(whole), list(offsets), mesh] if mesh is None or is_offset(mesh):
            key = (tuple(whole), tuple(offsets), mesh)
            with suppress(TypeError):  # an offset is a list, for example
                position: Position | None = known.get(key)
                if position is None:
                    sizes, begin = shape_of(whole), shape_of(offsets)
                    if sizes is not None and begin is not None:
                        position = known[key] = Position(sizes, begin, mesh)
                # The shape of a part without elements may have any number of dimensions.
                fits = len(whole) == len(shape) or 0 in shape
                if position is not None and len(offsets) == len(whole) and fits:
                    return position
    raise ValueError("the answer gives an invalid position for a tensor's piece")


#: Exit status if there is not even memory to report the lack of it.
EXIT_MEMORY: Final = 70
#: The functions that answer each kind of request.
Answers = Mapping[bytes, Callable[[bytes], Iterable[Row]]]


def run(rows: Answers | None = None) -> None:
    """Call :func:`main` with the command-line arguments after the folders."""
    try:
        main(rows or _ROWS, *map(int, sys.argv[2:]))
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BrokenPipeError:
        pass  # the parent has gone


def main(
    rows: Answers, memory: int, memory_factor: int, memory_most: int, cpu_seconds: int
) -> None:
    """Answer requests until standard input ends. The limits are those of ``ParseLimits``."""
    base = address_space()
    confine()
    # Lower the hard limit for good: a request can change only the soft limit below it.
    limit(resource.RLIMIT_AS, base + memory_most, for_good=True)
    gc.disable()  # collections would take half of the time and find nothing
    requests, answers = io.FileIO(0, "r"), io.FileIO(1, "w")
    _send(answers, frame(READY, b""))
    while head := _take(requests, REQUEST.size):
        kind, length = REQUEST.unpack(head)
        allowed = min(memory + memory_factor * length, memory_most)
        limit(resource.RLIMIT_AS, base + allowed)
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = math.ceil(used.ru_utime + used.ru_stime)
        limit(resource.RLIMIT_CPU, spent + cpu_seconds)
        try:
            _answer(answers, rows[kind], _take(requests, length))
        except MemoryError:
            _send(answers, failure(OUT_OF_MEMORY, ""))
        gc.collect()


def _answer(answers: io.FileIO, rows: Callable[[bytes], Iterable[Row]], data: bytes) -> None:
    try:
        for part in frames(rows(data)):
            _send(answers, part)
    except tuple(ERRORS.values()) as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        _send(answers, failure(type(error).__name__, str(error)))


# Messages begin with the file's name, which the parent adds. Pickles are read in C even if no
# CRC-32 vouches for the bytes: the limit bounds the memory that a damaged memo index takes.


def _tensor(data: bytes) -> Iterable[Row]:
    name, pickled = read_asked(data)
    return [piece_row("", read_tensor(pickled, "", name or ""))]


def _metadata(data: bytes) -> Iterable[Row]:
    prefix, pickled = read_asked(data)
    return contents_rows(read_metadata(pickled, "", prefix=prefix, intact=True))


_ROWS: Final[Answers] = {
    PICKLE: lambda data: starmap(piece_row, read_pieces(data, "", intact=True).items()),
    TENSOR: _tensor,
    METADATA: _metadata,
    HEADER: lambda data: read_fields(data, ""),
    CHUNKED_HEADER: lambda data: ([*entry, at] for entry, at in read_chunked_fields(data, "")),
    NAME_MAP: name_map_rows,
}


def _take(requests: io.FileIO, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        done = requests.readinto(view)
        if not done:
            return b""
        view = view[done:]
    view.release()
    return bytes(data)


def _send(answers: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[answers.write(view) :]
