"""Real ranks that save full checkpoints and resume from them; a program.

Torch is imported once and forked into the ranks of one world size after the other. Each check is
written to ``ROOT/passed/NAME`` by rank 0 when all ranks have passed it.
"""

import errno
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import (
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.protocol.errors import CheckpointError
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.checkpoints import Net, same, write_full
from tests.fsdp_models import Config
from tests.hooks import checkpoint
from tests.multiprocess.resume_checks import (
    CAST,
    CHANGED,
    CHANGES,
    ENDED,
    EXPERTS,
    FULL,
    RESUMED,
    SAVED,
    SEVERAL,
    cast,
    exact,
    full,
    is_usual,
    resharded,
    several,
)
from tests.process_groups import fork
from tests.refusals import invalid, no_checkpoint, save_fails
from tests.storages import RuledStorage
from tests.wrappings import mesh, unit
from tests.zoo import experts_apart
from trainer_hooks import Critic, SaveSettings, SyncSettings, TrainerHook
from trainer_hooks.resuming.promise import Promise
from trainer_hooks.resuming.resume import Resumed, latest_checkpoint, load_checkpoint
from trainer_hooks.settings import SaveLayout
from trainer_hooks.state.full_checkpoint import each_of, optimizer_state

DEEP = "SYNCD_DEEP" in os.environ


class Tied(nn.Module):
    """A language model whose head is its embedding, and whose config says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.config = Config(tie_word_embeddings=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.embed_tokens(tokens)))  # type: ignore[no-any-return]


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _in_two_units(model: nn.Module, world_size: int, **options: Any) -> nn.Module:
    fully_shard(model.up, mesh=mesh(fsdp=world_size), **options)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh(fsdp=world_size), **options)


def _tensor_parallel(model: nn.Module, world_size: int) -> nn.Module:
    on = mesh(fsdp=world_size // 2, tp=2)
    parallelize_module(model, on["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=on["fsdp"])


def _on_a_mesh(model: nn.Module, world_size: int, **options: Any) -> nn.Module:
    return unit(model, use_orig_params=True, device_mesh=mesh(fsdp=world_size), **options)


def _in_flat_units(model: nn.Module, _: int) -> nn.Module:
    model.up = unit(model.up)  # type: ignore[arg-type] # mypy sees Tensor | Module
    return unit(model)


def _in_mesh_units(model: nn.Module, world_size: int) -> nn.Module:
    model.up = _on_a_mesh(model.up, world_size)  # type: ignore[arg-type] # mypy sees Tensor | Module
    return _on_a_mesh(model, world_size)


#: How a model is wrapped for a number of ranks.
KINDS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "plain": lambda model, _: model,
    "ddp": lambda model, _: DistributedDataParallel(model),
    "fsdp2": _in_two_units,
    "hsdp": lambda model, size: fully_shard(model, mesh=mesh(ddp=2, fsdp=size // 2)),
    "fsdp2_tp": _tensor_parallel,
    "fsdp1": lambda model, _: unit(model),
    "fsdp1_units": _in_flat_units,
    "fsdp1_mesh": _on_a_mesh,
    "fsdp1_mesh_units": _in_mesh_units,
    "fsdp1_hybrid": lambda model, size: unit(
        model,
        use_orig_params=True,
        device_mesh=mesh(ddp=2, fsdp=size // 2),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    ),
    "fsdp2_mixed": partial(_in_two_units, mp_policy=MixedPrecisionPolicy(**MIXED)),
    "fsdp1_mixed": lambda model, _: unit(model, mixed_precision=MixedPrecision(**MIXED)),
    "fsdp1_mesh_mixed": partial(_on_a_mesh, mixed_precision=MixedPrecision(**MIXED)),
}


_orig = partial(unit, use_orig_params=True)
#: Ways to wrap a layer, and whether torch then saves an optimizer's state that it cannot load.
FSDP1: dict[Callable[[Any], Any], bool] = {
    lambda layer: unit(nn.Sequential(checkpoint_wrapper(layer))): True,
    lambda layer: _orig(nn.Sequential(checkpoint_wrapper(layer))): False,
    lambda layer: nn.Sequential(checkpoint_wrapper(_orig(layer))): True,
    lambda layer: torch.compile(unit(layer)): True,
    lambda layer: torch.compile(_orig(layer)): False,
    lambda layer: unit(layer, ignored_states=[*layer.parameters()]): True,
    lambda layer: _orig(nn.Sequential(unit(layer), nn.Linear(2, 2))): True,
}


class Rank:
    """One rank of one world size.

    Attributes:
        root: for all jobs, and for what passed.
    """

    def __init__(self, rank: int, world_size: int, root: Path) -> None:
        self.rank, self.world_size, self.root = rank, world_size, root

    def job(self, kind: str, world_size: int) -> Path:
        return self.root / f"{kind}-{world_size}"

    def new_job(self, name: str) -> Path:
        job = self.root / name
        if self.rank == 0:
            job.mkdir()
            Job.at(job, Storage()).open()
        dist.barrier()
        return job

    def made(self, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """A wrapped model, the same on all ranks, its optimizer and its scheduler."""
        torch.manual_seed(seed)
        model = KINDS[kind](Net(), self.world_size)
        torch.manual_seed(100 * seed + self.rank)  # for the dropout
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def train(self, made: tuple[nn.Module, Any, Any], first: int, steps: int) -> list[float]:
        """Train on the same numbers on all ranks, as tensor parallelism needs."""
        model, optimizer, scheduler = made
        losses = []
        for step in range(first, first + steps):
            values = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
            loss = (model(values) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            for one in each_of(optimizer):
                one.step()
            model.zero_grad()
            for one in each_of(scheduler):
                one.step()
        return losses

    def passed(self, name: str) -> None:
        dist.barrier()
        if self.rank == 0:
            (self.root / "passed" / name).touch()

    # -- what is saved ---------------------------------------------------------------------------

    def save(self, kind: str) -> None:
        """Train two steps, save, note what was saved, train two more, and note the losses."""
        job = self.new_job(f"{kind}-{self.world_size}")
        made = self.made(kind, seed=1)
        self.train(made, 1, 2)
        write_full(
            job, 2, made[0], made[1], scheduler=made[2], user_state={"rank": self.rank},
            rank=self.rank, world_size=self.world_size,
        )  # fmt: skip
        truth = full_state(*made[:2])
        losses = self.train(made, 3, 2)
        after = full_state(*made[:2])
        if self.rank == 0:
            torch.save({"saved": truth, "after": after}, job / "truth.pt")
        (job / f"losses-{self.rank}.json").write_text(json.dumps(losses))

    # -- what is resumed -------------------------------------------------------------------------

    def go_on(self, kind: str) -> None:
        """Resume as the ranks that saved, and train as if nothing had been."""
        job = self.job(kind, self.world_size)
        truth = torch.load(job / "truth.pt", weights_only=True)
        made = self.made(kind, seed=2)
        found = load(job, made)
        assert found is not None
        assert (found.step, found.is_exact) == (2, True)
        assert found.user_state == {"rank": self.rank}
        check_same(made, truth["saved"])
        assert self.train(made, 3, 2) == json.loads((job / f"losses-{self.rank}.json").read_text())
        check_same(made, truth["after"])

    def reshard(self, kind: str, world_size: int, other: str) -> None:
        """Resume as other ranks, or wrapped in another way: the same model and optimizer."""
        job = self.job(kind, world_size)
        truth = torch.load(job / "truth.pt", weights_only=True)
        made = self.made(other, seed=3)
        before = torch.get_rng_state()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = load(job, made)
        assert found is not None
        is_exact = world_size == self.world_size
        assert found.is_exact == is_exact
        assert found.user_state == {"rank": self.rank if is_exact else 0}
        assert any("was saved by" in str(warning.message) for warning in said) != is_exact
        assert torch.equal(torch.get_rng_state(), before) != is_exact
        assert made[2].state_dict()["last_epoch"] == 2
        check_same(made, truth["saved"])
        self.train(made, 3, 1)

    # -- other parameters frozen, or updated ---------------------------------------------------

    def changing(self, kind: str, over: str, *, frozen: bool) -> tuple[Any, Any, Any]:
        net = Net()
        net.up.requires_grad_(not frozen)
        model = KINDS[kind](net, self.world_size)
        updated = [one for one in model.parameters() if one.requires_grad or over == "all"]
        optimizer = torch.optim.AdamW(updated, lr=0.1)
        if over == "added":
            optimizer.add_param_group({"params": [*of_up(model)], "lr": 0.3})
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 9)

    def save_changing(self, kind: str, change: str) -> None:
        frozen, over, _ = CHANGES[change]
        job = self.new_job(f"{kind}-{change}")
        torch.manual_seed(1)
        made = self.changing(kind, over, frozen=frozen[0])
        for step in (1, 2):
            for parameter in of_up(made[0]):
                parameter.requires_grad_(not frozen[step - 1])
            self.train(made, step, 1)
        write_full(job, 2, *made[:2], rank=self.rank, world_size=2)
        truth = full_state(*made[:2])
        if self.rank == 0:
            torch.save(truth, job / "truth.pt")

    def resume_changed(self, kind: str, change: str) -> None:
        """What was saved of a parameter is loaded, and nothing else; training goes on."""
        job = self.root / f"{kind}-{change}"
        (*_, frozen), _, over = CHANGES[change]
        made = self.changing(kind if self.world_size > 1 else "plain", over, frozen=frozen)
        load(job, made[:2])
        for parameter in of_up(made[0]):
            assert parameter.requires_grad != frozen
            # FSDP1 gives no state if one is missing.
            parameter.requires_grad_(parameter in made[1].state)
        found, wanted = full_state(*made[:2]), torch.load(job / "truth.pt")
        assert same(found["model"], wanted["model"])
        groups, states = found["optimizer"]["param_groups"], wanted["optimizer"]["state"]
        names = {name for group in groups for name in group["params"]} & states.keys()
        assert same(found["optimizer"]["state"], {name: states[name] for name in names})
        assert groups[-1]["lr"] == (0.3 if over == "added" else 0.1)
        for parameter in of_up(made[0]):
            parameter.requires_grad_(not frozen)
        self.train(made, 3, 1)
        self.passed(f"{kind}, {change}, on {self.world_size}")

    # -- one full state dict instead of shards -----------------------------------------------------

    def made_tied(self, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Tied()
        if kind == "fsdp2":
            fully_shard(model, mesh=mesh(fsdp=self.world_size))
        elif kind != "plain":
            model = KINDS[kind](model, self.world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def save_full(self, kind: str) -> None:
        """By the hook, as a trainer does."""
        job = self.new_job(f"full-{kind}")
        made = self.made_tied(kind, 1)
        saving = SaveSettings(layout=SaveLayout.FULL)
        with TrainerHook(job, made[0], optimizer=made[1], saving=saving) as hook:
            checkpoint(hook, 1)
        truth = full_state(*made)
        if self.rank == 0:
            assert (JobLayout(job).actor(1) / "model.safetensors").exists()
            torch.save(truth, job / "truth.pt")

    def resume_full(self, kind: str) -> None:
        job = self.root / f"full-{kind}"
        made = self.made_tied(kind if self.world_size > 1 else "plain", 2)
        found = load(job, made)
        assert found is not None
        assert found.is_exact == (self.world_size == 2)
        check_same(made, torch.load(job / "truth.pt", weights_only=True))
        self.passed(full(kind, self.world_size))

    # -- cast for explorers ------------------------------------------------------------------------

    def save_cast(self) -> None:
        for kind in CAST:
            self.save_one_cast(kind)
            self.passed(cast(kind, "published"))

    def save_one_cast(self, kind: str) -> None:
        """A step that is synced, and then a full checkpoint too; another that is both at once."""
        job = self.new_job(f"cast-{kind}")
        made = self.made(kind, seed=1)
        saving = SaveSettings(sync_dtype="bf16")
        with TrainerHook(
            job, made[0], optimizer=made[1], scheduler=made[2],
            settings=SyncSettings(save_interval=2), saving=saving,
        ) as hook:  # fmt: skip
            for step in (1, 2):
                self.train(made, step, 1)
                truth = full_state(*made[:2])
                hook.after_step(step)
                if step == 1:
                    hook._saver.wait()
                checkpoint(hook, step)
                dist.barrier()  # what is not announced is not for the daemon
                if self.rank == 0:
                    self.check_published(job, step, truth["model"])
                    torch.save(truth, job / f"truth-{step}.pt")
        (job / f"losses-{self.rank}.json").write_text(json.dumps(self.train(made, 3, 2)))

    def check_published(self, job: Path, step: int, weights: dict[str, torch.Tensor]) -> None:
        """What a daemon makes of the save is the model as torch casts it, to the bit."""
        actor, folder = JobLayout(job).actor(step), job / f"merged-{step}"
        folder.mkdir()
        save = look_at_save(Storage(), actor, step)
        options, work = MergeOptions(), Work(lambda: None)
        manifest = build_model_folder(Storage(), actor, save, folder, options=options, work=work)
        assert manifest.dtype == "BF16"
        floating = {name for name, value in weights.items() if value.is_floating_point()}
        assert {weights[name].dtype for name in floating} == {torch.float32}
        wanted = {
            name: value.bfloat16() if name in floating else value for name, value in weights.items()
        }
        assert same(load_file(folder / "model.safetensors"), wanted)

    def resume_cast(self) -> None:
        for kind in CAST:
            self.resume_one_cast(kind)
            self.passed(cast(kind, "resumed"))

    def resume_one_cast(self, kind: str) -> None:
        job = self.root / f"cast-{kind}"
        for step in (1, 2):
            made = self.made(kind, seed=2)
            load(job, made, step=step)
            check_same(made, torch.load(job / f"truth-{step}.pt", weights_only=True))
        assert self.train(made, 3, 2) == json.loads((job / f"losses-{self.rank}.json").read_text())

    # -- experts of two ranks by one name ----------------------------------------------------------

    def experts(self) -> nn.Module:
        """A layer that is another one on each half of the ranks."""
        model: nn.Module
        model, _ = experts_apart(self.world_size)
        nn.init.zeros_(model.bias)
        return model

    def save_experts(self) -> None:
        job = self.new_job("experts")
        write_full(job, 1, self.experts(), rank=self.rank, world_size=self.world_size)

    def resume_experts(self) -> None:
        """Each rank has its own again; ranks that cannot know whose to take refuse to."""
        model = self.experts()
        wanted = model.weight.to_local().clone()
        if self.world_size == 4:
            nn.init.zeros_(model.weight)
            load_checkpoint(self.root / "experts", model)
            assert torch.equal(model.weight.to_local(), wanted)
            self.passed(EXPERTS)
        else:
            with no_checkpoint("'weight' has one value in"):
                load_checkpoint(self.root / "experts", model)
            self.passed("experts by one name, by other ranks")

    # -- several optimizers ------------------------------------------------------------------------

    def made_several(self, rule: str, kind: str, seed: int) -> tuple[nn.Module, Any]:
        """Muon for the matrices, or an optimizer for one layer that is idle; AdamW for the rest."""
        model, *_ = self.made(kind, seed)
        parts = {True: [], False: []}
        for name, parameter in model.named_parameters():
            is_muons = name.endswith(("up.weight", "down.weight"))
            parts[is_muons if rule == "muon" else "up" in name].append(parameter)
        first = torch.optim.Muon if rule == "muon" else torch.optim.AdamW
        made = first(parts[True], lr=0.1), torch.optim.AdamW(parts[False], lr=0.2)
        return model, made

    def save_several(self, rule: str, kind: str) -> None:
        job = self.new_job(f"{rule}-{kind}")
        model, made = self.made_several(rule, kind, seed=1)
        self.train((model, made[rule == "idle" :], ()), 1, 2)
        with TrainerHook(job, model, optimizer=made) as hook:
            checkpoint(hook, 2)
        truth = full_state(model, made)
        if self.rank == 0:
            torch.save(truth, job / "truth.pt")

    def resume_several(self, rule: str, kind: str, other: str) -> None:
        job = self.root / f"{rule}-{kind}"
        made = self.made_several(rule, other, seed=2)
        load(job, made)
        assert any(made[1][0].state.values()) == (rule != "idle")
        check_same(made, torch.load(job / "truth.pt", weights_only=True))
        self.passed(several(rule, kind, self.world_size))

    def failing_promise(self, model: nn.Module) -> None:
        """Rank 0 says what could not be resumed, and nothing of another rank's part."""
        job, look = self.new_job(f"promised-{type(model).__name__}"), Promise.check
        shard = JobLayout(job).actor(2) / "model_world_size_2_rank_1.pt"
        said = save_fails(f"step 2: {shard} is missing")
        with TrainerHook(job, model, optimizer=torch.optim.AdamW(model.parameters())) as hook:
            checkpoint(hook, 1)
            hook._saver.has_promised = False
            with pytest.MonkeyPatch.context() as patch, nullcontext() if self.rank else said:
                patch.setattr(Promise, "check", lambda *given: shard.unlink() or look(*given))
                checkpoint(hook, 2)
        self.passed("a first checkpoint that could not be resumed")

    # -- what fails ------------------------------------------------------------------------------

    def failing(self) -> None:
        """What one rank alone finds wrong is an error on both."""
        job = self.new_job("failing")
        made = self.made("fsdp2", seed=1)
        for step in (2, 3):
            self.train(made, step, 1)
            write_full(job, step, *made[:2], rank=self.rank, world_size=2)
        truth = full_state(*made[:2])
        actor = JobLayout(job).actor(3)

        optimizer = actor / "optim_world_size_2_rank_1.pt"
        with self.only_first_changes(optimizer, Path.unlink):
            self.fails(job, f"{optimizer} is missing", "step=N")
        self.passed("a file of one rank is missing")

        shard = actor / "model_world_size_2_rank_1.pt"
        with self.only_first_changes(shard, flip_a_bit):
            self.fails(job, f"{shard}: record data/", "does not match its CRC-32", "rank 1: ")
        self.passed("a file that one rank reads is damaged")

        with self.only_first_changes(shard, lambda path: path.write_bytes(b"torn")):
            self.fails(job, str(shard))
        self.passed("a file of one rank is torn")

        other = _in_two_units(Net(12 if self.rank else 10), 2)
        with no_checkpoint(r"shape \(10, 7\) in .*, but shape \(12, 7\) in"):
            load_checkpoint(job, other)
        self.passed("one rank has another model")

        if self.rank == 0:
            with save_fails("rank 1 of 2"):
                write_full(job, 4, *made[:2], world_size=2, timeout=0.5)
        dist.barrier()
        again = self.made("fsdp2", seed=4)
        found = load(job, again[:2])
        assert found is not None
        assert found.step == latest_checkpoint(job) == 3
        check_same(again, truth)
        self.passed("one rank did not write its part")

    def failing_user_state(self) -> None:
        """No rank waits in FSDP1's collectives for one whose user state is refused."""
        job = self.new_job("user-state")
        model, optimizer, _ = self.made("fsdp1", seed=1)
        hook = TrainerHook(
            job, model, optimizer=optimizer, critic=Critic(self.made("fsdp1", seed=2)[0]),
            user_state=lambda: {"x": object()} if self.rank else {},
        )  # fmt: skip
        if self.rank:
            with invalid("user_state"):
                hook.save_checkpoint(1)
            hook.close()
        else:
            with save_fails("rank 1"):
                checkpoint(hook, 1)
            hook.close()
        assert latest_checkpoint(job) is None
        self.passed("a user state of one rank cannot be saved")

    def failing_room(self) -> None:
        storage, (model, optimizer, _) = RuledStorage(), self.made("fsdp2", seed=1)
        job = self.new_job("room")
        with TrainerHook(job, model, optimizer=optimizer, storage=storage) as hook:
            checkpoint(hook, 1)
            for step, where, left in ((2, "model_", "Explorers keep"), (3, "optim_", "them once")):
                dist.barrier()
                if self.rank:
                    storage.refuse("create", errno.ENOSPC, where=where)
                with save_fails(f"rank 1 .*{left}.* resume from step 1"):
                    checkpoint(hook, step)
                storage.rules.clear()
        self.passed("one rank has no room")

    def failing_fsdp1(self) -> None:
        for wrap, is_lost in FSDP1.items():
            model = wrap(nn.Linear(2, 2))
            refused = invalid(r"torch .*AdamW.*use_orig_params")
            optimizer = torch.optim.AdamW(model.parameters())
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            with refused if is_lost else nullcontext():
                optimizer_state(model, optimizer)
        with no_checkpoint(r"no state of 'up\..* FSDP1 .*use_orig_params"):
            load(self.root / "ddp-warmed up without", self.made("fsdp1", 1))
        self.passed("an optimizer that FSDP1 saves and cannot load")

    @contextmanager
    def only_first_changes(self, path: Path, change: Callable[[Path], object]) -> Iterator[None]:
        """Change a file, and put it back."""
        content = path.read_bytes()
        dist.barrier()
        if self.rank == 0:
            change(path)
        dist.barrier()
        yield
        dist.barrier()
        if self.rank == 0:
            path.write_bytes(content)
        dist.barrier()

    def fails(self, job: Path, *words: str) -> None:
        """Loading raises on all ranks; rank 1 has no other rank's number in its message."""
        made = self.made("fsdp2", seed=4)
        with pytest.raises(CheckpointError) as raised:
            load(job, made[:2])
        said = f"rank 1: {raised.value}" if self.rank else str(raised.value)
        assert all(word in said for word in words), said
        assert not made[1].state


def flip_a_bit(path: Path) -> None:
    """Change a byte in the middle of the largest tensor."""
    with ShardFile.open(Storage(), path) as shard:
        tensors = [record for name, record in shard.records.items() if name.startswith("data/")]
    largest = max(tensors, key=lambda record: record.size)
    content = bytearray(path.read_bytes())
    content[largest.offset + largest.size // 2] ^= 1
    path.write_bytes(content)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors whole, on all ranks, as torch gathers them."""
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": {k: v.clone() for k, v in weights.items()}, "optimizer": cloned(state)}


def cloned(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    if isinstance(state, list):
        # FSDP1 sorts the parameters of a group.
        return sorted(state) if state and isinstance(state[0], str) else list(map(cloned, state))
    return state


def of_up(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if "up." in name)


def load(job: Path, made: tuple[Any, ...], **options: Any) -> Resumed | None:
    """Resume a model, and its optimizer and scheduler where they are given."""
    model, *rest = made
    parts = zip(("optimizer", "scheduler"), rest, strict=False)
    return load_checkpoint(job, model, **dict(parts), **options)


def check_same(made: tuple[Any, ...], wanted: dict[str, Any]) -> None:
    """Compare the bits of all tensors, and all options."""
    found = full_state(*made[:2])
    assert found["model"].keys() == wanted["model"].keys()
    for name, value in wanted["model"].items():
        assert same(found["model"][name], value), name
    states = [whole["optimizer"]["state"] for whole in (found, wanted)]
    assert states[0].keys() == states[1].keys()
    for name, state in states[1].items():
        assert same(states[0][name], state), (name, states[0][name], state)
    assert same(found["optimizer"]["param_groups"], wanted["optimizer"]["param_groups"])


def save(rank: int, world_size: int, root: Path) -> None:
    """Be one of the ranks that save."""
    me = Rank(rank, world_size, root)
    for kind in (kind for kind, size in SAVED if size == world_size):
        me.save(kind)
    if world_size == 2:
        for kind in FULL:
            me.save_full(kind)
        me.save_cast()
        for one in product(CHANGED, CHANGES):
            me.save_changing(*one)
        for saved in SEVERAL:
            me.save_several(*saved)
    if world_size == 4:
        me.save_experts()


def resume(rank: int, world_size: int, root: Path) -> None:
    """Be one of the ranks that resume."""
    me = Rank(rank, world_size, root)
    for kind, size in SAVED:
        if size == world_size:
            me.go_on(kind)
            me.passed(exact(kind, size))
        ways = RESUMED.get(world_size, ())
        for other in (one for one in ways if DEEP or is_usual((kind, size), one, world_size)):
            me.reshard(kind, size, other)
            me.passed(resharded(kind, size, other, world_size))
    for kind in FULL if world_size <= 2 else ():
        me.resume_full(kind)
    if world_size == 2:
        me.resume_cast()
        me.failing()
        me.failing_user_state()
        me.failing_room()
        me.failing_fsdp1()
        me.failing_promise(me.made("fsdp1_units", 1)[0])
        me.failing_promise(nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)}))
    for one in product(CHANGED, CHANGES) if world_size <= 3 else ():
        me.resume_changed(*one)
    if world_size < 4:
        for saved, kinds in SEVERAL.items():
            me.resume_several(*saved, kinds[world_size - 1])
    if world_size in {2, 4}:
        me.resume_experts()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1 is one to be
    passed = Path(sys.argv[1], "passed")
    passed.mkdir()
    fork(save, *RESUMED)
    fork(resume, *RESUMED)
    (passed / ENDED).touch()
