"""Writes one file of a save: it is complete and durable before it gets its name.

Functions raise an OSError that names the file if storage fails.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from syncd.checkpoint.safetensors_header import PAGE
from syncd.checkpoint.torch_files.shard_file import central_directory_digest
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.records import ReceiptFile
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Draft, Storage
from syncd.storage.job import Job
from trainer_hooks.state.small_files import Files
from trainer_hooks.state.weights_in_memory import WeightsInMemory

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


def write_part(job: Job, actor: Path, name: str, part: WeightsInMemory) -> ReceiptFile:
    """Write whole tensors; return the file's receipt entry.

    The temporary file is in ``.syncd/drafts/``. The daemon deletes it if this process is killed.
    """
    path = actor / name
    with (
        saying_which(job.storage, path, lambda: part.nbytes),
        Draft(job.storage, path, room=job.layout.drafts) as draft,
    ):
        return part.write(draft).model_copy(update={"name": name})


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


def write_small(storage: Storage, path: Path, content: bytes) -> None:
    """Replace a file of a few bytes."""
    with saying_which(storage, path, lambda: len(content)):
        storage.replace(path, content)


def write_files(storage: Storage, folder: Path, files: Files) -> list[ReceiptFile]:
    """Write config, tokenizer and so on; return their receipt entries."""
    entries: list[ReceiptFile] = []
    for name, content in sorted(files.items()):
        storage.make_folder((folder / name).parent, below=folder.parent)
        write_small(storage, folder / name, content)
        entries.append(
            ReceiptFile(
                name=f"{folder.name}/{name}",
                size=len(content),
                digest=xxhash.xxh3_128_hexdigest(content),
                over="content",
            )
        )
    return entries


def make_mark(storage: Storage, path: Path) -> None:
    """Create an empty marker file if it is missing."""
    try:
        storage.close(storage.create(path))
    except FileExistsError:
        pass


def link_or_copy(storage: Storage, source: Path, target: Path) -> None:
    """Hard-link a file that never changes; copy it if storage refuses hard links."""
    storage.unlink_if_there(target)
    if storage.link_if_possible(source, target):
        storage.sync_folder(target.parent)
        return
    with storage.reading(source) as reading:
        size = storage.fstat(reading).st_size
        with saying_which(storage, target, lambda: size), Draft(storage, target) as draft:
            at = 0
            while part := storage.pread(reading, 1024 * 1024, at):
                at += draft.write(part)
            if at != size:
                raise OSError(errno.EIO, "the file became shorter during the copy", str(source))
            draft.commit()


@contextmanager
def saying_which(storage: Storage, path: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Make an ``OSError`` name its file and, on a full disk, the needed and the free bytes.

    A write has only a descriptor, so its error has no file name.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            told = f"{os.strerror(error.errno)}: {needed()} bytes are needed{_free(storage, path)}"
        elif error.filename is None and error.errno is not None:
            told = error.strerror or os.strerror(error.errno)
        else:
            raise
        raise OSError(error.errno, told, str(path)) from error


def _free(storage: Storage, path: Path) -> str:
    try:
        free = storage.free(path.parent)
    except OSError:
        return ""
    if free.inodes == 0:
        return ", and no inodes are left, so no file can be created"
    return "" if free.bytes is None else f", {free.bytes} are free"


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
