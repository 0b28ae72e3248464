import json
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.server_fit import Fits, model_tensors
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.records import Manifest, TensorEntry, VersionFile
from syncd.protocol.tensor_names import NameMapRecord
from tests.refusals import invalid, unfit

SHAPES = {"model.embed_tokens.weight": (4, 2), "model.norm.weight": (2,), "lm_head.weight": (4, 2)}


class Version:
    """As much of a leased version as is compared."""

    sequence, step, remote_path, folder = 7, 9, None, Path("/job/published/v000007")

    def __init__(self, tensors: dict[str, tuple[str, tuple[int, ...]]], kind: str = "full") -> None:
        self.kind = kind
        self.manifest = manifest(tensors)

    def name_map(self) -> NameMap:
        return NameMap(NameMapRecord())


def manifest(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Manifest:
    entries = tuple(
        TensorEntry(name=name, dtype=dtype, shape=shape, file="model.safetensors")
        for name, (dtype, shape) in tensors.items()
    )
    return Manifest(
        sequence=7, step=9, save_id="run-9-0", checked="receipt", digests="off",
        files=(VersionFile(name="model.safetensors", size=0),), tensors=entries,
    )  # fmt: skip


def bf16(*leave_out: str, **changed: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    found = {name: ("BF16", shape) for name, shape in SHAPES.items() if name not in leave_out}
    return found | {"model.norm.weight": changed["norm"]} if changed else found


def write_model(folder: Path, *names: str, file: str = "model.safetensors") -> None:
    folder.mkdir(exist_ok=True)
    entries, at = [], 0
    for name in names:
        shape = SHAPES[name]
        size = 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        entries.append(HeaderEntry(name, "BF16", shape, at, at + size))
        at += size
    (folder / file).write_bytes(header_bytes(entries) + bytes(at))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two files and an index, as links into another folder: the hub's cache has it so."""
    folder, blobs = tmp_path / "base", tmp_path / "blobs"
    write_model(blobs, "model.embed_tokens.weight", file="one.safetensors")
    write_model(blobs, "model.norm.weight", file="two.safetensors")
    folder.mkdir()
    for name in ("one.safetensors", "two.safetensors"):
        (folder / name).symlink_to(blobs / name)
    write_model(folder, "lm_head.weight", file="consolidated.safetensors")
    weight_map = {
        "model.embed_tokens.weight": "one.safetensors", "model.norm.weight": "two.safetensors",
    }  # fmt: skip
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    return folder


def check(fits: Fits, version: Version) -> None:
    fits.check(version)  # type: ignore[arg-type] # as much of it as is looked at


def test_a_model_folder_is_known_by_the_headers_of_its_index(base: Path) -> None:
    assert {name: spec.shape for name, spec in model_tensors(base).items()} == {
        name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"
    }


def test_a_version_that_fits_the_base_model_is_accepted_tied_or_not(base: Path) -> None:
    fits = Fits(base)
    check(fits, Version(bf16()))
    check(fits, Version(bf16("lm_head.weight")))
    (base / "config.json").write_text("{}")
    with unfit(r"lm_head.* is not in the server"):
        check(Fits(base), Version(bf16()))


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        (bf16("model.norm.weight"), "norm.* is not in the version"),
        (bf16(norm=("BF16", (3,))), r"norm.* is \[3\] in the version, \[2\] in the server"),
        (bf16(norm=("F32", (2,))), "norm.* is F32 in the version, BF16 in the server"),
        (bf16() | {"extra.weight": ("BF16", (1,))}, "extra.* is not in the server"),
    ],
)
def test_every_name_shape_and_dtype_is_compared(tensors: Any, what: str) -> None:
    fits = Fits(manifest(bf16()))
    check(fits, Version(bf16()))
    with unfit(what):
        check(fits, Version(tensors))


def test_a_server_that_casts_takes_other_floats_and_nothing_else() -> None:
    fits = Fits(manifest(bf16()), casts=True)
    check(fits, Version(bf16(norm=("F32", (2,)))))
    for norm in (("I32", (2,)), ("F32", (3,))):
        with pytest.raises(EngineMismatchError):
            check(fits, Version(bf16(norm=norm)))


def test_what_is_no_full_model_is_not_compared() -> None:
    check(Fits(manifest(bf16())), Version({}, kind="adapter"))


@pytest.mark.parametrize("what", ["nothing", "no index", "torn", "not there"])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "base"
    if what != "not there":
        folder.mkdir()
    if what == "no index":
        (folder / "model.safetensors.index.json").write_text("[]")
    if what == "torn":
        (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with invalid("base"):
        Fits(folder)
