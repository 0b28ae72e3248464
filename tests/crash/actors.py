"""syncd's own code as actors that go on by one storage call at a time, in whatever order one asks.

Each actor runs in a thread of its own that stops before every call of the seam, until it is told to
go on: one runs at a time, and nothing else decides the order. Names that are drawn at random come
from a generator with a fixed seed, so that the same moves always lead to the same job.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, Self, cast

import pytest
import torch

from explorer_hooks import reader
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.staging import NotStagedError, Staging
from syncd.coordination.leased_version import read_latest
from syncd.coordination.versions import Lead
from syncd.daemon.loop import Loop
from syncd.daemon.prune import Pruner
from syncd.daemon.tenure import Tenure
from syncd.operate.offline import would_prune
from syncd.protocol.errors import (
    CancelledError,
    JobUnavailableError,
    SaveFailedError,
    SupersededError,
    VerificationError,
    WaitTimeoutError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import FULL, RETIRED
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import Latest, SaveId, encode
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.epoch import Epoch
from syncd.storage.job import Job
from syncd.storage.judge import Judge
from syncd.storage.sessions import Session
from tests.crash.invariants import CONFIG, check_weights
from tests.jobs import LEASE_TIME, read
from tests.makers import work
from tests.storages import CHANGES, Clock, FastStorage, asking
from trainer_hooks.writing.writer import RankContents, RankWriter

#: What changes nothing that anyone could see, where nothing waits for the disk.
_UNSEEN = {"fsync", "sync_folder", "close"}
_PARTS = {"write", "pwrite", "copy_file_range", "sendfile", "clone_range"}
_LOOKS = ("open_read", "names", "kinds", "status")
STOPS = tuple(name for name in CHANGES if name not in _UNSEEN) + _LOOKS
#: Where an actor has nothing to do until someone else did something.
REST = "rest"


class Killed(BaseException):
    """The process is gone: nothing of it touches the disk any more."""


class Call(NamedTuple):
    """What an actor is about to do."""

    method: str
    given: tuple[Any, ...] = ()

    def paths(self) -> list[Path]:
        return [path for path in self.given if isinstance(path, Path)]

    def says(self, root: Path) -> str:
        """For a trace."""
        shown = (os.path.relpath(path, root) for path in self.paths())
        return f"{self.method} {' -> '.join(shown)}".strip()


class Observer(Protocol):
    """Is told of each call, in the thread of its actor."""

    def before(self, actor: Actor, call: Call) -> None: ...

    def after(self, actor: Actor, call: Call) -> None: ...


#: What an actor does, until it is killed.
Work = Callable[["Actor"], None]


class Actor:
    """A thread that stops before each call of its storage that it was told to stop at.

    Args:
        name: for the trace.
        work: what it does, until it is killed.
        observer: is told of each call; what it raises ends the actor, and is raised by ``go_on``.
    """

    def __init__(self, name: str, work: Work, observer: Observer) -> None:
        self.name = name
        self.storage = SteppedStorage(self)
        self.next = Call(REST)
        self.asked_to_stop = False
        self.killed = False
        self._observer = observer
        self._until: Callable[[Call], bool] = lambda _: True
        self._error: BaseException | None = None
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def go_on(self, until: Callable[[Call], bool]) -> None:
        """Let it do its next call, and those after it until one is reached, or a rest.

        Who was killed does nothing.
        """
        if self.killed:
            return
        self._until = until
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        """End it where it is."""
        self.killed = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def reach(self, call: Call) -> None:
        """Do nothing, or stop until it is told to go on."""
        self.raise_if_killed()
        try:
            self._observer.after(self, self.next)
            stops = call.method == REST or self._until(call)
        except BaseException as error:  # noqa: BLE001 - what it is in the midst of must not catch it
            self._error, self.killed = error, True
            raise Killed from None
        self.next = call
        if stops:
            self._stopped.release()
            self._go.acquire()
            self.raise_if_killed()
        self._observer.before(self, call)

    def rest(self) -> None:
        self.reach(Call(REST))

    def raise_if_killed(self) -> None:
        if self.killed:
            raise Killed

    def raise_if_asked_to_stop(self) -> None:
        if self.asked_to_stop:
            raise CancelledError("asked to stop")

    def _run(self, work: Work) -> None:
        try:
            self.rest()
            work(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where the actor was told to go on
            self._error, self.killed = error, True
        finally:
            self._stopped.release()


class SteppedStorage(FastStorage):
    """Stops its actor before every call; what is written to one file in pieces is one call."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self._actor = actor
        self._last: tuple[str, Any] = ("", None)

    def _before(self, method: str, *given: Any) -> None:
        before, self._last = self._last, (method, given[0])
        if method in _PARTS and before == self._last:
            self._actor.raise_if_killed()
        else:
            self._actor.reach(Call(method, given))


for _name in STOPS:
    setattr(SteppedStorage, _name, asking(FastStorage, _name))


class Heartbeat:
    """An explorer's session, which beats when the test says so. In place of ``leases.Session``."""

    def __init__(self, path: Path, owner: str) -> None:
        self.id = path.stem
        self.owner = owner
        self.beats = True
        self._path = path
        self._count = 0
        self.beat()

    def beat(self) -> None:
        if self.beats:
            self._count += 1
            self._path.write_text(self.owner)
            os.utime(self._path, ns=(self._count, self._count))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.beats = False
        self._path.unlink(missing_ok=True)


class _NoEvents:
    """In place of ``watch.Watcher``: the filesystem sends none, and the test says when to look."""

    def __init__(self, _: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, _: float) -> bool:
        return False

    def wake(self) -> None: ...


class Sessions:
    """All heartbeats of a job's explorers."""

    def __init__(self, layout: JobLayout) -> None:
        self._layout = layout
        self._all: list[Heartbeat] = []

    def begin(self, layout: JobLayout, _: float) -> Heartbeat:
        owner = threading.current_thread().name
        self._all.append(Heartbeat(layout.session(f"session-{len(self._all)}"), owner))
        return self._all[-1]

    def beat(self) -> None:
        for heartbeat in self._all:
            heartbeat.beat()

    def end(self, owner: str) -> None:
        """The heartbeat of an actor is not heard any more."""
        for heartbeat in self._all:
            heartbeat.beats = heartbeat.beats and heartbeat.owner != owner

    def living(self) -> set[str]:
        return {heartbeat.id for heartbeat in self._all if heartbeat.beats}


@contextmanager
def deterministic(sessions: Sessions) -> Iterator[None]:
    """The same names in the same order, no threads of filelock's, and no events."""
    drawn = random.Random(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda size: drawn.randbytes(size).hex())
        patch.setattr(reader, "Session", sessions.begin)
        patch.setattr(reader, "Watcher", _NoEvents)
        yield


# -- trainers ------------------------------------------------------------------------------------


@dataclass
class Order:
    """One save that all ranks are to write.

    Attributes:
        value: what every weight of it is.
        retires: whether the full checkpoints before it are retired once it is announced.
        written: what its ranks have renamed into the step's folder: path in it → inode.
        in_progress: until it is announced, or a rank of it is gone.
    """

    save_id: SaveId
    value: float
    full: bool
    retires: bool
    written: dict[str, int] = field(default_factory=dict)
    in_progress: bool = True


class Run:
    """A trainer of two ranks, from its start until it is killed or fails.

    Args:
        layout: the job.
        number: which run it is.
        full_before: the full checkpoints of the runs before it.
    """

    WORLD_SIZE = 2

    def __init__(self, layout: JobLayout, number: int, full_before: list[int]) -> None:
        self._layout = layout
        self.id = f"run{number}"
        self.orders: list[Order] = []
        self.done = [0] * self.WORLD_SIZE
        self.began = False
        self.failed = ""
        self._full = full_before

    @property
    def takes_orders(self) -> bool:
        """A rank trains on while it writes a save, and waits for that before the next one."""
        return not self.failed and min(self.done) >= len(self.orders) - 1

    def fail(self, why: str) -> None:
        """It takes no more orders, and nobody waits for those that it has."""
        self.failed = why
        for order in self.orders:
            order.in_progress = False

    def work_of(self, rank: int) -> Work:
        def work(actor: Actor) -> None:
            job = Job(actor.storage, self._layout)
            job.open()
            if rank == 0:
                self._report(actor, None)
                self.began = True
            writer = RankWriter(
                job,
                rank,
                self.WORLD_SIZE,
                save_timeout=1e9,
                stopped=_Patience(actor),
            )
            while True:
                while not (self.began and self.done[rank] < len(self.orders)) or self.failed:
                    actor.rest()
                try:
                    self._save(actor, rank, writer, self.orders[self.done[rank]])
                except SaveFailedError as error:
                    self.fail(str(error))
                self.done[rank] += 1

        return work

    def _save(self, actor: Actor, rank: int, writer: RankWriter, order: Order) -> None:
        """As the thread of ``TrainerHook`` does."""
        if rank == 0:
            self._report(actor, order.save_id.step)
        part = {"state": torch.full((2,), order.value)} if order.full else None
        contents = RankContents(
            model={"weight": torch.full((3,), order.value)},  # plain: the same on every rank
            optimizer=part,
            extra=part,
            model_files=lambda: {"config.json": config(order.value).encode()},
            fsdp_version=2,
            is_full=order.full,
        )
        writer.save(order.save_id, contents)
        if rank == 0:
            order.in_progress = False
            if order.full:
                self._retire(actor, order)

    def _retire(self, actor: Actor, order: Order) -> None:
        step = order.save_id.step
        if order.retires:
            for old in sorted(set(self._full) - {step}):
                folder = self._layout.step(old)
                try:
                    actor.storage.rename(folder / FULL, folder / RETIRED)
                except FileNotFoundError:
                    pass  # that step was begun again, and not finished
            self._full.clear()
        self._full.append(step)

    def _report(self, actor: Actor, step: int | None) -> None:
        report = TrainerReport(
            run_id=self.id, world_size=self.WORLD_SIZE, status="running", step=step, time=0.0
        )
        actor.storage.replace(self._layout.trainer_report, encode(report), room=self._layout.drafts)


def config(value: float) -> str:
    """The ``config.json`` of a save."""
    return json.dumps({"value": value})


class _Patience(threading.Event):
    """Rank 0's wait for the others: as long as the test likes."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self._actor = actor

    def wait(self, timeout: float | None = None) -> bool:
        if timeout:
            self._actor.rest()
        return self.is_set()


# -- daemons, pruners, explorers -----------------------------------------------------------------

Begin = Callable[[Actor, bool], Loop]


@dataclass(frozen=True)
class Rules:
    """How daemons work; a test may replace a part by one that breaks a rule."""

    epoch: type[Epoch] = Epoch
    pruner: type[Pruner] = Pruner

    def begin(self, actor: Actor, layout: JobLayout, clock: Clock, *, publishes: bool) -> Loop:
        """Take over, with no lock that could keep two daemons apart."""
        epoch = self.epoch.take_over(Job(actor.storage, layout))
        name = f"{actor.name}-session".replace(" ", "-")
        tenure = Tenure(
            Job(actor.storage, layout),
            cast("Session", SimpleNamespace(id=name, lease_time=LEASE_TIME)),
            epoch,
            Judge(actor.storage, LEASE_TIME, clock=clock),
            actor.raise_if_asked_to_stop,
            clock=clock,
            wall=lambda: 0.0,
        )
        loop = Loop(tenure, CONFIG, publishes=publishes, work=work())
        loop._pruner.__class__ = self.pruner
        return loop


def daemon(begin: Begin, layout: JobLayout) -> Work:
    """What ``Service`` does, without the lock: active until superseded, and then again."""

    def work(actor: Actor) -> None:
        while True:
            actor.asked_to_stop = False
            try:
                _serve(actor, begin(actor, True), layout)
            except (SupersededError, CancelledError, JobUnavailableError, OSError):
                pass  # stand by
            actor.rest()

    return work


def _serve(actor: Actor, loop: Loop, layout: JobLayout) -> None:
    loop.begin()
    try:
        while not actor.asked_to_stop:
            try:
                loop.run_once()
            except OSError:
                if not actor.storage.exists(layout.format):
                    raise
            actor.rest()
    finally:
        if loop.tenure.epoch.is_live():
            loop.end()


def pruner(begin: Begin, layout: JobLayout) -> Work:
    """``syncd prune --dry-run``, and then ``syncd prune`` without the lock."""

    def work(actor: Actor) -> None:
        while True:
            try:
                would_prune(Job(actor.storage, layout), CONFIG)
                actor.rest()
                loop = begin(actor, False)
                loop.begin()
                try:
                    loop.run_once()
                    while loop.has_more:
                        loop.run_once()
                finally:
                    loop.end()
            except (SupersededError, JobUnavailableError, OSError):
                pass
            actor.rest()

    return work


def explorer(name: str, layout: JobLayout, sessions: Sessions, served: list[int]) -> Work:
    """Pulls whatever is newest, and serves it; ``served`` outlives the process."""

    def work(actor: Actor) -> None:
        while True:
            one = reader.Reader(layout.root, name, storage=actor.storage)
            held: LeasedVersion | None = None
            actor.asked_to_stop = False
            actor.rest()
            while not actor.asked_to_stop:
                try:
                    held = _served(one, held, served)
                    actor.rest()
                    held.verify()  # an engine may restart from its folder at any time
                except WaitTimeoutError:
                    pass
                except VerificationError:
                    if one.session_id in sessions.living():
                        raise
                actor.rest()
            if held is not None:
                held.release()
            one.close()

    return work


def _served(one: reader.Reader, before: LeasedVersion | None, served: list[int]) -> LeasedVersion:
    """The next version, once it was read whole; it is never older than what was served."""
    one.report(RunningStatus.REQUIRE_SYNC, sequence=before.sequence if before else None, step=None)
    version = one.next_version(before.sequence if before else 0, 0)
    try:
        version.verify()
    except VerificationError:
        version.release()
        raise
    assert version.sequence >= max(served, default=0), "an explorer went back"
    for file in version.open_weights():
        assert file.entries
    served.append(version.sequence)
    if before is not None:
        before.release()
    one.report(RunningStatus.RUNNING, sequence=version.sequence, step=version.step)
    return version


def follower(layout: JobLayout, sessions: Sessions, values: Mapping[str, float]) -> Work:
    """Copies each whole tip that it finds, and serves it; ``values`` are the saves' weights."""

    def work(actor: Actor) -> None:
        session = sessions.begin(layout, LEASE_TIME).id
        job, served = Job(actor.storage, layout), 0
        staging = Staging(layout.root.parent / "stage")
        while True:
            latest = read_latest(job)
            tip = latest.tip if latest else None
            report = ExplorerReport(
                name="follower", session=session, status="running", time=0.0,
                sequence=served or None, fetching=tip and tip.root,
                follows_deltas=True, follows_tip=True,
            )  # fmt: skip
            actor.storage.replace(layout.explorer("follower"), encode(report))
            if latest and tip and tip.root and tip.sequence > served:
                with suppress(NotStagedError):
                    copy = staging.follow(Lead(job, latest, tip), _no_version)
                    now = read(Latest, layout.latest)
                    assert tip.sequence >= (now.rollback or 0), "what was rolled back is served"
                    check_weights(copy.folder, values[tip.save_id])
                    copy.release()
                    served = tip.sequence
            elif latest:
                served = max(served, latest.sequence)
            actor.rest()

    return work


def _no_version() -> LeasedVersion:
    raise AssertionError("a whole tip needs no version")
