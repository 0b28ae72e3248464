"""What ``trainer_hooks`` saves of each kind of model, merged: the model from before wrapping."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from syncd.checkpoint.safetensors_file import DIGESTS
from syncd.protocol.names import FULL_STATE_DICT
from tests.merging import assert_equal, build, loaded, truth
from tests.multiprocess.model_ranks import KINDS, TIED, is_quantized
from tests.process_groups import answers
from tests.rank_programs import written_by

SAVES = [f"{kind}-{size}" for kind, sizes in KINDS.items() for size in sizes]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory, "tests.multiprocess.model_ranks")


each_save = pytest.mark.parametrize("save", SAVES)


@each_save
def test_shards_of_copies_merge_to_the_model_from_before_wrapping(
    saves: Path, tmp_path: Path, save: str
) -> None:
    assert build(saves / save / "sharded" / "actor", tmp_path / "out").checked == "crc32"
    assert_equal(loaded(tmp_path / "out"), truth(saves / save))


@each_save
def test_a_gathered_state_dict_is_published_as_it_is(
    saves: Path, tmp_path: Path, save: str
) -> None:
    actor = saves / save / "full" / "actor"
    assert build(actor, tmp_path / "out").checked == "receipt"
    assert_equal(loaded(tmp_path / "out"), truth(saves / save))
    linked = tmp_path / "out" / FULL_STATE_DICT
    assert linked.stat().st_ino == (actor / FULL_STATE_DICT).stat().st_ino
    with safe_open(linked, "pt") as opened:
        assert opened.metadata().keys() == {"format", DIGESTS}


@pytest.mark.parametrize("save", [save for save in SAVES if save.rpartition("-")[0] in TIED])
def test_what_the_config_ties_is_gathered_and_broadcast_once(saves: Path, save: str) -> None:
    expected = truth(saves / save)
    del expected["lm_head.weight"]
    assert_equal(loaded(saves / save / "tied" / "actor"), expected)
    assert_equal(torch.load(saves / save / "broadcast-tied.pt"), expected)


@each_save
def test_a_broadcast_is_of_the_tensors_that_are_published(saves: Path, save: str) -> None:
    assert_equal(torch.load(saves / save / "broadcast.pt"), truth(saves / save))


@each_save
def test_what_is_cast_for_explorers_is_the_model_as_torch_casts_it(
    saves: Path, tmp_path: Path, save: str
) -> None:
    """In shards, in one file, and by broadcast; the layout of what is sharded stays."""
    wanted = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in truth(saves / save).items()
        if not is_quantized(value)
    }
    for kind in ("cast", "cast-full"):
        assert build(saves / save / kind / "actor", tmp_path / kind).dtype is not None
        assert_equal(loaded(tmp_path / kind), wanted)
    assert_equal(torch.load(saves / save / "broadcast-cast.pt"), wanted)


def test_a_receiver_that_goes_between_two_buckets_leaves_no_rank_waiting(saves: Path) -> None:
    assert [one["broken off"] for one in answers(saves, 2)] == ["BroadcastError", "nothing"]


def test_training_is_the_same_with_saves_between_and_without(saves: Path) -> None:
    assert [one["same"] for one in answers(saves, 2)] == [True, True]


def test_states_that_do_not_belong_together_are_refused_on_every_rank(saves: Path) -> None:
    told, others = (one["refused"] for one in answers(saves, 2))
    assert told == others
    for case in ("other names", "other shape"):
        assert re.match(r"the \d+ tensors of rank 1 differ from the \d+ ", told[case])
    assert told["complex"].startswith("rank 1 cannot save its full state dict: weight has dtype")
    assert "no tensors" in told["no tensors"]
