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

from syncd.doctor import alone, job, job_verdicts, together, verdicts
from syncd.doctor.calls import Call, Facts
from syncd.doctor.channel import TALK, Channel, There, serve
from syncd.doctor.examination import Examination, Limits, Watching
from syncd.doctor.facts import facts_of, mount_of
from syncd.doctor.finding import Finding, Verdict
from syncd.doctor.party import Here, Party
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.probe_room import ProbeRoom
from tests.jobs import Job
from tests.lagging import LaggingStorage
from tests.storages import FastStorage

PATIENCE = 60.0
OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL


@contextmanager
def company(ours: Storage, theirs: Storage, room: Path) -> Iterator[tuple[Party, Party]]:
    """This process, and a thread that has another client."""
    (room / TALK).mkdir(exist_ok=True)
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


def verdicts_of(findings: Sequence[Finding]) -> dict[str, Verdict]:
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
                assert finding.verdict is OK, finding


def test_a_client_that_only_lags_keeps_every_promise_and_is_said_to_lag(tmp_path: Path) -> None:
    def lagging() -> Storage:
        return LaggingStorage(tmp_path, time.monotonic)

    with company(lagging(), lagging(), tmp_path) as pair:
        for name in ("exclusive", "refresh", "fence", "leases", "memory"):
            (tmp_path / name).mkdir()
            finding = PAIRS[name](pair, name)
            assert finding.verdict is OK, finding
    assert "a new name more than 1 s late" in finding.words
