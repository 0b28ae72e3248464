"""``syncd doctor`` as it is run: what it finds on a real disk, and that it leaves nothing there."""

import json
import logging
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from syncd.cli.doctor import command
from syncd.doctor.examination import Examination, facts_of
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.doc_blocks import blocks
from tests.jobs import SmallJob
from tests.multiprocess.mounts import Filler, Kind, read_only, tmpfs
from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, Daemon, wait_until
from tests.systemd.test_rights import GROUP, User, reachable

only_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may become another user, and mount"
)
#: A run takes a few seconds; many others may run beside it.
LONGEST = 4 * DEADLINE
ALONE = {
    "mount", "format", "room", "rights", "rename", "rmdir", "links", "sync", "shared", "exclusive",
    "replace", "fence", "one_mount", "leases", "refresh", "open", "lease_time",
}  # fmt: skip


def doctor(job: Path, *options: str) -> subprocess.Popen[str]:
    return run("syncd", "doctor", job, *options)


def run(module: str, *words: object) -> subprocess.Popen[str]:
    """It, in a process group of its own, to which its helpers belong."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "COLUMNS": "80"},
        process_group=0,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LONGEST)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, out, err


def found(job: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Its exit status, what it found by name, and what it said at its end."""
    status, out, err = ended(doctor(job, *options, "--json"))
    assert out, err
    said = json.loads(out)
    assert said["job"] == str(job.resolve())
    return status, {one["name"]: one for one in said["findings"]}, err


def everything(job: Path) -> dict[str, tuple[int, int]]:
    """Inodes and times, but not the times of folders: another one was in them for a while."""
    found = {str(path): path.lstat() for path in job.rglob("*")}
    return {
        name: (one.st_ino, 0 if stat.S_ISDIR(one.st_mode) else one.st_mtime_ns)
        for name, one in found.items()
    }


def wrong(findings: dict[str, Any]) -> set[str]:
    """What is not in order; but a machine with much else to do may well be slow."""
    slow = {name for name in ("sync", "open") if findings[name]["verdict"] == "warn"}
    return {name for name, one in findings.items() if one["verdict"] != "ok"} - slow


def test_a_local_disk_is_fit_and_nothing_of_the_job_is_touched(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    job.save(1)
    before = everything(job.root)
    status, findings, err = found(job.root)
    assert (status, err) == (0, "")
    assert set(findings) == ALONE
    assert wrong(findings) == set()
    assert everything(job.root) == before


def test_two_that_are_run_at_the_same_time_measure_between_them(tmp_path: Path) -> None:
    """In a folder that was never served, beside the room of a peer that was killed elsewhere."""
    job = tmp_path / "job"
    stale = job / ".syncd" / "doctor" / "peer-elsewhere-1-00000000"
    (stale / "talk").mkdir(parents=True)
    stale.with_name(f"{stale.name}.alive").write_text("another-boot pid:[1] 1")
    with doctor(job, "--peer", "1", "--json") as second:
        status, findings, _ = found(job, "--peer", "0")
        there = json.loads(ended(second)[1])
    assert status == second.returncode == 0
    assert set(findings) == ALONE | {"hosts", "peer_mount"}
    # They know that they are on one host.
    assert wrong(findings) == {"hosts"}
    # Each tells of its own mount, but only the first makes the room in which rights are looked at.
    assert {one["name"] for one in there["findings"]} == set(findings) - {"rights", "one_mount"}
    assert there["verdict"] == "warn"
    assert {path.name for path in stale.parent.iterdir()} == {stale.name, f"{stale.name}.alive"}


def test_the_page_has_every_finding_and_commands_that_it_would_take() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = {name for line in page.splitlines() for name in re.findall(r"`([a-z_]+)`", line[:30])}
    assert ALONE | {"hosts", "peer_mount", "cleanup"} <= rows
    for line in "".join(blocks("doctor.md", "sh")).splitlines():
        _, name, *arguments = shlex.split(line, comments=True)
        assert name == "doctor"
        command.make_context(name, arguments)


def test_a_peer_that_nobody_answers_says_what_to_run(tmp_path: Path) -> None:
    for number, other in ((0, 1), (1, 0)):
        status, out, err = ended(doctor(tmp_path, "--peer", str(number), "--wait", "1"))
        assert status == 11
        assert f"syncd doctor {tmp_path} --peer {other}" in err
        assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


def group_has_ended(group: int) -> bool:
    """Whether no process of a group runs; those that nobody waits for do not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it has ended just now
        if int(its_group) == group and state not in {"Z", "X"}:
            return False
    return True


@contextmanager
def in_the_middle(job: Path) -> Iterator[subprocess.Popen[str]]:
    """While it measures with its helpers; all of them have ended when this is left."""
    with doctor(job) as process:
        rooms = job / ".syncd" / "doctor"
        wait_until(lambda: list(rooms.glob("*/exclusive-0/mkdir-*")), "the race begins", LONGEST)
        yield process
        ended(process)
        wait_until(lambda: group_has_ended(process.pid), "its helpers end too", LONGEST)


def test_files_of_a_killed_run_go_with_the_next_one(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as process:
        process.kill()
    assert list((tmp_path / ".syncd" / "doctor").iterdir())
    status, out, err = ended(doctor(tmp_path))
    assert (status, err) == (0, "")
    assert [path.name for path in tmp_path.rglob("*")] == [".syncd"]
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:4] == ["ok", "fence", "nothing", "can"] for line in lines)
    assert lines[-1].endswith(" 0 fail")


def test_a_run_that_is_asked_to_stop_leaves_nothing(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as process:
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_helper_whose_run_was_killed_before_it_began_ends_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:  # of the path, as it is everywhere
        pass
    status, _, err = ended(run("syncd.doctor", tmp_path, "room", gone.pid))
    assert status == 1
    assert "has ended" in err


def test_a_daemon_at_work_is_not_disturbed(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    with Daemon(job.root, lease_time=30) as daemon:
        daemon.wait_for_log("epoch 1")
        status, findings, _ = found(job.root)
        assert daemon.terminate() == 0
        assert not any("doctor" in line for line in daemon.log), daemon.log
    assert status == 0
    assert findings["format"]["words"].endswith("lease time 30 s")


def told(job: Path, peer: int | None = None) -> Callable[[], None]:
    """Work for a user who may read no file of root's: what it finds is its log."""

    def work() -> None:
        for finding in Examination(Job.at(job), peer, meeting=DEADLINE).run():
            logging.getLogger("doctor").warning("%s %s", finding.name, finding.verdict)

    return work


@pytest.fixture
def others_job() -> Iterator[Path]:
    """A served job that others can come to."""
    with reachable() as job:
        Job.at(job, Storage()).open()
        facts_of(Job.at(job))  # what it imports only then, another user may not read
        yield job


@only_root
def test_a_user_that_may_not_write_is_told_so(others_job: Path) -> None:
    said = User(52003).does(told(others_job))
    assert "rights fail" in said
    assert not any(line.startswith("rename") for line in said)


@only_root
def test_a_read_only_folder_is_one_finding_and_exits_with_19(others_job: Path) -> None:
    others_job.chmod(0o777)
    with read_only(others_job):
        status, findings, err = found(others_job)
    assert status == 19
    assert err.endswith(": mount\n")
    assert [name for name, one in findings.items() if one["verdict"] == "fail"] == ["mount"]
    assert findings["mount"]["advice"] == "mount it rw"


@only_root
@pytest.mark.parametrize(("kind", "leave"), [("bytes", 8192), ("inodes", 5)])
def test_a_full_disk_ends_the_run_at_once_with_19(tmp_path: Path, kind: Kind, leave: int) -> None:
    """Also where there would be room for the run's own folders, but not for its messages."""
    with tmpfs(tmp_path / "disk", megabytes=4, inodes=100) as disk:
        job = disk / "job"
        job.mkdir()
        Filler(disk).fill(kind, leave=leave)
        status, findings, err = found(job)
        assert list(job.iterdir()) == []
    assert status == 19
    assert err.endswith(": room\n")
    assert [(name, one["verdict"]) for name, one in findings.items()] == [
        ("mount", "ok"), ("format", "ok"), ("room", "fail"),
    ]  # fmt: skip


@only_root
def test_two_users_who_share_a_group_measure_together(others_job: Path) -> None:
    for folder in (others_job, *others_job.rglob("*")):
        os.chown(folder, -1, GROUP)
        folder.chmod(folder.stat().st_mode | (0o2070 if folder.is_dir() else 0o060))
    said: dict[int, list[str]] = {}

    def examine(number: int) -> None:
        said[number] = User(52001 + number, (GROUP,), 0o002).does(told(others_job, number))

    second = threading.Thread(target=examine, args=(1,))
    second.start()
    examine(0)
    second.join(LONGEST)
    assert "shared ok" in said[0]
    assert "fence ok" in said[0]
    assert not [line for line in said[0] if line.endswith("fail")]
    assert set(said[0]) - set(said[1]) == {"rights ok", "one_mount ok"}
