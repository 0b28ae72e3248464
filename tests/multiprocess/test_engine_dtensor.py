"""An engine on real ranks: of each tensor it fills this rank's part, and reads nothing else.

What a rank has is known by how torch has cut the model. It is remembered, zeroed, and loaded from a
version of the whole tensors.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial

from explorer_hooks.engines.conformance import NoLease, TensorBytes, make_version
from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.tensor_rules import DTYPES
from syncd.checkpoint.version import read_manifest
from syncd.coordination.broadcast.group import WeightGroup
from syncd.coordination.tensors import bytes_of
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.names import NAME_MAP
from tests import dtensor_rules as rules
from tests import zoo
from tests.mapped_names import NAMES, Named, on_the_hub, state
from tests.multiprocess.test_dtensor_rules import Layout, _cut, by_placements, by_shard_order
from tests.process_groups import answers, fork
from tests.rank_programs import written_by
from tests.storages import RuledStorage
from tests.weight_groups import meeting
from tests.wrappings import CPU, mesh
from trainer_hooks.fast_path import WeightSender

WORLD_SIZE = 4
KINDS = ("plain", "ddp", "fsdp2", "hsdp", "fsdp2_columns", "fsdp2_tp")
#: A guard against hanging; a rank that fails leaves the others waiting for it.
DEADLINE = 120.0


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found out."""
    folder = written_by(tmp_path_factory, "tests.multiprocess.test_engine_dtensor")
    return answers(folder, WORLD_SIZE)


@pytest.mark.parametrize("what", ["layouts", "other_names", *KINDS])
def test_a_rank_fills_its_own_part_also_by_broadcast_and_reads_as_many_bytes_as_that_has(
    said: list[dict[str, Any]], what: str
) -> None:
    for rank in said:
        for in_place in ("staged", "direct"):
            found = rank[what][in_place]
            assert found["wrong"] == found["wrong by broadcast"] == []
            assert found["read"] == found["own"]
            assert found["tensors"] > 0
    if what not in {"plain", "ddp"}:
        assert any(rank[what]["staged"]["own"] < rank[what]["whole"] for rank in said)


def test_a_rank_of_four_reads_a_quarter_of_what_is_cut_in_four(said: list[dict[str, Any]]) -> None:
    for rank in said:
        told = rank["fsdp2_columns"]
        assert told["staged"]["own"] < told["whole"] * 0.4  # its one bias is cut evenly by no four


def test_a_module_with_the_hubs_names_takes_a_broadcast_by_the_map_of_its_version(
    said: list[dict[str, Any]],
) -> None:
    for rank in said:
        assert rank["by_the_hubs_names"] == {"staged": [], "direct": []}


def test_what_fsdp2_gathered_before_the_lock_was_had_is_not_computed_with(
    said: list[dict[str, Any]],
) -> None:
    for rank in said:
        assert rank["gathered"] == {"staged": True, "direct": True}


def test_what_cannot_be_filled_is_refused(said: list[dict[str, Any]]) -> None:
    for rank in said:
        assert "FullyShardedDataParallel" in rank["fsdp1"]
        assert "Partial" in rank["partial"]


# -- the ranks ---------------------------------------------------------------------------------


class _Holder(nn.Module):
    """Tensors of any dtype and name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(name, value)


class _Whole(nn.Module):
    """A model that says that it has these tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        return dict(self._tensors)


class _Rank:
    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._folder = folder

    def version(
        self, name: str, tensors: Mapping[str, torch.Tensor], **options: Any
    ) -> LeasedVersion:
        """A version of these whole tensors, written by rank 0."""
        folder = self._folder / name
        if self._rank == 0:
            make_version(
                folder,
                {
                    key: TensorBytes(
                        DTYPES[str(value.dtype).removeprefix("torch.")][0],
                        tuple(value.shape),
                        bytes(bytes_of(value.contiguous())),
                    )
                    for key, value in tensors.items()
                },
                **options,
            )
        dist.barrier()
        hold = NoLease()
        storage = RuledStorage()
        return LeasedVersion(storage, folder, read_manifest(storage, folder), hold)

    def loads(
        self, name: str, module: nn.Module, tensors: Mapping[str, torch.Tensor], **options: Any
    ) -> dict[str, Any]:
        """Load the whole tensors into a module that has parts of them."""
        if name == "other_names":
            files = {NAME_MAP: NAMES.encode()}
            version = self.version(name, on_the_hub(tensors), names="hub", files=files)
        else:
            version = self.version(name, tensors)
        found = {"whole": sum(value.nbytes for value in tensors.values())}
        for in_place in ("staged", "direct"):
            engine = TorchModule(module, in_place=in_place, **options)
            # Detached, a DTensor is a copy: torch 2.15 takes minutes to plan it, to drop its order.
            parts = {
                key: value._local_tensor if isinstance(value, DTensor) else value
                for key, value in module.state_dict(keep_vars=True).items()
                if isinstance(value, torch.Tensor)
            }
            before = {key: _bits(part) for key, part in parts.items()}
            _zero(parts.values())
            self.receives(engine, tensors)
            arrived = {key: _bits(part) for key, part in parts.items()}
            _zero(parts.values())
            engine.check(version)
            storage = version.storage
            storage.calls.clear()
            engine.load(version)
            read = sum(len(given[1]) for called, given in storage.calls if called == "pread_into")
            # Of tied tensors one is read.
            own = {part.data_ptr(): part.nbytes for part in parts.values() if part.nbytes}
            found[in_place] = {
                "wrong": [key for key, part in parts.items() if _bits(part) != before[key]],
                "read": read,
                "own": sum(own.values()),
                "tensors": len(parts),
                "wrong by broadcast": [key for key in parts if arrived[key] != before[key]],
            }
        return found

    def receives(self, engine: TorchModule, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the engines of all ranks filled by one broadcast.

        The trainer is a thread of rank 0, and of the others, as all of a trainer's ranks send.
        """
        made, listening = meeting(WORLD_SIZE) if self._rank == 0 else (None, None)
        told = [made]
        dist.broadcast_object_list(told, src=0)
        rendezvous = told[0]
        assert rendezvous is not None

        def send() -> None:
            group = None
            if self._rank == 0:
                group = WeightGroup.join(
                    rendezvous, 0, deadline=DEADLINE, device=CPU, listening=listening
                )
            WeightSender(_Whole(tensors), bucket_bytes=256).send(group)
            if group is not None:
                group.close()

        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send)
            engine.receive(rendezvous, 1 + self._rank, DEADLINE)
            engine.close()
        sent.result()

    def layouts(self) -> dict[str, Any]:
        """FSDP2, HSDP and parallelism of tensors and experts, alone and on each other.

        That is whatever can cut a matrix of sizes that they do not divide, in the two ways that
        torch says it.
        """
        wholes, cut = {}, {}
        whole = torch.arange(1, 40, dtype=torch.int32).reshape(3, 13)
        for on in (mesh(a=4), mesh(a=2, b=2), mesh(a=1, b=2, c=2)):
            for cuts in rules.all_cuts(on.ndim, whole.ndim):
                layout = Layout(whole.shape, on.shape, cuts)
                local = _cut(whole, layout.parts(on.get_coordinate()))
                for way in (by_placements, by_shard_order):
                    name = f"{way.__name__}_{len(cut)}"
                    wholes[name] = whole
                    cut[name] = way(whole, local.clone(), on, layout)
        return self.loads("layouts", _Holder(cut), wholes)

    def other_names(self) -> dict[str, Any]:
        """A module whose tensors have other names in the version, cut along each dimension."""
        whole, on = state(), mesh(a=WORLD_SIZE)
        placements = {
            "experts.gate_up_proj": Shard(0), "experts.down_proj": Shard(1), "q_proj": Shard(0),
            "k_proj": Shard(1), "norm": Shard(0), "head": Replicate(),
        }  # fmt: skip
        module = Named(whole)
        for name, placement in placements.items():
            owner, _, last = name.rpartition(".")
            part = distribute_tensor(whole[name].clone(), on, [placement])
            module.get_submodule(owner).register_parameter(last, nn.Parameter(part))
        return self.loads("other_names", module, whole)

    def by_the_hubs_names(self) -> dict[str, list[str]]:
        """A broadcast of the trainer's tensors, to a module that has the hub's, with a version."""
        whole = state()
        truth = on_the_hub(whole)
        files = {NAME_MAP: NAMES.encode()}
        version = self.version("by_the_hubs_names", truth, names="hub", files=files)
        found = {}
        for in_place in ("staged", "direct"):
            module = Named(truth)
            engine = TorchModule(module, in_place=in_place)
            engine.check(version)
            self.receives(engine, whole)
            after = module.state_dict()
            found[in_place] = [key for key in truth if not torch.equal(after[key], truth[key])]
        return found

    def kind(self, name: str) -> dict[str, Any]:
        """A real model."""
        module, truth = getattr(zoo, name)(WORLD_SIZE)
        rename = (lambda key: f"module.{key}") if name == "ddp" else None
        return self.loads(name, module, truth, rename=rename)

    def gathered(self) -> dict[str, bool]:
        """Whether a model that computes right before it is changed computes with what it was given.

        Without ``reshard_after_forward`` FSDP2 keeps the whole parameters after a forward.
        """
        value = torch.full((4, 4), 3.0)
        version = self.version("gathered", {"weight": value})
        found = {}
        for in_place in ("staged", "direct"):
            module = nn.Linear(4, 4, bias=False)
            fully_shard(module, mesh=mesh(a=WORLD_SIZE), reshard_after_forward=False)
            tokens = torch.ones(1, 4)

            with torch.no_grad():
                TorchModule(module, in_place=in_place, lock=_Computing(module, tokens)).load(
                    version
                )
                found[in_place] = bool(torch.equal(module(tokens), tokens @ value.T))
        return found

    def refused(self, name: str, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
        version = self.version(name, tensors)
        try:
            TorchModule(module).check(version)
        except EngineMismatchError as error:
            return str(error)
        return "nothing"


class _Computing:
    """The lock of another thread, which has had it for its forward until now."""

    def __init__(self, module: nn.Module, tokens: torch.Tensor) -> None:
        self._module = module
        self._tokens = tokens

    def __enter__(self) -> None:
        self._module(self._tokens)

    def __exit__(self, *error: object) -> None:
        pass


def _zero(parts: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for part in parts:
            part.view(torch.uint8).zero_() if part.ndim else part.zero_()


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.detach().contiguous()))


def _run(rank: int, _: int, folder: Path) -> dict[str, Any]:
    own = _Rank(rank, folder)
    summand = DTensor.from_local(torch.ones(3), mesh(a=WORLD_SIZE), [TorchPartial()])
    return {
        "layouts": own.layouts(),
        "other_names": own.other_names(),
        **{name: own.kind(name) for name in KINDS},
        "by_the_hubs_names": own.by_the_hubs_names(),
        "gathered": own.gathered(),
        "fsdp1": own.refused("fsdp1", *zoo.fsdp1(WORLD_SIZE)),
        "partial": own.refused("partial", _Holder({"sum": summand}), {"sum": torch.ones(3)}),
    }


if __name__ == "__main__":
    fork(_run, WORLD_SIZE)
