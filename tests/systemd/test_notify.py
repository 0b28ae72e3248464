"""What the service manager hears, and what ends a process that hangs."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.daemon.service import Service
from syncd.daemon.signs import AnsweredStorage, HangGuard, ServiceManager
from tests.jobs import SmallJob
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    Daemon,
    serving,
    wait_for_step,
    wait_until,
)
from tests.multiprocess.saves import Constant, save
from tests.multiprocess.test_sinks import full_pipe
from tests.storages import Clock


class Manager:
    """The other end: systemd's socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """The lines since the last call."""
        lines: list[str] = []
        try:
            while True:
                lines += self._socket.recv(65536).decode().split("\n")
        except BlockingIOError:
            return lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = tmp_path / "notify"
    # A socket's path has room for 107 bytes.
    address = f"@syncd-{os.getpid()}" if request.param == "abstract" else os.path.relpath(path, "/")
    listening = Manager(address if address.startswith("@") else f"/{address}")
    yield listening
    listening.close()


def ours(manager: Manager) -> ServiceManager:
    return ServiceManager.of_environment({"NOTIFY_SOCKET": manager.address})


def test_ready_is_said_once_all_jobs_are_and_then_never_again(manager: Manager) -> None:
    told = ours(manager)
    one, two = told.job("one"), told.job("two")
    one.status("no version yet")
    one.ready()
    one.ready()
    assert manager.heard() == ["STATUS=no version yet"]
    two.ready()
    assert manager.heard() == ["READY=1"]
    told.job("two").ready()  # served again after a failure
    two.status("a line\nREADY=0")
    two.status("a line\nREADY=0")
    assert manager.heard() == ["STATUS=no version yet | a line\\nREADY=0"]


@pytest.mark.parametrize("state", ["READY=1", "STOPPING=1"])
def test_a_state_is_said_again_where_the_manager_had_no_room_for_it(
    manager: Manager, state: str
) -> None:
    told = ours(manager)
    job = told.job("one")
    if state == "STOPPING=1":
        job.ready()
        manager.heard()
    for number in range(10_000):  # the kernel's queue holds a few hundred at most
        job.status(str(number))
    job.ready() if state == "READY=1" else told.stopping()
    assert state not in manager.heard()
    told.alive()
    assert manager.heard()[:2] == [state, "WATCHDOG=1"]
    told.alive()
    assert manager.heard()[0] == "WATCHDOG=1"


def test_progress_puts_off_the_end_of_a_start_and_of_a_stop_and_of_nothing_else(
    manager: Manager,
) -> None:
    told = ours(manager)
    job = told.job("one")
    told.alive()
    assert manager.heard() == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=60000000"]
    job.ready()
    manager.heard()
    told.alive()
    assert manager.heard() == ["WATCHDOG=1"]
    told.stopping()
    told.alive()
    assert manager.heard() == ["STOPPING=1", "WATCHDOG=1", "EXTEND_TIMEOUT_USEC=60000000"]


_INTERRUPTED = """
import random, signal, sys
from syncd.daemon.signs import ServiceManager

manager = ServiceManager.of_environment({"NOTIFY_SOCKET": sys.argv[1]})
signal.signal(signal.SIGALRM, lambda *_: manager.stopping())
job = manager.job("one")
for number in range(3000):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 5e-5))
    job.status(str(number))
signal.setitimer(signal.ITIMER_REAL, 0)
print(flush=True)
sys.stdin.read()
manager.alive()
"""


def test_a_signal_in_the_middle_of_a_status_stops_all_the_same(manager: Manager) -> None:
    """The handler runs in the thread that it interrupts, whatever lock that one holds."""
    command = [sys.executable, "-c", _INTERRUPTED, manager.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            heard = manager.heard()  # its queue may have been full before the first signal
            process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "STOPPING=1" in heard + manager.heard()


def test_a_reload_ends_with_ready_whatever_comes_of_it(manager: Manager) -> None:
    told = ours(manager)
    begun: list[str] = []

    def reload() -> None:
        with told.reloading():
            begun.extend(manager.heard())
            raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        reload()
    assert begun[0] == "RELOADING=1"
    assert begun[1].removeprefix("MONOTONIC_USEC=").isdecimal()
    assert manager.heard() == ["READY=1"]


@pytest.mark.parametrize(
    ("environment", "watchdog"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "4000000"}, 4.0),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_whom_it_names(
    environment: dict[str, str], watchdog: float | None
) -> None:
    told = ServiceManager.of_environment({"NOTIFY_SOCKET": "/nowhere", **environment})
    assert told.watchdog == watchdog
    told.alive()  # nobody hears it


def test_without_a_manager_nothing_is_told() -> None:
    for address in ("", "vsock:2:1234"):
        told = ServiceManager.of_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"})
        assert told.watchdog is None
        told.job("one").ready()
        told.alive()


def test_no_sign_of_life_while_any_job_makes_no_progress(manager: Manager) -> None:
    clock = Clock()
    guard = HangGuard(30.0, ours(manager), clock=clock)
    one, two = guard.watch("one"), guard.watch("two")
    for _ in range(29):
        clock.advance(1)
        one()
    assert 3 <= manager.heard().count("WATCHDOG=1") <= 10
    for _ in range(30):
        clock.advance(1)
        one()
    assert manager.heard() == []
    guard.forget("two")  # its daemon has come to its end
    clock.advance(10)
    one()
    two()
    assert "WATCHDOG=1" in manager.heard()


def test_an_error_of_storage_is_an_answer_too(tmp_path: Path) -> None:
    answered: list[str] = []
    storage = AnsweredStorage(tmp_path, lambda: answered.append("yes"))
    with pytest.raises(FileNotFoundError):
        storage.open_read(tmp_path / "missing")
    assert answered == ["yes"]
    storage.write_new(tmp_path / "file", b"bytes")
    assert storage.read(tmp_path / "file") == b"bytes"
    assert len(answered) == 4  # missing, written, synced, opened


def test_ready_comes_with_the_first_look_and_before_what_is_merged_then(
    job: SmallJob, manager: Manager
) -> None:
    told: list[str] = []

    class Looking(AnsweredStorage):
        def mkdir(self, path: Path) -> None:
            if path.parent.name == "building" and path.name.startswith("v"):
                told.extend(manager.heard())
            super().mkdir(path)

    job.save(1)
    service = Service(
        job.root,
        DaemonConfig(tick=0.05),
        notice=ours(manager).job("job"),
        storage=Looking(job.root, lambda: None),
    )
    with serving(service):
        wait_for_step(job.root, 1)
        said = wait_until(
            lambda: [line for line in manager.heard() if "v1" in line], "STATUS says so"
        )
    assert "READY=1" in told
    assert said[0].startswith("STATUS=v1 of step 1; ")


#: A daemon of which one call of storage hangs, in whichever thread, once a file is there.
HANGING = """
import ctypes, os, sys, threading
from pathlib import Path
from syncd.storage.calls import Calls
from syncd.storage.fsio import Storage
method, hang, marker = sys.argv.pop(1), sys.argv.pop(1), Path(sys.argv.pop(1))
real = getattr(Calls, method)
def call(self, *args):
    if marker.exists():
        eval(hang)
    return real(self, *args)
setattr(Calls, method, call)
from syncd.cli import main
main()
"""


_STORAGE = "threading.Event().wait()"
_PYTHON = "ctypes.PyDLL(None).pause()"  # holds the interpreter's lock


@pytest.mark.parametrize(
    ("method", "hang", "said"),
    [
        ("names", _STORAGE, "Timeout (6 s)!"),
        ("fsync", _STORAGE, "Timeout (6 s)!"),
        ("names", _PYTHON, "Timeout (0:00:"),
        ("names", "os.abort()", "Fatal Python error: Aborted"),
        ("names", _STORAGE, None),
        ("names", _PYTHON, None),
    ],
    ids=str,
)
def test_a_daemon_that_hangs_ends_itself_whoever_reads_its_log(
    tmp_path: Path, method: str, hang: str, said: str | None
) -> None:
    root, marker = tmp_path / "job", tmp_path / "hang"
    out, end = full_pipe()
    SmallJob(root)
    save(root, Constant(), 1)
    manager = Manager(address := f"@syncd-{os.getpid()}")
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, method, hang, str(marker),
         "run", str(root), "--tick", "0.1", "--hang-time", "6", "--max-shard-size", "30000"],
        stderr=subprocess.PIPE if said else end,
        text=True,
        env={**ENVIRONMENT, "NOTIFY_SOCKET": address},
    ) as process:  # fmt: skip
        try:
            wait_for_step(root, 1)
            wait_until(lambda: "WATCHDOG=1" in manager.heard(), "there are signs of life")
            marker.touch()
            save(root, Constant(), 2)
            _, log = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
            os.close(out)
            os.close(end)
    assert process.returncode == (-signal.SIGABRT if "abort" in hang else 1)
    if said:
        assert said in log
        assert "in call\n" in log, "where it hung is said"
    # Its heartbeat ended with it: nobody waits for a lease.
    marker.unlink()
    with Daemon(root):
        wait_for_step(root, 2)
    manager.close()


def test_a_daemon_with_nothing_to_do_is_no_hang_however_seldom_it_is_to_look(
    job: SmallJob, manager: Manager
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "syncd", "run", str(job.root), "--tick", "60",
         "--lease-time", "3600", "--hang-time", "1.5"],
        env={**ENVIRONMENT, "NOTIFY_SOCKET": manager.address},
    ) as process:  # fmt: skip
        try:
            heard: list[str] = []

            def several_looks() -> bool:
                assert process.poll() is None, "it took itself for one that hangs"
                heard.extend(manager.heard())
                return "READY=1" in heard and heard.count("WATCHDOG=1") > 12

            wait_until(several_looks, "signs of life go on")
        finally:
            process.kill()
