"""Deleting: versions, step folders, dead leases. Everything goes through the trash, on record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from syncd.daemon.decide import CloseLeaseFolder, DropLease, PruneStep, RetireVersion, StepSeen
from syncd.daemon.steps import look_at_step
from syncd.protocol.events import Event
from syncd.protocol.journal import AuditLine
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    HUGGINGFACE,
    LORA_ADAPTER,
    RECEIPTS,
    SAVING,
    parse_step_folder,
    parse_version_folder,
    step_folder,
    version_folder,
)
from syncd.protocol.records import SaveOutcome, encode
from syncd.storage.append import append
from syncd.storage.calls import Kind
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import NO_ROOM, NOT_EMPTY, is_gone
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

_LEFT: Final = "condemned, and not deleted yet when this daemon took over"


class Pruner:
    """Carries out what was decided, and looks once more before anything is gone for good.

    Args:
        storage: the shared storage.
        layout: the job.
        epoch: the active daemon's room; its trash is where things go first.
        session: for the audit log.
        needed: asked of a step that is out of sight: whether it is needed after all.
        wall: seconds since the epoch, for the audit log.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        epoch: Epoch,
        session: str,
        *,
        needed: Callable[[int], bool] = lambda _: False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._epoch = epoch
        self._session = session
        self._needed = needed
        self._wall = wall
        self._on_record: set[str] = set()
        self._end_of_torn = b""

    def retire_version(self, action: RetireVersion) -> bool:
        """End the leasing of a version, then delete it.

        Leasing ends with the rmdir of its lease folder, which succeeds only when that is empty, at
        that moment and on the server.

        Returns:
            Whether the version is gone; False where someone leased it meanwhile.
        """
        if not self._close_leases(action.sequence):
            return False
        try:
            doomed = self._epoch.condemn(self._layout.version(action.sequence))
        except FileNotFoundError:
            return not self._storage.exists(self._layout.version(action.sequence))
        self._record("version", version_folder(action.sequence), action.why)
        self._storage.remove_tree(doomed)
        return True

    def close_lease_folder(self, action: CloseLeaseFolder) -> None:
        """Remove the empty lease folder of a version that is gone."""
        self._close_leases(action.sequence)

    def drop_lease(self, action: DropLease) -> bool:
        """Take a dead explorer's lease away; False where it was gone."""
        path = self._layout.lease_folder(action.sequence) / action.marker
        if not self._storage.unlink_if_there(path):
            return False
        self._record("lease", f"{version_folder(action.sequence)}/{action.marker}", action.why)
        return True

    def prune_step(self, action: PruneStep) -> bool:
        """Take a step folder out of sight, look inside once more, then delete it.

        Returns:
            Whether it is gone; False where it was not what was decided on, and is back.
        """
        step = action.seen.step
        folder = self._layout.step(step)
        # The pointer that passed it may not be synced yet: it must not go back to what is gone.
        self._storage.sync_folder(self._layout.root)
        try:
            trash = self._epoch.set_aside(folder)
        except FileNotFoundError:
            return not self._storage.exists(folder)
        outcome = SaveOutcome.model_validate(
            {
                "identity": action.seen.recorded,
                "outcome": action.seen.outcome,
                "model_only": action.seen.model_only,
            }
        )
        try:
            found = self._look_anew(trash, step, outcome)
            needed = self._needed(step)
        except OSError:
            self._put_back(trash, folder)  # what cannot be looked at is not deleted either
            raise
        if found != action.seen or needed:
            log.info(
                "%s changed while it was pruned: it is put back",
                folder,
                extra=Event.PUT_BACK(path=folder, reason="it changed while it was pruned"),
            )
            self._put_back(trash, folder)
            return False
        doomed = self._epoch.condemn(trash)
        self._record("step", step_folder(step), action.why)
        self._storage.remove_tree(doomed)
        return True

    def sweep(self) -> None:
        """Finish what a daemon before this one left: put back what it had not decided on.

        What it had condemned is deleted, and goes on record (again, if it came to that).
        """
        for trash in self._epoch.undecided():
            name = trash.name.partition("-")[0]
            if parse_step_folder(name) is None:
                # Its name could lead anywhere; daemons set aside nothing but step folders.
                log.error(
                    "%s was set aside by no daemon: it is let be",
                    trash,
                    extra=Event.LEFT_ALONE(path=trash, reason="it was set aside by no daemon"),
                )
                continue
            log.info(
                "%s was set aside by a daemon that ended: it is put back",
                name,
                extra=Event.PUT_BACK(
                    path=self._layout.root / name, reason="the daemon that set it aside ended"
                ),
            )
            try:
                self._put_back(trash, self._layout.root / name)
            except (IsADirectoryError, NotADirectoryError) as error:
                log.error(
                    "%s cannot be put back, and stays there: %s",
                    trash,
                    error,
                    extra=Event.LEFT_ALONE(path=trash, reason=error),
                )
        for doomed in self._epoch.condemned():
            if doomed.name in self._on_record:
                continue
            name = doomed.name.partition("-")[0]
            if parse_step_folder(name) is not None:
                self._record("step", name, _LEFT)
            elif parse_version_folder(name) is not None:
                self._record("version", name, _LEFT)
            self._on_record.add(doomed.name)
        self._epoch.sweep()

    def _look_anew(self, folder: Path, step: int, outcome: SaveOutcome) -> StepSeen | None:
        """What a folder holds on the server, and not what this client remembers of it.

        What is remembered of a folder moves with it.
        """
        actor = folder / "actor"
        parts = (actor / name for name in (RECEIPTS, HUGGINGFACE, LORA_ADAPTER))
        for part in (folder, actor, *parts):
            try:
                self._storage.refresh(part)
            except OSError as error:
                if not is_gone(error):
                    raise
        # A first open may be of a file that was replaced: the second look counts.
        look_at_step(self._storage, folder, step, outcome)
        return look_at_step(self._storage, folder, step, outcome)

    def _close_leases(self, sequence: int) -> bool:
        folder = self._layout.lease_folder(sequence)
        try:
            self._storage.rmdir(folder)
        except OSError as error:
            if error.errno in NOT_EMPTY:
                return False
            if not is_gone(error):
                raise
            # That it is not there may be what this client remembers from before it was made.
            self._storage.refresh(folder.parent)
            return folder.name not in self._storage.names(folder.parent)
        return True

    def _put_back(self, trash: Path, folder: Path) -> None:
        """Put a folder back; where its name is in use again, every file that the name now lacks."""
        try:
            self._storage.rename(trash, folder)
        except OSError as error:
            if error.errno not in NOT_EMPTY:
                raise
        else:
            return
        self._link_back(trash, folder)
        # Out of where a successor puts back from, before anything in it is deleted.
        doomed = self._epoch.condemn(trash)
        self._link_back(doomed, folder)  # what a trainer wrote into it meanwhile, by its handle
        self._storage.remove_tree(doomed)

    def _link_back(self, trash: Path, folder: Path) -> None:
        self._storage.make_folder(folder, below=self._layout.root)
        self._storage.refresh(trash)  # what is remembered of a folder moved with it
        for name, kind in self._storage.kinds(trash).items():
            if kind is Kind.FOLDER:
                self._link_back(trash / name, folder / name)
            elif name != SAVING:  # a trainer at work there has its own
                try:
                    self._storage.link(trash / name, folder / name)
                except FileExistsError:
                    pass  # the newer one stays
        self._storage.sync_folder(folder)  # before the other names are deleted

    def _record(self, what: Literal["version", "step", "lease"], name: str, why: str) -> None:
        log.info(
            "pruned %s %s: %s",
            what,
            name,
            why,
            extra=Event.PRUNED(what=what, name=name, reason=why),
        )
        line = AuditLine(time=self._wall(), what=what, name=name, why=why, session=self._session)
        try:
            # Before what it tells of is deleted.
            data = self._end_of_torn + encode(line)
            append(self._storage, self._layout.audit, data, durable=True)
        except OSError as error:
            self._end_of_torn = b"\n"  # some of the line may be there, and not its end
            if error.errno not in NO_ROOM:
                raise
            # A full disk must not keep what would free it.
            log.error(
                "no room for the audit line of %s %s: %s",
                what,
                name,
                error,
                extra=Event.RECORD_UNWRITTEN(path=self._layout.audit, reason=error),
            )
        else:
            self._end_of_torn = b""
