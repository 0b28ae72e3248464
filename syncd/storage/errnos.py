"""The meanings of the operating system's errors for syncd."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from syncd.protocol.errors import JobUnavailableError, NoRoomError, SyncdError

T = TypeVar("T")

#: The name is gone, or the server no longer knows the file behind it (NFS).
GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
#: A folder that is not empty: Linux uses both errors.
NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
#: The disk, or this user's part of it, is full.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: The process that serves a FUSE filesystem has ended, or the server has shut this client out.
_CUT_OFF: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN})
#: Errors after which the work may succeed if it is done again from the start.
PASSING: Final = GONE | _CUT_OFF | {errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT}
#: Errors of a read if the name cannot have a record: the name is a link, a pipe, a socket or a
#: folder, or the file is far too long. Waiting does not help.
NO_RECORD: Final = frozenset({errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.EFBIG})
#: Errors that concern one name, not the storage. They would come again at the next attempt.
REFUSED_HERE: Final = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})
#: Errors of reading one file or folder, which must not keep the daemon from the others.
UNREADABLE: Final = REFUSED_HERE | {errno.EIO}

#: Remedies: more room, the right to write, storage that is mounted read-only.
ROOM: Final = (
    "Make room, or raise the quota: `df -h` shows the free bytes, and `df -i` the free inodes"
)
SHARE: Final = (
    "Run as the trainers' user, or share the job with a group that both users are in (shared_group)"
)
WRITABLE: Final = "Mount the storage rw: `findmnt -T` shows its options"

#: The most attempts at a small piece of work, with which other processes may interfere.
ATTEMPTS: Final = 5


def again(work: Callable[[], T], passing: Collection[int] = GONE) -> T:
    """Call ``work`` until it ends without an OSError of ``passing``, at most five times."""
    for _ in range(ATTEMPTS - 1):
        try:
            return work()
        except OSError as error:
            if error.errno not in passing:
                raise
    return work()


@dataclass(frozen=True)
class Ignoring:
    """A context that ends its block at an OSError of ``errnos``, and does not raise it."""

    errnos: Collection[int]

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return isinstance(error, OSError) and error.errno in self.errnos


def unwritable_storage(error: OSError, path: object) -> SyncdError | None:
    """The error for read-only or full storage, or missing rights, else None.

    ``path`` is for errors without a path.
    """
    where = error.filename or path
    if isinstance(error, PermissionError):
        who = f"user {os.geteuid()}: {error.strerror}"
        return JobUnavailableError(f"{where} cannot be used by {who}. {masked(where) or SHARE}")
    if error.errno == errno.EROFS:
        return JobUnavailableError(read_only(where))
    if error.errno in NO_ROOM:
        return NoRoomError(f"{where} cannot be written: {os.strerror(error.errno or 0)}. {ROOM}")
    return None


def masked(path: object) -> str:
    """The remedy if the mask of an ACL forbids the group to write to a path or its folder."""
    for each in (Path(str(path)), Path(str(path)).parent):
        with suppress(OSError):  # no ACL
            os.getxattr(each, "system.posix_acl_access", follow_symlinks=False)
            if not each.lstat().st_mode & stat.S_IWGRP:  # with an ACL, this bit is the mask's
                return (
                    f"The mask of the ACL of {each} lacks group write: run `setfacl -R -m "
                    "m::rwX,d:m::rwx` on the job as its owner"
                )
    return ""


def read_only(path: object) -> str:
    """The error message for storage that is mounted read-only."""
    return f"{path} cannot be written: its storage is mounted read-only. {WRITABLE}"


def is_gone(error: OSError) -> bool:
    """True if an error says that a name or its file no longer exists."""
    return error.errno in GONE


def is_no_record(error: OSError) -> bool:
    """True if a read failed because of a link, a folder, a pipe, or a file that is too long."""
    return error.errno in NO_RECORD


def is_refused_here(error: OSError) -> bool:
    """True if an error concerns only one name: a link, or a name that this user may not use."""
    return error.errno in REFUSED_HERE


def is_unreadable(error: OSError) -> bool:
    """True for the errors of :func:`is_no_record` and of :func:`is_refused_here`."""
    return is_no_record(error) or is_refused_here(error)
