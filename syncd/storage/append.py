"""The daemon's growing files, such as the journal: one line for each event, up to a limit.

When a file has :data:`LIMIT` bytes, the daemon renames it over the file of older lines, and begins
a new file. The lines of the replaced file are lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from syncd.protocol.layout import older_lines
from syncd.storage.errnos import (
    GONE,
    NO_RECORD,
    REFUSED_HERE,
    Ignoring,
    is_no_record,
)
from syncd.storage.fsio import Storage, named
from syncd.storage.job import move_away

#: The size in bytes at which a new file is begun. The last append may exceed it.
LIMIT: Final = 4 * 1024 * 1024


def append(storage: Storage, path: Path, data: bytes, *, durable: bool, limit: int = LIMIT) -> None:
    """Append whole lines to a file, which is made if it is missing.

    If ``durable``, the lines survive a power loss. A link or folder with the file's name is renamed
    first. A superseded daemon that begins a new file at the same time can lose older lines.

    Raises:
        OSError: the storage refused a call. The file can hold a part of the data.
    """
    status = storage.status(path)
    if status is not None and status.st_size >= limit:
        older = older_lines(path)
        try:
            storage.rename(path, older)
        except IsADirectoryError:
            move_away(storage, older)
            storage.rename(path, older)
    try:
        fd = storage.open_append(path)
    except OSError as error:
        if not is_no_record(error):
            raise
        move_away(storage, path)
        fd = storage.open_append(path)
    with named(path), storage.closing(fd):
        storage.write_all(fd, data)
        if durable:
            storage.fsync(fd)
    if durable:
        storage.sync_folder(path.parent)  # the file may be new


def last_lines(storage: Storage, path: Path, limit: int = 2 * LIMIT) -> list[bytes]:
    """The newest lines of a growing file and of its file of older lines, oldest first.

    At most ``limit`` bytes are read. A path that is missing or not a file counts as empty. If a new
    file is begun during the call, a line can appear twice.
    """
    found: list[bytes] = []
    for part in (path, older_lines(path)):
        left = limit - sum(map(len, found))

        def read(fd: int, left: int = left) -> list[bytes]:
            size = storage.fstat(fd).st_size
            at = max(0, size - left)
            lines = storage.pread_all(fd, size - at, at).splitlines()
            return lines[1:] if at else lines  # the first line may be cut

        with Ignoring(GONE | NO_RECORD | REFUSED_HERE):
            if left > 0:
                found = storage.look_into(part, read) + found
    return found
