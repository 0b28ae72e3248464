"""Follow a job in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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

#: The most seconds between two tries. Short, because a restarted server has old weights meanwhile.
_LONGEST_PAUSE: Final = 4.0
#: Seconds between two checks whether an engine that did not answer is back.
_AWAY: Final = 1.5


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
            f"{self.serving.version or 'its initial weights'}. To continue, call start() or "
            "pull()"
        ) from error

    def check_off(self) -> None:
        """Raise InvalidSettingsError if the thread runs, because another pull would wait for it."""
        self.check()
        if self.is_on:
            raise InvalidSettingsError(
                f"a background thread of {self.name} already follows the job. To get the "
                "versions of that thread, read hook.version or call hook.wait_until_served(). To "
                "call pull() yourself, call stop() first"
            )

    def wait_until_served(
        self, timeout: float | None, newer_than: Version | None, cancel: Cancellation
    ) -> Version:
        """See :meth:`~explorer_hooks.hook.ExplorerHook.wait_until_served`."""
        found = self.serving.wait(
            lambda served: _is_other(served, newer_than) or not self._follows or cancel.is_done,
            timeout,
        )
        self.check()
        cancel.check()
        if found is None or not _is_other(found, newer_than):
            newer = f" newer than {newer_than}" if newer_than else ""
            if not self._follows:
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

    @property
    def _follows(self) -> bool:
        return self.is_on and self._error is None

    def _run(self, pull: Callable[[Cancellation], object], cancel: Cancellation) -> None:
        try:
            self._follow(pull, cancel)
        except BaseException as error:  # check() raises it in the caller's thread
            log.error(
                "the background thread of %s died, so this explorer does not follow the job any "
                "more. To continue, call start() or pull()",
                self.name,
                exc_info=True,
            )
            if self._thread is not threading.current_thread():
                return  # its own callback stopped it; another thread may follow by now
            self._error = error
            self.serving.follows_no_more(
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


def _is_other(version: Version | None, than: Version | None) -> bool:
    """True if ``version`` is newer. A broadcast changes only its step."""
    return version is not None and (
        than is None or (version != than and version.sequence >= than.sequence)
    )
