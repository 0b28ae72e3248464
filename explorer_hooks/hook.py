"""``ExplorerHook``: what a rollout worker calls between its batches."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Self

from explorer_hooks.engines.base import Engine
from explorer_hooks.reader import LeasedVersion, Reader
from syncd.protocol.errors import CancelledError, VerificationError, WaitTimeoutError
from syncd.protocol.policy import RunningStatus, Version
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)


class ExplorerHook:
    """Keeps an engine on the newest weights of a job.

    Promised: the engine is touched only by versions that were verified and fit; its version never
    goes back; the version that it serves stays on disk until the next one is applied, so that an
    engine may restart from that folder. A version that cannot be used is refused and reported.

    Args:
        job_dir: the job directory.
        name: this explorer's, unique in the job.
        engine: what to load into.
        poll: seconds between two looks where the filesystem sends no events.
        storage: the seam for tests.

    Attributes:
        last_load_seconds: how long the last pull took to verify and load what it had waited for.
    """

    def __init__(
        self,
        job_dir: str | Path,
        name: str,
        engine: Engine,
        *,
        poll: float = 1.0,
        storage: Storage | None = None,
    ) -> None:
        self._engine = engine
        self._reader = Reader(job_dir, name, poll=poll, storage=storage)
        self._pulling = threading.Lock()
        self._held: LeasedVersion | None = None
        self._leaving: list[LeasedVersion] = []
        self._refused_sequence = 0
        self._refused: str | None = None
        self._nothing_new = 0
        self.last_load_seconds = 0.0
        self._closed = False
        self._report(RunningStatus.RUNNING)

    @property
    def version(self) -> Version | None:
        """What the engine serves; None before the first pull."""
        held = self._held
        return Version(held.sequence, held.step) if held else None

    @property
    def folder(self) -> Path | None:
        """The folder of the version that the engine serves; it stays until the next is applied."""
        return self._held.folder if self._held else None

    def pull(self, timeout: float | None = None) -> Version:
        """Wait for a newer version than the engine has, and load it.

        Args:
            timeout: seconds to wait for one; 0 to take what is there now; None for as long as it
                takes.

        Returns:
            The version that the engine serves now.

        Raises:
            WaitTimeoutError: nothing newer came in time; the engine is as it was.
            VerificationError, EngineMismatchError, or what the engine raises: the version was
                refused; the engine is as it was. The next pull waits for one above it.
            OSError: storage failed; the engine is as it was, and the next pull tries again.
            CancelledError: the hook was closed by another thread.
        """
        with self._pulling:
            self._reader.check_open()
            have = self._held.sequence if self._held else 0
            self._report(RunningStatus.REQUIRE_SYNC)
            try:
                version = self._reader.next_version(max(have, self._refused_sequence), timeout)
            except WaitTimeoutError:
                self._nothing_new += 1
                self._report(RunningStatus.RUNNING)
                raise
            except VerificationError as error:
                self._refuse(error.sequence or 0, error)
                raise
            begun = time.monotonic()
            try:
                version.verify(cancel=self._reader.check_open)
                self._engine.check(version)
                self._load(version)
            except BaseException as error:
                self._let_go(version)
                # What storage refused, or who pulls has stopped, may well work the next time.
                if isinstance(error, Exception) and not isinstance(error, OSError | CancelledError):
                    self._refuse(version.sequence, error)
                raise
            self.last_load_seconds = time.monotonic() - begun
            before, self._held = self._held, version
            self._refused = None
            self._let_go(before)
            self._report(RunningStatus.RUNNING)
            log.info(
                "%s serves version %d (step %d), loaded in %.3f s",
                self._reader.name,
                version.sequence,
                version.step,
                self.last_load_seconds,
            )
            return Version(version.sequence, version.step)

    def close(self) -> None:
        """End a pull that waits in another thread, let the version go, and say so.

        Safe to call twice. Whoever reads the version's folder must have stopped.
        """
        if self._closed:
            return
        self._closed = True
        self._reader.cancel()
        with self._pulling:
            self._report(RunningStatus.STOPPED)
            self._let_go(self._held)
            self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, version: LeasedVersion) -> None:
        """Load; an engine that fails half-way is given back what it had, which is still leased."""
        try:
            self._engine.load(version)
        except Exception:
            if self._held is not None:
                log.warning("loading again what was served: version %d", self._held.sequence)
                self._engine.load(self._held)
            raise

    def _refuse(self, sequence: int, error: Exception) -> None:
        log.error("version %d is refused: %s", sequence, error)
        self._refused_sequence = max(self._refused_sequence, sequence)
        self._refused = f"version {sequence}: {error}"
        self._report(RunningStatus.RUNNING)

    def _let_go(self, version: LeasedVersion | None) -> None:
        """Release a version, and those that storage did not let go of before."""
        if version is not None:
            self._leaving.append(version)
        try:
            while self._leaving:
                self._leaving[-1].release()
                self._leaving.pop()
        except OSError as error:
            log.warning("a lease stays until the next pull: %s", error)

    def _report(self, status: RunningStatus) -> None:
        """Say what this explorer does; an engine goes on serving where that cannot be said."""
        try:
            self._reader.report(
                status,
                sequence=self._held.sequence if self._held else None,
                step=self._held.step if self._held else None,
                nothing_new=self._nothing_new,
                refused=self._refused,
            )
        except OSError as error:
            log.warning("%s cannot report: %s", self._reader.name, error)
