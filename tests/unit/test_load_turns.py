"""Loads take turns: who waits, who begins, and what that costs."""

import math
import os
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, suppress
from typing import Any, cast
from unittest.mock import patch

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.coordination import ExplorerSynchronizer
from syncd.coordination.load_turns import LoadTurns
from syncd.coordination.member import Doubles
from syncd.coordination.participant import HeldName
from syncd.daemon.config import DaemonConfig
from syncd.operate.job_state import look
from syncd.operate.models import ExplorerState
from syncd.protocol.errors import WaitTimeoutError
from syncd.protocol.mirrored import Mirroring
from syncd.protocol.names import parse_load_turn
from syncd.protocol.reports import ExplorerReport
from tests.engines.waiting import wait_for
from tests.explorers import LONG, report
from tests.jobs import LEASE_TIME, SmallJob
from tests.storages import CHANGES, Clock, RuledStorage, fail, once
from tests.unit.test_claims import Heartbeat

pytestmark = pytest.mark.lagging

Waiting = Callable[..., ExplorerSynchronizer]


def publish(job: SmallJob, step: int, most: int | None) -> None:
    """Save and publish a step, by a daemon with this limit."""
    with job.daemon(DaemonConfig(max_loading=most)) as loop:
        loop.publish(step)
    job.hosts.settle()


def taken(job: SmallJob) -> list[int]:
    """The turns that somebody has."""
    return [n for name in os.listdir(job.layout.claims) if (n := parse_load_turn(name)) is not None]


def seen(job: SmallJob, name: str = "explorer") -> ExplorerState:
    """An explorer as all views show it, and no problem of the job but its daemon's end."""
    state = look(job)
    assert {problem.what for problem in state.health.problems} <= {"no daemon"}
    return next(one for one in state.explorers if one.name == name)


@pytest.fixture
def waiting(job: SmallJob, clock: Clock, stack: ExitStack) -> Waiting:
    """Makes an explorer, with rules. Each of its looks at turns takes an eighth of a lease time."""

    def passes(method: str, given: tuple[Any, ...]) -> None:
        if method == "names" and given[0] == job.layout.claims:
            clock.advance(LEASE_TIME / 8)

    def make(*rules: Any) -> ExplorerSynchronizer:
        doubles = Doubles(storage=job.hosts.ruled(*rules, passes), clock=clock, poll=0.001)
        made = ExplorerSynchronizer(job.root, "explorer", doubles=doubles)
        return stack.enter_context(closing(made))

    return make


def held(job: SmallJob, session: Heartbeat, number: int = 0, patience: float = 0.0) -> HeldName:
    """Another explorer's turn."""
    turn = HeldName(job, job.layout.load_turn(number), session.id, "other", patience)
    assert turn.create()
    job.hosts.settle()
    return turn


def test_a_load_without_a_limit_makes_no_call_more(job: SmallJob, engine: FakeEngine) -> None:
    storage = job.hosts.ruled()
    counts = []
    with ExplorerHook(job.root, "explorer", engine, storage=storage) as hook:
        for step in range(1, 5):
            publish(job, step, None)
            storage.calls.clear()
            with ExitStack() as stack:
                if step % 2:
                    for name in ("one", "check", "learn"):
                        stub = lambda *_: nullcontext()  # noqa: E731 - none of this code
                        stack.enter_context(patch.object(LoadTurns, name, stub))
                assert hook.pull(0) is not None
            counts.append(len(storage.calls))
            assert storage.count("open_read", job.layout.daemon_report) == 0
    assert counts[1:3] == counts[3:1:-1], counts


def test_one_waits_while_another_loads_and_loads_then(job: SmallJob, engine: FakeEngine) -> None:
    publish(job, 1, 1)
    first, storage = FakeEngine(), job.hosts.ruled()
    with (
        ExplorerHook(job.root, "first", first, poll=0.02, storage=job.explorers) as loading,
        ExplorerHook(job.root, "explorer", engine, poll=0.02, storage=storage) as hook,
        first.hanging("load") as hang,
    ):
        loading.start()
        assert hang.reached.wait(LONG)
        job.hosts.settle()
        assert hook.pull(0) is None
        assert storage.count("open_read", job.version(1)) == 0  # nothing was read in vain
        with pytest.raises(WaitTimeoutError, match="1 others load"):
            hook.pull(0.1)
        assert report(job).loading is None
        hook.start()
        wait_for(lambda: report(job).loading is False)
        assert (seen(job).status, seen(job, "first").status) == ("waiting", "loading")
        assert engine.asked("pause") == []
        assert hook.synchronizer.turns.has_one
        hang.release()
        assert hook.wait_until_served(LONG).step == loading.wait_until_served(LONG).step == 1
        assert {report(job, name).loading for name in ("first", "explorer")} == {None}
    assert taken(job) == []


def test_a_mirror_loads_nothing_and_takes_no_turn(job: SmallJob, engine: FakeEngine) -> None:
    publish(job, 1, 1)
    first = FakeEngine()
    with (
        ExplorerHook(job.root, "first", first, poll=0.02, storage=job.explorers) as loading,
        ExplorerHook(job.root, "explorer", engine, poll=0.02, storage=job.explorers) as hook,
        first.hanging("load") as hang,
    ):
        hook.synchronizer.tell_mirror(Mirroring(url="s3://b/p"), None)
        loading.start()
        assert hang.reached.wait(LONG)
        hook.start()
        assert hook.wait_until_served(LONG).step == 1
        hang.release()


def test_who_is_closed_or_fails_gives_its_turn_back(job: SmallJob, engine: FakeEngine) -> None:
    publish(job, 1, 1)
    with ExplorerHook(job.root, "explorer", engine, storage=job.explorers) as hook:
        engine.fail("load", OSError("its disk"))
        with pytest.raises(OSError, match="its disk"):
            hook.pull(0)
        assert taken(job) == []
        assert report(job).loading is None
        held(job, Heartbeat(job, "other"))
        hook.start()
        wait_for(lambda: report(job).loading is False)
    assert report(job).status == "stopped"
    assert taken(job) == [0]


def test_the_turn_of_a_dead_explorer_ends_after_a_lease_time(
    job: SmallJob, clock: Clock, waiting: Waiting
) -> None:
    publish(job, 1, 1)
    held(job, Heartbeat(job, "dead"))
    begun = clock.now
    with waiting().turns.one():
        assert LEASE_TIME <= clock.now - begun <= 2 * LEASE_TIME
        assert taken(job) == [0]


def test_who_loads_for_too_long_no_longer_counts_and_is_named(
    job: SmallJob, clock: Clock, waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    publish(job, 1, 1)
    slow = Heartbeat(job, "slow")
    turn = held(job, slow, patience=LEASE_TIME)
    told = ExplorerReport(
        name="other", session="slow", status="running", loading=True, time=clock.now
    )
    job.put_record(job.explorer("other"), told)

    def beat(method: str, _: object) -> None:
        if method == "names":
            slow.beat()

    begun = clock.now
    with waiting(beat).turns.one():
        assert 2 * LEASE_TIME <= clock.now - begun <= 3 * LEASE_TIME
        assert "explorer other (session slow) has loaded for more than 60 s" in caplog.text
        slow.path.touch()
        (other,) = (one for one in look(job).explorers if one.name == "other")
        assert other.trouble == "has loaded for too long"
        turn.release()
        assert taken(job) == [0]  # it is another's
    assert taken(job) == []


def test_who_loaded_for_too_long_is_forgiven_at_its_next_turn(
    job: SmallJob, clock: Clock, waiting: Waiting
) -> None:
    publish(job, 1, 1)
    turns = waiting().turns
    late = job.layout.late_turn(turns.me.session.id)
    late.touch()
    with turns.one():
        assert not late.exists()
        clock.advance(7.0)
    with turns.one():
        claim = (job.layout.claims / "load.0").read_text()
        assert '"patience":35.0' in claim


def test_a_limit_is_learnt_by_a_look_that_finds_nothing(job: SmallJob, waiting: Waiting) -> None:
    explorer = waiting()
    publish(job, 1, 1)
    served = explorer.wait_for_newer(None, timeout=0)
    assert explorer.turns.most == math.inf  # no version waits for the daemon's report
    with pytest.raises(WaitTimeoutError):
        explorer.wait_for_newer(served, timeout=0)
    assert explorer.turns.most == 1


@pytest.mark.parametrize("most", [2, None])
def test_who_waits_obeys_a_new_limit(job: SmallJob, waiting: Waiting, most: int | None) -> None:
    publish(job, 1, 1)
    beats = Heartbeat(job, "other")
    held(job, beats)
    changed = once("names", lambda _: publish(job, 2, most), where="claims", nth=3)
    with waiting(changed, lambda *_: beats.beat()).turns.one():
        assert sorted(taken(job)) == [0, 1]


def test_a_lowered_limit_counts_those_that_load_already(
    job: SmallJob, clock: Clock, waiting: Waiting
) -> None:
    publish(job, 1, 2)
    turns = waiting().turns
    held(job, Heartbeat(job, "second"), 1)
    publish(job, 2, 1)
    turns._learn_at = turns.deadline = clock.now
    with pytest.raises(WaitTimeoutError), turns.one():
        pass
    # It counted before the second came, and counts again.
    turns.most = 1
    counts = iter([[], [0, 1]])
    with (
        patch.object(turns, "_taken", lambda: next(counts)),
        pytest.raises(WaitTimeoutError),
        turns.one(),
    ):
        pass
    assert taken(job) == [1]


@pytest.mark.local_only("each call fails once, whatever its client believes")
@pytest.mark.parametrize("method", [*CHANGES, "open_read", "names", "status"])
def test_whatever_call_fails_the_next_turn_comes(
    job: SmallJob, waiting: Waiting, method: str
) -> None:
    publish(job, 1, 1)
    turns = waiting().turns
    storage = cast("RuledStorage", turns.job.storage)
    usual = storage.rules
    for nth in range(6):
        storage.rules = [*usual, once(method, fail, nth=nth)]
        with suppress(OSError), turns.one():
            pass
        storage.rules = usual
        assert turns.me.record.loading is None
        with turns.one():
            assert len(taken(job)) == 1
    assert taken(job) == []
