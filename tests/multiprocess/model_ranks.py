"""Ranks that save real models through ``trainer_hooks``, sharded and gathered; a program.

``python -m tests.multiprocess.model_ranks ROOT`` is one process, forked into ranks. For each of
KINDS, models of ``tests/zoo.py``, and each of its world sizes W, it writes::

    ROOT/KIND-W/truth.pt           the state dict from before wrapping
    ROOT/KIND-W/sharded/actor/     each rank's shard, of copies in host buffers
    ROOT/KIND-W/full/actor/        model.safetensors, gathered, with a receipt
    ROOT/KIND-W/tied/actor/        the same of a model whose config ties its embeddings
    ROOT/KIND-W/broadcast.pt       what a receiver of a broadcast has got
    ROOT/KIND-W/broadcast-tied.pt  the same of a model whose config ties its embeddings

and, of what leaves no files, ``ROOT/rank_R_of_W.json``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from explorer_hooks.broadcast import WeightReceiver, greet
from syncd.checkpoint.tensor_rules import Casting
from syncd.cli.demo_model import TinyTransformer, batch
from syncd.coordination.broadcast.group import WeightGroup
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.names import FULL_STATE_DICT, RECEIPTS, receipt_name, shard_name
from syncd.protocol.records import Receipt, encode
from syncd.storage.fsio import Draft
from tests import wrappings, zoo
from tests.fsdp_models import Block, Config
from tests.fsdp_ranks import write_truth
from tests.process_groups import fork
from tests.storages import STORAGE
from tests.weight_groups import transfer
from tests.wrappings import mesh, unit
from trainer_hooks.fast_path import WeightSender
from trainer_hooks.state.full_file import gather_full
from trainer_hooks.state.host_buffers import HostBuffers, _parts
from trainer_hooks.state.state_dict import sharded_state_dict
from trainer_hooks.state.weights_in_memory import WeightsInMemory
from trainer_hooks.state.wrappers import unwrapped
from trainer_hooks.writing.torch_files import save_state_dict

#: World sizes by kind.
KINDS = {
    "plain": (2,),
    "ddp": (2,),
    "wrapped": (2,),
    "fsdp1": (2, 4),
    "fsdp1_orig_params": (2,),
    "fsdp1_mesh": (2,),
    "fsdp1_hybrid_groups": (4,),
    "fsdp1_hybrid_mesh": (4,),
    "fsdp1_not_sharded": (2,),
    "fsdp2": (2, 4),
    "fsdp2_wrapped": (2,),
    "fsdp2_unordered": (2,),
    "fsdp2_columns": (4,),
    "hsdp": (4,),
    "fsdp2_tp": (4,),
}
#: Of these a third save is made, whose config ties the embeddings.
TIED = ("plain", "fsdp1", "fsdp2")


# -- saves -------------------------------------------------------------------------------------


def gathered(
    state: dict[str, Any],
    actor: Path,
    *,
    limit: int,
    tied: bool = False,
    cast: Casting | None = None,
) -> None:
    """A full state dict, as rank 0 writes it; ``limit`` is the size of its buckets."""
    part = WeightsInMemory(limit)
    gather_full(state, dist.get_rank(), part, tied=tied, cast=cast)
    if dist.get_rank() != 0:
        return
    (actor / RECEIPTS).mkdir(parents=True)
    with Draft(STORAGE, actor / FULL_STATE_DICT) as draft:
        files = (part.write(draft),)
    receipt = Receipt(save_id="run-1-0", step=1, rank=0, world_size=1, files=files)
    (actor / RECEIPTS / receipt_name(0)).write_bytes(encode(receipt))


def broadcast(model: nn.Module, path: Path, cast: Casting | None = None) -> None:
    """What arrives where all ranks send; the receiver is a thread of rank 0's process."""
    sender = WeightSender(model, bucket_bytes=2048, cast=cast)
    if dist.get_rank() != 0:
        assert sender.send(None).buckets == 0
        return
    sent, received = transfer(
        sender.send, lambda group: dict(WeightReceiver(group).receive(lambda _: None))
    )
    assert sent.result().buckets > 1
    torch.save({name: value.clone() for name, value in received.result().items()}, path)


@contextmanager
def without_quantized(model: nn.Module) -> Iterator[None]:
    """Take the parameters that cannot be cast out of a model, for a while."""
    kept = [(module._parameters, dict(module._parameters)) for module in model.modules()]
    for own, parameters in kept:
        for name, value in parameters.items():
            if value is not None and is_quantized(value):
                del own[name]
    yield
    for own, parameters in kept:
        own.update(parameters)


def is_quantized(value: torch.Tensor) -> bool:
    """True for a dtype that no cast changes, because it needs scales."""
    return value.is_floating_point() and value.itemsize == 1


def broken_off(model: nn.Module) -> str:
    """What is said where the receiver goes between two buckets; nobody hangs."""
    sender = WeightSender(model, bucket_bytes=64)
    if dist.get_rank() != 0:
        sender.send(None)
        return "nothing"

    def leave(group: WeightGroup) -> None:
        with greet(group, None) as arriving:
            pass
        for number, _ in enumerate(arriving.tensors()):
            if number == 3:
                return

    sent, _ = transfer(sender.send, leave, deadline=5.0)
    return type(sent.exception()).__name__


def cast_shard(model: nn.Module, actor: Path) -> None:
    """A rank's shard, cast for explorers."""
    write_shard(HostBuffers().copy(sharded_state_dict(model), Casting("bf16")), actor)


def write_shard(state: dict[str, Any], actor: Path) -> None:
    actor.mkdir(parents=True, exist_ok=True)
    path = actor / shard_name(dist.get_world_size(), dist.get_rank())
    with Draft(STORAGE, path) as draft:
        save_state_dict(state, draft)
        draft.commit()


def sharded(model: nn.Module, actor: Path) -> None:
    """A rank's shard, of copies that what comes later must not change."""
    buffers = HostBuffers()
    first = _memory(buffers.copy(sharded_state_dict(model)))
    for part in first.values():
        part.zero_()
    copied = buffers.copy(sharded_state_dict(model))
    second = _memory(copied)
    assert second.keys() == first.keys()
    assert all(second[key].data_ptr() == part.data_ptr() for key, part in first.items())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            for part in _parts(tensor):
                part.zero_()
    write_shard(copied, actor)


def _memory(state: dict[str, Any]) -> dict[tuple[str, int], torch.Tensor]:
    return {
        (name, number): part
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        for number, part in enumerate(_parts(value))
    }


def save(kind: str, root: Path) -> None:
    """All saves of one kind of model; it is zero in the end."""
    torch.manual_seed(1)
    world_size = dist.get_world_size()
    model, truth = getattr(zoo, kind)(world_size)
    folder = root / f"{kind}-{world_size}"
    if dist.get_rank() == 0:
        folder.mkdir()
        write_truth(truth, folder)
    gathered(sharded_state_dict(model), folder / "full" / "actor", limit=64)
    if kind in TIED:
        gathered(sharded_state_dict(model), folder / "tied" / "actor", limit=2**20, tied=True)
    broadcast(model, folder / "broadcast.pt")
    with without_quantized(model):
        gathered(
            sharded_state_dict(model),
            folder / "cast-full" / "actor",
            limit=64,
            cast=Casting("bf16"),
        )
        broadcast(model, folder / "broadcast-cast.pt", Casting("bf16"))
        cast_shard(model, folder / "cast" / "actor")
    if kind in TIED:
        unwrapped(model).config = Config(tie_word_embeddings=True)
        broadcast(model, folder / "broadcast-tied.pt")
    dist.barrier()
    sharded(model, folder / "sharded" / "actor")


# -- what leaves no files ----------------------------------------------------------------------


def undisturbed(save: bool) -> dict[str, dict[str, list[float]]]:
    """What models become that are trained, and saved between, or not."""
    found = {}
    on = mesh(fsdp=dist.get_world_size())
    for name in ("fsdp1", "fsdp2"):
        torch.manual_seed(2)
        model = TinyTransformer()
        model = wrappings.fsdp2(model, on) if name == "fsdp2" else unit(model, device_mesh=on)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(2):
            tokens = batch(step, dist.get_rank())
            logits = model(tokens[:, :-1])
            if save and step:
                # In the middle of a step: gradients are yet to come.
                gather_full(sharded_state_dict(model), 1, None)
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            if save:
                HostBuffers().copy(sharded_state_dict(model))
            optimizer.step()
            optimizer.zero_grad()
        state = sharded_state_dict(model)
        found[name] = {
            key: part.double().sum(-1).flatten().tolist()
            for (key, _), part in _memory(state).items()
        }
    return found


def refused() -> dict[str, str]:
    """What is said of states that cannot be gathered; nobody hangs."""
    rank = dist.get_rank()
    block = Block(torch.float32)
    states = {
        "other names": {f"{rank}.{name}": value for name, value in block.state_dict().items()},
        "other shape": {"weight": torch.zeros(3 + rank)},
        "complex": {"weight": torch.zeros(3, dtype=torch.complex128 if rank else torch.float32)},
        "no tensors": {"weight": "text"},
    }
    return {name: _refusal(state) for name, state in states.items()}


def _refusal(state: dict[str, Any]) -> str:
    try:
        gather_full(state, dist.get_rank(), WeightsInMemory())
    except SaveFailedError as error:
        return str(error)
    return "nothing"


# -- the processes -----------------------------------------------------------------------------


def rank(_: int, world_size: int, root: Path) -> dict[str, object]:
    """Be one of the ranks."""
    for kind, sizes in KINDS.items():
        if world_size in sizes:
            save(kind, root)
    if world_size > 2:
        return {}
    return {
        "refused": refused(),
        "same": undisturbed(save=True) == undisturbed(save=False),
        "broken off": broken_off(zoo.fsdp2(world_size)[0]),
    }


if __name__ == "__main__":
    fork(rank, 2, 4)
