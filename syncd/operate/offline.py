"""Pruning without a running daemon, and a dry run of pruning."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from syncd.checkpoint.version import read_manifest
from syncd.daemon.arrival import Arrival
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import Learn, Pruning, Skip, decide
from syncd.daemon.loop import Loop
from syncd.daemon.observation import Known
from syncd.daemon.scan import Scanner
from syncd.daemon.steering import Steering
from syncd.daemon.tenure import Tenure
from syncd.protocol.errors import JobUnavailableError, RecordError, SupersededError
from syncd.protocol.events import Watching
from syncd.protocol.records import Latest, SaveOutcome, SaveOutcomes, parse
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import LONG_RECORD_LIMIT
from syncd.storage.job import Job
from syncd.storage.judge import LOOKS_PER_LEASE, Judge
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import DAEMON_SESSION, DaemonLock, Session

log = logging.getLogger(__name__)

#: The most seconds between two looks at the heartbeat of a lock that is held.
_LOOK: Final = 0.5


def would_prune(job: Job, config: DaemonConfig) -> list[Pruning]:
    """The deletions that a daemon would carry out now. Nothing is changed.

    Raises:
        JobUnavailableError: syncd has served no job here.
    """
    lease_time = job.lease_time()
    known = _known(job)
    outcomes = dict(known.outcomes)
    scanner = Scanner(job, config.pointer, Judge(job.storage, lease_time))
    found: dict[Pruning, None] = {}
    tip = known.tip.save_id if known.tip else None
    arrival, served = Arrival(lease_time, time.monotonic), frozenset({known.published_save, tip})
    # A daemon first records skipped saves, and may then delete them.
    while True:
        seen = scanner.scan(replace(known, outcomes=outcomes), config)
        decision = decide(seen, config)
        arrival.look(seen, served)
        found.update(
            (one, None)
            for one in decision.actions
            if isinstance(one, Pruning) and not arrival.keeps(one)
        )
        skips = [action for action in decision.actions if isinstance(action, Skip)]
        for skip in skips:
            outcomes[skip.step] = SaveOutcome(identity=skip.identity, outcome="skipped")
        if skips:
            scanner.look_again()
        elif not scanner.has_more:
            return list(found)


def prune_now(
    job: Job,
    config: DaemonConfig,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Pruning]:
    """Take over the job as a daemon does, prune, and release it; return the deletions.

    Raises:
        JobUnavailableError: a daemon is working on this job, the job is paused, or there is no job.
    """
    try:
        return _prune(job, config, sleep)
    except OSError as error:
        # A full disk must not stop the command that makes room on it.
        if error.errno not in NO_ROOM or not Reserve(job).give_up():
            raise
    return _prune(job, config, sleep)


def _prune(job: Job, config: DaemonConfig, sleep: Callable[[float], None]) -> list[Pruning]:
    lease_time = job.lease_time()
    if Steering(job).is_paused():
        raise JobUnavailableError(
            f"{job.layout.root} is paused, so nothing can be pruned: run 'syncd resume' first"
        )
    with Session(job.layout, lease_time, prefix=DAEMON_SESSION) as session:
        lock = _take_lock(job, lease_time, sleep)
        try:
            tenure = Tenure(job, session, Epoch.take_over(job), Judge(job.storage, lease_time))
            loop = Loop(tenure, config, publishes=False)
            loop.begin()
            try:
                found: dict[Pruning, None] = {}
                while True:
                    if lock.lost:
                        root = job.layout.root
                        raise SupersededError(f"{lock.holder} has taken the lock of {root}")
                    decision = loop.run_once()
                    found.update(dict.fromkeys(loop.pruned))
                    if not loop.has_more and not any(
                        isinstance(action, Skip | Learn) for action in decision.actions
                    ):
                        return list(found)
            finally:
                loop.end()
        finally:
            lock.release()


def _take_lock(job: Job, lease_time: float, sleep: Callable[[float], None]) -> DaemonLock:
    """Take the daemon lock, even if a dead daemon of another host still holds it."""
    judge = Judge(job.storage, lease_time)
    lock = DaemonLock(job, lease_time, judge)
    waited = 0.0
    while not lock.try_acquire():
        if not waited:
            Watching(job.layout.daemon_lock, judge.lease_time).tell(log)
        # If the lock cannot be read, no heartbeat is ever seen, so the wait is limited.
        if judge.saw_beat(job.layout.daemon_lock) or waited > 2 * judge.lease_time:
            raise JobUnavailableError(
                f"{lock.holder} serves {job.layout.root}, and prunes it. Change its --keep, "
                "or stop it first"
            )
        pause = min(_LOOK, lease_time / LOOKS_PER_LEASE / 2)
        sleep(pause)
        waited += pause
    return lock


def _known(job: Job) -> Known:
    """Read a daemon's knowledge of the job from the records, which must all be readable."""
    try:
        latest = parse(Latest, job.storage.read(job.layout.latest), job.layout.latest)
        served = read_manifest(job.storage, job.layout.version(latest.sequence))
        saves = parse(
            SaveOutcomes, job.storage.read(job.layout.saves, LONG_RECORD_LIMIT), job.layout.saves
        )
    except (OSError, RecordError) as error:
        raise JobUnavailableError(
            f"nothing was published in {job.layout.root} yet: {error}"
        ) from error
    return Known(
        latest.sequence,
        served.settles,
        saves.steps,
        full_bytes=served.size,
        save_id=served.save_id,
        tip=latest.tip,
    )
