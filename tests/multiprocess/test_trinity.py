"""Trinity-RFT's FSDP helpers on real ranks: what they write is served, and when it is announced."""

from pathlib import Path

import pytest
import torch

from syncd.checkpoint.version import read_manifest
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from tests import tiny_language
from tests.multiprocess.following import assert_as_trained, follow, followed, told, trainers
from tests.multiprocess.processes import Daemon, wait_for_step

MODULE = "tests.multiprocess.trinity_ranks"
STEPS = 3


@pytest.mark.parametrize("scenario", ["saving_fsdp", "saving_fsdp2", "beside_verl"])
def test_each_step_that_the_helpers_save_reaches_an_explorer(
    job: Path, tmp_path: Path, scenario: str
) -> None:
    pulled = followed(MODULE, scenario, job, tmp_path, STEPS, world_size=2)
    assert [step for step, _ in pulled] == [1, 2, 3]
    assert_as_trained(pulled, tmp_path / "truth")
    folder = JobLayout(job).version(STEPS)
    assert read_manifest(Storage(), folder).checked == "receipt"
    assert {"config.json", "tokenizer.json"} <= {one.name for one in folder.iterdir()}


def test_the_pointer_moves_when_all_ranks_have_vouched_for_their_shards(
    job: Path, tmp_path: Path
) -> None:
    with trainers(MODULE, "gated", tmp_path, world_size=2) as program:
        program.wait()
        with Daemon(job):
            assert wait_for_step(job, 6).sequence == 1
            ((_, state),) = follow(program, job, tiny_language.model(), 6)
    first, second = told(tmp_path), told(tmp_path, rank=1)
    assert first["before"] == "nothing"
    for facts in (first, second):
        assert facts["after"] == facts["not announced"] == facts["after failure"] == "1"
        assert facts["optimizer"] == "True"
        assert facts["path"].startswith("InvalidSettingsError: step 5 cannot be saved to ")
        assert "global_step_5/actor" in facts["path"]
        assert (
            facts["closed"]
            == "SaveFailedError: this CheckpointCoordinator is closed: make a new one to save"
        )
        assert facts["at last"] == "6"
    assert (
        "rank 1 of 2 has not written its part of the save of step 3, because that rank "
        "failed" in first["failed"]
    )
    assert "no shard" in second["failed"]
    assert "rank 1 of 2" in first["elsewhere"]
    assert "the writer did not write " in second["elsewhere"]
    assert all(torch.equal(value, torch.full_like(value, 6.0)) for value in state.values())


@pytest.mark.parametrize("scenario", ["uploading_fsdp", "uploading_fsdp2"])
def test_a_state_dict_that_is_uploaded_reaches_an_explorer(
    job: Path, tmp_path: Path, scenario: str
) -> None:
    pulled = followed(MODULE, scenario, job, tmp_path, 1, world_size=2)
    assert_as_trained(pulled, tmp_path / "truth")
    for rank in range(2):  # what rank 0 lacks is an error on all
        refused = told(tmp_path, rank)["refused"]
        assert refused.startswith("InvalidSettingsError")
        assert "step 1 cannot be uploaded to NoneType" in refused
    assert "config.json" in {one.name for one in JobLayout(job).version(1).iterdir()}


def test_a_broadcast_brings_the_full_weights_in_the_order_that_was_told(tmp_path: Path) -> None:
    with trainers(MODULE, "broadcasting", tmp_path, world_size=3) as program:
        program.wait()
    received = told(tmp_path, rank=2)
    names = list(tiny_language.model().state_dict())
    assert received == {"fsdp": names, "fsdp2": names}
    assert told(tmp_path) == {"fsdp": len(names), "fsdp2": len(names)}
