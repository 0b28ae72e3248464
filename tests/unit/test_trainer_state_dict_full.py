from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from syncd.checkpoint.safetensors_file import CONTENT, SafetensorsFile
from syncd.checkpoint.safetensors_header import PAGE
from syncd.protocol.errors import CoverageError, SaveFailedError, ShardFormatError
from syncd.protocol.names import FULL_STATE_DICT, RECEIPTS, receipt_name
from syncd.protocol.records import NonFinite, Receipt, ReceiptFile, encode
from syncd.storage.fsio import Draft, Storage
from tests.fsdp_models import Config, Laden, tensors, values
from tests.merging import STORAGE, assert_equal, build, loaded
from tests.multiprocess.processes import wait_until
from tests.storages import RuledStorage, refuse
from trainer_hooks.state.full_file import FullStateStream, _outline, ties_embeddings
from trainer_hooks.state.gather import Derived

DEADLINE = 60.0
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def written(stream: FullStateStream, path: Path, storage: Storage = STORAGE) -> Future[ReceiptFile]:
    """What comes of the writer's thread, once it has ended, while this one gathers."""

    def write() -> ReceiptFile:
        with Draft(storage, path) as draft:
            told = stream.write(draft)
            draft.commit()
        return told

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(write)
        stream.gather()
        future.exception(DEADLINE)
    return future


def put(state: dict[str, Any], actor: Path, **options: Any) -> ReceiptFile:
    """A whole save with its receipt."""
    (actor / RECEIPTS).mkdir(parents=True, exist_ok=True)
    stream = FullStateStream(state, rank=0, **options)
    told = written(stream, actor / FULL_STATE_DICT).result()
    receipt = Receipt(save_id="run-1-0", step=1, rank=0, world_size=1, files=(told,))
    (actor / RECEIPTS / receipt_name(0)).write_bytes(encode(receipt))
    return told


@pytest.mark.parametrize("limit", [1, 64, 4096, 2**28])
def test_any_limit_of_memory_makes_the_same_file(tmp_path: Path, limit: int) -> None:
    torch.manual_seed(1)
    model = Laden()
    told = put(model.state_dict(), tmp_path / "actor", limit=limit)
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


def test_between_the_threads_there_is_no_more_than_the_limit() -> None:
    """Of a large tensor, too: it is handed over in pieces."""
    stream = FullStateStream({"large": values(10_000)}, rank=0, limit=1000)
    pipe = stream._pipe
    stuck = threading.Thread(target=stream.gather)
    stuck.start()
    try:
        wait_until(lambda: len(pipe._ready) == 8, "all of the memory is in use")
        assert stuck.is_alive()
        assert sum(memory.content.nbytes for memory, _ in pipe._ready) == 1000
    finally:
        stream.abort(OSError("the writer's thread has ended"))
        stuck.join(DEADLINE)
    assert not stuck.is_alive()


# -- what the receipt says ---------------------------------------------------------------------


def test_receipts_of_different_contents_differ(tmp_path: Path) -> None:
    """Of the same names and shapes: a stale file is not taken for the one that was announced."""
    one, other = torch.zeros(5), torch.zeros(5)
    other[3] = 1
    told = [put({"weight": t}, tmp_path / str(n)) for n, t in enumerate((one, other, one.clone()))]
    assert told[0].digest != told[1].digest
    assert told[0] == told[2]
    assert told[0].size == told[1].size


def test_a_file_that_is_not_what_was_written_is_not_published(tmp_path: Path) -> None:
    actor = tmp_path / "actor"
    put({"weight": values(500), "bias": values(3)}, actor)
    path = actor / FULL_STATE_DICT
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShardFormatError, match=r"model\.safetensors .* the trainer wrote"):
        build(actor, tmp_path / "out")


def test_what_a_file_says_of_its_content_is_read_from_its_first_bytes_alone(tmp_path: Path) -> None:
    """A header may be anyone's, and is parsed by a child alone."""
    path = tmp_path / FULL_STATE_DICT
    for metadata, told in (
        ({"format": "pt", CONTENT: "0f" * 16}, "0f" * 16),
        ({CONTENT: "0f" * 16, "format": "pt"}, None),
        ({"format": "pt", CONTENT: "0f"}, None),
        ({"format": "pt"}, None),
    ):
        header = json.dumps({"__metadata__": metadata}, separators=(",", ":")).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with SafetensorsFile.open(STORAGE, path) as file:
            assert file.told_content == told


# -- tied weights ------------------------------------------------------------------------------


def test_ties_are_those_of_the_config() -> None:
    model: Any = nn.Linear(2, 2)
    assert not ties_embeddings(model)
    model.config = Config(tie_word_embeddings=True)
    assert ties_embeddings(model)
    model.config = Config(tie_word_embeddings=True, text_config={"tie_word_embeddings": False})
    assert not ties_embeddings(model)
    model.config = {"tie_word_embeddings": True}
    assert not ties_embeddings(model)


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
    stream = FullStateStream(state, rank=0, tied=True)
    error = written(stream, tmp_path / FULL_STATE_DICT).exception()
    assert isinstance(error, CoverageError)
    assert HEAD in str(error)
    assert EMBEDDING in str(error)
    assert list(tmp_path.iterdir()) == []


# -- faults ------------------------------------------------------------------------------------


def test_a_full_disk_fails_the_writer_and_not_the_training(tmp_path: Path) -> None:
    storage = RuledStorage(refuse("write", errno.ENOSPC))
    state = {str(number): values(300) for number in range(20)}
    stream = FullStateStream(state, rank=0, limit=1024)
    error = written(stream, tmp_path / FULL_STATE_DICT, storage).exception()
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "x has dtype torch.complex64"),
        ({"__metadata__": torch.zeros(2)}, "has the name of safetensors' own metadata"),
        ({"text": "no tensor"}, "no tensors"),
    ],
)
def test_what_no_file_can_hold_is_said_to_both_threads(
    tmp_path: Path, state: dict[str, Any], said: str
) -> None:
    stream = FullStateStream(state, rank=0)
    with ThreadPoolExecutor(1) as pool, Draft(STORAGE, tmp_path / "file") as draft:
        writer = pool.submit(stream.write, draft)
        with pytest.raises(SaveFailedError, match=said):
            stream.gather()
        with pytest.raises(SaveFailedError, match=said):
            writer.result(DEADLINE)


def test_a_writer_does_not_wait_for_what_was_aborted(tmp_path: Path) -> None:
    stream = FullStateStream({"weight": values(2)}, rank=0)
    with ThreadPoolExecutor(1) as pool, Draft(STORAGE, tmp_path / "file") as draft:
        writer = pool.submit(stream.write, draft)
        stream.abort(KeyboardInterrupt("training was stopped"))
        with pytest.raises(SaveFailedError, match="training was stopped"):
            writer.result(DEADLINE)


def test_a_rank_that_is_not_the_first_hands_over_nothing() -> None:
    stream = FullStateStream({"weight": values(2)}, rank=1)
    stream.gather()
    assert not stream._pipe._ready


def test_extra_state_and_what_is_no_tensor_are_left_out(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "weight": values(2),
        "layer._extra_state": torch.zeros(3),
        "_extra_state": {"left": "out"},
    }
    put(state, tmp_path)
    found: dict[str, Tensor] = load_file(tmp_path / FULL_STATE_DICT)
    assert found.keys() == {"weight"}
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
