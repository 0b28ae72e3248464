"""Files of the daemon's that grow by a line for each thing that happens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage
from syncd.storage.in_the_way import move_away

#: How much of a file that is read from its end is read at a time.
_TAIL: Final = 64 * 1024


def append(storage: Storage, path: Path, data: bytes, *, durable: bool) -> None:
    """Append to a file, which is made where it is missing.

    What stands there and is no file is given another name first.

    Args:
        storage: the shared storage.
        path: the file.
        data: whole lines.
        durable: whether they are to survive a power loss.

    Raises:
        OSError: storage refused; some of it may be there.
    """
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


def last_lines(storage: Storage, path: Path, limit: int = _TAIL) -> list[bytes]:
    """The last lines of such a file, oldest first; none where there is no file.

    Args:
        storage: the shared storage.
        path: the file.
        limit: the most bytes that are read, from its end.

    Raises:
        OSError: storage failed.
    """

    def read(fd: int) -> list[bytes]:
        size = storage.fstat(fd).st_size
        at = max(0, size - limit)
        lines = storage.pread_all(fd, size - at, at).splitlines()
        return lines[1:] if at else lines  # the first one is cut

    try:
        return storage.look_into(path, read)
    except OSError as error:
        if is_gone(error) or is_no_record(error):
            return []
        raise
