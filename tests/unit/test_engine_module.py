import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from explorer_hooks.engines.conformance import (
    NoLease,
    TensorBytes,
    make_version,
    random_tensors,
)
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.engines.torch_module import InPlace, TorchModule
from explorer_hooks.reader import LeasedVersion
from syncd.coordination.tensors import bytes_of
from syncd.storage.fsio import Storage
from tests.refusals import invalid, unfit
from tests.storages import RuledStorage

SPECS = {"one.weight": TensorSpec("BF16", (4, 3)), "two.weight": TensorSpec("F32", (5,))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Module()
        self.one.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
        self.two = nn.Module()
        self.two.weight = nn.Parameter(torch.zeros(5))


@pytest.fixture
def net() -> Net:
    return Net()


def made(
    folder: Path, tensors: dict[str, TensorBytes] | None = None, sequence: int = 1
) -> LeasedVersion:
    tensors = random_tensors(SPECS, sequence) if tensors is None else tensors
    return make_version(folder / f"v{sequence}", tensors, sequence=sequence)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.detach().contiguous()))


def misfits(module: nn.Module, version: LeasedVersion, why: str, **options: Any) -> None:
    with unfit(why):
        TorchModule(module, **options).check(version)


def test_names_are_mapped_by_a_prefix_a_mapping_or_a_function(net: Net, tmp_path: Path) -> None:
    truth = random_tensors(SPECS, 1)
    wrapped = {f"module.{name}": value for name, value in truth.items()}
    wrapped["other.bias"] = TensorBytes("F32", (1,), bytes(4))
    version = made(tmp_path, wrapped)
    TorchModule(net, prefix="module.").load(version)
    assert bits(net.one.weight) == truth["one.weight"].content
    version = made(tmp_path, {"one.weight": truth["one.weight"], "head": truth["two.weight"]}, 2)
    TorchModule(net, rename={"head": "two.weight"}).load(version)
    assert bits(net.two.weight) == truth["two.weight"].content
    version = made(tmp_path, truth | {"rotary": TensorBytes("F32", (1,), bytes(4))}, 3)
    TorchModule(net, rename=lambda name: None if name == "rotary" else name).check(version)
    misfits(net, version, "rotary is not in the module")
    misfits(net, version, r"both renamed to two\.weight", rename={"rotary": "two.weight"})
    misfits(net, version, r"one\.weight is not in the version", prefix="modul.")


def test_names_that_differ_by_a_prefix_have_a_remedy_that_works(net: Net, tmp_path: Path) -> None:
    truth = random_tensors(SPECS, 1)
    prefixed = {f"module.{name}": value for name, value in truth.items()}
    version = made(tmp_path, prefixed)
    misfits(net, version, r"use TorchModule with prefix='module\.'$")
    TorchModule(net, prefix="module.").check(version)
    wrapped = nn.ModuleDict({"module": net})
    version = made(tmp_path, truth, 2)
    misfits(wrapped, version, r"with rename=lambda name: 'module\.' \+ name$")
    TorchModule(wrapped, rename=lambda name: "module." + name).check(version)
    other = prefixed | {"one": truth["one.weight"]}
    misfits(net, made(tmp_path, other, 3), "If only the names differ, use TorchModule with")


def test_a_cast_is_made_only_where_it_is_asked_for(net: Net, tmp_path: Path) -> None:
    content = bits(torch.tensor([1.0, 1.00390625, -3.14159, 65504.0, 1e-30]))
    tensors = random_tensors(SPECS, 1) | {
        "two.weight": TensorBytes("F32", (5,), content),
        "one.weight": TensorBytes("F32", (4, 3), bits(torch.randn(4, 3))),
    }
    version = made(tmp_path, tensors)
    misfits(net, version, r"one\.weight is F32, but the module has")
    for in_place in ("staged", "direct"):
        net.one.weight.data.zero_()
        TorchModule(net, cast=True, in_place=in_place).load(version)  # type: ignore[arg-type] # one of the two
        wanted = torch.frombuffer(bytearray(tensors["one.weight"].content), dtype=torch.float32)
        assert torch.equal(net.one.weight, wanted.view(4, 3).bfloat16())
    tensors["two.weight"] = TensorBytes("F8_E4M3", (5,), bytes(5))
    tensors["one.weight"] = TensorBytes("I16", (4, 3), bytes(24))
    misfits(net, made(tmp_path, tensors, 2), r"is I16.*is F8_E4M3", cast=True)


def test_tied_weights_must_be_one_value_in_the_version_too(net: Net, tmp_path: Path) -> None:
    net.two.weight = net.one.weight
    truth = random_tensors({"one.weight": SPECS["one.weight"]}, 1)["one.weight"]
    storage = RuledStorage()
    both = make_version(
        tmp_path / "v1", {"one.weight": truth, "two.weight": truth}, storage=storage
    )
    storage.calls.clear()
    TorchModule(net).load(both)
    assert bits(net.two.weight) == truth.content
    read = sum(len(given[1]) for name, given in storage.calls if name == "pread_into")
    assert read == len(truth.content)  # once
    other = random_tensors({"two.weight": SPECS["one.weight"]}, 2)["two.weight"]
    version = made(tmp_path, {"one.weight": truth, "two.weight": other}, 2)
    misfits(net, version, "different values, but are one tensor")


def test_tied_weights_are_compared_where_the_manifest_has_no_digests(
    net: Net, tmp_path: Path
) -> None:
    net.two.weight = net.one.weight
    for sequence, seed, fits in [(1, 1, True), (2, 2, False)]:
        tensors = {
            "one.weight": random_tensors({"one.weight": SPECS["one.weight"]}, 1)["one.weight"],
            "two.weight": random_tensors({"one.weight": SPECS["one.weight"]}, seed)["one.weight"],
        }
        with_digests = made(tmp_path, tensors, sequence)
        entries = [replace(one, digest=None) for one in with_digests.manifest.tensors]
        update = {"digests": "off", "tensors": tuple(entries)}
        manifest = with_digests.manifest.model_copy(update=update)
        hold = NoLease()
        version = LeasedVersion(Storage(durable=False), with_digests.folder, manifest, hold)
        if fits:
            TorchModule(net).check(version)
        else:
            misfits(net, version, "different values, but are one tensor")


def test_the_module_changes_under_the_lock_alone_and_reading_needs_none(
    net: Net, tmp_path: Path
) -> None:
    first, lock = made(tmp_path), threading.Lock()
    engine = TorchModule(net, lock=lock)
    lock.acquire()
    engine.check(first)
    engine.prepare(first)
    thread = threading.Thread(target=engine.load, args=(first,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert not net.two.weight.any()
    lock.release()
    thread.join(60)
    assert bits(net.two.weight) == random_tensors(SPECS, 1)["two.weight"].content


def test_host_memory_is_used_again_and_what_was_prepared_is_not_read_twice(
    net: Net, tmp_path: Path
) -> None:
    storage = RuledStorage()
    versions = [
        make_version(tmp_path / f"{at}", random_tensors(SPECS, at), sequence=at, storage=storage)
        for at in (1, 2)
    ]
    engine = TorchModule(net)
    engine.load(versions[0])
    memory = engine._buffer._memory
    engine.prepare(versions[1])
    storage.calls.clear()
    engine.load(versions[1])
    assert storage.calls == []
    assert engine._buffer._memory is memory
    engine.close()
    assert engine._buffer._memory is None
    engine.load(versions[0])


def test_what_was_prepared_for_another_shape_of_the_module_is_read_again(
    net: Net, tmp_path: Path
) -> None:
    version = made(tmp_path)
    engine = TorchModule(net, cast=True)
    engine.prepare(version)
    net.two.weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    engine.load(version)
    truth = random_tensors(SPECS, 1)["two.weight"].content
    wanted = torch.frombuffer(bytearray(truth), dtype=torch.float32).double()
    assert torch.equal(net.two.weight.nan_to_num(), wanted.nan_to_num())


@pytest.fixture
def half_read(tmp_path: Path) -> LeasedVersion:
    """A version of which the second tensor cannot be read."""
    reads: list[Any] = []

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if called == "pread_into":
            reads.append(given)
            if len(reads) == 2:
                raise OSError(errno.EIO, "half")

    storage = RuledStorage()
    version = make_version(tmp_path / "half", random_tensors(SPECS, 7), storage=storage)
    storage.rules.append(rule)
    return version


def test_direct_loading_says_that_it_may_have_torn_the_module(
    net: Net, tmp_path: Path, half_read: LeasedVersion
) -> None:
    engine = TorchModule(net, in_place="direct", threads=1)
    first = made(tmp_path)
    engine.load(first)
    pointers = [p.data_ptr() for p in net.parameters()]
    with pytest.raises(OSError, match="half") as raised:
        engine.load(half_read)
    assert "the module now has a mix of v1" in raised.value.__notes__[0]
    assert bits(net.one.weight) == random_tensors(SPECS, 7)["one.weight"].content
    engine.load(first)
    assert bits(net.one.weight) == random_tensors(SPECS, 1)["one.weight"].content
    assert [p.data_ptr() for p in net.parameters()] == pointers


def test_direct_loading_looks_at_every_file_before_it_changes_anything(
    net: Net, tmp_path: Path
) -> None:
    version = made(tmp_path)
    (version.folder / "model-00002-of-00002.safetensors").write_bytes(b"{}")
    with pytest.raises(Exception, match="00002-of-00002") as raised:
        TorchModule(net, in_place="direct").load(version)
    assert not hasattr(raised.value, "__notes__")
    assert not net.one.weight.any()


def test_memory_of_other_layouts_is_filled_through_a_bounded_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explorer_hooks.engines.in_place._BOUND", 64)
    monkeypatch.setattr("explorer_hooks.engines.in_place._BATCH", 40)
    specs = {f"p{at}": TensorSpec("F32", (3 + at, 5)) for at in range(4)}
    net = nn.Module()
    for name, spec in specs.items():
        net.register_parameter(name, nn.Parameter(torch.zeros(*reversed(spec.shape)).t()))
    truth = random_tensors(specs, 3)
    TorchModule(net, in_place="direct").load(make_version(tmp_path / "v", truth))
    assert {name: bits(value) for name, value in net.named_parameters()} == {
        name: value.content for name, value in truth.items()
    }


class Extra(Net):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: object) -> None:
        raise AssertionError(state)


class Copied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._copy)

    @staticmethod
    def _copy(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        del module
        state[f"{prefix}one.weight"] = state[f"{prefix}one.weight"].clone()


def test_extra_state_of_a_module_is_left_alone(tmp_path: Path) -> None:
    net = Extra()
    TorchModule(net).load(made(tmp_path))
    assert net.one.weight.any()


def test_a_state_dict_that_is_made_up_cannot_be_filled(tmp_path: Path) -> None:
    misfits(Copied(), made(tmp_path), r"one\.weight in the module's state dict cannot be filled")


def test_inference_goes_on_with_inference_mode_and_requires_grad_as_it_was(
    net: Net, tmp_path: Path
) -> None:
    net.one.weight.requires_grad_(False)
    engine = TorchModule(net)
    with torch.inference_mode():
        engine.load(made(tmp_path))
    assert (net.one.weight.requires_grad, net.two.weight.requires_grad) == (False, True)
    assert net.two.weight.any()


def test_an_unknown_way_of_loading_is_refused(net: Net) -> None:
    with invalid("staged, direct"):
        TorchModule(net, in_place="fast")  # type: ignore[arg-type] # that is the mistake


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"module": {}},
            r"^module is of type dict, .* torch\.nn\.Module\. Pass the model itself",
        ),
        ({"rename": "emb"}, "^rename is 'emb': it must be a mapping, or a function"),
        ({"cast": "bf16"}, "^cast is 'bf16': it must be True or False"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    net: Net, wrong: dict[str, Any], said: str
) -> None:
    with invalid(said):
        TorchModule(**{"module": net, **wrong})


@pytest.mark.parametrize("in_place", ["staged", "direct"])
def test_casts_that_autocast_has_kept_are_forgotten(in_place: InPlace, tmp_path: Path) -> None:
    module = nn.Linear(3, 4, bias=False)
    version = made(tmp_path, {"weight": TensorBytes("F32", (4, 3), bits(torch.full((4, 3), 2.0)))})
    given = torch.ones(1, 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as a loop that serves
        module(given)
        TorchModule(module, in_place=in_place).load(version)
        assert module(given).tolist() == [[6.0] * 4]
