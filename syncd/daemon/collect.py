"""Cleanup of a job: leftovers of killed processes, unfinished deletions, reserved disk space."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from syncd.daemon.prune import Pruner
from syncd.daemon.steering import Steering
from syncd.daemon.tenure import Tenure
from syncd.protocol.claims import session_of
from syncd.protocol.events import CleanupDelayed, LeftoverRemoved, ReserveShort
from syncd.protocol.names import HUGGINGFACE, LORA_ADAPTER, RECEIPTS, TEMPORARY
from syncd.storage.calls import FileKind
from syncd.storage.errnos import GONE, NO_ROOM, NOT_EMPTY, REFUSED_HERE, Ignoring, is_gone
from syncd.storage.job import Job, step_folders
from syncd.storage.judge import LOOKS_PER_LEASE, Clock, Judge, Liveness
from syncd.storage.probe_room import left_rooms
from syncd.storage.reserve import Reserve

log = logging.getLogger(__name__)

#: Seconds without a change after which a leftover is removed, but at least two lease times. A
#: process that is only paused for longer writes its file again.
_GRACE: Final = 900.0
#: Seconds between two checks that the reserve is complete.
_KEEP_ROOM_AGAIN: Final = 60.0
#: How many step folders one round looks into for new leftovers.
_STEPS_PER_ROUND: Final = 64
#: How many leftovers are watched at a time; the rest wait for the next round.
_MOST: Final = 1000
#: How many paths one call checks.
_LOOKS_AT_A_TIME: Final = 64
#: How many levels of folders below ``huggingface/`` are searched; tokenizers can have such folders.
_DEEPEST: Final = 4


@dataclass
class Tidying:
    """Cleans up a job while its daemon is active."""

    tenure: Tenure
    pruner: Pruner

    def __post_init__(self) -> None:
        job, self._clock = self.tenure.job, self.tenure.clock
        self._reserve = Reserve(job)
        self._tell = self.tenure.journal.tell
        grace = max(_GRACE, 2 * self.tenure.session.lease_time)
        self._collector = Collector(job, grace, self._clock)
        self._kept_room_at = self._clock()
        self._untidy = False

    def begin(self) -> None:
        """Finish the previous daemon's deletions; call this once, after the take-over."""
        try:
            self.pruner.sweep()
        except OSError as error:  # a failed deletion must not delay new weights
            self._tell(CleanupDelayed(error))
            self.after(error)
        self._keep_room()

    def after(self, error: Exception) -> None:
        """Schedule a cleanup after a failure; if the disk is full, free space at once."""
        self._untidy = True
        if isinstance(error, OSError):
            self.gave_up_deltas(error)
            self._reserve.relieve(error)

    def leftovers(self) -> None:
        """Schedule a cleanup of unfinished files."""
        self._untidy = True

    def gave_up_deltas(self, error: Exception) -> bool:
        """If ``error`` means a full disk, delete deltas; see :meth:`Pruner.prune_deltas`."""
        if isinstance(error, OSError) and error.errno not in NO_ROOM:
            return False
        try:
            return self.pruner.prune_deltas("the disk has no room for a version")
        except OSError as refused:
            self._tell(CleanupDelayed(refused))
            return False

    def run_once(self, leased: Iterable[str]) -> None:
        """Do a bounded part of the cleanup.

        Heartbeats of the sessions in ``leased`` stay.

        Raises:
            OSError: storage refused some work; the next call tries it again.
        """
        if self._clock() - self._kept_room_at >= _KEEP_ROOM_AGAIN:
            self._keep_room()
        self._collector.run_once(leased)
        if self._untidy:
            self.pruner.sweep()
            self._untidy = False

    def end(self) -> None:
        """Remove unfinished files, as far as storage allows."""
        try:
            self.pruner.sweep()
        except OSError as error:
            self._tell(CleanupDelayed(error))

    def _keep_room(self) -> None:
        self._kept_room_at = self._clock()
        try:
            self._reserve.fill()
        except OSError as error:
            self._tell(ReserveShort(error))


@dataclass
class Collector:
    """Removes leftovers that have not changed for ``grace`` seconds; each call does a bounded part.

    These are temporary files, heartbeats of dead sessions without a lease, reports and claims of
    sessions without a heartbeat, and answers that no requester reads. A process that was only
    paused may lose a temporary file. Then its rename of this file fails, and it writes the file
    again.
    """

    job: Job
    grace: float
    clock: Clock

    def __post_init__(self) -> None:
        self._storage, self._layout = self.job.storage, self.job.layout
        self._steering = Steering(self.job)
        # Other work may take long without a look, so this judge counts pauses.
        self._judge = Judge(self._storage, self.grace, self.clock, counts_pauses=True)
        self._at = self.clock()
        self._steps: deque[int] = deque()
        self._watched: set[Path] = set()
        self._leased: frozenset[str] = frozenset()
        self._round: Iterator[None] | None = None

    def run_once(self, leased: Iterable[str]) -> None:
        """Do the next part of a round, or begin a round if it is time.

        Heartbeats of the sessions in ``leased`` stay until the pruner has removed their leases.
        """
        self._leased = frozenset(leased)
        if self._round is None:
            # A little shorter than the longest time between two looks that the judge counts.
            period = self.grace / (LOOKS_PER_LEASE + 1)
            if self.clock() - self._at < period:
                return
            self._at = self.clock()
            self._round = self._go_round()
        if sum(1 for _ in islice(self._round, _LOOKS_AT_A_TIME)) < _LOOKS_AT_A_TIME:
            self._round = None

    def _go_round(self) -> Iterator[None]:
        """Check each leftover once; each step checks one path."""
        for path in self._found():
            if path is None:
                yield
            elif not self._is_leased(path) and len(self._watched) < _MOST:
                self._watched.add(path)
        for path in sorted(self._watched):
            found_again = self._is_participants(path) and not self._is_orphan(path)
            if found_again or self._is_leased(path):
                self._watched.discard(path)
            else:
                self._look(path)
            yield
        self._judge.forget_all_but(self._watched)

    def _is_leased(self, path: Path) -> bool:
        return path.parent == self._layout.sessions and path.stem in self._leased

    def _is_participants(self, path: Path) -> bool:
        """True for a report or a claim."""
        if path.name.startswith(TEMPORARY):
            return False
        is_report = path.parent == self._layout.explorers and path.suffix == ".json"
        return is_report or path.parent == self._layout.claims

    def _is_orphan(self, path: Path) -> bool:
        try:
            session = session_of(self._storage.read(path))
            return session is not None and not self._storage.exists(self._layout.session(session))
        except OSError as error:
            log.debug("cannot check whether %s is orphaned: %s", path, error)
            return False

    def _look(self, path: Path) -> None:
        try:
            liveness = self._judge.look(path)
            # A session may beat again at this moment, so break_dead() looks once more.
            if liveness is Liveness.DEAD and self._judge.break_dead(path):
                LeftoverRemoved(path).tell(log)
        except OSError as error:
            log.debug("cannot check or remove %s now: %s", path, error)
            liveness = Liveness.MISSING
        if liveness is Liveness.MISSING:
            self._watched.discard(path)

    def _found(self) -> Iterator[Path | None]:
        """Yield leftovers (also filelock's) and all heartbeats; None if a check finds nothing."""
        layout = self._layout
        for folder in (layout.drafts, layout.explorers, layout.requests):
            yield from self._temporaries(folder)
        yield from self._temporaries(layout.state)
        yield from self._steering.answered()
        yield from self._rooms()
        if not self._steps:
            self._steps.extend(reversed(step_folders(self.job)))
        for _ in range(min(_STEPS_PER_ROUND, len(self._steps))):
            step = self._steps.popleft()
            actor = layout.actor(step)
            for folder in (actor, actor / RECEIPTS, actor / LORA_ADAPTER):
                yield from self._temporaries(folder)
            yield from self._temporaries(actor / HUGGINGFACE, depth=_DEEPEST)
        yield from self._orphans()
        # Heartbeats come last, because thousands of live heartbeats must not displace leftovers.
        for name in self._storage.names(layout.sessions):
            yield layout.sessions / name

    def _orphans(self) -> Iterator[Path | None]:
        """Yield reports and claims of sessions without a heartbeat; None for the others."""
        # This client's cache may lack the heartbeat of a new participant.
        self._storage.refresh(self._layout.sessions)
        for folder in (self._layout.explorers, self._layout.claims):
            names: list[str] = []
            with Ignoring(REFUSED_HERE):
                names = self._storage.names(folder)
            for path in (folder / name for name in names):
                if self._is_participants(path):
                    yield path if self._is_orphan(path) else None

    def _rooms(self) -> Iterator[Path]:
        """Yield the mark files of doctor runs; remove folders without a mark file."""
        try:
            yield from left_rooms(self.job)
        except OSError as error:
            log.debug("cannot remove leftovers in %s now: %s", self._layout.doctor, error)

    def _temporaries(self, folder: Path, *, depth: int = 0) -> Iterator[Path]:
        try:
            found = self._storage.kinds(folder)
        except OSError as error:
            if not is_gone(error):
                log.debug("cannot list %s now: %s", folder, error)
            return
        for name, kind in found.items():
            if kind is FileKind.FILE and (name.startswith(TEMPORARY) or ".lock.break." in name):
                yield folder / name
            elif kind is FileKind.FOLDER and name.startswith(TEMPORARY):
                yield from self._draft(folder / name)
            elif kind is FileKind.FOLDER and depth:
                yield from self._temporaries(folder / name, depth=depth - 1)

    def _draft(self, path: Path) -> Iterator[Path]:
        """Yield the files in a temporary folder, or remove the empty folder."""
        with Ignoring(GONE | NOT_EMPTY):
            inside = self._storage.kinds(path)
            for name, kind in inside.items():
                if kind is FileKind.FOLDER:
                    yield from self._draft(path / name)
                else:
                    yield path / name
            if not inside:
                self._storage.rmdir(path)
