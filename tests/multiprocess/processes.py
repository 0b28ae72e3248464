"""Real processes for tests: daemons, and waiting for what they do, always with a deadline."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Self, TypeVar

from explorer_hooks.reader import Reader
from syncd.daemon.host.services import JobSupervisor, RootSupervisor
from syncd.daemon.service import Service
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import Latest
from syncd.protocol.reports import DaemonReport, ExplorerReport
from tests.jobs import read
from tests.multiprocess.shared_job import IS_NETWORK, Host
from tests.programs import completed
from tests.rank_programs import ENVIRONMENT

T = TypeVar("T")

#: A guard against hanging, for what takes a second or two; of a client that remembers, minutes.
DEADLINE = 240.0 if IS_NETWORK else 60.0
LEASE_TIME = 6.0 if IS_NETWORK else 2.0


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    own: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            own += map(int, task.read_text().split())
    return own + [below for child in own for below in children(child)]


def wait_until(look: Callable[[], T | None], what: str, deadline: float = DEADLINE) -> T:
    """Look until something is true; another process makes it so."""
    end = time.monotonic() + deadline
    while not (found := look()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:g} s: {what}")
        time.sleep(0.01)
    return found


def wait_until_gone(path: Path) -> None:
    wait_until(lambda: not path.exists(), f"{path} is gone")


def newest(job: Path) -> Latest:
    """What LATEST says; raises FileNotFoundError before the first version."""
    return read(Latest, JobLayout(job).latest)


def latest(job: Path) -> Latest | None:
    try:
        return newest(job)
    except FileNotFoundError:
        return None


def wait_for_step(job: Path, step: int) -> Latest:
    def named() -> Latest | None:
        found = latest(job)
        return found if found is not None and found.step == step else None

    return wait_until(named, f"LATEST names step {step} of {job}")


def report(job: Path) -> DaemonReport | None:
    try:
        return read(DaemonReport, JobLayout(job).daemon_report)
    except FileNotFoundError:
        return None


def explorer_report(job: Path, name: str) -> ExplorerReport:
    """What an explorer says about itself.

    Raises:
        FileNotFoundError: it has said nothing yet.
    """
    return read(ExplorerReport, JobLayout(job).explorer(name))


def read_by(job: Path, sequence: int, *names: str) -> list[tuple[int, int]]:
    """The bytes of versions and of deltas that explorers read for a version, in ascending order."""

    def sizes(name: str) -> tuple[int, int]:
        wait_until(lambda: explorer_report(job, name).sequence == sequence, "it has reported")
        reload = explorer_report(job, name).reload
        assert reload is not None
        return reload.full_bytes or 0, reload.delta_bytes or 0

    return sorted(map(sizes, names))


def syncd(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    return completed([sys.executable, "-m", "syncd", *arguments], env=ENVIRONMENT, timeout=DEADLINE)


def said_by_syncd(*arguments: object) -> str:
    """What a command says that succeeds."""
    done = syncd(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def verified(job: Path, sequence: int) -> None:
    """Lease and read all of a version as an explorer would."""
    with Reader(job, "checker") as reader:
        version = reader.next_version(sequence - 1, DEADLINE)
        version.verify()
        assert version.sequence == sequence
        version.release()


def has_begun(job: Path, step: int) -> bool:
    """Whether a merge goes on, or the one of this step was faster than us."""
    found = latest(job)
    return JobLayout(job).publish_lock.exists() or (found is not None and found.step == step)


def published(job: Path) -> list[str]:
    return sorted(os.listdir(JobLayout(job).published))


def epoch_content(job: Path) -> dict[str, list[str]]:
    """Everything in the epochs' rooms: room → names inside, the standing folders aside.

    ``os.walk`` passes over what a daemon removes meanwhile.
    """
    rooms = JobLayout(job).epochs
    return {
        room: [
            name
            for folder, folders, files in os.walk(rooms / room)
            for name in (*folders, *files)
            if name not in {"building", "trash", "doomed"}
        ]
        for room in os.listdir(rooms)
    }


def temporaries(folder: Path) -> list[str]:
    return [
        os.path.join(path, name)
        for path, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if name.startswith(".tmp-") or ".broken-" in name
    ]


def half_made(job: Path) -> list[str]:
    """What a daemon at work, or one that was killed, has in its rooms."""
    rooms = epoch_content(job)
    lock = JobLayout(job).publish_lock
    return [*list(rooms)[1:], *chain.from_iterable(rooms.values()), *[lock.name] * lock.exists()]


def converges(job: Path, step: int, sequence: int, *, explorers_job: Path | None = None) -> None:
    """The step is served, as this version, and nothing half made is left."""
    assert wait_for_step(job, step).sequence == sequence
    verified(explorers_job or job, sequence)
    wait_until(lambda: not half_made(job), f"nothing is left in any epoch: {half_made(job)}")


@contextmanager
def serving(service: Service | JobSupervisor | RootSupervisor) -> Iterator[None]:
    """A daemon in this process; its thread ends with the block."""
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield
    finally:
        service.stop()
        thread.join(DEADLINE)
    assert not thread.is_alive()


#: A ``program`` for :class:`Daemon` that removes leftovers, gives up a remote path, and folds in a
#: pause, soon. At SIGUSR1 it logs where its threads are.
IMPATIENT = (
    "-c",
    "import faulthandler; from syncd.cli import main; from syncd.daemon import collect, decide;"
    "faulthandler.register(10); collect._GRACE = decide._PATH_TIME = 1.0; decide._QUIET = 5.0;"
    "main()",
)


def dying_at(*words: str, after: bool) -> tuple[str, str]:
    """A ``program`` for :class:`Daemon` that dies at a rename.

    Each word is in the paths of a rename after the one before; it dies at the last one's.
    """
    return (
        "-c",
        f"""
import os
from syncd.cli import main
from syncd.storage.fsio import Storage
words, rename = {[*words]}, Storage.rename
def dying(storage, source, target):
    met = words and words[0] in f"{{source}} {{target}}" and words.pop(0)
    if {after} or not met or words:
        rename(storage, source, target)
    if met and not words:
        os.kill(os.getpid(), 9)
Storage.rename = dying
main()
""",
    )


class Program:
    """A process whose log is kept in memory.

    Leaving the ``with`` block ends it, and well; after an error by a kill.

    Args:
        command: program and arguments.
        environment: added to that of tests.
    """

    def __init__(self, *command: object, **environment: str) -> None:
        self._process = subprocess.Popen(
            [*map(str, command)], stderr=subprocess.PIPE, env=ENVIRONMENT | environment
        )
        self.pid = self._process.pid
        self.log: list[str] = []
        self._heard = threading.Condition()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def wait_for_log(self, words: str, deadline: float = DEADLINE, *, times: int = 1) -> str:
        """Wait for a line that has these words, or for so many of them; returns the first."""
        with self._heard:
            assert self._heard.wait_for(
                lambda: sum(words in line for line in self.log) >= times, deadline
            ), f"{words!r} was not said: {self.log}"
            return next(line for line in self.log if words in line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)

    def terminate(self, deadline: float = DEADLINE) -> int:
        self._process.terminate()
        return self._process.wait(deadline)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, deadline: float = DEADLINE) -> int:
        """Wait until it ends by itself; returns its status."""
        return self._process.wait(deadline)

    def pause(self) -> None:
        self._tell_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._tell_all(signal.SIGCONT)

    def _tell_all(self, number: int) -> None:
        os.kill(self.pid, number)
        for pid in children(self.pid):
            with suppress(ProcessLookupError):  # an idle one ends
                os.kill(pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self.running:
                self.resume()
                assert kind or self.terminate() == 0, self.log
        finally:
            self.kill()
            self._listener.join(DEADLINE)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                with self._heard:
                    self.log.append(line.decode().rstrip())
                    self._heard.notify_all()


class Daemon(Program):
    """``syncd run``.

    Args:
        job: the job directory, or the host that the daemon works on.
        options: of the command line.
        lease_time: seconds.
        root: whether the folder is one of jobs.
        program: what Python runs.
    """

    def __init__(
        self,
        job: Path | Host,
        *options: str,
        lease_time: float = LEASE_TIME,
        root: bool = False,
        program: tuple[str, ...] = ("-m", "syncd"),
    ) -> None:
        host = job if isinstance(job, Host) else Host(job)
        where = ["--root", host.job] if root else [host.job]
        timing = ["--tick", 0.2, "--lease-time", lease_time]
        super().__init__(*host.runs, sys.executable, *program, "run", *where, *timing, *options)
