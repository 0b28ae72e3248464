"""Hundreds of heartbeats are judged as one would be, and no tick pays for all of them."""

import random
from itertools import pairwise

import pytest

from syncd.storage.judge import Judge, Liveness, Lookout
from tests.jobs import LEASE_TIME, SmallJob
from tests.storages import Clock, FastStorage, RuledStorage

TICK = 1.0


def heartbeats(job: SmallJob, count: int) -> list[str]:
    names = [f"s-{number}" for number in range(count)]
    for name in names:
        job.session(name).write_text("beats")
    return names


def lookout(job: SmallJob, storage: FastStorage, clock: Clock, *, tick: float = TICK) -> Lookout:
    return Lookout(Judge(storage, LEASE_TIME, clock=clock), job.layout, tick=tick, clock=clock)


def test_each_tick_looks_at_its_share_and_every_heartbeat_has_its_turn(
    job: SmallJob, clock: Clock
) -> None:
    storage = RuledStorage()
    names = heartbeats(job, 400)
    watching = lookout(job, storage, clock)
    watching.look(names)
    assert storage.count("open_read", job.layout.sessions) == 400  # seen for the first time
    looked = {name: [clock.now] for name in names}
    for _ in range(60):
        clock.advance(TICK)
        storage.calls.clear()
        watching.look(names)
        opened = [given[0].stem for method, given in storage.calls if method == "open_read"]
        assert 40 <= len(opened) <= 60
        for name in opened:
            looked[name].append(clock.now)
    assert max([b - a for times in looked.values() for a, b in pairwise(times)]) <= LEASE_TIME / 3


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 16, 17, 300])
def test_the_dead_are_found_in_little_more_than_a_lease_and_the_living_never(
    job: SmallJob, clock: Clock, count: int
) -> None:
    names = heartbeats(job, count)
    watching = lookout(job, FastStorage(), clock)
    drawn = random.Random(count)
    dead = set(drawn.sample(names, (count + 1) // 2))
    found: dict[str, float] = {}
    begun = clock.now
    for number in range(70):
        if number % 8 == 0:
            for name in set(names) - dead:
                job.session(name).write_text(str(number))
        said = watching.look(names)
        for name in names:
            if said[name] is Liveness.DEAD:
                found.setdefault(name, clock.now - begun)
        clock.advance(drawn.uniform(0.5, 1.5) * TICK)
    assert found.keys() == dead
    assert min(found.values()) >= LEASE_TIME
    assert max(found.values()) <= LEASE_TIME * 4 / 3 + 3 * TICK


def test_who_comes_is_looked_at_at_once_and_who_leaves_is_forgotten(
    job: SmallJob, clock: Clock
) -> None:
    names = heartbeats(job, 40)
    missing = "missing"
    watching = lookout(job, FastStorage(), clock)
    assert watching.look([*names, missing])[missing] is Liveness.MISSING
    assert watching.look(names[:20]).keys() == set(names[:20])
    assert watching.look(names).keys() == set(names)
    assert watching.look([]) == {}


def test_a_tick_as_long_as_a_turn_looks_at_all_each_time(job: SmallJob, clock: Clock) -> None:
    storage = RuledStorage()
    names = heartbeats(job, 100)
    watching = lookout(job, storage, clock, tick=LEASE_TIME / 4)
    for _ in range(3):
        storage.calls.clear()
        watching.look(names)
        assert storage.count("open_read", job.layout.sessions) == 100
        clock.advance(LEASE_TIME / 4)


def test_after_a_long_merge_the_pause_counts_for_nobody(job: SmallJob, clock: Clock) -> None:
    names = heartbeats(job, 100)
    watching = lookout(job, FastStorage(), clock)
    watching.look(names)
    clock.advance(600)
    assert set(watching.look(names).values()) == {Liveness.ALIVE}
    for _ in range(20):
        clock.advance(TICK)
        assert set(watching.look(names).values()) == {Liveness.ALIVE}
