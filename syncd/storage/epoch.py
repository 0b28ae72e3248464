"""The fence: each active daemon works in its own room (a folder) and commits by a rename out of it.

``daemon.lock`` only says which daemon *should* work: a daemon that lost the lock during a pause
would still rename files. So a take-over makes a new room ``.syncd/epoch/<n>-<suffix>/``, and
removes every lower room. Then a rename out of a lower room, or into it, fails.
``docs/protocol.md`` has the reasons, and ``tests/model`` checks them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from syncd.protocol.errors import JobUnavailableError, SupersededError
from syncd.protocol.names import version_folder
from syncd.storage.calls import FileKind
from syncd.storage.errnos import GONE, NOT_EMPTY, Ignoring, is_gone
from syncd.storage.fsio import Draft, Storage
from syncd.storage.job import Job, move_away

log = logging.getLogger(__name__)

#: No daemon reaches this number by counting, so no daemon made a room with this number.
_LAST_ROOM: Final = 10**17
#: A longer name is cut to this number of bytes when it is moved into a room.
_LONGEST: Final = 200
#: The most attempts to empty a lower room.
_ROUNDS: Final = 100
#: The suffix makes names unique, so a paused daemon never takes another room for its own.
_ROOM: Final = re.compile(r"([1-9][0-9]{0,17})-([0-9a-f]{8})", re.ASCII)


class Epoch:
    """The room of one active daemon.

    Promised: after :meth:`take_over` has returned, no daemon of a lower epoch commits or prunes
    anything. The methods of its :class:`Epoch` that would do so raise :class:`SupersededError`.
    This error can be the only sign that a daemon is superseded.

    Attributes:
        number: the number of the epoch. Rooms with equal numbers are ordered by their suffix.
        building: the folder in which versions are made.
        in_background: the names in ``building`` that :meth:`sweep` keeps for another thread.
    """

    def __init__(self, job: Job, room: str) -> None:
        self._job, self._storage = job, job.storage
        self.number = _order(room)[0]
        self._room = job.layout.epochs / room
        self.building = self._room / "building"
        self.in_background: set[str] = set()
        self._trash = self._room / "trash"
        self._doomed = self._room / "doomed"

    @classmethod
    def take_over(cls, job: Job) -> Epoch:
        """Make a new room, and empty and remove all lower rooms.

        Raises:
            SupersededError: another daemon took over at the same time, and its room sorts higher.
            JobUnavailableError: a room has a number that no daemon can reach.
        """
        job.storage.refresh(job.layout.epochs)
        found = _rooms(job)
        number = _order(found[-1])[0] + 1 if found else 1
        if number > _LAST_ROOM:
            raise JobUnavailableError(
                f"{job.layout.epochs / found[-1]} has a higher number than any daemon can reach: "
                "remove it"
            )
        epoch = cls(job, f"{number}-{secrets.token_hex(4)}")
        job.storage.mkdir(epoch._room)
        # List the rooms again, after the mkdir, because the daemon of a higher room may have listed
        # the rooms before ours existed.
        rooms = _rooms(job)
        if any(_order(room) > _order(epoch._room.name) for room in rooms):
            with Ignoring(GONE):  # the other daemon may have removed our room already
                job.storage.rmdir(epoch._room)
            raise SupersededError(f"another daemon took over epoch {number} of {job.layout.root}")
        try:
            for folder in (epoch._doomed, epoch._trash, epoch.building):
                epoch._within(job.storage.mkdir, folder)
            # Sync first: a power loss that loses a folder would also lose the files moved into it.
            epoch._within(job.storage.sync_folder, epoch._room)
            job.storage.sync_folder(job.layout.epochs)
            for lower in rooms:
                if lower != epoch._room.name:
                    epoch._close_room(job.layout.epochs / lower)
        except BaseException:
            epoch._leave()
            raise
        return epoch

    def start_build(self, name: str) -> Path:
        """Make an empty folder for a build."""
        folder = self.building / name
        if self._storage.exists(folder):
            self._storage.remove_tree(folder)
        self._within(self._storage.mkdir, folder)
        return folder

    @contextmanager
    def build(self, name: str) -> Iterator[Path]:
        """An empty folder for a build, removed at the end of the block unless it was committed.

        Raises:
            SupersededError: an OSError in the block is due to another daemon's take-over.
        """
        folder = self.start_build(name)
        try:
            yield folder
        except OSError as error:
            self.raise_if_superseded(error)
            raise
        finally:
            if self._storage.exists(folder):
                self._storage.remove_tree(folder)

    def open_leasing(self, sequence: int) -> None:
        """Make the lease folder of a version, by one rename of an empty folder out of this room.

        Without the rename, a superseded daemon could make the folder of a version that was pruned.
        """
        source = self.building / f"leases-{version_folder(sequence)}"
        target = self._job.layout.lease_folder(sequence)
        if not self._storage.exists(source):  # it may exist from an earlier attempt
            self._within(self._storage.mkdir, source)
        try:
            self._rename(
                source,
                target,
                lambda: not self._storage.exists(source) and self._storage.exists(target),
            )
        except OSError as error:
            if error.errno not in NOT_EMPTY:
                raise
            self._storage.rmdir(source)  # the target exists, and has a lease in it
            return
        self._storage.sync_folder(target.parent)

    def publish_version(self, sequence: int) -> Path:
        """Commit a built version: rename it to ``published/``, which uses up its sequence."""
        return self.commit_build(version_folder(sequence), self._job.layout.version(sequence))

    def commit_delta(self, name: str) -> None:
        """Commit a delta. ``deltas/`` itself is also made by a rename."""
        deltas = self._job.layout.deltas
        if not self._storage.exists(deltas):
            self.start_build(deltas.name)
            self.commit_build(deltas.name, deltas)
        self.commit_build(name, deltas / name)

    def commit_build(self, name: str, target: Path) -> Path:
        """Commit a build by one rename.

        Raises:
            SupersededError: another daemon took over, or made ``target``.
        """
        source = self.building / name
        before = self._storage.status(source)

        def ours() -> bool:
            now = self._storage.status(target)
            return before is not None and now is not None and now.st_ino == before.st_ino

        try:
            self._rename(source, target, ours)
        except OSError as error:
            if error.errno in NOT_EMPTY:
                raise SupersededError(f"{target} exists: another daemon published it") from error
            raise
        self._storage.sync_folder(target.parent)
        return target

    def replace_file(self, target: Path, data: bytes, *, durable: bool = True) -> None:
        """Replace one of the daemon's files, such as LATEST, by one rename out of this room.

        If ``durable`` is False, a power loss can lose or tear the file; use this for hints only.
        """
        try:
            with Draft(self._storage, target, room=self._room) as draft:
                draft.write(data)
                draft.finish(durable=durable)
                self._rename(draft.temporary, target, lambda: self._reads(target, data))
        except IsADirectoryError:
            move_away(self._storage, target)
            self.replace_file(target, data, durable=durable)
            return
        except OSError as error:
            self.raise_if_superseded(error)
            raise
        if durable:
            self._storage.sync_folder(target.parent)

    def set_aside(self, path: Path) -> Path:
        """Hide a folder in ``trash/``, so that it can be checked once more.

        Then :meth:`condemn` the folder at the returned path, or rename it back.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        return self._move(path, self._trash)

    def condemn(self, path: Path) -> Path:
        """Decide to delete a folder: move it into ``doomed/``, which :meth:`sweep` empties.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        return self._move(path, self._doomed)

    def undecided(self) -> list[Path]:
        """The folders in ``trash/``, including those of earlier daemons."""
        return [self._trash / name for name in self._storage.names(self._trash)]

    def condemned(self) -> list[Path]:
        """The folders in ``doomed/``."""
        return [self._doomed / name for name in self._storage.names(self._doomed)]

    def sweep(self) -> None:
        """Delete condemned folders, and half-built folders on which no other thread works."""
        refused: OSError | None = None
        for folder in (self._doomed, self.building):
            for name in self._storage.names(folder):
                if folder == self.building and name in self.in_background:
                    continue
                try:
                    self._storage.remove_tree(folder / name)
                except OSError as error:
                    refused = refused or error
        if refused is not None:
            raise refused

    def is_live(self) -> bool:
        """True if this room still exists. It can disappear right after the call."""
        folders = (self.building, self._trash, self._doomed)
        return all(self._storage.exists(folder) for folder in folders)

    def raise_if_superseded(self, error: OSError) -> None:
        """Raise SupersededError if ``error`` occurred because another daemon removed this room."""
        if is_gone(error) and not self.is_live() and self._storage.exists(self._job.layout.epochs):
            raise SupersededError(
                f"another daemon has taken over {self._job.layout.root}: this daemon's epoch "
                f"{self.number} is gone"
            ) from error

    def _leave(self) -> None:
        """Remove the empty folders of this room, so that failed take-overs do not fill the disk."""
        for folder in (self.building, self._trash, self._doomed, self._room):
            try:
                self._storage.rmdir(folder)
            except OSError as error:
                log.debug("cannot remove %s: %s", folder, error)

    def _close_room(self, room: Path) -> None:
        """Empty a lower room and remove it, which ends all unfinished work there.

        The folders of the room are removed, never moved. The room's daemon can have handles of them
        (always on NFS, for a moment elsewhere). In a moved folder it could still rename files by a
        handle.
        """
        homes = {
            room / "building": self._doomed,
            room / "trash": self._trash,
            room / "doomed": self._doomed,
            room: self._doomed,
        }
        if not _is_folder(self._storage, room):
            return  # a room that is not a folder was never a daemon's
        gone = False
        for _ in range(_ROUNDS):  # the room's daemon may make new files in it, but not for ever
            for folder, home in homes.items():
                if folder != room and not _is_folder(self._storage, folder):
                    continue  # for example a link: it is moved with the other names in the room
                names: dict[str, FileKind] = {}
                with Ignoring(GONE):
                    names = self._storage.kinds(folder)
                for name, kind in names.items():
                    if kind is not FileKind.FOLDER or folder / name not in homes:
                        with Ignoring(GONE):  # this daemon or a third may have moved it already
                            self._move(folder / name, home)
                gone = self._removed(folder)
            if gone:
                break
        else:
            raise JobUnavailableError(f"{room} cannot be emptied: its files cannot be removed")
        self._storage.sync_folder(room.parent)

    def _removed(self, folder: Path) -> bool:
        with Ignoring(NOT_EMPTY | GONE):
            with suppress(FileNotFoundError):
                self._storage.rmdir(folder)
            return True
        with Ignoring(GONE):
            self._storage.refresh(folder)
        return False

    def _move(self, path: Path, into: Path) -> Path:
        # The name may have the maximum length, so it is cut to have space for the suffix.
        name = os.fsdecode(os.fsencode(path.name)[:_LONGEST])
        target = into / f"{name}-{secrets.token_hex(6)}"
        self._rename(path, target, lambda: self._storage.exists(target))
        # Sync before any deletion: a power loss could bring back a folder with half its content.
        for folder in (into, path.parent):
            self._storage.sync_folder(folder)
        return target

    def _rename(self, source: Path, target: Path, ours: Callable[[], bool]) -> None:
        """Rename; ignore an error if ``ours()`` shows that the rename has succeeded anyway."""
        try:
            self._storage.rename(source, target)
        except OSError as error:
            if is_gone(error):
                with suppress(OSError):  # it is gone, or not ours: use the cached state
                    self._storage.refresh(target.parent)
            if not ours():
                self.raise_if_superseded(error)
                raise

    def _within(self, change: Callable[[Path], None], path: Path) -> None:
        try:
            change(path)
        except OSError as error:
            self.raise_if_superseded(error)
            raise

    def _reads(self, target: Path, data: bytes) -> bool:
        for _ in range(2):  # the first open may still see the old file
            try:
                if self._storage.read(target) == data:
                    return True
            except OSError:
                pass  # counts as not ours; the caller raises the rename's own error
        return False


def _rooms(job: Job) -> list[str]:
    return sorted(
        (n for n in job.storage.names(job.layout.epochs) if _ROOM.fullmatch(n)), key=_order
    )


def _is_folder(storage: Storage, path: Path) -> bool:
    status = storage.status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _order(room: str) -> tuple[int, str]:
    number, _, suffix = room.partition("-")
    return int(number), suffix
