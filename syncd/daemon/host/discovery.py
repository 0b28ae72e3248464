"""Discovery of the jobs in a folder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.protocol.events import RootUnavailable
from syncd.protocol.layout import JobLayout
from syncd.storage.calls import Kind
from syncd.storage.fsio import Storage
from syncd.storage.judge import Clock
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

#: Seconds between two listings of the root.
LOOK: Final = 2.0
#: A job counts as removed if this many listings in a row lack it, as a listing may be outdated.
_MISSING: Final = 3
#: Seconds after which a folder that does not answer is abandoned, to look into the next folder.
_PATIENCE: Final = 30.0


class Discovery:
    """Looks for jobs, in its own thread.

    A job is a folder in the root with ``.syncd`` or the pointer in it. It must not be a link, and
    its name must not begin with a dot. If the root cannot be listed, for example because it is not
    mounted, the list of jobs does not change.

    Args:
        changed: called after the first listing, and when a job was added or removed.
        answered: called after each listing of the root, even a failed one.
    """

    def __init__(
        self,
        root: Path,
        pointer: str,
        *,
        changed: Callable[[], None],
        every: float = LOOK,
        answered: Callable[[], None] = lambda: None,
        storage: Storage | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._root = root
        self._pointer = pointer
        self._changed = changed
        self._every = every
        self._answered = answered
        self._storage = storage or Storage(root)
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._missed: dict[str, int] = {}  # job → how many listings in a row lacked it
        self._hanging: set[str] = set()
        self._looker: object = None  # the current thread; older threads hang or have ended
        self._at: tuple[str, float] | None = None  # the folder it is looking at, and since when
        self._repeats = Repeats(clock=clock)
        self._has_looked = False

    @property
    def jobs(self) -> frozenset[str] | None:
        """The names of the jobs; None before the first listing."""
        with self._lock:
            return frozenset(self._missed) if self._has_looked else None

    def start(self) -> None:
        """Start the thread that looks for jobs."""
        self._looker = looker = object()
        threading.Thread(
            target=self._keep_looking, args=[looker], name="syncd-discovery", daemon=True
        ).start()

    def close(self) -> None:
        """Stop looking for jobs; does not wait for a listing that hangs."""
        self._closed.set()

    def supervise(self) -> None:
        """Abandon a folder whose storage does not answer; call this about once a second."""
        with self._lock:
            if self._at is None or self._clock() - self._at[1] < _PATIENCE:
                return
            name, _ = self._at
            self._at = None
            self._hanging.add(name)
            self._looker = None  # when that thread no longer hangs, it sees this and ends
        path = self._root / name
        RootUnavailable(path, "its storage does not answer").tell(log)
        self.start()

    def look(self, looker: object = None) -> None:
        """List the root once, and check the folders that are not known as jobs."""
        try:
            kinds = self._storage.kinds(self._root)
        except OSError as error:
            if self._repeats.due(self._root):
                RootUnavailable(self._root, error).tell(log)
            return
        finally:
            self._answered()
        self._repeats.forget(self._root)
        there = {name for name, kind in kinds.items() if kind is Kind.FOLDER and name[0] != "."}
        with self._lock:
            known = self._missed.keys() | self._hanging
        come = []
        for name in sorted(there - known):
            with self._lock:
                self._at = name, self._clock()
            is_job = self._is_job(name)
            with self._lock:
                if looker is not self._looker:  # this thread hung, and another one has taken over
                    self._hanging.discard(name)
                    return
                self._at = None
            if is_job:
                come.append(name)
        with self._lock:
            before = self._missed
            missed = {name: 0 if name in there else times + 1 for name, times in before.items()}
            now = {name: times for name, times in missed.items() if times < _MISSING}
            self._missed = now | dict.fromkeys(come, 0)
            changed = before.keys() != self._missed.keys() or not self._has_looked
            self._has_looked = True
        if changed:
            self._changed()

    def _keep_looking(self, looker: object) -> None:
        while not self._closed.is_set() and looker is self._looker:
            self.look(looker)
            self._closed.wait(self._every)

    def _is_job(self, name: str) -> bool:
        layout = JobLayout(self._root / name)
        try:
            return any(map(self._storage.exists, (layout.state, layout.root / self._pointer)))
        except OSError as error:  # for example another user's folder
            log.debug("cannot check whether %s is a job: %s", layout.root, error)
            return False
