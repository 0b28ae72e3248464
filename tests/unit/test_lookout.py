"""Hundreds of heartbeats are judged as one would be, and no tick pays for all of them."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from syncd.storage.leases import Judge, Liveness
from syncd.storage.lookout import Lookout
from tests.jobs import LEASE_TIME, Job
from tests.storages import Clock, FastStorage, RuledStorage

TICK = 1.0


def heartbeats(job: Job, count: int) -> list[Path]:
    paths = [job.layout.session(f"s-{number}") for number in range(count)]
    for path in paths:
        path.write_text("beats")
    return paths


def lookout(storage: FastStorage, clock: Clock, *, tick: float = TICK) -> Lookout:
    judge = Judge(storage, LEASE_TIME, clock=clock)
    return Lookout(judge, LEASE_TIME, tick=tick, clock=clock)


def test_each_tick_looks_at_its_share_and_every_heartbeat_has_its_turn(
    job: Job, clock: Clock
) -> None:
    storage = RuledStorage()
    paths = heartbeats(job, 400)
    watching = lookout(storage, clock)
    watching.look(paths)
    assert storage.count("open_read", job.layout.sessions) == 400  # seen for the first time
    looked: dict[Path, list[float]] = {path: [clock.now] for path in paths}
    for _ in range(60):
        clock.advance(TICK)
        storage.calls.clear()
        watching.look(paths)
        opened = [given[0] for method, given in storage.calls if method == "open_read"]
        assert 40 <= len(opened) <= 60
        for path in opened:
            looked[path].append(clock.now)
    gaps = [b - a for times in looked.values() for a, b in pairwise(times)]
    assert max(gaps) <= LEASE_TIME / 3


@pytest.mark.parametrize("count", [1, 16, 17, 300])
def test_the_dead_are_found_in_little_more_than_a_lease_and_the_living_never(
    job: Job, clock: Clock, count: int
) -> None:
    paths = heartbeats(job, count)
    watching = lookout(FastStorage(), clock)
    drawn = random.Random(count)
    dead = set(drawn.sample(paths, (count + 1) // 2))
    found: dict[Path, float] = {}
    begun = clock.now
    for number in range(70):
        if number % 8 == 0:
            for path in set(paths) - dead:
                path.write_text(str(number))
        said = watching.look(paths)
        for path in paths:
            if said[path] is Liveness.DEAD:
                found.setdefault(path, clock.now - begun)
        clock.advance(drawn.uniform(0.5, 1.5) * TICK)
    assert found.keys() == dead
    assert min(found.values()) >= LEASE_TIME
    assert max(found.values()) <= LEASE_TIME * 4 / 3 + 3 * TICK


def test_who_comes_is_looked_at_at_once_and_who_leaves_is_forgotten(job: Job, clock: Clock) -> None:
    paths = heartbeats(job, 40)
    missing = job.layout.session("missing")
    watching = lookout(FastStorage(), clock)
    assert watching.look([*paths, missing])[missing] is Liveness.MISSING
    assert watching.look(paths[:20]).keys() == set(paths[:20])
    assert watching.look(paths).keys() == set(paths)
    assert watching.look([]) == {}


def test_a_tick_as_long_as_a_turn_looks_at_all_each_time(job: Job, clock: Clock) -> None:
    storage = RuledStorage()
    paths = heartbeats(job, 100)
    watching = lookout(storage, clock, tick=LEASE_TIME / 4)
    for _ in range(3):
        storage.calls.clear()
        watching.look(paths)
        assert storage.count("open_read", job.layout.sessions) == 100
        clock.advance(LEASE_TIME / 4)


def test_after_a_long_merge_the_pause_counts_for_nobody(job: Job, clock: Clock) -> None:
    paths = heartbeats(job, 100)
    watching = lookout(FastStorage(), clock)
    watching.look(paths)
    clock.advance(600)
    assert set(watching.look(paths).values()) == {Liveness.ALIVE}
    for _ in range(20):
        clock.advance(TICK)
        assert set(watching.look(paths).values()) == {Liveness.ALIVE}
