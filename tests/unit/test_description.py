"""Whether a version's ``config.json`` is true of its weights, and who says that it is not."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from syncd.checkpoint.description import flaws, wrong_dtypes
from syncd.daemon.config import DaemonConfig
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import TensorEntry
from tests.commands import invoke
from tests.hooks import written
from tests.jobs import SmallJob
from tests.link_saves import follower, is_link
from tests.tiny_language import model as language_model
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


def test_links_go_on_though_a_version_has_another_dtype_in_its_config(job: SmallJob) -> None:
    model = language_model()  # float32, and published in bfloat16
    settings = SyncSettings(deltas=True, save_timeout=60)
    saving = SaveSettings(sync_dtype="bf16", final=False)
    with follower(job, "ahead"), job.daemon(DaemonConfig()) as daemon:
        daemon.rounds(1, 0.5)
        with TrainerHook(job.root, model, settings=settings, saving=saving) as hook:
            for step in (1, 2, 3):
                with torch.no_grad():
                    model.model.norm.weight[step] += 1
                hook.after_step(step)
                written(hook)
                daemon.rounds(6, 1.0)
        assert is_link(job, 2)
        assert is_link(job, 3)
    assert json.loads((job.layout.version(1) / "config.json").read_text())["dtype"] == "bfloat16"
