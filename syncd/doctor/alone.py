"""Probes that one process runs alone, each in a folder of its own."""

from __future__ import annotations

import errno
import os
import stat
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.doctor import verdicts
from syncd.doctor.finding import Finding
from syncd.doctor.party import Here, error_name, put
from syncd.doctor.party_calls import DONE
from syncd.storage.fsio import Storage, signature

#: The number of repetitions of an action whose median time is measured.
_TIMES: Final = 5
#: The number of bytes to copy: whole pages, because filesystems share only whole blocks.
_COPIED: Final = 64 * 1024
#: Seconds between two looks at a file. A touch must show within this time.
_PAUSE: Final = 0.1
#: Seconds between two touches, tried in this order until the second touch is visible.
_STEPS: Final = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0)


def rename(here: Here) -> Finding:
    """Check that a rename replaces files, but never a folder with content."""
    here.must("write", "old", text="old")
    here.must("write", "new", text="new")
    wrong = verdicts.expected("a rename over a file", here.attempt("rename", "new", "old"), DONE)
    wrong += verdicts.expected("the file that a rename replaced", here.see("open", "old"), "new")
    wrong += verdicts.expected("the old name after a rename", here.see("exists", "new"), "False")
    for folder in ("version", "full"):
        here.must("mkdir", folder)
        here.must("write", f"{folder}/file", text=folder)
    said = here.attempt("rename", "version", "full")
    wrong += verdicts.full("a rename onto a folder that holds something", said)
    said = here.attempt("rename", "version", "published")
    wrong += verdicts.expected("a rename of a folder", said, DONE)
    said = here.see("open", "published/file")
    wrong += verdicts.expected("a file in a renamed folder", said, "version")
    promise = "a rename replaces a file, moves a folder, and never replaces a folder with content"
    return verdicts.compare("rename", promise, wrong)


def rmdir(here: Here) -> Finding:
    """Check that rmdir refuses a folder with content, and that a removed folder stays removed."""
    here.must("mkdir", "leases")
    here.must("create", "leases/one")
    wrong = verdicts.full("rmdir of a folder that holds something", here.attempt("rmdir", "leases"))
    said = here.see("exists", "leases/one")
    wrong += verdicts.expected("a file in a folder that rmdir must not remove", said, "True")
    here.attempt("unlink", "leases/one")
    said = here.attempt("rmdir", "leases")
    wrong += verdicts.expected("rmdir of an empty folder", said, DONE)
    said = here.attempt("create", "leases/two")
    wrong += verdicts.gone("making a file in a removed folder", said)
    promise = "rmdir removes only empty folders, and no file can be made in a removed folder"
    return verdicts.compare("rmdir", promise, wrong)


def links(here: Here) -> Finding:
    """Check that a file can have two names."""
    here.must("write", "file", text="file")
    said = here.attempt("link", "file", "second")
    here.must("unlink", "file")
    return verdicts.links(said, are_same=here.see("open", "second") == "file")


def sync(storage: Storage, room: Path) -> Finding:
    """Check that fsync of files and folders works, and measure its time."""
    said: dict[str, str] = {}

    def timed(what: str, act: Callable[[], None]) -> float | None:
        took = []
        for _ in range(_TIMES):
            begun = time.monotonic()
            try:
                act()
            except OSError as error:
                said[what] = error_name(error)
                return None
            took.append(time.monotonic() - begun)
        return statistics.median(took)

    def write_more() -> None:
        storage.write_all(fd, bytes(4096))
        storage.fsync(fd)

    fd = storage.create(room / "file")
    with storage.closing(fd):
        file = timed("file", write_more)
    return verdicts.sync(file, timed("folder", lambda: storage.sync_folder(room)), said)


def copying(storage: Storage, room: Path) -> Finding:
    """Find the ways to copy bytes that work on this storage."""
    put(storage, room / "source", bytes(_COPIED))
    source = storage.open_read(room / "source")
    try:
        target = storage.create(room / "target")
        with storage.closing(target):
            copies = _said(lambda: storage.copy_file_range(source, target, _COPIED, 0, 0))
            shares = _said(lambda: storage.clone_range(source, target, _COPIED, 0, 0))
    finally:
        storage.release(source)
    return verdicts.copying(copies, shares)


def _said(call: Callable[[], object]) -> str:
    try:
        done = call()
    except OSError as error:
        return error_name(error)
    return "nothing was copied" if done == 0 else DONE


def heartbeats(storage: Storage, room: Path, lease_time: float) -> Finding:
    """Check that a touch, and only a touch, changes a file's status."""
    path = room / "heartbeat"
    put(storage, path, b"session")

    def look() -> object:
        return storage.look_into(path, lambda fd: signature(storage.fstat(fd)))

    before = look()
    time.sleep(_PAUSE)
    still = look() == before
    time.sleep(_PAUSE)
    storage.utime(path)
    touched = look() != before
    step = None
    for pause in _STEPS:
        before = look()
        time.sleep(pause)
        storage.utime(path)
        if look() != before:
            step = pause
            break
    return verdicts.marks(still=still, touched=touched, step=step, lease_time=lease_time)


def owner(storage: Storage, room: Path) -> Finding:
    """Check that a new folder belongs to this user, with all rights."""
    storage.mkdir(room / "ours")
    made = storage.status(room / "ours")
    if made is None:
        raise FileNotFoundError(errno.ENOENT, "a folder that was just made", str(room / "ours"))
    rights = stat.S_IMODE(made.st_mode) >> 6 & 0o7
    return verdicts.owner((made.st_uid, rights), (os.geteuid(), 0o7))
