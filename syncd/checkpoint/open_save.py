"""Opening a save's files of weights, through which a merge reads all bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from syncd.checkpoint.chunked_save import ChunkedSave, Opening, open_dcp, open_hugging_face
from syncd.checkpoint.merging.options import Checked
from syncd.checkpoint.merging.source_reader import Source
from syncd.checkpoint.placement import Chunks, Local
from syncd.checkpoint.safetensors_file import SafetensorsFile
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
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.protocol.errors import CheckpointError, SaveNotReadyError, ShardFormatError
from syncd.protocol.names import DCP_METADATA
from syncd.protocol.records import ReceiptFile
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage


@dataclass
class OpenSave:
    """A save with its files of weights open.

    Attributes:
        shards: in rank order; empty if the weights are not shards.
        chunked: the open files of a save of ``torch.distributed.checkpoint``.
        files: the open safetensors files of whole tensors (a full state dict, named tensors), or
            the single file of an adapter.
        parser: the child process that reads all that may be damaged or hostile.
    """

    save: SavedWeights
    parser: IsolatedParser
    shards: list[ShardFile] = field(default_factory=list)
    chunked: ChunkedSave | None = None
    files: list[SafetensorsFile] = field(default_factory=list)
    limits: ParseLimits = field(default_factory=ParseLimits)
    _found: int = 0

    @property
    def sources(self) -> Sequence[Source]:
        """The open shards, or the open files of ``torch.distributed.checkpoint``."""
        return self.shards if self.chunked is None else self.chunked.sources

    @property
    def checked(self) -> Checked:
        """The evidence that the open files hold the bytes that the trainer wrote."""
        if self.save.receipts:
            return "receipt"
        has_crc = bool(self.sources) and all(source.has_crc for source in self.sources)
        return "crc32" if has_crc else "stillness"

    def tensors(self, shard: ShardFile) -> Mapping[str, Local | Chunks]:
        """The tensors of one of the shards. Call this method only once for each shard.

        Raises:
            CheckpointError: the shard cannot be merged, or the shards have too many tensors.
        """
        found = shard.tensors(parse=self.parser.read_pieces)
        self._found += sum(
            max(1, len(value.locals)) if isinstance(value, Chunks) else 1
            for value in found.values()
        )
        if self._found > self.limits.tensors:
            raise _too_many(shard.path, self.limits, "tensors")
        return found

    def forget_tensors(self) -> None:
        """Drop the index of tensors, to free memory; the files stay open."""
        for shard in self.shards:
            shard.forget_tensors()
        if self.chunked is not None:
            self.chunked = self.chunked._replace(indexes=())


@contextmanager
def open_save(
    storage: Storage,
    actor: Path,
    save: SavedWeights,
    *,
    prefix: str | None = None,
    cancel: Callable[[], None] = lambda: None,
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
    if isinstance(save, LoraAdapter) and save.weights == (PICKLED_ADAPTER,):
        raise CheckpointError(
            f"{actor / PICKLED_ADAPTER} is a pickle, which syncd never loads. Remove the pickle, "
            "and save the adapter with PeftModel.save_pretrained, which writes "
            "adapter_model.safetensors"
        )
    vouched = save.vouched()
    job = actor.parent.parent if limits is None else None
    limits = limits or ParseLimits()
    records = 0
    with IsolatedParser(cancel=cancel, limits=limits, job=job) as parser, ExitStack() as stack:
        opened = OpenSave(save, parser, limits=limits)
        try:
            match save:
                case Dcp() | HuggingFaceParts(receipts=()):
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
                    open_files = open_dcp if isinstance(save, Dcp) else open_hugging_face
                    opened.chunked = open_files(given)
                case FullStateDict() | LoraAdapter() | HuggingFaceParts():
                    for name in save.weights:
                        cancel()
                        file = SafetensorsFile.open(storage, actor / name, parse=parser.read_fields)
                        stack.callback(file.close)
                        opened.files.append(file)
                        _check_vouched(
                            save, vouched.get(name), file.path, file.size, file.header_digest
                        )
                case Shards():
                    for name in save.weights:
                        cancel()
                        shard = ShardFile.open(storage, actor / name, cancel=cancel)
                        stack.callback(shard.close)
                        opened.shards.append(shard)
                        records += len(shard.records)
                        # Some records of each file belong to no tensor.
                        if records > limits.tensors + 100 * len(save.weights):
                            raise _too_many(shard.path, limits, "records")
                        _check_vouched(
                            save, vouched.get(name), shard.path, shard.size, shard.directory_digest
                        )
        except OSError as error:
            if is_gone(error):
                raise SaveNotReadyError(f"{error.filename or actor} is gone") from error
            raise
        yield opened


def _check_vouched(
    save: SavedWeights, told: ReceiptFile | None, path: Path, size: int, digest: str
) -> None:
    if told is not None and (told.size, told.digest) != (size, digest):
        raise SaveNotReadyError(
            f"{path} is not the file that the receipt of save {save.identity} lists: the file is "
            "being replaced, or was damaged"
        )


def _too_many(path: Path, limits: ParseLimits, what: str) -> ShardFormatError:
    return ShardFormatError(
        f"{path}: the shards up to this one have more than {limits.tensors} {what}, which "
        "would take gigabytes of memory to merge. Save the model's own state dict, or "
        "use fewer ranks"
    )
