"""The published versions as one participant sees and holds them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from syncd.coordination.leased_version import Holds, LeasedVersion, read_latest
from syncd.protocol.errors import (
    InvalidSettingsError,
    SaveNotReadyError,
    VersionGoneError,
)
from syncd.protocol.names import (
    FULL_STATE_DICT,
    RECEIPTS,
    STATE_POINTER,
    parse_pointer,
    receipt_name,
    shard_name,
)
from syncd.protocol.policy import Pull, Version, pull_decision
from syncd.protocol.records import Latest, Receipt, SaveOutcome, Tip, encode
from syncd.protocol.reports import DaemonReport, TrainerReport
from syncd.storage.errnos import GONE, REFUSED_HERE, Ignoring
from syncd.storage.job import Job, ask_server, point
from syncd.storage.judge import LOOKS_PER_LEASE, Clock, Judge, Liveness
from syncd.storage.sessions import Session

log = logging.getLogger(__name__)

#: Attempts to hold the newest version, if each one is pruned before it can be held.
_ATTEMPTS: Final = 10


class Lead(NamedTuple):
    """A save that is not published yet, and LATEST, which names it as its tip."""

    job: Job
    latest: Latest
    tip: Tip


class Versions:
    """The versions of a job, or of the job's memory directory.

    The leases name the heartbeat ``session``; None makes a separate heartbeat.

    Attributes:
        alone_since: since when no daemon is live, infinite if one was live at the last look; minus
            infinity before, so that an explorer tells at the first look.
    """

    alone_since = -math.inf

    def __init__(
        self,
        job: Job,
        name: str,
        session: Session | None,
        *,
        clock: Clock,
    ) -> None:
        self.job, self._storage, self._layout = job, job.storage, job.layout
        self._name = name
        self._own: Session | None = None
        if session is None:
            self._own = session = Session(job.layout, job.open().lease_time)
        self._session = session
        self.lease_time = session.lease_time
        # A trainer that seldom saves looks seldom.
        self._judge = Judge(job.storage, session.lease_time, clock=clock, counts_pauses=True)
        self._clock = clock
        self._look_at = -math.inf
        self.holds = Holds(job, name, session.id)
        #: The newest save that this participant does not take from deltas.
        self.passed = math.inf

    def newest(
        self, known: Version | None = None, *, sure: bool = False, tip: bool = False
    ) -> Version | None:
        """LATEST's version if it is newer than ``known``; else ``known``.

        With ``sure`` the method asks the file server instead of this client's cache. With ``tip``
        the result can be the save that LATEST names as its tip, unless its number is ``passed``.
        """
        if sure:
            self._storage.refresh(self._layout.state)
        self.holds.settle()
        latest = read_latest(self.job)
        found = self._named(latest, tip=tip) if latest is not None else None
        return known if pull_decision(known, found) is Pull.NOTHING_NEW else found

    def _named(self, latest: Latest, *, tip: bool) -> Version:
        delta = latest.tip if tip else None
        if delta is not None and delta.sequence > max(latest.sequence, self.passed):
            return Version.of(delta)
        return Version.of(latest)

    def lead(self, version: Version) -> Lead | None:
        """What LATEST names as its tip, if that is this save, or a newer one, and not published."""
        latest = read_latest(self.job) if version.sequence > self.passed else None
        if latest is None or (tip := latest.tip) is None:
            return None
        is_found = latest.sequence < version.sequence <= tip.sequence
        return Lead(self.job, latest, tip) if is_found else None

    def is_latest_damaged(self) -> bool:
        """True if LATEST exists but names no version; False if storage does not answer."""
        with suppress(OSError):  # the wait that asks has ended, and has its own error
            there = self._storage.exists(self._layout.latest)
            return there and read_latest(self.job) is None
        return False

    @contextmanager
    def held(self, wanted: Version | None = None) -> Iterator[LeasedVersion | None]:
        """Hold a version, by default the newest, in the block; yield None if no version exists.

        Raises:
            VersionGoneError: the wanted version was pruned, or new versions are pruned faster
                than this method can hold them.
            VerificationError: the version's manifest is damaged.
        """
        version = self._hold_newest() if wanted is None else self.holds.hold(wanted.sequence)
        try:
            yield version
        finally:
            if version is not None:
                version.release()

    def _hold_newest(self) -> LeasedVersion | None:
        for left in reversed(range(_ATTEMPTS)):
            # After a pruned version ask the server, because this client can have cached LATEST.
            newest = self.newest(sure=left < _ATTEMPTS - 1)
            if newest is None:
                return None
            try:
                return self.holds.hold(newest.sequence)
            except VersionGoneError as error:
                if not left:
                    raise
                log.info("%s; checking again for a newer version", error)
        return None

    def serves(self, save_id: str | None) -> bool:
        """True if LATEST names this save as the newest one."""
        latest = read_latest(self.job)
        return latest is not None and (latest.tip or latest).save_id == save_id

    def follows(self, job: Job) -> bool:
        """True if the daemon publishes what :meth:`point` makes the newest save of ``job``."""
        return self.job is job and self._pointer() == self._layout.state_pointer

    def is_merging(self) -> bool:
        """True if the daemon reports a merge."""
        daemon = self.job.read(DaemonReport, self._layout.daemon_report)
        return daemon is not None and daemon.state == "merging"

    def is_refused(self, step: int) -> bool:
        """True if the daemon has refused a step's save, and the step was not saved again since."""
        outcome = self.job.outcome(step)
        return (
            outcome is not None
            and outcome.outcome == "quarantined"
            and self._is_of_now(step, outcome)
        )

    def _is_of_now(self, step: int, outcome: SaveOutcome) -> bool:
        """True unless the step folder's receipt shows that the outcome is of another save."""
        path = self._layout.actor(step) / RECEIPTS / receipt_name(0)
        with Ignoring(REFUSED_HERE):
            receipt = self.job.read(Receipt, path)
            return receipt is None or receipt.save_id == outcome.identity
        return True

    def on_its_way(self) -> int | None:
        """The pointer's step, if it is on disk but not yet published or refused; else None."""
        step = self._unanswered()
        if step is None:
            ask_server(self.job)
            step = self._unanswered()
        return step

    def _unanswered(self) -> int | None:
        step = self.pointed()
        if step is None or step < 0 or not self._storage.exists(self._layout.step(step)):
            return None
        outcome, latest = self.job.outcome(step), read_latest(self.job)
        if outcome is not None:
            # The save of a delta has the number of the version to come.
            served = self._named(latest, tip=True).sequence if latest else math.inf
            folds = (outcome.sequence or 0) > served
            return None if self._is_of_now(step, outcome) and not folds else step
        # The daemon writes LATEST first; on a full disk the outcome comes much later.
        return None if latest is not None and latest.step == step else step

    def daemon_lives(self) -> bool:
        """True if a daemon is live; a killed daemon counts as live for one lease time."""
        seen = self._judge.look(self._layout.daemon_lock)
        if seen is Liveness.MISSING:
            seen = self._judge.look_again(self._layout.daemon_lock)
        return seen is Liveness.ALIVE

    def warn_without_daemon(self, doing: str) -> None:
        """Log, once, that ``doing`` is in vain: no daemon was live for a third of a lease time."""
        now, pause = self._clock(), self.lease_time / LOOKS_PER_LEASE
        if now < self._look_at:
            return
        self._look_at = now + pause
        with suppress(OSError):  # the next look tells
            lives = self.job.is_there() and self.daemon_lives()
            self.alone_since = math.inf if lives else min(self.alone_since, now)
            if now - self.alone_since >= pause:
                self._look_at = math.inf
                log.warning("%s %s, but %s", self._name, doing, self.daemon_hint())

    def daemon_hint(self) -> str:
        """The end of an error message: why nothing was published, and the remedy."""
        return self.job.daemon_hint(self.daemon_lives, is_memory=self._own is not None)

    def check_shards(self, step: int, world_size: int) -> None:
        """Raise SaveNotReadyError unless a step has all its shards, or one full state dict."""
        actor = self._layout.actor(step)
        names = set(self._storage.names(actor))
        if FULL_STATE_DICT in names:
            return
        for rank in range(world_size):
            if shard_name(world_size, rank) not in names:
                raise SaveNotReadyError(
                    f"{actor / shard_name(world_size, rank)} does not exist yet"
                )

    def pointed(self) -> int | None:
        """The step that the daemon's pointer names; None if it names none."""
        with Ignoring(GONE):
            return parse_pointer(self._storage.read(self._pointer()))
        return None

    def check_may_point(self, step: int) -> None:
        """Raise InvalidSettingsError if the daemon does not follow :meth:`point`'s pointer."""
        pointer = self._pointer()
        if pointer != self._layout.state_pointer:
            raise InvalidSettingsError(
                f"step {step} cannot be published on request. The daemon publishes the step that "
                f"{pointer} names. syncd never changes {pointer}, because the trainer resumes from "
                "the step in it. Load the step with ExplorerHook.load_step, or start the daemon "
                "without --pointer"
            )

    def _pointer(self) -> Path:
        daemon = self.job.read(DaemonReport, self._layout.daemon_report)
        return self._layout.root / (STATE_POINTER if daemon is None else daemon.pointer)

    def point(self, step: int) -> None:
        """Write the step into the pointer."""
        point(self.job, self._layout.state_pointer, step)

    def copy_report(self, report: TrainerReport) -> None:
        """Copy ``report`` into the memory directory, if there is one."""
        if self._own is not None:
            here = report.model_copy(update={"session": self._own.id})
            path, room = self._layout.trainer_report, self._layout.drafts
            self._storage.replace(path, encode(here), room=room)

    def begin_again(self, lease_time: float, *, is_another: bool) -> None:
        """Go on in the job that is at the path now, with its lease time."""
        self.lease_time = self._judge.lease_time = lease_time
        if is_another:
            self.passed = 0 if math.isfinite(self.passed) else self.passed
            self.holds.forget()
        if self._own is not None:
            self._own.begin_again(lease_time)

    def close(self) -> None:
        """End the session, if this object made it."""
        if self._own is not None:
            self._own.close()
