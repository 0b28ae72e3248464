"""The daemon's files that grow by a line for each event, up to a bound.

At :data:`LIMIT` bytes such a file replaces the file of older lines, by one rename, and a new file
begins. So there are at most two files, and older lines are lost a file at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from syncd.protocol.layout import older_lines
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Storage
from syncd.storage.record_files import move_away

#: Bytes; one append may be longer.
LIMIT: Final = 4 * 1024 * 1024


def append(storage: Storage, path: Path, data: bytes, *, durable: bool, limit: int = LIMIT) -> None:
    """Append to a file, which is made if it is missing.

    If something other than a file has that name, it is renamed first. Not promised: that older
    lines stay if a daemon that was just superseded begins a new file too.

    Args:
        storage: the shared storage.
        path: the file.
        data: whole lines.
        durable: whether they must survive a power loss.
        limit: the most bytes before a new file is begun.

    Raises:
        OSError: storage refused; a part of the data may be in the file.
    """
    status = storage.status(path)
    if status is not None and status.st_size >= limit:
        _turn_over(storage, path)
    try:
        fd = storage.open_append(path)
    except OSError as error:
        if not is_no_record(error):
            raise
        move_away(storage, path)
        fd = storage.open_append(path)
    with storage.closing(fd):
        storage.write_all(fd, data)
        if durable:
            storage.fsync(fd)
    if durable:
        storage.sync_folder(path.parent)  # the file may be new


def _turn_over(storage: Storage, path: Path) -> None:
    """Make the present file the file of older lines."""
    older = older_lines(path)
    try:
        storage.rename(path, older)
    except IsADirectoryError:
        move_away(storage, older)
        storage.rename(path, older)


def last_lines(storage: Storage, path: Path, limit: int = 2 * LIMIT) -> list[bytes]:
    """The last lines of such a file, oldest first; none if it is missing, or is not a file.

    A line may be there twice if a new file was begun meanwhile.

    Args:
        storage: the shared storage.
        path: the file.
        limit: the most bytes that are read, from its end.

    Raises:
        OSError: storage failed.
    """
    found: list[bytes] = []
    for part in (path, older_lines(path)):
        left = limit - sum(map(len, found))
        if left > 0:
            found = _tail(storage, part, left) + found
    return found


def _tail(storage: Storage, path: Path, limit: int) -> list[bytes]:
    def read(fd: int) -> list[bytes]:
        size = storage.fstat(fd).st_size
        at = max(0, size - limit)
        lines = storage.pread_all(fd, size - at, at).splitlines()
        return lines[1:] if at else lines  # the first one is cut

    try:
        return storage.look_into(path, read)
    except OSError as error:
        if is_gone(error) or is_no_record(error) or is_refused_here(error):
            return []
        raise
