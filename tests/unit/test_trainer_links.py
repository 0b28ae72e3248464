"""Saves of one process that hold only what changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncd.operate.job_state import look
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.names import link_name, master_name, shard_name
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import SaveOutcome, SaveOutcomes, encode
from syncd.storage.job import Job
from tests.hooks import DEADLINE, Gate, written
from tests.link_saves import full, is_link, linked, offered, publish, receipts
from tests.merging import assert_equal
from tests.storages import RuledStorage, refuse
from trainer_hooks import SaveSettings, TrainerHook, load_checkpoint

SHARD, LINK, MASTER = (name_of(1, 0) for name_of in (shard_name, link_name, master_name))


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.Embedding(100, 64), nn.LayerNorm(64)).to(dtype)


def change(model: nn.Module, fraction: float = 0.03) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            changed = torch.rand(parameter.shape) < fraction
            parameter[changed] = parameter[changed] * 1.01 + 0.01


def hook_of(
    root: Path,
    model: nn.Module,
    saving: SaveSettings | None = None,
    storage: RuledStorage | None = None,
    **more: Any,
) -> TrainerHook:
    settings = SyncSettings(deltas=True, save_timeout=60, **more)
    return TrainerHook(root, model, settings=settings, saving=saving, storage=storage)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def save(hook: TrainerHook, model: nn.Module, step: int, fraction: float = 0.03) -> None:
    change(model, fraction)
    hook.after_step(step)
    written(hook)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    Job.at(folder).open()
    return folder


def test_each_save_after_the_first_is_a_link_to_the_one_before(root: Path) -> None:
    model = model_of()
    with offered(root) as job, hook_of(root, model) as hook:
        save(hook, model, 1)
        before = full(job, 1)
        assert_equal(before, state(model))
        for step in (2, 3, 4):
            save(hook, model, step)
            assert is_link(job, step)
            (receipt,) = receipts(job, step)
            assert receipt.base == receipts(job, step - 1)[0].save_id
            assert not (job.layout.actor(step) / SHARD).exists()
            before = linked(job, step, before)
            assert_equal(before, state(model))
            assert int(job.layout.state_pointer.read_text()) == step


def test_the_last_save_is_full_and_a_link(root: Path) -> None:
    model = model_of()
    with offered(root) as job:
        with hook_of(root, model, sync_interval=2) as hook:
            save(hook, model, 2)
            before = full(job, 2)
            change(model)
            hook.after_step(3)  # not due
        assert_equal(full(job, 3), state(model))
        assert_equal(linked(job, 3, before), state(model))
        assert receipts(job, 3)[0].base == receipts(job, 2)[0].save_id


def test_a_cast_save_is_a_link_in_the_cast_dtype(root: Path) -> None:
    model = model_of(torch.float32)
    with offered(root) as job, hook_of(root, model, SaveSettings(sync_dtype="bf16")) as hook:
        save(hook, model, 1)
        save(hook, model, 2)
        cast = {name: value.bfloat16() for name, value in state(model).items()}
        assert_equal(linked(job, 2, full(job, 1)), cast)
        assert receipts(job, 2)[0].sync_dtype == "bf16"


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("at_once", [True, False])
def test_training_resumes_from_a_full_checkpoint_whose_weights_are_a_link(
    root: Path, dtype: Any, at_once: bool
) -> None:
    model = model_of(torch.float32 if dtype else torch.bfloat16)
    with offered(root) as job, hook_of(root, model, SaveSettings(sync_dtype=dtype)) as hook:
        save(hook, model, 1)
        change(model)
        if not at_once:
            hook.after_step(2)
            written(hook)
        hook.save_checkpoint(2, block_until_saved=True)
        written(hook)
        truth = state(model)
        actor = job.layout.actor(2)
        assert (actor / LINK).exists()
        assert (actor / MASTER).exists()
        assert not (actor / SHARD).exists()
        save(hook, model, 3)
        assert is_link(job, 3)
    other = model_of(torch.float32 if dtype else torch.bfloat16)
    resumed = load_checkpoint(root, other, step=2)
    assert resumed is not None
    assert_equal(state(other), truth)


def test_a_save_while_a_checkpoint_is_written_is_full(root: Path) -> None:
    model = model_of()
    storage = RuledStorage()
    with offered(root) as job, hook_of(root, model, storage=storage) as hook:
        save(hook, model, 1)
        gate = Gate(storage, "create", MASTER)
        change(model)
        hook.save_checkpoint(2)
        assert gate.reached.wait(DEADLINE)  # the weights are announced, and the rest is written
        assert is_link(job, 2)
        middle = state(model)
        change(model)
        hook.save_state_dict(3)  # in the memory of step 1's copy
        gate.opened.set()
        written(hook)
        assert_equal(full(job, 3), state(model))
        save(hook, model, 4)
        assert is_link(job, 4)
    resumed = model_of()
    load_checkpoint(root, resumed, step=2)
    assert_equal(state(resumed), middle)


def test_saves_use_the_memory_of_two_copies(root: Path) -> None:
    model = model_of()
    with offered(root) as job, hook_of(root, model) as hook:
        for step in range(1, 6):
            save(hook, model, step)
        hook.save_checkpoint(5, block_until_saved=True)
        change(model)
        hook.save_checkpoint(6, block_until_saved=True)
        written(hook)
        assert is_link(job, 6)
        copies = hook._saver.copies
        part = sum(tensor.nbytes for tensor in model.state_dict().values())
        assert [buffers.nbytes for buffers in copies._free] == [part, part]
        assert not hook._trained._masters


def test_the_checkpoint_of_close_has_shards_and_no_masters(root: Path) -> None:
    model = model_of()
    with offered(root) as job:
        with hook_of(root, model, save_interval=100, sync_interval=2) as hook:
            save(hook, model, 2)
            change(model)
            hook.after_step(3)
        names = {path.name for path in job.layout.actor(3).iterdir()}
        assert {SHARD, LINK} <= names
        assert MASTER not in names
        other = model_of()
        assert load_checkpoint(root, other) is not None
        assert_equal(state(other), state(model))


def test_a_tied_output_embedding_is_left_out(root: Path) -> None:
    class Config:
        def to_json_string(self) -> str:
            return '{"tie_word_embeddings": true}'

        def save_pretrained(self, folder: str) -> None:
            Path(folder, "config.json").write_text(self.to_json_string())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(50, 8)
            self.lm_head = nn.Linear(8, 50, bias=False)
            self.lm_head.weight = self.embed_tokens.weight
            self.config = Config()

    model = Model().bfloat16()
    with offered(root) as job, hook_of(root, model) as hook:
        save(hook, model, 1)
        save(hook, model, 2)
        before = full(job, 1)
        assert before.keys() == {"embed_tokens.weight"}
        assert_equal(
            linked(job, 2, before), {"embed_tokens.weight": model.embed_tokens.weight.detach()}
        )


def test_links_need_a_daemon_that_offers_them(root: Path) -> None:
    model = model_of()
    with offered(root, links=False) as job, hook_of(root, model) as hook:
        save(hook, model, 1)
        save(hook, model, 2)
        assert_equal(full(job, 2), state(model))
        assert receipts(job, 2)[0].base is None


def published(**more: Any) -> Callable[[Job], None]:
    return lambda job: publish(job, receipts(job, 1)[0].save_id, **more)


def foreign(job: Job) -> None:
    publish(job, "another-1-0")


def foreign_after_ours(job: Job) -> None:
    done = SaveOutcome(identity=receipts(job, 1)[0].save_id, outcome="published")
    job.storage.replace(job.layout.saves, encode(SaveOutcomes(steps={1: done})))
    publish(job, "another-1-0")


@pytest.mark.parametrize(
    ("daemon", "links"),
    [
        (published(), True),
        (published(closed="a rollback"), False),
        (foreign, True),  # the full save of this run is still to be merged
        (foreign_after_ours, False),
    ],
)
def test_links_follow_what_latest_says(
    root: Path, daemon: Callable[[Job], None], links: bool
) -> None:
    model = model_of()
    with offered(root) as job, hook_of(root, model) as hook:
        save(hook, model, 1)
        daemon(job)
        save(hook, model, 2)
        assert is_link(job, 2) is links


def test_a_dead_daemon_offers_nothing(root: Path) -> None:
    model = model_of()
    with offered(root) as job:
        pass
    with hook_of(root, model) as hook:
        save(hook, model, 1)
        save(hook, model, 2)
        assert not is_link(job, 2)


def test_a_step_that_is_not_higher_is_saved_whole(root: Path) -> None:
    model = model_of()
    with offered(root) as job, hook_of(root, model) as hook:
        save(hook, model, 5)
        save(hook, model, 3)
        assert_equal(full(job, 3), state(model))
        save(hook, model, 4)
        assert is_link(job, 4)
        # Again, by a run of its own.
    with offered(root), hook_of(root, model) as hook:
        save(hook, model, 4)
        assert_equal(full(job, 4), state(model))
        assert not is_link(job, 4)


def test_after_two_dense_links_saves_are_full_for_a_while(root: Path) -> None:
    model = model_of()
    with offered(root) as job, hook_of(root, model) as hook:
        kinds = []
        for step in range(1, 16):
            save(hook, model, step, 0.9)
            kinds.append(is_link(job, step))
        assert kinds == [False, True, True, *[False] * 10, True, True]
        before = full(job, 13)
        assert_equal(linked(job, 15, linked(job, 14, before)), state(model))


def test_a_failed_link_is_followed_by_a_full_save(root: Path) -> None:
    model = model_of()
    storage = RuledStorage()
    with offered(root) as job, hook_of(root, model, storage=storage) as hook:
        save(hook, model, 1)
        storage.rules.append(refuse("create", 28, where=LINK))
        change(model)
        hook.after_step(2)
        with pytest.raises(SaveFailedError, match="No space left"):
            written(hook)
        storage.rules.clear()
        assert not (job.layout.actor(2) / LINK).exists()
        save(hook, model, 3)
        assert_equal(full(job, 3), state(model))
        save(hook, model, 4)
        assert is_link(job, 4)


@pytest.mark.parametrize(
    ("model", "settings", "saving", "why"),
    [
        (model_of(torch.float32), {}, {}, "float32"),
        (model_of(), {"method": "memory"}, {}, "method checkpoint"),
        (model_of(), {}, {"layout": "full"}, "sharded"),
    ],
)
def test_what_links_do_not_cover_is_saved_whole_after_one_warning(
    root: Path,
    model: nn.Module,
    settings: dict[str, Any],
    saving: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with offered(root) as job, caplog.at_level(logging.WARNING, "trainer_hooks"):
        with hook_of(root, model, SaveSettings(**saving), **settings) as hook:
            save(hook, model, 1)
            save(hook, model, 2)
            assert not is_link(job, 2)
            assert why in look(job)["no_links"]
        told = [one.getMessage() for one in caplog.records if "deltas" in one.getMessage()]
        assert len(told) == 1
        assert why in told[0]


def test_a_link_of_few_changes_has_a_fiftieth_of_a_full_save(root: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(2048, 1024).bfloat16()
    with offered(root) as job, hook_of(root, model) as hook:
        hook.after_step(1)
        written(hook)
        with torch.no_grad():
            for parameter in model.parameters():
                bits = parameter.view(torch.int16)
                bits[torch.rand(bits.shape) < 0.033] += 1
        hook.after_step(2)
        written(hook)
        whole, changed = (job.layout.actor(1) / SHARD, job.layout.actor(2) / LINK)
        assert 0.005 < changed.stat().st_size / whole.stat().st_size <= 0.02
        assert_equal(linked(job, 2, full(job, 1)), state(model))


def test_a_link_names_tensors_with_nan(root: Path) -> None:
    model = model_of()
    with offered(root) as job, hook_of(root, model) as hook:
        save(hook, model, 1)
        with torch.no_grad():
            model[1].weight[3] = float("nan")  # type: ignore[index]
        save(hook, model, 2)
        found = [file.nonfinite for file in receipts(job, 2)[0].files if file.over == "index"]
        assert found[0] is not None
        assert found[0].names == ("1.weight",)
