"""What grows with a job grows with it, and no faster: counted, and not timed."""

import os
from typing import Any

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import decide
from syncd.daemon.observation import LeaseSeen, Observation, Pointer, PointerState
from syncd.storage.job import Job
from syncd.storage.leases import Lease
from syncd.storage.sessions import new_session_id
from tests.explorers import LONG
from tests.jobs import LEASE_TIME, SmallJob
from tests.storages import Clock, RuledStorage


class Compared(int):
    """A number that counts how often it is compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return int(self) == other

    __hash__ = int.__hash__


def comparisons(versions: int) -> int:
    sequences = tuple(Compared(sequence) for sequence in range(1, versions + 1))
    folders = tuple(Compared(sequence) for sequence in range(1, versions + 1))
    leases = tuple(LeaseSeen(sequence, f"e.{sequence}", None) for sequence in sequences)
    seen = Observation(
        pointer=Pointer(PointerState.MISSING),
        latest=versions,
        versions=sequences,
        lease_folders=folders,
        leases=leases,
    )
    Compared.times = 0
    decide(seen, DaemonConfig(keep=versions))
    return Compared.times


@pytest.mark.slow
def test_deciding_about_versions_takes_as_many_comparisons_as_there_are_versions() -> None:
    assert comparisons(4000) < 4.5 * comparisons(1000)


def rounds(storage: RuledStorage, loop: Any, clock: Clock, count: int) -> int:
    """The calls of a round, on average over as many seconds."""
    storage.calls.clear()
    for _ in range(count):
        clock.advance(1.0)
        loop.run_once()
    return len(storage.calls) // count


@pytest.mark.slow
@pytest.mark.parametrize("what", ["explorers", "versions"])
def test_a_round_takes_as_many_calls_as_there_are(what: str, tmp_path: Any) -> None:
    taken = []
    for count in (20, 80):
        storage, clock = RuledStorage(), Clock()
        job = SmallJob(tmp_path / f"{what}-{count}", storage)
        with job.daemon(DaemonConfig(keep=count), clock=clock) as loop:
            loop.publish(1)
            if what == "versions":
                loop.publish(*range(2, count + 1))
            else:
                for number in range(count):
                    session = new_session_id()
                    job.session(session).write_bytes(b"")
                    Lease.take(Job(storage, job.layout), 1, f"e{number}", session)
            loop.run_once()
            taken.append(rounds(storage, loop, clock, int(LEASE_TIME)))
    few, many = taken
    assert many < 4.2 * few


def test_a_round_opens_each_heartbeat_once(tmp_path: Any) -> None:
    storage = RuledStorage()
    job = SmallJob(tmp_path / "job", storage)
    job.save(1)
    with job.daemon() as loop:
        loop.run_once()
        with ExplorerHook(job.root, "explorer", FakeEngine(), poll=0.02) as hook:
            hook.pull(LONG)
            for _ in range(3):
                storage.calls.clear()
                loop.run_once()
    opened = [given[0].parent for method, given in storage.calls if method == "open_read"]
    assert opened.count(job.layout.sessions) == 1


@pytest.mark.slow
def test_a_late_version_costs_what_an_early_one_did(tmp_path: Any) -> None:
    storage, clock = RuledStorage(), Clock()
    job = SmallJob(tmp_path / "job", storage)
    taken: list[int] = []
    session = new_session_id()
    job.session(session).write_bytes(b"")
    with job.daemon(clock=clock) as loop:
        for step in range(1, 121):
            job.save(step)
            storage.calls.clear()
            loop.rounds(3, 1.0)
            os.utime(job.session(session))
            taken.append(len(storage.calls))
    early, late = sum(taken[20:50]), sum(taken[90:])
    assert late < 1.1 * early
    assert len(job.versions) == 2
    assert len(job.outcomes) <= 2
