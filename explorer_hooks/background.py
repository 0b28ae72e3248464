"""Following a job in the background: pull repeatedly until told to stop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from explorer_hooks.pipeline import Pipeline
from explorer_hooks.reload import OnRemoteError, RefusedError
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    CancelledError,
    EngineBrokenError,
    InvalidSettingsError,
    JobUnavailableError,
    NotFollowingError,
    WaitTimeoutError,
)
from syncd.protocol.policy import Version

log = logging.getLogger(__name__)

#: Seconds between two tries, at most, while storage or the engine refuses: a server that was
#: restarted meanwhile answers with the weights that it was started with.
_LONGEST_PAUSE: Final = 4.0
#: Seconds between two looks whether an engine that is away answers again.
_AWAY: Final = 1.5


def follow(
    pull: Callable[[], object],
    *,
    pause: Callable[[float], bool],
    poll: float,
    is_away: Callable[[], bool] = lambda: False,
) -> None:
    """Pull until cancelled.

    A version that was refused ends nothing: the next pull waits for a newer one. Nor does what may
    well work the next time: storage or ``on_remote`` that fails, a job that is away, an engine that
    is broken.

    Args:
        pull: waits for a newer version, and takes it.
        pause: waits for seconds; whether it was cancelled meanwhile.
        poll: seconds until the first new try; they double with each one that fails, up to 4.
        is_away: whether the engine does not answer at all; asked after a failure. While it is away
            no pull is tried, which could read a whole version for nothing.

    Raises:
        Exception: anything else that a pull raises.
    """
    poll = min(poll, _LONGEST_PAUSE)
    seconds = poll
    while True:
        try:
            pull()
        except CancelledError:
            return
        except (RefusedError, WaitTimeoutError):
            seconds = poll
        except (OSError, OnRemoteError, JobUnavailableError, EngineBrokenError) as error:
            log.warning("trying again in %.3g s: %s", seconds, error)
            if pause(seconds) or _await(is_away, pause):
                return
            seconds = min(2 * seconds, _LONGEST_PAUSE)
        else:
            seconds = poll


def _await(is_away: Callable[[], bool], pause: Callable[[float], bool]) -> bool:
    """Wait until the engine answers; return whether the wait was cancelled."""
    if is_away():
        log.warning("the engine does not answer; waiting until it does")
        while not pause(_AWAY):
            if not is_away():
                return False
        return True
    return False


class Follower:
    """At most one following thread; its death is reported once.

    Args:
        name: the explorer's.
        serving: what the thread's pulls change; it is told that something follows, or no more.
        poll, is_away: as of :func:`follow`.
    """

    def __init__(
        self, name: str, serving: Pipeline, poll: float, is_away: Callable[[], bool]
    ) -> None:
        self._name = name
        self._serving = serving
        self._poll = poll
        self._is_away = is_away
        self._cancel = Cancellation()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_on(self) -> bool:
        """Whether a thread follows, or has died without its death being reported yet."""
        return self._thread is not None

    def start(self, pull: Callable[[Cancellation], object]) -> None:
        """Follow in a thread of its own; does nothing if one is following.

        Args:
            pull: as of :func:`follow`; ends where it is cancelled.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        self._error = None
        self._cancel = cancel = Cancellation()
        self._serving.follows()
        work = partial(
            follow,
            partial(pull, cancel),
            pause=cancel.pause,
            poll=self._poll,
            is_away=self._is_away,
        )
        # A daemon thread: storage that never answers must not keep a process from its end.
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="syncd-follower", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        """End the following thread without waiting; from any thread, or a signal handler."""
        self._cancel.cancel()

    def stop(self) -> None:
        """End the following thread, and wait for it. Safe to call without one."""
        self.cancel()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._error = None

    def check(self) -> None:
        """Raise if the following thread has died; do nothing while it lives, or before it starts.

        Raises:
            NotFollowingError: it has died; said once.
        """
        error = self._error
        if error is None:
            return
        self.stop()  # it may be about to say that it died: not over one that is started now
        raise NotFollowingError(
            f"the background thread of {self._name} has ended, and its engine stays at "
            f"{self._serving.version or 'its initial weights'}: {error!r}; start() again, or pull"
        ) from error

    def check_off(self) -> None:
        """See that nothing follows: it would take its turn for as long as it lives.

        Raises:
            NotFollowingError: what followed has ended.
            InvalidSettingsError: something follows.
        """
        self.check()
        if self.is_on:
            raise InvalidSettingsError(
                f"{self._name} follows the job in the background: use version or "
                "wait_until_served(), or call stop() first"
            )

    def wait_until_served(
        self, timeout: float | None, newer_than: Version | None, cancel: Cancellation
    ) -> Version:
        """Wait until the engine serves a version.

        Args:
            timeout: seconds; None for as long as it takes.
            newer_than: a version that is not enough; None where any is.
            cancel: ends the wait.

        Raises:
            InvalidSettingsError: it does not, and nothing follows that could change that.
            WaitTimeoutError: it does not in time.
            NotFollowingError: what followed has ended.
            CancelledError: the wait was cancelled.
        """
        found = self._serving.wait(
            lambda served: _is_other(served, newer_than) or not self._follows or cancel.is_done,
            timeout,
        )
        self.check()
        cancel.check()
        if found is None or not _is_other(found, newer_than):
            newer = f" newer than {newer_than}" if newer_than else ""
            if not self._follows:
                raise InvalidSettingsError(
                    f"{self._name} serves nothing{newer}, and nothing follows the job in the "
                    "background: call start() first, or pull()"
                )
            why = self._serving.fault or "'syncd status' shows what the daemon is waiting for"
            raise WaitTimeoutError(
                f"{self._name} serves nothing{newer} within {timeout:g} s: {why}"
            )
        return found

    @property
    def _follows(self) -> bool:
        return self.is_on and self._error is None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised by the thread that calls next
            log.error("nothing follows the job any more", exc_info=True)
            if self._thread is not threading.current_thread():
                return  # it was stopped, by its own callback: another one may follow by now
            self._error = error
            self._serving.follows_no_more(f"nothing follows the job any more: {error!r}")


def _is_other(version: Version | None, than: Version | None) -> bool:
    """Whether a version is served that came after another one; by broadcast only steps differ."""
    return version is not None and (
        than is None or (version != than and version.sequence >= than.sequence)
    )
