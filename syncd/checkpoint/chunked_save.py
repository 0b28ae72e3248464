"""Opening the saves of ``torch.distributed.checkpoint``: files that hold chunks of tensors.

The files are ``.distcp`` files with their ``.metadata``, or Hugging Face's safetensors. The merge
plan proves later that the chunks cover each tensor.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from syncd.checkpoint.dcp.dcp_file import DcpFile, OneByOne
from syncd.checkpoint.dcp.dcp_metadata import Chunk, Stored, StoredModel
from syncd.checkpoint.dcp.hf_dcp import Chunked, whole_shapes
from syncd.checkpoint.gc_pause import uncollected
from syncd.checkpoint.merging.plan import ShardIndex
from syncd.checkpoint.merging.source_reader import Source, SourceFile
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.placement import Chunks, Local, Position, Shape
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.checkpoint.sandbox.isolated import IsolatedParser
from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.torch_files.pieces import PICKLE_LIMIT
from syncd.protocol.errors import CheckpointError, CoverageError, ShardFormatError
from syncd.protocol.names import DCP_METADATA
from syncd.storage.fsio import Storage

_METADATA_MIB: Final = PICKLE_LIMIT // (1024 * 1024)
#: Names with these prefixes are not weights, if nothing else shows which names are weights.
_NO_MODEL: Final = ("optim.", "optimizer.", "optimizers.")


class ChunkedSave(NamedTuple):
    """The open files, and their indexes in the same order."""

    indexes: Sequence[ShardIndex]
    sources: Sequence[Source]


class Opening(NamedTuple):
    """The arguments for opening a save of either kind.

    Attributes:
        files: the save's files in ``actor`` except ``.metadata``, in rank order.
        prefix: the beginning of the model's tensor names; None to find it.
        tensor_limit: the largest number of chunks in all files together.
        cancel: called often; it raises an error to stop.
        stack: closes the files.
    """

    storage: Storage
    actor: Path
    files: Sequence[str]
    parser: IsolatedParser
    prefix: str | None
    tensor_limit: int
    cancel: Check
    stack: ExitStack


@uncollected()
def open_dcp(given: Opening) -> ChunkedSave:
    """Open a folder of ``.metadata`` and ``.distcp`` files, and find all chunks of the model.

    Raises:
        CheckpointError: a file cannot be read or contradicts the metadata, or
            :func:`~syncd.checkpoint.dcp.dcp_metadata.read_metadata` fails.
    """
    path = given.actor / DCP_METADATA
    contents = _read_metadata(given.storage, path, given.parser, given.prefix)
    chunks = _by_file(contents.tensors)
    _check_count(path, sum(map(len, chunks.values())), given)
    for name in sorted(chunks.keys() - set(given.files)):
        raise CoverageError(
            f"{given.actor / name} is not there, but {DCP_METADATA} says that this file holds "
            f"'{shown(chunks[name][0][0])}'. Save again"
        )
    # Open at least one file, so that the plan includes a model that has only empty tensors.
    labels = [name for name in given.files if name in chunks] or list(given.files[:1])
    parse = OneByOne(given.parser.read_tensor)
    files: list[DcpFile] = []
    found: list[dict[str, list[Local]]] = []
    for label in labels:
        file = DcpFile.open(given.storage, given.actor / label)
        given.stack.callback(file.close)
        parts: dict[str, list[Local]] = defaultdict(list)
        for name, chunk in sorted(chunks.get(label, ()), key=lambda one: one[1].at):
            given.cancel()
            dtype, shape, _ = contents.tensors[name]
            parts[name].append(file.look_up(name, dtype, shape, chunk, parse=parse))
        files.append(file)
        found.append(parts)
    whole = {name: (dtype, shape) for name, (dtype, shape, _) in contents.tensors.items()}
    return ChunkedSave(_indexes(labels, found, whole), files)


def holds_model_only(storage: Storage, actor: Path, *, prefix: str | None, cancel: Check) -> bool:
    """True if a folder of ``torch.distributed.checkpoint`` certainly holds only a model.

    Raises:
        OSError: no child process can be started.
    """
    try:
        with IsolatedParser(cancel=cancel) as parser:
            return _read_metadata(storage, actor / DCP_METADATA, parser, prefix).is_model_only
    except CheckpointError:
        return False  # the merge says why


def _read_metadata(
    storage: Storage, path: Path, parser: IsolatedParser, prefix: str | None
) -> StoredModel:
    try:
        data = storage.read(path, PICKLE_LIMIT)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ShardFormatError(
            f"{path} is larger than {_METADATA_MIB} MiB. Save only the model, or use fewer ranks"
        ) from None
    return parser.read_metadata(data, str(path), prefix=prefix)


def open_hugging_face(given: Opening) -> ChunkedSave:
    """Open the files of ``HuggingFaceStorageWriter``.

    The files do not say which part of a state dict a tensor comes from. Without a prefix, every
    tensor therefore counts as the model's.

    Raises:
        CheckpointError: a file cannot be read or merged, two files disagree, no name begins with
            the prefix, or there is an optimizer but no prefix.
    """
    prefix = given.prefix or ""
    found: dict[str, list[Chunked]] = {}
    sources = []
    for label in given.files:
        given.cancel()
        offsets: dict[str, Shape] = {}

        def parse(header: bytes, where: str, told: dict[str, Shape] = offsets) -> list[HeaderEntry]:
            chunked = given.parser.read_chunked_fields(header, where)
            told.update((entry.name, begin) for entry, begin in chunked)
            return [entry for entry, _ in chunked]

        file = SafetensorsFile.open(given.storage, given.actor / label, parse=parse)
        given.stack.callback(file.close)
        found[label] = [
            (entry._replace(name=entry.name.removeprefix(prefix)), offsets[entry.name])
            for entry in file.entries
            if entry.name.startswith(prefix) and entry.name != prefix
        ]
        for entry, _ in found[label]:
            if given.prefix is None and entry.name.startswith(_NO_MODEL):
                raise CheckpointError(
                    f"{file.path} also holds '{shown(entry.name)}', which is not a weight. Save "
                    "only the model, or give the model's prefix with --prefix (dcp_prefix)"
                )
        sources.append(SourceFile(file.path, file.fd))
        _check_count(file.path, sum(map(len, found.values())), given)
    whole = whole_shapes(found)
    if prefix and not whole:
        raise CheckpointError(
            f"{given.actor} has no tensor whose name begins with {shown(prefix)!r}: give another "
            "--prefix (dcp_prefix)"
        )
    parts = [
        {
            entry.name: [_local(entry, begin, whole[entry.name][1])]
            for entry, begin in chunks
            if 0 not in entry.shape
        }
        for chunks in found.values()
    ]
    return ChunkedSave(_indexes(given.files, parts, whole), sources)


def _local(entry: HeaderEntry, begin: Shape, whole: Shape) -> Local:
    _, dtype, shape, at, end = entry
    return Local(dtype, shape, at, end - at, "", Position(whole, begin))


def _by_file(tensors: Mapping[str, Stored]) -> dict[str, list[tuple[str, Chunk]]]:
    found: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            found[chunk.file].append((name, chunk))
    return found


def _indexes(
    labels: Sequence[str],
    parts: Sequence[Mapping[str, Sequence[Local]]],
    whole: Mapping[str, tuple[str, Shape]],
) -> list[ShardIndex]:
    """The index of each file.

    The first index lists all tensors, so that the plan keeps the order of their names, and detects
    tensors that have no part in any file.
    """
    return [
        ShardIndex(
            label,
            {
                name: Chunks(*whole[name], tuple(held.get(name, ())))
                for name in (held if number else whole)
            },
        )
        for number, (label, held) in enumerate(zip(labels, parts, strict=True))
    ]


def _check_count(path: Path, count: int, given: Opening) -> None:
    if count > given.tensor_limit:
        raise ShardFormatError(
            f"{path}: the save has over {given.tensor_limit} chunks of tensors, which would take "
            "gigabytes of memory to merge. Save the model's own state dict, or use fewer ranks"
        )
