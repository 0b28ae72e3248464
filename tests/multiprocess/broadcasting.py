"""Trainers and explorers for tests of broadcasts: real processes that do what they are told."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import trainer_hooks.fast_path
from explorer_hooks import ExplorerHook, TorchModule
from explorer_hooks.reader import LeasedVersion
from syncd.coordination.broadcast.group import WeightGroup
from syncd.coordination.broadcast.offer import ExplorerSide, Offers
from syncd.coordination.tensors import bytes_of
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import RunningStatus, SyncSettings, Version
from syncd.protocol.reports import Rendezvous
from tests.fsdp_models import tensors
from tests.hooks import over
from tests.multiprocess.peers import CONTEXT, Peer, Ranks, Told
from tests.multiprocess.processes import DEADLINE, explorer_report, wait_until
from tests.process_groups import join
from tests.weight_groups import meeting
from tests.wrappings import fsdp2
from trainer_hooks import SaveSettings, TrainerHook
from trainer_hooks.explorers import Explorers
from trainer_hooks.fast_path import TrainerBroadcasts

SETTINGS: dict[str, Any] = {
    "method": "nccl",
    "master_address": "127.0.0.1",
    "broadcast_timeout": DEADLINE,
    "broadcast_bucket": 4096,
    "checkpoint_every": 1000,
}


class Mixed(nn.Module):
    """About 60 kB of several dtypes, tied weights and a buffer: of many buckets."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.head = nn.Linear(width, 50)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def digest_of(module: nn.Module) -> str:
    """Of all tensors, whole. Collective where they are cut."""
    hashed = xxhash.xxh3_128()
    for name, value in sorted(tensors(module).items()):
        hashed.update(name.encode())
        hashed.update(bytes_of(value))
    return hashed.hexdigest()


# -- in the processes ----------------------------------------------------------------------------


class Participant(Told):
    """Gets signals where a test wants it to."""

    def at(self, stage: str, number: int = signal.SIGKILL, after: int = 0) -> None:
        """Get a signal at a stage: ``offered``, ``decided``, ``joined``, ``bucket``, ``agree``."""
        owner, name = _STAGES[stage]
        method, left = getattr(owner, name), [after]

        def signalled(*given: Any, **named: Any) -> Any:
            if stage in {"bucket", "agree"} and left[0] == 0:
                left[0] -= 1
                os.kill(os.getpid(), number)
            result = method(*given, **named)
            reached = stage != "joined" or given[0].has_joined
            if stage in {"offered", "decided", "joined"} and reached and left[0] == 0:
                left[0] -= 1
                os.kill(os.getpid(), number)
            elif left[0] > 0:
                left[0] -= 1
            return result

        setattr(owner, name, signalled)


_STAGES: dict[str, tuple[type, str]] = {
    "offered": (Offers, "make"),
    "decided": (Offers, "decide"),
    "joined": (ExplorerSide, "look"),
    "bucket": (WeightGroup, "broadcast"),
    "agree": (WeightGroup, "agree"),
}


class Trainer(Participant):
    """One rank."""

    def __init__(self, job: Path, rendezvous: Path, rank: int, world_size: int, width: int) -> None:
        self._job = job
        if world_size > 1:
            join(rank, world_size, rendezvous)
        torch.manual_seed(0)
        self._model = Mixed(width)
        if world_size > 1:
            fully_shard(self._model.low)
            fsdp2(self._model)

    def open(self, **settings: Any) -> None:
        saving = SaveSettings(when_busy_sync="wait")  # type: ignore[arg-type] # a name will do
        self._hook = TrainerHook(
            self._job, self._model, settings=SyncSettings(**SETTINGS | settings), saving=saving
        )

    @torch.no_grad()
    def step(self, step: int) -> dict[str, Any]:
        for parameter in self._model.parameters():
            nn.init.normal_(parameter)
        self._model.seen += step
        return {"digest": digest_of(self._model), **self._hook.after_step(step)}

    def wait_for_data(self) -> dict[str, float]:
        return self._hook.sync_while_waiting()

    def over(self) -> None:
        over(self._hook)

    def close(self) -> None:
        self._hook.close()


class Sender(Participant):
    """A rank of two that sends a model."""

    def __init__(self, rendezvous: Path, rank: int) -> None:
        join(rank, 2, rendezvous)
        model = Mixed()
        fully_shard(model)
        settings = SyncSettings(method="nccl")  # type: ignore[arg-type] # a name will do
        self._path = TrainerBroadcasts(model, settings, Explorers())
        self._rank = rank

    def send_without_memory(self) -> bool:
        """To nobody; rank 0 has no memory to gather in."""
        if self._rank == 0:
            met, listening = meeting(0)
            self._path._group = WeightGroup.join(
                met, 0, deadline=DEADLINE, device=torch.device("cpu"), listening=listening
            )
            trainer_hooks.fast_path.full_tensor = _without_memory  # type: ignore[attr-defined] # for tests
        return self._path.send(1)


def _without_memory(value: object, *, rank: int) -> torch.Tensor:
    del value, rank
    raise torch.OutOfMemoryError("as torch says it, before it calls the other ranks")


class Explorer(Participant):
    """An explorer; with a second worker where it is given a connection to one."""

    def __init__(self, job: Path, name: str, worker: Connection | None, width: int) -> None:
        self._job = job
        self._name = name
        self._lock = threading.Lock()
        self._module = Mixed(width)
        self._engine = _Counting(self._module, self._lock, worker)

    def open(self, **settings: Any) -> None:
        settings = SETTINGS | settings
        self._hook = ExplorerHook(
            self._job, self._name, self._engine, settings=SyncSettings(**settings), poll=0.05
        )

    def start(self) -> None:
        self._hook.start()

    def stop(self) -> None:
        self._hook.stop()

    def wait_for(self, step: int) -> dict[str, Any]:
        """Wait until a step is served; what is served then."""
        version: Version | None = None
        while version is None or version.step != step:
            version = self._hook.wait_until_served(DEADLINE, newer_than=version)
        return self.served()

    def after_step(self, step: int) -> dict[str, Any]:
        self._hook.after_step(step)
        return self.served()

    def pull(self) -> dict[str, Any]:
        self._hook.pull(DEADLINE)
        return self.served()

    def served(self) -> dict[str, Any]:
        with self._lock:
            version = self._hook.version
            digest = digest_of(self._module)
        return {
            "sequence": version.sequence if version else None,
            "step": version.step if version else None,
            "digest": digest,
            "loads": self._engine.loads,
            "may_produce": self._hook.may_produce(),
        }

    def close(self) -> None:
        self._hook.close()


class _Counting(TorchModule):
    """Counts what it loads from files; may have a worker in another process."""

    def __init__(self, module: nn.Module, lock: Any, worker: Connection | None) -> None:
        super().__init__(module, lock=lock)
        self.loads = 0
        self._worker = worker

    @property
    def workers(self) -> int:
        return 1 if self._worker is None else 2

    def load(self, version: LeasedVersion) -> None:
        self.loads += 1
        if self._worker is not None:
            _ask(self._worker, "load", version.folder)
        super().load(version)

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        if self._worker is not None:
            self._worker.send(("receive", (rendezvous, rank_offset + 1, deadline), {}))
        try:
            super().receive(rendezvous, rank_offset, deadline)
        finally:
            answer = None if self._worker is None else self._worker.recv()
        if answer is not None and answer.error is not None:
            raise AssertionError(answer)  # the group agreed: it cannot have failed there alone


class Worker(Told):
    """The second worker of an explorer: a rank of the weight group, and no participant."""

    def __init__(self) -> None:
        self._module = Mixed()
        self._engine = TorchModule(self._module)

    def load(self, folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            self._module.load_state_dict(load_file(file), strict=False)

    def receive(self, rendezvous: Rendezvous, rank: int, deadline: float) -> None:
        self._engine.receive(rendezvous, rank, deadline)

    def served(self) -> dict[str, Any]:
        return {"digest": digest_of(self._module)}


def _ask(connection: Connection, command: str, *given: Any) -> Any:
    connection.send((command, given, {}))
    return connection.recv()


# -- in the test -----------------------------------------------------------------------------------


def ready(job: Path, *names: str) -> None:
    """Wait until these explorers would join an offer."""
    for name in names:
        wait_until(
            lambda name=name: (  # type: ignore[misc] # mypy infers no type of a default
                JobLayout(job).explorer(name).exists()
                and (one := explorer_report(job, name)).workers > 0
                and one.status == RunningStatus.REQUIRE_SYNC.value
            ),
            f"{name} is ready for a broadcast",
        )


class Cast:
    """All processes of a test; they end with it."""

    def __init__(self, stack: ExitStack, folder: Path, job: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._job = job
        self._rendezvous = 0

    def _add(self, peer: Peer) -> Peer:
        self._stack.callback(peer.end)
        return peer

    def senders(self) -> list[Peer]:
        """Two ranks of a training."""
        return [self._add(Peer(Sender, self._folder / "senders", rank)) for rank in range(2)]

    def trainer(self, world_size: int = 1, *, width: int = 48, **settings: Any) -> TrainerRanks:
        """A trainer whose hook is open."""
        self._rendezvous += 1
        met = self._folder / f"ranks-{self._rendezvous}"
        ranks = TrainerRanks(
            self._add(Peer(Trainer, self._job, met, rank, world_size, width))
            for rank in range(world_size)
        )
        ranks.all("open", **settings)
        return ranks

    def explorer(
        self, name: str, *, follows: bool = True, workers: int = 1, width: int = 48,
        **settings: Any,
    ) -> Peer:  # fmt: skip
        """An explorer whose hook is open."""
        ours = None
        if workers == 2:
            ours, theirs = CONTEXT.Pipe()
            self.worker = self._add(Peer(Worker, others=(theirs,)))
            theirs.close()
        peer = self._add(Peer(Explorer, self._job, name, ours, width))
        if ours is not None:
            ours.close()
        peer("open", **settings)
        if follows:
            peer("start")
        return peer


class TrainerRanks(Ranks):
    """The ranks of a trainer."""

    def step(self, step: int) -> dict[str, Any]:
        """One step of training, and its sync; rank 0's metrics, and what the model is then."""
        answers = self.all("step", step)
        assert len({answer["digest"] for answer in answers}) == 1
        return answers[0]


@contextmanager
def cast(folder: Path, job: Path) -> Iterator[Cast]:
    with ExitStack() as stack:
        yield Cast(stack, folder, job)
