"""Saves of one process that hold only what changed."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.operate.job_state import look
from syncd.protocol.names import NAME_MAP, RECEIPTS, delta_name, master_name, shard_name
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import ReceiptFile, SaveOutcome, SaveOutcomes, encode
from syncd.protocol.reports import DaemonReport
from syncd.protocol.tensor_names import NameMapRecord
from syncd.storage.job import Job
from tests.commands import invoke
from tests.delta_saves import follower, full, is_delta, offered, publish, rebuilt, receipts
from tests.fsdp_models import Config
from tests.hooks import DEADLINE, Gate, checkpoint, written
from tests.jobs import SmallJob, read
from tests.makers import work
from tests.merging import assert_equal, loaded
from tests.storages import RuledStorage
from trainer_hooks import SaveSettings, TrainerHook, load_checkpoint

SHARD, DELTA, MASTER = (name_of(1, 0) for name_of in (shard_name, delta_name, master_name))


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Embedding(100, 64), nn.LayerNorm(64)).to(dtype)
    model.config = PreTrainedConfig(architectures=["Tiny"])
    return model


def change(model: nn.Module, fraction: float = 0.03) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            changed = torch.rand(parameter.shape) < fraction
            parameter[changed] = parameter[changed] * 1.01 + 0.01


def hook_of(
    job: Job,
    model: nn.Module,
    saving: SaveSettings | None = None,
    storage: RuledStorage | None = None,
    **more: Any,
) -> TrainerHook:
    settings = SyncSettings(deltas=True, save_timeout=60, **more)
    return TrainerHook(job.layout.root, model, settings=settings, saving=saving, storage=storage)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.bfloat16() for name, one in tensors.items()}


def save(hook: TrainerHook, step: int, fraction: float = 0.03) -> None:
    change(hook._trained.model, fraction)
    hook.after_step(step)
    written(hook)


def small_files(job: Job, step: int) -> dict[str, bytes]:
    actor = job.layout.actor(step)
    files = [actor / "fsdp_config.json", *(actor / "huggingface").iterdir()]
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with offered(tmp_path) as job:
        yield job


@pytest.mark.parametrize("cast", [None, "bf16"])
def test_each_save_after_the_first_is_a_delta_from_the_one_before(job: Job, cast: Any) -> None:
    model = model_of(torch.float32 if cast else torch.bfloat16)
    with hook_of(job, model, SaveSettings(sync_dtype=cast)) as hook:
        save(hook, 1)
        before = full(job, 1)
        for step in (2, 3, 4):
            save(hook, step)
            (receipt,) = receipts(job, step)
            assert receipt.base == receipts(job, step - 1)[0].save_id
            assert receipt.sync_dtype == cast
            assert not (job.layout.actor(step) / SHARD).exists()
            before = rebuilt(job, step, before)
            assert_equal(before, halved(state(model)))
            assert int(job.layout.state_pointer.read_text()) == step


@pytest.mark.parametrize("cast", [None, "bf16"])
def test_a_delta_has_no_file_that_its_base_has(tmp_path: Path, cast: Any) -> None:
    job, model = SmallJob(tmp_path), model_of(torch.float32)
    with follower(job, "ahead"), job.daemon(deltas=work()) as loop:

        def served() -> object:
            loop.rounds(2, 1)
            return (job.latest.tip or job.latest).step

        with hook_of(job, model, SaveSettings(sync_dtype=cast)) as hook:
            listed: dict[int, list[ReceiptFile]] = {}
            for step in (1, 2, 3):
                loop.run_once()
                save(hook, step)
                (receipt,) = receipts(job, step)
                listed[step] = [*receipt.files, *receipt.of_base][1:]
                assert listed[step] == listed[1] != []
                assert served() == step
                assert {path.name for path in job.actor(step).iterdir()} == {
                    RECEIPTS, *({DELTA} if step > 1 else {SHARD, "fsdp_config.json", "huggingface"})
                }  # fmt: skip
            model.config = PreTrainedConfig(architectures=["Other"])
            save(hook, 4)
            assert is_delta(job, 4)
            assert b"Other" in small_files(job, 4)["config.json"]
            assert served() == 3
            assert "config.json differs" in str(job.latest.no_deltas)
            save(hook, 5)
            assert served() == 5
            config = job.version(job.latest.sequence) / "config.json"
            assert json.loads(config.read_bytes())["architectures"] == ["Other"]


def test_the_save_of_close_is_full(job: Job) -> None:
    model, other = model_of(), model_of()
    with hook_of(job, model, save_interval=100, sync_interval=2) as hook:
        save(hook, 2)
        change(model)
        hook.after_step(3)  # not due
    assert_equal(full(job, 3), state(model))
    assert not {DELTA, MASTER} & {path.name for path in job.layout.actor(3).iterdir()}
    assert load_checkpoint(job.layout.root, other) is not None
    assert_equal(state(other), state(model))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("at_once", [True, False])
def test_training_resumes_from_a_full_checkpoint_whose_weights_are_a_delta(
    job: Job, dtype: Any, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(torch.float32 if dtype else torch.bfloat16)
    with hook_of(job, model, SaveSettings(sync_dtype=dtype)) as hook:
        names = {NAME_MAP: encode(NameMapRecord())}
        monkeypatch.setattr(hook._trained._hub_names, "files", lambda *_: names)
        save(hook, 1)
        change(model)
        synced = halved(state(model))
        if not at_once:
            hook.after_step(2)
            written(hook)
            change(model)
        checkpoint(hook, 2)
        written(hook)
        truth = state(model)
        actor = job.layout.actor(2)
        assert small_files(job, 2) == small_files(job, 1)
        assert (actor / DELTA).exists()
        assert (actor / MASTER).exists()
        assert not (actor / SHARD).exists()
        save(hook, 3)
        assert_equal(rebuilt(job, 3, synced), halved(state(model)))
    other = model_of(torch.float32 if dtype else torch.bfloat16)
    assert load_checkpoint(job.layout.root, other, step=2) is not None
    assert_equal(state(other), truth)
    with ExplorerHook(job.layout.root, "bench", FakeEngine()) as bench:
        bench.load_step(2, DEADLINE)
        built = loaded(bench.folder or job.layout.root)
        assert (bench.folder / "config.json").exists()
    assert_equal(built, halved(truth))
    assert invoke("merge", actor, job.layout.root / "merged").exit_code == 0
    assert (job.layout.root / "merged" / "config.json").exists()


def test_a_save_while_a_checkpoint_is_written_is_full(job: Job) -> None:
    model = model_of()
    storage = RuledStorage()
    with hook_of(job, model, storage=storage) as hook:
        save(hook, 1)
        gate = Gate(storage, "create", MASTER)
        change(model)
        hook.save_checkpoint(2)
        assert gate.reached.wait(DEADLINE)  # the weights are announced, and the rest is written
        assert is_delta(job, 2)
        middle = state(model)
        change(model)
        hook.save_state_dict(3)  # in the memory of step 1's copy
        gate.opened.set()
        written(hook)
        assert_equal(full(job, 3), state(model))
        save(hook, 4)
        assert is_delta(job, 4)
    resumed = model_of()
    load_checkpoint(job.layout.root, resumed, step=2)
    assert_equal(state(resumed), middle)


def test_saves_use_the_memory_of_two_copies(job: Job) -> None:
    model, storage = model_of(), RuledStorage()
    with hook_of(job, model, storage=storage) as hook:
        copies = hook._saver.copies
        save(hook, 1)
        gate = Gate(storage, "create", DELTA)
        hook.save_state_dict(2)
        assert gate.reached.wait(DEADLINE)
        assert len(copies) == 0  # the delta still reads both
        gate.opened.set()
        for step in range(3, 6):
            save(hook, step)
        checkpoint(hook, 5)
        change(model)
        checkpoint(hook, 6)
        written(hook)
        assert is_delta(job, 6)
        part = sum(tensor.nbytes for tensor in model.state_dict().values())
        assert [buffers.nbytes for buffers in copies._free] == [part, part]
        assert not hook._trained._masters


def test_a_tied_output_embedding_is_left_out(job: Job) -> None:
    layers = {"embed_tokens": nn.Embedding(50, 8), "lm_head": nn.Linear(8, 50, bias=False)}
    model = nn.ModuleDict(layers)
    model.config = Config(tie_word_embeddings=True)
    model["lm_head"].weight = model["embed_tokens"].weight
    with hook_of(job, model) as hook:
        save(hook, 1)
        before = state(model)
        save(hook, 2)
        after = state(model)
    del before["lm_head.weight"], after["lm_head.weight"]
    assert_equal(rebuilt(job, 2, before), after)


def published(**more: Any) -> Callable[[Job], None]:
    return lambda job: publish(job, receipts(job, 1)[0].save_id, **more)


def dead(job: Job) -> None:
    with offered(job.layout.root):
        pass


def without_deltas(job: Job) -> None:
    path = job.layout.daemon_report
    report = read(DaemonReport, path)
    job.storage.replace(path, encode(report.model_copy(update={"takes_deltas": False})))


def foreign(job: Job) -> None:
    publish(job, "another-1-0")


def foreign_after_ours(job: Job) -> None:
    done = SaveOutcome(identity=receipts(job, 1)[0].save_id, outcome="published")
    job.storage.replace(job.layout.saves, encode(SaveOutcomes(steps={1: done})))
    publish(job, "another-1-0")


@pytest.mark.parametrize(
    ("daemon", "deltas"),
    [
        (dead, False),
        (without_deltas, False),
        (published(), True),
        (published(closed="a rollback"), False),
        (foreign, True),  # the full save of this run is still to be merged
        (foreign_after_ours, False),
    ],
)
def test_deltas_follow_what_the_daemon_says(
    job: Job, daemon: Callable[[Job], None], deltas: bool
) -> None:
    model = model_of()
    with hook_of(job, model) as hook:
        save(hook, 1)
        daemon(job)
        save(hook, 2)
        assert is_delta(job, 2) is deltas


def test_a_step_that_is_not_higher_is_saved_whole(job: Job) -> None:
    model = model_of()
    with hook_of(job, model) as hook:
        save(hook, 5)
        save(hook, 3)
        assert_equal(full(job, 3), state(model))
        save(hook, 4)
        assert is_delta(job, 4)


@pytest.mark.parametrize(
    ("settings", "saving"), [({"method": "memory"}, {}), ({}, {"layout": "full"})]
)
def test_what_deltas_do_not_cover_is_saved_whole_after_one_warning(
    job: Job,
    settings: dict[str, Any],
    saving: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of()
    with caplog.at_level(logging.WARNING, "trainer_hooks"):
        with hook_of(job, model, SaveSettings(**saving), **settings) as hook:
            save(hook, 1)
            save(hook, 2)
            assert not is_delta(job, 2)
            assert "only method" in look(job).no_deltas
        told = [one for one in caplog.messages if "every save is full: only method" in one]
        assert len(told) == 1


def test_a_delta_of_few_changes_has_a_fiftieth_of_a_full_save(job: Job) -> None:
    model = nn.Linear(2048, 1024).bfloat16()
    with hook_of(job, model) as hook:
        save(hook, 1)
        bits = model.weight.detach().view(torch.int16)
        bits[torch.rand(bits.shape) < 0.033] += 1
        save(hook, 2, 0)
        whole, changed = (job.layout.actor(1) / SHARD, job.layout.actor(2) / DELTA)
        assert 0.005 < changed.stat().st_size / whole.stat().st_size <= 0.02


def test_a_delta_names_tensors_with_nan(job: Job) -> None:
    model = model_of()
    with hook_of(job, model) as hook:
        save(hook, 1)
        with torch.no_grad():
            model[1].weight[3] = float("nan")  # type: ignore[index]
        save(hook, 2)
        found = [file.nonfinite for file in receipts(job, 2)[0].files if file.over == "index"]
        assert found[0] is not None
        assert found[0].names == ("1.weight",)
