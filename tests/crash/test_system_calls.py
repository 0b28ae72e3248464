"""kill -9 by strace at system calls that the seam does not see, filelock's among them."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from syncd.checkpoint.version import read_manifest, verify_version
from syncd.cli.merge import command as merge
from syncd.daemon.loop import Loop
from syncd.daemon.service import Service
from syncd.operate.offline import prune_now
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.sessions import Session
from tests.crash import straced
from tests.crash.invariants import CONFIG, LIVING, check, check_converged, look, restart, stand_by
from tests.crash.scenarios import dirty, explore, published, shards, to_prune
from tests.jobs import LEASE_TIME, SmallJob
from tests.multiprocess.processes import Daemon, wait_for_step, wait_until
from tests.multiprocess.saves import Constant, save
from tests.storages import Clock, FastStorage

straceable = pytest.mark.skipif(bool(straced.why_not()), reason=straced.why_not())

#: How many kills a process gets, where not all are asked for.
_KILLS = 0 if "SYNCD_DEEP" in os.environ else 5


@dataclass(frozen=True)
class Process:
    """What a process of its own does, from its start to its end, through the real storage.

    Attributes:
        prepare: makes the job as it is before.
        act: the work.
        again: what whoever runs the job starts again by itself, the daemon aside.
        rewritten: the steps that the work saves again.
    """

    name: str
    prepare: Callable[[SmallJob], None]
    act: Callable[[Path], object]
    again: Callable[[Path], object] = lambda _: None
    rewritten: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return self.name


class FewRounds(Service):
    """``syncd run`` that ends by itself."""

    left = 6

    def _round(self, loop: Loop) -> None:
        super()._round(loop)
        self.left -= 1
        if not self.left:
            self.stop()


def _daemon(job: Path) -> None:
    FewRounds(job, CONFIG.model_copy(update={"tick": 0.01})).run()


def _much_to_do(job: SmallJob) -> None:
    """What a killed daemon left, a save to be merged, versions and steps to be pruned."""
    dirty(job)
    job.lease(2, LIVING)
    job.session(LIVING).write_text("of another host")
    job.save(6)


def _one_step(job: Path) -> None:
    save(job, Constant(megabytes=0.01), 2)


def _session(job: Path) -> None:
    layout = JobLayout(job)
    with Session(layout, 0.15) as session:
        for _ in range(3):
            path = layout.session(session.id)
            before = path.stat().st_mtime_ns
            wait_until(lambda path=path, before=before: path.stat().st_mtime_ns != before, "a beat")


PROCESSES = (
    Process("run", _much_to_do, _daemon),
    Process("trainer", lambda job: published(job, 1), _one_step, _one_step, frozenset({2})),
    Process(
        "explorer",
        lambda job: published(job, 1),
        lambda job: explore(SmallJob(job, Storage(job)), Clock()),
    ),
    Process("prune", to_prune, lambda job: prune_now(Job.at(job), CONFIG)),
    Process("session", lambda job: published(job, 1), _session),
)


@straceable
@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_whatever_system_call_is_the_last_one_a_restart_converges(
    tmp_path: Path, process: Process
) -> None:
    folder, log = tmp_path / "at", tmp_path / "calls"

    def prepared() -> SmallJob:
        shutil.rmtree(folder, ignore_errors=True)
        job = SmallJob(folder / "job")
        process.prepare(job)
        return job

    root = prepared().layout.root
    calls = straced.calls_of(lambda: process.act(root), log)
    kills = 0
    for at in straced.chosen(calls, _KILLS, root):
        job = prepared()
        before = look(job, rewritten=process.rewritten)
        kills += straced.run(lambda: process.act(root), at)
        try:
            check(job, before)
            process.again(root)
            clock = Clock()
            with Session(job.layout, LEASE_TIME):
                stand_by(job, clock)
            restart(job, clock)
            check_converged(job, before)
            assert [str(path) for path in root.rglob("*") if ".break." in path.name] == []
        except BaseException as error:
            error.add_note(f"{process} was killed at {at}")
            raise
    assert kills > 3
    print(f"{kills} kills, {len(calls)} calls")


@straceable
def test_a_merge_by_hand_that_is_killed_leaves_no_folder_that_looks_whole(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    shards(job, 2)
    out = tmp_path / "out" / "step-2"
    arguments = [str(job.actor(2)), str(out)]

    def act() -> None:
        # strace counts the calls of each process: the one that reads shards may be killed instead.
        with suppress(BlockingIOError):
            merge.main(arguments, standalone_mode=False)

    def whole() -> bool:
        if not out.exists():
            return False
        verify_version(FastStorage(), out, read_manifest(FastStorage(), out))
        return True

    calls = straced.calls_of(act, tmp_path / "calls")
    assert whole()
    kills = 0
    for at in straced.chosen(calls, 2 * _KILLS, out.parent):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        kills += straced.run(act, at)
        if not whole():
            act()
            assert whole()
    assert kills > 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"filelock/2\npid=1\nho",
        b"filelock/break\n1\n",
        b"filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=1\nduration=1.0\n",
        b"filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=1\nduration=2.0\n",
    ],
    ids=["empty", "half", "placeholder", "of another host", "of another lease time"],
)
def test_a_daemon_gets_a_lock_that_a_killed_one_left(tmp_path: Path, content: bytes) -> None:
    root = tmp_path / "job"
    root.mkdir()
    Job.at(root).open(lease_time=1.0)
    job = SmallJob(root)
    job.save(1)
    job.layout.daemon_lock.write_bytes(content)
    with Daemon(root) as daemon:
        assert wait_for_step(root, 1).sequence == 1
    assert "bug in syncd" not in "".join(daemon.log)
    assert not job.layout.daemon_lock.exists()
