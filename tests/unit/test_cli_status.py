"""``syncd status``: several jobs, and one that is watched."""

import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncd.cli import options
from syncd.cli.status import page
from syncd.daemon.config import DaemonConfig
from syncd.daemon.telling.journal import Journal
from syncd.operate.job_state import look, look_anyway
from syncd.operate.liveness import Watch
from syncd.operate.models import JobState, UnseenJob
from syncd.protocol.amounts import size, span
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError, ProtocolMismatchError
from syncd.protocol.records import encode
from syncd.protocol.reports import (
    Blocked,
    DaemonReport,
    ExplorerReport,
    MergeProgress,
    TrainerReport,
)
from syncd.protocol.requests import RollbackRequest
from syncd.storage.job import Job
from tests.commands import Result, invoke
from tests.doc_blocks import text_of
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, wait_until
from tests.storages import Clock, FastStorage

NOW = 1000.0


@pytest.fixture
def served(job: SmallJob) -> SmallJob:
    with job.daemon(DaemonConfig(keep=9)) as loop:
        loop.publish(1)
    return job


def status(*arguments: object) -> Result:
    return invoke("status", *arguments)


def printed(*arguments: object) -> Any:
    return json.loads(status(*arguments, "--json").output)


def shown(job: SmallJob, width: int = 80, height: int | None = None) -> str:
    console = Console(width=width, no_color=True, highlight=False, record=True, file=None)
    with console.capture() as captured:
        console.print(page(seen(job), NOW, width, height), soft_wrap=True)
    return captured.get()


def seen(job: SmallJob) -> JobState:
    """The state at ``NOW``, after as long a wait as ``status`` has."""
    clock = Clock()
    watch = Watch(lambda: NOW, clock, clock.advance)
    fast = Job(FastStorage(), job.layout)
    watch.begin()
    look(fast, watch)
    watch.wait()
    return look(fast, watch)


def beat(job: SmallJob, session: str, at: float) -> None:
    """The last heartbeat of a session."""
    job.session(session).touch()
    os.utime(job.session(session), (at, at))


def explorer(job: SmallJob, name: str, **more: Any) -> None:
    usual = {"session": "s", "status": "running", "sequence": 1, "step": 1, "time": 1.0}
    report = ExplorerReport.model_validate({"name": name, **usual, **more})
    job.put(job.explorer(name), encode(report))


def reports(job: SmallJob, explorers: int, **more: Any) -> None:
    daemon = {
        "session": "s", "host": "trainer-7", "pid": 4242, "epoch": 3, "state": "merging",
        "builds": {"max_shard_size": 10**9, "digests": True, "tick": 1},
        "detail": "step 12", "sequence": 1, "step": 1, "time": 999.0,
        "merge": MergeProgress(step=12, done=1_500_000_000, total=6_000_000_000, seconds=1.25),
        **more,
    }  # fmt: skip
    job.put(job.layout.daemon_report, encode(DaemonReport.model_validate(daemon)))
    beat(job, "s", daemon["time"])
    trainer = TrainerReport(run_id="r", world_size=4, status="running", step=13, time=990.0)
    job.put(job.layout.trainer_report, encode(trainer))
    for number in range(explorers):
        refused = None if number else "v1: " + "no such tensor " * 20
        sequence = None if number == 7 else 1
        explorer(job, f"node-{number:03d}", sequence=sequence, time=400.0, refused=refused)


def test_a_page_fits_80_columns_and_says_how_far_the_merge_is(served: SmallJob) -> None:
    reports(served, 30, fold=MergeProgress(step=11, done=0, total=0, seconds=2.0))
    lines = shown(served).splitlines()
    told = {line.split()[0]: line for line in lines if line[:1].strip()}
    assert told["merge"] == "merge    1.5 GB of 6.0 GB (25%) in 1.2 s, 3.8 s left"
    assert told["fold"] == "fold     begun 2.0 s ago"
    assert told["trainer"] == "trainer  running, announced step 13 (4 ranks, heard 10 s ago)"
    assert told["daemon"].startswith("daemon   merging: step 12 (trainer-7 pid 4242, epoch 3")
    assert told["free"].endswith("on the job's filesystem")
    assert all(len(line) <= 80 for line in lines if str(served.root) not in line)
    # Of many explorers those that are behind are shown.
    assert told["node-007"].split()[1:5] == ["running", "-", "1", "1"]
    assert "and 10 more, at most 0 behind (--json)" in lines
    (at,) = (i for i, line in enumerate(lines) if "refuses v1. v1: no such" in line)
    assert lines[at + 1].startswith(" " * 9)


def test_a_low_terminal_shows_faults_and_explorers_before_events(served: SmallJob) -> None:
    reports(served, 6)
    served.layout.daemon_lock.touch()
    lines = shown(served, height=28).splitlines()
    assert len(lines) <= 28
    assert sum(line.startswith("node-") for line in lines) >= 5
    served.layout.daemon_lock.unlink()
    reports(served, 30)
    lines = shown(served, height=24).splitlines()
    assert len(lines) < 30  # so many for the explorers, however much else there is
    (fault,) = (
        i for i, line in enumerate(lines) if line.startswith("problem  node-000 refuses v1.")
    )
    (event,) = (i for i, line in enumerate(lines) if "published step 1 as v1" in line)
    (head,) = (i for i, line in enumerate(lines) if line.startswith("explorer  status"))
    assert fault < head < event
    assert "and 26 more, at most 0 behind (--json)" in lines
    assert len(shown(served, height=60).splitlines()) > 40


def test_a_reason_that_explorers_share_is_told_once(served: SmallJob) -> None:
    beat(served, "s", NOW)
    for number in range(9):
        fault = None if number else "its engine died"
        explorer(served, f"node-{number}", refused="v1: no room", fault=fault)
    lines = shown(served).splitlines()
    assert "problem  node-0 faulty. its engine died. Restart it" in lines
    assert (
        "problem  node-1, node-2, node-3, node-4 and 4 more refuses v1. v1: no room. Mend" in lines
    )
    assert sum("v1: no room" in line for line in lines) == 1


@pytest.mark.parametrize("height", [None, 10])
def test_stopped_explorers_are_the_last(served: SmallJob, height: int | None) -> None:
    beat(served, "s", NOW)
    for number in range(6):
        more = {"status": "stopped", "sequence": None} if number % 2 else {}
        explorer(served, f"node-{number:02d}", **more)
    lines = shown(served, height=height).splitlines()
    names = [line.split()[:2] for line in lines if line.startswith("node-")]
    assert names[:3] == [[f"node-{number:02d}", "running"] for number in (0, 2, 4)]
    assert {status for _, status in names[3:]} == {"stopped"}
    assert ("and 2 more, none live (--json)" in lines) == (height == 10)


def test_a_rollback_that_no_daemon_has_carried_out_is_shown(served: SmallJob) -> None:
    assert printed(served.root)["rollbacks"] == []
    for number in range(5):
        request = RollbackRequest(id=f"ask-{number}", sequence=1, by="me\n@x", time=970.0)
        served.put(served.layout.request(request.id), encode(request))
    (told, *more) = printed(served.root)["rollbacks"]
    assert told.items() >= {"id": "ask-0", "sequence": 1, "by": "me\n@x", "time": 970.0}.items()
    assert len(more) == 4
    lines = shown(served).splitlines()
    assert lines.count("rollback to v1 is queued: me\\n@x asked 30 s ago") == 3
    assert "and 2 more (--json)" in "".join(lines)
    with served.daemon(DaemonConfig(keep=9)) as loop:
        loop.rounds(5, 0.0)
    assert "queued" not in shown(served)


def test_a_job_without_a_daemon_shows_the_command_that_starts_one(
    served: SmallJob, tmp_path: Path
) -> None:
    def start(job: SmallJob) -> str:
        return next((problem.remedy for problem in seen(job).health.problems), "")

    new = SmallJob(tmp_path / "it's new")
    command = f"Start one: `syncd run {shlex.quote(str(new.root))}`"
    assert start(new) == command
    assert f"no daemon. {command}" in shown(new, 800)
    assert start(served) == f"Start one: `syncd run {served.root}`"  # it stopped
    reports(served, 0, memory_dir="/memory/job", host="elsewhere", state="stopped")
    assert start(served).endswith(f"syncd run {served.root} --memory-dir /memory/job`")
    full = Blocked(reason="room", what="no room", remedy="make some", level=2)
    reports(served, 0, state="stopped", blocked=(full,))
    assert seen(served).health.text == "degraded: no daemon"  # nobody knows what is full now
    reports(served, 0)
    assert start(served) == ""
    reports(served, 0, time=NOW - 61.0)
    again = f"start another: `syncd run {served.root}`"
    assert start(served) == f"If pid 4242 on trainer-7 has ended, {again}"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "'syncd run' with this path starts a daemon" in str(status(empty).exception)


def test_the_dead_and_refusing_are_named_on_top_and_checked(
    served: SmallJob,
) -> None:
    def told() -> tuple[str, int]:
        health = seen(served).health
        assert shown(served, 800).startswith(f"{health.text}\n")
        return health.text, health.level

    assert told() == ("degraded: no daemon", 1)
    reports(served, 3)
    explorer(served, "node-000")
    assert told() == ("healthy", 0)
    explorer(served, "node-000", refused="v107: no such tensor")
    assert told() == ("degraded: node-000 refuses v107", 1)
    explorer(served, "node-000", session="x")
    beat(served, "x", NOW - 81)
    assert told() == ("degraded: node-000 lost", 1)
    assert "node-000  lost (no heartbeat for 81 s)" in shown(served, 800)
    beat(served, "x", NOW - 29)
    explorer(served, "node-001", fault="?")
    assert told() == ("degraded: node-001 faulty", 2)
    explorer(served, "node-001", fault="?", refused="v1: no", status="stopped")
    assert told() == ("healthy", 0)  # one that has ended has no fault
    trainer = TrainerReport(
        run_id="r", world_size=1, status="running", step=13, session="t", time=NOW - 70
    )
    served.put(served.layout.trainer_report, encode(trainer))  # whose heartbeat is gone
    beat(served, "s", NOW - 7200)
    assert told() == ("degraded: daemon lost; trainer lost; node-002 lost", 2)
    assert "trainer  lost (no heartbeat for 70 s), announced step 13" in shown(served, 800)
    lines = shown(served, 800)
    assert "daemon   lost (no heartbeat for 2 h) (trainer-7 pid 4242" in lines
    assert "step 12" not in lines  # what it merged
    ended = trainer.model_copy(update={"status": "stopped"})
    served.put(served.layout.trainer_report, encode(ended))
    assert "trainer  stopped" in shown(served, 800)


@pytest.mark.parametrize(
    ("record", "level"),
    [("latest", 2), ("format", 2), ("daemon_report", 2), ("trainer_report", 1), ("saves", 1)],
)
def test_a_record_that_a_view_cannot_read_is_a_problem(
    served: SmallJob, record: str, level: int
) -> None:
    reports(served, 0)
    path = getattr(served.layout, record)
    before = path.read_bytes()
    served.put(path, b"garbage")
    health = seen(served).health
    assert health.level == level
    assert re.search(f"{path} is not a valid [a-z ]+ record", health.text)
    path.unlink()
    path.mkdir()
    (problem,) = seen(served).health.problems  # and no advice to start a daemon
    assert problem.what == f"{path} cannot be read: not a regular file"
    assert problem.remedy == "Check its storage"
    path.rmdir()
    served.put(path, before)
    assert seen(served).health.level == 0


def test_a_daemon_that_lives_but_writes_no_report_is_critical(served: SmallJob) -> None:
    for state in ("watching", "merging"):
        reports(served, 0, state=state)
        for late, level in ((110, 2), (70, 1), (60, 0)):
            os.utime(served.layout.daemon_report, (NOW - late, NOW - late))
            health = seen(served).health
            assert health.level == level
            text = f"has not written {served.layout.daemon_report} for {span(late - 1)}"
            assert (text in health.text) == (level > 0)


def test_storage_that_is_mounted_read_only_is_a_problem(
    served: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FastStorage, "is_read_only", lambda *_: True)
    reports(served, 0)
    assert seen(served).health.level == 1  # this host may only view the job
    reports(served, 0, host=socket.gethostname())
    health = seen(served).health
    assert (health.level, health.problems[0].remedy[:11]) == (2, "Mount it rw")


def test_a_check_of_several_jobs_has_the_worst_of_them(served: SmallJob, tmp_path: Path) -> None:
    other = SmallJob(tmp_path / "other")
    reports(served, 0, time=time.time())
    both = status(served.root, other.root, "--check")
    assert (both.exit_code, both.output.splitlines()[0]) == (
        1, f"{other.root} is degraded: no daemon",
    )  # fmt: skip
    assert status(tmp_path / "none", "--check").exit_code == 2
    assert status(served.root, tmp_path / "none", "--check").exit_code == 2
    assert status(served.root, other.root).exit_code == 0


def test_json_has_what_is_shown_and_how_far_explorers_are_behind(served: SmallJob) -> None:
    reports(served, 2, time=time.time())
    seen = printed(served.root)
    assert seen["daemon"]["merge"] == {
        "step": 12, "done": 1_500_000_000, "total": 6_000_000_000, "seconds": 1.25,
    }  # fmt: skip
    assert [(one["behind"], one["behind_steps"]) for one in seen["explorers"]] == [(0, 0)] * 2
    assert seen["events"][-1]["event"] == "published"
    assert seen["memory"] is None
    assert [key for key in seen if f"`{key}`" not in text_of("docs/cli.md")] == []


@pytest.mark.parametrize("name", ["status", "pin", "prune"])
def test_a_part_of_a_job_is_named_as_one(served: SmallJob, name: str) -> None:
    arguments = [name, str(served.layout.published), *(["v1"] if name == "pin" else [])]
    told = str(invoke(*arguments).exception)
    assert told.endswith(f"is a part of the job {served.root}: give {served.root}")


@pytest.mark.parametrize("path", ["format", "latest", "daemon_report"])
def test_a_job_of_a_newer_syncd_is_not_shown_as_if_it_had_no_daemon(
    served: SmallJob, path: str
) -> None:
    reports(served, 0)
    file = getattr(served.layout, path)
    served.put(file, json.dumps(json.loads(file.read_bytes()) | {"protocol": 99}).encode())
    assert isinstance(status(served.root).exception, ProtocolMismatchError)
    state = look_anyway(served.root)
    assert isinstance(state, UnseenJob)
    assert "99" in state.unseen


def test_several_jobs_are_a_line_each_and_one_that_is_none_is_said(
    served: SmallJob, tmp_path: Path
) -> None:
    other = SmallJob(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for given in ([tmp_path], [served.root, other.root]):
        told = printed(*given)["jobs"]
        assert [Path(job["job"]).name for job in told] == ["job", "other"]
    lines = status(tmp_path).output.splitlines()
    assert sum(" v1 " in line for line in lines) == 1
    assert sum("none yet" in line for line in lines) == 1
    result = status(served.root, tmp_path / "empty")
    assert result.exit_code == 0
    assert "is not a job that syncd has served" in result.output.replace("\n", " ")
    assert isinstance(status(tmp_path / "empty").exception, JobUnavailableError)


def test_without_a_name_the_jobs_of_this_hosts_services_are_shown(
    served: SmallJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    monkeypatch.setattr(options, "CONFIGURATIONS", folder)
    assert isinstance(status().exception, InvalidSettingsError)
    (folder / "a.toml").write_text(f'job = "{served.root}"\n')
    (told,) = printed()["jobs"]
    assert told["latest"]["sequence"] == 1
    # A daemon of many jobs; one that a configuration of its own names too is there once.
    root = SmallJob(tmp_path / "root" / "other").layout.root.parent
    (folder / "b.toml").write_text(f'root = "{root}"\n')
    (folder / "c.toml").write_text(f'root = "{tmp_path / "unmounted"}"\n')
    (folder / "d.toml").write_text(f'job = "{root / "other"}"\n')
    told = printed()["jobs"]
    assert [job["job"] for job in told] == [
        str(served.root), str(root / "other"), str(tmp_path / "unmounted"),
    ]  # fmt: skip
    assert told[-1]["unseen"].startswith("no such folder: ")


def test_a_folder_that_may_not_be_looked_into_hides_no_job_beside_it(
    served: SmallJob, tmp_path: Path
) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / ".syncd").symlink_to(".syncd")  # root, too, is refused that
    (told,) = printed(tmp_path)["jobs"]
    assert told["job"] == str(served.root)


def test_a_large_fleet_that_goes_live_leaves_room_for_what_else_happened(served: SmallJob) -> None:
    journal = Journal(Job(FastStorage(), served.layout), wall=lambda: 1e6)
    journal.note("quarantined", step=2, why="it is cut")
    for number in range(300):
        journal.note("live", version=1, explorer=f"node-{number}", seconds=1.0)
    journal.write()
    told = seen(served).model_dump()["events"]
    assert [event["event"] for event in told] == [
        "active", "published", "quarantined", *["live"] * 50,
    ]  # fmt: skip
    assert told[-1]["explorer"] == "node-299"


def test_numbers_and_paths_that_nobody_can_mean_leave_valid_json(served: SmallJob) -> None:
    reports(served, 0, memory_dir="/srv/\0", host=socket.gethostname())
    assert "null" in printed(served.root)["memory"]["unseen"]
    record = served.layout.daemon_report
    content = json.loads(record.read_bytes())
    content["merge"]["seconds"] = "BEYOND"
    record.write_text(json.dumps(content).replace('"BEYOND"', "1e999"))
    output = status(served.root, "--json").output
    assert json.loads(output)["daemon"] is None
    assert "Infinity" not in output


@contextmanager
def watching(job: SmallJob, *more: str, out: int) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "syncd", "status", str(job.root), "--watch", *more]
    env = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    with subprocess.Popen([*argv, "--interval", "0.1"], stdout=out, env=env) as process:
        os.close(out)
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["terminal", "pipe", "json"])
def test_it_is_shown_again_until_ctrl_c(served: SmallJob, where: str) -> None:
    ours, theirs = pty.openpty() if where == "terminal" else os.pipe()
    os.set_blocking(ours, False)
    more = ["--json"] if where == "json" else []
    told = b""

    def seen(what: bytes) -> bool:
        nonlocal told
        try:
            told += os.read(ours, 65536)
        except BlockingIOError:
            pass
        return what in told

    with watching(served, *more, out=theirs) as process:
        wait_until(lambda: seen(b'"sequence": 1' if more else b"v1, step 1"), "the first")
        with served.daemon(DaemonConfig(keep=9)) as loop:
            loop.publish(2)
        wait_until(lambda: seen(b'"sequence": 2' if more else b"v2, step 2"), "the second")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 0
    os.close(ours)
    in_place = b"\x1b[1A" in told or b"\x1b[2K" in told
    assert in_place == (where == "terminal")
    if more:
        assert json.loads(told.decode().splitlines()[:-1][0])["latest"]["sequence"] == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0123, "12 ms"), (0.9996, "1.0 s"), (9.96, "10 s"), (99.6, "2 min"),
     (3599, "60 min"), (7200, "2 h"), (200_000, "2 d"), (1e300, "99999 d")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_960, "100 kB"), (999_600, "1.0 MB"),
     (3.4e9, "3.4 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_sizes_are_short(count: float, text: str) -> None:
    assert size(count) == text
