"""Benches: one explorer holds a step to evaluate it; other explorers keep their versions."""

from __future__ import annotations

import errno
import logging
import secrets
import time
from typing import Final

from syncd import __version__
from syncd.checkpoint.step_save import look_into_step
from syncd.checkpoint.version import read_manifest
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Wait
from syncd.protocol.errors import (
    JobUnavailableError,
    RecordError,
    SaveFailedError,
    VerificationError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.names import parse_version_folder, printable
from syncd.protocol.records import Manifest, encode
from syncd.protocol.reports import DaemonReport
from syncd.protocol.requests import BenchRequest
from syncd.storage.errnos import is_gone, is_refused_here
from syncd.storage.job import Job
from syncd.storage.step_folders import check_on_disk

log = logging.getLogger(__name__)

#: The sequence in the manifest of a build; only published versions have a number.
_UNPUBLISHED: Final = 0


class Bench:
    """Holds steps for one explorer: a published version of a step, or the daemon's build of a step.

    A held folder stays until the explorer releases it or counts as dead.

    Args:
        versions: the published versions of the job, or of the job's memory directory.
        session: the id of the explorer's heartbeat in the job.
    """

    def __init__(self, job: Job, versions: Versions, name: str, session: str) -> None:
        self._job = job
        self._versions = versions
        self._name = name
        self._session = session

    def hold(self, step: int, wait: Wait) -> LeasedVersion:
        """Lease a step's published version, or wait until the daemon has built the step.

        For the result and the errors see :meth:`.ExplorerSynchronizer.hold_step`.
        """
        published = self._lease_published(step)
        if published is not None:
            return published
        check_on_disk(self._job, step)
        request = BenchRequest(
            id=f"step-{step}-{secrets.token_hex(4)}",
            session=self._session,
            step=step,
            by=self._name,
            time=time.time(),
        )
        folder = self._job.layout.bench_build(self._session, request.id)
        held = _Build(self._job, request)
        try:
            self._check_daemon(step)
            self._ask(request)
            self._await(request, wait)
            return self._versions.holds.share(folder, _UNPUBLISHED, lambda: held)
        except BaseException:
            self._versions.holds.end(folder, held)
            raise

    def is_of(self, manifest: Manifest, step: int) -> bool:
        """True if a version is of ``step``, and the step was not saved again since."""
        if manifest.step != step:
            return False
        folder = self._job.layout.step(step)
        save = look_into_step(self._job.storage, folder, step)
        return save.identity == manifest.save_id or not self._job.storage.exists(folder)

    def _lease_published(self, step: int) -> LeasedVersion | None:
        layout = self._versions.job.layout
        found = map(parse_version_folder, self._job.storage.names(layout.published))
        for sequence in sorted((one for one in found if one is not None), reverse=True):
            try:
                # Read the manifest before the lease, because others see each lease.
                manifest = read_manifest(self._job.storage, layout.version(sequence))
                if self.is_of(manifest, step):
                    return self._versions.holds.hold(sequence)
            except (OSError, RecordError, VerificationError, VersionGoneError) as error:
                log.info("skipping %s: %s", layout.version(sequence), error)
        return None

    def _ask(self, request: BenchRequest) -> None:
        self._job.storage.make_folder(self._job.layout.bench, below=self._job.layout.state)
        log.info("%s asks the daemon to build step %d", self._name, request.step)
        path = self._job.layout.bench_request(request.id)
        self._job.storage.replace(path, encode(request), room=self._job.layout.drafts)

    def _await(self, request: BenchRequest, wait: Wait) -> None:
        while not self._is_built(request):
            self._check_daemon(request.step)
            if not wait.more():
                raise WaitTimeoutError(
                    f"step {request.step} was not built in {self._job.layout.bench} in time; "
                    f"{self._versions.daemon_hint()}"
                )

    def _is_built(self, request: BenchRequest) -> bool:
        """True if the build exists; raise SaveFailedError if the daemon refused the request."""
        folder = self._job.layout.bench_build(request.session, request.id)
        for parent in (self._job.layout.bench, folder.parent):
            try:
                self._job.storage.refresh(parent)
            except OSError as error:
                if not (is_gone(error) or is_refused_here(error)):
                    raise
        if self._job.storage.exists(folder):
            return True
        path = self._job.layout.bench_request(request.id)
        now = self._job.read(BenchRequest, path)
        if now is None:
            # This process was paused for so long that the daemon took it for dead.
            self._job.check_is_there()
            self._ask(request)
        elif now.outcome == "refused":
            raise SaveFailedError(
                f"the daemon cannot build step {request.step}: {printable(now.why)}"
            )
        return False

    def _check_daemon(self, step: int) -> None:
        daemon = self._job.read(DaemonReport, self._job.layout.daemon_report)
        if daemon is None or daemon.release is not None or daemon.state == "stopped":
            return
        if self._job.storage.exists(self._job.layout.daemon_lock):
            raise JobUnavailableError(
                f"the daemon of {self._job.layout.root} (pid {daemon.pid} on "
                f"{printable(daemon.host)}) runs an older release that cannot build step {step} "
                f"for one explorer: restart the daemon with syncd {__version__}"
            )


class _Build:
    """A hold on a build: the daemon keeps the build while the request file exists."""

    def __init__(self, job: Job, request: BenchRequest) -> None:
        self._job = job
        self._path = job.layout.bench_request(request.id)

    def release(self) -> None:
        if self._job.storage.unlink_if_there(self._path):
            return
        if not self._job.storage.exists(self._job.layout.format):  # for example unmounted
            raise FileNotFoundError(
                errno.ENOENT, "the job's folder is missing, perhaps unmounted", str(self._path)
            )
