"""Discovery of the jobs in a folder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class Discovery:
    """Looks for jobs, in its own thread.

    A job is a folder in the root with ``.syncd`` or the pointer in it. It must not be a link, and
    its name must not begin with a dot. If the root cannot be listed, for example because it is not
    mounted, the list of jobs does not change.

    Args:
        changed: called after the first listing, and when a job was added or removed.
        answered: called after each listing of the root, even a failed one.
    """

    root: Path
    pointer: str
    changed: Callable[[], None]
    every: float = LOOK
    answered: Callable[[], None] = lambda: None
    storage: Storage | None = None
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._storage = self.storage or Storage(self.root)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: Job → how many listings in a row lacked it; None before the first listing.
        self._missed: dict[str, int] | None = None
        self._hanging: set[str] = set()
        self._looker: object = None  # the current thread; older threads hang or have ended
        self._at: tuple[str, float] | None = None  # the folder it is looking at, and since when
        self._repeats = Repeats(clock=self.clock)

    @property
    def jobs(self) -> frozenset[str] | None:
        """The names of the jobs; None before the first listing."""
        with self._lock:
            return None if self._missed is None else frozenset(self._missed)

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
            if self._at is None or self.clock() - self._at[1] < _PATIENCE:
                return
            name, _ = self._at
            self._at = None
            self._hanging.add(name)
            self._looker = None  # when that thread no longer hangs, it sees this and ends
        RootUnavailable(self.root / name, "its storage does not answer").tell(log)
        self.start()

    def look(self, looker: object = None) -> None:
        """List the root once, and check the folders that are not known as jobs."""
        try:
            kinds = self._storage.kinds(self.root)
        except OSError as error:
            if self._repeats.due(self.root):
                RootUnavailable(self.root, error).tell(log)
            return
        finally:
            self.answered()
        self._repeats.forget(self.root)
        there = {name for name, kind in kinds.items() if kind is Kind.FOLDER and name[0] != "."}
        with self._lock:
            new = there - self._hanging - (self._missed or {}).keys()
        come = []
        for name in sorted(new):
            with self._lock:
                self._at = name, self.clock()
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
            missed = {n: 0 if n in there else times + 1 for n, times in (before or {}).items()}
            kept = {name: times for name, times in missed.items() if times < _MISSING}
            self._missed = kept | dict.fromkeys(come, 0)
            changed = before is None or before.keys() != self._missed.keys()
        if changed:
            self.changed()

    def _keep_looking(self, looker: object) -> None:
        while not self._closed.is_set() and looker is self._looker:
            self.look(looker)
            self._closed.wait(self.every)

    def _is_job(self, name: str) -> bool:
        layout = JobLayout(self.root / name)
        try:
            return any(map(self._storage.exists, (layout.state, layout.root / self.pointer)))
        except OSError as error:  # for example another user's folder
            log.debug("cannot check whether %s is a job: %s", layout.root, error)
            return False
