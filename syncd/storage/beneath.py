"""How names become descriptors: below the job directory, no link is ever followed.

A link inside a job could lead a daemon to read, or delete, what is not the job's. So each folder on
the way is opened by itself, with ``O_NOFOLLOW``, and the last name is given to the system call
together with the descriptor of its folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: A path as system calls take it: its last name, and a descriptor of its folder; or the whole path.
Place = tuple[str, int | None]

_FOLDER: Final = os.O_DIRECTORY | os.O_CLOEXEC


class Beneath:
    """Resolves paths beneath a root.

    Args:
        root: links are followed on the way to it, and never below it. Paths elsewhere, and all
            paths without a root, are as the system resolves them.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = "" if root is None else _absolute(os.fspath(root))

    @contextmanager
    def at(self, path: Path) -> Iterator[Place]:
        """A path, for one system call. Errors that pass through here name the whole path.

        Raises:
            OSError: ``ELOOP`` where a folder on the way is a link; as the system says otherwise.
        """
        text = os.fspath(path)
        parts = self._parts(_absolute(text))
        if not parts:
            yield text, None
            return
        folder = os.open(self._root, os.O_PATH | _FOLDER)
        try:
            for part in parts[:-1]:
                below = _step_into(part, folder, text, os.O_PATH)
                os.close(folder)
                folder = below
            try:
                yield parts[-1], folder
            except OSError as error:
                if error.filename == parts[-1] and error.filename2 is None:
                    error.filename = text
                raise
        finally:
            os.close(folder)

    @contextmanager
    def both(self, source: Path, target: Path) -> Iterator[tuple[Place, Place]]:
        """Two paths, for one system call."""
        with self.at(source) as old, self.at(target) as new:
            try:
                yield old, new
            except OSError as error:
                error.filename, error.filename2 = os.fspath(source), os.fspath(target)
                raise

    def open_folder(self, path: Path) -> int:
        """A descriptor of a folder, to list or to sync it."""
        with self.at(path) as (name, folder):
            if folder is None:
                return os.open(name, os.O_RDONLY | _FOLDER)
            return _step_into(name, folder, os.fspath(path), os.O_RDONLY)

    def _parts(self, text: str) -> list[str]:
        """The names on the way from the root to a path; none for what is not below it."""
        if not self._root or not text.startswith(f"{self._root}/"):
            return []
        parts = text[len(self._root) + 1 :].split("/")
        if ".." in parts:
            raise OSError(errno.EINVAL, "a path that leads back out", text)
        return parts


def _absolute(text: str) -> str:
    """Not ``os.path.abspath``: what ``..`` behind a link is, only the system knows."""
    return text if text.startswith("/") else os.path.join(os.getcwd(), text)


def _step_into(name: str, folder: int, whole: str, flags: int) -> int:
    """Open a folder inside a folder, and say so where it is a link."""
    try:
        return os.open(name, flags | _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        error.filename = whole
        if error.errno == errno.ENOTDIR and _is_link(name, folder):
            why = f"{name!r} is a link, and links are not followed inside a job"
            raise OSError(errno.ELOOP, why, whole) from None
        raise


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
