"""``TorchModule(sparse=True)``: what it writes, and when it loads all of a version."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from explorer_hooks import ExplorerHook, Staging
from explorer_hooks.engines import changes
from explorer_hooks.engines.targets import Target
from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.boxes import Box, whole
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.coordination.tensors import DTYPES, bytes_of
from syncd.protocol.names import MANIFEST
from syncd.protocol.records import Manifest, TensorEntry, VersionFile, encode
from syncd.storage.fsio import Storage
from tests.jobs import SmallJob

STORAGE = Storage(durable=False)
State = dict[str, torch.Tensor]


class Unheld:
    def release(self) -> None:
        pass


def version_of(state: State, folder: Path, sequence: int = 1) -> LeasedVersion:
    """A version with these tensors in one file, without digests."""
    folder.mkdir()
    path = folder / "model.safetensors"
    save_file(state, path)
    with SafetensorsFile.open(STORAGE, path) as file:
        tensors = tuple(
            TensorEntry(name=entry.name, dtype=entry.dtype, shape=entry.shape, file=path.name)
            for entry in file.entries
        )
    manifest = Manifest(
        sequence=sequence, step=sequence, save_id=f"save-{sequence}", checked="receipt",
        digests="off", files=(VersionFile(name=path.name, size=path.stat().st_size),),
        tensors=tensors,
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(encode(manifest))
    return LeasedVersion(STORAGE, folder, manifest, Unheld())


class Versions:
    """Versions one after the other, each the last one with a few elements changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        torch.manual_seed(0)
        self.state: State = {
            "wide": torch.randn(40, 30).to(torch.bfloat16),
            "tall": torch.randn(500).to(torch.float32),
            "one": torch.tensor(3, dtype=torch.int64),
            "none": torch.empty(0, 3),
        }

    def same(self) -> LeasedVersion:
        self._count += 1
        return version_of(self.state, self._folder / f"v{self._count:06d}", self._count)

    def next(self, elements: int = 7) -> LeasedVersion:
        self.state = {name: value.clone() for name, value in self.state.items()}
        for name in ("wide", "tall"):
            value = self.state[name].view(-1)
            value[torch.randperm(value.numel())[:elements]] += 1
        return self.same()


class Net(nn.Module):
    def __init__(self, state: State) -> None:
        super().__init__()
        for name, value in state.items():
            self.register_buffer(name, torch.zeros_like(value))

    def bits(self) -> dict[str, bytes]:
        return {name: bytes(bytes_of(value)) for name, value in self.state_dict().items()}


def bits(state: State) -> dict[str, bytes]:
    return {name: bytes(bytes_of(value)) for name, value in state.items()}


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


@pytest.fixture(params=["staged", "direct"])
def in_place(request: pytest.FixtureRequest) -> Any:
    return request.param


def load(engine: TorchModule, version: LeasedVersion) -> float | None:
    engine.check(version)
    engine.prepare(version)
    engine.load(version)
    return engine.changed


def test_only_what_changed_is_written_and_the_module_has_the_versions_bits(
    versions: Versions, in_place: Any
) -> None:
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True, in_place=in_place)
    assert load(engine, versions.same()) == 1
    for _ in range(3):
        assert load(engine, versions.next()) == pytest.approx(14 / 1701)
        assert net.bits() == bits(versions.state)
    assert load(engine, versions.same()) == 0


def test_what_did_not_change_is_not_written(versions: Versions) -> None:
    """Elements that torch did not see change would show that they were written."""
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True)
    load(engine, versions.same())
    before = versions.state["wide"].clone()
    version = versions.next()
    kept = torch.nonzero((before == versions.state["wide"]).view(-1))[0]
    np.frombuffer(bytes_of(net.state_dict()["wide"]), np.int16)[int(kept)] = 4711
    load(engine, version)
    assert net.state_dict()["wide"].view(torch.int16).view(-1)[kept] == 4711


def _changed_by_torch(net: Net, _: TorchModule) -> None:
    net.get_buffer("tall").mul_(2)


def _moved(net: Net, _: TorchModule) -> None:
    net.tall = net.get_buffer("tall").clone()


def _forgotten(_: Net, engine: TorchModule) -> None:
    engine.close()


@pytest.mark.parametrize("touch", [_changed_by_torch, _moved, _forgotten])
@pytest.mark.parametrize("late", [False, True])
def test_a_module_that_was_changed_since_gets_all_of_the_version(
    versions: Versions, in_place: Any, touch: Callable[[Net, TorchModule], None], late: bool
) -> None:
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True, in_place=in_place)
    load(engine, versions.same())
    version = versions.next()
    if late:
        engine.prepare(version)
    touch(net, engine)
    engine.load(version)
    assert engine.changed == 1
    assert net.bits() == bits(versions.state)


def _gone(base: LeasedVersion) -> None:
    (base.folder / "model.safetensors").unlink()


def _short(base: LeasedVersion) -> None:
    os.truncate(base.folder / "model.safetensors", 600)


def _another(base: LeasedVersion) -> None:
    told = json.loads((base.folder / MANIFEST).read_text())
    (base.folder / MANIFEST).write_text(json.dumps({**told, "save_id": "of another job"}))


def _no_manifest(base: LeasedVersion) -> None:
    (base.folder / MANIFEST).write_text("{")


@pytest.mark.parametrize("harm", [_gone, _short, _another, _no_manifest])
def test_a_base_that_is_not_what_it_was_costs_a_whole_load(
    versions: Versions, in_place: Any, harm: Callable[[LeasedVersion], None]
) -> None:
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True, in_place=in_place)
    base = versions.same()
    load(engine, base)
    harm(base)
    assert load(engine, versions.next()) == 1
    assert net.bits() == bits(versions.state)
    assert load(engine, versions.next()) != 1


def test_a_version_that_cannot_be_read_changes_nothing_and_the_next_one_is_right(
    versions: Versions,
) -> None:
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True)
    load(engine, versions.same())
    before = net.bits()
    bad = versions.next()
    _gone(bad)
    with pytest.raises(OSError, match="No such file"):
        engine.prepare(bad)
    assert net.bits() == before
    assert load(engine, versions.next()) != 1
    assert net.bits() == bits(versions.state)


def test_a_load_that_fails_half_way_is_followed_by_a_whole_one(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True)
    load(engine, versions.same())
    version = versions.next()
    engine.prepare(version)

    def fails(*_: object) -> None:
        net.get_buffer("tall").zero_()
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("explorer_hooks.engines.torch_module.write_changes", fails)
        with pytest.raises(RuntimeError):
            engine.load(version)
    assert load(engine, version) == 1
    assert net.bits() == bits(versions.state)


def test_too_many_changes_are_loaded_as_a_whole(versions: Versions) -> None:
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True)
    load(engine, versions.same())
    assert load(engine, versions.next(elements=400)) == 1
    assert net.bits() == bits(versions.state)


def test_other_tensors_are_loaded_as_a_whole(versions: Versions, tmp_path: Path) -> None:
    net = Net(versions.state)
    engine = TorchModule(net, sparse=True, cast=True)
    load(engine, versions.same())
    other = {name: value.clone() for name, value in versions.state.items()}
    other["wide"] = other["wide"].float() + 1
    assert load(engine, version_of(other, tmp_path / "other", 9)) == 1
    assert torch.equal(net.get_buffer("wide").float(), other["wide"].to(torch.bfloat16).float())


def test_a_cast_of_changes_is_the_cast_of_all(versions: Versions) -> None:
    wide = {
        name: value.double() if name == "tall" else value for name, value in versions.state.items()
    }
    one, other = Net(wide), Net(wide)
    sparse, full = TorchModule(one, sparse=True, cast=True), TorchModule(other, cast=True)
    load(sparse, versions.same())
    version = versions.next()
    assert load(sparse, version) != 1
    load(full, version)
    assert one.bits() == other.bits()


WIDTHS = [
    torch.uint8,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.bool,
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_part_of_any_tensor_gets_its_changes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Shards and views, contiguous or not, of all widths; NaN payloads and negative zeros."""
    folder = tmp_path_factory.mktemp("versions")
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    dtype = data.draw(st.sampled_from(WIDTHS))
    size = int(np.prod(shape)) * dtype.itemsize
    seed = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    raw = seed.integers(0, 2 if dtype == torch.bool else 256, size, np.uint8)
    old = torch.from_numpy(raw.copy()).view(dtype).view(shape)
    raw[seed.random(size) < 0.02] ^= 1
    new = torch.from_numpy(raw.copy()).view(dtype).view(shape)
    box = whole(shape)
    if shape:
        begins = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(
            data.draw(st.integers(1, size - begin))
            for begin, size in zip(begins, shape, strict=True)
        )
        box = Box(begins, sizes)
    strided = data.draw(st.booleans()) and len(shape) > 1
    place = torch.zeros(box.shape[::-1] if strided else box.shape, dtype=dtype)
    target = Target(
        "w", dtype, place.permute(*reversed(range(len(shape)))) if strided else place, box
    )
    base, version = (
        version_of({"w": value}, folder / name) for value, name in ((old, "old"), (new, "new"))
    )
    target.tensor.copy_(target.of(old))
    assert DTYPES[base.manifest.tensors[0].dtype] == dtype
    try:
        found = changes.find_changes(base, version, [target], 2)
    except changes.CannotCompareError:
        reject()  # too many
    changes.write_changes([target], found)
    assert bytes(bytes_of(target.tensor.contiguous())) == bytes(
        bytes_of(target.of(new).contiguous())
    )


def test_tensors_that_are_compared_in_parts_are_compared_whole(tmp_path: Path) -> None:
    """Parts of 16 MB, cut along the first dimension."""
    old = torch.zeros(5000, 2000, dtype=torch.float32)
    new = old.clone()
    where = torch.tensor([0, 1, 4_000_000, 4_194_303, 4_194_304, 9_999_999])
    new.view(-1)[where] = 1
    base, version = version_of({"w": old}, tmp_path / "a"), version_of({"w": new}, tmp_path / "b")
    target = Target("w", torch.float32, old.clone(), whole((5000, 2000)))
    found = changes.find_changes(base, version, [target], 2)
    assert torch.equal(found.each[0].positions, where)
    changes.write_changes([target], found)
    assert torch.equal(target.tensor, new)


def test_a_hook_serves_version_after_version_by_what_changed(job: SmallJob, tmp_path: Path) -> None:
    """Through the hook and a stage, whose copies replace each other."""
    values = [float(number) for number in range(5000)]
    net = nn.Module()
    net.register_buffer("weight", torch.zeros(5000))
    engine = TorchModule(net, sparse=True)
    staging = Staging(tmp_path / "stage")
    with ExplorerHook(job.layout.root, "explorer", engine, staging=staging) as hook:
        for step in range(1, 6):
            values[step * 100] = -1.0
            job.save(step, *values)
            with job.daemon() as loop:
                loop.run_once()
            hook.pull(0)
            assert net.get_buffer("weight").tolist() == values
            assert engine.changed == (1 if step == 1 else 1 / 5000)
