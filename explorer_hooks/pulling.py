"""Waiting for what is newer, and taking it: one thread at a time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from explorer_hooks.pipeline import Pipeline
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    EngineBrokenError,
    JobUnavailableError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.policy import Version

log = logging.getLogger(__name__)


class Puller:
    """Waits as one is asked to, and lets the pipeline take what comes.

    A version that is retired, or not visible yet, when it is to be held is waited for anew. Where
    the engine is broken, it is first given back what it had; by :meth:`newest` only where nothing
    newer is there, or that does not heal it. All methods raise what
    :meth:`~explorer_hooks.pipeline.Pipeline.take` does, and CancelledError.

    Args:
        sync: this explorer.
        pipeline: what takes versions.
        cancel: ends everything, now and from now on.
        poll: seconds between two looks.
    """

    def __init__(
        self, sync: ExplorerSynchronizer, pipeline: Pipeline, cancel: Cancellation, poll: float
    ) -> None:
        self._sync = sync
        self._pipeline = pipeline
        self._cancel = cancel
        self._poll = poll
        #: Had by whoever pulls. Of a thread: whose signal handler may close what it waits for.
        self.lock = threading.RLock()

    def newest(self, timeout: float | None, *, asks: bool, cancel: Cancellation) -> Version:
        """Wait for a newer version, whatever the trainer says, and take it.

        Args:
            timeout: seconds; None for as long as it takes.
            asks: whether a sync is required meanwhile.
            cancel: ends it.

        Raises:
            WaitTimeoutError: nothing newer in time.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._turn(deadline, cancel):
            while True:
                left = None if timeout is None else max(0.0, deadline - time.monotonic())
                newest = self._sync.wait_for_newer(
                    self._pipeline.floor,
                    asks=asks,
                    timeout=left,
                    cancel=cancel,
                    look=self._look,
                )
                was_broken = self._pipeline.is_broken
                try:
                    return self._pipeline.take(newest, cancel)
                except VersionGoneError as error:
                    self._look_again(error, deadline, cancel)
                except Exception:
                    if was_broken and not (self._cancel.is_done or cancel.is_done):
                        self._give_back()
                    raise

    def sync(self, timeout: float) -> None:
        """Wait until the trainer has something newer, which is taken, or says that it has not.

        Raises:
            WaitTimeoutError: neither in time.
        """
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self._cancel):
            self._restore()
            while True:
                floor = self._pipeline.floor
                try:
                    newest = self._sync.wait_new_model_state_dict(
                        floor, timeout=max(0.0, deadline - time.monotonic()), cancel=self._cancel
                    )
                    if newest is not None and newest != floor:
                        self._pipeline.take(newest, self._cancel)
                except (VersionGoneError, JobUnavailableError) as error:
                    self._look_again(error, deadline, self._cancel)
                else:
                    return

    def step(self, step: int, timeout: float) -> Version:
        """Have a step published, and take its version.

        Raises:
            WaitTimeoutError: it was not published in time.
            SyncdError: as ``set_model_state_dict_with_step_num``.
        """
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self._cancel):
            self._restore()
            while True:
                version = self._sync.set_model_state_dict_with_step_num(
                    step, timeout=max(0.0, deadline - time.monotonic()), cancel=self._cancel
                )
                assert version is not None  # noqa: S101 - a step was asked for
                if version == self._pipeline.version:
                    return version
                try:
                    return self._pipeline.take(version, self._cancel)
                except VersionGoneError as error:
                    self._look_again(error, deadline, self._cancel)

    @contextmanager
    def _turn(self, deadline: float, cancel: Cancellation) -> Iterator[None]:
        """Be the only one who pulls.

        Raises:
            WaitTimeoutError: another thread pulled all the time.
        """
        while not self.lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), self._poll))):
            self._check(cancel)
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(f"another thread of {self._sync.name} pulled all the time")
        try:
            self._check(cancel)
            yield
        finally:
            self.lock.release()

    def _restore(self) -> None:
        """Let a broken engine serve again what it had, or go on where something newer is there.

        Raises:
            EngineBrokenError: it is still broken, and there is nothing newer.
        """
        try:
            self._pipeline.restore()
        except EngineBrokenError as error:
            # What it had may be gone for good.
            newest, floor = self._sync.get_latest_model_version(), self._pipeline.floor
            if newest is None or (floor is not None and newest.sequence <= floor.sequence):
                raise
            log.warning("%s; taking version %d instead", error, newest.sequence)

    def _check(self, cancel: Cancellation) -> None:
        self._cancel.check()
        cancel.check()

    def _look(self) -> None:
        self._pipeline.restore()
        self._pipeline.look()

    def _give_back(self) -> None:
        try:
            self._pipeline.restore()
        except EngineBrokenError as error:
            log.warning("%s", error)

    def _look_again(self, error: Exception, deadline: float, cancel: Cancellation) -> None:
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(str(error)) from error
        log.info("%s; looking again", error)
        cancel.pause(self._poll)
