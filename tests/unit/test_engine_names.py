"""Modules and versions whose tensors have different names: the trainer's, and the hub's."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
import torch
from torch import Tensor

from explorer_hooks.engines.conformance import make_version
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.engines.torch_module import InPlace, TorchModule
from explorer_hooks.engines.vllm_engine import LLM, VLLMEngine
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.given_names import GivenNames
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.server_fit import Fits
from explorer_hooks.weights import WeightsReader
from syncd.checkpoint.name_map import NameMap
from syncd.protocol.names import MODEL_CONFIG, NAME_MAP
from syncd.protocol.records import Names
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord
from tests.engines.sglang_fake import FakeSGLang
from tests.mapped_names import BY_NAMES, NAMES, Named, as_bytes, on_the_hub, state
from tests.merging import assert_equal
from tests.refusals import unfit, unverified
from tests.storages import RuledStorage

A, B = torch.arange(8, dtype=torch.bfloat16).reshape(2, 2, 2)
OTHER: dict[Names, Names] = {"hub": "trainer", "trainer": "hub"}


def made(
    folder: Path,
    names: Names,
    sequence: int = 1,
    *,
    tensors: dict[str, Tensor] | None = None,
    storage: RuledStorage | None = None,
    files: Mapping[str, bytes] | None = None,
) -> LeasedVersion:
    given = BY_NAMES[names](state()) if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    return make_version(
        folder / f"v{sequence}",
        as_bytes(given),
        sequence=sequence,
        files={NAME_MAP: NAMES.encode(), **(files or {})},
        names=names,
        storage=storage or RuledStorage(),
    )


by_either_names = pytest.mark.parametrize("names", ["hub", "trainer"])


@pytest.mark.parametrize("in_place", ["staged", "direct"])
@by_either_names
@pytest.mark.parametrize("module", ["hub", "trainer"])
def test_a_module_of_either_names_is_filled_by_a_version_of_either(
    tmp_path: Path, names: Names, module: Names, in_place: InPlace
) -> None:
    truth = BY_NAMES[module](state())
    net = Named(truth)
    before = {name: value.data_ptr() for name, value in net.state_dict().items()}
    engine = TorchModule(net, in_place=in_place)
    version = made(tmp_path, names)
    engine.check(version)
    engine.prepare(version)
    engine.load(version)
    after = net.state_dict()
    assert {name: value.data_ptr() for name, value in after.items()} == before
    assert_equal(after, truth)


def test_pieces_are_read_into_the_modules_own_tensors(tmp_path: Path) -> None:
    version = made(tmp_path, "hub", storage=RuledStorage())
    engine = TorchModule(Named(state()), in_place="direct")
    engine.load(version)
    memory = engine._buffer._memory
    # Those alone that are not end to end in the module: the ones that are transposed.
    assert memory is not None
    assert memory.content.nbytes < 3 * 64 + 1


@by_either_names
def test_a_module_that_renames_is_asked_by_either_name(tmp_path: Path, names: Names) -> None:
    truth = {f"wrapped.{name}": value for name, value in state().items()}
    net = Named(truth)
    TorchModule(net, rename=lambda name: f"wrapped.{name}").load(made(tmp_path, names))
    assert_equal(net.state_dict(), truth)


@pytest.mark.parametrize("missing", ["experts.1.up.weight", "qk", "layernorm"])
def test_a_version_that_lacks_a_piece_is_refused_and_nothing_changes(
    tmp_path: Path, missing: str
) -> None:
    tensors = on_the_hub(state())
    del tensors[missing]
    net = Named(state())
    engine = TorchModule(net)
    with unfit(r"is (incomplete in|not in) the version"):
        engine.check(made(tmp_path, "hub", tensors=tensors))
    assert not any(value.any() for value in net.state_dict().values())


def test_what_does_not_fit_is_refused_with_both_names(tmp_path: Path) -> None:
    truth = state()
    truth["experts.gate_up_proj"] = truth["experts.gate_up_proj"][:2]
    both = (
        r"experts\.2\.gate\.weight \(renamed to experts\.gate_up_proj\) is .*, but the module has"
    )
    with unfit(both):
        TorchModule(Named(truth)).check(made(tmp_path, "hub", 1))
    del truth["experts.down_proj"]
    both = r"experts\.down_proj \(on the hub experts\.0\.down\.weight, …\) is not in the module"
    with unfit(both):
        TorchModule(Named(truth)).check(made(tmp_path, "trainer", 2))


def test_without_a_map_other_names_are_refused(tmp_path: Path) -> None:
    version = make_version(tmp_path / "version", as_bytes(on_the_hub(state())), names="hub")
    with unfit(r"experts\.0\.down\.weight is not in the module"):
        TorchModule(Named(state())).check(version)


def test_a_damaged_map_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    files = {NAME_MAP: b'{"tensors": {"norm": {"shape": [4], "pieces": []}}}'}
    version = make_version(tmp_path / "version", as_bytes(state()), files=files)
    with unverified(NAME_MAP):
        TorchModule(Named(state())).check(version)


def sglang_of(folder: Path, names: str) -> tuple[Path, FakeSGLang]:
    """An SGLang that was started with these names, and what with."""
    base = made(folder, names, 9).folder
    return base, FakeSGLang(str(base))


def server_of(fake: FakeSGLang, base: Path | None = None) -> SGLangServer:
    return SGLangServer("http://sglang", transport=fake.transport, base=base)


@pytest.mark.parametrize("says_base", [False, True])
def test_sglang_never_gets_names_that_it_would_drop(tmp_path: Path, says_base: bool) -> None:
    base, fake = sglang_of(tmp_path, "hub")
    engine = server_of(fake, base)
    if not says_base:
        engine = server_of(fake)
        engine._fits = Fits()
    both = r"skip experts\.gate_up_proj, whose hub name is experts\.0\.gate\.weight"
    with unfit(both):
        engine.check(made(tmp_path, "trainer", 1))
    assert not fake.loaded
    version = made(tmp_path, "hub", 2)
    engine.check(version)
    reload(engine, version)
    assert fake.loaded == [str(version.folder)]


def test_an_sglang_that_was_started_with_the_trainers_names_gets_the_hubs(tmp_path: Path) -> None:
    base, fake = sglang_of(tmp_path, "trainer")
    engine = server_of(fake, base)
    engine.check(made(tmp_path, "hub", 1))
    with unfit("needs the hub's names"):
        engine.check(made(tmp_path, "trainer", 2))


def test_a_map_that_says_why_there_is_none_is_reason_enough_for_sglang(tmp_path: Path) -> None:
    files = {NAME_MAP: NameMap(NameMapRecord(refused="rows are permuted")).encode()}
    version = make_version(tmp_path / "v1", as_bytes(state()), files=files)
    engine = SGLangServer("http://sglang", base=version.folder)
    with unfit("which are unknown: rows are permuted"):
        engine.check(version)


@pytest.mark.parametrize(
    ("model_type", "base", "fits"),
    [
        ("qwen3_moe", "hub", True),
        ("mixtral", "hub", False),
        ("mixtral", "trainer", True),
        ("qwen3_moe", None, True),
        ("mixtral", None, False),
    ],
)
def test_vllm_gets_the_trainers_names_only_if_it_finds_them(
    tmp_path: Path, model_type: str, base: Names | None, fits: bool
) -> None:
    files = {MODEL_CONFIG: json.dumps({"model_type": model_type}).encode()}
    folder = made(tmp_path, base, 9).folder if base is not None else None
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=None))
    engines = [
        VLLMEngine(cast("LLM", llm), base=folder),
        VLLMServer("http://vllm", base=folder, transport=httpx2.MockTransport(_without_routes)),
    ]
    for engine in engines:
        engine.check(made(tmp_path / type(engine).__name__, "hub", 1, files=files))
        version = made(tmp_path / type(engine).__name__, "trainer", 2, files=files)
        if fits:
            engine.check(version)
            continue
        with unfit(r"gate_up_proj, whose hub name is experts\."):
            engine.check(version)


def test_a_server_is_compared_by_both_names_and_refused_by_both(tmp_path: Path) -> None:
    fits = Fits(made(tmp_path, "hub", 9).folder)
    fits.check(made(tmp_path, "trainer", 1))
    tensors = state()
    del tensors["experts.down_proj"]
    missing = r"experts\.0\.down\.weight \(in the trainer's module experts\.down_proj\) is not in"
    with unfit(missing):
        fits.check(made(tmp_path, "trainer", 2, tensors=tensors))
    tensors = on_the_hub(state())
    tensors["head"] = tensors["head"][:4]
    with unfit(r"head is \[4, 4\] in the version"):
        fits.check(made(tmp_path, "hub", 3, tensors=tensors))


def reload(engine: SGLangServer, version: LeasedVersion) -> None:
    engine.attach()
    engine.prepare(version)
    engine.pause()
    engine.load(version)
    engine.reset_cache()
    engine.resume()


def _without_routes(_: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, json={"paths": {}})


@pytest.mark.parametrize("mmap", [False, True])
@by_either_names
@pytest.mark.parametrize("asked", ["hub", "trainer"])
def test_a_reader_gives_each_tensor_by_both_of_its_names(
    tmp_path: Path, names: Names, asked: Names, mmap: bool
) -> None:
    truth = BY_NAMES[asked](state())
    with WeightsReader(made(tmp_path, names), mmap=mmap) as reader:
        assert set(reader.names()) == set(BY_NAMES[names](state()))
        assert_equal({name: reader.get_weight(name) for name in truth}, truth)
        assert_equal(dict(reader.state_dict_iterator(asked)), truth)
        assert dict(reader.state_dict_iterator()).keys() == set(reader.names())


@pytest.mark.parametrize(
    ("pieces", "hub"),
    [
        ({"a": {"name": "b"}, "b": {"name": "a"}}, {"b": A, "a": B}),
        ({"a": {"name": "b"}, "b": {"name": "c"}}, {"b": A, "c": B}),
        ({"a": {"name": "a", "transposed": True}}, {"a": A.T, "b": B}),
    ],
    ids=["swapped", "chained", "transposed"],
)
@pytest.mark.parametrize("given", ["hub", "trainer"])
def test_a_name_of_one_set_that_another_tensor_has_in_the_other_is_the_asked_sets(
    tmp_path: Path, pieces: dict[str, Any], hub: dict[str, Tensor], given: Names
) -> None:
    mapped = {
        name: MappedTensor(shape=(2, 2), pieces=(HubPiece(**piece),))
        for name, piece in pieces.items()
    }
    of = {"trainer": {"a": A, "b": B}, "hub": hub}
    version = make_version(
        tmp_path / "v1",
        as_bytes({name: value.contiguous() for name, value in of[given].items()}),
        files={NAME_MAP: NameMap(NameMapRecord(tensors=mapped)).encode()},
        names=given,
    )
    with WeightsReader(version) as reader:
        for asked in OTHER:
            assert_equal(dict(reader.state_dict_iterator(asked)), of[asked])


def test_joined_parts_in_any_order_and_numbers_are_compared_by_the_hubs_names() -> None:
    def one(shape: tuple[int, ...], **piece: Any) -> MappedTensor:
        return MappedTensor(shape=shape, pieces=(HubPiece(**piece),))

    record = NameMapRecord(
        tensors={
            "gate": one((3, 4), name="gate_up", at=5),
            "up": one((5, 4), name="gate_up", at=0),
            "count": one((), name="norm.count"),
        }
    )
    specs = {name: TensorSpec("F32", mapped.shape) for name, mapped in record.tensors.items()}
    names = GivenNames(NameMap(record), "trainer")
    wanted = {"gate_up": TensorSpec("F32", (8, 4)), "norm.count": TensorSpec("F32", ())}
    assert names.by_hub(specs) == wanted
    assert names.by_hub(dict(reversed(specs.items()))) == wanted
