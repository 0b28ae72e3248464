"""Who is there: by heartbeats that are seen to beat, or to come and go, and never by leftovers."""

from __future__ import annotations

from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import Decision, decide
from syncd.daemon.participants import Participants
from syncd.storage.leases import DAEMON_SESSION, Session
from tests.jobs import LEASE_TIME, Job
from tests.storages import Clock, FastStorage
from tests.unit.test_decide import FOREIGN
from tests.unit.test_decide import job as observed


def watching(job: Job, clock: Clock) -> Participants:
    return Participants(FastStorage(), job.layout, LEASE_TIME, tick=1.0, clock=clock)


def after(found: Participants, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.advance(1)
        found.look()


def test_who_comes_and_goes_was_there(job: Job, clock: Clock) -> None:
    found = watching(job, clock)
    found.look()
    assert (found.alive, found.gone) == (False, False)
    with Session(job.layout, LEASE_TIME):
        found.look()
        assert (found.alive, found.gone) == (True, False)
    found.look()
    assert (found.alive, found.gone) == (False, True)


def test_who_is_killed_is_gone_after_a_lease(job: Job, clock: Clock) -> None:
    found = watching(job, clock)
    found.look()
    job.layout.session("killed").write_text("beats")
    after(found, clock, int(LEASE_TIME) - 1)
    assert not found.gone
    after(found, clock, 3)
    assert found.gone


def test_what_someone_left_long_ago_was_nobody(job: Job, clock: Clock) -> None:
    job.layout.session("left").write_text("beat once")
    found = watching(job, clock)
    after(found, clock, 200)
    assert (found.alive, found.gone) == (False, False)
    job.layout.session("left").unlink()  # collected
    found.look()
    assert not found.gone


def test_who_was_there_before_the_daemon_counts_once_it_is_seen_to_live(
    job: Job, clock: Clock
) -> None:
    path = job.layout.session("alive")
    path.write_text("beats")
    found = watching(job, clock)
    for number in range(10):
        path.write_text(f"beats {number}")
        after(found, clock, 9)
    path.unlink()
    found.look()
    assert found.gone


def test_who_was_there_before_the_daemon_and_left_soon_was_there(job: Job, clock: Clock) -> None:
    path = job.layout.session("alive")
    path.write_text("beats")
    found = watching(job, clock)
    after(found, clock, 5)
    path.unlink()
    found.look()
    assert found.gone


def test_daemons_are_no_participants(job: Job, clock: Clock) -> None:
    found = watching(job, clock)
    found.look()
    with Session(job.layout, LEASE_TIME, prefix=DAEMON_SESSION):
        found.look()
        assert not found.alive
    found.look()
    assert not found.gone


def test_what_is_still_to_be_published_is_pending(job: Job, clock: Clock) -> None:
    def pending(decision: Decision) -> bool:
        return decision.pending

    config = DaemonConfig()
    assert not pending(decide(observed(), config))
    assert pending(decide(observed(published_save="run-8-0"), config))
    assert pending(decide(observed(save=FOREIGN, save_still_for=0.0), config))
    with job.daemon(clock=clock) as loop:
        assert not loop.run_once().pending  # no pointer
        job.point(3)
        assert not loop.run_once().pending  # nothing there, and nobody to write it
        job.save(3)
        assert loop.run_once().pending
        assert not loop.run_once().pending
        job.layout.paused.write_bytes(b"{}")
        assert loop.run_once().pending
