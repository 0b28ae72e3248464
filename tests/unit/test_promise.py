"""The first full checkpoint of a run: said at once if it could not be resumed.

``tests/hooks.py`` lets the saves of all other tests fail if it is said.
"""

import errno
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoints import train
from tests.hooks import PROMISE, checkpoint
from tests.jobs import SmallJob
from tests.storages import READS, RuledStorage
from tests.unit.test_full_checkpoint import Net, Scaled, adamw
from trainer_hooks import TrainerHook, latest_checkpoint
from trainer_hooks.resuming.promise import Promise

SHARD, OPTIMIZER = "model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt"


def with_more(_: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["more"] = torch.ones(2)


#: What happens between the plan and the save, and what is said of it.
CHANGES: dict[Callable[[nn.Module, Any], object], str] = {
    lambda model, _: model.register_buffer("more", torch.ones(2)): f"{SHARD} has 'more', .* names",
    with_more: rf"{OPTIMIZER} has 'state\..*\.more', .* the same names at each call",
}


@pytest.mark.parametrize("change", [*CHANGES, None])
def test_what_could_not_be_resumed_is_said_once_and_the_save_goes_on(
    job: SmallJob,
    storage: RuledStorage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
) -> None:
    model = Net() if change else Scaled()
    train(model, optimizer := adamw(model), 1)
    plan, look = Promise.__init__, Promise.check
    monkeypatch.setattr(PROMISE, "filters", [])

    def planned(promise: Promise, saved: Any) -> None:
        plan(promise, saved)
        if change and not storage.rules:
            change(model, optimizer)

    def checked(promise: Promise, *given: Any) -> bool:
        begun = len(storage.calls)
        with monkeypatch.context() as patch:  # FSDP swaps parameters while this thread looks
            for name in ("named_modules", "named_parameters", "state_dict"):
                patch.setattr(nn.Module, name, None)
            done = look(promise, *given)
        assert {name for name, _ in storage.calls[begun:]} <= {*READS, "close"}
        return done

    monkeypatch.setattr(Promise, "check", checked)
    with TrainerHook(job.root, model, optimizer=optimizer, storage=storage) as hook:
        monkeypatch.setattr(Promise, "__init__", planned)
        storage.refuse("status", errno.EIO, where=SHARD)  # then the next one is checked
        checkpoint(hook, 1)
        storage.rules.clear()
        checkpoint(hook, 2)
        monkeypatch.setattr(Promise, "__init__", None)
        checkpoint(hook, 3)
    assert latest_checkpoint(job.root) == 3
    (said,) = [one.getMessage() for one in caplog.records if one.name == PROMISE.name]
    words = CHANGES.get(change, "not a parameter or buffer .*: 'up.weight.scale'. Make them")
    assert re.search(f"checkpoint of step [12]: .*{words}.* Mend this now", said), said
