import errno

import pytest

from syncd.daemon.config import DaemonConfig
from tests.jobs import LEASE_TIME, SmallJob
from tests.storages import Clock, RuledStorage, refuse

pytestmark = pytest.mark.lagging


def test_the_report_says_what_was_done_and_that_the_daemon_stopped(job: SmallJob) -> None:
    job.save(4)
    with job.daemon() as loop:
        assert (job.daemon_says.state, job.daemon_says.sequence) == ("watching", None)
        loop.run_once()
        told = job.daemon_says
        assert (told.sequence, told.step, told.counters.published) == (1, 4, 1)
        assert told.counters.merged_bytes > 0
    assert job.daemon_says.state == "stopped"


def test_the_report_says_what_is_waited_for(job: SmallJob) -> None:
    with job.daemon() as loop:
        loop.run_once()
        assert job.daemon_says.detail == "latest_state_dict_iteration.txt is not there"


def test_an_idle_round_writes_nothing_until_a_third_of_a_lease_is_over(
    job: SmallJob, clock: Clock
) -> None:
    storage = job.storage = job.hosts.ruled()
    job.save(4)
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        loop.run_once()
        storage.calls.clear()
        loop.run_once()
        assert storage.count("create", job.root) == 0
        clock.advance(LEASE_TIME / 3)
        loop.run_once()
        assert storage.count("create", job.root) == 1


def full_at(job: SmallJob, method: str) -> RuledStorage:
    """A save waits, and its version finds a full disk."""
    storage = job.hosts.ruled(refuse(method, errno.ENOSPC, where="building/v"))
    job.storage = storage
    job.save(4)
    return storage


def test_a_merge_that_storage_refuses_is_tried_again_ever_more_seldom(
    job: SmallJob, clock: Clock
) -> None:
    storage = full_at(job, "create")
    tried = []
    with job.daemon(clock=clock) as loop:
        for _ in range(100):
            storage.calls.clear()
            loop.run_once()
            if storage.count("create", job.layout.epochs) > 1:
                tried.append(clock.now - 1000)
            assert "No space left" in job.daemon_says.detail
            clock.advance(1)
        assert tried[:5] == [0, 1, 3, 7, 15]
        assert tried[5:] == [31, 61, 91]
        storage.rules.clear()
        clock.advance(30)
        loop.run_once()
    assert job.latest.step == 4


@pytest.mark.slow
def test_a_full_disk_is_a_warning_that_is_repeated_ever_more_seldom(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    storage = full_at(job, "create")
    warned = []
    with job.daemon(clock=clock) as loop:
        for second in range(1000):
            caplog.clear()
            loop.run_once()
            said = [one for one in caplog.records if getattr(one, "event", "") == "waiting"]
            if any(one.levelname == "WARNING" for one in said):
                assert "No space left" in said[0].getMessage()
                warned.append(second)
            clock.advance(1)
        assert warned == [0, 60, 180, 420, 900]
        storage.rules.clear()
        clock.advance(30)
        caplog.clear()
        loop.run_once()
        assert not [one for one in caplog.records if one.levelname == "WARNING"]
    assert job.latest.step == 4


@pytest.mark.parametrize("remedy", ["the next version", "a restart"])
def test_a_damaged_latest_is_one_warning_that_names_what_replaces_it(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture, remedy: str
) -> None:
    job.save(4)
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        job.layout.latest.write_bytes(b"{x")
        for _ in range(10):
            clock.advance(30)
            loop.run_once()
        [line] = [text for text in caplog.messages if "LATEST" in text]
        assert line.startswith(f"{job.layout.latest} is not a valid Latest record: ")
        assert "until the daemon publishes the next version or is restarted" in line
        if remedy == "the next version":
            loop.publish(5)
            assert job.latest.step == 5
    if remedy == "a restart":
        with job.daemon(clock=clock):
            assert job.latest.step == 4


class Days(Clock):
    def __call__(self) -> float:
        self.now += 31
        return self.now


@pytest.mark.local_only("it is about a thousand refusals, and about nothing that changes")
@pytest.mark.parametrize(
    "rounds", [3, pytest.param(1100, marks=(pytest.mark.slow, pytest.mark.deep))]
)
def test_a_disk_that_is_full_for_days_does_not_end_the_daemon(job: SmallJob, rounds: int) -> None:
    storage = full_at(job, "mkdir")
    with job.daemon(clock=Days()) as loop:
        for _ in range(rounds):
            loop.run_once()
        # A thousand more refusals, without the rounds around them, which take seconds.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop._tidying, "after", lambda _: None)
            for _ in range(1100 - rounds):
                loop._attempts._try_later("full", OSError(errno.ENOSPC, "full"))
        loop.run_once()
        assert "No space left" in job.daemon_says.detail
        storage.rules.clear()
        loop.run_once()
    assert job.latest.step == 4


def test_a_round_says_whether_step_folders_are_left(job: SmallJob) -> None:
    for step in range(70):
        job.save(step)
        (job.step(step) / ".full_checkpoint").touch()
    with job.daemon(DaemonConfig(prune_steps=False)) as loop:
        loop.run_once()
        assert loop.has_more
        loop.run_once()


def test_a_negative_pointer_is_waited_for_and_an_old_version_stays(job: SmallJob) -> None:
    job.save(4)
    with job.daemon() as loop:
        loop.run_once()
        job.point(-1)
        assert loop.run_once().waiting_for.endswith("no step yet")
    assert job.latest.step == 4
