"""Opening a save's files of weights, and finding out what they contain."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.dcp.dcp_file import DcpFile, OneByOne
from syncd.checkpoint.dcp.dcp_metadata import Chunk, Chunked, StoredModel, whole_shapes
from syncd.checkpoint.gc_pause import uncollected
from syncd.checkpoint.merging.options import Checked
from syncd.checkpoint.merging.plan import ShardIndex
from syncd.checkpoint.merging.source_reader import Source
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.placement import Chunks, Local, Position, Shape
from syncd.checkpoint.safetensors_file import ReadFields, SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.checkpoint.sandbox.isolated import IsolatedParser, ParseLimits
from syncd.checkpoint.save import (
    PICKLED_ADAPTER,
    Dcp,
    FullStateDict,
    HuggingFaceParts,
    LoraAdapter,
    SavedWeights,
    Shards,
)
from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.torch_files.pieces import PICKLE_LIMIT
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.protocol.errors import (
    CheckpointError,
    CoverageError,
    SaveNotReadyError,
    ShardFormatError,
)
from syncd.protocol.names import DCP_METADATA
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage

_METADATA_MIB: Final = PICKLE_LIMIT // (1024 * 1024)
#: Names with these prefixes are not weights, if nothing else shows which names are weights.
_NO_MODEL: Final = ("optim.", "optimizer.", "optimizers.")


@dataclass
class OpenSave:
    """A save with its files of weights open.

    Attributes:
        prefix: the beginning of the model's tensor names; None to find it.
        stack: closes the files.
        shards: in rank order; empty if the weights are not shards.
        chunked: the open files of a save of ``torch.distributed.checkpoint``, if it is one.
        indexes: the indexes of these files, in the same order.
        files: the open safetensors files of whole tensors (a full state dict, named tensors), or
            the single file of an adapter.
        beside: the open file of an adapter beside weights that hold it too.
        parser: the child process that reads all that may be damaged or hostile.
    """

    storage: Storage
    actor: Path
    save: SavedWeights
    parser: IsolatedParser
    stack: ExitStack
    cancel: Check
    limits: ParseLimits
    prefix: str | None

    def __post_init__(self) -> None:
        self.shards: list[ShardFile] = []
        self.chunked: list[Source] = []
        self.indexes: Sequence[ShardIndex] = ()
        self.files: list[SafetensorsFile] = []
        self.beside: list[SafetensorsFile] = []
        self.vouched = self.save.vouched()
        self._found = 0

    def check(self, name: str, size: int, digest: str | None) -> None:
        """Raise SaveNotReadyError for a file that is not the one in a receipt."""
        listed = self.vouched.get(name)
        if listed is not None and (listed.size, listed.digest) != (size, digest):
            raise SaveNotReadyError(
                f"{self.actor / name} is not the file that the receipt of save "
                f"{self.save.identity} lists: the file is being replaced, or was damaged"
            )

    @property
    def sources(self) -> Sequence[Source]:
        """The open files of the weights."""
        return self.shards or self.chunked or self.files

    @property
    def checked(self) -> Checked:
        """The evidence that the open files hold the bytes that the trainer wrote."""
        if self.save.receipts:
            return "receipt"
        return "crc32" if all(source.has_crc for source in self.sources) else "stillness"

    def tensors(self, shard: ShardFile) -> Mapping[str, Local | Chunks]:
        """The tensors of one of the shards. Call this method only once for each shard.

        Raises:
            CheckpointError: the shard cannot be merged, or the shards have too many tensors.
        """
        found = shard.tensors(parse=self.parser.read_pieces)
        self._found += sum(max(1, len(value.locals)) for value in found.values())
        self.check_count(shard.path, self._found, "tensors")
        return found

    def check_count(self, path: Path, count: int, what: str) -> None:
        """Raise ShardFormatError if the files up to this one have too many tensors or records."""
        if count > self.limits.tensors:
            raise ShardFormatError(
                f"{path}: the files up to this one have more than {self.limits.tensors} {what}, "
                "which would take gigabytes of memory to merge. Save the model's own state dict, "
                "or use fewer ranks"
            )

    def open_whole(self, name: str, parse: ReadFields | None = None) -> SafetensorsFile:
        """Open a safetensors file; it is closed with the save.

        Raises:
            CheckpointError: the file is not a whole safetensors file, or a pickle of an adapter.
        """
        path = self.actor / name
        if name == PICKLED_ADAPTER:
            raise CheckpointError(
                f"{path} is a pickle, which syncd never loads. Remove the pickle, and save the "
                "adapter with PeftModel.save_pretrained, which writes adapter_model.safetensors. "
                "If both files are there, one of them is of an older save"
            )
        file = SafetensorsFile.open(self.storage, path, parse=parse or self.parser.read_fields)
        self.stack.callback(file.close)
        return file

    def forget_tensors(self) -> None:
        """Drop the index of tensors, to free memory; the files stay open."""
        for shard in self.shards:
            shard.forget_tensors()
        self.indexes = ()


@contextmanager
def open_save(
    storage: Storage,
    actor: Path,
    save: SavedWeights,
    *,
    prefix: str | None = None,
    cancel: Check = lambda: None,
    limits: ParseLimits | None = None,
) -> Iterator[OpenSave]:
    """Open all files of a whole save, and check each file against its receipt.

    ``save`` must be the latest result of ``look_at_save``. ``prefix`` is as in ``MergeOptions``. A
    child process parses the files.

    Raises:
        SaveNotReadyError: a file is gone, or differs from its receipt; call ``look_at_save`` again.
        CheckpointError: a file cannot be read or merged, or the adapter is a pickle.
        OSError: the child process cannot be started.
    """
    job = actor.parent.parent if limits is None else None
    limits = limits or ParseLimits()
    records = -100 * len(save.weights)  # some records of each file belong to no tensor
    with IsolatedParser(cancel=cancel, limits=limits, job=job) as parser, ExitStack() as stack:
        opened = OpenSave(storage, actor, save, parser, stack, cancel, limits, prefix)
        try:
            match save:
                case Dcp() | HuggingFaceParts(receipts=()):
                    read = _open_dcp if isinstance(save, Dcp) else _open_hugging_face
                    opened.indexes = read(opened)
                case FullStateDict() | LoraAdapter() | HuggingFaceParts():
                    for name in save.weights:
                        cancel()
                        file = opened.open_whole(name)
                        opened.files.append(file)
                        opened.check(name, file.size, file.header_digest)
                case Shards():
                    for name in save.weights:
                        cancel()
                        shard = ShardFile.open(storage, actor / name, cancel=cancel)
                        stack.callback(shard.close)
                        opened.shards.append(shard)
                        records += len(shard.records)
                        opened.check_count(shard.path, records, "records")
                        opened.check(name, shard.size, shard.directory_digest)
        except OSError as error:
            if is_gone(error):
                raise SaveNotReadyError(f"{error.filename or actor} is gone") from error
            raise
        yield opened


@uncollected()
def _open_dcp(given: OpenSave) -> list[ShardIndex]:
    """Open a folder of ``.metadata`` and ``.distcp`` files, and find all chunks of the model.

    Raises:
        CheckpointError: a file cannot be read or contradicts the metadata, or
            :func:`~syncd.checkpoint.dcp.dcp_metadata.read_metadata` fails.
    """
    path = given.actor / DCP_METADATA
    contents = _read_metadata(given.storage, path, given.parser, given.prefix)
    chunks: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for name, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            chunks[chunk.file].append((name, chunk))
    given.check_count(path, sum(map(len, chunks.values())), "chunks")
    saved = given.save.weights[1:]
    for name in sorted(chunks.keys() - set(saved)):
        raise CoverageError(
            f"{given.actor / name} is not there, but {DCP_METADATA} says that this file holds "
            f"'{shown(chunks[name][0][0])}'. Save again"
        )
    # Open at least one file, so that the plan includes a model that has only empty tensors.
    labels = [name for name in saved if name in chunks] or saved[:1]
    parse = OneByOne(given.parser.read_tensor)
    found: list[dict[str, list[Local]]] = []
    for label in labels:
        file = DcpFile.open(given.storage, given.actor / label)
        given.stack.callback(file.close)
        parts: dict[str, list[Local]] = defaultdict(list)
        for name, chunk in sorted(chunks.get(label, ()), key=lambda one: one[1].at):
            given.cancel()
            dtype, shape, _ = contents.tensors[name]
            parts[name].append(file.look_up(name, dtype, shape, chunk, parse=parse))
        given.chunked.append(file)
        found.append(parts)
    whole = {name: (dtype, shape) for name, (dtype, shape, _) in contents.tensors.items()}
    return _indexes(labels, found, whole)


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


def _open_hugging_face(given: OpenSave) -> list[ShardIndex]:
    """Open the files of ``HuggingFaceStorageWriter``.

    The files do not say which part of a state dict a tensor comes from. Without a prefix, every
    tensor therefore counts as the model's.

    Raises:
        CheckpointError: a file cannot be read or merged, two files disagree, no name begins with
            the prefix, or there is an optimizer but no prefix.
    """
    prefix = given.prefix or ""
    chunks_of: dict[str, list[Chunked]] = {}
    for label in given.save.weights:
        given.cancel()
        offsets: dict[str, Shape] = {}

        def parse(header: bytes, where: str, into: dict[str, Shape] = offsets) -> list[HeaderEntry]:
            chunked = given.parser.read_chunked_fields(header, where)
            into.update((entry.name, begin) for entry, begin in chunked)
            return [entry for entry, _ in chunked]

        file = given.open_whole(label, parse)
        chunks_of[label] = [
            (entry._replace(name=entry.name.removeprefix(prefix)), offsets[entry.name])
            for entry in file.entries
            if entry.name.startswith(prefix) and entry.name != prefix
        ]
        for entry, _ in chunks_of[label]:
            if given.prefix is None and entry.name.startswith(_NO_MODEL):
                raise CheckpointError(
                    f"{file.path} also holds '{shown(entry.name)}', which is not a weight. Save "
                    "only the model, or give the model's prefix with --prefix (dcp_prefix)"
                )
        given.chunked.append(file)
        given.check_count(file.path, sum(map(len, chunks_of.values())), "chunks")
    whole = whole_shapes(chunks_of)
    if prefix and not whole:
        raise CheckpointError(
            f"{given.actor} has no tensor whose name begins with {shown(prefix)!r}: give another "
            "--prefix (dcp_prefix)"
        )
    parts = [
        {
            name: [Local(dtype, shape, at, end - at, "", Position(whole[name][1], begin))]
            for (name, dtype, shape, at, end), begin in chunks
            if 0 not in shape
        }
        for chunks in chunks_of.values()
    ]
    return _indexes(given.save.weights, parts, whole)


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
