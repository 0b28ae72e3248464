"""Trainers that save with torch.distributed.checkpoint, and a daemon."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from syncd.checkpoint.version import read_manifest
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import STATE_POINTER
from syncd.storage.fsio import Storage
from tests.dcp import Checkpoint, floats, small
from tests.jobs import SmallJob
from tests.merging import assert_equal
from tests.multiprocess.dcp_trainer import KILLED_AT, train
from tests.multiprocess.peers import forked
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    newest,
    wait_for_step,
    wait_until,
)
from tests.shards import Built, Named


def test_what_the_page_says_to_paste_is_served_until_a_rank_is_killed(
    job: Path, tmp_path: Path
) -> None:
    layout = JobLayout(job)
    (tmp_path / "truth").mkdir()
    given = (job, *(tmp_path / name for name in ("truth", "own", "rendezvous")))
    with Daemon(job, "--keep", "9") as daemon, forked(train, *given) as processes:
        for process in processes:
            process.join(3 * DEADLINE)
            assert process.exitcode  # one was killed, and the other noticed
        for sequence in range(1, KILLED_AT):
            version = layout.version(sequence)
            assert read_manifest(Storage(), version).checked == "crc32"
            truth = load_file(tmp_path / "truth" / f"{sequence}.safetensors")
            assert_equal(load_file(version / "model.safetensors"), truth)
        # A model alone went, and what its trainer keeps itself; the only copy of an optimizer not.
        wait_until(
            lambda: not any(layout.step(step).exists() for step in (1, 2, 3)), "they are pruned"
        )
        assert layout.step(4).exists()
        assert (tmp_path / "own" / "step-3" / ".metadata").exists()
        # The save in which a rank was killed is no save, whoever may point to it.
        assert sorted(path.suffix for path in layout.actor(KILLED_AT).iterdir()) == [".distcp"] * 2
        (job / STATE_POINTER).write_text(str(KILLED_AT))
        daemon.wait_for_log("has no .metadata yet")
        assert newest(job).step == KILLED_AT - 1


def test_a_checkpoint_that_was_made_to_do_harm_is_quarantined_and_the_next_one_served(
    job: Path, tmp_path: Path
) -> None:
    layout = JobLayout(job)
    with Daemon(job, "--dcp-prefix", "actor.") as daemon:
        evil = Built(Named("os", "system"), (f"touch {tmp_path}/ran",))
        small().write(layout.actor(1), version=evil)
        (job / STATE_POINTER).write_text("1")
        daemon.wait_for_log("quarantined step")
        told = SmallJob(job).refused
        assert told.error == "ShardFormatError"
        assert "asks for os.system, which is refused. No code was run" in told.reason
        checkpoint = Checkpoint()
        checkpoint.add(("actor", "weight"), floats(1, 2), (2,))
        checkpoint.add(("critic", "weight"), floats(3), (1,))
        checkpoint.write(layout.actor(2))
        (job / STATE_POINTER).write_text("2")
        wait_for_step(job, 2)
        (merged,) = layout.version(1).glob("*.safetensors")
        assert_equal(load_file(merged), {"weight": torch.tensor([1.0, 2.0])})
    assert not (tmp_path / "ran").exists()
    # What holds more than a model, and what was never published, stays.
    assert layout.step(1).exists()
    assert layout.step(2).exists()
