"""Small jobs on a real disk, without torch: saves as a trainer leaves them, and a daemon's loop."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.daemon.blocks import Blocks
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import Decision
from syncd.daemon.loop import Loop
from syncd.daemon.makes import MakeWork
from syncd.daemon.telling.journal import Meter
from syncd.daemon.tenure import Tenure
from syncd.protocol.errors import SupersededError
from syncd.protocol.journal_lines import AuditLine
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import NAME_MAP, RECEIPTS, STATE_POINTER, receipt_name
from syncd.protocol.records import (
    Latest,
    Quarantine,
    R,
    Receipt,
    ReceiptFile,
    Record,
    SaveOutcomes,
    encode,
    parse,
)
from syncd.protocol.reports import DaemonReport
from syncd.protocol.requests import RollbackRequest
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage
from syncd.storage.job import Job
from syncd.storage.judge import Judge
from syncd.storage.leases import Lease
from syncd.storage.sessions import DaemonLock, Session
from tests.lagging import Hosts
from tests.makers import MakerHere
from tests.storages import Clock, FastStorage

LEASE_TIME = 30.0


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit of a file's byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    """Change a record as a program would that writes no digest at its end."""
    text = path.read_text().partition(',"xxh3-64"')[0].replace(old, new)
    path.write_text(f"{text}}}\n")


def nothing() -> None:
    """Nobody cancels."""


def weights(*values: float, name: str = "weight") -> bytes:
    """A safetensors file with one float32 tensor."""
    data = struct.pack(f"<{len(values)}f", *values)
    return header_bytes([HeaderEntry(name, "F32", (len(values),), 0, len(data))]) + data


def receipt_of(content: bytes, name: str = "model.safetensors") -> ReceiptFile:
    """What our hook's receipt says of a safetensors file."""
    length = 8 + int.from_bytes(content[:8], "little")
    digest = xxhash.xxh3_128_hexdigest(content[:length])
    return ReceiptFile(name=name, size=len(content), digest=digest, over="header")


def read(model: type[R], path: Path) -> R:
    """A record of a file, which may be replaced meanwhile."""
    return parse(model, Storage().read(path, LONG_RECORD_LIMIT), path)


class Rounds(Loop):
    """A loop on hosts that may lag: each round is first done with what its client believes."""

    job: SmallJob
    clock: Clock

    def run_once(self) -> Decision:
        decision = super().run_once()
        if not self.job.hosts.lags:
            return decision
        self.job.hosts.settle()
        later = super().run_once()
        return Decision((*decision.actions, *later.actions), later.waiting_for)

    def rounds(self, count: int, seconds: float) -> None:
        """Rounds, so many seconds after each."""
        for _ in range(count):
            self.run_once()
            self.clock.advance(seconds)

    def publish(self, *steps: int) -> None:
        """A save of each step, and a round."""
        for step in steps:
            self.job.save(step)
            self.run_once()


class SmallJob(Job):
    """A job directory and what its trainer does in it.

    Its storage is the client of the daemon's host; the trainer works on the server itself.

    Attributes:
        hosts: of the daemon and of explorers.
        explorers: the client that leases are taken from.
    """

    def __init__(
        self, root: Path, storage: Storage | None = None, *, hosts: Hosts | None = None
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        hosts = hosts or Hosts()
        super().__init__(storage or hosts.storage(), JobLayout(root))
        self.hosts = hosts
        self.explorers = hosts.storage()
        Job.at(root, FastStorage()).open(lease_time=LEASE_TIME)

    @property
    def root(self) -> Path:
        return self.layout.root

    @property
    def state_pointer(self) -> Path:
        return self.layout.state_pointer

    def step(self, step: int) -> Path:
        return self.layout.step(step)

    def actor(self, step: int) -> Path:
        return self.layout.actor(step)

    def version(self, sequence: int) -> Path:
        return self.layout.version(sequence)

    def session(self, session: str) -> Path:
        return self.layout.session(session)

    def lease_folder(self, sequence: int) -> Path:
        return self.layout.lease_folder(sequence)

    def explorer(self, name: str) -> Path:
        return self.layout.explorer(name)

    def delta(self, sequence: int) -> Path:
        return self.layout.delta(sequence)

    def save(
        self,
        step: int,
        *values: float,
        counter: int = 0,
        receipts: bool = True,
        point: bool = True,
        config: bytes = b'{"architectures": ["Tiny"], "model_type": "tiny"}',
    ) -> str:
        """Write a whole save as a full state dict, and let the pointer name it."""
        actor = self.actor(step)
        content = weights(*(values or (float(step), 2.0, 3.0)))
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        self.put(actor / "huggingface" / "config.json", config)
        save_id = f"run-{step}-{counter}"
        if receipts:
            (actor / RECEIPTS).mkdir(exist_ok=True)
        self.put(actor / "model.safetensors", content)
        if receipts:
            told = [
                ReceiptFile(
                    name=f"huggingface/{path.name}",
                    size=path.stat().st_size,
                    digest=xxhash.xxh3_128_hexdigest(path.read_bytes()),
                    over="content",
                )
                for name in ("config.json", NAME_MAP)
                if (path := actor / "huggingface" / name).exists()
            ]
            self.receipt(step, save_id, 0, 1, receipt_of(content), *told)
        if point:
            self.point(step)
        return save_id

    def receipt(
        self, step: int, save_id: str, rank: int, world_size: int, *files: ReceiptFile
    ) -> None:
        """Write one rank's receipt."""
        folder = self.actor(step) / RECEIPTS
        folder.mkdir(parents=True, exist_ok=True)
        record = Receipt(save_id=save_id, step=step, rank=rank, world_size=world_size, files=files)
        self.put_record(folder / receipt_name(rank), record)

    def ask_rollback(self, sequence: int, by: str = "someone") -> None:
        """Leave the request that a version is served again."""
        request = RollbackRequest(id="ask", sequence=sequence, by=by, time=0.0)
        self.put_record(self.layout.request("ask"), request)

    def point(self, step: object, name: str = STATE_POINTER) -> None:
        """Replace a pointer."""
        self.put(self.root / name, f"{step}\n".encode())

    def put(self, path: Path, content: bytes) -> None:
        """Replace a file by a rename: its inode is a new one."""
        draft = path.with_name(f"{path.name}.new")
        draft.write_bytes(content)
        draft.rename(path)

    def put_record(self, path: Path, record: Record) -> None:
        """Replace a record's file."""
        self.put(path, encode(record))

    def lease(self, sequence: int, session: str, name: str = "explorer") -> Lease:
        """Hold a version."""
        return Lease.take(Job(self.explorers, self.layout), sequence, name, session)

    @property
    def latest(self) -> Latest:
        """What LATEST says."""
        return read(Latest, self.layout.latest)

    @property
    def pointed(self) -> str:
        """What the pointer says."""
        return self.state_pointer.read_text()

    @property
    def serves(self) -> tuple[int, int]:
        """Sequence and step of LATEST."""
        return self.latest.sequence, self.latest.step

    @property
    def daemon_says(self) -> DaemonReport:
        return read(DaemonReport, self.layout.daemon_report)

    @property
    def refused(self) -> Quarantine:
        """Why the only save in quarantine is there."""
        (record,) = self.layout.quarantine.iterdir()
        return read(Quarantine, record)

    @property
    def outcomes(self) -> dict[int, str]:
        """Step → what became of its last save."""
        saves = read(SaveOutcomes, self.layout.saves)
        return {step: outcome.outcome for step, outcome in saves.steps.items()}

    @property
    def versions(self) -> list[str]:
        """The published folders."""
        return sorted(path.name for path in self.layout.published.iterdir())

    @property
    def audit(self) -> list[tuple[str, str]]:
        """What was deleted, in order."""
        if not self.layout.audit.exists():
            return []
        lines = filter(None, self.layout.audit.read_bytes().splitlines())
        return [(line.what, line.name) for line in (parse(AuditLine, x, "audit") for x in lines)]

    def leftovers(self) -> list[Path]:
        """Everything under a temporary name."""
        return sorted(path for path in self.root.rglob(".tmp-*"))

    def take_over(self, storage: Storage | None = None) -> Epoch:
        """A new room, of a daemon on another host; the one before is superseded."""
        return Epoch.take_over(Job(storage or self.hosts.storage(), self.layout))

    @contextmanager
    def daemon(
        self,
        config: DaemonConfig | None = None,
        *,
        clock: Clock | None = None,
        begin: bool = True,
        meter: Meter | None = None,
        deltas: MakeWork | None = None,
    ) -> Iterator[Rounds]:
        """An active daemon, from its take-over to its end, that a test moves round by round."""
        clock = clock or Clock()
        with Session(self.layout, LEASE_TIME) as session, ExitStack() as stack:
            judge = Judge(self.storage, LEASE_TIME, clock=clock)
            lock = DaemonLock(self, LEASE_TIME, judge)
            if not lock.try_acquire():  # a service would stand by
                raise SupersededError(f"{self.layout.daemon_lock} is held")
            stack.callback(lock.release)
            epoch = Epoch.take_over(self)
            tenure = Tenure(
                self,
                session,
                epoch,
                judge,
                blocks=Blocks(LEASE_TIME, clock),
                meter=meter or Meter(),
                clock=clock,
                wall=lambda: 0.0,
            )
            loop = Rounds(tenure, config or DaemonConfig(), work=deltas or MakeWork(MakerHere))
            loop.job, loop.clock = self, clock
            try:
                if begin:
                    loop.begin()
                yield loop
            finally:
                loop.leave()
                if epoch.is_live():
                    loop.end()

    def run(
        self,
        config: DaemonConfig | None = None,
        *,
        rounds: int = 1,
        seconds: float = 0,
        **daemon: Any,
    ) -> None:
        """A daemon, for so many rounds, and so many seconds after each."""
        with self.daemon(config, **daemon) as loop:
            loop.rounds(rounds, seconds)


def published(job: SmallJob, steps: int) -> None:
    """Steps 1, 2, …, each a version; nothing is pruned."""
    with job.daemon(DaemonConfig(keep=99, prune_steps=False)) as loop:
        loop.publish(*range(1, steps + 1))
