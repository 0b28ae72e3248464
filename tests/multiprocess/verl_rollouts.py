"""verl's manager, workers and actors on CPU, with syncd's engine; a program of verl's environment.

``python -m tests.multiprocess.verl_rollouts SCENARIO FOLDER ARGUMENT…`` runs one scenario. Two
ranks with an FSDP2 model send, two replicas receive; the arguments are those of verl's page. A
daemon works on FOLDER/job. Verl's own classes are used as they are, but for its FSDP worker, which
wants an accelerator, and an engine that would generate.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs, load_class_from_fqn
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

from syncd.protocol.errors import EngineBrokenError, SaveFailedError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import part_name
from tests.multiprocess.processes import Daemon, wait_until

_RANKS = 2
_TIMEOUT = 60


def weights_of(step: int) -> dict[str, Tensor]:
    """The model's weights at a step: uneven, and larger than a page."""
    made = torch.Generator().manual_seed(step)
    shapes = {"embed.weight": (97, 33), "layers.0.weight": (64, 64), "norm.weight": (7,)}
    return {name: torch.randn(shape, generator=made).bfloat16() for name, shape in shapes.items()}


class Sender(Worker):
    """A rank of the actor, in place of verl's ``ActorRolloutRefWorker``."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=None, backend="cpu:gloo")
        self.model = nn.Module()
        for name, value in weights_of(0).items():
            module, _, leaf = name.rpartition(".")
            self.model.add_module(module.replace(".", "-"), nn.Module())
            self.model.get_submodule(module.replace(".", "-")).register_parameter(
                leaf, nn.Parameter(value)
            )
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world_size,)))
        self.dies_at: int | None = None
        self.gives_more = False
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=self.rank == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int, dies_at: int | None = None, gives_more: bool = False) -> None:
        """Give the model a step's weights; rank 1 may die while it sends, or yield more."""
        self.dies_at = dies_at if self.rank == 1 else None
        self.gives_more = gives_more and self.rank == 1
        for (_, parameter), value in zip(
            self.model.named_parameters(), weights_of(step).values(), strict=True
        ):
            for mine in torch.chunk(value, self.world_size)[self.rank :][:1]:
                parameter.to_local().data.copy_(mine)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As the engines of verl yield them: whole, on each rank."""
        for number, (name, parameter) in enumerate(self.model.state_dict().items()):
            if number == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name.replace("-", "."), parameter.full_tensor()
        if self.gives_more:
            yield "more", torch.zeros(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, **_: Any) -> Any:
        """Send as ``ActorRolloutRefWorker`` does."""
        metrics = await self.checkpoint_engine.send_weights(
            self.tensors(), global_steps=global_steps
        )
        return metrics or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the engine as ``ActorRolloutRefWorker`` does."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Served(BaseRollout):
    """In place of an engine that would generate."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.at: dict[int, str] = {}
        self.replica_rank = 0
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(self, weights: AsyncIterator[tuple[str, Tensor]], **_: Any) -> None:
        """Copy the weights; die, fail or hang in the middle."""
        taken: dict[str, Tensor] = {}
        async for name, value in weights:
            match self.at.pop(len(taken), None):
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "fail":
                    raise RuntimeError("out of memory")
                case "hang":
                    await asyncio.Event().wait()
            taken[name] = value.clone()
        self.weights = taken


class Receiver(CheckpointEngineWorker):
    """verl's worker with this program's rollout."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, None, Served())

    def mark(self, name: str) -> int:
        """Show a moment to strace; return the process id."""
        Path(f"/moment-{name}").exists()
        return os.getpid()

    def do_at(self, number: int, what: str) -> None:
        """Die, fail or hang when this tensor comes."""
        self.server_adapter.at[number] = what

    def serves(self, step: int) -> bool:
        """Whether the weights are those of a step, bit for bit."""
        wanted, served = weights_of(step), self.server_adapter.weights
        return served.keys() == wanted.keys() and all(
            torch.equal(value.view(torch.int16), served[name].view(torch.int16))
            for name, value in wanted.items()
        )


class Replica(RolloutReplica):
    """A replica of one worker; it marks the moments between which it is paused."""

    def __init__(self, rank: int, config: RolloutConfig, workers: list[Any]) -> None:
        super().__init__(rank, config, None)
        self.workers = workers
        self.paused = False

    async def launch_servers(self) -> None:
        """Do nothing."""

    async def abort_all_requests(self, **_: Any) -> None:
        """Pause."""
        self.paused = True
        await self.workers[0].mark.remote("pause")

    async def resume_generation(self) -> None:
        """Resume."""
        await self.workers[0].mark.remote("resume")
        self.paused = False

    def serves(self, step: int) -> bool:
        """Whether it serves a step, and generates."""
        return not self.paused and all(ray.get([one.serves.remote(step) for one in self.workers]))


def group(cls: type[Worker], ranks: int, config: Any) -> RayWorkerGroup:
    """Workers without accelerators."""
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(ray.remote(cls), config)
    return RayWorkerGroup(pool, made, use_gpu=False, device_name="cpu")


class Job:
    """Actor, replicas, manager and daemon."""

    def __init__(
        self, folder: Path, arguments: list[str], stage: Path, timeout: float, *, stock: bool
    ) -> None:
        self.folder = folder / "job"
        self.folder.mkdir(exist_ok=True)
        place = Path(verl.__file__).parent / "experimental" / "one_step_off_policy" / "config"
        with initialize_config_dir(str(place), version_base=None):
            found = "hydra.searchpath=[pkg://verl.trainer.config]"  # it names a clone's folder
            name = "actor_rollout_ref.rollout.name=vllm"
            told = compose("one_step_off_ppo_trainer", [found, name, *arguments])
        told = told.actor_rollout_ref.rollout
        kwargs = told.checkpoint_engine.engine_kwargs.syncd
        assert (kwargs.job_dir, kwargs.stage) == (str(self.folder), "/dev/shm")  # noqa: S108 # the page's
        OmegaConf.set_struct(kwargs, value=False)
        kwargs.update(stage=str(stage), timeout=timeout)
        keys = ("name", "checkpoint_manager_class", "checkpoint_engine")
        self.rollout = omega_conf_to_dataclass(OmegaConf.masked_copy(told, keys), RolloutConfig)
        self.engine: CheckpointEngineConfig = self.rollout.checkpoint_engine
        self.receivers = group(Receiver, _RANKS, self.rollout)
        self.replicas = [
            Replica(rank, self.rollout, [worker])
            for rank, worker in enumerate(self.receivers.workers)
        ]
        self.stock = stock
        self.begin()

    def begin(self) -> None:
        """Start the trainer, perhaps again."""
        self.actor = group(Sender, _RANKS, self.engine)
        named = load_class_from_fqn(self.rollout.checkpoint_manager_class)
        manager = CheckpointEngineManager if self.stock else named
        self.manager = manager(config=self.engine, actor_wg=self.actor, replicas=self.replicas)

    def update(self, step: int, **named: Any) -> dict[str, Any]:
        """One step of training, and its weights for all."""
        self.actor.train(step, **named)
        return self.manager.update_weights(global_steps=step)

    def check(self, step: int) -> None:
        """All replicas serve the step."""
        assert [one.serves(step) for one in self.manager.replicas] == [True] * len(
            self.manager.replicas
        )

    def serve(self, step: int) -> dict[str, Any]:
        """One step of training, which all replicas serve then."""
        metrics = self.update(step)
        self.check(step)
        return metrics


def failure(call: Callable[[], object], kind: type[Exception], words: str = "") -> None:
    """Check the error that a call raises."""
    raised: Exception | None = None
    try:
        call()
    except Exception as error:  # noqa: BLE001 # whatever is raised is looked at
        raised = error
    assert isinstance(raised, kind), repr(raised)
    assert words in str(raised), raised


def ten_versions(job: Job) -> None:
    """Each replica serves each version bit for bit; a step may come again."""
    for step in (0, 1, 2, 3, 4, 4, 5, 6, 7, 8):
        metrics = job.serve(step)
    assert metrics["sync/version"] == 10
    assert metrics["sync/bytes"] == sum(value.nbytes for value in weights_of(8).values())


def with_verls_manager(job: Job) -> None:
    """The same with verl's own manager, which pauses before it sends."""
    for step in range(1, 4):
        job.serve(step)
    job.manager.update_weights(global_steps=None)
    job.check(3)


def paused_without_storage(job: Job) -> None:
    """Between pause and resume a worker opens and writes no file of shared storage."""
    job.update(1)
    worker = job.replicas[0].workers[0]
    pid = ray.get(worker.mark.remote("begin"))
    log = job.folder.parent / "strace.txt"
    changing = "open,openat,creat,write,pwrite64,rename,renameat,unlink,unlinkat,mkdir,rmdir"
    calls = f"{changing},stat,newfstatat,access,faccessat2"  # the last show the moments
    tracing = subprocess.Popen(
        ("strace", "-f", "-y", "-o", log, "-e", f"trace={calls}", "-p", str(pid)),
        stderr=subprocess.PIPE,
    )
    assert tracing.stderr is not None
    tracing.stderr.readline()  # it is attached
    job.serve(2)
    ray.get(worker.mark.remote("end"))
    tracing.send_signal(signal.SIGINT)
    tracing.wait(_TIMEOUT)
    lines = log.read_text().splitlines()
    moments = {
        name: next(n for n, line in enumerate(lines) if f"/moment-{name}" in line)
        for name in ("pause", "resume", "end")
    }
    touches = [n for n, line in enumerate(lines) if str(job.folder) in line]
    begun, over = moments["pause"], moments["resume"]
    inside = [
        lines[n]
        for n in touches
        if begun < n < over and not re.search(r"\b(newfstat|f?access|stat)", lines[n])
    ]
    assert not inside, "\n".join(inside)
    assert any(n < begun for n in touches), "it is copied before the pause"
    assert any(over < n < moments["end"] for n in touches), "the old version is released after it"
    staged = [line for line in lines[begun:over] if "shm" in line and "safetensors" in line]
    assert staged, "it is loaded from the stage"


def late_and_removed(job: Job) -> None:
    """A replica that joins late has the newest version at once; one that left is not waited for."""
    job.update(1)
    (worker,) = group(Receiver, 1, job.rollout).workers
    job.manager.add_replicas([Replica(2, job.rollout, [worker])])
    job.check(1)
    left = job.replicas[0]
    job.manager.remove_replicas([left])
    ray.kill(left.workers[0])
    job.serve(2)
    assert len(job.manager.replicas) == 2


def replica_killed(job: Job) -> None:
    """A replica that dies while it receives is named; the other serves the newest version."""
    job.update(1)
    ray.get(job.replicas[0].workers[0].do_at.remote(1, "die"))
    failure(lambda: job.update(2), EngineBrokenError, "replica 0")
    assert job.replicas[1].serves(2)
    job.manager.remove_replicas([job.replicas[0]])
    job.serve(3)


def worker_fails(job: Job) -> None:
    """The error of a worker is told although the replica's other one waits for it for ever."""
    both = Replica(0, job.rollout, job.receivers.workers)
    job.replicas[:] = [both]
    job.update(1)
    for worker, what in zip(both.workers, ("fail", "hang"), strict=True):
        ray.get(worker.do_at.remote(1, what))
    failure(lambda: job.update(2), EngineBrokenError, "out of memory")
    assert both.paused
    job.serve(3)


def torn(job: Job, daemon: Daemon) -> None:
    """A save whose part is torn fails with the daemon's reason; all serve what they had."""
    job.update(1)
    daemon.terminate()
    layout = JobLayout(job.folder)
    part = layout.actor(2) / part_name(_RANKS, 1)
    told = []

    def send() -> None:
        failure(lambda: job.update(2), SaveFailedError, part.name)
        told.append(part)

    sending = threading.Thread(target=send)
    sending.start()
    wait_until(lambda: layout.state_pointer.read_text().strip() == "2", "step 2 is announced")
    os.truncate(part, part.stat().st_size - 1)
    with Daemon(job.folder):
        sending.join(2 * _TIMEOUT)
        assert told
        job.check(1)
        job.serve(3)


def sender_killed(job: Job) -> None:
    """A rank that dies while it sends ends the send; a trainer that starts again goes on."""
    job.update(1)
    failure(lambda: job.update(2, dies_at=1), SaveFailedError)
    job.check(1)
    for worker in job.actor.workers:
        ray.kill(worker)
    job.begin()
    job.serve(3)


def different_tensors(job: Job) -> None:
    """Ranks that yield different tensors send nothing, and may go on with the next step."""
    job.update(1)
    refused = "the ranks were given different tensors"
    failure(lambda: job.update(2, gives_more=True), Exception, refused)
    job.check(1)
    job.serve(3)


def sender_fails_alone(job: Job) -> None:
    """An error of rank 0 before the model is gathered is told by all ranks."""
    job.engine.engine_kwargs["syncd"]["model_files"] = str(job.folder / "nowhere")
    job.begin()
    failure(lambda: job.update(1), SaveFailedError, "nowhere cannot be written: FileNotFoundError")


def main() -> None:
    """Run the scenario."""
    scenario, folder, arguments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    ray.init(num_cpus=64, include_dashboard=False, _node_ip_address="127.0.0.1")
    (folder / "job").mkdir(exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir="/dev/shm"))  # another filesystem than the job's
    try:
        with Daemon(folder / "job") as daemon:
            timeout = 5.0 if scenario == "worker_fails" else _TIMEOUT
            job = Job(folder, arguments, stage, timeout, stock=scenario == "with_verls_manager")
            if scenario == "torn":
                torn(job, daemon)
            else:
                globals()[scenario](job)
    finally:
        ray.shutdown()
        shutil.rmtree(stage)


if __name__ == "__main__":
    main()
