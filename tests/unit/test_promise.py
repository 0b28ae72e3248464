"""The first full checkpoint of a run: said at once if it could not be resumed, in one line."""

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.checkpoints import Net, train
from tests.hooks import checkpoint
from tests.jobs import SmallJob
from tests.storages import READS, RuledStorage
from tests.unit.test_full_checkpoint import both
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, latest_checkpoint
from trainer_hooks.resuming.promise import Promise
from trainer_hooks.resuming.resume import load_checkpoint
from trainer_hooks.settings import SaveLora

SHARD, OPTIMIZER = "model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt"
Made = tuple[nn.Module, dict[str, Any]]


@pytest.fixture(autouse=True)
def _only_the_training_looks_at_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP swaps their parameters while a thread of syncd checks the checkpoint."""

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def walked(*given: Any, **options: Any) -> Any:
            assert threading.current_thread() is threading.main_thread()
            return real(*given, **options)

        return walked

    for name in ("modules", "named_modules", "named_parameters", "state_dict"):
        monkeypatch.setattr(nn.Module, name, guarded(getattr(nn.Module, name)))


def adamw(model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    made = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    train(model, made, steps)
    return made


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(7)
        self.down.weight = self.up.weight


class Packed(nn.Linear):
    """Computes a name for its state dict, as quantizers do."""

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}weight.absmax"] = torch.ones(3)


def plain(**options: Any) -> Made:
    model = Net()
    return model, {"optimizer": adamw(model), **options}


def tied() -> Made:
    return (model := Tied()), {"optimizer": adamw(model)}


def lora(base: nn.Module | None = None, **saving: Any) -> Made:
    model: Any = get_peft_model(base or Net(), LoraConfig(target_modules=["up"]))  # type: ignore[arg-type] # any module
    return model, {"optimizer": adamw(model), "saving": SaveSettings(**saving)}


def packed() -> Made:
    base = Net()
    base.up.__class__ = Packed
    return lora(base)


def with_critic() -> Made:
    critic = Net()
    return plain(critic=critic, critic_optimizer=both(critic))


def several() -> Made:
    model = Net()
    for one in (made := both(model)):
        train(model, one, 1)
    return model, {"optimizer": made}


def frozen() -> Made:
    model, options = plain()
    model.up.requires_grad_(False)  # type: ignore[union-attr] # a module
    return model, options


class Raw:
    """An optimizer that is not torch's."""

    def state_dict(self) -> dict[str, Any]:
        return {"lr": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


KINDS: dict[str, Callable[[], Made]] = {
    "plain": plain,
    "without an optimizer": lambda: (Net(), {}),
    "a raw optimizer": lambda: (Net(), {"optimizer": Raw()}),
    "without any state": lambda: (model := Net(), {"optimizer": adamw(model, 0)}),
    "tied": tied,
    "one full state dict": lambda: plain(saving=SaveSettings(layout="full")),  # type: ignore[arg-type] # a name will do
    "tied, one full state dict": lambda: (
        tied()[0], {"saving": SaveSettings(layout="full")},  # type: ignore[arg-type] # likewise
    ),
    "cast for explorers": lambda: plain(saving=SaveSettings(sync_dtype="bf16")),
    "links": lambda: plain(settings=SyncSettings(sync_interval=1, deltas=True)),
    "in memory": lambda: plain(settings=SyncSettings(method="memory")),  # type: ignore[arg-type] # likewise
    "an adapter": lora,
    "a merged adapter": lambda: lora(lora=SaveLora.MERGED),
    "a quantized base": packed,
    "a critic": with_critic,
    "several optimizers": several,
    "frozen later": frozen,
}  # fmt: skip


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_said_of_what_can_be_resumed(
    job: SmallJob, errors: Callable[[], list[str]], kind: str
) -> None:
    model, options = KINDS[kind]()
    with TrainerHook(job.root, model, **options) as hook:
        hook.after_step(1)  # a sync, if one is due, that the full checkpoint completes
        checkpoint(hook, 1)
        assert hook._saver.has_promised
    assert errors() == []
    names = {"optimizer", "critic", "critic_optimizer"}
    again, given = KINDS[kind]()
    load_checkpoint(job.root, again, **{name: given[name] for name in names & given.keys()})


def scaled() -> Made:
    model = Net()
    model.register_state_dict_post_hook(
        lambda _model, state, *_: state.update({"up.scale": torch.ones(())})
    )
    return model, {}


def not_alike() -> Made:
    model, options = plain()
    options["optimizer"].param_groups[0]["clip"] = float("nan")
    return model, options


Patch = Callable[[pytest.MonkeyPatch], None]


def planned(change: Callable[[nn.Module, Any], object]) -> Patch:
    """Change the model or the optimizer between the plan and the save."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Promise.__init__

        def init(promise: Promise, saved: Any) -> None:
            real(promise, saved)
            change(*saved[0][1:])

        monkeypatch.setattr(Promise, "__init__", init)

    return patch


def written(change: Callable[[Path], object]) -> Patch:
    """Change the step's files between the save and the check."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Promise.check

        def check(promise: Promise, job: Any, step: int) -> bool:
            change(job.layout.actor(step))
            return real(promise, job, step)

        monkeypatch.setattr(Promise, "check", check)

    return patch


def with_more(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["more"] = torch.ones(2)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


#: What is made, what happens to it, and the words that tell what, why and what to do.
BROKEN: dict[str, tuple[Callable[[], Made], Patch, tuple[str, ...]]] = {
    "a computed name": (
        scaled, written(lambda _: None),
        ("not a parameter or buffer", "'up.scale'", "Make them buffers"),
    ),
    "options that are not alike": (
        not_alike, written(lambda _: None), (OPTIMIZER, "'norm.bias'", "different options"),
    ),
    "a name more": (
        plain, planned(lambda model, _: model.register_buffer("more", torch.ones(2))),
        (SHARD, "'more', which is not loaded", "the same names at each call"),
    ),
    "a name less": (
        plain, planned(lambda model, _: model._buffers.pop("steps")), (SHARD, "'steps' is neither"),
    ),
    "more of the optimizer": (
        plain, planned(with_more),
        (OPTIMIZER, ".more', which is not loaded", "the same names at each call"),
    ),
    "a file removed": (
        plain, written(lambda actor: (actor / OPTIMIZER).unlink()),
        (f"{OPTIMIZER} is missing", "Restore the file"),
    ),
    "a file torn": (
        plain, written(lambda actor: (actor / SHARD).write_bytes(b"torn")),
        (SHARD, "4 bytes instead of", "Restore the file"),
    ),
    "a file of other content": (
        plain, written(lambda actor: zeroed(actor / OPTIMIZER)), (OPTIMIZER, "Restore the file"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_what_could_not_be_resumed_is_said_once_and_the_save_goes_on(
    job: SmallJob, errors: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    make, patch, words = BROKEN[kind]
    patch(monkeypatch)
    model, options = make()
    with TrainerHook(job.root, model, **options) as hook:
        checkpoint(hook, 1)
        (said,) = errors()
        monkeypatch.setattr(Promise, "__init__", None)  # no later save plans anything
        checkpoint(hook, 2)
    assert latest_checkpoint(job.root) == 2
    assert errors() == [said]
    assert "could not resume from the full checkpoint of step 1: " in said
    assert [word for word in (*words, "Mend this now") if word not in said] == [], said


def test_a_check_reads_only_headers(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, calls = RuledStorage(), list[tuple[str, tuple[Any, ...]]]()
    real = Promise.check

    def check(*given: Any) -> bool:
        before = len(storage.calls)
        done = real(*given)
        calls.extend(storage.calls[before:])
        return done

    monkeypatch.setattr(Promise, "check", check)
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1024)).sum().backward()
    optimizer.step()
    with TrainerHook(job.root, model, optimizer=optimizer, storage=storage) as hook:
        checkpoint(hook, 1)
    assert {name for name, _ in calls} <= {*READS, "close"}
    assert 0 < sum(_count(name, given) for name, given in calls) < 1024 * 1024 // 4


def _count(name: str, given: tuple[Any, ...]) -> int:
    match name:
        case "pread":
            return int(given[1])
        case "pread_into":
            return len(given[1])
    return 0


def test_if_storage_does_not_answer_the_next_checkpoint_is_checked(
    job: SmallJob, storage: RuledStorage, errors: Callable[[], list[str]]
) -> None:
    model, options = not_alike()
    with TrainerHook(job.root, model, storage=storage, **options) as hook:
        storage.refuse("status", errno.EIO, where=OPTIMIZER)
        checkpoint(hook, 1)
        assert not hook._saver.has_promised
        assert not errors()
        storage.rules.clear()
        checkpoint(hook, 2)
    (said,) = errors()
    assert "of step 2: " in said
