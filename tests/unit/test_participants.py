"""Who is there: by heartbeats that are seen to beat, or to come and go, and never by leftovers."""

import errno
import threading
from pathlib import Path

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import decide
from syncd.daemon.service import Participants, Service
from syncd.protocol.names import STATE_POINTER
from syncd.storage.sessions import DAEMON_SESSION, Session
from tests.jobs import LEASE_TIME, SmallJob
from tests.multiprocess.processes import DEADLINE, wait_until
from tests.storages import Clock, RuledStorage
from tests.unit.test_decide import FOREIGN
from tests.unit.test_decide import job as observed


@pytest.fixture
def found(job: SmallJob, clock: Clock) -> Participants:
    return Participants(job, LEASE_TIME, clock=clock)


def after(found: Participants, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.advance(1)
        found.look(1.0)


def test_who_comes_and_goes_was_there(job: SmallJob, found: Participants) -> None:
    found.look(1.0)
    assert (found.alive, found.gone) == (False, False)
    with Session(job.layout, LEASE_TIME):
        job.point(1)
        found.look(1.0)
        assert (found.alive, found.gone) == (True, False)
    found.look(1.0)
    assert (found.alive, found.gone) == (False, True)


@pytest.mark.parametrize("trainer", ["comes", "saves", "stays away"])
def test_explorers_that_came_first_are_gone_with_the_trainer_or_after_half_an_hour(
    job: SmallJob, found: Participants, clock: Clock, trainer: str
) -> None:
    job.layout.trainer_report.write_text("{}")  # of an earlier run, as is the pointer
    job.point(1)
    found.look(1.0)
    with Session(job.layout, LEASE_TIME):
        found.look(1.0)
    clock.advance(1799)
    found.look(1.0)
    assert (found.alive, found.gone) == (False, False)
    if trainer == "comes":
        job.layout.trainer_report.write_text('{"status": "stopped"}')
    elif trainer == "saves":
        job.point(2)
    else:
        clock.advance(1)
    found.look(1.0)
    assert found.gone


def test_who_is_killed_is_gone_after_a_lease(
    job: SmallJob, found: Participants, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    found.look(1.0)
    job.point(1)
    job.session("killed").write_text("beats")
    after(found, clock, int(LEASE_TIME) - 1)
    assert not found.gone
    after(found, clock, 3)
    assert found.gone
    assert not caplog.records  # the active daemon logs it, once and by its name


def test_what_someone_left_long_ago_was_nobody(
    job: SmallJob, found: Participants, clock: Clock
) -> None:
    job.session("left").write_text("beat once")
    after(found, clock, 200)
    assert (found.alive, found.gone) == (False, False)
    job.session("left").unlink()  # collected
    found.look(1.0)
    assert not found.gone


@pytest.mark.parametrize(
    ("beats", "seconds"),
    [(10, 9), (5, 1), (int(2 * LEASE_TIME), 1), (int(2 * LEASE_TIME) + 1, 1)],
)
def test_who_was_there_before_the_daemon_counts_however_soon_it_leaves(
    job: SmallJob, found: Participants, clock: Clock, beats: int, seconds: int
) -> None:
    path = job.session("alive")
    path.write_text("beats")
    found.look(1.0)
    for number in range(beats):
        path.write_text(f"beats {number}")
        after(found, clock, seconds)
    job.point(1)
    path.unlink()
    clock.advance(1)
    found.look(1.0)
    assert found.gone


@pytest.mark.lagging
def test_who_has_just_come_is_asked_of_the_server_before_anyone_counts_as_gone(
    job: SmallJob, clock: Clock
) -> None:
    found = Participants(job, LEASE_TIME, clock=clock)
    found.look(1.0)
    job.point(1)
    with Session(job.layout, LEASE_TIME):
        found.look(1.0)
        assert found.alive
    job.hosts.settle()
    found.look(1.0)
    assert found.gone
    with Session(job.layout, LEASE_TIME):
        found.look(1.0)
        assert (found.alive, found.gone) == (True, False)


def test_what_someone_wrote_last_is_published_though_the_first_look_does_not_see_it(
    tmp_path: Path,
) -> None:
    storage = RuledStorage()
    job = SmallJob(tmp_path / "job", storage)
    service = Service(job.root, DaemonConfig(tick=0.05, exit_when_idle=True), storage=storage)
    participant = Session(job.layout, LEASE_TIME)

    def not_there(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "as this client remembers", str(path))

    def saves_and_leaves(*_: object) -> None:
        job.save(1)
        participant.close()
        storage.once("open_read", not_there, where=f"/{STATE_POINTER}")

    serving = threading.Thread(target=service.run)
    serving.start()
    try:
        pointer = job.state_pointer
        wait_until(lambda: storage.count("open_read", pointer) > 5, "some rounds have gone by")
        assert serving.is_alive()
        storage.once("names", saves_and_leaves, where="/sessions")
        serving.join(DEADLINE)
        assert not serving.is_alive()
    finally:
        service.stop()
        serving.join(DEADLINE)
    assert job.latest.step == 1


def test_daemons_are_no_participants(job: SmallJob, found: Participants) -> None:
    found.look(1.0)
    with Session(job.layout, LEASE_TIME, prefix=DAEMON_SESSION):
        found.look(1.0)
        assert not found.alive
    found.look(1.0)
    assert not found.gone


def test_what_is_still_to_be_published_is_pending(job: SmallJob) -> None:
    config = DaemonConfig()
    assert not decide(observed(), config).pending
    assert decide(observed(published_save="run-8-0"), config).pending
    assert decide(observed(save=FOREIGN, save_still_for=0.0), config).pending
    with job.daemon() as loop:
        assert not loop.run_once().pending  # no pointer
        job.point(3)
        assert not loop.run_once().pending  # nothing there, and nobody to write it
        job.save(3)
        assert loop.run_once().pending
        assert not loop.run_once().pending
        job.layout.paused.write_bytes(b"{}")
        assert loop.run_once().pending
