"""Serving jobs from one process: one job and its memory directory, or all jobs of a folder."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from syncd.daemon.config import DaemonConfig, RunConfig
from syncd.daemon.service import Service
from syncd.daemon.signs import AnsweredStorage, HangGuard
from syncd.daemon.telling.journal import MeterOf, unmetered
from syncd.daemon.turns import Turn, Turns
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError, SyncdError
from syncd.protocol.events import (
    JOB_THREAD,
    JobAbandoned,
    JobFault,
    JobFound,
    JobGone,
    JobHangs,
    JobUnavailable,
    RootUnavailable,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import STATE_POINTER
from syncd.storage.calls import FileKind
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, has_marks, no_folder, step_folders
from syncd.storage.judge import Clock
from syncd.storage.repeats import Repeats
from syncd.storage.watch import Watcher

log = logging.getLogger(__name__)

#: Seconds between two listings of the root.
_LIST: Final = 2.0
#: A job counts as removed if this many listings in a row lack it, as a listing may be outdated.
_MISSING: Final = 3
#: Seconds after which a folder that does not answer is abandoned, to look into the next folder.
_FOLDER_PATIENCE: Final = 30.0
#: Seconds after which a job whose daemon failed is served again.
_AGAIN: Final = 10.0
#: Seconds between two checks whether to go on waiting for that.
_POLL: Final = 0.2
#: Seconds between two checks of the jobs' threads.
_LOOK: Final = 1.0
#: The most seconds that shutdown waits for a job whose storage does not answer.
_LAST_PATIENCE: Final = 30.0


@dataclass(kw_only=True)
class JobServer(Service):
    """Serves one job until it is stopped or its daemon ends.

    If the daemon fails, the error is logged, and the job is opened and served again 10 s later.
    """

    guard: HangGuard
    thread: threading.Thread = field(init=False)
    leaves: bool = False
    hangs: bool = False

    def open(self) -> None:
        """Open the job, and expect progress of its storage from now on."""
        self.storage = AnsweredStorage(self.root, self.guard.watch(str(self.root)))
        super().open()

    def serve(self) -> None:
        """Serve the job in this thread."""
        try:
            while not self._stopping:
                try:
                    self.run()
                except (SyncdError, OSError) as error:
                    JobUnavailable(self.root, error).tell(log)
                except Exception:  # noqa: BLE001 - a bug in syncd is logged with its traceback
                    JobFault(self.root).tell(log)
                else:
                    return
                self._pause()
        finally:
            self.guard.forget(str(self.root))

    def _pause(self) -> None:
        self.guard.forget(str(self.root))  # until the job is open again, expect no progress
        end = time.monotonic() + _AGAIN
        while not self._stopping and time.monotonic() < end:
            time.sleep(_POLL)


@dataclass
class Discovery:
    """Looks for jobs, in its own thread.

    A job is a folder in the root with ``.syncd`` or the pointer in it. It must not be a link, and
    its name must not begin with a dot. If the root cannot be listed, for example because it is not
    mounted, the list of jobs does not change.

    Args:
        changed: called after the first listing, and when a job was added or removed.
        answered: called after each listing of the root, even a failed one.
    """

    root: Path
    pointer: str
    changed: Callable[[], None]
    every: float = _LIST
    answered: Callable[[], None] = lambda: None
    storage: Storage | None = None
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._storage = self.storage or Storage(self.root)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: Job → how many listings in a row lacked it; None before the first listing.
        self._missed: dict[str, int] | None = None
        self._hanging: set[str] = set()
        self._looker: object = None  # the current thread; older threads hang or have ended
        self._at: tuple[str, float] | None = None  # the folder it is looking at, and since when
        self._repeats = Repeats(clock=self.clock)

    @property
    def jobs(self) -> frozenset[str] | None:
        """The names of the jobs; None before the first listing."""
        with self._lock:
            return None if self._missed is None else frozenset(self._missed)

    def start(self) -> None:
        """Start the thread that looks for jobs."""
        self._looker = looker = object()
        threading.Thread(
            target=self._keep_looking, args=[looker], name="syncd-discovery", daemon=True
        ).start()

    def close(self) -> None:
        """Stop looking for jobs; does not wait for a listing that hangs."""
        self._closed.set()

    def supervise(self) -> None:
        """Abandon a folder whose storage does not answer; call this about once a second."""
        with self._lock:
            if self._at is None or self.clock() - self._at[1] < _FOLDER_PATIENCE:
                return
            name, _ = self._at
            self._at = None
            self._hanging.add(name)
            self._looker = None  # when that thread no longer hangs, it sees this and ends
        RootUnavailable(self.root / name, "its storage does not answer").tell(log)
        self.start()

    def look(self, looker: object = None) -> None:
        """List the root once, and check the folders that are not known as jobs."""
        try:
            kinds = self._storage.kinds(self.root)
        except OSError as error:
            if self._repeats.due(self.root):
                RootUnavailable(self.root, error).tell(log)
            return
        finally:
            self.answered()
        self._repeats.forget(self.root)
        there = {name for name, kind in kinds.items() if kind is FileKind.FOLDER and name[0] != "."}
        with self._lock:
            new = there - self._hanging - (self._missed or {}).keys()
        come = []
        for name in sorted(new):
            with self._lock:
                self._at = name, self.clock()
            is_job = self._is_job(name)
            with self._lock:
                if looker is not self._looker:  # this thread hung, and another one has taken over
                    self._hanging.discard(name)
                    return
                self._at = None
            if is_job:
                come.append(name)
        with self._lock:
            before = self._missed
            missed = {n: 0 if n in there else times + 1 for n, times in (before or {}).items()}
            kept = {name: times for name, times in missed.items() if times < _MISSING}
            self._missed = kept | dict.fromkeys(come, 0)
            changed = before is None or before.keys() != self._missed.keys()
        if changed:
            self.changed()

    def _keep_looking(self, looker: object) -> None:
        while not self._closed.is_set() and looker is self._looker:
            self.look(looker)
            self._closed.wait(self.every)

    def _is_job(self, name: str) -> bool:
        layout = JobLayout(self.root / name)
        try:
            return any(map(self._storage.exists, (layout.state, layout.root / self.pointer)))
        except OSError as error:  # for example another user's folder
            log.debug("cannot check whether %s is a job: %s", layout.root, error)
            return False


@dataclass
class Supervisor:
    """A process that serves jobs.

    Attributes:
        config: if ``shared_group`` is set, the umask of this process changes.
        read_again: called after :meth:`reload`; returns the new configuration, or None to keep the
            old one. Keys that are not in ``LIVE_KEYS`` must keep their old values.
        each_tick: called about once a second, or between two rounds of a single job.
        forget: called with a job that is no longer served.
    """

    root: Path
    config: RunConfig
    guard: HangGuard | None = None
    read_again: Callable[[], RunConfig | None] = lambda: None
    each_tick: Callable[[], None] = lambda: None
    meter_of: MeterOf = unmetered
    forget: Callable[[Path], None] = lambda _: None

    def __post_init__(self) -> None:
        self.root = self.root.absolute()
        self._guard = self.guard or HangGuard(self.config.hang_time)
        self._manager = self._guard.manager
        self._servers: dict[Path, JobServer] = {}
        self._reload_asked = False
        if self.config.shared_group is not None:  # let the umask keep the group's permission bits
            os.umask(os.umask(0o077) & ~0o070)

    def _tick(self) -> None:
        self.each_tick()
        if not self._reload_asked:
            return
        self._reload_asked = False
        with self._manager.reloading():
            if (config := self.read_again()) is not None:
                self.config = config
                for root, server in self._servers.items():
                    is_memory = config.memory_dir is not None and root != self.root
                    server.reload(_for_memory(config) if is_memory else config)

    def _server(self, root: Path, config: DaemonConfig) -> JobServer:
        return JobServer(
            root, config, may_end=lambda: False, meter_of=self.meter_of, guard=self._guard
        )


class JobSupervisor(Supervisor):
    """The daemons of a job and of its memory directory, in one process.

    Each daemon has its own thread, so that one daemon's failure does not affect the other daemon.

    Raises:
        InvalidSettingsError: one of the two directories is inside the other, or their group cannot
            be set to ``shared_group``.
        JobUnavailableError: a directory does not exist, or this user may not write to it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._servers[self.root] = self._server(self.root, self.config)
        if self.config.memory_dir is not None:
            memory = self.config.memory_dir.absolute()
            _check_apart(self.root, memory)
            _make(memory)
            self._servers[memory] = self._server(memory, _for_memory(self.config))
        # All daemons end when the first job's daemon ends as idle.
        first, *others = self._servers.values()
        first.each_tick, first.may_end = self._tick, lambda: all(one.is_idle for one in others)
        for server in self._servers.values():
            server.notice = self._manager.job(str(server.root))
            server.open()

    def stop(self) -> None:
        """Ask :meth:`run` to return; any thread or signal handler may call this."""
        self._manager.stopping()
        for server in self._servers.values():
            server.stop()

    def reload(self) -> None:
        """Read the configuration again soon; any thread or signal handler may call this."""
        self._reload_asked = True
        self._servers[self.root].wake()

    def run(self) -> bool:
        """Serve until stopped or idle; returns True, because all threads have ended."""
        first, *others = self._servers.values()
        threads = [threading.Thread(target=one.serve, name=str(one.root)) for one in others]
        for thread in threads:
            thread.start()
        try:
            first.serve()
        finally:
            self.stop()
            for thread in threads:
                thread.join()
        return True


class RootSupervisor(Supervisor):
    """The daemons of all jobs in a folder, in one process.

    Each job has its own thread. :meth:`run` itself does not call storage. So even if storage hangs,
    it supervises the other jobs, and can return.

    If a job makes no progress for ``hang_time``, its heartbeats end, so that another host's daemon
    may take over. When the job's thread no longer hangs, this process serves the job again.

    The guard must be made with ``together=False``.

    Raises:
        InvalidSettingsError: the configuration has a key that is allowed only for a single job, or
            the folder is itself a job.
        JobUnavailableError: the folder does not exist.
    """

    def __post_init__(self) -> None:
        for key in ("memory_dir", "exit_when_idle"):
            if getattr(self.config, key):
                raise InvalidSettingsError(
                    f"{key} is only for a single job, but root = {self.root} is a folder of many "
                    "jobs. Leave out one of these two keys"
                )
        super().__post_init__()
        if not self.root.is_dir():
            raise no_folder(self.root)
        job = Job.at(self.root)
        if has_marks(job) or step_folders(job):
            raise InvalidSettingsError(
                f"{self.root} is itself a job, but root names a folder of jobs: run 'syncd run "
                f"{shlex.quote(str(self.root))}'. If its jobs are folders in it, move its own "
                ".syncd, pointers and global_step folders away"
            )
        self._notice = self._manager.job(str(self.root))
        self._turns = Turns(self.config.concurrent_merges)
        self._waker = Watcher({})
        self._discovery = Discovery(
            self.root,
            self.config.pointer,
            changed=self._waker.wake,
            # An idle daemon must not seem to hang.
            every=min(_LIST, self.config.hang_time / 4),
            answered=self._guard.watch(str(self.root)),
        )
        self._repeats = Repeats()
        self._stopping = False

    def stop(self) -> None:
        """Ask :meth:`run` to return; any thread or signal handler may call this."""
        self._stopping = True
        self._manager.stopping()
        self._waker.wake()

    def reload(self) -> None:
        """Read the configuration again soon; any thread or signal handler may call this."""
        self._reload_asked = True
        self._waker.wake()

    def run(self) -> bool:
        """Serve until stopped; returns False if storage still blocks a job's thread.

        Only the end of the process can end such a thread.
        """
        with self._waker:
            self._discovery.start()
            try:
                while not self._stopping:
                    self._waker.wait(_LOOK)
                    self._tick()
                    self._discovery.supervise()
                    self._serve_listed()
                    self._give_up_what_hangs()
            finally:
                self._discovery.close()
                ended = self._end()
        return ended

    def _serve_listed(self) -> None:
        names = self._discovery.jobs
        if names is None:
            return
        jobs = {self.root / name for name in names}
        before = len(self._servers)
        for path, server in list(self._servers.items()):
            if not server.thread.is_alive():  # the job was given up, or no longer hangs
                del self._servers[path]
                server.turn.forget()
                self.forget(path)
            elif path not in jobs and not server.leaves:
                server.leaves = True
                JobGone(path).tell(log)
                server.stop()
        for path in sorted(jobs - self._servers.keys()):
            if not self._serve(path):
                break
        if len(self._servers) != before or not before:
            self._notice.status(f"jobs in {self.root}: {len(self._servers)}")
        self._notice.ready()

    def _serve(self, path: Path) -> bool:
        """Begin to serve a job; False if this process cannot start another thread now."""
        server = self._server(path, self.config)
        server.turn = Turn(self._turns, str(path), server.wake)
        # A daemon thread, because a thread that waits for storage must not delay the exit.
        name = f"{JOB_THREAD}{path}"
        server.thread = threading.Thread(target=server.serve, name=name, daemon=True)
        try:
            server.thread.start()
        except RuntimeError as error:  # no more threads; the other jobs continue
            if self._repeats.due(path):
                JobUnavailable(path, error).tell(log)
            return False
        self._servers[path] = server
        self._repeats.forget(path)
        JobFound(path).tell(log)
        return True

    def _give_up_what_hangs(self) -> None:
        for path, server in self._servers.items():
            silence = self._guard.silence(str(path))
            if server.hangs or silence < self._guard.hang_time:
                continue
            server.hangs = True
            JobHangs(path, silence, _stack_of(server.thread)).tell(log)
            # In a new thread, because this call may hang too.
            threading.Thread(target=server.give_up, daemon=True).start()

    def _end(self) -> bool:
        patience = min(_LAST_PATIENCE, self._guard.hang_time / 2)
        for server in self._servers.values():
            server.stop()
        for path, server in self._servers.items():
            while server.thread.is_alive():
                silence = self._guard.silence(str(path))
                if silence >= patience:
                    JobAbandoned(path, silence).tell(log)
                    break
                server.thread.join(_LOOK)
        return not any(server.thread.is_alive() for server in self._servers.values())


def _stack_of(thread: threading.Thread) -> str:
    """A thread's stack in one line, with the innermost call first."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 # documented, for this use
    if frame is None:
        return "no call, because the thread has ended"
    calls = reversed(traceback.extract_stack(frame))
    return ", called by ".join(f"{one.name} ({one.filename}:{one.lineno})" for one in calls)


def _for_memory(config: RunConfig) -> RunConfig:
    """The configuration for the memory directory, which has no full checkpoints and no deltas.

    By default its versions have the trainer's names, because such a version is the trainer's own
    file. ``naming.py`` cannot choose, because explorers report only to the first job.
    """
    told: dict[str, object] = {"pointer": STATE_POINTER, "memory_dir": None, "deltas": "off"}
    return config.model_copy(update=told | {"names": config.names or "trainer"})


def _check_apart(root: Path, memory: Path) -> None:
    job, other = root.resolve(), memory.resolve()
    if job == other or job in other.parents or other in job.parents:
        raise InvalidSettingsError(
            f"the memory directory {memory} and the job directory {root} overlap: give a "
            "folder outside the job, such as /dev/shm/NAME"
        )


def _make(memory: Path) -> None:
    """Create the memory directory, because a memory filesystem is empty after its host starts."""
    try:
        Storage().make_folder(memory, below=memory.parent)
    except OSError as error:
        raise JobUnavailableError(
            f"cannot create the memory directory {memory}: {error}"
        ) from error
