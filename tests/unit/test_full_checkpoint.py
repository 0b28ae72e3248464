"""Full checkpoints of one process: what is saved, and what is resumed from it."""

import enum
import io
import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from safetensors.torch import save as safetensors_bytes
from torch import nn

from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.names import (
    CHECKPOINT_POINTER,
    FULL,
    RECEIPTS,
    SAVING,
    full_receipt_name,
    receipt_name,
)
from syncd.protocol.records import Receipt, encode
from syncd.storage.fsio import Storage
from tests.checkpoints import Net, same, state_of, train, write_full
from tests.crash.power import Killed
from tests.fsdp_models import Laden
from tests.hooks import TrainerHook
from tests.jobs import SmallJob, read, receipt_of
from tests.multiprocess.resume_ranks import flip_a_bit
from tests.refusals import invalid, malformed, no_checkpoint
from tests.storages import RuledStorage
from trainer_hooks.resuming.resume import latest_checkpoint, load_checkpoint
from trainer_hooks.state.full_checkpoint import (
    RNG,
    Critic,
    Stateful,
    checked,
    extra_state,
    optimizer_state,
    rng_state,
    set_rng_state,
)
from trainer_hooks.state.state_dict import computed_names

SHARD = "model_world_size_1_rank_0.pt"
OPTIMIZER = "optim_world_size_1_rank_0.pt"
EXTRA = "extra_state_world_size_1_rank_0.pt"


@pytest.fixture
def root(job: SmallJob) -> Path:
    return job.root


def adamw(model: nn.Module, lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of parameters, of other options each."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.3}, {"params": others, "lr": 0.01}], lr=0.1
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "two groups": grouped,
    "lr as a tensor": lambda model: adamw(model, torch.tensor(0.1)),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
}


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def trained(seed: int = 0, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


def refuses(match: str, root: Path, model: nn.Module | None = None, **options: Any) -> None:
    """Loading a checkpoint is an error that says what."""
    with no_checkpoint(match):
        load_checkpoint(root, model or Net(), **options)


# -- going on ------------------------------------------------------------------------------------


def alike(found: Stateful, expected: Stateful) -> None:
    """Two models, optimizers or schedulers have the same bits."""
    assert same(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_as_if_it_had_never_stopped(
    root: Path, make: Callable[[nn.Module], torch.optim.Optimizer], before: int
) -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = make(model)
    scheduler = halved(optimizer)
    train(model, optimizer, before, scheduler)
    write_full(root, 7, model, optimizer, scheduler=scheduler, user_state={"batch": 3})
    losses = train(model, optimizer, 3, scheduler)

    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    again = Net()
    optimizer_again = make(again)
    scheduler_again = halved(optimizer_again)
    found = load_checkpoint(root, again, optimizer=optimizer_again, scheduler=scheduler_again)
    assert found is not None
    assert (found.step, found.user_state, found.save_id) == (7, {"batch": 3}, "run-7-0")
    assert found.is_exact
    assert train(again, optimizer_again, 3, scheduler_again) == losses
    alike(again, model)
    alike(optimizer_again, optimizer)
    alike(scheduler_again, scheduler)


def test_an_optimizer_in_accelerates_is_resumed_without_its_scaler(root: Path) -> None:
    model, saved = trained()
    write_full(root, 1, model, saved)
    Accelerator(cpu=True)  # its state is the wrapper's, too
    try:
        loaded = AcceleratedOptimizer(adamw(model), scaler=torch.amp.GradScaler("cpu"))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    load_checkpoint(root, model, optimizer=loaded)
    alike(loaded, saved)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_loading_calls_no_hook_of_a_step(
    root: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model = Net()
    saved, loaded = make(model), make(model)
    train(model, saved, 1)
    write_full(root, 1, model, saved)
    calls: list[str] = []
    loaded.register_step_pre_hook(lambda *_: calls.append("before"))
    loaded.register_step_post_hook(lambda *_: calls.append("after"))
    load_checkpoint(root, model, optimizer=loaded)
    assert not calls
    train(model, loaded, 1)
    assert calls == ["before", "after"]


class Decaying(torch.optim.lr_scheduler.StepLR):
    """Writes the options of its own constructor when it loads, as Megatron's scheduler did."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.7
        super().load_state_dict(state_dict)


def test_a_scheduler_that_loads_changes_no_saved_option(root: Path) -> None:
    model = Net()
    saved, loaded = adamw(model), adamw(model)
    write_full(root, 1, model, saved, scheduler=halved(saved))
    load_checkpoint(root, model, optimizer=loaded, scheduler=Decaying(loaded, 2))
    alike(loaded, saved)


def test_saving_changes_nothing_of_the_training() -> None:
    runs = []
    for saves in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = Net()
        optimizer = adamw(model)
        scheduler = halved(optimizer)
        losses = []
        for _ in range(3):
            if saves:
                optimizer_state(model, optimizer)
                extra_state(scheduler=scheduler, user_state={"batch": 1})
            losses += train(model, optimizer, 1, scheduler)
        runs.append((losses, optimizer.state_dict()))
    assert same(*runs)


def partly_trained() -> nn.ModuleDict:
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    return nn.ModuleDict({"net": Net(), "unused": nn.Linear(2, 2), "frozen": frozen})


def test_a_parameter_that_never_had_a_gradient_gets_no_state(root: Path) -> None:
    torch.manual_seed(0)
    model, again = partly_trained(), partly_trained()
    optimizer = adamw(model)
    train(model["net"], optimizer, 2)
    write_full(root, 1, model, optimizer)
    optimizer_again = adamw(again)
    load_checkpoint(root, again, optimizer=optimizer_again)
    assert all(not optimizer_again.state.get(p) for p in again["unused"].parameters())
    for one in (model, again):
        one["unused"].weight.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer_again.step()
    alike(again, model)


def test_every_dtype_and_tied_weights_come_back_bit_by_bit(root: Path) -> None:
    torch.manual_seed(0)
    model = Laden()
    write_full(root, 1, model)
    again = Laden()
    assert not same(state_of(again), state_of(model))
    load_checkpoint(root, again)
    assert same(state_of(again), state_of(model))
    assert again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize(("saved", "wanted"), [(torch.bfloat16, torch.float32),
                                               (torch.float32, torch.bfloat16)])  # fmt: skip
def test_floating_values_are_cast_to_what_they_are_here(
    root: Path, saved: torch.dtype, wanted: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5).to(saved)
    write_full(root, 1, model)
    again = nn.Linear(3, 5).to(wanted)
    load_checkpoint(root, again)
    assert same(again.state_dict(), {name: v.to(wanted) for name, v in model.state_dict().items()})


def test_a_critic_is_resumed_with_its_optimizer(root: Path) -> None:
    model, optimizer = trained(0)
    critic, critic_optimizer = trained(1)
    write_full(root, 1, model, optimizer, critic=critic, critic_optimizer=critic_optimizer)
    again, optimizer_again = trained(2)
    critic_again, critic_optimizer_again = trained(3)
    load_checkpoint(
        root,
        again,
        optimizer=optimizer_again,
        critic=Critic(critic_again, critic_optimizer_again),
    )
    alike(again, model)
    alike(critic_again, critic)
    alike(critic_optimizer_again, critic_optimizer)


class Raw:
    """An optimizer that is not torch's."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_an_optimizer_that_is_not_torchs_gets_what_it_gave(root: Path) -> None:
    model, _ = trained()
    state = {"momenta": [torch.ones(3)], "step": 4, "options": {"beta": (0.9, 0.5)}}
    write_full(root, 1, model, Raw(**state))
    raw = Raw()
    load_checkpoint(root, model, optimizer=raw)
    assert same(raw.state, state)
    refuses(rf"{OPTIMIZER}.*not.*torch\.optim\.Optimizer", root, model, optimizer=adamw(model))


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def test_the_weights_of_a_full_state_dict_are_loaded(root: Path, job: SmallJob) -> None:
    torch.manual_seed(0)
    model, again = tied(), tied()
    write_full(root, 1, model, adamw(model))
    actor = job.actor(1)
    (actor / SHARD).unlink()
    content = safetensors_bytes({"embed.weight": model["embed"].weight.detach()})
    (actor / "model.safetensors").write_bytes(content)
    for name in (receipt_name(0), full_receipt_name(0)):
        path = actor / RECEIPTS / name
        receipt = read(Receipt, path)
        files = [receipt_of(content), *(file for file in receipt.files if file.name != SHARD)]
        path.write_bytes(encode(receipt.model_copy(update={"files": tuple(files)})))
    load_checkpoint(root, again, optimizer=adamw(again))
    alike(again, model)


def test_another_trainers_weights_are_loaded_where_its_pointer_says(
    root: Path, job: SmallJob
) -> None:
    model, _ = trained()
    actor = job.actor(3)
    actor.mkdir(parents=True)
    torch.save(model.state_dict(), actor / SHARD)
    torch.save(extra_state(scheduler=None, user_state=None), actor / EXTRA)
    assert latest_checkpoint(root) is None
    job.point(3, CHECKPOINT_POINTER)
    again = Net()
    found = load_checkpoint(root, again)
    assert found is not None
    assert (found.step, found.save_id) == (3, None)
    alike(again, model)


# -- which step ----------------------------------------------------------------------------------


def test_nothing_is_resumed_from_where_nothing_was_saved(root: Path, job: SmallJob) -> None:
    model, _ = trained()
    assert latest_checkpoint(root) is None
    assert load_checkpoint(root, model) is None
    job.save(4)  # for explorers alone
    assert load_checkpoint(root, model) is None


def test_a_job_that_is_not_mounted_is_no_empty_job(tmp_path: Path) -> None:
    with pytest.raises(JobUnavailableError, match="mount"):
        latest_checkpoint(tmp_path / "nothing")
    with pytest.raises(JobUnavailableError, match="mount"):
        load_checkpoint(tmp_path / "nothing", Net())


def test_the_pointers_step_counts_and_any_other_only_if_asked_for(
    root: Path, job: SmallJob
) -> None:
    models = {}
    for step in (1, 2, 3):
        models[step], optimizer = trained(step)
        write_full(root, step, models[step], optimizer)
    job.point(2, CHECKPOINT_POINTER)
    assert latest_checkpoint(root) == 2
    for step in (None, 1, 2, 3):
        again = Net()
        found = load_checkpoint(root, again, step=step)
        assert found is not None
        alike(again, models[found.step])
        assert found.step == (step or 2)
    refuses(r"cannot resume from step 9, because .*global_step_9", root, step=9)


@pytest.mark.parametrize("pointer", [None, "", "1", "7", "-1"])
def test_without_a_pointer_to_a_whole_step_the_newest_whole_one_counts(
    root: Path, job: SmallJob, pointer: str | None
) -> None:
    for step in (1, 2, 3):
        write_full(root, step, *trained(step))
    (job.step(1) / FULL).unlink()  # as where it was being saved again
    if pointer is None:
        (root / CHECKPOINT_POINTER).unlink()
    else:
        job.point(pointer, CHECKPOINT_POINTER)
    assert latest_checkpoint(root) == 3
    (job.step(3) / FULL).rename(job.step(3) / ".retired")
    assert latest_checkpoint(root) == 2


def test_where_none_is_whole_any_more_training_does_not_begin_anew_by_itself(
    root: Path, job: SmallJob
) -> None:
    write_full(root, 1, *trained())
    (job.step(1) / FULL).unlink()
    assert latest_checkpoint(root) is None
    refuses(r"global_step_1 has no \.full_checkpoint", root)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "another step"])
def test_cut_off_anywhere_a_save_leaves_one_that_is_whole(root: Path, step: int) -> None:
    """Cut off while it replaces the only one, it leaves none, and says so."""
    first, second = trained(1), trained(2)
    calls: list[int] = []

    def rule(method: str, given: tuple[Any, ...]) -> None:
        if method in {"mkdir", "rename", "unlink", "create"}:  # changes a name
            if calls[0] == 0:
                raise Killed(method, given)
            calls[0] -= 1

    ends = set()
    for number in range(1000):
        for path in sorted(root.rglob("*"), reverse=True):
            if "global_step" in str(path) or path.suffix == ".txt":
                path.rmdir() if path.is_dir() else path.unlink()
        write_full(root, 1, *first)
        calls[:] = [number]
        try:
            write_full(root, step, *second, counter=1, storage=RuledStorage(rule))
        except Killed:
            pass
        again = Net()
        optimizer = adamw(again)
        if latest_checkpoint(root) is None:
            assert step == 1
            with no_checkpoint("cut off"):
                load_checkpoint(root, again, optimizer=optimizer)
            ends.add("none")
        else:
            found = load_checkpoint(root, again, optimizer=optimizer)
            assert found is not None
            assert found.step == latest_checkpoint(root)
            expected = {"run-1-0": first, f"run-{step}-1": second}[str(found.save_id)]
            alike(again, expected[0])
            alike(optimizer, expected[1])
            ends.add(str(found.save_id))
        if calls[0] > 0:
            break  # it was not cut off
    assert number > 20
    assert ends == ({"run-1-0", "run-1-1", "none"} if step == 1 else {"run-1-0", "run-2-1"})


def test_receipts_of_two_saves_are_no_whole_checkpoint(root: Path, job: SmallJob) -> None:
    write_full(root, 1, *trained())
    path = job.actor(1) / RECEIPTS / full_receipt_name(0)
    receipt = read(Receipt, path)
    path.write_bytes(encode(receipt.model_copy(update={"world_size": 2})))
    other = path.with_name(full_receipt_name(1))
    other.write_bytes(
        encode(receipt.model_copy(update={"world_size": 2, "rank": 1, "save_id": "run-1-9"}))
    )
    assert latest_checkpoint(root) is None
    refuses("receipts of ranks 0 and 1 belong to two saves", root, step=1)


# -- what is missing or damaged ------------------------------------------------------------------


def unlink(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_another_saves(path: Path) -> None:
    other = path.parents[1].with_name("global_step_2") / "actor" / path.name
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("name", [SHARD, OPTIMIZER, EXTRA])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (unlink, "is missing"),
        (cut_short, "not the file that its receipt lists|cannot be|The file is incomplete"),
        (flip_a_bit, "does not match its CRC-32"),
        (replace_by_another_saves, "not the file that its receipt lists"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_part_that_is_missing_or_damaged_is_named(
    root: Path, job: SmallJob, name: str, damage: Callable[[Path], None], what: str
) -> None:
    for step in (1, 2):
        write_full(root, step, *trained(step))
    job.point(1, CHECKPOINT_POINTER)
    damage(job.actor(1) / name)
    model = Net()
    optimizer = adamw(model)
    refuses(rf"global_step_1/actor/{name}.*({what})", root, model, optimizer=optimizer)
    assert not optimizer.state
    assert load_checkpoint(root, model, optimizer=optimizer, step=2) is not None


def test_what_was_saved_without_cannot_be_asked_for(root: Path) -> None:
    model, optimizer = trained()
    write_full(root, 1, model)
    refuses(f"{OPTIMIZER}.*not part of the checkpoint", root, model, optimizer=optimizer)
    refuses("with 0 schedulers, not 1", root, model, scheduler=halved(optimizer))
    refuses(rf"critic/{SHARD} is not listed", root, model, critic=Critic(Net()))


def test_a_critic_of_an_earlier_save_of_the_step_is_not_taken(root: Path) -> None:
    model, optimizer = trained(0)
    critic, critic_optimizer = trained(1)
    write_full(root, 1, model, optimizer, critic=critic, critic_optimizer=critic_optimizer)
    write_full(root, 1, model, optimizer, counter=1)
    refuses(rf"critic/{SHARD} is not listed", root, model, critic=Critic(Net()))


def renamed() -> nn.Module:
    model = Net()
    model.other = model.up
    del model.up
    return model


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Net(12), r"'up\.weight' has shape \(10, 7\) in .*, but shape \(12, 7\) in"),
        (renamed, "'other.weight' is neither in "),
        (lambda: nn.ModuleDict({"norm": nn.LayerNorm(7)}), "'down.bias', 'down.weight'"),
        (lambda: _with(Net(), "steps", torch.tensor(0.5)), "'steps' as I64.*float32"),
        (lambda: _with(Net(), "steps", torch.tensor(True)), "'steps' as I64.*bool"),
    ],
)
def test_what_is_of_another_model_is_refused(
    root: Path, make: Callable[[], nn.Module], what: str
) -> None:
    write_full(root, 1, *trained())
    refuses(what, root, make())


class Scaled(Net):
    """Has a scale that is no buffer, and says so in its state dict, as quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(
            lambda _module, state, prefix, _local: state.update(
                {f"{prefix}up.weight.scale": torch.ones(())}
            )
        )


def _with(model: nn.Module, name: str, value: torch.Tensor) -> nn.Module:
    model.register_buffer(name, value)
    return model


@pytest.mark.parametrize(
    ("saved", "wanted", "what"),
    [
        ("AdamW", "SGD", "options 'amsgrad', 'betas'.* but SGD has 'dampening', 'momentum'"),
        ("SGD", "AdamW", "options 'dampening', 'momentum'.* but AdamW has 'amsgrad', 'betas'"),
        ("SGD with momentum", "SGD", "which SGD does not have"),
        ("SGD", "SGD with momentum", ""),
        ("AdamW", "amsgrad", "max_exp_avg_sq' is neither in "),
        ("amsgrad", "AdamW", "max_exp_avg_sq'.*which AdamW does not have"),
        ("two groups", "AdamW", "have different options"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_is_of_another_optimizer_is_refused(
    root: Path, saved: str, wanted: str, what: str, steps: int
) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[saved](model)
    train(model, optimizer, steps)
    write_full(root, 1, model, optimizer)
    again = Net()
    other = OPTIMIZERS[wanted](again)
    if not what or not (steps or "options" in what):  # there is no state to miss
        load_checkpoint(root, again, optimizer=other)
        return
    refuses(what, root, again, optimizer=other)
    assert not other.state


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    """An optimizer for the matrices, and one for the rest."""
    matrices, rest = (group["params"] for group in grouped(model).param_groups)
    return [torch.optim.Muon(matrices, lr=0.2), torch.optim.AdamW(rest)]


def test_several_optimizers_resume_in_any_order_and_one_that_is_missing_is_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trainer_hooks")
    model, again = Net(), Net()
    made, other = both(model), both(again)
    for optimizer in made:
        train(model, optimizer, 2)
    write_full(root, 1, model, made, scheduler=list(map(halved, made)))
    for parameter in again.parameters():
        parameter.grad = torch.ones_like(parameter)  # with one, torch makes no state
    load_checkpoint(root, again, optimizer=other[::-1], scheduler=list(map(halved, other)))
    for found, expected in zip(other, made, strict=True):
        alike(found, expected)
    assert not caplog.records
    load_checkpoint(root, again, optimizer=both(again)[1])
    (told,) = caplog.messages
    assert "optimizer of other parameters: 'down.weight', 'up.weight'. State that" in told
    refuses("with 2 schedulers, not 1", root, again, scheduler=halved(other[0]))
    write_full(root, 2, model, made[1:])
    assert same(optimizer_state(model, made[1:]), optimizer_state(model, made[1]))
    caplog.clear()
    other = both(again)
    load_checkpoint(root, again, optimizer=other, step=2)
    assert caplog.messages == [told.replace("step_1", "step_2")]
    assert not other[0].state
    alike(other[1], made[1])
    with invalid(r"^2 optimizers update 'norm\.weight'"):
        load_checkpoint(root, again, optimizer=[other[1], adamw(again)])


# -- what can be saved ---------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), r"user_state\['x'\] is of type builtins.object"),
        (np.zeros(2), r"user_state\['x'\] is of type numpy.ndarray.*torch.from_numpy"),
        ({"deep": [1, Colour.RED]}, r"user_state\['x'\]\['deep'\]\[1\] is of type .*Colour"),
        (Path("/x"), r"user_state\['x'\] is of type pathlib"),
        ({Colour.RED: 1}, r"a key of user_state\['x'\] is of type .*Colour"),
        (lambda: 1, "function"),
        (np.longdouble(1), "longdouble"),
    ],
)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(value: object, where: str) -> None:
    with invalid(where):
        extra_state(scheduler=None, user_state={"x": value})


def test_what_is_let_through_can_be_loaded_without_running_code() -> None:
    given = {
        "numbers": (1, 2.5, 3j, True, None, np.float64(0.5), np.int32(3)),
        "text": ["a", b"b"],
        "set": {1, 2},
        "ordered": OrderedDict(a=torch.ones(2), b=nn.Parameter(torch.zeros(1))),
        7: torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    extra = extra_state(scheduler=halved(adamw(Net())), user_state=given)
    file = io.BytesIO()
    torch.save(extra, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert found.keys() == extra.keys()
    assert found["user_state"]["numbers"][5] == 0.5
    assert same(found["user_state"]["ordered"]["a"], torch.ones(2))
    set_rng_state(found[RNG])
    assert same(rng_state(), found[RNG])


def test_a_value_in_a_value_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with invalid(r"is of type builtins\.list"):
        checked(endless, "user_state")


def test_options_that_could_not_be_read_are_refused_when_they_are_saved() -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["clip"] = np.float32(0.5)
    assert optimizer_state(model, optimizer)["param_groups.up.bias.clip"] == 0.5
    optimizer.param_groups[0]["clip"] = Colour.RED
    with invalid(r"AdamW has param_groups\..*\.clip of type Colour"):
        optimizer_state(model, optimizer)


def test_an_optimizer_of_another_model_is_refused() -> None:
    _, optimizer = trained()
    with invalid(r"AdamW.*must have all parameters"):
        optimizer_state(nn.Linear(1, 1), optimizer)


def test_a_file_of_plain_values_is_no_model_for_the_daemon(root: Path, job: SmallJob) -> None:
    write_full(root, 1, *trained())
    with (
        ShardFile.open(Storage(), job.actor(1) / OPTIMIZER) as shard,
        malformed("not a tensor"),
    ):
        shard.tensors()


def test_a_save_that_protects_itself_again_is_still_whole(root: Path, job: SmallJob) -> None:
    write_full(root, 1, *trained())
    (job.step(1) / SAVING).touch()
    assert latest_checkpoint(root) == 1


def test_arguments_of_another_type_are_refused_before_anything_is_loaded(root: Path) -> None:
    model, _ = trained()
    with invalid(r"^step is '5': it must be a whole number"):
        load_checkpoint(root, model, step="5")  # type: ignore[arg-type]
    with invalid(r"^optimizer is the class Adam: it must be"):
        load_checkpoint(root, model, optimizer=torch.optim.Adam)  # type: ignore[arg-type]


class Scaling(nn.Module):
    """Saves and loads an attribute by torch's own doors."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.scale = torch.ones(1)
        self.weight = nn.Parameter(torch.ones(4), requires_grad=not frozen)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.scale = state.pop(f"{prefix}scale").clone()
        super()._load_from_state_dict(state, prefix, *more)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_module_saves_and_loads_itself_is_resumed(root: Path, *, frozen: bool) -> None:
    model, again = (nn.Sequential(Scaling(frozen=frozen), nn.Linear(4, 4)) for _ in range(2))
    model[0].scale.fill_(7)
    write_full(root, 1, model, adamw(model))
    load_checkpoint(root, again, optimizer=adamw(again))
    assert again[0].scale == 7


def test_only_a_frozen_parameters_quantization_is_a_bases() -> None:
    model = nn.Sequential(Scaling(frozen=True), Scaling(frozen=False))
    for one in model:
        one.packed = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    names = ["0.SCB", "0.weight.absmax", "1.weight.absmax", "scale"]
    assert computed_names(model)(names) == {
        "0.SCB": True,
        "0.weight.absmax": True,
        "1.weight.absmax": False,
        "scale": False,
    }


class Extra(nn.Linear):
    """With extra state of any kind."""

    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        """Keep nothing."""


@pytest.mark.parametrize("state", [torch.ones(3), np.float64(2), {"a": np.float32(1)}, {"b": {1}}])
def test_extra_state_of_any_kind_hinders_no_resuming(
    root: Path, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    monkeypatch.setattr(Extra, "state", state)
    model, again = Extra(2, 2), Extra(2, 2)
    with TrainerHook(root, model) as hook:
        hook.save_checkpoint(1, block_until_saved=True)
    load_checkpoint(root, again)
    assert torch.equal(again.weight, model.weight)
