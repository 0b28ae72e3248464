"""The files of a save, each written whole and durable before it has its name."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from syncd.checkpoint.torch_zip import central_directory_digest
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.records import ReceiptFile
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Draft, Storage
from trainer_hooks.writing.torch_file import save_state_dict


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
        return ", and no file more can be made: it has no inodes left"
    return "" if free.bytes is None else f", {free.bytes} are free"


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
            f"{path} was not written by what was to write it: it must torch.save this rank's part "
            "of the state dict to that path"
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


def full_bytes(state: Mapping[str, Any]) -> int:
    """The bytes of a state dict's whole tensors, whatever this rank has of them."""
    # A ShardedTensor is a Tensor that does not know its bytes.
    sizes = (
        value.metadata().size.numel() * value.dtype.itemsize
        if isinstance(value, ShardedTensor)
        else value.nbytes
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return sum(sizes)
