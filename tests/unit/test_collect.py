"""Leftovers go once they lie still, the reserve is kept, and nothing else is touched."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from syncd.daemon.collect import Collector
from syncd.daemon.config import DaemonConfig
from syncd.protocol.claims import Claim
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.reports import ExplorerReport
from syncd.storage.job import Job
from syncd.storage.probe_room import ProbeRoom
from syncd.storage.reserve import Reserve
from tests.jobs import SmallJob, read
from tests.storages import Clock, RuledStorage, refuse

GRACE = 60.0
Rounds = Callable[..., None]


def rounds_of(
    found: Collector,
    clock: Clock,
    count: int = 8,
    step: float = GRACE / 4,
    held: Sequence[str] = (),
) -> None:
    for _ in range(count):
        clock.advance(step)
        found.run_once(held)


@pytest.fixture
def rounds(job: SmallJob, clock: Clock) -> Rounds:
    """Rounds of one collector."""
    return partial(rounds_of, Collector(job, GRACE, clock=clock), clock)


def leftovers(job: SmallJob) -> list[Path]:
    layout = job.layout
    actor = layout.actor(3)
    (actor / ".receipts").mkdir(parents=True)
    (actor / "huggingface" / "templates").mkdir(parents=True)
    made = [
        layout.drafts / ".tmp-trainer.json-1",
        layout.explorers / ".tmp-explorer.json-1",
        layout.state / ".tmp-format-1",
        layout.state / "daemon.lock.break.7.0",
        layout.session("dead-1"),
        actor / ".tmp-model_world_size_1_rank_0.pt-1",
        actor / ".receipts" / ".tmp-rank_0.json-1",
        actor / "huggingface" / "templates" / ".tmp-tool.jinja-1",
    ]
    for path in made:
        path.write_bytes(b"half")
    return made


def test_every_kind_of_leftover_goes_once_it_lies_still(job: SmallJob, rounds: Rounds) -> None:
    made = leftovers(job)
    empty = job.layout.drafts / ".tmp-global_step_3-1"
    empty.mkdir()
    rounds()
    assert [path for path in (*made, empty) if path.exists()] == []


def test_what_changes_and_what_has_a_committed_name_stays(job: SmallJob, rounds: Rounds) -> None:
    job.save(3)
    before = sorted(job.root.rglob("*"))
    growing = job.actor(3) / ".tmp-model_world_size_1_rank_0.pt-1"
    for number in range(12):
        growing.write_bytes(bytes(number))
        rounds(1)
    growing.unlink()
    assert sorted(job.root.rglob("*")) == before


def test_what_a_killed_doctor_left_goes_once_it_lies_still(job: SmallJob, rounds: Rounds) -> None:
    room, left = (ProbeRoom.make(job, name) for name in ("room", "left"))
    for one in (room, left):
        (one.path / "exclusive" / "mkdir-1").mkdir(parents=True)
        (one.path / "exclusive" / "file").touch()
    for _ in range(8):
        room.beat()
        rounds(1)
    assert sorted(path.name for path in job.layout.doctor.iterdir()) == ["room", "room.alive"]
    assert (room.path / "exclusive" / "mkdir-1").exists()
    rounds()
    assert not job.layout.doctor.exists()
    with pytest.raises(FileNotFoundError):
        room.beat()


def report(job: SmallJob, name: str, session: str) -> Path:
    record = ExplorerReport(name=name, session=session, status="running", time=0.0)
    job.put_record(job.explorer(name), record)
    return job.explorer(name)


def claim(job: SmallJob, name: str, session: str) -> Path:
    job.put_record(
        job.layout.claim("explorer", name), Claim(session=session, name=name, process="")
    )
    return job.layout.claim("explorer", name)


def newer(job: SmallJob, name: str, session: str) -> Path:
    path = job.explorer(name)
    job.put(path, json.dumps({"protocol": 2, "session": session, "status": ["?"]}).encode())
    return path


def aside(job: SmallJob, name: str, session: str) -> Path:
    """What a breaker that was killed left of a claim."""
    path = claim(job, name, session)
    return path.rename(path.with_name(f"{path.name}.broken-012345"))


@pytest.mark.parametrize("made", [report, claim, newer, aside])
def test_what_a_participant_left_goes_once_its_heartbeat_is_gone_and_it_lies_still(
    job: SmallJob, rounds: Rounds, made: Callable[[SmallJob, str, str], Path]
) -> None:
    job.layout.claims.mkdir(exist_ok=True)
    dead, alive = made(job, "dead", "gone"), made(job, "alive", "beats")
    back = made(job, "back", "gone-too")
    odd = dead.with_name("odd.json")
    odd.write_bytes(b'{"protocol": 2, "session": "../../../odd"}')
    heartbeat = job.session("beats")
    for number in range(12):
        heartbeat.write_text(str(number))
        if number == 3:
            job.session("gone-too").write_text("the storage was away")
        if number > 3:
            job.session("gone-too").write_text(str(number))
        rounds(1)
        assert dead.exists() == (number < 4)
    assert not dead.exists()
    assert alive.exists()
    assert back.exists()
    assert odd.exists()


def test_a_report_that_is_written_again_at_the_last_moment_stays(
    job: SmallJob, clock: Clock
) -> None:
    storage = RuledStorage()
    path = report(job, "explorer", "dead")
    storage.once("rename", lambda *_: report(job, "explorer", "new"), where="explorer.json.broken")
    rounds_of(Collector(Job(storage, job.layout), GRACE, clock=clock), clock)
    assert read(ExplorerReport, path).session == "new"


def test_one_call_does_a_bounded_part_of_the_looks(job: SmallJob, clock: Clock) -> None:
    storage = RuledStorage()
    for number in range(500):
        job.session(f"a-{number}").write_text("beats")
        report(job, f"explorer-{number}", f"a-{number}")
    found = Collector(Job(storage, job.layout), GRACE, clock=clock)
    clock.advance(GRACE / 4)
    looks = []
    for _ in range(40):
        storage.calls.clear()
        found.run_once(())
        looks.append(storage.count("open_read", job.layout.state))
    assert max(looks) <= 70
    assert sum(looks) == 1000


def test_a_heartbeat_that_holds_a_lease_is_the_pruners(job: SmallJob, rounds: Rounds) -> None:
    job.session("holder").write_text("still")
    rounds(12, held=["holder"])
    assert job.session("holder").exists()
    rounds()
    assert not job.session("holder").exists()


def test_leftovers_go_also_where_nobody_looks_for_hours_at_a_time(
    job: SmallJob, rounds: Rounds
) -> None:
    made = leftovers(job)
    rounds(count=5, step=7200)
    assert [path for path in made if path.exists()] == []


def test_thousands_that_live_do_not_keep_leftovers_from_going(
    job: SmallJob, rounds: Rounds
) -> None:
    made = leftovers(job)
    for number in range(1100):
        job.session(f"a-{number}").touch()
    rounds(held=[f"a-{number}" for number in range(1100)])
    assert [path for path in made if path.exists()] == []


def test_the_reserve_is_given_up_on_a_full_disk_and_kept_again_when_there_is_room(
    job: SmallJob, clock: Clock
) -> None:
    storage = job.storage = RuledStorage()
    job.save(1)
    with job.daemon(DaemonConfig(), clock=clock) as loop:
        kept = os.listdir(job.layout.reserve)
        assert len(kept) == 16
        full = refuse("create", errno.ENOSPC)
        storage.rules.append(full)
        loop.run_once()
        assert os.listdir(job.layout.reserve) == []
        storage.rules.remove(full)
        for _ in range(3):
            clock.advance(61)
            loop.run_once()
        assert os.listdir(job.layout.reserve) == kept
        assert job.latest.step == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_reserve_that_does_not_fit_takes_no_room(job: SmallJob, code: int) -> None:
    storage = RuledStorage()
    storage.refuse("create", code, where="reserve/07")
    Reserve(Job(storage, job.layout)).fill()
    assert os.listdir(job.layout.reserve) == []


def test_one_file_that_cannot_be_deleted_stops_no_later_daemon(job: SmallJob, clock: Clock) -> None:
    storage = job.storage = RuledStorage()
    storage.refuse("unlink", errno.EACCES, where="doomed/global_step_1")
    for step in (1, 2, 3):
        job.save(step)
        job.run(DaemonConfig(keep=1), clock=clock, rounds=3, seconds=5)
        assert job.latest.step == step
    assert job.versions == ["v000003"]
    assert len([what for what in job.audit if what == ("step", "global_step_1")]) <= 3
    assert list(job.layout.epochs.rglob("global_step_1*"))
    storage.rules.clear()
    with job.daemon(DaemonConfig(keep=1), clock=clock):
        pass
    assert not list(job.layout.epochs.rglob("global_step_1*"))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_take_over_that_cannot_end_ends_and_leaves_no_rooms(job: SmallJob, code: int) -> None:
    storage = job.storage = RuledStorage()
    (job.layout.epochs / "3-00000000" / "building" / "v000009").mkdir(parents=True)
    storage.refuse("rename", code, where="3-00000000/building/v000009")
    for _ in range(4):
        with pytest.raises((OSError, JobUnavailableError)):
            job.take_over(storage)
    assert [path.name for path in job.layout.epochs.iterdir()] == ["3-00000000"]
    storage.rules.clear()
    assert job.take_over(storage).number == 4
