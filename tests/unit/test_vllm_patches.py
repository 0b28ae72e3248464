"""The elements that a vLLM worker is given of a newer version, from real deltas."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from explorer_hooks.engines.vllm_patches import Worker, patches_of
from syncd.deltas.applying import Link
from syncd.deltas.delta_folder import BLOCKS, INDEX
from syncd.deltas.ends import NoDeltaError
from syncd.deltas.whole_version import WholeVersion
from tests.deltas import Tensors, changed, make_delta, random_tensors, write_version


class Patch(NamedTuple):
    """As vLLM's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    home = SimpleNamespace(CheckpointWeightPatch=Patch)
    name = "vllm.model_executor.model_loader.checkpoint_weight_patch"
    monkeypatch.setitem(sys.modules, name, home)


def without_nan(tensors: Tensors) -> dict[str, Any]:
    """With an exponent that is never the highest."""
    masks = {"BF16": 0xBFFF, "F32": 0xBFFFFFFF}
    return {name: (dtype, values & masks[dtype]) for name, (dtype, values) in tensors.items()}


def bits(tensors: Tensors) -> Mapping[str, Any]:
    return {name: values.reshape(-1).copy() for name, (_, values) in tensors.items()}


def made(tmp_path: Path, count: int = 3) -> tuple[list[Any], list[WholeVersion], list[Link]]:
    shapes: Any = {"embed": ("BF16", (300, 100)), "norm": ("F32", (64,)), "head": ("BF16", (9, 7))}
    contents = [without_nan(random_tensors(1, **shapes))]
    for seed in range(1, count):
        contents.append(without_nan(changed(contents[-1], 0.03, seed)))
    versions = [write_version(tmp_path, n, each) for n, each in enumerate(contents, 1)]
    links = [
        make_delta(old, new, tmp_path / f"d{new.manifest.sequence}")
        for old, new in pairwise(versions)
    ]
    return contents, versions, links


def test_patches_make_the_newer_version_of_the_older_one(tmp_path: Path) -> None:
    contents, versions, links = made(tmp_path)
    patches = patches_of(versions[0].manifest, versions[2].folder, [link.folder for link in links])
    have, want = bits(contents[0]), bits(contents[2])
    for patch in patches:
        assert patch.shape == contents[2][patch.name][1].shape
        words = patch.values.view({2: torch.int16, 4: torch.int32}[patch.values.itemsize])
        have[patch.name][patch.indices.numpy()] = words.numpy().view(have[patch.name].dtype)
    for name, expected in want.items():
        assert np.array_equal(have[name], expected)
    assert sum(patch.indices.numel() for patch in patches) < 0.2 * 300 * 100


def test_deltas_from_another_base_and_damaged_ones_give_no_patch(tmp_path: Path) -> None:
    _, versions, links = made(tmp_path)
    folders = [link.folder for link in links]
    target = versions[2].folder
    for base, chain in (
        (None, folders),
        (versions[1].manifest, folders),
        (versions[0].manifest, folders[:1]),
        (versions[0].manifest, folders[::-1]),
    ):
        with pytest.raises(NoDeltaError):
            patches_of(base, target, chain)
    for name in (INDEX, BLOCKS):
        path = folders[1] / name
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(NoDeltaError):
            patches_of(versions[0].manifest, target, folders)
        path.write_bytes(content)


def test_nan_is_no_value_of_a_patch(tmp_path: Path) -> None:
    old = {"a": ("BF16", np.zeros(5000, np.uint16))}
    new = {"a": ("BF16", np.zeros(5000, np.uint16))}
    new["a"][1][7] = 0x7FC0
    versions = [write_version(tmp_path, n, each) for n, each in ((1, old), (2, new))]
    link = make_delta(*versions, tmp_path / "d")
    with pytest.raises(NoDeltaError, match="NaN"):
        patches_of(versions[0].manifest, versions[1].folder, [link.folder])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, None),
        ({"quant_config": object()}, "quantized"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"model_config": SimpleNamespace(enable_sleep_mode=True)}, "sleep mode"),
        ({"model_config": SimpleNamespace(is_moe=True)}, "experts"),
    ],
)
def test_a_worker_that_cannot_be_patched_says_why(options: Any, why: str | None) -> None:
    config = {"quant_config": None, "lora_config": None, "model_config": SimpleNamespace()}
    model = torch.nn.Linear(2, 2)
    said = Worker(model, SimpleNamespace(**config | options)).why_full()
    assert (said is None) if why is None else (why in str(said))
    model.cpu_linear = lambda *_: None
    packed = "vLLM keeps packed copies of the weights for the CPU"
    assert Worker(model, SimpleNamespace(**config)).why_full() == packed
