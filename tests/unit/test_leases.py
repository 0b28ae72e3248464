import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncd.protocol.errors import VersionGoneError
from syncd.protocol.records import LONGEST_LEASE_TIME
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.judge import LOOKS_PER_LEASE, Judge, Liveness, sweep_broken
from syncd.storage.leases import Lease
from syncd.storage.sessions import DaemonLock, Session
from tests.jobs import LEASE_TIME, SmallJob
from tests.lagging import Hosts
from tests.storages import STORAGE, Clock, RuledStorage, fails, once, refuse

pytestmark = pytest.mark.lagging

LOOK = LEASE_TIME / LOOKS_PER_LEASE


def beat(path: Path) -> None:
    """What a heartbeat does: the file's times move."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


class Watched:
    """A heartbeat of a process elsewhere, and its judge."""

    def __init__(self, folder: Path, storage: Storage) -> None:
        self.path = folder / "session.lock"
        self.path.write_bytes(b"of a process elsewhere")
        self._clock = Clock()
        self.judge = Judge(storage, LEASE_TIME, clock=self._clock)

    def looks(self, times: int = 1, *, apart: float = LOOK) -> Liveness:
        """The last of some looks."""
        seen = Liveness.MISSING
        for _ in range(times):
            self._clock.advance(apart)
            seen = self.judge.look(self.path)
        return seen

    def breaks(self) -> bool:
        return self.judge.break_dead(self.path)


@pytest.fixture
def watched(tmp_path: Path, hosts: Hosts) -> Watched:
    return Watched(tmp_path, hosts.storage())


def test_a_heartbeat_that_did_not_move_for_a_lease_time_is_dead(watched: Watched) -> None:
    assert watched.looks() is Liveness.ALIVE
    assert watched.looks(LOOKS_PER_LEASE - 1) is Liveness.ALIVE
    assert watched.looks(1) is Liveness.DEAD


def test_a_heartbeat_starts_the_stopwatch_anew(watched: Watched) -> None:
    for _ in range(4):
        assert watched.looks(LOOKS_PER_LEASE) is Liveness.ALIVE
        beat(watched.path)
    assert watched.looks(1 + LOOKS_PER_LEASE) is Liveness.DEAD


def test_a_judge_who_was_paused_does_not_count_his_pause(watched: Watched) -> None:
    watched.looks()
    assert watched.looks(50, apart=LEASE_TIME) is Liveness.ALIVE
    assert watched.looks(LOOKS_PER_LEASE) is Liveness.DEAD


def test_a_clock_far_off_decides_nothing(watched: Watched) -> None:
    os.utime(watched.path, (1, 1))
    assert watched.looks(2) is Liveness.ALIVE
    os.utime(watched.path, (2**33, 2**33))
    assert watched.looks(2) is Liveness.ALIVE


def test_a_replaced_file_is_another_heartbeat(watched: Watched) -> None:
    watched.looks(LOOKS_PER_LEASE)
    STORAGE.replace(watched.path, watched.path.read_bytes())
    assert watched.looks(2) is Liveness.ALIVE


def test_a_missing_heartbeat_is_missing_and_forgotten(watched: Watched, hosts: Hosts) -> None:
    watched.looks(LOOKS_PER_LEASE)
    content = watched.path.read_bytes()
    watched.path.unlink()
    hosts.settle()
    assert watched.looks() is Liveness.MISSING
    watched.path.write_bytes(content)
    hosts.settle()
    assert watched.looks(LOOKS_PER_LEASE) is Liveness.ALIVE


def test_an_empty_heartbeat_is_judged_like_any_other(watched: Watched) -> None:
    watched.path.write_bytes(b"")
    assert watched.looks(1 + LOOKS_PER_LEASE) is Liveness.DEAD


def test_storage_that_does_not_answer_is_no_death(tmp_path: Path, hosts: Hosts) -> None:
    watched = Watched(tmp_path, hosts.ruled(refuse("open_read", errno.EIO)))
    with fails(errno.EIO):
        watched.looks()


def test_those_not_watched_any_more_begin_again(watched: Watched) -> None:
    watched.looks(LOOKS_PER_LEASE)
    watched.judge.forget_all_but(set())
    assert watched.looks(LOOKS_PER_LEASE) is Liveness.ALIVE


def test_a_session_is_there_until_it_is_closed(job: SmallJob) -> None:
    with Session(job.layout, LEASE_TIME) as one, Session(job.layout, LEASE_TIME) as two:
        assert one.id != two.id
        assert job.session(one.id).exists()
        assert job.session(two.id).exists()
    assert os.listdir(job.layout.sessions) == []


# -- breaking --------------------------------------------------------------------------------------


def test_a_dead_file_is_broken(watched: Watched) -> None:
    watched.looks(1 + LOOKS_PER_LEASE)
    assert watched.breaks()
    assert os.listdir(watched.path.parent) == []


def test_a_file_that_lives_again_is_put_back(watched: Watched) -> None:
    watched.looks(1 + LOOKS_PER_LEASE)
    beat(watched.path)
    inode = watched.path.stat().st_ino
    assert not watched.breaks()
    assert os.listdir(watched.path.parent) == [watched.path.name]
    assert watched.path.stat().st_ino == inode


def test_a_file_that_was_taken_by_another_meanwhile_is_put_back(watched: Watched) -> None:
    watched.looks(1 + LOOKS_PER_LEASE)
    STORAGE.replace(watched.path, b"another's")
    assert not watched.breaks()
    assert watched.path.read_bytes() == b"another's"


def test_a_name_taken_while_it_was_looked_at_stays_with_its_new_owner(
    tmp_path: Path, hosts: Hosts
) -> None:
    storage = hosts.ruled(once("link", lambda _, path: path.write_bytes(b"third's")))
    watched = Watched(tmp_path, storage)
    watched.looks(1 + LOOKS_PER_LEASE)
    beat(watched.path)
    assert not watched.breaks()
    assert watched.path.read_bytes() == b"third's"
    assert os.listdir(watched.path.parent) == [watched.path.name]


def test_what_was_never_looked_at_is_not_broken(watched: Watched) -> None:
    assert not watched.breaks()
    assert watched.path.exists()


def test_what_another_broke_first_is_gone(watched: Watched) -> None:
    watched.looks()
    watched.path.unlink()
    assert watched.breaks()


def test_leftovers_of_killed_breakers_are_swept_and_locks_are_not(job: SmallJob) -> None:
    for folder in (job.layout.state, job.layout.sessions, job.layout.requests):
        (folder / "x.lock.broken-abc").touch()
        (folder / "x.lock").touch()
    sweep_broken(job)
    assert not list(job.layout.state.rglob("*.broken-*"))
    assert (job.layout.sessions / "x.lock").exists()


# -- the daemon's lock -----------------------------------------------------------------------------


@pytest.fixture
def locks(job: SmallJob, clock: Clock) -> Iterator[list[DaemonLock]]:
    made = [DaemonLock(job, LEASE_TIME, Judge(STORAGE, LEASE_TIME, clock=clock)) for _ in range(2)]
    yield made
    for lock in made:
        lock.release()


def test_only_one_daemon_is_elected(locks: list[DaemonLock]) -> None:
    first, second = locks
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    assert not first.lost


def test_a_standby_takes_the_lock_of_a_dead_daemon(
    job: SmallJob, locks: list[DaemonLock], clock: Clock
) -> None:
    lock_of(job, None)
    tries = []
    for _ in range(LOOKS_PER_LEASE + 1):
        tries.append(locks[0].try_acquire())
        clock.advance(LOOK)
    assert tries == [False] * LOOKS_PER_LEASE + [True]
    assert not locks[1].try_acquire()


def lock_of(job: SmallJob, lease_time: float | None) -> None:
    """The lock of a daemon elsewhere; without a lease time it says nothing."""
    marker = "filelock/2\npid=1\nhost=elsewhere\nmode=lease\ntoken=1\nduration="
    job.layout.daemon_lock.write_text(f"{marker}{lease_time!r}\n" if lease_time else "")


@pytest.mark.parametrize(
    ("theirs", "dead_after"),
    [(3 * LEASE_TIME, 3 * LEASE_TIME), (LEASE_TIME / 3, LEASE_TIME), (1e300, LONGEST_LEASE_TIME)],
)
def test_a_lock_of_another_lease_time_is_dead_after_the_longer_of_the_two(
    job: SmallJob, locks: list[DaemonLock], clock: Clock, theirs: float, dead_after: float
) -> None:
    lock_of(job, theirs)
    began = clock.now
    while not locks[0].try_acquire():
        clock.advance(LOOK)
        assert clock.now - began <= dead_after + 2 * LOOK
    assert clock.now - began >= dead_after


@pytest.mark.parametrize(
    ("lease_time", "looks"),  # it is refreshed every third of its own lease time
    [(None, 1), (6 * LEASE_TIME, 2 * LOOKS_PER_LEASE)],
)
def test_a_lock_that_moves_is_never_taken(
    job: SmallJob, locks: list[DaemonLock], clock: Clock, lease_time: float | None, looks: int
) -> None:
    lock_of(job, lease_time)
    for _ in range(20):
        for _ in range(looks):
            assert not locks[0].try_acquire()
            clock.advance(LOOK)
        beat(job.layout.daemon_lock)


# -- leases ----------------------------------------------------------------------------------------


def test_a_lease_is_a_file_that_says_who_holds_it(job: SmallJob) -> None:
    job.lease_folder(3).mkdir()
    lease = Lease.take(job, 3, "node-1", "session-9")
    assert os.listdir(job.lease_folder(3)) == ["node-1.session-9"]
    assert lease.sequence == 3


def test_a_version_that_is_leased_cannot_be_retired_and_can_when_it_is_let_go(
    job: SmallJob,
) -> None:
    job.lease_folder(3).mkdir()
    for lease in [job.lease(3, "session", name) for name in ("one", "two")]:
        with fails(errno.ENOTEMPTY):
            STORAGE.rmdir(job.lease_folder(3))
        lease.release()
        lease.release()
    STORAGE.rmdir(job.lease_folder(3))


def test_a_retired_version_cannot_be_leased_and_its_folder_does_not_come_back(
    job: SmallJob,
) -> None:
    with pytest.raises(VersionGoneError, match=r"v3 of .* was pruned before node leased"):
        job.lease(3, "session", "node")
    assert not job.lease_folder(3).exists()


def test_the_same_session_may_lease_twice(job: SmallJob) -> None:
    job.lease_folder(3).mkdir()
    job.lease(3, "session")
    job.lease(3, "session").release()
    assert os.listdir(job.lease_folder(3)) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ESTALE])
def test_a_version_is_gone_by_a_stale_handle_and_not_by_a_full_disk(
    job: SmallJob, hosts: Hosts, code: int
) -> None:
    job.lease_folder(3).mkdir()
    storage = hosts.ruled(refuse("create", code))
    with fails(code) if code == errno.ENOSPC else pytest.raises(VersionGoneError):
        Lease.take(Job(storage, job.layout), 3, "node", "session")


def test_a_lease_is_released_though_the_job_was_unmounted_for_one_look(job: SmallJob) -> None:
    storage, leases = RuledStorage(), job.layout.leases
    away = leases.with_name("unmounted")
    storage.rules += [
        once("unlink", lambda *_: leases.rename(away), where="leases"),
        once("status", lambda *_: away.rename(leases), where="leases"),
    ]
    (leases / "v000001").mkdir(parents=True)
    Lease.take(Job(storage, job.layout), 1, "explorer", "s").release()
    assert list((leases / "v000001").iterdir()) == []
