"""Following a job without being asked: pull, and pull again, until told to stop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from explorer_hooks.reload import RefusedError
from syncd.protocol.errors import (
    CancelledError,
    EngineBrokenError,
    JobUnavailableError,
    WaitTimeoutError,
)

log = logging.getLogger(__name__)

#: Seconds between two tries, at most, while storage or the engine refuses.
_LONGEST_PAUSE: Final = 30.0


def follow(pull: Callable[[], object], *, pause: Callable[[float], bool], poll: float) -> None:
    """Pull until cancelled.

    A version that was refused ends nothing: the next pull waits for a newer one. Nor does what may
    well work the next time: storage that fails, a job that is away, an engine that is broken.

    Args:
        pull: waits for a newer version, and takes it.
        pause: waits for seconds; whether it was cancelled meanwhile.
        poll: seconds until the first new try; they double with each one that fails.

    Raises:
        Exception: anything else that a pull raises.
    """
    seconds = poll
    while True:
        try:
            pull()
        except CancelledError:
            return
        except (RefusedError, WaitTimeoutError):
            seconds = poll
        except (OSError, JobUnavailableError, EngineBrokenError) as error:
            log.warning("trying again in %.3g s: %s", seconds, error)
            if pause(seconds):
                return
            seconds = min(2 * seconds, _LONGEST_PAUSE)
        else:
            seconds = poll


class Follower:
    """A thread that follows, and whose death is noticed.

    Args:
        work: what it does, until cancelled.
        died: called in the thread where the work ended with an error.
    """

    def __init__(
        self, work: Callable[[], None], *, died: Callable[[BaseException], object]
    ) -> None:
        self._work = work
        self._died = died
        self.error: BaseException | None = None
        # A daemon thread: storage that never answers must not keep a process from its end.
        self._thread = threading.Thread(target=self._run, name="syncd-follower", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it is at work."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end; who has cancelled its work."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised by the thread that calls next
            log.error("nothing follows the job any more", exc_info=True)
            self.error = error
            self._died(error)
