"""What is pinned stays, from the moment that the call returns, whatever a daemon is doing then."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import VersionGoneError
from syncd.storage.job import Job
from syncd.storage.leases import pin_step, pin_version, unpin_step, unpin_version
from tests.deltas import contents
from tests.jobs import SmallJob, published
from tests.lagging import Hosts
from tests.refusals import invalid
from tests.storages import RuledStorage

KEEP_ONE = DaemonConfig(keep=1)


def pruned(job: SmallJob, rounds: int = 2) -> None:
    with job.daemon(KEEP_ONE) as loop:
        for _ in range(rounds):
            loop.run_once()


@pytest.mark.lagging
@pytest.mark.parametrize(
    ("pin", "unpin", "folder"),
    [(pin_version, unpin_version, SmallJob.version), (pin_step, unpin_step, SmallJob.step)],
)
def test_what_is_pinned_stays_over_all_daemons_until_it_is_unpinned(
    job: SmallJob,
    pin: Callable[[Job, int], None],
    unpin: Callable[[Job, int], bool],
    folder: Callable[[SmallJob, int], Path],
) -> None:
    def left() -> list[int]:
        pruned(job)
        return [number for number in range(1, 5) if folder(job, number).exists()]

    published(job, 4)
    ours = Job(job.explorers, job.layout)
    pin(ours, 2)
    pin(ours, 2)
    assert left() == left() == [2, 4]
    assert unpin(ours, 2)
    assert not unpin(ours, 2)
    assert left() == [4]


def test_what_is_gone_cannot_be_pinned(job: SmallJob) -> None:
    published(job, 3)
    pruned(job)
    waited: list[float] = []
    with pytest.raises(VersionGoneError, match="v1"):
        pin_version(job, 1)
    with pytest.raises(VersionGoneError, match="v9"):
        pin_version(job, 9)
    with invalid("global_step_1"):
        pin_step(job, 1, sleep=waited.append)
    assert sum(waited) < 10
    assert not unpin_step(job, 1, sleep=waited.append)


def test_a_version_that_is_not_published_yet_is_not_pinned_by_its_lease_folder(
    job: SmallJob,
) -> None:
    published(job, 1)
    job.lease_folder(2).mkdir()
    with pytest.raises(VersionGoneError):
        pin_version(job, 2)
    assert list(job.lease_folder(2).iterdir()) == []


def test_a_power_loss_takes_no_version_whose_pin_succeeded(job: SmallJob) -> None:
    published(job, 1)
    storage = RuledStorage()
    pin_version(Job(storage, job.layout), 1)
    *_, look, sync = storage.calls  # a rename that was seen may not be on the disk yet
    assert (look[0], sync) == ("status", ("sync_folder", (job.layout.published,)))


def test_a_step_that_is_looked_into_at_this_moment_is_pinned_once_it_is_back(job: SmallJob) -> None:
    published(job, 2)
    folder, aside = job.step(1), job.root / "aside"
    folder.rename(aside)
    pin_step(job, 1, sleep=lambda _: folder.exists() or aside.rename(folder))
    assert (folder / ".pinned").exists()
    folder.rename(aside)
    assert unpin_step(job, 1, sleep=lambda _: folder.exists() or aside.rename(folder))


class Later(Exception):  # noqa: N818 - it is no error
    """Whoever pins would wait now; nothing is promised to them yet."""


def later(_: float) -> None:
    raise Later


#: Calls on an open file: they see no names and change none, so that a pin before one of them is a
#: pin before the call that comes next.
BLIND = {
    "write", "pwrite", "copy_file_range", "sendfile", "clone_range", "fsync", "close", "read_part",
    "pread", "pread_into",
}  # fmt: skip


class Counting(RuledStorage):
    """Does something of another process's before the k-th call that sees or changes names."""

    def __init__(self, moment: int) -> None:
        super().__init__()
        self.left = moment
        self.other: Any = None

    def _before(self, method: str, *given: Any) -> None:  # noqa: ARG002 - on whatever it is
        if method in BLIND:
            return
        self.left -= 1
        if self.left == 0:
            self.other()


@pytest.mark.slow
def test_a_pin_that_is_set_holds_at_whatever_moment_of_a_prune_it_came(tmp_path: Path) -> None:
    promised = {"version": 0, "step": 0}
    moment = 0
    left = 0
    while left <= 0:
        moment += 1
        job = SmallJob(tmp_path / f"job{moment}")
        published(job, 2)
        before = contents(job.version(1)), contents(job.step(1))
        storage = job.storage = Counting(0)
        pinned: set[str] = set()

        def pin(job: SmallJob = job, pinned: set[str] = pinned) -> None:
            with suppress(VersionGoneError):
                pin_version(job, 1)
                pinned.add("version")
            with suppress(Later):
                pin_step(job, 1, sleep=later)
                pinned.add("step")

        storage.other = pin
        with job.daemon(KEEP_ONE) as loop:
            storage.left = moment
            loop.run_once()
            left = storage.left
            storage.left = 0
            loop.run_once()
        pruned(job)
        for what in pinned:
            promised[what] += 1
        now = contents(job.version(1)), contents(job.step(1))
        if "version" in pinned:
            assert now[0] == before[0], f"at moment {moment}"
        if "step" in pinned:
            assert now[1] == {**before[1], ".pinned": b""}, f"at moment {moment}"
    assert min(promised.values()) > 5
    assert moment > max(promised.values())


@pytest.mark.slow
def test_a_refused_pin_never_takes_that_of_another(tmp_path: Path) -> None:
    moment = 0
    left = 0
    while left <= 0:
        moment += 1
        job = SmallJob(tmp_path / f"job{moment}")
        published(job, 1)
        job.lease_folder(2).mkdir()  # as its daemon does before it renames the version
        storage = Counting(moment)

        def pin(job: SmallJob = job) -> None:
            with job.daemon() as loop:
                loop.publish(2)
            pin_version(job, 2)

        storage.other = pin
        with suppress(VersionGoneError):
            pin_version(Job(storage, job.layout), 2)
        left, storage.left = storage.left, 0
        assert (job.lease_folder(2) / ".pinned").exists() == (left <= 0), f"at moment {moment}"
    assert moment > 2


@pytest.mark.slow
def test_a_pin_that_is_set_holds_whatever_moment_of_it_a_prune_came_at(
    tmp_path: Path, hosts: Hosts
) -> None:
    moment = 0
    left = 0
    outcomes = set()
    while left <= 0:
        moment += 1
        job = SmallJob(tmp_path / f"job{moment}", hosts=hosts)
        published(job, 2)
        storage = Counting(moment)
        storage.other = lambda job=job: pruned(job)
        done = True
        try:
            pin_version(Job(storage, job.layout), 1)
            pin_step(Job(storage, job.layout), 1, sleep=later)
        except (VersionGoneError, Later):
            done = False
        left, storage.left = storage.left, 0
        pruned(job)
        outcomes.add(done)
        if done:
            assert job.versions == ["v000001", "v000002"], f"at moment {moment}"
            assert (job.step(1) / ".pinned").exists(), f"at moment {moment}"
    assert outcomes == {True, False}
