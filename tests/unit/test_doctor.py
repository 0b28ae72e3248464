"""Each promise that storage may break is found by its probe, and named.

The second process is a thread with a storage of its own: the client of another host.
"""

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from syncd.doctor import examination
from syncd.doctor.examination import (
    Deadlines,
    Examination,
    Facts,
    facts_of,
    join,
    judge_hosts,
    judge_mount,
    serve,
)
from syncd.doctor.finding import Finding, Severity, fail
from syncd.doctor.probes import PROBES, BrokenError, Pair, lease_verdict
from syncd.doctor.sides import TALK, Channel, Here, ProbeCall, Request, There
from syncd.protocol.errors import JobUnavailableError
from syncd.storage.calls import Free
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.probe_room import ProbeRoom
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.lagging import LaggingStorage
from tests.storages import FastStorage

PATIENCE = 60.0
OK, WARN, FAIL = Severity.OK, Severity.WARN, Severity.FAIL


@contextmanager
def company(ours: Storage, theirs: Storage, room: Path) -> Iterator[Pair]:
    """This process, and a thread that has another client."""
    (room / TALK).mkdir()
    visitor = Channel(theirs, room, "visitor", "from")
    thread = threading.Thread(target=serve, args=(visitor, Here(theirs, room), PATIENCE))
    thread.start()
    there = There(Channel(ours, room, "visitor", "to"), PATIENCE)
    try:
        yield Pair(Here(ours, room), there, limit=1.0, lease_time=30.0)
    finally:
        there.begin(Request())
        thread.join(PATIENCE)


def measured(pair: Pair, room: Path, name: str) -> Finding:
    """A probe's finding; an unexpected result outside the promise is a failure too."""
    (room / name).mkdir()
    try:
        return PROBES[name](pair)
    except BrokenError as error:
        return fail(name, str(error), "as the run has it")


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


class NoRefresh(LaggingStorage):
    """Forgets nothing."""

    def __init__(self, mount: Path) -> None:
        super().__init__(mount, time.monotonic)

    def utime(self, path: Path) -> None:
        if TALK in path.parts:
            super().utime(path)


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


BROKEN: list[tuple[str, Callable[[], Storage] | type[NoRefresh]]] = [
    ("rename", Merging),
    ("rmdir", GreedyRmdir),
    ("rmdir", Resurrecting),
    ("links", lambda: Refusing(errno.EPERM, "link")),
    ("sync", lambda: Refusing(errno.EINVAL, "sync_folder")),
    ("sync", lambda: Refusing(errno.EIO, "fsync")),
    ("shared", lambda: Refusing(errno.EACCES, "unlink")),
    ("exclusive", SharedMkdir),
    ("exclusive", SharedCreate),
    ("exclusive", SharedLink),
    ("exclusive", NoMkdir),
    ("replace", TwoStepRename),
    ("replace", CopiedRename),
    ("leases", GreedyRmdir),
    ("refresh", GreedyRmdir),
    ("refresh", NoRefresh),
    ("fence", Resurrecting),
    ("open", NoCto),
    ("lease_time", NoCto),
    ("lease_time", Restless),
    ("lease_time", Timeless),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_each_broken_promise_between_two_clients_is_found_and_named(
    tmp_path: Path, name: str, broken: Callable[[], Storage] | type[NoRefresh]
) -> None:
    ours, theirs = (NoRefresh(tmp_path) if broken is NoRefresh else broken() for _ in range(2))
    with company(ours, theirs, tmp_path) as pair:
        finding = measured(pair, tmp_path, name)
    assert (finding.name, finding.verdict) == (name, FAIL), finding
    assert finding.words
    assert finding.advice


@pytest.mark.slow
def test_a_local_disk_keeps_every_promise_between_two_clients(tmp_path: Path) -> None:
    with company(Storage(), Storage(), tmp_path) as pair:
        for name in PROBES:
            finding = measured(pair, tmp_path, name)
            # A disk with much else to do may take its time to sync.
            assert finding.verdict in ({OK, WARN} if name == "sync" else {OK}), finding


def test_a_client_that_only_lags_keeps_every_promise(tmp_path: Path) -> None:
    ours, theirs = (LaggingStorage(tmp_path, time.monotonic) for _ in range(2))
    with company(ours, theirs, tmp_path) as pair:
        for name in ("rename", "rmdir", "shared", "exclusive", "refresh", "fence", "leases"):
            finding = measured(pair, tmp_path, name)
            assert finding.verdict is OK, finding


# -- what is measured, judged ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "lease_time", "verdict"),
    [
        (0.01, 30.0, OK),
        (5.0, 30.0, OK),
        (5.1, 30.0, WARN),
        (10.1, 30.0, FAIL),
        (math.inf, 30.0, FAIL),
        (5.1, 300.0, OK),
    ],
)
def test_the_lease_time_is_held_against_what_was_measured(
    late: float, lease_time: float, verdict: Severity
) -> None:
    finding = lease_verdict(late, 30.0, lease_time)
    assert finding.verdict is verdict
    if verdict is not OK:
        needed = float(finding.advice.rpartition(" ")[2])
        assert lease_verdict(min(late, 60.0), 30.0, needed).verdict is OK


def facts(**changed: Any) -> Facts:
    return Facts(
        host="one", boot="a", syncd="1", filesystem="nfs4", source="server:/", options="rw,hard"
    ).model_copy(update=changed)


@pytest.mark.parametrize(
    ("finding", "verdict", "said"),
    [
        (judge_mount(facts()), OK, "nfs4 from server:/"),
        (judge_mount(facts(options="rw,soft")), WARN, "soft"),
        (judge_mount(facts(options="rw,nocto")), WARN, "nocto"),
        (judge_mount(facts(options="ro")), FAIL, "read-only"),
        (judge_hosts(facts(), facts(host="two", boot="b")), OK, "one and two"),
        (judge_hosts(facts(), facts()), WARN, "one host"),
        (judge_hosts(facts(), facts(options="clientaddr=two")), OK, "one and one"),
        (judge_hosts(facts(), facts(boot="b")), WARN, "both called one"),
        (judge_hosts(facts(), facts(host="two", boot="b", syncd="2")), WARN, "2 on two"),
        (
            judge_hosts(facts(), facts(host="two", boot="b", filesystem="xfs")),
            WARN,
            "nfs4 here, xfs on two",
        ),
    ],
)
def test_what_was_seen_is_judged_and_said(finding: Finding, verdict: Severity, said: str) -> None:
    assert finding.verdict is verdict
    assert said in finding.words
    assert bool(finding.advice) == (verdict is not OK)


@pytest.mark.parametrize(
    ("free", "newest", "verdict"),
    [
        (Free(10**12, 10**6), 10**9, OK),
        (Free(None, None), 0, OK),
        (Free(10**9, 10**6), 10**9, WARN),
        (Free(10**9, 999), 0, WARN),
        (Free(1000, 10**6), 0, FAIL),
        (Free(10**9, 3), 0, FAIL),
    ],
)
def test_room_is_for_two_more_versions(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, free: Free, newest: int, verdict: Severity
) -> None:
    monkeypatch.setattr(FastStorage, "free", lambda *_: free)
    monkeypatch.setattr(examination, "_newest", lambda _: newest)
    assert examination.judge_room(job).verdict is verdict


def test_the_newest_version_is_the_measure_of_room(job: SmallJob) -> None:
    publish(job, 1)
    assert "the newest version has" in examination.judge_room(job).words


def test_who_makes_files_for_another_user_or_cannot_prune_is_warned(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    squashed = examination.judge_rights(Job(Squashing(), job.layout), job.layout.state)
    assert squashed.verdict is WARN
    assert "belongs to 65534" in squashed.words
    monkeypatch.setattr(examination, "unprunable", lambda _: "steps stay")
    kept = examination.judge_rights(job, job.layout.state)
    assert (kept.verdict, kept.words) == (WARN, "steps stay")


def test_the_mount_of_a_folder_is_the_kernels() -> None:
    assert facts_of(Path("/proc/self")).filesystem == "proc"
    assert facts_of(Path("/")).source


# -- all of it -------------------------------------------------------------------------------------


def examined(job: SmallJob, storage: Storage, limits: Deadlines) -> list[Finding]:
    """All probes, with a thread for the other process."""

    @contextmanager
    def made(room: ProbeRoom) -> Iterator[Callable[[], bool]]:
        ended = threading.Event()

        def visit() -> None:
            with suppress(JobUnavailableError):  # the run was cut short
                join(job, limits, room.path.name, ended.is_set)

        thread = threading.Thread(target=visit)
        thread.start()
        try:
            yield lambda: False
        finally:
            ended.set()
            thread.join(PATIENCE)

    examination = Examination(Job(storage, job.layout), limits, lambda _: None, lambda _: None)
    return examination.run(made)


def everything(job: SmallJob) -> dict[str, tuple[int, int]]:
    entries = {}
    for path in sorted(job.root.rglob("*")):
        status = path.lstat()
        entries[str(path)] = status.st_ino, status.st_mtime_ns
    return entries


@pytest.mark.slow
def test_an_error_of_storage_is_a_finding_and_the_other_probes_go_on(job: SmallJob) -> None:
    job.save(1)
    before = everything(job)
    findings = examined(job, Refusing(errno.EIO, "sync_folder", "free", "link"), Deadlines())
    failed = [finding.name for finding in findings if finding.verdict is FAIL]
    assert failed == ["room", "links", "sync", "exclusive"]
    assert {"fence", "lease_time"} <= {finding.name for finding in findings}
    after = everything(job)
    # The folder that its own was in has other times; nothing else is touched.
    assert before.pop(str(job.layout.state))[0] == after.pop(str(job.layout.state))[0]
    assert after == before


def test_a_server_that_takes_no_writes_is_one_finding(job: SmallJob) -> None:
    findings = examined(job, Refusing(errno.EROFS, "mkdir"), Deadlines(look=1))
    [failed] = [finding for finding in findings if finding.verdict is FAIL]
    assert failed.name == "rights"
    assert "export it for writing" in failed.advice


@pytest.mark.slow
def test_storage_that_hangs_is_a_finding_and_the_end(job: SmallJob) -> None:
    class Hanging(FastStorage):
        goes_on = threading.Event()

        def sync_folder(self, path: Path) -> None:
            if path.name == "sync":
                self.goes_on.wait(PATIENCE)

        def rename(self, source: Path, target: Path) -> None:
            if target.parent == job.layout.doctor:
                self.goes_on.wait(PATIENCE)
            super().rename(source, target)

    try:
        findings = examined(job, Hanging(), Deadlines(look=1, answer=4))
    finally:
        Hanging.goes_on.set()
    last = [(finding.name, finding.verdict) for finding in findings[-2:]]
    assert last == [("cleanup", WARN), ("sync", FAIL)]
    assert "did not answer within 10 s" in findings[-1].words


@pytest.mark.slow
def test_storage_that_hangs_on_the_other_host_is_a_finding_there(job: SmallJob) -> None:
    class Hanging(FastStorage):
        goes_on = threading.Event()

        def names(self, path: Path) -> list[str]:
            if path == job.layout.doctor:
                self.goes_on.wait(PATIENCE)
            return super().names(path)

    job.layout.doctor.mkdir()
    limits = Deadlines(look=0.5, answer=0.5, meeting=0.5)
    try:
        [finding] = join(Job(Hanging(), job.layout), limits)
        assert not Hanging.goes_on.is_set()
    finally:
        Hanging.goes_on.set()
    assert (finding.name, finding.verdict) == ("hosts", FAIL)


def test_a_job_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    job = Job.at(tmp_path / "nothing")
    with pytest.raises(JobUnavailableError, match="no such folder"):
        Examination(job, Deadlines(), lambda _: None, lambda _: None).run(None)
    assert not job.layout.root.exists()


def test_who_measures_with_another_that_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / TALK).mkdir()
    there = There(Channel(FastStorage(), tmp_path, "visitor", "to", lambda: True), PATIENCE)
    with pytest.raises(JobUnavailableError, match="has ended"):
        there.ask(ProbeCall(do="names", name="folder"))


def test_a_call_that_fails_elsewhere_leaves_the_next_one_its_own_answer(tmp_path: Path) -> None:
    class Failing(FastStorage):
        def open_read(self, path: Path) -> int:
            if path.name == "file":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return super().open_read(path)

    call = ProbeCall(do="reread", name="file", seconds=0.1)
    with company(FastStorage(), Failing(), tmp_path) as pair:
        assert pair.there.ask(call).text == "EIO"
        pair.there.begin(Request(call=call))  # its answer is not waited for
        assert pair.there.ask(ProbeCall(do="mkdir", name="folder")).text == "done"
        assert pair.here.ask(ProbeCall(do="names", name="folder")).text == ""


def test_nothing_outside_the_room_can_be_asked_for() -> None:
    for name in ("../outside", "/outside", "a/../../outside"):
        with pytest.raises(ValueError, match="not a plain path"):
            ProbeCall(do="create", name=name)
