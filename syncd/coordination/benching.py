"""Benches: one explorer builds and holds a step to evaluate it; others keep their versions."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.build import FreeSpace, build_step
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import Unfinished, WholeSave
from syncd.checkpoint.step_save import look_into_step
from syncd.checkpoint.version import read_manifest
from syncd.coordination.leased_version import LeasedVersion, read_latest
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Wait
from syncd.protocol.errors import (
    CheckpointError,
    InvalidSettingsError,
    JobUnavailableError,
    RecordError,
    SaveFailedError,
    SaveNotReadyError,
    VerificationError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.names import step_folder
from syncd.protocol.records import Manifest, Names
from syncd.protocol.reports import BuildSettings, DaemonReport
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, check_on_disk, registering, version_folders
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

#: The sequence in the manifest of a build; only published versions have a number.
_UNPUBLISHED: Final = 0
#: The most builds of an explorer: the served step, and the next step.
_MOST: Final = 2


@dataclass
class Bench:
    """Holds steps for one explorer: a published version of a step, or the explorer's own build.

    A held folder stays until the explorer releases it or counts as dead.

    Args:
        versions: the published versions of the job, or of the job's memory directory.
        session: the id of the explorer's heartbeat in the job.
        hub_names: True if the explorer accepts the hub's names.
    """

    job: Job
    versions: Versions
    session: str
    hub_names: bool
    clock: Clock

    def __post_init__(self) -> None:
        self._new_names: Names = "hub" if self.hub_names else "trainer"
        advice = ": make room there, or release a step"
        self._space = FreeSpace(
            self.job.storage, self.job.layout.bench, self.job.layout.root, advice=advice
        )
        self._builds: set[Path] = set()

    def hold(self, step: int, wait: Wait) -> LeasedVersion:
        """Lease a step's published version, or build the step once its save is complete.

        For the result and the errors see :meth:`.ExplorerSynchronizer.hold_step`.
        """
        published = self._lease_published(step)
        if published is not None:
            return published
        identity, since = None, 0.0
        while True:
            check_on_disk(self.job, step)
            daemon = self.job.read(DaemonReport, self.job.layout.daemon_report)
            if daemon is None:
                raise JobUnavailableError(
                    f"the daemon of {self.job.layout.root} has not reported how it builds "
                    "versions: start it"
                )
            settings = daemon.builds
            save = look_into_step(self.job.storage, self.job.layout.step(step), step)
            if save.identity != identity:
                identity, since = save.identity, self.clock()
            if isinstance(save, Unfinished):
                reason = save.reason
            elif not save.receipts and self.clock() - since < settings.tick:
                reason = f"it has no receipts, and may have changed in the last {settings.tick:g} s"
            else:
                try:
                    return self._build(save, settings, wait)
                except SaveNotReadyError as error:
                    reason = str(error)
            if not wait.more():
                raise WaitTimeoutError(f"step {step} was not complete in time: {reason}")

    def is_of(self, manifest: Manifest, step: int) -> bool:
        """True if a version is of ``step``, and the step was not saved again since."""
        if manifest.step != step:
            return False
        folder = self.job.layout.step(step)
        save = look_into_step(self.job.storage, folder, step)
        return save.identity == manifest.save_id or not self.job.storage.exists(folder)

    def _lease_published(self, step: int) -> LeasedVersion | None:
        layout = self.versions.job.layout
        for sequence in reversed(version_folders(self.versions.job)):
            try:
                # Read the manifest before the lease, because others see each lease.
                manifest = read_manifest(self.job.storage, layout.version(sequence))
                if self.is_of(manifest, step):
                    return self.versions.holds.hold(sequence)
            except (OSError, RecordError, VerificationError, VersionGoneError) as error:
                log.info("skipping %s: %s", layout.version(sequence), error)
        return None

    def _build(self, save: WholeSave, settings: BuildSettings, wait: Wait) -> LeasedVersion:
        if len(self._builds) >= _MOST:
            raise InvalidSettingsError(
                f"step {save.step} cannot be built: this explorer holds {_MOST} built steps "
                "already. Release one first"
            )
        layout = self.job.layout
        folder = layout.bench / self.session / f"{step_folder(save.step)}-{secrets.token_hex(4)}"
        latest = read_latest(self.job)
        names = self._new_names if latest is None else latest.names or "trainer"
        options = MergeOptions(
            max_file_size=settings.max_shard_size,
            digests=settings.digests,
            cast=settings.cast,
            prefix=settings.dcp_prefix,
            names=settings.names or names,
            may_keep=settings.names is None,
        )
        build = _Build(self.job.storage, folder, self._builds)
        log.info("building step %d in %s", save.step, folder)
        try:
            with registering(layout):
                # While the session lives, this folder pins the step.
                self.job.storage.make_folder(folder, below=layout.state)
                self._space.check(layout.actor(save.step), save, options, wait.check)
                build_step(
                    self.job.storage, layout.step(save.step), save, folder,
                    options=options, work=Work(wait.check), sequence=_UNPUBLISHED,
                )  # fmt: skip
            return self.versions.holds.share(folder, _UNPUBLISHED, lambda: build)
        except BaseException as error:
            self.versions.holds.end(folder, build)
            if isinstance(error, CheckpointError):
                raise SaveFailedError(f"step {save.step} cannot be built: {error}") from error
            raise


@dataclass
class _Build:
    """A hold on a build, which is deleted at the release."""

    storage: Storage
    folder: Path
    builds: set[Path]

    def __post_init__(self) -> None:
        self.builds.add(self.folder)

    def release(self) -> None:
        self.storage.remove_tree(self.folder)
        self.builds.discard(self.folder)
