"""Writes the files of ``torch.save``: a rank's shard, its optimizer and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from syncd.checkpoint.safetensors_header import PAGE
from syncd.checkpoint.torch_files.shard_file import central_directory_digest
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.records import ReceiptFile
from syncd.storage.fsio import Draft, Storage
from trainer_hooks.writing.parts import saying_which

#: For tensors this large, padding to pages (half a page on average) adds less than 1 %.
_LARGE: Final = 256 * 1024


def write_tensors(storage: Storage, path: Path, state: Mapping[str, Any]) -> ReceiptFile:
    """Write a state dict with ``torch.save``; return the file's receipt entry."""
    with saying_which(storage, path, lambda: tensor_bytes(state)):
        with Draft(storage, path) as draft:
            save_state_dict(state, draft)
            draft.finish()
            size, digest = central_directory_digest(storage, draft.temporary)
            draft.commit()
        return ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")


def shard_written_by(storage: Storage, path: Path, write: Callable[[], object]) -> ReceiptFile:
    """Call a function that writes a shard, and make the shard durable.

    Raises:
        SaveFailedError: ``write`` did not write the file.
        ShardFormatError: the file was not written by ``torch.save``.
    """
    # Not overwritten, because another process may still read the previous file.
    storage.unlink_if_there(path)
    write()
    if not storage.exists(path):
        raise SaveFailedError(
            f"the writer did not write {path}. In the writer function, call torch.save with this "
            "rank's part of the state dict and with that path"
        )
    with storage.closing(storage.open_read(path)) as file:
        storage.fsync(file)
    storage.sync_folder(path.parent)
    size, digest = central_directory_digest(storage, path)
    return ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")


def save_state_dict(state: Mapping[str, Any], draft: Draft) -> None:
    """Call ``torch.save``; if storage refuses a write, raise the storage's error.

    CRC-32s are on, because the receipt's digest covers them. Large tensors begin at a page: on XFS,
    btrfs and NFS 4.2 the merge then shares their blocks instead of copying them.
    """
    sink = _Sink(draft)
    try:
        with _with_crc32(), _on_pages() if _is_large(state) else nullcontext():
            # torch.save only uses a file object's write and flush.
            torch.save(dict(state), cast("IO[bytes]", sink))
    except RuntimeError as error:
        if sink.refused is not None:
            raise sink.refused from error
        raise
    finally:
        # torch's writer refers to the sink unseen by the garbage collector: with an error, whose
        # traceback refers to the writer, all tensors of this save would stay in memory.
        sink.refused = None


@contextmanager
def _with_crc32() -> Iterator[None]:
    """Turn CRC-32s on for the whole process."""
    before = get_crc32_options()
    set_crc32_options(compute_crc32=True)
    try:
        yield
    finally:
        set_crc32_options(compute_crc32=before)


def _on_pages() -> AbstractContextManager[object]:
    """Align records to pages, for the whole process."""
    try:
        from torch.utils.serialization import config  # noqa: PLC0415 - torch 2.6 lacks this module
    except ImportError:
        return nullcontext()
    patched: AbstractContextManager[object] = config.patch(  # type: ignore[attr-defined]  # put there at run time
        {"save.storage_alignment": PAGE}
    )
    return patched


def _is_large(state: Mapping[str, Any]) -> bool:
    """True if padding the tensors to pages costs next to nothing."""
    sizes = [
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for value in state.values()
        # Other types, for example ShardedTensor, may not know their size in bytes.
        if type(value) in {Tensor, nn.Parameter, DTensor} and value.layout is torch.strided
    ]
    return sum(sizes) >= _LARGE * max(1, len(sizes))


class _Sink:
    """The file object for ``torch.save``; it keeps the error of a refused write."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.refused: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self._draft.write(data)
        except OSError as error:
            self.refused = error
            raise

    def flush(self) -> None:
        """Do nothing."""


def tensor_bytes(value: Any) -> int:
    """The bytes of this rank's tensors, in any nesting of dicts, lists and tuples."""
    match value:
        case ShardedTensor():
            return sum(shard.tensor.nbytes for shard in value.local_shards())
        case DTensor():
            return value.to_local().nbytes
        case Tensor():
            return value.nbytes
        case Mapping():
            return sum(tensor_bytes(item) for item in value.values())
        case list() | tuple():
            return sum(tensor_bytes(item) for item in value)
    return 0
