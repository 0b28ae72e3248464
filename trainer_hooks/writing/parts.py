"""The files of a save, each written whole and durable before it has its name.

``torch.save`` writes every CRC-32, and large tensors where pages begin, as the merge likes it best.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from syncd.checkpoint.tensor_rules import Cast
from syncd.checkpoint.torch_files.torch_zip import central_directory_digest
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.records import ReceiptFile
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Draft, Storage
from trainer_hooks.state.full_plan import shape_of
from trainer_hooks.state.sync_dtype import cast_to

#: Padding to pages, half of one on average, is then less than a hundredth of the file.
_LARGE: Final = 256 * 1024


def write_tensors(storage: Storage, path: Path, state: Mapping[str, Any]) -> ReceiptFile:
    """``torch.save`` a state dict.

    Returns:
        What a receipt says of the file.

    Raises:
        OSError: storage refused; names the file.
    """
    with saying_which(storage, path, lambda: tensor_bytes(state)):
        with Draft(storage, path) as draft:
            save_state_dict(state, draft)
            draft.finish()
            size, digest = central_directory_digest(storage, draft.temporary)
            draft.commit()
        return ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")


def shard_written_by(storage: Storage, path: Path, write: Callable[[], object]) -> ReceiptFile:
    """Let someone else ``torch.save`` a shard in place, and make it durable.

    Returns:
        What a receipt says of the file.

    Raises:
        SaveFailedError: there is no such file afterwards.
        ShardFormatError: it is not what ``torch.save`` writes.
        OSError: storage refused.
    """
    # Whoever has the one before open goes on reading that one.
    storage.unlink_if_there(path)
    write()
    if not storage.exists(path):
        raise SaveFailedError(
            f"the writer did not write {path}: it must torch.save this rank's part of the state "
            "dict to that path"
        )
    with storage.closing(storage.open_read(path)) as file:
        storage.fsync(file)
    storage.sync_folder(path.parent)
    size, digest = central_directory_digest(storage, path)
    return ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")


def write_small(storage: Storage, path: Path, content: bytes) -> None:
    """Replace a file of a few bytes.

    Raises:
        OSError: storage refused; names the file.
    """
    with saying_which(storage, path, lambda: len(content)):
        storage.replace(path, content)


def write_model_files(
    storage: Storage, folder: Path, writers: Iterable[Callable[[Path], object]]
) -> list[ReceiptFile]:
    """Config and tokenizer: libraries write them in place, so elsewhere first.

    Args:
        storage: where they go.
        folder: the ``huggingface/`` or ``lora_adapter/`` folder, inside ``actor/``.
        writers: each writes its files into the folder that it is given.

    Raises:
        OSError: storage refused; names the file.
    """
    files: list[ReceiptFile] = []
    with tempfile.TemporaryDirectory(prefix="syncd-") as scratch:
        for write in writers:
            write(Path(scratch))
        for source in sorted(path for path in Path(scratch).rglob("*") if path.is_file()):
            content = source.read_bytes()
            name = source.relative_to(scratch).as_posix()
            storage.make_folder((folder / name).parent, below=folder.parent)
            write_small(storage, folder / name, content)
            files.append(
                ReceiptFile(
                    name=f"{folder.name}/{name}",
                    size=len(content),
                    digest=xxhash.xxh3_128_hexdigest(content),
                    over="content",
                )
            )
    return files


def make_mark(storage: Storage, path: Path) -> None:
    """An empty file whose name says all."""
    try:
        storage.close(storage.create(path))
    except FileExistsError:
        pass


def link_or_copy(storage: Storage, source: Path, target: Path) -> None:
    """Give a file that nobody changes any more a second name, or copy it where that is refused.

    Raises:
        OSError: storage refused; names the file.
    """
    storage.unlink_if_there(target)
    if storage.link_if_possible(source, target):
        storage.sync_folder(target.parent)
        return
    reading = storage.open_read(source)
    try:
        size = storage.fstat(reading).st_size
        with saying_which(storage, target, lambda: size), Draft(storage, target) as draft:
            at = 0
            while part := storage.pread(reading, 1024 * 1024, at):
                at += draft.write(part)
            if at != size:
                raise OSError(errno.EIO, "it became shorter while it was copied", str(source))
            draft.commit()
    finally:
        storage.release(reading)


@contextmanager
def saying_which(storage: Storage, path: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Let an error name its file, and on a full disk how much was needed and how much is free.

    A refused write has a descriptor and no name.

    Args:
        storage: where it is written.
        path: the file.
        needed: how many bytes it has; asked for on a full disk alone.

    Raises:
        OSError: the same, saying more.
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
    """``torch.save``; where a write is refused, that error and not torch's about its zip.

    Receipts bind the CRC-32 of the records. Where blocks can be shared between files (XFS, btrfs,
    NFS 4.2), records that begin at pages make the merge share them instead of copying.

    Raises:
        OSError: the storage refused a write.
    """
    sink = _Sink(draft)
    try:
        with _with_crc32(), _on_pages() if _is_large(state) else nullcontext():
            # Of a file object torch.save uses write and flush alone.
            torch.save(dict(state), cast("IO[bytes]", sink))
    except RuntimeError as error:
        if sink.refused is not None:
            raise sink.refused from error
        raise


@contextmanager
def _with_crc32() -> Iterator[None]:
    """A setting of the whole process, for the time of a save."""
    before = get_crc32_options()
    set_crc32_options(compute_crc32=True)
    try:
        yield
    finally:
        set_crc32_options(compute_crc32=before)


def _on_pages() -> AbstractContextManager[object]:
    """Another one: where records begin."""
    try:
        from torch.utils.serialization import config  # noqa: PLC0415 - torch 2.6 has none
    except ImportError:
        return nullcontext()
    patched: AbstractContextManager[object] = config.patch(  # type: ignore[attr-defined]  # put there at run time
        {"save.storage_alignment": PAGE}
    )
    return patched


def _is_large(state: Mapping[str, Any]) -> bool:
    """Whether the tensors are so large that padding them to pages costs next to nothing."""
    sizes = [
        (value.to_local() if isinstance(value, DTensor) else value).nbytes
        for value in state.values()
        # What is no plain tensor, a ShardedTensor say, may not know its bytes.
        if type(value) in {Tensor, nn.Parameter, DTensor} and value.layout is torch.strided
    ]
    return sum(sizes) >= _LARGE * max(1, len(sizes))


class _Sink:
    """The file object that torch.save writes to; it keeps what storage refused."""

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
        """Nothing is buffered here."""


def tensor_bytes(value: Any) -> int:
    """The bytes of all tensors of this rank's in any nesting of dicts, lists and tuples."""
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


def full_bytes(state: Mapping[str, Any], sync_dtype: Cast | None = None) -> int:
    """The bytes of a state dict's whole tensors after a cast, whatever this rank has of them."""
    return sum(
        shape_of(value).numel() * cast_to(value.dtype, sync_dtype).itemsize
        for value in state.values()
        if isinstance(value, Tensor)
    )
