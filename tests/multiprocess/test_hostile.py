"""Real daemons in jobs where someone has put what does not belong there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from explorer_hooks.reader import Reader
from syncd.protocol.layout import JobLayout
from tests.jobs import SmallJob
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    syncd,
    wait_for_step,
    wait_until,
)


@pytest.fixture
def served(job: Path) -> SmallJob:
    return SmallJob(job)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What is not the job's."""
    folder = tmp_path / "outside"
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_text("not the job's")
    (folder / "folder" / "file").write_text("not the job's")
    return folder


def seen(folder: Path) -> list[tuple[str, int, str]]:
    return [
        (str(path), path.stat().st_mtime_ns, path.read_text() if path.is_file() else "")
        for path in [folder, *sorted(folder.rglob("*"))]
    ]


def links(job: JobLayout, outside: Path) -> None:
    for path in (
        job.step(1), job.version(9), job.lease_folder(9), job.saves, job.trainer_report,
        job.explorer("x"), job.session("gone"), job.epochs / "7-00000000",
    ):  # fmt: skip
        path.symlink_to(outside / "folder")
    os.link(outside / "file", job.audit)
    os.link(outside / "file", job.journal)


def pipes(job: JobLayout, outside: Path) -> None:  # noqa: ARG001 # as the others are called
    for path in (
        job.checkpoint_pointer, job.latest, job.saves, job.daemon_report, job.publish_lock,
        job.explorer("x"), job.audit, job.journal, job.daemon_lock, job.version(9),
        job.lease_folder(9), job.epochs / "7-00000000", job.step(1),
    ):  # fmt: skip
        os.mkfifo(path)


def folders(job: JobLayout, outside: Path) -> None:
    for path in (
        job.latest, job.saves, job.daemon_report, job.publish_lock, job.audit, job.journal,
        job.checkpoint_pointer, job.explorer("x"), job.state / "x.broken-y",
        job.sessions / "x.broken-y", job.epochs / "999-00000000" / "trash" / "..-x" / "planted",
    ):  # fmt: skip
        path.mkdir(parents=True)
    (job.epochs / "999-00000000" / "trash" / "..-x" / "file").touch()
    (job.epochs / "999-00000000" / "building").write_text("no folder")
    (job.epochs / "999-00000000" / "doomed").symlink_to(outside)


@pytest.mark.parametrize("put", [links, pipes, folders])
def test_a_daemon_serves_and_prunes_among_what_others_left(
    served: SmallJob, outside: Path, put: Callable[[JobLayout, Path], None]
) -> None:
    layout = served.layout
    put(layout, outside)
    before, beside = seen(outside), os.listdir(outside.parent)
    with Daemon(layout.root, "--keep", "1") as daemon:
        for step in (2, 3, 4):
            served.save(step)
            wait_until(layout.latest.is_file, "LATEST is what it should be")
            wait_for_step(layout.root, step)
        wait_until(lambda: len(served.storage.names(layout.leases)) <= 2, "versions are pruned")
        with Reader(layout.root, "explorer", poll=0.05) as reader:
            version = reader.next_version(0, DEADLINE)
            assert version.step == 4
            version.verify()
            version.release()
        assert daemon.terminate() == 0
        assert not [line for line in daemon.log if "Traceback" in line]
    assert (seen(outside), sorted(os.listdir(outside.parent))) == (before, sorted(beside))


def test_a_pointer_that_is_a_pipe_is_waited_for_and_the_daemon_still_ends(served: SmallJob) -> None:
    os.mkfifo(served.state_pointer)
    with Daemon(served.root) as daemon:
        daemon.wait_for_log("cannot be read")
        served.state_pointer.unlink()
        served.save(1)
        wait_for_step(served.root, 1)


def test_a_daemon_pauses_says_what_is_in_its_way_and_goes_on_when_it_is_gone(
    served: SmallJob, outside: Path
) -> None:
    layout = served.layout
    served.save(1)
    layout.daemon_lock.mkdir()
    with Daemon(layout.root) as daemon:
        daemon.wait_for_log(str(layout.daemon_lock))
        aside = layout.state / "aside"
        layout.sessions.rename(aside)
        layout.sessions.symlink_to(outside / "folder")
        daemon.wait_for_log(f"{layout.sessions} is a link")
        assert os.listdir(outside / "folder") == ["file"]
        layout.sessions.unlink()
        aside.rename(layout.sessions)
        layout.latest.write_bytes(b'{"protocol": 1%b}' % (b"0" * 30))
        layout.daemon_lock.rmdir()
        daemon.wait_for_log("install the newer syncd")
        layout.latest.unlink()
        wait_for_step(layout.root, 1)


def test_a_format_that_is_a_pipe_is_one_clear_line(served: SmallJob) -> None:
    served.layout.format.unlink()
    os.mkfifo(served.layout.format)
    for command in ("run", "status", "prune"):
        done = syncd(command, served.root)
        if command != "status":
            assert done.returncode == 11
            assert "format.json" in done.stderr
        assert done.returncode < 64
        assert "Traceback" not in done.stderr
