import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from syncd.checkpoint.safetensors_file import DIGESTS, SafetensorsFile
from syncd.checkpoint.safetensors_header import PAGE
from syncd.protocol.names import FULL_STATE_DICT, RECEIPTS, receipt_name
from syncd.protocol.records import NonFinite, Receipt, ReceiptFile, encode
from syncd.storage.fsio import Draft
from tests.fsdp_models import Laden, tensors, values
from tests.merging import STORAGE, assert_equal, build, loaded
from tests.refusals import save_fails
from trainer_hooks.state.full_file import _outline, gather_full
from trainer_hooks.state.gather import Derived
from trainer_hooks.state.weights_in_memory import WeightsInMemory

DEADLINE = 60.0
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def put(
    state: dict[str, Any], actor: Path, *, bucket: int = 4096, tied: bool = False
) -> ReceiptFile:
    """A whole save with its receipt."""
    (actor / RECEIPTS).mkdir(parents=True, exist_ok=True)
    part = WeightsInMemory(bucket)
    gather_full(state, 0, part, tied=tied)
    with Draft(STORAGE, actor / FULL_STATE_DICT) as draft:
        told = part.write(draft)
    receipt = Receipt(save_id="run-1-0", step=1, rank=0, world_size=1, files=(told,))
    (actor / RECEIPTS / receipt_name(0)).write_bytes(encode(receipt))
    return told


@pytest.mark.parametrize("bucket", [1, 64, 4096, 2**28])
def test_buckets_of_any_size_make_the_same_file(tmp_path: Path, bucket: int) -> None:
    torch.manual_seed(1)
    model = Laden()
    told = put(model.state_dict(), tmp_path / "actor", bucket=bucket)
    assert_equal(loaded(tmp_path / "actor"), tensors(model))
    with SafetensorsFile.open(STORAGE, tmp_path / "actor" / FULL_STATE_DICT) as file:
        assert len(file.header) % PAGE == 0
        expected = ReceiptFile(
            name=FULL_STATE_DICT,
            size=file.size,
            digest=file.header_digest,
            over="header",
            nonfinite=NonFinite.of([one.name for one in file.entries if "unusual" in one.name]),
        )
    assert told == expected
    build(tmp_path / "actor", tmp_path / "out")


# -- what the receipt says ---------------------------------------------------------------------


def test_receipts_of_different_contents_differ(tmp_path: Path) -> None:
    """Of the same names and shapes: a stale file is not taken for the one that was announced."""
    one, other = torch.zeros(5), torch.zeros(5)
    other[3] = 1
    told = [put({"weight": t}, tmp_path / str(n)) for n, t in enumerate((one, other, one.clone()))]
    assert told[0].digest != told[1].digest
    assert told[0] == told[2]
    assert told[0].size == told[1].size


def test_the_digests_in_a_header_are_read_from_its_first_bytes_alone(tmp_path: Path) -> None:
    """A header may be anyone's, and is parsed by a child alone."""
    path = tmp_path / FULL_STATE_DICT
    for metadata, told in (
        ({"format": "pt", DIGESTS: "0f" * 16}, [b"\x0f" * 16]),
        ({DIGESTS: "0f" * 16, "format": "pt"}, None),
        ({"format": "pt", DIGESTS: "0f" * 32}, None),
        ({"format": "pt"}, None),
    ):
        fields = {
            "__metadata__": metadata,
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        }
        header = json.dumps(fields, separators=(",", ":")).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
        with SafetensorsFile.open(STORAGE, path) as file:
            assert file.said_digests == told


# -- tied weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_a_tied_head_is_left_out(tmp_path: Path, copied: bool) -> None:
    weight = values(4, 3)
    state = {HEAD: weight.clone() if copied else weight, EMBEDDING: weight, "norm": values(2)}
    put(state, tmp_path / "tied", tied=True)
    assert_equal(loaded(tmp_path / "tied"), {EMBEDDING: weight, "norm": state["norm"]})
    put(state, tmp_path / "untied")
    assert_equal(loaded(tmp_path / "untied"), state)


def test_a_tied_head_that_differs_is_an_error_that_names_both(tmp_path: Path) -> None:
    weight = values(4, 3)
    state = {EMBEDDING: weight, HEAD: weight + 1}
    with save_fails(f"{HEAD} differs from {EMBEDDING}"):
        put(state, tmp_path, tied=True)


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"x": torch.zeros(2, dtype=torch.complex128)}, "x has dtype torch.complex128"),
        ({"__metadata__": torch.zeros(2)}, "has the name of safetensors' own metadata"),
        ({"text": "no tensor"}, "no tensors"),
    ],
)
def test_what_no_file_can_hold_is_said_by_name(state: dict[str, Any], said: str) -> None:
    with save_fails(said):
        gather_full(state, 0, WeightsInMemory())


def test_a_rank_that_is_not_the_first_copies_nothing() -> None:
    part = WeightsInMemory()
    gather_full({"weight": values(2)}, 1, part)
    assert part.nbytes == 0


def test_a_tensor_that_cannot_be_made_fails_after_the_others_were_gathered() -> None:
    """Otherwise the other ranks would be alone in a collective."""
    made = []

    def fails(_: Any) -> Tensor:
        raise ArithmeticError("no merge")

    def makes(wholes: Any) -> Tensor:
        made.append(wholes)
        return values(2)

    derived = {name: Derived({}, make) for name, make in (("a", fails), ("b", makes))}
    with save_fails("no merge"):
        gather_full({"a": values(2), "b": values(2)}, 0, WeightsInMemory(), derived=derived)
    assert made


def test_extra_state_and_what_is_no_tensor_are_left_out(tmp_path: Path) -> None:
    state = {
        "weight": values(2),
        "my_extra_state": values(2),
        "layer._extra_state": torch.zeros(3),
        "_extra_state": {"left": "out"},
    }
    put(state, tmp_path)
    found = load_file(tmp_path / FULL_STATE_DICT)
    assert found.keys() == {"weight", "my_extra_state"}
    with safe_open(tmp_path / FULL_STATE_DICT, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_ranks_that_would_gather_other_parts_for_a_tensor_do_not_agree() -> None:
    """Otherwise one waits for a collective that the other has not."""
    weight = torch.ones(2, 2)

    def digest(parts: dict[str, torch.Tensor]) -> str:
        derived = {"weight": Derived(parts, lambda wholes: wholes["weight"])}
        return _outline({"weight": weight}, 0, tied=False, derived=derived).digest

    one = digest({"a": weight, "weight": weight})
    assert one == digest({"a": torch.zeros(2, 2), "weight": weight})
    assert one != digest({"weight": weight})
    assert one != digest({"a": weight[:1], "weight": weight})
