"""Pruning of versions, deltas, step folders and dead leases, with a line in the audit log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from syncd.daemon.decide import DropLease, PruneDelta, PruneStep, RetireVersion
from syncd.daemon.observation import StepSeen
from syncd.daemon.steps import look_at_step
from syncd.protocol.events import LeftAlone, RecordUnwritten
from syncd.protocol.journal_lines import AuditLine
from syncd.protocol.names import (
    ACTOR,
    HUGGINGFACE,
    LORA_ADAPTER,
    RECEIPTS,
    SAVING,
    parse_delta_folder,
    parse_step_folder,
    parse_version_folder,
    step_folder,
    version_folder,
)
from syncd.protocol.records import Latest, SaveOutcome, encode
from syncd.protocol.version_events import Pruned, PutBack
from syncd.storage.append import append
from syncd.storage.calls import FileKind
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import GONE, NO_ROOM, NOT_EMPTY, Ignoring, is_gone
from syncd.storage.job import Job, delta_folders
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

_What = Literal["version", "step", "lease", "delta"]
#: A kind of deletion → the names of its folders.
_FOLDERS: Final[dict[_What, Callable[[str], int | None]]] = {
    "step": parse_step_folder,
    "version": parse_version_folder,
    "delta": parse_delta_folder,
}
_LEFT: Final = "marked for deletion, but not yet deleted when this daemon took over"


@dataclass
class Pruner:
    """Carries out the decided deletions; checks once more before a deletion is final.

    ``needed`` is called when the folder of a step is already in the trash. If it returns True, the
    folder is put back.
    """

    job: Job
    epoch: Epoch
    session: str
    needed: Callable[[int], bool] = lambda _: False
    wall: Clock = time.time

    def __post_init__(self) -> None:
        self._storage, self._layout = self.job.storage, self.job.layout
        self._on_record: set[str] = set()
        self._end_of_torn = b""

    def retire_version(self, action: RetireVersion) -> bool:
        """Delete a version; returns False if an explorer has leased it meanwhile.

        Leasing ends with the rmdir of the lease folder. The server refuses the rmdir if the folder
        is not empty.
        """
        version = self._layout.version(action.sequence)
        return self.close_leases(action.sequence) and self._delete("version", version, action.why)

    def prune_delta(self, action: PruneDelta) -> bool:
        """Delete a delta. Deltas have no leases, because readers can read the version instead."""
        return self._delete("delta", self._layout.delta(action.sequence), action.why)

    def _delete(self, what: _What, folder: Path, why: str) -> bool:
        """Delete a folder, on record; returns whether it is gone."""
        try:
            doomed = self.epoch.condemn(folder)
        except FileNotFoundError:
            return not self._storage.exists(folder)
        self._record(what, folder.name, why)
        self._storage.remove_tree(doomed)
        return True

    def prune_deltas(self, why: str) -> bool:
        """Delete all deltas up to LATEST; returns whether any is gone."""
        latest = self.job.read(Latest, self._layout.latest)
        gone, refused, last = False, None, latest.sequence if latest else 0
        for sequence in (number for number in delta_folders(self.job) if number <= last):
            try:
                gone |= self.prune_delta(PruneDelta(sequence, why))
            except OSError as error:
                refused = refused or error  # raised last, so that the others go
        if refused is not None and not gone:
            raise refused
        return gone

    def drop_lease(self, action: DropLease) -> bool:
        """Remove a dead explorer's lease; returns False if the lease was already gone."""
        path = self._layout.lease_folder(action.sequence) / action.marker
        if not self._storage.unlink_if_there(path):
            return False
        self._record("lease", f"{version_folder(action.sequence)}/{action.marker}", action.why)
        return True

    def prune_step(self, action: PruneStep) -> bool:
        """Move a step folder to the trash, look into it once more, and then delete it.

        If the content has changed since the decision, put the folder back, and return False.
        """
        step = action.seen.step
        folder = self._layout.step(step)
        # Sync the newer pointer, because after a power loss an old pointer could name this step.
        self._storage.sync_folder(self._layout.root)
        try:
            trash = self.epoch.set_aside(folder)
        except FileNotFoundError:
            return not self._storage.exists(folder)
        try:
            found = self._look_anew(trash, step, action.seen.outcome)
            needed = self.needed(step)
        except OSError:
            self._put_back(trash, folder)  # never delete an unreadable folder
            raise
        if found != action.seen or needed:
            PutBack(folder, "it changed while it was being pruned").tell(log)
            self._put_back(trash, folder)
            return False
        doomed = self.epoch.condemn(trash)
        self._record("step", step_folder(step), action.why)
        self._storage.remove_tree(doomed)
        return True

    def sweep(self) -> None:
        """Put back the folders in the trash; delete unfinished folders and those in ``doomed/``.

        A folder in ``doomed/`` may get a second line in the audit log.
        """
        for trash in self.epoch.undecided():
            name = trash.name.partition("-")[0]
            if parse_step_folder(name) is None:
                # Daemons set aside only step folders, and another name could lead anywhere.
                LeftAlone(trash, "no daemon put it there").tell(log)
                continue
            folder = self._layout.root / name
            PutBack(folder, "the daemon that was pruning it has ended").tell(log)
            try:
                self._put_back(trash, folder)
            except (IsADirectoryError, NotADirectoryError) as error:
                LeftAlone(trash, f"cannot put it back: {error}").tell(log)
        for doomed in self.epoch.condemned():
            if doomed.name in self._on_record:
                continue
            name = doomed.name.partition("-")[0]
            for what, parse in _FOLDERS.items():
                if parse(name) is not None:
                    self._record(what, name, _LEFT)
            self._on_record.add(doomed.name)
        self.epoch.sweep()

    def sweep_benches(self, names: Iterable[str]) -> None:
        """Delete these files and folders in ``bench/``."""
        refused: OSError | None = None
        for name in names:
            try:
                self._storage.remove_tree(self.epoch.condemn(self._layout.bench / name))
            except OSError as error:
                refused = refused or error  # raised last, so that the others are removed
        if refused is not None:
            raise refused

    def _look_anew(self, folder: Path, step: int, outcome: SaveOutcome) -> StepSeen | None:
        """The folder's content on the server; this client's cache may be outdated."""
        actor = folder / ACTOR
        for part in (folder, actor):
            with Ignoring(GONE):
                self._storage.refresh(part)
        for name in {RECEIPTS, HUGGINGFACE, LORA_ADAPTER}.intersection(self._storage.names(actor)):
            self._storage.refresh(actor / name)
        # A first open may still find an old file, so only the second look counts.
        look_at_step(self._storage, folder, step, outcome)
        return look_at_step(self._storage, folder, step, outcome)

    def close_leases(self, sequence: int) -> bool:
        """Remove the lease folder of a version, if it is empty; returns whether it is gone."""
        folder = self._layout.lease_folder(sequence)
        try:
            self._storage.rmdir(folder)
        except OSError as error:
            if error.errno in NOT_EMPTY:
                return False
            if not is_gone(error):
                raise
            # Before the folder was made, this client may have cached that its name is missing.
            self._storage.refresh(folder.parent)
            return folder.name not in self._storage.names(folder.parent)
        return True

    def _put_back(self, trash: Path, folder: Path) -> None:
        """Put a folder back, or only its missing files if its name is in use again."""
        try:
            self._storage.rename(trash, folder)
        except OSError as error:
            if error.errno not in NOT_EMPTY:
                raise
        else:
            return
        self._link_back(trash, folder)
        # Condemn the trash before deleting, so that no successor puts back a part of it.
        doomed = self.epoch.condemn(trash)
        self._link_back(
            doomed, folder
        )  # files that a trainer wrote meanwhile through an open handle
        self._storage.remove_tree(doomed)

    def _link_back(self, trash: Path, folder: Path) -> None:
        self._storage.make_folder(folder, below=self._layout.root)
        self._storage.refresh(trash)  # a renamed folder keeps this client's cache
        for name, kind in self._storage.kinds(trash).items():
            if kind is FileKind.FOLDER:
                self._link_back(trash / name, folder / name)
            elif name != SAVING:  # a trainer that saves there makes its own
                with suppress(FileExistsError):  # the newer file stays
                    self._storage.link(trash / name, folder / name)
        self._storage.sync_folder(folder)  # before the other names are deleted

    def _record(self, what: _What, name: str, why: str) -> None:
        Pruned(what, name, why).tell(log)
        line = AuditLine(time=self.wall(), what=what, name=name, why=why, session=self.session)
        try:
            # Write the line before the deletion that it records.
            data = self._end_of_torn + encode(line)
            append(self._storage, self._layout.audit, data, durable=True)
        except OSError as error:
            self._end_of_torn = b"\n"  # the file may now end with a part of the line
            if error.errno not in NO_ROOM:
                raise
            # A full disk must not stop the deletions that free it.
            RecordUnwritten(self._layout.audit, error).tell(log)
        else:
            self._end_of_torn = b""
