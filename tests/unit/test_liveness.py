"""What a view believes of a heartbeat: beside clocks that differ, and in successive looks."""

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from syncd.operate.liveness import Liveness, Watch
from tests.storages import STORAGE, Clock

LEASE_TIME = 30.0


@dataclass
class Beating:
    """A process on a host whose clock is ``ahead`` of the view's; it beats at each 10 s."""

    path: Path
    clock: Clock
    ahead: float
    until: float = math.inf

    def __post_init__(self) -> None:
        self.path.touch()
        self._beaten = -math.inf
        self.beat()

    def beat(self) -> None:
        """The last beat before now."""
        at = min(self.clock.now, self.until) // 10 * 10 + self.ahead
        if at > self._beaten:  # another touch would change ctime
            os.utime(self.path, (at, at))
            self._beaten = at

    def seen_by(self, watch: Watch) -> Liveness:
        return watch.look(STORAGE, self.path, STORAGE.status(self.path), LEASE_TIME)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.beat()


def in_one_look(process: Beating) -> tuple[Liveness, float]:
    """What ``status`` says, and how long it waited."""
    clock = process.clock
    watch, begun = Watch(clock, clock, process.advance), clock.now
    watch.begin()
    process.seen_by(watch)
    watch.wait()
    return process.seen_by(watch), clock.now - begun


@given(ahead=st.floats(-300, 300), dead_for=st.floats(0, 200), now=st.floats(0, 10))
def test_clocks_that_differ_make_no_live_process_lost_and_no_dead_one_live(
    ahead: float, dead_for: float, now: float
) -> None:
    with TemporaryDirectory() as folder:
        clock = Clock()
        clock.advance(now)
        liveness, waited = in_one_look(Beating(Path(folder) / "live.lock", clock, ahead))
        assert liveness == "alive"
        assert waited <= 11
        dead = Beating(Path(folder) / "dead.lock", clock, ahead, until=clock.now - dead_for)
        is_believed = -1 <= clock.now - dead.path.stat().st_mtime <= LEASE_TIME
        liveness, waited = in_one_look(dead)
        assert liveness == ("alive" if is_believed else "lost")
        assert waited <= 20


@given(
    ahead=st.floats(-300, 300),
    paces=st.lists(st.floats(0.5, 9), min_size=30, max_size=60),
    dies=st.integers(5, 20),
)
def test_a_process_that_dies_is_lost_once_and_for_good(
    ahead: float, paces: list[float], dies: int
) -> None:
    with TemporaryDirectory() as folder:
        clock = Clock()
        process = Beating(Path(folder) / "s.lock", clock, ahead)
        watch, seen = Watch(clock, clock), []
        for number, pace in enumerate(paces):
            if number == dies:
                process.until = clock.now
            watch.begin()
            seen.append(process.seen_by(watch))
            process.advance(pace)
        assert "lost" not in seen[:dies]
        changes = [after for before, after in pairwise(seen) if after != before]
        assert changes in (["lost"], ["alive", "lost"], ["alive"], [])
        if clock.now - process.until > 2 * LEASE_TIME + max(0.0, ahead) + 10:
            assert seen[-1] == "lost"
