import errno
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from syncd.coordination.roster import SLICES_PER_LEASE, Roster
from syncd.protocol.errors import JobUnavailableError, ProtocolMismatchError
from syncd.protocol.policy import RunningStatus
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.job import Job
from tests.jobs import LEASE_TIME, SmallJob
from tests.lagging import LaggingHosts
from tests.storages import Clock, RuledStorage, once, os_error

SLICE = LEASE_TIME / 16
Watch = Callable[..., None]


class Explorers:
    """Explorers as files, that a test lets beat."""

    def __init__(self, job: SmallJob) -> None:
        self.job = job

    def say(self, name: str, status: str = "running", **more: object) -> None:
        report = ExplorerReport.model_validate(
            {"name": name, "session": f"s-{name}", "status": status, "time": 0.0, **more}
        )
        self.job.put_record(self.job.explorer(name), report)

    def beat(self, name: str) -> None:
        path = self.job.session(f"s-{name}")
        at = path.stat().st_mtime_ns + 1 if path.exists() else 1
        path.touch()
        os.utime(path, ns=(at, at))

    def come(self, *names: str, status: str = "running") -> None:
        for name in names:
            self.beat(name)
            self.say(name, status)


def by_status(roster: Roster) -> Counter[RunningStatus]:
    return Counter(RunningStatus(report.status) for report in roster.explorers())


@pytest.fixture
def explorers(job: SmallJob) -> Explorers:
    return Explorers(job)


@pytest.fixture
def roster(job: SmallJob, storage: RuledStorage, clock: Clock) -> Roster:
    return Roster(Job(storage, job.layout), LEASE_TIME, clock=clock, background=False)


def names(roster: Roster) -> set[str]:
    return {one.name for one in roster.explorers()}


@pytest.fixture
def watch(roster: Roster, clock: Clock, explorers: Explorers) -> Watch:
    """Lets seconds pass, in which some beat."""

    def watch(seconds: float, *beating: str) -> None:
        for _ in range(round(seconds / SLICE)):
            clock.advance(SLICE)
            for name in beating:
                explorers.beat(name)
            roster.look_at_slice()

    return watch


def test_the_dead_are_not_counted_a_lease_time_later_and_the_living_are(
    roster: Roster, explorers: Explorers, watch: Watch
) -> None:
    explorers.come("a", "b", status="require_sync")
    explorers.come("c")
    counts = {RunningStatus.RUNNING: 1, RunningStatus.REQUIRE_SYNC: 2, RunningStatus.STOPPED: 0}
    assert by_status(roster) == Counter(counts)
    watch(LEASE_TIME * 0.7, "b", "c")
    assert names(roster) == {"a", "b", "c"}
    watch(LEASE_TIME * 0.8, "b", "c")
    assert names(roster) == {"b", "c"}
    explorers.beat("a")  # a pause of the host, and it goes on
    watch(LEASE_TIME / 3, "b", "c")
    assert names(roster) == {"a", "b", "c"}


def test_one_without_a_heartbeat_is_gone_at_once_unless_it_said_that_it_stopped(
    roster: Roster, explorers: Explorers, job: SmallJob
) -> None:
    explorers.come("a", "b")
    explorers.say("b", "stopped")
    for name in ("a", "b"):
        job.session(f"s-{name}").unlink()
    assert names(roster) == {"b"}
    assert by_status(roster)[RunningStatus.STOPPED] == 1


def test_hundreds_are_judged_in_slices(
    roster: Roster, explorers: Explorers, job: SmallJob, storage: RuledStorage, clock: Clock
) -> None:
    everyone = [f"e{number}" for number in range(200)]
    explorers.come(*everyone)
    assert len(roster.explorers()) == 200
    most = 0
    for _ in range(32):
        storage.calls.clear()
        clock.advance(SLICE)
        roster.look_at_slice()
        most = max(most, storage.count("open_read", job.layout.sessions))
    assert 0 < most <= 200 / 3
    assert names(roster) == set()


def test_unchanged_reports_are_not_parsed_again(
    roster: Roster, explorers: Explorers, job: SmallJob, storage: RuledStorage
) -> None:
    explorers.come("a", "b")
    for _ in range(2):
        roster.explorers()
    storage.calls.clear()
    roster.explorers()
    assert storage.count("open_read", job.layout.explorers) == 2
    assert not [name for name, _ in storage.calls if name == "pread"]
    explorers.say("a", "require_sync")
    assert by_status(roster)[RunningStatus.REQUIRE_SYNC] == 1


def test_a_newer_protocol_is_a_clear_error_and_an_older_record_is_read(
    roster: Roster, explorers: Explorers, job: SmallJob
) -> None:
    explorers.come("a")
    path = job.explorer("a")
    told = json.loads(path.read_bytes())
    job.put(path, json.dumps({**told, "protocol": 0}).encode())
    assert names(roster) == {"a"}
    old = {key: told[key] for key in ("name", "session", "status", "time")}
    job.put(path, json.dumps(old).encode())
    assert roster.explorers()[0].requests == 0
    job.put(path, json.dumps({**told, "protocol": 2, "status": "dreaming"}).encode())
    with pytest.raises(ProtocolMismatchError, match=r"explorers/a\.json is of protocol 2"):
        roster.explorers()


def test_a_newer_protocol_is_an_error_while_its_participant_lives_and_hides_nobody_after_that(
    roster: Roster, explorers: Explorers, job: SmallJob, watch: Watch
) -> None:
    explorers.come("new", "old", "t")
    told = {"protocol": 2, "session": "s-new", "status": ["dreaming"]}
    job.put(job.explorer("new"), json.dumps(told).encode())
    trainer(job, "running", "s-t")
    job.put(job.layout.trainer_report, json.dumps({**told, "session": "s-t"}).encode())
    watch(2 * LEASE_TIME, "new", "old", "t")
    for ask in (roster.explorers, roster.trainer):
        with pytest.raises(ProtocolMismatchError, match="is of protocol 2"):
            ask()
    watch(1.5 * LEASE_TIME, "old")
    assert names(roster) == {"old"}
    assert roster.trainer_status() is RunningStatus.STOPPED
    explorers.beat("new")
    watch(SLICE, "old")
    with pytest.raises(ProtocolMismatchError):
        roster.explorers()
    job.session("s-new").unlink()
    watch(LEASE_TIME / 2, "old")
    assert names(roster) == {"old"}


@pytest.mark.parametrize("session", [{}, {"session": "../x"}, {"session": 7}])
def test_a_newer_protocol_that_names_no_session_stays_an_error(
    roster: Roster, job: SmallJob, watch: Watch, session: dict[str, object]
) -> None:
    job.put(job.explorer("new"), json.dumps({"protocol": 2, **session}).encode())
    for _ in range(3):
        with pytest.raises(ProtocolMismatchError, match=r"new\.json is of protocol 2"):
            roster.explorers()
        watch(LEASE_TIME)


NO_SESSIONS = ["a\\u0000b", "../x", "", "x" * 300]
ODD = [f'{{"name":"a","session":"{one}","status":"running","time":0}}' for one in NO_SESSIONS]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"name": "a"}', *(report.encode() for report in ODD)]
)
def test_a_report_that_cannot_be_read_hides_nobody_else(
    roster: Roster, explorers: Explorers, job: SmallJob, content: bytes
) -> None:
    explorers.come("a", "b")
    job.put(job.explorer("a"), content)
    (job.layout.explorers / ".tmp-c.json-1").write_bytes(b"half")
    os.symlink("b.json", job.explorer("d"))
    job.explorer("e").mkdir()
    assert names(roster) == {"b"}


def test_storage_that_does_not_answer_is_no_death(
    roster: Roster, explorers: Explorers, storage: RuledStorage, clock: Clock
) -> None:
    explorers.come("a")
    assert names(roster) == {"a"}
    storage.refuse("open_read", errno.EIO, where="sessions")
    refused = 0
    for _ in range(3 * 16):
        clock.advance(SLICE)
        try:
            roster.look_at_slice()
        except OSError:
            refused += 1
    assert refused
    storage.rules.clear()
    assert names(roster) == {"a"}


@pytest.mark.parametrize("empty", [True, False])
def test_a_job_that_is_unmounted_has_lost_nobody(
    roster: Roster, explorers: Explorers, job: SmallJob, clock: Clock, empty: bool
) -> None:
    explorers.come("a", "t")
    trainer(job, "running", "s-t")
    assert names(roster) == {"a", "t"}
    assert roster.trainer_status() is RunningStatus.RUNNING
    root, away = job.root, job.root.with_name("away")
    root.rename(away)
    if empty:
        root.mkdir()
    for look in (roster.explorers, roster.trainer, roster.look_at_slice):
        clock.advance(LEASE_TIME)
        with pytest.raises(JobUnavailableError, match="is its storage mounted"):
            look()
    if empty:
        root.rmdir()
    away.rename(root)
    assert names(roster) == {"a", "t"}
    assert roster.trainer_status() is RunningStatus.RUNNING


def trainer(job: SmallJob, status: str, session: str | None) -> None:
    report = TrainerReport.model_validate(
        {"run_id": "r", "world_size": 1, "status": status, "session": session, "time": 0.0}
    )
    job.put_record(job.layout.trainer_report, report)


def test_the_trainer_is_stopped_before_it_comes_and_when_it_died(
    roster: Roster, job: SmallJob, watch: Watch, explorers: Explorers
) -> None:
    assert roster.trainer_status() is RunningStatus.STOPPED
    explorers.beat("t")
    trainer(job, "require_sync", "s-t")
    assert roster.trainer_status() is RunningStatus.REQUIRE_SYNC
    watch(1.5 * LEASE_TIME, "t")
    assert roster.trainer_status() is RunningStatus.REQUIRE_SYNC
    watch(1.5 * LEASE_TIME)
    assert roster.trainer_status() is RunningStatus.STOPPED


def test_a_trainer_that_does_not_register_is_what_it_says(roster: Roster, job: SmallJob) -> None:
    trainer(job, "running", None)
    assert roster.trainer_status() is RunningStatus.RUNNING


def test_it_may_be_closed_by_a_signal_handler_of_who_asks(
    explorers: Explorers, job: SmallJob, storage: RuledStorage
) -> None:
    roster = Roster(Job(storage, job.layout), 1.0)
    explorers.come("a")
    asking = threading.Thread(target=roster.explorers, daemon=True)
    closed = threading.Event()

    def close_as_a_handler_does(method: str, _: object) -> None:
        if method == "names" and threading.current_thread() is asking:
            time.sleep(3 / SLICES_PER_LEASE)  # until the roster's thread wants to look
            roster.close()
            closed.set()

    assert names(roster) == {"a"}
    storage.rules.append(close_as_a_handler_does)
    asking.start()
    assert closed.wait(60)
    asking.join(60)


def test_a_heartbeat_that_this_client_remembers_as_missing_is_asked_for(
    explorers: Explorers, tmp_path: Path
) -> None:
    job = explorers.job = SmallJob(tmp_path / "lagging", hosts=LaggingHosts(tmp_path))
    storage = job.hosts.storage()
    assert not storage.exists(job.session("s-a"))
    explorers.come("a")
    assert names(Roster(Job(storage, job.layout), LEASE_TIME, background=False)) == {"a"}


def forget(*_: object) -> None:
    """What a server says that no longer knows what this client has opened."""
    raise os_error(errno.ESTALE)


@pytest.mark.parametrize("method", ["fstat", "pread"])
def test_a_report_that_is_replaced_while_it_is_read_is_read_anew(
    roster: Roster, explorers: Explorers, job: SmallJob, storage: RuledStorage, method: str
) -> None:
    explorers.come("a", "t")
    trainer(job, "running", "s-t")
    storage.once(method, forget)
    assert roster.trainer_status() is RunningStatus.RUNNING
    storage.rules[:] = [once(method, forget)]
    assert names(roster) == {"a", "t"}
