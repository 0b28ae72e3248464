"""Trainers and daemon of different users: processes that have made-up uids, as root alone may."""

import json
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.reader import Reader
from syncd.checkpoint import open_save
from syncd.checkpoint.safetensors_header import read_fields
from syncd.checkpoint.torch_files.pieces import read_pieces
from syncd.daemon.config import RunConfig
from syncd.daemon.host.services import JobSupervisor
from syncd.protocol.layout import JobLayout
from tests.jobs import SmallJob
from tests.makers import make_here
from tests.multiprocess.processes import LEASE_TIME, latest, wait_until

GROUP = 52010

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other users")


@dataclass(frozen=True)
class User:
    uid: int
    groups: tuple[int, ...] = ()
    umask: int = 0o022

    def does(self, work: Callable[[], object]) -> list[str]:
        """Do it in a process of this user; returns what it logged, and how it failed, if it did."""
        reading, writing = os.pipe()
        if not (child := os.fork()):  # what it needs is imported: it may read no file of root's
            try:
                said: list[str] = []
                handler = logging.Handler()
                handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
                logging.getLogger().addHandler(handler)
                os.setgroups(self.groups)
                os.setgid(self.uid)
                os.setuid(self.uid)
                os.umask(self.umask)
                open_save.IsolatedParser = _ParsesHere  # type: ignore[misc, assignment]
                make_here()
                try:
                    work()
                except BaseException as error:  # noqa: BLE001 - told to the test
                    said += [f"{type(error).__name__}: {error}", traceback.format_exc()]
                os.write(writing, json.dumps(said).encode()[:60_000])
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            answer = told.read()
        os.waitpid(child, 0)
        return json.loads(answer)


class _ParsesHere(nullcontext[Any]):
    """Parses in this process, which may start no interpreter of root's."""

    read_fields, read_pieces = staticmethod(read_fields), staticmethod(read_pieces)

    def __init__(self, **_: object) -> None:
        super().__init__(self)


TRAINER = User(52001)
SHARING = User(52001, (GROUP,), 0o002)
DAEMON = User(52002, (GROUP,))
OTHER = User(52003, (GROUP,), 0o002)


@contextmanager
def reachable() -> Iterator[Path]:
    """A job's folder that others can come to: pytest's own are root's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    path = folder / "job"
    path.mkdir()
    yield path
    shutil.rmtree(folder)


@pytest.fixture
def root() -> Iterator[Path]:
    with reachable() as path:
        os.chown(path, TRAINER.uid, TRAINER.uid)
        yield path


@pytest.fixture
def shared(root: Path) -> Path:
    """A job that a daemon has shared with the group."""
    os.chown(root, TRAINER.uid, GROUP)
    root.chmod(0o2775)
    assert not _failed(DAEMON.does(served(root)))
    return root


def trained(root: Path, *steps: int) -> Callable[[], None]:
    def work() -> None:
        job = SmallJob(root)
        for step in steps:
            job.save(step)

    return work


def served(
    root: Path, until: Callable[[], bool] = lambda: True, group: str | None = str(GROUP)
) -> Callable[[], None]:
    def work() -> None:
        config = RunConfig(tick=0.05, shared_group=group, keep=1, lease_time=LEASE_TIME)
        services = JobSupervisor(root, config)

        def end() -> None:
            try:
                wait_until(until, "what the daemon is to do", 20)
            finally:
                services.stop()

        threading.Thread(target=end).start()
        services.run()

    return work


def is_published(root: Path, step: int) -> Callable[[], bool]:
    return lambda: (found := latest(root)) is not None and found.step == step


def is_pruned(root: Path, step: int) -> Callable[[], bool]:
    return lambda: not JobLayout(root).step(step).exists()


def test_as_the_trainers_user_a_daemon_prunes_and_says_nothing_of_rights(root: Path) -> None:
    assert TRAINER.does(trained(root, 1)) == []
    assert not any(
        "Error" in line for line in TRAINER.does(served(root, is_published(root, 1), None))
    )
    assert TRAINER.does(trained(root, 2)) == []
    said = TRAINER.does(served(root, is_pruned(root, 1), None))
    assert not [line for line in said if "cannot be deleted" in line or "Error" in line]


def test_a_daemon_that_may_not_write_to_the_job_says_as_whom_to_run(root: Path) -> None:
    TRAINER.does(trained(root, 1))
    said = DAEMON.does(served(root, group=None))
    assert said[0].startswith("JobUnavailableError")
    assert "cannot be written by user 52002. Run as the trainers' user" in said[0]


def test_in_a_shared_group_daemon_trainers_and_explorers_work_on_each_others_files(
    shared: Path,
) -> None:
    assert SHARING.does(trained(shared, 1)) == []
    assert not _failed(DAEMON.does(served(shared, is_published(shared, 1))))
    assert SHARING.does(trained(shared, 2)) == []
    said = DAEMON.does(served(shared, is_pruned(shared, 1)))
    assert not _failed(said)
    assert not [line for line in said if "cannot be deleted" in line]

    def explore() -> None:
        with Reader(shared, "explorer") as reader:
            version = reader.next_version(0, 20)
            version.verify()
            version.release()

    assert not _failed(OTHER.does(explore))
    # Another one's daemon takes over what this one has made.
    assert SHARING.does(trained(shared, 3)) == []
    assert not _failed(OTHER.does(served(shared, is_pruned(shared, 2))))
    layout = JobLayout(shared)
    for path in (*layout.state.rglob("*"), *layout.published.rglob("*")):
        status = path.lstat()
        assert status.st_gid == GROUP, path
        if path.is_dir():
            assert status.st_mode & 0o2070 == 0o2070, path
        elif path.suffix in {".json", ".safetensors", ".jsonl"} and status.st_uid != TRAINER.uid:
            assert status.st_mode & 0o060 == 0o060, path


def test_steps_that_could_not_be_deleted_are_told_of_once_and_published_all_the_same(
    shared: Path,
) -> None:
    private = User(TRAINER.uid, (GROUP,), 0o022)  # its folders are its own to write
    assert private.does(trained(shared, 1)) == []
    said = DAEMON.does(served(shared, is_published(shared, 1)))
    warnings = [line for line in said if "old steps cannot be deleted" in line]
    assert len(warnings) == 1
    assert f"{shared}/global_step_1 belongs to user 52001," in warnings[0]
    assert "umask 002" in warnings[0]


def test_a_sticky_folder_is_told_of(shared: Path) -> None:
    shared.chmod(0o3775)
    assert SHARING.does(trained(shared, 1)) == []
    said = DAEMON.does(served(shared, is_published(shared, 1)))
    assert any("has the sticky bit" in line for line in said)


def test_the_owner_of_the_job_shares_it_by_itself_and_another_is_told_how(root: Path) -> None:
    os.chown(root, OTHER.uid, OTHER.uid)
    assert OTHER.does(trained(root, 1)) == []
    said = DAEMON.does(served(root))
    assert said[0].startswith("InvalidSettingsError")
    command = said[0].partition("run '")[2].partition("'")[0]
    assert command.startswith(f"chgrp -R {GROUP} {root} && chmod -R g+rwX {root} && find {root}")
    assert OTHER.does(lambda: subprocess.run(["sh", "-c", command], check=True)) == []
    assert not _failed(DAEMON.does(served(root, is_published(root, 1))))
    # The page says the same.
    page = (Path(__file__).parents[2] / "docs" / "systemd.md").read_text()
    assert command.replace(str(root), "JOB").replace(str(GROUP), "rl") in page

    root.chmod(0o755)
    os.chown(root, OTHER.uid, OTHER.uid)
    assert not _failed(OTHER.does(served(root)))
    status = root.stat()
    assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (GROUP, 0o2775)
    assert not _failed(DAEMON.does(served(root)))


def test_a_step_that_cannot_even_be_listed_is_told_of_and_keeps_nobody_from_the_next(
    shared: Path,
) -> None:
    assert SHARING.does(trained(shared, 1)) == []
    JobLayout(shared).step(1).chmod(0o700)
    assert SHARING.does(trained(shared, 2)) == []
    said = DAEMON.does(served(shared, is_published(shared, 2)))
    assert any(f"{shared}/global_step_1 belongs to user" in line for line in said)


@pytest.mark.parametrize(
    ("group", "why"),
    [("52099", "is not in this group"), ("no-such-group", "no such group on this host")],
)
def test_a_group_that_cannot_be_shared_with_is_an_error_of_settings(
    root: Path, group: str, why: str
) -> None:
    (first, *_) = DAEMON.does(served(root, group=group))
    assert first.startswith("InvalidSettingsError")
    assert why in first


def _failed(said: list[str]) -> list[str]:
    return [line for line in said if "Error" in line or "refused" in line]
