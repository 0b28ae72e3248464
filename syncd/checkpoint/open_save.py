"""A save with its weights open: the descriptors that all of a merge is read through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from syncd.checkpoint.chunked_save import ChunkedSave, Opening, open_dcp, open_hugging_face
from syncd.checkpoint.isolated import IsolatedParser, Limits
from syncd.checkpoint.pieces import read_pieces
from syncd.checkpoint.placement import Chunks, Local
from syncd.checkpoint.safetensors_file import ReadFields, SafetensorsFile
from syncd.checkpoint.safetensors_header import read_fields
from syncd.checkpoint.save import PICKLED_ADAPTER, Save
from syncd.checkpoint.shard_file import ReadPieces, ShardFile
from syncd.checkpoint.source_reader import Source
from syncd.protocol.errors import CheckpointError, SaveNotReadyError, ShardFormatError
from syncd.protocol.names import DCP_METADATA
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage


@dataclass(slots=True)
class OpenSave:
    """A save whose weights are open; everything is read through these descriptors.

    Attributes:
        save: which.
        shards: the open shards, in rank order; none where the weights are something else.
        chunked: the open files of a save of ``torch.distributed.checkpoint``.
        full: the one file, open: a full state dict or an adapter.
        parse: reads the shards' pickles: those of another trainer in a child process.
        limits: what reading may take.
    """

    save: Save
    shards: list[ShardFile] = field(default_factory=list)
    chunked: ChunkedSave | None = None
    full: SafetensorsFile | None = None
    parse: ReadPieces = read_pieces
    limits: Limits = field(default_factory=Limits)
    _found: int = 0

    @property
    def sources(self) -> Sequence[Source]:
        """The open files of several ranks, whatever they are."""
        return self.shards if self.chunked is None else self.chunked.sources

    @property
    def checked(self) -> Literal["receipt", "crc32", "stillness"]:
        """How the merge can tell that these bytes are what the trainer wrote."""
        if self.save.receipts:
            return "receipt"
        has_crc = bool(self.sources) and all(source.has_crc for source in self.sources)
        return "crc32" if has_crc else "stillness"

    def tensors(self, shard: ShardFile) -> Mapping[str, Local | Chunks]:
        """The tensors of one of the shards; asked for once each.

        Raises:
            ShardFormatError: it cannot be read, or all shards together have too many.
            PlacementError: a tensor's device mesh is of an unknown layout.
            OSError: it cannot be read now.
        """
        found = shard.tensors(parse=self.parse)
        self._found += sum(
            max(1, len(value.locals)) if isinstance(value, Chunks) else 1
            for value in found.values()
        )
        if self._found > self.limits.tensors:
            raise _too_many(shard.path, self.limits, "tensors")
        return found


@contextmanager
def open_save(
    storage: Storage,
    actor: Path,
    save: Save,
    *,
    prefix: str | None = None,
    cancel: Callable[[], None] = lambda: None,
    limits: Limits | None = None,
) -> Iterator[OpenSave]:
    """Open all files of a whole save, and check each against its receipt.

    What a save without receipts holds is parsed in a child process, which ends with it.

    Args:
        storage: the shared storage.
        actor: the ``actor/`` folder of the save.
        save: as it was looked at last.
        prefix: what the model's names begin with, in a save of ``torch.distributed.checkpoint``;
            None to find out.
        cancel: called often; it raises to stop.
        limits: what reading may take.

    Raises:
        SaveNotReadyError: a file is gone, or is another one than its receipt says: look again.
        ShardFormatError: a file is not one that can be read.
        CheckpointError: the adapter is a pickle; or as :mod:`~syncd.checkpoint.chunked_save` says.
        OSError: as the storage says, or no child can be started.
    """
    if save.weights == (PICKLED_ADAPTER,):
        raise CheckpointError(
            f"{actor / PICKLED_ADAPTER} is a pickle, which is never loaded: save the adapter with "
            "PeftModel.save_pretrained, which writes adapter_model.safetensors, and remove this one"
        )
    vouched = save.vouched()
    limits = limits or Limits()
    opened = OpenSave(save, limits=limits)
    records = 0
    with ExitStack() as stack:
        read_header: ReadFields = read_fields
        if not save.receipts:
            parser = stack.enter_context(IsolatedParser(cancel=cancel, limits=limits))
            opened.parse, read_header = parser.read_pieces, parser.read_fields
        try:
            if save.is_dcp or save.is_in_parts:  # which never have receipts
                given = Opening(
                    storage=storage,
                    actor=actor,
                    files=tuple(name for name in save.weights if name != DCP_METADATA),
                    parser=parser,
                    prefix=prefix,
                    tensor_limit=limits.tensors,
                    cancel=cancel,
                    stack=stack,
                )
                opened.chunked = (open_dcp if save.is_dcp else open_hugging_face)(given)
            for name in () if opened.chunked else save.weights:
                cancel()
                file: ShardFile | SafetensorsFile
                if save.is_one_file:
                    file = SafetensorsFile.open(storage, actor / name, parse=read_header)
                    stack.callback(file.close)
                    opened.full, digest = file, file.header_digest
                else:
                    file = ShardFile.open(storage, actor / name, cancel=cancel)
                    stack.callback(file.close)
                    opened.shards.append(file)
                    digest = file.directory_digest
                    records += len(file.records)
                    # Some of each are no tensor's.
                    if records > limits.tensors + 100 * len(save.weights):
                        raise _too_many(file.path, limits, "records")
                told = vouched.get(name)
                if told is not None and (told.size, told.digest) != (file.size, digest):
                    raise SaveNotReadyError(
                        f"{actor / name} is not the file that its receipt of save "
                        f"{save.identity} vouches for: it is being replaced, or was damaged"
                    )
        except OSError as error:
            if is_gone(error):
                raise SaveNotReadyError(f"{error.filename or actor} is gone") from error
            raise
        yield opened


def _too_many(path: Path, limits: Limits, what: str) -> ShardFormatError:
    return ShardFormatError(
        f"{path}: the shards up to this one have over {limits.tensors} {what}, which would take "
        "gigabytes of memory to merge: save the model's own state dict, from fewer ranks"
    )
