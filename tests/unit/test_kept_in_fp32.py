"""A cast keeps what the model keeps: ``from_pretrained(dtype=…)`` gives the truth, by each way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from explorer_hooks import ExplorerHook, TransformersModel
from explorer_hooks.broadcast import WeightReceiver
from explorer_hooks.engines.fake import FakeEngine
from syncd.checkpoint import name_map
from syncd.checkpoint.name_map import kept_by_type
from syncd.checkpoint.tensor_rules import Casting
from syncd.coordination.tensors import DTYPES
from syncd.daemon.config import DaemonConfig
from syncd.protocol.policy import SyncSettings
from syncd.storage.job import Job
from tests.commands import invoke
from tests.delta_saves import full, is_delta, offered, rebuilt
from tests.hooks import DEADLINE, checkpoint, saved, written
from tests.hub_tables import classes
from tests.jobs import SmallJob
from tests.merging import assert_equal, loaded
from tests.refusals import no_checkpoint
from tests.tiny_models import save_by_hand, tensors_in, tiny_config, tiny_model
from tests.weight_groups import transfer
from tests.wrappings import fsdp1, fsdp2
from trainer_hooks import SaveSettings, TrainerHook
from trainer_hooks.fast_path import WeightSender
from trainer_hooks.settings import SyncDtype
from trainer_hooks.state.casting import casting_of
from trainer_hooks.state.host_buffers import HostBuffers
from trainer_hooks.state.hub_names import name_map_of
from trainer_hooks.state.state_dict import dtype_name

TABLES = json.loads(Path(name_map.__file__).with_name("hub_tables.json").read_text())
TORCH: dict[SyncDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The last one has no list of its own, and a part with one.
USUAL = {"deepseek_v3", "lfm2_moe", "hy_v3", "t5", "kimi_k25"}


def truth(model: Any, dtype: SyncDtype, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=TORCH[dtype]).state_dict()


class OwnConfig(PreTrainedConfig):
    model_type = "of_my_own"


class Own(PreTrainedModel):
    """A model whose type no table has. fp16 keeps ``wo`` too."""

    config_class = OwnConfig
    _keep_in_fp32_modules = ("wo",)  # type: ignore[assignment] # any collection will do
    _keep_in_fp32_modules_strict = ("rout",)  # type: ignore[assignment] # likewise

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.router = nn.Linear(16, 16)
        self.wo = nn.Linear(16, 16)
        self.register_buffer("fixed", torch.zeros(16, dtype=torch.float32))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: each tensor is filled by hand."""


def own() -> Own:
    torch.manual_seed(0)
    model = Own(OwnConfig(architectures=["Own"]))
    with torch.no_grad():
        for value in (*model.parameters(), model.fixed):
            value.normal_(7, 1e-3)  # close to each other, so that a cast to bf16 makes few values
        model.wo.weight.fill_(1e6)  # Inf in fp16
    return model


# -- all types ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.deep)
        for name in sorted(TABLES["fp32"].keys() | USUAL)
    ],
)
def test_hook_and_table_keep_what_from_pretrained_keeps(
    model_type: str, dtype: SyncDtype, tmp_path: Path
) -> None:
    for kind in classes(model_type) if model_type in CONFIG_MAPPING_NAMES else ():
        try:
            model = tiny_model(model_type, kind)
            expected = truth(model, dtype, tmp_path / kind.__name__)
        except Exception as error:  # noqa: BLE001 - any model's own code
            pytest.skip(f"{model_type} cannot be made tiny: {error}")
        compare(model, dtype, expected)


def compare(model: Any, dtype: SyncDtype, expected: dict[str, Tensor]) -> None:
    """The hook's cast is the truth, and the table has its dtypes, by either names."""
    assert_equal(HostBuffers().copy(model.state_dict(), casting_of(model, dtype)), expected)
    config, names = model.config.to_dict(), name_map_of(model)
    assert name_map.unknown_types(config) == []
    table = Casting(dtype, kept_by_type(config, dtype))
    for name, value in model.state_dict().items():
        hub = [] if names is None else names.hub(name, tuple(value.shape))
        for each in (name, *(part.name for part in hub)):
            found = DTYPES[table.dtype_of(each, dtype_name(value.dtype))]
            assert found == expected[name].dtype, each


def test_a_part_of_another_type_keeps_its_own(tmp_path: Path) -> None:
    config = tiny_config("llava")
    config.text_config = tiny_config("deepseek_v3")
    model = classes("llava")[0]._from_config(config, dtype=torch.float32)
    expected = truth(model, "bf16", tmp_path)
    assert any(value.dtype == torch.float32 for value in expected.values())
    compare(model, "bf16", expected)


def test_the_table_knows_all_types() -> None:
    assert {"qwen3", "deepseek_v3", "siglip_vision_model"} <= set(TABLES["known"])
    assert TABLES["fp32"].keys() <= set(TABLES["known"])


# -- the trainer's casts -----------------------------------------------------------------------


def wrapped(kind: str, model: Any) -> nn.Module:
    if kind == "fsdp1":
        return fsdp1(model)
    if kind == "fsdp2":
        return fsdp2(model)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "compiled":
        return torch.compile(model)
    if kind == "recomputed":
        model.router = checkpoint_wrapper(model.router)
    return model


def published(job: SmallJob, **config: Any) -> dict[str, Tensor]:
    job.run(DaemonConfig(**config))
    return loaded(job.version(job.latest.sequence))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("layout", ["sharded", "full"])
@pytest.mark.parametrize("wrap", ["none", "fsdp1", "fsdp2", "ddp", "compiled", "recomputed"])
def test_a_hook_asks_the_model_under_its_wrappers(
    job: SmallJob, tmp_path: Path, wrap: str, layout: str, dtype: SyncDtype
) -> None:
    expected = truth(own(), dtype, tmp_path / "truth")
    assert {name for name, value in expected.items() if value.dtype == torch.float32} == {
        "router.weight", "router.bias", "fixed",
        *(("wo.weight", "wo.bias") if dtype == "fp16" else ()),
    }  # fmt: skip
    saved(job, wrapped(wrap, own()), layout=layout, sync_dtype=dtype)
    assert_equal(published(job), expected)


def test_a_model_in_bf16_gets_its_kept_tensors_in_fp32(job: SmallJob, tmp_path: Path) -> None:
    model = own().to(torch.bfloat16)
    expected = truth(model, "bf16", tmp_path / "truth")
    saved(job, model, full=True, sync_dtype="bf16")
    assert_equal(published(job), expected)
    assert (job.actor(1) / "master_world_size_1_rank_0.pt").exists()


def test_a_prefix_of_another_module_is_no_name_of_the_model() -> None:
    inside = nn.Module()
    inside.routed, inside.head = own(), nn.Linear(16, 2)
    copied = HostBuffers().copy(inside.state_dict(), casting_of(inside, "bf16"))
    kept = {name for name, value in copied.items() if value.dtype == torch.float32}
    assert kept == {"routed.router.weight", "routed.router.bias", "routed.fixed"}


def test_an_explorer_in_bf16_accepts_the_versions(job: SmallJob, tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3")
    expected = truth(model, "bf16", tmp_path / "base")
    saved(job, model, sync_dtype="bf16")
    published(job)
    served = type(model).from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    with ExplorerHook(job.root, "explorer", TransformersModel(served)) as explorer:
        explorer.pull(10)
    assert_equal(served.state_dict(), expected)


def test_merged_weights_keep_what_the_base_model_keeps(job: SmallJob, tmp_path: Path) -> None:
    model = get_peft_model(own(), LoraConfig(r=2, target_modules=["router", "wo"]))
    saved(job, model, full=True, lora="merged", sync_dtype="fp16")
    assert_equal(published(job), truth(model.merge_and_unload(), "fp16", tmp_path / "truth"))


def test_a_broadcast_keeps_it_too(tmp_path: Path) -> None:
    expected = truth(own(), "fp16", tmp_path)
    sender = WeightSender(own(), cast=casting_of(own(), "fp16"))
    _, received = transfer(
        sender.send, lambda group: dict(WeightReceiver(group).receive(lambda _: None))
    )
    assert_equal(received.result(), expected)


# -- deltas -------------------------------------------------------------------------------------


@pytest.fixture
def offering(tmp_path: Path) -> Iterator[Job]:
    root = tmp_path / "job"
    root.mkdir()
    with offered(root) as job:
        yield job


def test_deltas_and_their_masters_give_the_same_bits(offering: Job, tmp_path: Path) -> None:
    model, settings = own(), SyncSettings(deltas=True, save_timeout=60)
    root = offering.layout.root
    with TrainerHook(
        root, model, settings=settings, saving=SaveSettings(sync_dtype="bf16")
    ) as hook:
        hook.after_step(1)
        written(hook)
        before = full(offering, 1)
        with torch.no_grad():
            model.router.weight[0] += 1e-3
            model.inner[0].weight[0] += 1
        checkpoint(hook, 2)
        expected = truth(model, "bf16", tmp_path / "truth")
        assert is_delta(offering, 2)
        assert_equal(rebuilt(offering, 2, before), expected)
    with ExplorerHook(root, "bench", FakeEngine()) as bench:
        bench.load_step(2, DEADLINE)
        assert_equal(loaded(bench.folder or root), expected)


# -- the daemon's casts ------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["trainer", "hub"])
def test_a_merge_keeps_what_the_model_type_keeps(tmp_path: Path, names: str) -> None:
    model = tiny_model("hy_v3")  # on the hub the bias of its router has another name
    save_by_hand(model, tmp_path / "actor")
    done = invoke(
        "merge", tmp_path / "actor", tmp_path / "out", "--dtype", "bf16", "--names", names
    )
    assert done.exit_code == 0, done.output
    check(tmp_path / "out", model, truth(model, "bf16", tmp_path / "truth"))


def check(folder: Path, model: Any, expected: dict[str, Tensor]) -> None:
    """It has no more dtypes than needed, and loads as the truth."""
    kept = sum(value.dtype == torch.float32 for value in expected.values())
    assert sum(value.dtype == torch.float32 for _, value in tensors_in(folder)) == kept > 0
    assert_equal(type(model).from_pretrained(folder, dtype=torch.bfloat16).state_dict(), expected)


def test_a_model_of_the_hub_is_cast_by_the_hubs_names(tmp_path: Path) -> None:
    model, actor = tiny_model("hy_v3"), tmp_path / "actor"
    expected = truth(model, "bf16", actor)
    (actor / "huggingface").mkdir()
    (actor / "config.json").rename(actor / "huggingface" / "config.json")
    done = invoke("merge", actor, tmp_path / "out", "--dtype", "bf16", "--names", "trainer")
    assert done.exit_code == 0, done.output
    check(tmp_path / "out", model, expected)


def test_convert_keeps_it_too(job: SmallJob, tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3")
    saved(job, model, full=True, sync_dtype="bf16")
    done = invoke("convert", job.step(1), "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    assert "rounds them again" not in done.output
    check(job.actor(1) / "huggingface", model, truth(model, "bf16", tmp_path / "truth"))


def test_a_daemon_with_the_same_cast_leaves_the_trainers(job: SmallJob, tmp_path: Path) -> None:
    saved(job, own(), sync_dtype="bf16")
    assert_equal(published(job, cast="bf16"), truth(own(), "bf16", tmp_path / "truth"))


def test_an_unknown_type_is_cast_with_one_warning(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        with TrainerHook(job.root, own()) as hook:
            hook.after_step(step)
        found = published(job, cast="bf16")
    assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.int64}
    assert caplog.text.count("the model type of_my_own, which syncd's tables do not have") == 1


def test_without_a_model_type_all_is_cast_as_asked() -> None:
    keeps = kept_by_type({"architectures": ["DeepseekV3ForCausalLM"]}, "bf16")
    assert not keeps("model.layers.1.mlp.gate.e_score_correction_bias")
    assert kept_by_type(None, "bf16")("e_score_correction_bias") is None
    part = {"model_type": "llava", "text_config": {"model_type": "deepseek_v3"}}
    assert kept_by_type(part, "bf16")("model.layers.1.mlp.gate.e_score_correction_bias")
    assert not kept_by_type(part, "fp32")("model.layers.1.mlp.gate.e_score_correction_bias")


def test_a_quantized_model_is_still_refused(job: SmallJob) -> None:
    model = own()
    model.register_buffer("router_fp8", torch.zeros(4).to(torch.float8_e4m3fn))
    with no_checkpoint("router_fp8 is quantized"):
        saved(job, model, sync_dtype="bf16")
