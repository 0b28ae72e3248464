"""NaN and Inf in weights: found by the trainer's hook, told by the daemon, refused if asked for."""

import json
import logging
import threading
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from explorer_hooks.broadcast import WeightReceiver
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.version import read_manifest
from syncd.coordination.broadcast.group import WeightGroup
from syncd.daemon.config import DaemonConfig
from syncd.protocol.names import RECEIPTS, receipt_name
from syncd.protocol.policy import SyncMethod
from syncd.protocol.records import NonFinite, Receipt
from tests.commands import invoke
from tests.hooks import written
from tests.jobs import SmallJob, read, receipt_of
from tests.measured import Measured, put
from tests.storages import Clock
from tests.tiny_language import SIZES
from tests.weight_groups import transfer
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook
from trainer_hooks.explorers import Explorers
from trainer_hooks.fast_path import TrainerBroadcasts
from trainer_hooks.settings import SaveLayout, SaveLora
from trainer_hooks.state import host_buffers
from trainer_hooks.state.finite import Looked, LookedAtBytes, is_finite
from trainer_hooks.trinity import StateDictWriter

NAN, INF = float("nan"), float("inf")
FULL = SaveSettings(layout=SaveLayout.FULL)


class Mixed(nn.Module):
    """Weights of each dtype that can be saved."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("float64", "float32", "float16", "bfloat16"):
            weight = nn.Parameter(torch.ones(5, 3, dtype=getattr(torch, name)))
            self.register_parameter(f"a_{name}", weight)
        for name in ("e4m3fn", "e5m2", "e8m0fnu", "e4m3fnuz", "e5m2fnuz"):
            dtype = getattr(torch, f"float8_{name}")
            self.register_buffer(f"a_{name}", torch.ones(7).to(dtype))
        self.register_buffer("int64", torch.ones(2, dtype=torch.int64))
        self.register_buffer("empty", torch.ones(0))
        self.register_buffer("scalar", torch.tensor(1.0))


def spoil(tensor: Tensor, value: float = NAN) -> None:
    """Put a value into the middle of a tensor."""
    with torch.no_grad():
        flat = tensor.view(-1)
        bad = torch.tensor(value).to(tensor.dtype)
        if tensor.itemsize == 1:  # torch does not index fp8
            flat, bad = flat.view(torch.uint8), bad.view(torch.uint8)
        flat[flat.numel() // 2] = bad


def save(job: SmallJob, model: nn.Module, step: int = 1, **options: Any) -> NonFinite | None:
    """Save a step by the hook; what the receipts say of it."""
    with TrainerHook(job.root, model, **options) as hook:
        hook.after_step(step)
        written(hook)
    return found(job, step)


def found(job: SmallJob, step: int) -> NonFinite | None:
    return look_at_save(job.storage, job.actor(step), step).nonfinite


NONE = NonFinite(count=0)


# -- what the hook finds -----------------------------------------------------------------------


each_saving = pytest.mark.parametrize("saving", [SaveSettings(), FULL], ids=["sharded", "full"])


@each_saving
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_receipt_names_the_tensors_with_nan_or_inf_of_every_dtype(
    job: SmallJob, saving: SaveSettings, value: float
) -> None:
    model = Mixed()
    assert save(job, model, 1, saving=saving) == NONE
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point() and tensor.numel():
            spoil(tensor, value)
    bad = {n for n, t in model.state_dict().items() if not t.double().isfinite().all()}
    # fp8 of the format E4M3 has no Inf: torch makes the largest value of it, and NaN in E8M0.
    assert len(bad) == (10 if value is NAN else 9)
    told = save(job, model, 2, saving=saving)
    assert told is not None
    assert told.count == len(bad)
    assert len(told.names) == 4
    assert set(told.names) < bad
    for name, tensor in model.state_dict().items():
        if name in bad:
            tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype).fill_(1)
    assert save(job, model, 3, saving=saving) == NONE


in_a_group = pytest.mark.usefixtures("group")


@in_a_group
@pytest.mark.parametrize("wrap", [fully_shard, "fsdp1"])
def test_tensors_that_are_sharded_are_looked_at(job: SmallJob, wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    spoil(model[1].weight)  # type: ignore[index]
    if wrap == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        wrap(model)
    assert save(job, model) == NonFinite(count=1, names=("1.weight",))


@pytest.mark.parametrize("lora", [SaveLora.ADAPTER, SaveLora.MERGED])
def test_of_a_lora_model_what_is_published_is_looked_at(job: SmallJob, lora: SaveLora) -> None:
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    layer = "model.layers.0.self_attn.q_proj"
    spoil(model.get_submodule(f"base_model.model.{layer}.lora_B.default").weight)  # type: ignore[arg-type]
    told = save(job, model, saving=SaveSettings(lora=lora))
    name = f"base_model.model.{layer}.lora_B.weight"
    name = name if lora is SaveLora.ADAPTER else f"{layer}.weight"
    assert told == NonFinite(count=1, names=(name,))


def test_a_state_dict_that_is_given_is_looked_at(job: SmallJob) -> None:
    StateDictWriter(job.root)({"a": torch.ones(2), "b": torch.tensor([INF])}, 1)
    assert found(job, 1) == NonFinite(count=1, names=("b",))


def test_on_a_cpu_the_training_thread_does_not_look(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = set()
    real = torch.aminmax

    def aminmax(*given: Any) -> Any:
        looks.add(threading.current_thread())
        return real(*given)

    monkeypatch.setattr(torch, "aminmax", aminmax)
    for step, saving in ((1, SaveSettings()), (2, FULL)):
        save(job, nn.Linear(2, 2), step, saving=saving)
    assert len(looks) == 2
    assert threading.current_thread() not in looks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_saving
def test_on_a_gpu_each_tensor_is_looked_at_before_it_is_copied(
    job: SmallJob, saving: SaveSettings
) -> None:
    model = Mixed().cuda()
    assert save(job, model, 1, saving=saving) == NONE
    spoil(model.a_bfloat16, INF)
    spoil(model.a_float8_e4m3fn)
    told = save(job, model, 2, saving=saving)
    assert told is not None
    assert set(told.names) == {"a_bfloat16", "a_float8_e4m3fn"}


@in_a_group
def test_what_was_looked_at_on_its_device_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: tied tensors are one look, and a buffer that is used again is another."""
    monkeypatch.setattr(host_buffers, "_looks_at", lambda _: True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    weight = model[1].weight.to_local()  # type: ignore[operator, union-attr]
    state = model.state_dict()
    state |= {"tied": state["1.weight"], "empty": torch.ones(0), "_extra_state": torch.tensor(NAN)}
    buffers = host_buffers.HostBuffers()
    for value in (1.0, NAN, 2.0):
        spoil(weight, value)
        copied = buffers.copy(state)
        with monkeypatch.context() as no_look:
            no_look.setattr(host_buffers, "is_finite", None)
            bad = host_buffers.nonfinite_names(copied)
        assert bad == (["1.weight", "tied"] if value is NAN else [])


def test_many_looks_are_fetched_at_once() -> None:
    looked = Looked()
    for n in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.zeros(4, 5, dtype=dtype).t()
            if n == 1:
                spoil(tensor.t(), -INF)
            looked.add(f"{dtype}-{n}", tensor)
    assert looked.fetch() == {torch.device("cpu")}
    assert looked.nonfinite() == {"torch.float32-1", "torch.bfloat16-1"}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.float8_e5m2, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("parts", [1, 3, 8, 1000])
def test_bytes_are_looked_at_in_parts_of_any_size(dtype: torch.dtype, parts: int) -> None:
    for bad in (False, True):
        tensor = torch.arange(-20, 20).to(dtype)
        if bad:
            spoil(tensor)
        content = memoryview(bytearray(tensor.view(torch.uint8).numpy().tobytes()))
        looked = LookedAtBytes(dtype)
        for at in range(0, len(content), parts):
            looked.add(content[at : at + parts])
        assert looked.is_finite is is_finite(tensor) is not bad


# -- what becomes of it ------------------------------------------------------------------------


def test_a_version_with_nan_is_published_with_a_warning_and_measured(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    model = nn.Linear(3, 2)
    said = Measured(job, Clock())
    with said.daemon() as loop:
        for step, value in ((1, 1.0), (2, NAN)):
            spoil(model.weight, value)
            save(job, model, step)
            loop.run_once()
        loop.run_once()  # it looks at its own version
        assert said("nonfinite_tensors") == 1
    assert job.latest.step == 2
    manifests = [read_manifest(job.storage, job.version(n)) for n in (1, 2)]
    assert manifests[0].nonfinite == NONE
    assert manifests[1].nonfinite == NonFinite(count=1, names=("weight",))
    page = invoke("status", job.root).output
    assert "with NaN or Inf in 1 tensor (weight)" in " ".join(page.split())
    _, trainer, daemon = caplog.messages  # the first: there is no config.json
    assert "of step 2 has NaN or Inf in 1 tensor (weight)" in trainer
    assert daemon.startswith("v2 of step 2 has NaN or Inf in 1 tensor (weight)")
    fields = caplog.records[-1].__dict__["fields"]
    assert fields == {"version": 2, "step": 2, "count": 1, "tensors": ["weight"]}


def test_a_daemon_that_refuses_nan_quarantines_it_and_serves_the_next_save(job: SmallJob) -> None:
    with job.daemon(DaemonConfig(refuse_nonfinite=True)) as loop:
        put(job, 1, NONE)
        loop.run_once()
        put(job, 2, NonFinite(count=2, names=("head", "layers.0")))
        loop.run_once()
        assert job.latest.step == 1
        record = job.refused
        assert record.error == "NonFiniteError"
        assert "step 2 has NaN or Inf in 2 tensors (head, layers.0)" in record.reason
        put(job, 3, NONE)
        loop.run_once()
        assert job.latest.step == 3
        assert (job.outcomes[2], job.outcomes[3]) == ("quarantined", "published")
        loop.config = DaemonConfig()
        put(job, 4, NonFinite(count=1, names=("head",)))
        loop.run_once()
    assert job.latest.step == 4


def test_a_save_that_nobody_looked_at_is_published_and_its_version_says_so(job: SmallJob) -> None:
    """Also by a daemon that refuses NaN: nothing is known of it."""
    with job.daemon(DaemonConfig(refuse_nonfinite=True)) as loop:
        put(job, 1, None)
        loop.run_once()
        assert read_manifest(job.storage, job.version(1)).nonfinite is None
        job.save(2, NAN, receipts=False)
        loop.rounds(2, 5)
    assert read_manifest(job.storage, job.version(2)).nonfinite is None


def test_what_ranks_found_is_put_together(job: SmallJob) -> None:
    """Each has parts of the same tensors; one is of a release that did not look."""
    actor = job.actor(1)
    job.save(1)
    shards = [
        receipt_of(b"\0" * 8, f"model_world_size_3_rank_{rank}.pt").model_copy(
            update={"nonfinite": one}
        )
        for rank, one in enumerate((NonFinite.of(["a", "b"]), NonFinite.of([*"bcdefg"]), None))
    ]
    for rank, shard in enumerate(shards):
        job.receipt(1, "run-1-9", rank, 3, shard)
    told = look_at_save(job.storage, actor, 1).nonfinite
    assert told == NonFinite(count=6, names=("a", "b", "c", "d"))
    assert str(told) == "NaN or Inf in 6 tensors (a, b, c, d, …)"
    for rank in range(2):
        job.receipt(1, "run-1-9", rank, 3, shards[rank].model_copy(update={"nonfinite": NONE}))
    assert look_at_save(job.storage, actor, 1).nonfinite is None


def test_a_receipt_stays_small_and_forges_no_line_of_the_log(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{n}\n2026-01-31 ERROR all is lost\x1b[2J" + "x" * 500 for n in range(100)]
    model = nn.Module()
    for name in names:
        model.register_parameter(name.replace(".", ""), nn.Parameter(torch.tensor([NAN])))
    told = save(job, model)
    assert told is not None
    assert told.count == 100
    receipt = job.actor(1) / RECEIPTS / receipt_name(0)
    assert len(receipt.read_bytes()) < 2000
    assert read(Receipt, receipt).files[0].nonfinite == told
    # By another writer: as it is read.
    put(job, 2, NonFinite(count=9, names=tuple(names)))
    job.run()
    warned = [line for line in caplog.messages if "NaN or Inf" in line]
    assert len(warned) == 2
    assert all(line.isprintable() and len(line) < 1200 for line in warned)


@in_a_group
def test_a_trainer_that_broadcasts_says_that_it_has_sent_nan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    settings = SyncSettings(method=SyncMethod.NCCL, broadcast_bucket=64)
    path = TrainerBroadcasts(model, settings, Explorers())

    def send(group: WeightGroup) -> bool:
        path._group = group
        return path.send(7)

    for value in (1.0, -INF):
        spoil(model[1].weight.to_local(), value)  # type: ignore[operator, union-attr]
        sender, receiver = transfer(
            send, lambda group: dict(WeightReceiver(group).receive(lambda _: None))
        )
        assert sender.result()
        assert len(receiver.result()) == 4
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("step 7 was broadcast with NaN or Inf in 1 tensor (1.weight)")


# -- the config --------------------------------------------------------------------------------


def config(**more: Any) -> dict[str, Any]:
    return {"model_type": "tiny", "rope_scaling": {"factor": 2.0}, "layers": [1, 2]} | more


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.__dict__.get("event") == "model_config_changed"
    ]


def test_a_config_whose_settings_differ_from_the_version_before_is_said_once(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    changed = config(rope_scaling={"factor": 4.0}, eos="\x1b[2J")
    del changed["layers"]
    configs = [
        json.dumps(config(transformers_version="5.0")),
        json.dumps(dict(reversed(config().items())), indent=8),  # the same settings
        json.dumps(changed),
        json.dumps(changed),
    ]
    with job.daemon() as loop:
        for step, content in enumerate(configs):
            put(job, step, None, content)
            loop.run_once()
            assert len(told(caplog)) == (step >= 2)
    (line,) = told(caplog)
    assert line.startswith(
        "config.json of v3 differs from the config.json of v2: "
        'eos (absent → "\\u001b[2J"); layers ([1, 2] → absent); rope_scaling.factor (2.0 → 4.0). '
    )


@pytest.mark.parametrize(
    "content",
    [
        '{"a": ' + "[" * 900 + "STEP" + "]" * 900 + "}",  # found by comparing, or later
        '{"a":' * 450 + "STEP" + "}" * 450,
        "{" + ",".join(f'"{"x" * 900}{n}": STEP' for n in range(1000)) + "}",
        "[" * 100_000, "{" + " " * 1024 * 1024 + "}", '{"a": NaN}', "{", "STEP", "",
    ],
    ids=["nested lists", "nested", "long", "unclosed", "too long", "NaN", "broken", "1", "empty"],
)  # fmt: skip
def test_a_config_that_cannot_be_read_keeps_nothing_from_being_published(
    job: SmallJob, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    with job.daemon() as loop:
        for step in range(2):
            put(job, step, None, content.replace("STEP", str(step)) + " " * step)
            loop.run_once()
        assert job.latest.step == 1
        put(job, 2, None, json.dumps({str(n) * 100: n for n in range(2000)}))
        loop.run_once()
    assert job.latest.step == 2
    assert all(len(line) < 2500 for line in told(caplog))
