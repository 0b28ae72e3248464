"""What the operating system's errors mean here. What to do about them is known elsewhere."""

from __future__ import annotations

import errno
from typing import Final

#: The name is gone, or the server no longer knows the file behind it (NFS).
GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
#: A folder that is not empty: Linux says either.
NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
#: The disk, or this user's part of it, is full.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: What may well work when it is done again, from the start. Not a full disk, nor a refused right.
PASSING: Final = GONE | {errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT}
#: What a read says of what is there and can be no record: a link, a pipe, a socket, a folder, or
#: far too long. It stays so until someone changes it: there is nothing to wait for.
_NO_RECORD: Final = frozenset({errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.EFBIG})
#: What will be said again at the next look: it is about this one name, not about the storage.
_REFUSED_HERE: Final = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def is_gone(error: OSError) -> bool:
    """Whether an error says that the name, or the file behind it, is no longer there."""
    return error.errno in GONE


def is_no_record(error: OSError) -> bool:
    """Whether an error of a read says that what is there can be no record."""
    return error.errno in _NO_RECORD


def is_refused_here(error: OSError) -> bool:
    """Whether an error is about one name alone: a link, or one that this user may not see."""
    return error.errno in _REFUSED_HERE
