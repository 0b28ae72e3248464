"""Followers of several servers of one host, side by side in one process. Needs no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from explorer_hooks.bench import serve
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import (
    CancelledError,
    InvalidSettingsError,
    JobUnavailableError,
    SyncdError,
)
from syncd.protocol.policy import Version

log = logging.getLogger(__name__)
#: Seconds between two attempts to follow with a server.
_AGAIN: Final = 10.0
#: Seconds between two checks whether all have ended. A signal handler runs in between.
_LOOK: Final = 0.5

#: Opens a hook for one server. It calls its argument often; that raises to stop the opening.
Opens = Callable[[Callable[[], None]], ExplorerHook]


class Followers:
    """Explorers that follow one job, each with its own thread and server.

    An explorer that fails, because of its server, its name or the job, does not affect the others:
    the error is logged, and the explorer is opened again after ``again`` seconds, until
    :meth:`end`. If no explorer can be opened because of its settings, its name or the job, all of
    them end.

    Args:
        opens: explorer's name → the function that opens its hook.
        served: called from any thread with the name and each version that its server serves. If it
            raises, all explorers end.
        again: seconds between two attempts.
    """

    def __init__(
        self,
        opens: Mapping[str, Opens],
        served: Callable[[str, Version], object],
        *,
        again: float = _AGAIN,
    ) -> None:
        self._opens = opens
        self._served = served
        self._again = again
        self._ended = threading.Event()
        self._hooks: dict[str, ExplorerHook] = {}
        self._errors: list[Exception] = []
        self._refused: dict[str, Exception] = {}  # until the explorer could be opened

    def end(self) -> None:
        """Make :meth:`run` end soon. A signal handler of its thread may call this."""
        self._ended.set()
        for hook in list(self._hooks.values()):
            hook.cancel()

    def run(self) -> None:
        """Follow until :meth:`end`.

        Raises:
            JobUnavailableError, InvalidSettingsError: as :class:`ExplorerHook`, and for each of
                them one of the two.
            Exception: the error of ``served``.
        """
        threads = [
            threading.Thread(target=self._follow, args=[name], name=f"syncd-{name}")
            for name in self._opens
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK)
        if self._errors:
            raise self._errors[0]

    def _follow(self, name: str) -> None:
        while not self._ended.is_set():
            try:
                with self._opens[name](self._check) as hook:
                    self._hooks[name] = hook
                    self._check()  # end() may have looked before the hook was listed
                    self._refused.pop(name, None)
                    serve(hook, partial(self._tell, name))
            except CancelledError:
                return
            except (SyncdError, OSError) as error:
                if isinstance(error, JobUnavailableError | InvalidSettingsError):
                    self._refused[name] = error
                    if len(self._refused) == len(self._opens):
                        self._fail(error)
                        return
                log.error("%s: %s; trying again in %g s", name, error, self._again)
                self._ended.wait(self._again)
            except Exception as error:
                self._fail(error)
                raise
            finally:
                self._hooks.pop(name, None)

    def _tell(self, name: str, version: Version) -> None:
        try:
            self._served(name, version)
        except Exception as error:
            # Not an error of this server: stdout may be closed.
            self._fail(error)
            raise CancelledError("the versions served cannot be reported") from error

    def _fail(self, error: Exception) -> None:
        self._errors.append(error)
        self.end()

    def _check(self) -> None:
        if self._ended.is_set():
            raise CancelledError("the follower was told to end")
