"""Pull newer weights, in one thread at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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


@dataclass
class Puller:
    """Waits for newer weights, and lets the pipeline load them.

    If a version is retired before it is leased, or is not visible yet, the wait starts again. If
    the engine is broken, each method first loads the engine's previous version. But :meth:`newest`
    tries a newer version before that.

    Timeouts are in seconds. Each method can raise WaitTimeoutError, CancelledError, and the errors
    of :meth:`~explorer_hooks.pipeline.Pipeline.take`.
    """

    sync: ExplorerSynchronizer
    pipeline: Pipeline
    cancel: Cancellation
    poll: float
    #: Re-entrant, because a signal handler on the same thread may call close().
    lock: threading.RLock = field(default_factory=threading.RLock)

    def newest(self, timeout: float, *, asks: bool, cancel: Cancellation) -> Version:
        """Wait for a newer version, even without a trainer, and load it.

        With ``asks``, the wait requests a sync.
        """
        deadline = time.monotonic() + timeout
        with self._turn(deadline, cancel):
            self.pipeline.ends_bench()
            while True:
                with self._with_refusal():
                    newest = self._wait(_left(deadline), asks=asks, cancel=cancel)
                was_broken = self.pipeline.is_broken
                try:
                    if newest is not None and self._take(newest, cancel):
                        return self._served()
                except VersionGoneError as error:
                    self._look_again(error, deadline, cancel)
                except Exception:
                    if was_broken and not (self.cancel.is_done or cancel.is_done):
                        try:
                            self.pipeline.restore()
                        except EngineBrokenError as error:
                            log.warning("%s", error)
                    raise

    def after_step(self, timeout: float) -> None:
        """Wait for newer weights and load them, unless the trainer has none, or has stopped."""
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self.cancel):
            self._restore()
            self.pipeline.ends_bench()
            while True:
                try:
                    with self._with_refusal():
                        newest = self.sync.wait_for_weights(
                            self.pipeline.floor,
                            joins=self.pipeline.joins,
                            ends_with_trainer=True,
                            timeout=_left(deadline),
                            cancel=self.cancel,
                        )
                    if newest is None or self._take(newest, self.cancel):
                        return
                except (VersionGoneError, JobUnavailableError) as error:
                    self._look_again(error, deadline, self.cancel)

    def what_is_there(self) -> None:
        """Load newer weights if they are published already; otherwise raise WaitTimeoutError."""
        with self._turn(time.monotonic(), self.cancel):
            self._restore()
            self.newest(0, asks=False, cancel=self.cancel)

    def step(self, step: int, timeout: float) -> Version:
        """Let the daemon publish a step, and load it."""
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self.cancel):
            self._restore()
            while True:
                version = self.sync.set_model_state_dict_with_step_num(
                    step, timeout=_left(deadline), cancel=self.cancel
                )
                try:
                    if version is not None and version != self.pipeline.version:
                        self.pipeline.take(version, self.cancel, exactly=True)
                    return self._served()
                except VersionGoneError as error:
                    self._look_again(error, deadline, self.cancel)

    def step_alone(self, step: int, timeout: float) -> Version:
        """Load a step, without changing the other explorers."""
        deadline = time.monotonic() + timeout
        with self._turn(deadline, self.cancel):
            self._restore()
            serves = self.pipeline.serves_of_files
            held = self.sync.hold_step(
                step, serves=serves, timeout=_left(deadline), cancel=self.cancel
            )
            if held is not serves:
                self.pipeline.load(held, self.cancel, benches=True)
            return self._served()

    def _wait(self, timeout: float, *, asks: bool, cancel: Cancellation) -> Version | Offer | None:
        floor = self.pipeline.floor
        if self.pipeline.fast_path is None or timeout == 0:
            return self.sync.wait_for_newer(
                floor, asks=asks, timeout=timeout, cancel=cancel, look=self._look
            )
        return self.sync.wait_for_weights(
            floor,
            joins=self.pipeline.joins,
            ends_with_trainer=False,
            timeout=timeout,
            cancel=cancel,
            look=self._look,
        )

    @contextmanager
    def _with_refusal(self) -> Iterator[None]:
        try:
            yield
        except WaitTimeoutError as error:
            refused = self.pipeline.refused
            if refused is None:
                raise
            raise WaitTimeoutError(f"{error}; {self.sync.name} refused {refused}") from None

    def _take(self, newest: Version | Offer, cancel: Cancellation) -> bool:
        """Load a version or receive a broadcast; return True if the weights changed."""
        if isinstance(newest, Version):
            return self.pipeline.take(newest, cancel)
        assert self.pipeline.fast_path is not None  # noqa: S101 - nobody else joins
        try:
            self.pipeline.receive(*self.pipeline.fast_path.meet(cancel))
        except BroadcastError as error:
            log.warning("step %d was not received by broadcast: %s", newest.step, error)
            return False
        return True

    def _served(self) -> Version:
        version = self.pipeline.version
        assert version is not None  # noqa: S101 - it was just taken
        return version

    @contextmanager
    def _turn(self, deadline: float, cancel: Cancellation) -> Iterator[None]:
        while not self.lock.acquire(timeout=min(_left(deadline), self.poll)):
            self._check(cancel)
            if not _left(deadline):
                raise WaitTimeoutError(
                    f"another thread of {self.sync.name} was pulling until the timeout"
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
        if not self.pipeline.is_broken:
            try:
                self.pipeline.check_engine()
            except EngineBrokenError as error:
                log.warning("%s", error)
        try:
            self.pipeline.restore()
        except EngineBrokenError as error:
            # Its previous version may be deleted.
            newest, floor = self.sync.get_latest_model_version(), self.pipeline.floor
            if newest is None or (floor is not None and newest.sequence <= floor.sequence):
                raise
            log.warning("%s; loading version %d instead", error, newest.sequence)

    def _check(self, cancel: Cancellation) -> None:
        self.cancel.check()
        cancel.check()

    def _look(self) -> None:
        self.pipeline.restore()
        self.pipeline.check_engine()

    def _look_again(self, error: Exception, deadline: float, cancel: Cancellation) -> None:
        if not _left(deadline):
            raise WaitTimeoutError(str(error)) from error
        log.info("%s; checking again for a newer version", error)
        cancel.pause(self.poll)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
