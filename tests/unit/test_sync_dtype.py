"""Saves whose weights are cast for explorers: what is published, and what is resumed from."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from explorer_hooks import ExplorerHook, TorchModule, TransformersModel
from syncd.checkpoint.convert import look_at_step
from syncd.checkpoint.tensor_rules import Casting
from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from syncd.daemon.configuration import load
from syncd.protocol.errors import SaveNotReadyError
from syncd.protocol.names import RECEIPTS, full_receipt_name, receipt_name
from syncd.protocol.records import Manifest, Receipt
from tests.commands import invoke
from tests.hooks import DEADLINE, checkpoint, saved, written
from tests.jobs import SmallJob, read
from tests.merging import assert_equal
from tests.refusals import invalid, no_checkpoint
from tests.storages import RuledStorage
from tests.tiny_language import SIZES
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, load_checkpoint
from trainer_hooks.settings import SaveAsHf, SaveLayout, SaveLora, SyncDtype
from trainer_hooks.state.host_buffers import HostBuffers
from trainer_hooks.state.state_dict import sharded_state_dict

SHARD = "model_world_size_1_rank_0.pt"
MASTER = "master_world_size_1_rank_0.pt"
DTYPES: dict[SyncDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = [SaveLayout.SHARDED, SaveLayout.FULL]
FLOATING = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class Mixed(nn.Module):
    """Tensors of every kind of dtype; tied ones, a transposed one and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 7, bias=False)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.first.weight
        for name, value in (
            ("transposed", torch.randn(3, 4).t()),
            ("fp64", torch.randn(6, dtype=torch.float64)),
            ("fp16", torch.randn(6).half()),
            ("bf16", torch.randn(6).bfloat16()),
            ("steps", torch.arange(5)),
            ("mask", torch.tensor([True, False])),
            ("empty", torch.empty(0, 3)),
            ("scalar", torch.tensor(0.1)),
        ):
            self.register_buffer(name, value)


def cast(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: value.to(dtype) if value.dtype in FLOATING else value for name, value in state.items()
    }


def published(job: SmallJob, **config: Any) -> tuple[Manifest, dict[str, Tensor]]:
    job.run(DaemonConfig(**config))
    folder = job.version(job.latest.sequence)
    (path,) = folder.glob("*.safetensors")
    return read_manifest(job.storage, folder), load_file(path)


def receipts(job: SmallJob) -> tuple[Receipt, Receipt]:
    folder = job.actor(1) / RECEIPTS
    paths = folder / receipt_name(0), folder / full_receipt_name(0)
    first, second = (read(Receipt, path) for path in paths)
    return first, second


# -- what is published -------------------------------------------------------------------------


each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_layout
@pytest.mark.parametrize("dtype", DTYPES)
def test_floating_tensors_are_published_as_torch_casts_them_and_all_others_as_they_are(
    job: SmallJob, dtype: SyncDtype, layout: SaveLayout
) -> None:
    model = Mixed()
    saved(job, model, sync_dtype=dtype, layout=layout)
    manifest, found = published(job)
    assert_equal(found, cast(model.state_dict(), DTYPES[dtype]))
    told = "BF16" if dtype == "bf16" else "F16"
    assert manifest.dtype == job.latest.dtype == told
    assert model.first.weight.dtype == torch.float32


@each_layout
def test_a_quantized_model_is_not_cast_and_saved_without_a_cast(
    job: SmallJob, layout: SaveLayout
) -> None:
    model = Mixed()
    model.register_buffer("fp8", torch.randn(6).to(torch.float8_e4m3fn))
    with no_checkpoint(r"fp8 is quantized .*sync_dtype of the trainer"):
        saved(job, model, sync_dtype="bf16", layout=layout)
    saved(job, model, layout=layout)
    assert_equal(published(job)[1], dict(model.state_dict()))


def test_syncs_go_cast_to_the_memory_folder_and_full_checkpoints_are_published_alike(
    job: SmallJob, tmp_path: Path
) -> None:
    memory, model = SmallJob(tmp_path / "shm"), nn.Linear(3, 2)
    with TrainerHook(
        job.root,
        model,
        settings=SyncSettings(method="memory", save_interval=1),  # type: ignore[arg-type] # a name will do
        saving=SaveSettings(sync_dtype="bf16", memory_dir=memory.root),
    ) as hook:
        hook.after_step(1)
    wanted = cast(dict(model.state_dict()), torch.bfloat16)
    for one in (memory, job):
        assert_equal(published(one)[1], wanted)
    assert not (memory.actor(1) / MASTER).exists()
    assert (job.actor(1) / MASTER).exists()


@pytest.mark.usefixtures("group")
@each_layout
@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1"])
def test_sharded_tensors_are_cast_and_keep_their_layout(
    job: SmallJob, wrap: str, layout: SaveLayout
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    wanted = cast(
        {name: value.clone() for name, value in model.state_dict().items()}, torch.bfloat16
    )
    if wrap == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fully_shard(model)
    saved(job, model, sync_dtype="bf16", layout=layout)
    manifest, found = published(job)
    assert_equal(found, wanted)
    assert manifest.dtype == "BF16"
    copied = HostBuffers().copy(sharded_state_dict(model), Casting("bf16"))
    assert {value.dtype for value in copied.values()} == {torch.bfloat16}


def test_what_overflows_fp16_is_found_as_inf(job: SmallJob) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias.fill_(1e6)
    saved(job, model, sync_dtype="fp16")
    manifest, _ = published(job)
    assert manifest.nonfinite is not None
    assert manifest.nonfinite.names == ("bias",)


def test_host_buffers_have_half_the_bytes_and_are_used_again() -> None:
    state = nn.Linear(64, 64).state_dict()
    plain, halved = HostBuffers(), HostBuffers()
    plain.copy(state)
    first = halved.copy(state, Casting("bf16"))
    again = halved.copy(state, Casting("bf16"))
    assert 2 * halved.nbytes == plain.nbytes
    assert first["weight"].data_ptr() == again["weight"].data_ptr()
    halved.copy(state)  # and may be copied without a cast after all
    assert halved.nbytes == plain.nbytes


def test_extra_state_of_a_module_is_not_cast() -> None:
    state = {"weight": torch.ones(2), "layer._extra_state": torch.ones(2), "list": [torch.ones(2)]}
    found = HostBuffers().copy(state, Casting("bf16"))
    assert found["weight"].dtype == torch.bfloat16
    assert found["layer._extra_state"].dtype == found["list"][0].dtype == torch.float32


@pytest.mark.parametrize("lora", [SaveLora.ADAPTER, SaveLora.MERGED])
def test_an_adapter_alone_or_merged_is_cast_after_it_was_computed(
    job: SmallJob, lora: SaveLora
) -> None:
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    saved(job, model, full=True, lora=lora, sync_dtype="bf16")
    manifest, found = published(job)
    trained = torch.load(job.actor(1) / SHARD, weights_only=True)
    assert {value.dtype for value in trained.values()} == {torch.float32}
    assert not (job.actor(1) / MASTER).exists()
    if lora is SaveLora.ADAPTER:
        kept = {
            name.replace(".default", ""): value
            for name, value in model.state_dict().items()
            if "lora_" in name
        }
    else:
        kept = dict(model.merge_and_unload().state_dict())
    assert_equal(found, cast(kept, torch.bfloat16))
    assert manifest.dtype == "BF16"


# -- what is resumed from ----------------------------------------------------------------------


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@each_layout
@pytest.mark.parametrize("how", ["at once", "a sync that is completed", "written again"])
def test_a_full_checkpoint_is_resumed_in_the_models_dtype_and_published_cast(
    job: SmallJob, layout: SaveLayout, how: str
) -> None:
    model, optimizer = trained(1)
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    saving = SaveSettings(layout=layout, sync_dtype="bf16", save_as_hf=SaveAsHf.ALWAYS)
    interval = 1 if how == "at once" else 0
    with TrainerHook(
        job.root,
        model,
        optimizer=optimizer,
        settings=SyncSettings(save_interval=interval),
        saving=saving,
    ) as hook:
        hook.after_step(1)
        if how != "at once":
            hook._saver.wait()
        if how == "written again":
            for name in (SHARD, "model.safetensors"):
                (job.actor(1) / name).unlink(missing_ok=True)
        checkpoint(hook, 1)
    _, found = published(job)
    assert_equal(found, cast(truth, torch.bfloat16))
    assert_equal(load_file(job.actor(1) / "huggingface" / "model.safetensors"), truth)

    told, full = ({file.name for file in one.files} for one in receipts(job))
    assert {one.sync_dtype for one in receipts(job)} == {"bf16"}
    weights = SHARD if layout is SaveLayout.SHARDED else "model.safetensors"
    assert weights in told - full  # by which a release before this one refuses it
    assert MASTER in full - told

    again, its = resumed(job)
    assert_equal(again.state_dict(), truth)
    for one in (model, optimizer), (again, its):
        train(*one)
    assert_equal(again.state_dict(), dict(model.state_dict()))


def resumed(job: SmallJob) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Another model, and its optimizer, as the full checkpoint has them."""
    model, optimizer = trained(2)
    load_checkpoint(job.root, model, optimizer=optimizer)
    return model, optimizer


def full_checkpoint(job: SmallJob, layout: SaveLayout = SaveLayout.SHARDED) -> dict[str, Tensor]:
    """A hook saves step 1, with cast weights; the result is the model's own."""
    model, optimizer = trained(1)
    with TrainerHook(
        job.root,
        model,
        optimizer=optimizer,
        saving=SaveSettings(sync_dtype="bf16", layout=layout),
    ) as hook:
        hook.save_checkpoint(1)
    return dict(model.state_dict())


def converted(job: SmallJob) -> dict[str, Tensor]:
    done = invoke("convert", job.step(1))
    assert done.exit_code == 0, done.output
    return load_file(job.actor(1) / "huggingface" / "model.safetensors")


@each_layout
def test_a_full_checkpoint_is_converted_in_the_models_dtype(
    job: SmallJob, layout: SaveLayout
) -> None:
    truth = full_checkpoint(job, layout)
    assert_equal(converted(job), truth)


def test_two_full_checkpoints_under_way_hold_each_its_own_weights(job: SmallJob) -> None:
    reached, opened = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        reached.set()
        assert opened.wait(DEADLINE)

    storage, (model, optimizer) = RuledStorage(), trained(1)
    storage.once("create", hold, where=MASTER)
    with TrainerHook(
        job.root,
        model,
        optimizer=optimizer,
        settings=SyncSettings(save_interval=1),
        saving=SaveSettings(sync_dtype="bf16"),
        storage=storage,
    ) as hook:
        truths = {}
        for step in (1, 2, 3):
            train(model, optimizer)
            truths[step] = {name: value.clone() for name, value in model.state_dict().items()}
            hook.after_step(step)
            if step == 1:
                assert reached.wait(DEADLINE)
            if step == 2:
                opened.set()
                written(hook)
    for step, truth in truths.items():
        assert_equal(torch.load(job.actor(step) / MASTER, weights_only=True), truth)


def test_without_its_master_weights_a_checkpoint_is_not_resumed_from(job: SmallJob) -> None:
    full_checkpoint(job)
    (job.actor(1) / MASTER).unlink()
    with no_checkpoint(f"{MASTER} is missing"):
        resumed(job)


@each_layout
def test_a_checkpoint_that_was_copied_without_its_receipts_keeps_the_models_dtype(
    job: SmallJob, layout: SaveLayout
) -> None:
    truth = full_checkpoint(job, layout)
    shutil.rmtree(job.actor(1) / RECEIPTS)
    assert_equal(resumed(job)[0].state_dict(), truth)
    assert_equal(converted(job), truth)


def test_a_copy_that_lacks_a_ranks_weights_in_the_models_dtype_is_refused(job: SmallJob) -> None:
    full_checkpoint(job, SaveLayout.FULL)
    actor = job.actor(1)
    shutil.rmtree(actor / RECEIPTS)
    (actor / MASTER).rename(actor / "master_world_size_2_rank_0.pt")
    with no_checkpoint(r"master_world_size_2_rank_1\.pt is missing"):
        resumed(job)
    with pytest.raises(SaveNotReadyError, match=r"lacks master_world_size_2_rank_1\.pt"):
        look_at_step(job, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_weights_of_two_saves_without_receipts_are_refused(job: SmallJob, size: int) -> None:
    full_checkpoint(job)
    actor = job.actor(1)
    shutil.rmtree(actor / RECEIPTS)
    shutil.copy(actor / MASTER, actor / f"master_world_size_{size}_rank_0.pt")
    with no_checkpoint("Remove the files of the older save"):
        resumed(job)
    with pytest.raises(SaveNotReadyError, match="Remove the files of the older save"):
        look_at_step(job, 1)


@pytest.mark.parametrize("harm", ["missing", "torn", "another save's"])
def test_a_cast_checkpoint_is_not_converted_without_its_full_receipts(
    job: SmallJob, harm: str
) -> None:
    full_checkpoint(job)
    path = job.actor(1) / RECEIPTS / full_receipt_name(0)
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "torn":
        path.write_bytes(content[:50])
    else:
        (full,) = receipts(job)[1:]
        path.write_bytes(content.replace(full.save_id.encode(), b"other-1-0"))
    done = invoke("convert", job.step(1))
    assert isinstance(done.exception, SaveNotReadyError)
    assert "Copy the folder again, together with" in str(done.exception)
    assert not (job.actor(1) / "huggingface" / "model.safetensors").exists()


def test_a_model_that_has_the_dtype_is_written_once(job: SmallJob) -> None:
    saved(job, nn.Linear(3, 2).bfloat16(), full=True, sync_dtype="bf16")
    assert not (job.actor(1) / MASTER).exists()
    first, full = receipts(job)
    assert first.sync_dtype is full.sync_dtype is None
    assert SHARD in {file.name for file in full.files}
    assert load_checkpoint(job.root, nn.Linear(3, 2).bfloat16()) is not None


# -- explorers, and who reads of it ------------------------------------------------------------


@pytest.mark.parametrize("engine", [TorchModule, TransformersModel])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_an_engine_in_fp32_or_in_the_sync_dtype_takes_the_versions(
    job: SmallJob, own: torch.dtype, engine: type[TorchModule | TransformersModel]
) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    saved(job, model, sync_dtype="bf16")
    published(job)
    served = Qwen2ForCausalLM(config).to(own)
    with ExplorerHook(job.root, "explorer", engine(served, cast=True)) as explorer:
        explorer.pull(10)
    wanted = cast(dict(model.state_dict()), torch.bfloat16)
    assert_equal(served.state_dict(), {name: one.to(own) for name, one in wanted.items()})


@pytest.mark.slow
def test_a_daemon_that_casts_too_says_that_this_rounds_twice(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    saved(job, nn.Linear(3, 2), sync_dtype="bf16")
    manifest, _ = published(job, cast="fp16")
    assert manifest.dtype == "F16"
    assert "Set only one of these settings" in caplog.text


@pytest.mark.parametrize("wrong", ["fp32", "torch.float32", "BF17", torch.float64, True])
def test_a_wrong_dtype_is_refused_by_name(wrong: Any) -> None:
    with invalid(r"sync_dtype is .*: it must be 'bf16'"):
        SaveSettings(sync_dtype=wrong)


@pytest.mark.parametrize("name", ["BF16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_other_names_of_a_dtype_are_understood(tmp_path: Path, name: Any) -> None:
    assert SaveSettings(sync_dtype=name).sync_dtype == "bf16"
    assert load(None, {"SYNCD_CAST": str(name)}).config.cast == "bf16"
    (tmp_path / "step").mkdir()
    arguments = ["merge", str(tmp_path / "step"), str(tmp_path / "out"), "--dtype", str(name)]
    assert "Invalid value for '--dtype'" not in invoke(*arguments).output


def test_status_says_the_dtype(job: SmallJob) -> None:

    saved(job, nn.Linear(3, 2), sync_dtype="bf16")
    published(job)
    root = str(job.root)
    assert "(BF16)" in invoke("status", root).stdout
    assert json.loads(invoke("status", root, "--json").stdout)["latest"]["dtype"] == "BF16"
