"""Writes one file of a save: it is complete and durable before it gets its name.

Functions raise an OSError that names the file if storage fails. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import xxhash

from syncd.protocol.records import ReceiptFile
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Draft, Storage
from syncd.storage.job import Job
from trainer_hooks.state.small_files import Files


class WholePart(Protocol):
    """A whole file of tensors to come."""

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""

    def write(self, draft: Draft) -> ReceiptFile:
        """Write and commit the file; return its receipt entry. Can be called again."""


def write_part(job: Job, actor: Path, name: str, part: WholePart) -> ReceiptFile:
    """Write whole tensors; return the file's receipt entry.

    The temporary file is in ``.syncd/drafts/``. The daemon deletes it if this process is killed.
    """
    path = actor / name
    with (
        saying_which(job.storage, path, lambda: part.nbytes),
        Draft(job.storage, path, room=job.layout.drafts) as draft,
    ):
        return part.write(draft).model_copy(update={"name": name})


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
