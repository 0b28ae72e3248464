"""Pruning without a running daemon, or only saying what one would prune."""

from __future__ import annotations

import time
from collections.abc import Callable

from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    Decision,
    Learn,
    Pruning,
    Skip,
    decide,
)
from syncd.daemon.loop import Loop
from syncd.daemon.scan import Known, Scanner
from syncd.daemon.steering import Steering
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import Latest, SaveOutcome, Saves, parse
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage
from syncd.storage.job import lease_time_of
from syncd.storage.judge import Judge
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import DAEMON_SESSION, DaemonLock, Session


def would_prune(
    layout: JobLayout, config: DaemonConfig, *, storage: Storage | None = None
) -> list[Pruning]:
    """What a daemon would delete now; nothing is changed.

    Raises:
        JobUnavailableError: this is no job that syncd has served.
    """
    storage = storage or Storage(layout.root)
    lease_time = lease_time_of(storage, layout)
    known = _known(storage, layout)
    outcomes = dict(known.outcomes)
    scanner = Scanner(storage, layout, config, Judge(storage, lease_time))
    found: dict[Pruning, None] = {}
    # A save that would first be put on record as skipped could go right after that.
    while True:
        decision = decide(scanner.scan(Known(known.latest, known.published_save, outcomes)), config)
        found.update(dict.fromkeys(_prunings(decision)))
        skips = [action for action in decision.actions if isinstance(action, Skip)]
        for skip in skips:
            outcomes[skip.step] = SaveOutcome(identity=skip.identity, outcome="skipped")
        if skips:
            scanner.look_again()
        elif not scanner.has_more:
            return list(found)


def prune_now(
    layout: JobLayout,
    config: DaemonConfig,
    *,
    storage: Storage | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Pruning]:
    """Take over as a daemon would, prune, and leave.

    Returns:
        What was deleted.

    Raises:
        JobUnavailableError: a daemon is working on this job, or this is none.
    """
    storage = storage or Storage(layout.root)
    try:
        return _prune(storage, layout, config, sleep)
    except OSError as error:
        # A full disk must not keep out who would make room on it.
        if error.errno not in NO_ROOM or not Reserve(storage, layout).give_up():
            raise
    return _prune(storage, layout, config, sleep)


def _prune(
    storage: Storage, layout: JobLayout, config: DaemonConfig, sleep: Callable[[float], None]
) -> list[Pruning]:
    lease_time = lease_time_of(storage, layout)
    if Steering(storage, layout).is_paused():
        raise JobUnavailableError(
            f"{layout.root} is paused, and nothing is pruned meanwhile: 'syncd resume' it first"
        )
    with Session(layout, lease_time, prefix=DAEMON_SESSION) as session:
        judge = Judge(storage, lease_time)
        lock = DaemonLock(storage, layout, lease_time, judge)
        # A lock that a dead daemon of another host left is known by its silence alone.
        for _ in range(6):
            if lock.try_acquire():
                break
            sleep(lease_time / 4)
        else:
            raise JobUnavailableError(
                f"a daemon is working on {layout.root}, and prunes by itself: set its --keep, or "
                "stop it first"
            )
        try:
            loop = Loop(
                storage,
                layout,
                config,
                session,
                lock,
                Judge(storage, lease_time),
                Epoch.take_over(storage, layout),
                cancel=lambda: None,
                publishes=False,
            )
            loop.begin()
            try:
                found: dict[Pruning, None] = {}
                while True:
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


def _prunings(decision: Decision) -> list[Pruning]:
    return [action for action in decision.actions if isinstance(action, Pruning)]


def _known(storage: Storage, layout: JobLayout) -> Known:
    """The daemon's own records, as far as they can be read."""
    try:
        latest = parse(Latest, storage.read(layout.latest), layout.latest)
        published_save = read_manifest(storage, layout.version(latest.sequence)).settles
        saves = parse(Saves, storage.read(layout.saves, LONG_RECORD_LIMIT), layout.saves)
    except (OSError, RecordError) as error:
        raise JobUnavailableError(f"nothing was published in {layout.root} yet: {error}") from error
    return Known(latest.sequence, published_save, saves.steps)
