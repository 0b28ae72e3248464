"""Pull newer weights, in one thread at a time: the caller's, or one in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from explorer_hooks.pipeline import Pipeline
from explorer_hooks.reload import OnRemoteError, RefusedError
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    BroadcastError,
    CancelledError,
    EngineBrokenError,
    InvalidSettingsError,
    JobUnavailableError,
    NotFollowingError,
    SyncdError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.policy import Version
from syncd.protocol.reports import Offer

log = logging.getLogger(__name__)

#: The most seconds between two tries. Short, because a restarted server has old weights meanwhile.
_LONGEST_PAUSE: Final = 4.0
#: Seconds between two checks whether an engine that did not answer is back.
_AWAY: Final = 1.5


@dataclass
class Puller:
    """Waits for newer weights, and lets the pipeline load them.

    If a version is pruned before it is leased, or is not visible yet, the wait starts again. If
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

    def newest(self, timeout: float, *, asks: bool) -> Version:
        """Wait for a newer version, even without a trainer, and load it.

        With ``asks``, the wait requests a sync.
        """
        with self._turn(timeout) as deadline:
            self.pipeline.ends_bench()
            while True:
                with self._with_refusal():
                    newest = self._wait(_left(deadline), asks=asks)
                was_broken = self.pipeline.is_broken
                try:
                    if newest is not None and self._take(newest):
                        return self._served()
                except VersionGoneError as error:
                    self._look_again(error, deadline)
                except Exception:
                    if was_broken and not self.cancel.is_done:
                        try:
                            self.pipeline.restore(self.cancel)
                        except EngineBrokenError as error:
                            log.warning("%s", error)
                    raise

    def after_step(self, timeout: float) -> None:
        """Wait for newer weights and load them, unless the trainer has none, or has stopped."""
        with self._turn(timeout) as deadline:
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
                    if newest is None or self._take(newest):
                        return
                except (VersionGoneError, JobUnavailableError) as error:
                    self._look_again(error, deadline)

    def newest_now(self) -> None:
        """Load newer weights if they are published already."""
        with suppress(WaitTimeoutError), self._turn(0):
            self._restore()
            self.newest(0, asks=False)

    def step(self, step: int, timeout: float) -> Version:
        """Let the daemon publish a step, and load it."""
        with self._turn(timeout) as deadline:
            self._restore()
            while True:
                version = self.sync.set_model_state_dict_with_step_num(
                    step, timeout=_left(deadline), cancel=self.cancel
                )
                try:
                    served = self.pipeline.version
                    if version is not None and not (served and version.is_same(served)):
                        self.pipeline.take(version, self.cancel, exactly=True)
                    return self._served()
                except VersionGoneError as error:
                    self._look_again(error, deadline)

    def step_alone(self, step: int, timeout: float) -> Version:
        """Load a step, without changing the other explorers."""
        with self._turn(timeout) as deadline:
            self._restore()
            serves = self.pipeline.serves_of_files
            held = self.sync.hold_step(
                step, serves=serves, timeout=_left(deadline), cancel=self.cancel
            )
            if held is not serves:
                self.pipeline.load(held, self.cancel, benches=True)
            return self._served()

    def _wait(self, timeout: float, *, asks: bool) -> Version | Offer | None:
        floor = self.pipeline.floor
        if self.pipeline.fast_path is None or timeout == 0:
            return self.sync.wait_for_newer(
                floor, asks=asks, timeout=timeout, cancel=self.cancel, look=self._look
            )
        return self.sync.wait_for_weights(
            floor,
            joins=self.pipeline.joins,
            ends_with_trainer=False,
            timeout=timeout,
            cancel=self.cancel,
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

    def _take(self, newest: Version | Offer) -> bool:
        """Load a version or receive a broadcast; return True if the weights changed."""
        if isinstance(newest, Version):
            self.sync.turns.check()
            return self.pipeline.take(newest, self.cancel)
        assert self.pipeline.fast_path is not None  # noqa: S101 - nobody else joins
        try:
            self.pipeline.receive(*self.pipeline.fast_path.meet(self.cancel))
        except BroadcastError as error:
            log.warning("step %d was not received by broadcast: %s", newest.step, error)
            return False
        return True

    def _served(self) -> Version:
        version = self.pipeline.version
        assert version is not None  # noqa: S101 - it was just taken
        return version

    @contextmanager
    def _turn(self, timeout: float) -> Iterator[float]:
        """Wait for the other threads; yield the deadline."""
        deadline = time.monotonic() + timeout
        while not self.lock.acquire(timeout=min(_left(deadline), self.poll)):
            self.cancel.check()
            if not _left(deadline):
                raise WaitTimeoutError(
                    f"another thread of {self.sync.name} was pulling until the timeout"
                )
        try:
            self.cancel.check()
            self.sync.turns.deadline = deadline
            yield deadline
        finally:
            self.lock.release()

    def _restore(self) -> None:
        """Load the previous version of a broken engine again, for example of a restarted server.

        If that fails, the caller can load a newer published version; without one, raise
        EngineBrokenError.
        """
        self.sync.is_elsewhere()  # then any version is newer
        if not self.pipeline.is_broken:
            try:
                self.pipeline.check_engine()
            except EngineBrokenError as error:
                log.warning("%s", error)
        try:
            self.pipeline.restore(self.cancel)
        except EngineBrokenError as error:
            # Its previous version may be deleted.
            newest, floor = self.sync.get_latest_model_version(), self.pipeline.floor
            if newest is None or (floor is not None and newest.sequence <= floor.sequence):
                raise
            log.warning("%s; loading v%d instead", error, newest.sequence)

    def _look(self) -> None:
        self.pipeline.restore(self.cancel)
        self.pipeline.check_engine()

    def _look_again(self, error: Exception, deadline: float) -> None:
        if not _left(deadline):
            raise WaitTimeoutError(str(error)) from error
        log.info("%s; checking again for a newer version", error)
        self.cancel.pause(self.poll)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


@dataclass
class Follower:
    """Runs at most one thread that follows the job.

    After a refused version, the next pull waits for a newer version. After an error of storage or
    ``on_remote``, an unavailable job or a broken engine, the thread pauses and pulls again: first
    after ``poll`` seconds, then after twice the last pause, up to 4 s. If ``is_away`` says that the
    engine does not answer at all, the thread waits until it does, because a pull could read a whole
    version for nothing. Any other error ends the thread.
    """

    name: str
    serving: Pipeline
    poll: float
    is_away: Callable[[], bool]
    _cancel: Cancellation = field(default_factory=Cancellation)
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    @property
    def is_on(self) -> bool:
        """True from :meth:`start` until the thread is stopped or its death is reported."""
        return self._thread is not None

    def start(self, pull: Callable[[Cancellation], object]) -> None:
        """Start the thread; do nothing if it runs already.

        ``pull`` must end when its Cancellation is cancelled.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._error = None
        self._cancel = cancel = Cancellation()
        self.serving.follows()
        # A daemon thread, so that storage that never answers does not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(pull, cancel), name="syncd-follower", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        """Ask the thread to end. Any thread or signal handler may call this."""
        self._cancel.cancel()

    def stop(self) -> None:
        """End the thread, and wait until it has ended."""
        self.cancel()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._error = None

    def check(self) -> None:
        """Raise NotFollowingError, once, if the thread has died."""
        error = self._error
        if error is None:
            return
        self.stop()  # otherwise this death could be reported after a new thread has begun
        raise NotFollowingError(
            f"the background thread of {self.name} has ended: {error!r}. The engine still serves "
            f"{self.serving.version or 'its initial weights'}. Call start() or pull()"
        ) from error

    def check_off(self) -> None:
        """Raise InvalidSettingsError if the thread runs, because another pull would wait for it."""
        self.check()
        if self.is_on:
            raise InvalidSettingsError(
                f"a background thread of {self.name} already follows the job. Read hook.version, "
                "or call hook.wait_until_served(). To call pull() yourself, call stop() first"
            )

    def wait_until_served(
        self, timeout: float | None, newer_than: Version | None, cancel: Cancellation
    ) -> Version:
        """See :meth:`~explorer_hooks.hook.ExplorerHook.wait_until_served`."""

        def ends(served: Version | None) -> bool:
            is_off = not self.is_on or self._error is not None
            return self.serving.is_newer(served, newer_than) or is_off or cancel.is_done

        found = self.serving.wait(ends, timeout)
        self.check()
        cancel.check()
        if found is None or not self.serving.is_newer(found, newer_than):
            newer = f" newer than {newer_than}" if newer_than else ""
            if not self.is_on:
                raise InvalidSettingsError(
                    f"{self.name} serves no version{newer}, and no thread follows the job in the "
                    "background. Call start() or pull() first"
                )
            why = "run 'syncd status' to see what the daemon is waiting for"
            if (refused := self.serving.refused) is not None:
                why = f"it refused {refused}"
            why = self.serving.fault or why
            raise WaitTimeoutError(
                f"{self.name} served no version{newer} within {timeout:g} s: {why}"
            )
        return found

    def _run(self, pull: Callable[[Cancellation], object], cancel: Cancellation) -> None:
        try:
            self._follow(pull, cancel)
        except BaseException as error:  # check() raises it in the caller's thread
            log.error(
                "the background thread of %s died, so this explorer does not follow the job any "
                "more. To continue, call start() or pull()",
                self.name,
                exc_info=not isinstance(error, SyncdError),
            )
            if self._thread is not threading.current_thread():
                return  # its own callback stopped it; another thread may follow by now
            self._error = error
            self.serving.abandon(
                "the background thread died, so this explorer does not follow the job any more: "
                f"{error!r}"
            )

    def _follow(self, pull: Callable[[Cancellation], object], cancel: Cancellation) -> None:
        first = seconds = min(self.poll, _LONGEST_PAUSE)
        while not cancel.is_done:
            try:
                pull(cancel)
            except CancelledError:
                return
            except (RefusedError, WaitTimeoutError):
                seconds = first
            except (OSError, OnRemoteError, JobUnavailableError, EngineBrokenError) as error:
                log.warning("cannot load a version. Trying again in %.3g s: %s", seconds, error)
                if not cancel.pause(seconds) and self.is_away():
                    log.warning("the engine does not answer; waiting until it does")
                    while not cancel.pause(_AWAY) and self.is_away():
                        pass
                seconds = min(2 * seconds, _LONGEST_PAUSE)
            else:
                seconds = first
