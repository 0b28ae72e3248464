"""An unpickler for state dicts that builds inert records: nothing of torch is imported or run.

What a pickle may name is in the table of :mod:`~syncd.checkpoint.inert_records`. Anything else is
refused by name.

Not promised: a bound on the memory and the time that a pickle takes which was made to exhaust them.
Those of other people are read in a child process (:mod:`~syncd.checkpoint.isolated`).
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from syncd.checkpoint.inert_records import ALLOWED, StorageRef, StorageType
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import ShardFormatError, SyncdError


class _Loading:
    """The two methods of an unpickler that decide what a pickle can reach."""

    where: str

    def find_class(self, module: str, name: str) -> object:
        found = ALLOWED.get((module, name))
        if found is None:
            raise ShardFormatError(
                f"{self.where} asks for {shown(module)}.{shown(name)}, refused, nothing was run: "
                "save a plain state dict of tensors"
            )
        return found

    def persistent_load(self, pid: object) -> StorageRef:
        match pid:
            case ("storage", kind, key, location, numel):
                # Asked here, and not of the pattern, which is half as fast.
                if isinstance(kind, StorageType) and isinstance(key, str):
                    return StorageRef(key, kind.dtype, location, numel)
        raise pickle.UnpicklingError("names a storage in an unknown way")


class _Fast(_Loading, pickle.Unpickler):
    """In C. Its memo is an array: a damaged index makes it touch gigabytes."""


class _Frugal(_Loading, pickle._Unpickler):  # noqa: SLF001 - the only one without that array
    """In Python, ten times slower. Its memo is a dict."""


class _Peekable(io.BytesIO):
    """Bytes that an unpickler can look ahead in; else it asks for each opcode, at half the speed.

    No ``BufferedReader``, which takes all the memory that a length in a damaged pickle asks for.
    """

    def peek(self, count: int) -> bytes:
        """Up to so many of the next bytes, which stay the next."""
        at = self.tell()
        return self.getvalue()[at : at + count]


def load_inert(data: bytes, where: str, *, intact: bool) -> object:
    """What a pickle holds, with inert records for all that is not plain Python.

    Args:
        data: the pickle.
        where: the file, for the message.
        intact: whether a CRC-32 says that these are the bytes that were pickled.

    Raises:
        ShardFormatError: it is broken, takes more memory than there is, or names a global that is
            not in the table.
    """
    try:
        unpickler = (_Fast if intact else _Frugal)(_Peekable(data))
        unpickler.where = where
        return unpickler.load()
    except SyncdError:
        raise
    except Exception as error:
        # Whatever it is, the bytes brought it about: nothing else takes part, not even a disk.
        raise ShardFormatError(
            f"{where} has a pickle that cannot be read ({type(error).__name__}: "
            f"{shown(str(error))}): save it again"
        ) from error


def load_state_dict(data: bytes, where: str, *, intact: bool) -> dict[Any, Any]:
    """The state dict that a ``data.pkl`` holds, with inert records for tensors.

    Args:
        data: the pickle.
        where: the file, for the message.
        intact: whether a CRC-32 says that these are the bytes that were pickled.

    Raises:
        ShardFormatError: as :func:`load_inert`, or it is no dict.
    """
    found = load_inert(data, where, intact=intact)
    if not isinstance(found, dict):
        raise ShardFormatError(
            f"{where} holds a {type(found).__name__}, not a state dict: save model.state_dict()"
        )
    return found
