import errno

import pytest

from syncd.checkpoint.save import Shards
from syncd.daemon.config import DaemonConfig
from syncd.protocol.reports import TrainerReport
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


@pytest.mark.parametrize(
    ("session", "who", "said"),
    [
        ("gpu-1-4711-0123abcd", "'t' (process 4711 on host gpu-1)", ("INFO", "has ended")),
        ("s", "'t' (s)", ("WARNING", "has sent no heartbeat for a lease time: ignoring it")),
    ],
)
def test_a_normal_end_of_a_trainer_is_logged_as_one_and_by_its_name(
    job: SmallJob, caplog: pytest.LogCaptureFixture, session: str, who: str, said: tuple[str, str]
) -> None:
    job.put(job.layout.session(session), b"beats")
    report = TrainerReport(
        run_id="r", world_size=1, status="running", name="t", session=session, time=0.0
    )
    job.put_record(job.layout.trainer_report, report)
    with job.daemon() as loop, caplog.at_level("INFO", "syncd"):
        loop.rounds(20, 0)
        caplog.clear()
        if said[0] == "INFO":
            job.layout.session(session).unlink()
        loop.rounds(20, LEASE_TIME / 5)
    (record,) = (one for one in caplog.records if "trainer" in one.getMessage())
    assert (record.levelname, record.fields["session"]) == (said[0], session)
    assert record.getMessage().startswith(f"trainer {who} {said[1]}")


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
            said = [one for one in caplog.records if getattr(one, "event", "") == "work_blocked"]
            if said:
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


@pytest.mark.parametrize("name", ["LATEST", "saves.json"])
@pytest.mark.parametrize("content", [b"{x", b"", None])
def test_a_record_of_the_daemon_s_own_that_others_damage_is_written_again(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture, name: str, content: bytes | None
) -> None:
    path = job.layout.state / name
    job.save(4)
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        loop.run_once()
        assert not job.daemon_says.blocked
        before = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        for _ in range(3):
            loop.run_once()
            assert path.read_bytes() == before
        (blocked,) = job.daemon_says.blocked
        assert (blocked.reason, blocked.level) == ("record", 1)
        assert blocked.what.startswith(f"{path} was not what the daemon had written")
        assert [text for text in caplog.messages if str(path) in text] == [
            f"{blocked.what}. {blocked.remedy}"
        ]
        clock.advance(LEASE_TIME)
        loop.run_once()
        assert not job.daemon_says.blocked


def test_a_format_that_is_changed_while_a_daemon_serves_is_told_until_it_is_restored(
    job: SmallJob, clock: Clock
) -> None:
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        before = job.layout.format.read_bytes()
        job.layout.format.write_bytes(b"garbage")
        for level in (0, 1, 2):
            loop.run_once()
            (blocked,) = job.daemon_says.blocked
            assert (blocked.reason, blocked.level) == ("record", level)
            assert str(job.layout.format) in blocked.what
            clock.advance(LEASE_TIME / 2)
        assert job.layout.format.read_bytes() == b"garbage"
        job.layout.format.write_bytes(before)
        loop.run_once()
        assert not job.daemon_says.blocked


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
                loop._attempts._try_later(Shards(4, "it"), "full", OSError(errno.ENOSPC, "full"))
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
