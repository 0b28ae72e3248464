"""Ranks of a trainer that calls Trinity-RFT's FSDP helpers; see ``following``."""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from syncd.protocol.errors import SyncdError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import shard_name
from syncd.protocol.policy import SyncSettings
from tests import tiny_language
from tests.doc_blocks import blocks
from tests.fsdp_models import tensors
from tests.multiprocess.following import serve, tell, wait_for_explorer, write_truth
from tests.multiprocess.processes import DEADLINE, wait_until
from tests.wrappings import fsdp1, fsdp2
from trainer_hooks.trinity import (
    CheckpointCoordinator,
    fsdp_save_state_dict,
    fsdp_state_dict_meta,
    fsdp_sync_weight_nccl,
    fsdp_upload_state_dict,
)

STEPS = 3
STRATEGIES = ("fsdp", "fsdp2")
LOG = logging.getLogger("trainer")


def _engine(strategy: str, *ranks: int) -> SimpleNamespace:
    """What Trinity's helpers are given, of a tiny model."""
    torch.manual_seed(1)
    module = tiny_language.model()
    plain = copy.deepcopy(module)
    mesh = DeviceMesh("cpu", list(ranks))
    module = (
        fsdp1(module, process_group=mesh.get_group()) if strategy == "fsdp" else fsdp2(module, mesh)
    )

    def get_per_tensor_param() -> tuple[Iterator[tuple[str, Tensor]], None]:
        return iter(tensors(module).items()), None

    manager = SimpleNamespace(processing_class=tiny_language.tokenizer())
    return SimpleNamespace(
        module=module,
        plain=plain,
        checkpoint_manager=manager,
        get_per_tensor_param=get_per_tensor_param,
        _strategy=strategy,
    )


def _train(engine: SimpleNamespace, step: int) -> None:
    """The model, and what it would be without FSDP."""
    with torch.no_grad():
        for parameter in (*engine.module.parameters(), *engine.plain.parameters()):
            parameter.add_(step)


def _fill(engine: SimpleNamespace, number: float) -> None:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(number)


def _write_truth(root: Path, step: int, engine: SimpleNamespace) -> None:
    if dist.get_rank() == 0:
        write_truth(root / "truth", step, engine.plain)


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except SyncdError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- checkpoint sync -------------------------------------------------------------------------------


def _saving(root: Path, strategy: str) -> None:
    """As the page says; each step is trained when the explorer has the one before."""

    def train(engine: SimpleNamespace, step: int) -> None:
        if step > 1:
            wait_for_explorer(root / "job", step - 1)
        _train(engine, step)
        _write_truth(root, step, engine)

    given = {"job_dir": root / "job", "engine": _engine(strategy, 0, 1), "steps": STEPS}
    given |= {"train": train, "logger": LOG}
    for pasted in blocks("trinity.md")[:2]:
        exec(pasted, given)  # noqa: S102 # what users run
    tell(root)


saving_fsdp, saving_fsdp2 = (partial(_saving, strategy=kind) for kind in STRATEGIES)


def beside_verl(root: Path) -> None:
    """The lines of verl's page, in a worker that has no more than they need."""
    given: dict[str, Any] = {}
    exec(blocks("verl.md")[0], given)  # noqa: S102 # what users run
    worker = type("Worker", (given["SyncSaves"],), {})()
    worker.actor = SimpleNamespace(engine=_engine("fsdp2", 0, 1))
    for step in range(1, STEPS + 1):
        _train(worker.actor.engine, step)
        _write_truth(root, step, worker.actor.engine)
        worker.save_state_dict(str(root / "job"), step)
        if step < STEPS:
            wait_for_explorer(root / "job", step)
    worker.finish_saves()
    tell(root)


def gated(root: Path) -> None:
    """What moves the pointer, and what does not."""
    job, rank = root / "job", dist.get_rank()
    layout = JobLayout(job)
    engine = _engine("fsdp2", 0, 1)
    said: dict[str, str] = {}

    def pointed() -> str:
        path = layout.state_pointer
        return path.read_text().strip() if path.exists() else "nothing"

    def write(step: int, number: float) -> None:
        torch.save({"weight": torch.full((3,), number)}, layout.actor(step) / shard_name(2, rank))

    def late(step: int) -> None:
        write(step, 1.0)
        if rank == 1:
            wait_until((root / "go").exists, "rank 0 has looked")

    coordinator = CheckpointCoordinator(job, settings=SyncSettings(save_timeout=DEADLINE))
    # Both shards are there, and one rank has not said so of its own.
    coordinator.save_async("model_state_dict", lambda: late(1), 1, is_state_dict=True)
    if rank == 0:
        shards = [layout.actor(1) / shard_name(2, one) for one in range(2)]
        wait_until(lambda: all(one.exists() for one in shards), "both shards are written")
        wait_until((layout.actor(1) / ".receipts" / "rank_0.json").exists, "rank 0 vouches")
        said["before"] = pointed()
        (root / "go").touch()
    coordinator.wait_all()
    dist.barrier()
    said["after"] = pointed()

    # What is no state dict is done, and announced to nobody.
    coordinator.save_async("optimizer", (root / f"optimizer_{rank}").touch, 2)
    coordinator.wait_all()
    dist.barrier()
    said["optimizer"] = str((root / f"optimizer_{rank}").exists())
    said["not announced"] = pointed()

    # One rank cannot write.
    def fails(step: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("no shard")
        write(step, 3.0)

    coordinator.save_async("model_state_dict", lambda: fails(3), 3, is_state_dict=True)
    said["failed"] = _refusal(coordinator.wait_all)
    dist.barrier()
    said["after failure"] = pointed()

    # One rank writes elsewhere.
    def elsewhere(step: int) -> None:
        if rank == 0:
            write(step, 4.0)

    coordinator.save_async("model_state_dict", lambda: elsewhere(4), 4, is_state_dict=True)
    said["elsewhere"] = _refusal(coordinator.wait_all)

    def save(step: int, path: Path) -> None:
        fsdp_save_state_dict(engine, path, step, coordinator, LOG)

    said["path"] = _refusal(lambda: save(5, root / "elsewhere"))
    fsdp_save_state_dict(engine, None, 5, coordinator, LOG)

    # What is saved is what was there when the call was made.
    _fill(engine, 6.0)
    save(6, layout.actor(6))
    _fill(engine, 7.0)
    coordinator.close()
    coordinator.close()
    said["closed"] = _refusal(lambda: save(8, layout.actor(8)))
    dist.barrier()
    said["at last"] = pointed()
    tell(root, **said)


# -- memory sync -----------------------------------------------------------------------------------


def _uploading(root: Path, strategy: str) -> None:
    engine, rank = _engine(strategy, 0, 1), dist.get_rank()
    given = {"job_dir": root / "job", "engine": engine, "rank": rank, "logger": LOG, "step": 1}
    _train(engine, 1)
    _write_truth(root, 1, engine)
    refused = _refusal(lambda: fsdp_upload_state_dict(engine, None, 1, LOG))
    fsdp_upload_state_dict(engine, None, 0, LOG)
    exec(blocks("trinity.md")[2], given)  # noqa: S102 # what users run
    tell(root, refused=refused)


uploading_fsdp, uploading_fsdp2 = (partial(_uploading, strategy=kind) for kind in STRATEGIES)


# -- broadcast -------------------------------------------------------------------------------------


def broadcasting(root: Path) -> None:
    """Ranks 0 and 1 train, rank 2 receives."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    found: dict[str, object] = {}
    for strategy in STRATEGIES:
        if rank == 2:
            DeviceMesh("cpu", [0, 1])  # all make what some are on
            found[strategy] = _received(group)
            continue
        engine = _engine(strategy, 0, 1)
        _train(engine, 1)
        meta = fsdp_state_dict_meta(engine)
        # Without its receivers rank 0 says so, and sends nothing to the default group; the others
        # are not kept waiting.
        refused = _refusal(lambda: fsdp_sync_weight_nccl(engine, None))  # noqa: B023 # at once
        assert refused.startswith("InvalidSettingsError: the weights cannot be broadcast") is (
            rank == 0
        ), refused
        if rank == 0:
            dist.broadcast_object_list([meta], 0, group=group)
        fsdp_sync_weight_nccl(engine, group)
        if rank == 0:
            dist.broadcast_object_list([engine.plain.state_dict()], 0, group=group)
        found[strategy] = len(meta)
    tell(root, **found)


def _received(group: dist.ProcessGroup) -> list[str]:
    """The names of what came, where it is what was trained; in the order in which it came."""
    told = [None]
    dist.broadcast_object_list(told, 0, group=group)
    received = {}
    for name, dtype, shape in told[0]:
        received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(received[name], 0, group=group)
    dist.broadcast_object_list(told, 0, group=group)
    whole = told[0]
    assert received.keys() == whole.keys()
    assert all(torch.equal(received[name], whole[name]) for name in whole)
    return list(received)


if __name__ == "__main__":
    serve(globals())
