"""Pull newer weights, in one thread at a time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from explorer_hooks.fast_path import ExplorerBroadcasts
from explorer_hooks.pipeline import Pipeline
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    BroadcastError,
    EngineBrokenError,
    JobUnavailableError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.policy import Version
from syncd.protocol.reports import Offer

log = logging.getLogger(__name__)


class Puller:
    """Waits for newer weights, and lets the pipeline load them.

    If a version is retired before it is leased, or is not visible yet, the wait starts again. If
    the engine is broken, each method first loads the engine's previous version. But :meth:`newest`
    tries a newer version before that.

    Each method can raise WaitTimeoutError, CancelledError, and the errors of
    :meth:`~explorer_hooks.pipeline.Pipeline.take`.
    """

    def __init__(
        self,
        sync: ExplorerSynchronizer,
        pipeline: Pipeline,
        fast_path: ExplorerBroadcasts | None,
        cancel: Cancellation,
        poll: float,
    ) -> None:
        self._sync = sync
        self._pipeline = pipeline
        self._fast_path = fast_path
        self._cancel = cancel
        self._poll = poll
        #: Re-entrant, because a signal handler on the same thread may call close().
        self.lock = threading.RLock()

    def newest(self, timeout: float | None, *, asks: bool, cancel: Cancellation) -> Version:
        """Wait for a newer version, even without a trainer, and load it.

        With ``asks``, the wait requests a sync. ``timeout`` is in seconds; None sets no limit.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._turn(deadline, cancel):
            self._pipeline.ends_bench()
            while True:
                left = None if timeout is None else max(0.0, deadline - time.monotonic())
                with self._with_refusal():
                    newest = self._wait(left, asks=asks, cancel=cancel)
                was_broken = self._pipeline.is_broken
                try:
                    if newest is not None and self._take(newest, cancel):
                        return self._served()
                except VersionGoneError as error:
                    self._look_again(error, deadline, cancel)
                except Exception:
                    if was_broken and not (self._cancel.is_done or cancel.is_done):
                        self._give_back()
                    raise

    def sync(self, timeout: float) -> None:
        """Wait for newer weights and load them, unless the trainer has none, or has stopped."""
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self._cancel):
            self._restore()
            self._pipeline.ends_bench()
            while True:
                left = max(0.0, deadline - time.monotonic())
                try:
                    with self._with_refusal():
                        newest = self._wait_until_told(left)
                    if newest is None or self._take(newest, self._cancel):
                        return
                except (VersionGoneError, JobUnavailableError) as error:
                    self._look_again(error, deadline, self._cancel)

    def what_is_there(self) -> None:
        """Load newer weights if they are published already; otherwise raise WaitTimeoutError."""
        with self._turn(time.monotonic(), self._cancel):
            self._restore()
            self.newest(0, asks=False, cancel=self._cancel)

    def step(self, step: int, timeout: float) -> Version:
        """Let the daemon publish a step, and load it."""
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self._cancel):
            self._restore()
            while True:
                version = self._sync.set_model_state_dict_with_step_num(
                    step, timeout=max(0.0, deadline - time.monotonic()), cancel=self._cancel
                )
                try:
                    if version is not None and version != self._pipeline.version:
                        self._pipeline.take(version, self._cancel, exactly=True)
                    return self._served()
                except VersionGoneError as error:
                    self._look_again(error, deadline, self._cancel)

    def step_alone(self, step: int, timeout: float) -> Version:
        """Load a step, without changing the other explorers."""
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self._cancel):
            self._restore()
            serves = self._pipeline.serves_of_files
            left = max(0.0, deadline - time.monotonic())
            held = self._sync.hold_step(step, serves=serves, timeout=left, cancel=self._cancel)
            if held is not serves:
                self._pipeline.take_step(held, self._cancel)
            return self._served()

    # -- waiting ----------------------------------------------------------------------

    def _wait(
        self, timeout: float | None, *, asks: bool, cancel: Cancellation
    ) -> Version | Offer | None:
        floor = self._pipeline.floor
        if self._fast_path is None or timeout == 0:
            return self._sync.wait_for_newer(
                floor, asks=asks, timeout=timeout, cancel=cancel, look=self._look
            )
        return self._sync.wait_for_weights(
            floor,
            joins=self._joins,
            ends_with_trainer=False,
            timeout=timeout,
            cancel=cancel,
            look=self._look,
        )

    def _wait_until_told(self, timeout: float) -> Version | Offer | None:
        """Wait for newer weights; return None if the trainer has none, or has stopped."""
        floor = self._pipeline.floor
        if self._fast_path is None:
            newest = self._sync.wait_new_model_state_dict(
                floor, timeout=timeout, cancel=self._cancel
            )
            return None if newest == floor else newest
        return self._sync.wait_for_weights(
            floor,
            joins=self._joins,
            ends_with_trainer=True,
            timeout=timeout,
            cancel=self._cancel,
        )

    @contextmanager
    def _with_refusal(self) -> Iterator[None]:
        try:
            yield
        except WaitTimeoutError as error:
            refused = self._pipeline.refused
            if refused is None:
                raise
            raise WaitTimeoutError(f"{error}; {self._sync.name} refused {refused}") from None

    def _joins(self) -> bool:
        return self._pipeline.joins

    def _take(self, newest: Version | Offer, cancel: Cancellation) -> bool:
        """Load a version or receive a broadcast; return True if the weights changed."""
        if isinstance(newest, Version):
            return self._pipeline.take(newest, cancel)
        assert self._fast_path is not None  # noqa: S101 - nobody else joins
        try:
            self._pipeline.receive(self._fast_path.meet(cancel))
        except BroadcastError as error:
            log.warning("step %d was not received by broadcast: %s", newest.step, error)
            return False
        return True

    def _served(self) -> Version:
        version = self._pipeline.version
        assert version is not None  # noqa: S101 - it was just taken
        return version

    @contextmanager
    def _turn(self, deadline: float, cancel: Cancellation) -> Iterator[None]:
        while not self.lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), self._poll))):
            self._check(cancel)
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"another thread of {self._sync.name} was pulling until the timeout"
                )
        try:
            self._check(cancel)
            yield
        finally:
            self.lock.release()

    def _restore(self) -> None:
        """Load the previous version of a broken engine again, for example of a restarted server.

        If that fails, the caller can load a newer published version; without one, raise
        EngineBrokenError.
        """
        if not self._pipeline.is_broken:
            try:
                self._pipeline.check_engine()
            except EngineBrokenError as error:
                log.warning("%s", error)
        try:
            self._pipeline.restore()
        except EngineBrokenError as error:
            # Its previous version may be deleted.
            newest, floor = self._sync.get_latest_model_version(), self._pipeline.floor
            if newest is None or (floor is not None and newest.sequence <= floor.sequence):
                raise
            log.warning("%s; loading version %d instead", error, newest.sequence)

    def _check(self, cancel: Cancellation) -> None:
        self._cancel.check()
        cancel.check()

    def _look(self) -> None:
        self._pipeline.restore()
        self._pipeline.check_engine()

    def _give_back(self) -> None:
        try:
            self._pipeline.restore()
        except EngineBrokenError as error:
            log.warning("%s", error)

    def _look_again(self, error: Exception, deadline: float, cancel: Cancellation) -> None:
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(str(error)) from error
        log.info("%s; checking again for a newer version", error)
        cancel.pause(self._poll)
