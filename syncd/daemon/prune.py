"""Deleting: versions, step folders, dead leases. Everything goes through the trash, on record."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from syncd.daemon.decide import CloseLeaseFolder, DropLease, PruneStep, RetireVersion
from syncd.daemon.scan import look_at_step
from syncd.protocol.layout import JobLayout, step_folder, version_folder
from syncd.protocol.records import AuditLine, SaveOutcome, encode
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import NOT_EMPTY, Storage, is_gone

log = logging.getLogger(__name__)


class Pruner:
    """Carries out what was decided, and looks once more before anything is gone for good.

    Args:
        storage: the shared storage.
        layout: the job.
        epoch: the active daemon's room; its trash is where things go first.
        session: for the audit log.
        wall: seconds since the epoch, for the audit log.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        epoch: Epoch,
        session: str,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._epoch = epoch
        self._session = session
        self._wall = wall

    def retire_version(self, action: RetireVersion) -> bool:
        """End the leasing of a version, then delete it.

        Leasing ends with the rmdir of its lease folder, which succeeds only when that is empty, at
        that moment and on the server.

        Returns:
            Whether the version is gone; False where someone leased it meanwhile.
        """
        if not self._close_leases(action.sequence):
            return False
        return self._delete(
            self._layout.version(action.sequence),
            "version",
            version_folder(action.sequence),
            action.why,
        )

    def close_lease_folder(self, action: CloseLeaseFolder) -> None:
        """Remove the empty lease folder of a version that is gone."""
        self._close_leases(action.sequence)

    def drop_lease(self, action: DropLease) -> None:
        """Take a dead explorer's lease away."""
        path = self._layout.lease_folder(action.sequence) / action.marker
        if self._storage.unlink_if_there(path):
            name = f"{version_folder(action.sequence)}/{action.marker}"
            self._record("lease", name, action.why)

    def prune_step(self, action: PruneStep) -> bool:
        """Take a step folder out of sight, look inside once more, then delete it.

        Returns:
            Whether it is gone; False where it was not what was decided on, and is back.
        """
        step = action.seen.step
        folder = self._layout.step(step)
        try:
            trash = self._epoch.discard(folder)
        except FileNotFoundError:
            return True
        outcome = SaveOutcome.model_validate(
            {"identity": action.seen.recorded, "outcome": action.seen.outcome}
        )
        if look_at_step(self._storage, trash, step, outcome) != action.seen:
            log.info("%s changed while it was pruned: it is put back", folder)
            self._restore(trash, folder)
            return False
        self._record("step", step_folder(step), action.why)
        self._storage.remove_tree(trash)
        return True

    def sweep(self) -> None:
        """Delete what an earlier daemon left in the trash or half built."""
        for name in self._epoch.discarded():
            self._record("trash", name, "left by a daemon that ended before it was deleted")
        self._epoch.sweep()

    def _close_leases(self, sequence: int) -> bool:
        try:
            self._storage.rmdir(self._layout.lease_folder(sequence))
        except OSError as error:
            if error.errno in NOT_EMPTY:
                return False
            if not is_gone(error):
                raise
        return True

    def _delete(self, path: Path, what: Literal["version", "step"], name: str, why: str) -> bool:
        try:
            trash = self._epoch.discard(path)
        except FileNotFoundError:
            return True
        self._record(what, name, why)
        self._storage.remove_tree(trash)
        return True

    def _restore(self, trash: Path, folder: Path) -> None:
        """Put a folder back; where its name is in use again, every file that the name now lacks."""
        try:
            self._storage.rename(trash, folder)
        except OSError as error:
            if error.errno not in NOT_EMPTY:
                raise
        else:
            return
        for found, _, files in os.walk(trash):
            home = folder / Path(found).relative_to(trash)
            self._storage.make_folder(home)
            for name in files:
                try:
                    self._storage.link(Path(found) / name, home / name)
                except FileExistsError:
                    pass  # the newer one stays
        self._storage.remove_tree(trash)

    def _record(
        self, what: Literal["version", "step", "lease", "trash"], name: str, why: str
    ) -> None:
        log.info("pruned %s %s: %s", what, name, why)
        line = AuditLine(time=self._wall(), what=what, name=name, why=why, session=self._session)
        fd = self._storage.open_append(self._layout.audit)
        with self._storage.closing(fd):
            self._storage.write_all(fd, encode(line))
