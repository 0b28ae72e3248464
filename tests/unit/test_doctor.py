"""Each promise that storage may break is found by its probe, and named.

The second process is a thread with a storage of its own: the client of another host.
"""

import errno
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from syncd.doctor import examination, probes
from syncd.doctor.examination import PEER, Examination, Facts, facts_of, judge_hosts, judge_mount
from syncd.doctor.finding import SHARE, Finding, Verdict
from syncd.doctor.probes import PROBES, judge_race, lease_verdict, measure
from syncd.doctor.sides import TALK, Actor, BrokenError, Channel
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.layout import JobLayout
from syncd.storage.calls import Free
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.probe_room import ProbeRoom
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.lagging import LaggingStorage
from tests.multiprocess.test_doctor import everything
from tests.storages import FastStorage, Rule, RuledStorage, once, refuse

PATIENCE = 60.0


def measured(root: Path, ours: Storage, theirs: Storage, *names: str) -> list[Finding]:
    """What some probes find, between this process and a thread that has another client."""
    ProbeRoom.make(Job.at(root), "room")
    (JobLayout(root).doctor / "room" / TALK).mkdir()

    def findings_of(storage: Storage, *, is_run: bool) -> list[Finding]:
        room = ProbeRoom(Job.at(root, storage), "room")
        channel = Channel(room, "visitor", is_run, PATIENCE, limit=1.0, lease_time=30.0)
        channel.filesystem = "fuse.juicefs"
        return [measure(name, channel) for name in names]

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(findings_of, theirs, is_run=False)
        findings = findings_of(ours, is_run=True)
    assert there.result() == findings
    return findings


# -- storage that breaks a promise -----------------------------------------------------------------


#: Makes a client of a mount.
Clients = Callable[[Path], Storage]


def before(**actions: Callable[..., object]) -> Clients:
    """A client that does something before some calls."""

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if called in actions:
            actions[called](*given)

    return lambda _: RuledStorage(rule)


def refusing(code: int, method: str) -> Clients:
    return lambda _: RuledStorage(refuse(method, code))


def remove(path: Path) -> None:
    """So that everybody may make a name."""
    with suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()


def lose_the_answer(path: Path) -> None:
    """Give a name to nobody."""
    if path.name.startswith("mkdir-"):
        path.mkdir(exist_ok=True)


def remove_the_replaced(_: Path, target: Path) -> None:
    """Rename in two steps, as some object stores."""
    if target.is_file():
        target.unlink()
        time.sleep(0.001)


def write_half(source: Path, target: Path) -> None:
    """Copy into the place of what is replaced."""
    if source.is_file():
        content = source.read_bytes()
        target.write_bytes(content[: len(content) // 2])
        time.sleep(0.001)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


greedy_rmdir = before(rmdir=empty)
#: Finds by an old handle what is gone by its name.
resurrecting = before(
    rename=lambda source, _: source.exists() or source.mkdir(),
    create=lambda path: path.parent.mkdir(exist_ok=True),
)


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


BROKEN: list[tuple[str, Clients]] = [
    # Renames a folder onto another by moving what is in it.
    ("rename", before(rename=lambda _, target: shutil.rmtree(target, ignore_errors=True))),
    ("rmdir", greedy_rmdir),
    ("rmdir", resurrecting),
    ("links", refusing(errno.EPERM, "link")),
    ("sync", refusing(errno.EINVAL, "sync_folder")),
    ("sync", refusing(errno.EIO, "fsync")),
    ("shared", refusing(errno.EACCES, "unlink")),
    ("exclusive", before(mkdir=remove)),
    ("exclusive", before(create=remove)),
    ("exclusive", before(link=lambda _, target: remove(target))),
    ("exclusive", before(mkdir=lose_the_answer)),
    ("replace", before(rename=remove_the_replaced)),
    ("replace", before(rename=write_half)),
    ("leases", greedy_rmdir),
    ("refresh", greedy_rmdir),
    ("refresh", NoRefresh),
    ("fence", resurrecting),
    ("open", lambda _: NoCto()),
    ("lease_time", lambda _: NoCto()),
    ("lease_time", lambda _: Restless()),
    ("lease_time", lambda _: Timeless()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_each_broken_promise_between_two_clients_is_found_and_named(
    tmp_path: Path, name: str, broken: Clients
) -> None:
    [finding] = measured(tmp_path, broken(tmp_path), broken(tmp_path), name)
    assert (finding.name, finding.verdict) == (name, "fail"), finding
    assert finding.words
    assert finding.advice
    assert ("mount it with --attr-cache 0" in finding.advice) == (name != "sync")


def test_a_race_tries_each_way_once_and_ends_when_its_time_is_over(tmp_path: Path) -> None:
    room = ProbeRoom.make(Job.at(tmp_path), "room")
    (room.path / TALK).mkdir()
    alone = Actor(Channel(room, "visitor", True, PATIENCE), is_here=True, folder=room.path)
    assert alone.start("race", "a", seconds=0)().text == "3/mkdir-0/create-0/link-0"


@pytest.mark.parametrize(
    ("ours", "theirs", "wrong"),
    [
        ("4/mkdir-0/link-0", "2/create-0", "1 of 4 names .* neither: mkdir"),
        ("2/mkdir-0", "3/mkdir-0/create-0/link-0", "1 of 3 names were made by both .*: mkdir"),
        ("1/mkdir-0", "EMLINK", "EMLINK"),
    ],
)
def test_a_race_that_one_side_ends_sooner_is_judged_as_far_as_the_other_came(
    ours: str, theirs: str, wrong: str
) -> None:
    judge_race(["4/mkdir-0/link-0/mkdir-1", "2/create-0"])
    with pytest.raises(BrokenError, match=wrong):
        judge_race([ours, theirs])


@pytest.mark.slow
def test_a_local_disk_keeps_every_promise_between_two_clients(tmp_path: Path) -> None:
    for finding in measured(tmp_path, Storage(), Storage(), *PROBES):
        # A disk with much else to do may take its time to sync.
        assert finding.verdict in ({"ok", "warn"} if finding.name == "sync" else {"ok"}), finding


class Lagging(LaggingStorage):
    """Touches files too, as a run touches its mark."""

    def utime(self, path: Path) -> None:
        super().utime(path) if path.is_dir() else os.utime(path)


def test_a_client_that_only_lags_keeps_every_promise(tmp_path: Path) -> None:
    ours, theirs = (Lagging(tmp_path, time.monotonic) for _ in range(2))
    names = ("rename", "rmdir", "shared", "exclusive", "refresh", "fence", "leases")
    for finding in measured(tmp_path, ours, theirs, *names):
        assert finding.verdict == "ok", finding


# -- what is measured, judged ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "lease_time", "verdict"),
    [
        (0.01, 30.0, "ok"),
        (5.0, 30.0, "ok"),
        (5.1, 30.0, "warn"),
        (10.1, 30.0, "fail"),
        (math.inf, 30.0, "fail"),
        (5.1, 300.0, "ok"),
    ],
)
def test_the_lease_time_is_held_against_what_was_measured(
    late: float, lease_time: float, verdict: Verdict
) -> None:
    finding = lease_verdict(late, 30.0, lease_time)
    assert finding.verdict == verdict
    if verdict != "ok":
        needed = float(finding.advice.rpartition(" ")[2])
        assert lease_verdict(min(late, 60.0), 30.0, needed).verdict == "ok"


def facts(**changed: Any) -> Facts:
    return Facts(
        host="one", boot="a", syncd="1", filesystem="nfs4", source="server:/", options="rw", look=1
    ).model_copy(update=changed)


@pytest.mark.parametrize(
    ("finding", "verdict", "said"),
    [
        (judge_mount(facts()), "ok", "nfs4 from server:/"),
        (judge_mount(facts(options="rw,soft")), "warn", "soft"),
        (judge_mount(facts(options="rw,nocto")), "warn", "nocto"),
        (judge_mount(facts(options="ro")), "fail", "read-only"),
        (judge_hosts(facts(), facts(host="two", boot="b")), "ok", "one and two"),
        (judge_hosts(facts(), facts(host="pod", look=5)), "warn", "one host"),
        (judge_hosts(facts(), facts(options="clientaddr=two")), "ok", "one and one"),
        (judge_hosts(facts(), facts(boot="b")), "warn", "both called one"),
        (judge_hosts(facts(), facts(host="two", boot="b", syncd="2")), "fail", "2 on two"),
        (
            judge_hosts(facts(), facts(host="two", boot="b", filesystem="xfs")),
            "warn",
            "nfs4 here, xfs on two",
        ),
    ],
)
def test_what_was_seen_is_judged_and_said(finding: Finding, verdict: Verdict, said: str) -> None:
    assert finding.verdict == verdict
    assert said in finding.words
    assert bool(finding.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("free", "newest", "verdict"),
    [
        (Free(10**12, 10**6), 10**9, "ok"),
        (Free(None, None), 0, "ok"),
        (Free(10**9, 10**6), 10**9, "warn"),
        (Free(10**9, 999), 0, "warn"),
        (Free(1000, 10**6), 0, "fail"),
        (Free(10**9, 3), 0, "fail"),
    ],
)
def test_room_is_for_two_more_versions(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, free: Free, newest: int, verdict: Verdict
) -> None:
    monkeypatch.setattr(FastStorage, "free", lambda *_: free)
    monkeypatch.setattr(examination, "_newest", lambda _: newest)
    assert examination.judge_room(job).verdict == verdict


def test_the_newest_version_is_the_measure_of_room(job: SmallJob) -> None:
    publish(job, 1)
    assert "the newest version has" in examination.judge_room(job).words


def test_who_makes_files_for_another_user_or_cannot_prune_is_warned(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    squashed = examination.judge_rights(Job(Squashing(), job.layout), job.root / "made")
    assert squashed.verdict == "warn"
    assert "belongs to 65534" in squashed.words
    monkeypatch.setattr(examination, "unprunable", lambda _: "steps stay")
    kept = examination.judge_rights(job, job.root / "new")
    assert (kept.verdict, kept.words) == ("warn", "steps stay")


def test_the_mount_of_a_folder_is_the_kernels() -> None:
    assert facts_of(Job.at("/proc/self")).filesystem == "proc"
    assert facts_of(Job.at("/")).source


# -- all of it -------------------------------------------------------------------------------------


def examined(job: SmallJob, storage: Storage, **limits: float) -> list[Finding]:
    """All probes, with a thread for the other host."""
    ended = threading.Event()

    def visit() -> None:
        with suppress(JobUnavailableError):  # the run was cut short
            Examination(job, 1, has_ended=ended.is_set, **limits).run()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(visit)
        try:
            return Examination(Job(storage, job.layout), 0, **limits).run()
        finally:
            ended.set()


@pytest.mark.slow
def test_an_error_of_storage_is_a_finding_and_the_other_probes_go_on(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice begins with the options of such a mount, where options matter."""
    here = facts_of(Job.at(job.root)).filesystem
    monkeypatch.setitem(probes.OPTIONS, here, "cache=none")
    job.save(1)
    before = everything(job.root)
    findings = examined(
        job, RuledStorage(refuse("sync_folder", errno.EIO), refuse("link", errno.EIO))
    )
    failed = {
        finding.name: "cache=none" in finding.advice
        for finding in findings
        if finding.verdict == "fail"
    }
    assert failed == {"links": True, "sync": False, "exclusive": True}
    assert {"fence", "lease_time"} <= {finding.name for finding in findings}
    assert everything(job.root) == before


@pytest.mark.parametrize(
    ("rule", "name", "advice"),
    [
        (refuse("free", errno.EIO), "room", "kernel log"),
        (refuse("mkdir", errno.EROFS), "rights", "export it for writing"),
        (refuse("create", errno.EDQUOT), "rights", "free space"),
        (refuse("utime", errno.EACCES), "hosts", "group"),
        (refuse("link", errno.ENOSPC), "links", "free space"),
        # It loses its whole room in the middle.
        (once("link", lambda file, _: shutil.rmtree(file.parents[1])), "links", "run both again"),
    ],
)
def test_an_error_after_which_nothing_can_be_measured_ends_the_run(
    job: SmallJob, rule: Rule, name: str, advice: str
) -> None:
    findings = examined(job, RuledStorage(rule), look=1)
    [failed] = [finding for finding in findings if finding.verdict == "fail"]
    assert (failed.name, failed) == (name, findings[-1])
    assert advice in failed.advice
    assert not any(job.layout.doctor.glob("*/*"))


def test_a_full_disk_ends_the_run_without_a_helper(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FastStorage, "free", lambda *_: Free(0, None))
    monkeypatch.setattr(sys, "executable", "/no/helper")
    findings = Examination(Job(FastStorage(), job.layout)).run()
    assert [finding.name for finding in findings] == ["mount", "format", "room"]
    assert findings[-1].verdict == "fail"


def test_a_helper_that_ends_is_a_finding(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    finding = Examination(job).run()[-1]
    assert (finding.name, finding.verdict) == ("hosts", "fail")
    assert "has ended" in finding.words


def test_hosts_of_different_releases_both_say_so(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def facts_of_release(_: Job, look: float) -> Facts:
        return facts(host=str(look), syncd=str(look), look=look)

    monkeypatch.setattr(examination, "facts_of", facts_of_release)
    with ThreadPoolExecutor() as pool:
        hosts = [Examination(job, peer, look=1.0 + peer, meeting=PATIENCE) for peer in (0, 1)]
        runs = [pool.submit(host.run) for host in hosts]
    failed = [[one.name for one in run.result() if one.verdict == "fail"] for run in runs]
    assert failed == [["hosts"], ["hosts"]]
    assert {host.look for host in hosts} == {1.0}  # by which both bound their waits


def test_the_longer_delay_of_both_directions_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_delay", lambda a, *_: 6.0 + int(a.folder.name[-1]))
    (finding,) = measured(tmp_path, FastStorage(), FastStorage(), "open")
    assert "7.000 s" in finding.words


def test_a_visitor_that_may_not_write_says_so(job: SmallJob) -> None:
    room = ProbeRoom.make(job, f"{PEER}other")
    (room.path / TALK).mkdir()
    refused = Job(RuledStorage(refuse("create", errno.EACCES)), job.layout)
    finding = Examination(refused, 1, meeting=0.2).run()[-1]
    assert (finding.name, finding.verdict, finding.advice) == ("hosts", "fail", SHARE)
    with pytest.raises(PermissionError):  # a helper does not wait for another room
        Examination(refused, 1, rooms=room.path.name, meeting=PATIENCE).examine()


@contextmanager
def hanging(job: SmallJob, hangs: Callable[[str, Path], bool]) -> Iterator[Job]:
    """A client whose storage hangs in some calls, until the end."""
    goes_on = threading.Event()

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if isinstance(given[-1], Path) and hangs(called, given[-1]):
            goes_on.wait(PATIENCE)

    yield Job(RuledStorage(rule), job.layout)
    goes_on.set()


@pytest.mark.slow
def test_storage_that_hangs_is_a_finding_and_the_end(job: SmallJob) -> None:
    doctor = job.layout.doctor
    with hanging(
        job,
        lambda called, path: (
            (called, path.name) == ("sync_folder", "sync-0")
            or (called == "rename" and path.parent == doctor)
        ),
    ) as hung:
        findings = examined(job, hung.storage, look=1, answer=4)
    last = [(finding.name, finding.verdict) for finding in findings[-2:]]
    assert last == [("cleanup", "warn"), ("sync", "fail")]
    assert "did not answer within 10 s" in findings[-1].words


@pytest.mark.slow
def test_storage_that_hangs_on_the_other_host_is_a_finding_there(job: SmallJob) -> None:
    job.layout.doctor.mkdir()
    with hanging(job, lambda called, path: (called, path) == ("names", job.layout.doctor)) as hung:
        finding = Examination(hung, 1, look=0.5, answer=0.5, meeting=0.5).run()[-1]
    assert (finding.name, finding.verdict) == ("hosts", "fail")


def test_a_job_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    job = Job.at(tmp_path / "nothing")
    with pytest.raises(JobUnavailableError, match="no such folder"):
        Examination(job).run()
    assert not job.layout.root.exists()


def test_a_call_that_fails_elsewhere_fails_here_and_the_next_goes_on(tmp_path: Path) -> None:
    failing = RuledStorage(refuse("open_read", errno.EIO, where="replace-0/file"))
    findings = measured(tmp_path, FastStorage(), failing, "replace", "leases")
    assert [finding.verdict for finding in findings] == ["fail", "ok"]
    assert "EIO" in findings[0].words
