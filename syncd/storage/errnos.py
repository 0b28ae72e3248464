"""The meanings of the operating system's errors here. Callers decide what to do about them."""

from __future__ import annotations

import errno
import os
from typing import Final

from syncd.protocol.errors import JobUnavailableError, NoRoomError, SyncdError

#: The name is gone, or the server no longer knows the file behind it (NFS).
GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
#: A folder that is not empty: Linux says either.
NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
#: The disk, or this user's part of it, is full.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Errors after which the work may succeed if it is done again from the start. Not a full disk, nor
#: a refused right.
PASSING: Final = GONE | {errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT}
#: Errors of a read if the thing there cannot be a record: it is a link, a pipe, a socket, a folder,
#: or far too long. It stays so until someone changes it, so waiting does not help.
_NO_RECORD: Final = frozenset({errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.EFBIG})
#: Errors that come again at the next look: they concern this one name, not the storage.
_REFUSED_HERE: Final = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def unwritable_storage(error: OSError, path: object) -> SyncdError | None:
    """The syncd error for storage on which nobody can write; None for any other error.

    Args:
        error: the error of a write.
        path: the path of the write, if the error itself does not name it.
    """
    where = error.filename or path
    if error.errno == errno.EROFS:
        return JobUnavailableError(read_only(where))
    if error.errno in NO_ROOM:
        return NoRoomError(
            f"{where} cannot be written: {os.strerror(error.errno or 0)}: make room for bytes and "
            "for files (`df -h` and `df -i` show both) or raise the quota, and start again"
        )
    return None


def read_only(path: object) -> str:
    """The sentence about storage that is mounted read-only."""
    return (
        f"{path} cannot be written: its storage is mounted read-only: mount it rw (`findmnt -T` "
        "shows how it is mounted), and start again"
    )


def is_gone(error: OSError) -> bool:
    """True if an error says that the name, or the file behind it, is no longer there."""
    return error.errno in GONE


def is_no_record(error: OSError) -> bool:
    """True if an error of a read says that the thing there cannot be a record."""
    return error.errno in _NO_RECORD


def is_refused_here(error: OSError) -> bool:
    """True if an error concerns one name alone: a link, or a name that this user may not see."""
    return error.errno in _REFUSED_HERE


def is_unreadable(error: OSError) -> bool:
    """True if an error says that a name is there, but this user can read no record under it."""
    return is_no_record(error) or is_refused_here(error)
