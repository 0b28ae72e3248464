"""The hooks of ``syncd follow``: for several servers of this host, and with a ready file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from explorer_hooks.bench import serve
from explorer_hooks.engines.server_engine import ServerEngine
from explorer_hooks.hook import ExplorerHook
from syncd.coordination.waiting import Cancellation
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
#: Seconds between two checks whether all threads have ended. Signal handlers run in between.
_LOOK: Final = 0.5

#: Opens a hook for one server. It must often call its argument, which raises an error to stop it.
Opens = Callable[[Callable[[], None]], AbstractContextManager[ExplorerHook]]


@dataclass
class Followers:
    """Explorers that follow one job, each with its own thread and server.

    If an explorer fails, the error is logged, and its hook is opened again after ``again`` seconds.
    The other explorers go on. All explorers end if none can be opened, because of wrong settings or
    an unavailable job, or if ``served`` raises an error.

    ``served`` is called in the explorer's thread, with the explorer's name and each served version.
    """

    opens: Mapping[str, Opens]
    served: Callable[[str, Version], object]
    again: float = _AGAIN

    def __post_init__(self) -> None:
        self._cancel = Cancellation()
        self._hooks: dict[str, ExplorerHook] = {}
        self._errors: list[Exception] = []
        self._refused: dict[str, Exception] = {}  # until the explorer could be opened

    def end(self) -> None:
        """Make :meth:`run` return soon. A signal handler may call this."""
        self._cancel.cancel()
        for hook in list(self._hooks.values()):
            hook.cancel()

    def run(self) -> None:
        """Follow until :meth:`end` is called.

        Raises:
            JobUnavailableError, InvalidSettingsError: no explorer could be opened.
            Exception: ``served`` raised this error.
        """
        threads = [
            threading.Thread(target=self._follow, args=[name], name=f"syncd-{name}")
            for name in self.opens
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK)
        if self._errors:
            raise self._errors[0]

    def _follow(self, name: str) -> None:
        while not self._cancel.is_done:
            try:
                with self.opens[name](self._cancel.check) as hook:
                    self._hooks[name] = hook
                    self._cancel.check()  # end() may have run before the hook was listed
                    self._refused.pop(name, None)
                    serve(hook, partial(self._tell, name))
            except CancelledError:
                return
            except (SyncdError, OSError) as error:
                if isinstance(error, JobUnavailableError | InvalidSettingsError):
                    self._refused[name] = error
                    if len(self._refused) == len(self.opens):
                        self._fail(error)
                        return
                log.error("%s: %s; trying again in %g s", name, error, self.again)
                self._cancel.pause(self.again)
            except Exception as error:
                self._fail(error)
                raise
            finally:
                self._hooks.pop(name, None)

    def _tell(self, name: str, version: Version) -> None:
        try:
            self.served(name, version)
        except Exception as error:
            # This is not an error of the server. For example, stdout may be closed.
            self._fail(error)
            raise CancelledError("cannot report the served versions") from error

    def _fail(self, error: Exception) -> None:
        self._errors.append(error)
        self.end()


@contextmanager
def ready_file(
    path: Path,
    opens: Callable[[], ExplorerHook],
    engine: ServerEngine,
    max_behind: int | None,
    every: float = 2.0,
) -> Iterator[ExplorerHook]:
    """Open a hook; in the block touch ``path`` every 2 s while the server is ready, or remove it.

    The server is ready if it has the hook's version, and is at most ``max_behind`` versions behind
    the newest, of the job that is at the path now. While LATEST cannot be read, the file stays as
    it is, and gets too old for the probe.

    ``engine`` is for the server of the hook's engine, and is closed at the end. It is not the
    hook's engine, because that one belongs to the hook's thread.
    """
    ended = threading.Event()
    path.unlink(missing_ok=True)  # a killed process may have left it

    with closing(engine), opens() as hook:

        def is_ready() -> bool:
            version = hook.version
            if version is None or hook.fault:
                return False
            if max_behind is not None and not hook.synchronizer.turns.has_one:
                if hook.synchronizer.is_elsewhere():
                    return False
                newest = hook.synchronizer.wait_new_model_state_dict(version, no_wait=True)
                if newest and newest.sequence > version.sequence + max_behind:
                    return False
            return engine.is_loaded()  # last, because reading LATEST can take long

        def watch() -> None:
            while not ended.wait(every):
                try:
                    if is_ready():
                        path.touch()
                    else:
                        path.unlink(missing_ok=True)
                except (OSError, SyncdError) as error:
                    log.warning("%s was neither touched nor removed: %s", path, error)

        thread = threading.Thread(target=watch, name="syncd-ready")
        thread.start()
        try:
            yield hook
        finally:
            ended.set()
            thread.join()
            path.unlink(missing_ok=True)
