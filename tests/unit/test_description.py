"""Whether a version's ``config.json`` is true of its weights, and who says that it is not."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch

from syncd.checkpoint.description import contradiction, flaws, wrong_dtypes
from syncd.checkpoint.placement import Shape
from syncd.daemon.config import DaemonConfig
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import TensorEntry
from tests.commands import invoke
from tests.delta_saves import follower, is_delta
from tests.hooks import written
from tests.hub_tables import classes, default_model, model_types, shapes
from tests.jobs import SmallJob
from tests.tiny_language import model as language_model
from tests.tiny_models import tiny_model
from trainer_hooks import SaveSettings, TrainerHook

HALF, NAMED = {"dtype": "bfloat16"}, {"architectures": ["X"]}
KEPT = "F32 e_score_correction_bias"


def tensors(**sizes: int) -> list[TensorEntry]:
    """A tensor of each dtype with so many rows."""
    return [
        TensorEntry(name=dtype, dtype=dtype.split()[0], shape=(rows, 1), file="f")
        for dtype, rows in sizes.items()
    ]


@pytest.mark.parametrize(
    ("config", "sizes", "wrong"),
    [
        (HALF, {"F32": 9}, ["dtype"]),
        ({"torch_dtype": "bfloat16"}, {"F16": 9}, ["torch_dtype"]),
        ({**HALF, "torch_dtype": "torch.float32"}, {"F32": 9, "I64": 99}, ["dtype"]),
        ({"dtype": "auto", "text_config": HALF}, {"F32": 9}, ["dtype", "dtype"]),
        ({"a_config": {"text_config": HALF}, "other": HALF}, {"F32": 9}, ["dtype"]),
        (HALF, {"BF16": 1, "F32": 9}, ["dtype"]),
        ({"dtype": "float32"}, {"BF16": 9, "F32": 1}, []),
        ({"dtype": "float32"}, {"BF16": 9}, ["dtype"]),
        (HALF, {"F8_E4M3": 9, "F32": 1}, []),
        (HALF, {"F32": 9, "U8": 1}, []),
        ({"dtype": None, "torch_dtype": 1}, {"F32": 9}, []),
        (HALF, {"I64": 9}, []),
    ],
)
def test_a_dtype_is_wrong_if_the_weights_would_be_rounded(
    config: Any, sizes: Mapping[str, int], wrong: list[str]
) -> None:
    assert [key for _, key, _ in wrong_dtypes(config, tensors(**sizes))] == wrong


def test_after_a_cast_the_dtype_is_that_of_most_bytes() -> None:
    cast = tensors(BF16=9, F32=1)
    config = {"dtype": "float32"}
    assert wrong_dtypes(config, cast, is_cast=True) == [(config, "dtype", "bfloat16")]


@pytest.mark.parametrize(
    ("config", "sizes", "kinds"),
    [
        ({**NAMED, **HALF}, {"BF16": 9}, []),
        ([], {"BF16": 9}, ["no_config"]),
        ({"architectures": []}, {"BF16": 9}, ["class"]),
        ({**NAMED, "quantization_config": {}}, {"BF16": 9}, ["quantization"]),
        (NAMED, {"F8_E4M3": 9}, ["quantization"]),
        ({**NAMED, "quantization_config": {}}, {"U8": 9}, []),
        ({**NAMED, **HALF}, {"F32": 9}, ["dtype"]),
        ({**NAMED, **HALF}, {"BF16": 9, "F32": 1}, ["rounded"]),
        ({**NAMED, **HALF, "model_type": "deepseek_v3"}, {"BF16": 9, KEPT: 1}, []),
        ({**NAMED, "auto_map": {"A": ["m.X", None], "B": "n.Y", "C": "o/r--q.Z"}}, {}, ["code"]),
        ({**NAMED, "auto_map": [1]}, {}, []),
    ],
)
def test_each_fault_of_a_config_is_found(
    config: Any, sizes: Mapping[str, int], kinds: list[str]
) -> None:
    found = flaws({"config.json": config}, {"config.json", "n.py"}, tensors(**sizes))
    assert [kind for kind, _ in found] == kinds


def shapes_of(layers: int, *more: str, width: int = 8, rows: int = 64) -> dict[str, Shape]:
    """A model with so many layers, of a vector each."""
    names = [*(f"model.layers.{layer}.norm.weight" for layer in range(layers)), *more]
    return dict.fromkeys(names, (width,)) | {"model.embed_tokens.weight": (rows, width)}


SIZES = {"hidden_size": 8, "vocab_size": 64, "num_hidden_layers": 2}
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("tensors", "wrong"),
    [
        (shapes_of(2, HEAD), ""),
        (shapes_of(2, HEAD, width=7), "hidden_size"),
        ({**shapes_of(2, HEAD), "model.embed_tokens.weight": (64, 4)}, ""),  # packed or narrow
        ({HEAD: (7,)}, ""),  # a value head alone
        (shapes_of(2, HEAD, rows=300), ""),
        (shapes_of(2, HEAD, rows=32), ""),
        (shapes_of(2, HEAD, rows=31), "vocab_size"),
        (shapes_of(3, HEAD), "num_hidden_layers"),
        (shapes_of(1, HEAD), "num_hidden_layers"),
        (shapes_of(1), ""),  # a stage of a pipeline
        (shapes_of(2, HEAD, "model.layers.2.eh_proj.weight"), ""),  # predicts further tokens
        (shapes_of(1, HEAD, "encoder.layers.0.norm.weight"), ""),
        (shapes_of(0, HEAD, "model.layers.5.norm.weight"), ""),
    ],
)
def test_only_a_certain_contradiction_counts(tensors: dict[str, Shape], wrong: str) -> None:
    for config in (SIZES, {"hidden_size": 7, "text_config": SIZES}):
        fault = contradiction(config, tensors)
        assert bool(fault) == bool(wrong)
        assert f"its {wrong} is {SIZES.get(wrong)}, but" in fault or not wrong
    for other in (None, {}, {"text_config": [SIZES]}, {"vocab_size": 9, "hidden_size": "7"}):
        assert contradiction(other, tensors) == ""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_config_of_transformers_contradicts_other_models_only(part: int) -> None:
    models = []
    for model_type in model_types()[part::8]:
        for kind in classes(model_type)[:1]:
            with suppress(Exception), torch.device("meta"):  # any model's own code
                made = default_model(model_type, kind), tiny_model(model_type, kind)
                models += [(model.config.to_dict(), shapes(model)) for model in made]
    assert not any(filter(None, (contradiction(*model) for model in models)))
    pairs = zip(models, models[9:], strict=False)
    others = [contradiction(config, tensors) for (config, _), (_, tensors) in pairs]
    assert sum(map(bool, others)) > 0.5 * len(others) > 30


def test_a_version_has_the_true_dtype_and_the_save_keeps_its_own(job: SmallJob) -> None:
    said = json.dumps({**NAMED, **HALF, "text_config": HALF}).encode()
    with job.daemon() as loop:
        for step, receipts in ((1, True), (2, False)):
            job.save(step, receipts=receipts, config=said)
            loop.rounds(3, 100.0)
            published = json.loads((job.version(step) / "config.json").read_bytes())
            assert published["dtype"] == published["text_config"]["dtype"] == "float32"
            assert (job.actor(step) / "huggingface" / "config.json").read_bytes() == said
    result = invoke("verify", job.root)
    assert result.exit_code == 0
    assert "warning" not in result.output


def test_faults_are_logged_once_a_run_and_told_by_verify(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    with job.daemon() as loop:
        for step in (1, 2):
            job.save(step, receipts=False)
            huggingface = job.actor(step) / "huggingface"
            (huggingface / "config.json").unlink()
            (huggingface / "config.json").symlink_to("/etc/passwd")
            (huggingface / "code").symlink_to(huggingface)
            loop.rounds(3, 100.0)
    assert job.versions == ["v000001", "v000002"]
    assert caplog.text.count("follows no links") == 1
    assert caplog.text.count("has no config.json") == 1
    result = invoke("verify", job.root)
    assert result.exit_code == 0
    assert result.output.count("has no config.json") == 2


def test_deltas_go_on_though_a_version_has_another_dtype_in_its_config(job: SmallJob) -> None:
    model = language_model()  # float32, and published in bfloat16
    settings = SyncSettings(deltas=True, save_timeout=60)
    saving = SaveSettings(sync_dtype="bf16", final=False)
    with follower(job, "tip"), job.daemon(DaemonConfig(prune_steps=False)) as daemon:
        daemon.rounds(1, 0.5)
        with TrainerHook(job.root, model, settings=settings, saving=saving) as hook:
            for step in (1, 2, 3):
                with torch.no_grad():
                    model.model.norm.weight[step] += 1
                hook.after_step(step)
                written(hook)
                daemon.rounds(6, 1.0)
        assert is_delta(job, 2)
        assert is_delta(job, 3)
    assert json.loads((job.layout.version(1) / "config.json").read_text())["dtype"] == "bfloat16"
