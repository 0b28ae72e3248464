"""Each promise that storage may break is found by its probe, and named.

The second process is a thread with a storage of its own: the client of another host.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from syncd.doctor import alone, job_probes, job_verdicts, together, verdicts
from syncd.doctor.channel import TALK, Channel, There, serve
from syncd.doctor.examination import Deadlines, Examination, Watching, join
from syncd.doctor.facts import facts_of, mount_of
from syncd.doctor.finding import Finding, Severity
from syncd.doctor.party import Here, Party
from syncd.doctor.party_calls import Facts, PartyCall
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.probe_room import ProbeRoom
from tests.jobs import SmallJob
from tests.lagging import LaggingStorage
from tests.storages import FastStorage

PATIENCE = 60.0
OK, WARN, FAIL = Severity.OK, Severity.WARN, Severity.FAIL


@contextmanager
def company(ours: Storage, theirs: Storage, room: Path) -> Iterator[tuple[Party, Party]]:
    """This process, and a thread that has another client."""
    if not (room / TALK).exists():
        (room / TALK).mkdir()
    them = Here(theirs, room, lambda: facts_of(room))
    thread = threading.Thread(
        target=serve, args=(Channel(theirs, room, 1, 0), them), kwargs={"idle": PATIENCE}
    )
    thread.start()
    there = There(Channel(ours, room, 0, 1), PATIENCE)
    here = Here(ours, room, lambda: facts_of(room))
    try:
        yield here, there
    finally:
        here.close()
        there.dismiss(())
        thread.join(PATIENCE)


def together_on(
    tmp_path: Path, make: Callable[[], Storage], probe: Callable[[tuple[Party, Party], str], Any]
) -> list[Finding]:
    """What a probe finds where both clients are alike."""
    with company(make(), make(), tmp_path) as pair:
        (tmp_path / "probe").mkdir()
        found = probe(pair, "probe")
    return found if isinstance(found, list) else [found]


def verdicts_of(findings: Sequence[Finding]) -> dict[str, Severity]:
    return {finding.name: finding.verdict for finding in findings}


def seen(pair: tuple[Party, Party], room: str) -> list[Finding]:
    return together.seen(pair, room, 1.0, 30.0)


PAIRS: dict[str, Callable[[tuple[Party, Party], str], Any]] = {
    "exclusive": together.exclusive,
    "replace": together.replaced,
    "open": seen,
    "lease_time": seen,
    "refresh": together.asked,
    "fence": together.fence,
    "leases": together.leases,
    "shared": together.shared,
    "events": together.events,
    "memory": lambda pair, room: together.remembered(pair, room, 1.0),
}


# -- storage that breaks a promise -----------------------------------------------------------------


class SharedMkdir(FastStorage):
    """Says yes to everybody who makes a folder."""

    def mkdir(self, path: Path) -> None:
        os.makedirs(path, exist_ok=True)


class SharedCreate(FastStorage):
    """Knows no O_EXCL, as NFS 2."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


class SharedLink(FastStorage):
    """Replaces what has the name."""

    def link(self, source: Path, target: Path) -> None:
        try:
            super().link(source, target)
        except FileExistsError:
            pass


class NoMkdir(FastStorage):
    """Gives a name to nobody: the answer to a call that was done got lost."""

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        if path.name.startswith("mkdir-"):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


class TwoStepRename(FastStorage):
    """Removes what is replaced, and renames then, as some object stores."""

    def rename(self, source: Path, target: Path) -> None:
        if target.is_file():
            target.unlink()
            time.sleep(0.001)
        super().rename(source, target)


class CopiedRename(FastStorage):
    """Copies into the place of what is replaced."""

    def rename(self, source: Path, target: Path) -> None:
        if not source.is_file():
            return super().rename(source, target)
        with target.open("wb", buffering=0) as file:
            content = source.read_bytes()
            file.write(content[: len(content) // 2])
            time.sleep(0.001)
            file.write(content[len(content) // 2 :])
        source.unlink()
        return None


class GreedyRmdir(FastStorage):
    """Removes what is in a folder too."""

    def rmdir(self, path: Path) -> None:
        if not path.is_dir():
            return super().rmdir(path)
        shutil.rmtree(path)
        return None


class Resurrecting(FastStorage):
    """Finds by an old handle what is gone by its name."""

    def rename(self, source: Path, target: Path) -> None:
        try:
            super().rename(source, target)
        except FileNotFoundError:
            target.mkdir()

    def create(self, path: Path) -> int:
        path.parent.mkdir(exist_ok=True)
        return super().create(path)


class NoCto(FastStorage):
    """Believes what it has once opened, and what it once heard of it."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, tuple[int, os.stat_result]] = {}
        self._given: dict[int, os.stat_result] = {}

    def open_read(self, path: Path) -> int:
        if TALK in path.parts:
            return super().open_read(path)
        if path not in self._opened:
            fd = super().open_read(path)
            self._opened[path] = fd, os.fstat(fd)
        fd, status = self._opened[path]
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._given[again] = status
        return again

    def fstat(self, fd: int) -> os.stat_result:
        return self._given.get(fd) or super().fstat(fd)

    def release(self, fd: int) -> None:
        self._given.pop(fd, None)
        super().release(fd)

    def __del__(self) -> None:
        for fd, _ in self._opened.values():
            os.close(fd)


class NoRefresh:
    """Makes clients that forget nothing."""

    def __init__(self, mount: Path) -> None:
        self._mount = mount

    def __call__(self) -> Storage:
        class Client(LaggingStorage):
            def utime(self, path: Path) -> None:
                if TALK in path.parts:
                    super().utime(path)

        return Client(self._mount, time.monotonic)


BROKEN: list[tuple[str, Callable[[Path], Callable[[], Storage]]]] = [
    ("exclusive", lambda _: SharedMkdir),
    ("exclusive", lambda _: SharedCreate),
    ("exclusive", lambda _: SharedLink),
    ("exclusive", lambda _: NoMkdir),
    ("replace", lambda _: TwoStepRename),
    ("replace", lambda _: CopiedRename),
    ("leases", lambda _: GreedyRmdir),
    ("refresh", lambda _: GreedyRmdir),
    ("refresh", NoRefresh),
    ("fence", lambda _: Resurrecting),
    ("open", lambda _: NoCto),
    ("lease_time", lambda _: NoCto),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_each_broken_promise_between_two_clients_is_found_and_named(
    tmp_path: Path, name: str, broken: Callable[[Path], Callable[[], Storage]]
) -> None:
    found = together_on(tmp_path, broken(tmp_path), PAIRS[name])
    finding = next(one for one in found if one.name == name)
    assert finding.verdict is FAIL, finding
    assert finding.words
    assert finding.advice


def test_a_local_disk_keeps_every_promise_between_two_clients(tmp_path: Path) -> None:
    with company(FastStorage(), FastStorage(), tmp_path) as pair:
        for name, probe in PAIRS.items():
            (tmp_path / name).mkdir()
            found = probe(pair, name)
            for finding in found if isinstance(found, list) else [found]:
                # Events may be late on a machine with much else to do.
                assert finding.verdict in ({OK, WARN} if name == "events" else {OK}), finding


def test_a_client_that_only_lags_keeps_every_promise_and_is_said_to_lag(tmp_path: Path) -> None:
    def lagging() -> Storage:
        return LaggingStorage(tmp_path, time.monotonic)

    with company(lagging(), lagging(), tmp_path) as pair:
        for name in ("exclusive", "refresh", "fence", "leases", "memory"):
            (tmp_path / name).mkdir()
            finding = PAIRS[name](pair, name)
            assert finding.verdict is OK, finding
    assert "a new name more than 1 s late" in finding.words


# -- storage that breaks a promise to one process --------------------------------------------------


class Refusing(FastStorage):
    """Refuses some calls."""

    def __init__(self, code: int, *methods: str) -> None:
        super().__init__()

        def refuse(*_: object) -> Any:
            raise OSError(code, os.strerror(code))

        for method in methods:
            setattr(self, method, refuse)


class Restless(FastStorage):
    """Has another inode number for a file each time."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def fstat(self, fd: int) -> os.stat_result:
        self._next += 1
        found = list(super().fstat(fd))
        found[1] += self._next
        return os.stat_result(found)


class Timeless(FastStorage):
    """Lets nobody set times."""

    def utime(self, path: Path) -> None:
        pass


class Squashing(FastStorage):
    """Gives all that is made to one user."""

    def status(self, path: Path) -> os.stat_result | None:
        found = super().status(path)
        if found is None:
            return None
        return os.stat_result([*found[:4], 65534, *found[5:10]])


class Merging(FastStorage):
    """Renames a folder onto another by moving what is in it."""

    def rename(self, source: Path, target: Path) -> None:
        if target.is_dir():
            shutil.rmtree(target)
        super().rename(source, target)


def rename(storage: Storage, room: Path) -> Finding:
    return alone.rename(Here(storage, room, lambda: facts_of(room)))


def rmdir(storage: Storage, room: Path) -> Finding:
    return alone.rmdir(Here(storage, room, lambda: facts_of(room)))


def links(storage: Storage, room: Path) -> Finding:
    return alone.links(Here(storage, room, lambda: facts_of(room)))


def heartbeats(storage: Storage, room: Path) -> Finding:
    return alone.heartbeats(storage, room, 3.0)


ALONE: dict[str, Callable[[Storage, Path], Finding]] = {
    "rename": rename,
    "rmdir": rmdir,
    "links": links,
    "sync": alone.sync,
    "copying": alone.copying,
    "heartbeats": heartbeats,
    "owner": alone.owner,
}


@pytest.mark.parametrize("name", ALONE)
def test_a_local_disk_keeps_every_promise_to_one_process(tmp_path: Path, name: str) -> None:
    finding = ALONE[name](Storage(), tmp_path)
    # A disk with much else to do may take its time to sync.
    allowed = {OK, WARN} if name == "sync" else {OK}
    assert finding.name == name
    assert finding.verdict in allowed, finding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "storage", "verdict", "said"),
    [
        ("rename", Merging(), FAIL, "onto a folder that holds something succeeded"),
        ("rmdir", GreedyRmdir(), FAIL, "rmdir of a folder that holds something succeeded"),
        ("rmdir", Resurrecting(), FAIL, "making a file in a removed folder succeeded"),
        ("links", Refusing(errno.EPERM, "link"), FAIL, "EPERM"),
        ("sync", Refusing(errno.EINVAL, "sync_folder"), FAIL, "fsync of a folder: EINVAL"),
        ("sync", Refusing(errno.EIO, "fsync"), FAIL, "fsync of a file: EIO"),
        ("copying", Refusing(errno.EXDEV, "copy_file_range", "clone_range"), OK, "EXDEV"),
        ("heartbeats", Restless(), FAIL, "would count as alive forever"),
        ("heartbeats", Timeless(), FAIL, "would count as dead"),
        ("owner", Squashing(), WARN, "belongs to user 65534"),
    ],
)
def test_each_broken_promise_to_one_process_is_found_and_named(
    tmp_path: Path, name: str, storage: Storage, verdict: Severity, said: str
) -> None:
    finding = ALONE[name](storage, tmp_path)
    assert (finding.name, finding.verdict) == (name, verdict), finding
    assert said in finding.words
    assert bool(finding.advice) == (verdict is not OK)


# -- what is measured, judged ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "lease_time", "verdict"),
    [
        ((0.0, 0.01), 30.0, OK),
        ((0.0, 5.0), 30.0, OK),
        ((0.0, 5.1), 30.0, WARN),
        ((10.1, 0.0), 30.0, FAIL),
        ((0.0, None), 30.0, FAIL),
        ((0.0, 5.1), 300.0, OK),
    ],
)
def test_the_lease_time_is_held_against_what_was_measured(
    late: tuple[float | None, ...], lease_time: float, verdict: Severity
) -> None:
    opened, lease = verdicts.seen((0.0, 0.0), late, 30.0, lease_time)
    assert (opened.verdict, lease.verdict) == (OK, verdict)
    if verdict is not OK:
        told = float(lease.advice.rpartition(" ")[2])
        again = verdicts.seen((0.0, 0.0), late, 30.0, told)[1]
        assert again.verdict is OK or None in late


def test_a_race_without_a_winner_or_with_two_is_no_race() -> None:
    fair = verdicts.race({"mkdir": [(0, 2), (1,)]}, 3, {})
    two = verdicts.race({"mkdir": [(0, 1), (1, 2)]}, 3, {})
    none = verdicts.race({"mkdir": [(0,), (1,)]}, 3, {"EIO": 1})
    assert [found.verdict for found in (fair, two, none)] == [OK, FAIL, FAIL]
    assert "in two processes, 1 of 3" in two.words
    assert "in no process, 1 of 3 times (EIO)" in none.words


def facts(**changed: Any) -> Facts:
    found = Facts(
        host="one", boot="a", user=1, group=1, groups=(1,), umask="0022", syncd="1",
        python="3.11.2", torch="2.6.0", kernel="6", filesystem="nfs4",
        source="server:/", options="rw,hard",
    )  # fmt: skip
    return found.model_copy(update=changed)


@pytest.mark.parametrize(
    ("finding", "verdict", "said"),
    [
        (job_verdicts.mount(facts()), OK, "nfs4 from server:/"),
        (job_verdicts.mount(facts(options="rw,soft")), WARN, "soft"),
        (job_verdicts.mount(facts(options="rw,nocto")), WARN, "nocto"),
        (job_verdicts.mount(facts(options="ro")), FAIL, "read-only"),
        (job_verdicts.software(facts()), OK, "torch 2.6.0"),
        (job_verdicts.software(facts(torch=None)), OK, "torch is not installed"),
        (job_verdicts.software(facts(torch="2.5.1+cpu")), WARN, "torch 2.5.1"),
        (job_verdicts.hosts(facts(), facts(host="two", boot="b"), 0.01), OK, "10 ms"),
        (job_verdicts.hosts(facts(), facts(), 0.01), WARN, "one host"),
        (job_verdicts.hosts(facts(), facts(options="clientaddr=two"), 0.01), OK, "10 ms"),
        (job_verdicts.hosts(facts(), facts(boot="b"), 0.01), WARN, "both called one"),
        (
            job_verdicts.hosts(facts(), facts(host="two", boot="b", syncd="2"), 0.01),
            WARN,
            "syncd 1 here, 2 there",
        ),
        (
            job_verdicts.hosts(facts(), facts(host="two", boot="b", filesystem="xfs"), 0.01),
            WARN,
            "nfs4 here, xfs there",
        ),
        (job_verdicts.room(10**12, 10**6, 10**9), OK, "1000.0 GB"),
        (job_verdicts.room(None, None, None), OK, "unknown"),
        (job_verdicts.room(10**9, 10**6, 10**9), WARN, "nearly full"),
        (job_verdicts.room(10**9, 999, None), WARN, "nearly full"),
        (job_verdicts.room(1000, 10**6, None), FAIL, "full"),
        (job_verdicts.room(10**9, 3, None), FAIL, "full"),
        (job_verdicts.clock(0.1, 10, 2.0), OK, "evenly"),
        (job_verdicts.clock(-3.0, 10, 2.0), WARN, "-3.0 s"),
        (job_verdicts.clock(0.0, 10, 90.0), WARN, "+90 s"),
        (job_verdicts.daemon(True, "watching", 5, 30, "/job"), OK, "watching"),
        (job_verdicts.daemon(None, "", 0, 30, "/job"), WARN, "no daemon serves"),
        (job_verdicts.daemon(False, "", 30, 30, "/job"), WARN, "has not moved for 30 s"),
        (job_verdicts.daemon(False, "", 30, 600, "/job"), OK, "not watched long enough"),
        (job_verdicts.others([("/job", 0o755, 7, 8)]), OK, "nobody else"),
        (job_verdicts.others([("/job", 0o2775, 7, 8)]), OK, "group 8 can write"),
        (job_verdicts.others([("/job", 0o777, 7, 8)]), WARN, "every user"),
        (job_verdicts.others([("/job", 0o1777, 7, 8)]), WARN, "delete only their own files"),
        (job_verdicts.others([]), WARN, "could be examined"),
        (job_verdicts.rights(None, None, "", facts()), OK, "user 1"),
        (job_verdicts.rights("it is refused", None, "", facts()), FAIL, "it is refused"),
        (job_verdicts.rights(None, "steps stay", "be root", facts()), WARN, "steps stay"),
        (verdicts.sync(2.0, 0.1, {}), WARN, "slow"),
        (verdicts.events((0.0, None), two_hosts=True), OK, "do not cross"),
        (verdicts.events((0.0, None), two_hosts=False), WARN, "no file events"),
    ],
)
def test_what_was_seen_is_judged_and_said(finding: Finding, verdict: Severity, said: str) -> None:
    assert finding.verdict is verdict
    assert said in finding.words
    assert bool(finding.advice) == (verdict is not OK)


def test_a_clock_that_is_set_meanwhile_is_noticed(tmp_path: Path) -> None:
    walls = iter((1000.0, 1010.0, 1500.0))
    ticks = iter((10.0, 20.0))
    probe = job_probes.ClockProbe(lambda: next(walls), lambda: next(ticks))
    assert probe.find(FastStorage(), tmp_path).measured["jumped"] == 490.0


def test_the_mount_of_a_folder_is_the_kernels() -> None:
    assert mount_of(Path("/proc/self")).kind == "proc"
    assert mount_of(Path("/")).source


# -- all of it -------------------------------------------------------------------------------------


class Listening(Watching):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begins(self, what: str) -> None:
        self.seen.append(what)


def examined(job: SmallJob, storage: Storage, limits: Deadlines) -> list[Finding]:
    """All probes, with a thread for the other process."""

    @contextmanager
    def made(room: ProbeRoom) -> Iterator[tuple[Party]]:
        with company(storage, FastStorage(), room.path) as (_, there):
            yield (there,)

    examination = Examination(Job(storage, job.layout), Listening(), limits)
    return examination.run(made, two_hosts=False)


def everything(job: SmallJob) -> dict[str, tuple[int, int]]:
    found = {}
    for path in sorted(job.layout.root.rglob("*")):
        status = path.lstat()
        found[str(path)] = status.st_ino, status.st_mtime_ns
    return found


def test_an_error_of_storage_is_a_finding_and_the_other_probes_go_on(job: SmallJob) -> None:
    job.save(1)
    before = everything(job)
    found = examined(job, Refusing(errno.EIO, "sync_folder", "free", "link"), Deadlines())
    assert [one.name for one in found if one.verdict is FAIL] == [
        "room",
        "links",
        "sync",
    ]
    assert {"fence", "lease_time", "clock", "daemon"} <= set(verdicts_of(found))
    after = everything(job)
    # The folder that its own was in has other times; nothing else is touched.
    assert before.pop(str(job.layout.state))[0] == after.pop(str(job.layout.state))[0]
    assert after == before


def test_a_server_that_takes_no_writes_is_one_finding(job: SmallJob) -> None:
    findings = examined(job, Refusing(errno.EROFS, "mkdir"), Deadlines(look=1))
    [failed] = [finding for finding in findings if finding.verdict is FAIL]
    assert failed.name == "mount"
    assert "export it for writing" in failed.advice


@pytest.mark.slow
def test_storage_that_hangs_is_a_finding_and_the_end(job: SmallJob) -> None:
    class Hanging(FastStorage):
        goes_on = threading.Event()

        def sync_folder(self, path: Path) -> None:
            if path.name == "sync":
                self.goes_on.wait(PATIENCE)

    try:
        found = examined(job, Hanging(), Deadlines(look=1, answer=4))
    finally:
        Hanging.goes_on.set()
    assert [(one.name, one.verdict) for one in found[-2:]] == [("cleanup", WARN), ("sync", FAIL)]
    assert "did not answer within 10 s" in found[-1].words


@pytest.mark.slow
def test_storage_that_hangs_on_the_other_host_is_a_finding_there(job: SmallJob) -> None:
    class Hanging(FastStorage):
        goes_on = threading.Event()

        def names(self, path: Path) -> list[str]:
            if path == job.layout.doctor:
                self.goes_on.wait(PATIENCE)
            return super().names(path)

    job.layout.doctor.mkdir()
    try:
        found = join(
            Job(Hanging(), job.layout), Watching(), Deadlines(look=0.5, answer=0.5, meeting=0.5)
        )
        assert not Hanging.goes_on.is_set()
    finally:
        Hanging.goes_on.set()
    assert [(one.name, one.verdict) for one in found] == [("hosts", FAIL)]


def test_a_job_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    layout = JobLayout(tmp_path / "nothing")
    with pytest.raises(JobUnavailableError, match="no such folder"):
        Examination(Job(Storage(), layout), Watching(), Deadlines()).alone()
    assert not layout.root.exists()


def test_who_measures_with_another_that_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / TALK).mkdir()
    there = There(Channel(FastStorage(), tmp_path, 0, 1), PATIENCE, lambda: True)
    there.begin(PartyCall(do="tell"))
    with pytest.raises(JobUnavailableError, match="has ended"):
        there.end()


def test_a_call_that_fails_elsewhere_leaves_the_next_one_its_own_answer(tmp_path: Path) -> None:
    class Failing(FastStorage):
        def open_read(self, path: Path) -> int:
            if path.name == "file":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return super().open_read(path)

    with company(FastStorage(), Failing(), tmp_path) as (here, there):
        there.begin(PartyCall(do="reread", name="file", seconds=0.1))
        with pytest.raises(OSError, match="the other process failed"):
            there.end()
        there.begin(
            PartyCall(do="reread", name="file", seconds=0.1)
        )  # its answer is not waited for
        assert there.attempt("mkdir", "folder") == "done"
        assert here.see("listing", "folder") == ""


def test_nothing_outside_the_room_can_be_asked_for() -> None:
    for name in ("../outside", "/outside", "a/../../outside"):
        with pytest.raises(ValueError, match="not a plain path"):
            PartyCall(do="attempt", change="create", name=name)
