"""Folds of deltas are equal to merges of the same steps, whichever rank or daemon dies."""

from pathlib import Path
from random import Random

import pytest

from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from tests.delta_saves import follower, full, is_delta
from tests.deltas import contents
from tests.jobs import SmallJob
from tests.merging import assert_equal, loaded
from tests.multiprocess.delta_ranks import DeltaRank, StageRank
from tests.multiprocess.peers import started
from tests.multiprocess.processes import Daemon, dying_at, epoch_content, wait_until

DELTAS = {"deltas": True, "save_timeout": 60}
OPTIONS = ("--keep", "99", "--keep-deltas", "1")
#: A phase → the rename at which a rank dies; and those at the last of which the daemon dies, having
#: met the others. None: it is killed from outside, when the other one has died.
PHASES: dict[str, tuple[str | None, list[str]]] = {
    "announce": ("latest_state_dict", []),
    "delta": ("world_size_4", ["deltas/d"]),
    "tip": (None, ["deltas/d", ".syncd/LATEST"]),
    "fold": (None, ["published/v"]),
    "prune": (None, ["doomed/global_step"]),
}


@pytest.mark.parametrize(
    ("dtype", "saving", "rounds"),
    [
        ("float32", {"sync_dtype": "bf16"}, 1),
        pytest.param("bfloat16", {}, 2, marks=pytest.mark.deep),
    ],
)
def test_each_fold_has_the_files_of_a_merge(
    job: Path, tmp_path: Path, dtype: str, saving: dict[str, str], rounds: int
) -> None:
    random, step, deltas = Random(rounds), 0, set[int]()
    here, other = SmallJob(job), SmallJob(tmp_path / "whole")
    pointer = here.state_pointer

    def is_tip() -> bool:
        if not here.layout.latest.exists() or not here.daemon_says.takes_deltas:
            return False
        return (here.latest.tip or here.latest).step == step

    def is_folded() -> bool:
        return not pointer.exists() or here.latest.step == int(pointer.read_text())

    with follower(here, "tip"), follower(here, "whole", tip=False):
        for phase in [*random.sample([*PHASES], 5) * rounds, None]:
            place, words = PHASES[phase] if phase else (None, [])
            dying = dying_at(*words, after=random.choice([True, False]))
            with (
                Daemon(job, *OPTIONS, program=dying) as daemon,
                started(DeltaRank, job, 4, dtype) as ranks,
            ):
                wait_until(lambda: is_folded() or not daemon.running, "the last save is folded")
                ranks.all("open", DELTAS, saving)
                ranks.all("open_whole", other.root, saving)
                for _ in range(3):
                    step += 1
                    ranks.all("train", step)
                    ranks.all("over")
                    if is_delta(here, step):
                        deltas.add(step)
                    wait_until(lambda: is_tip() or not daemon.running, f"{step} is a delta")
                if phase is None:
                    ranks.all("close_whole")
                    ranks.all("close")
                    wait_until(is_folded, "the last step is full")
                    break
                if words:
                    wait_until(lambda: not daemon.running, f"it dies: {phase}")
                step += 1
                victim = ranks[0 if phase == "announce" else random.randrange(4)]
                if place is not None:
                    victim("die_at", "rename", place)
                for peer in ranks:
                    peer.tell("train", step)
                if place is None:
                    victim.kill()
                victim.wait_until_killed()
                daemon.kill()
    assert here.latest.no_deltas is None
    assert not any(epoch_content(job).values())
    folds = set()
    with other.daemon(DaemonConfig(keep=99, prune_steps=False)) as merging:
        for name in here.versions:
            version = here.layout.published / name
            step = read_manifest(here.storage, version).step
            other.point(step)
            merging.rounds(2, 1.0)
            assert other.latest.step == step
            made, merged = contents(version), contents(other.version(other.latest.sequence))
            assert made.pop("manifest.json") != merged.pop("manifest.json")
            assert made == merged
            folds |= {step} & deltas
    assert len(folds) >= 2 * rounds


@pytest.mark.parametrize("world_size", [3, 4])
def test_pipeline_stages_are_saved_as_deltas_folded_and_resumed(
    job: Path, tmp_path: Path, world_size: int
) -> None:
    here, other = SmallJob(job), SmallJob(tmp_path / "whole")
    with (
        follower(here, "tip"),
        follower(here, "whole", tip=False),
        Daemon(job, *OPTIONS),
        started(StageRank, job, world_size, "bfloat16") as ranks,
    ):
        ranks.all("open", DELTAS)
        ranks.all("open_whole", other.root)
        for step in (1, 2, 3):
            ranks.all("train", step)
            ranks.all("over")
            wait_until(
                lambda step=step: here.layout.latest.exists() and here.latest.step == step,
                f"{step} is folded",
            )
            wait_until(lambda: here.daemon_says.takes_deltas, "the next save may be a delta")
            assert is_delta(here, step) is (step > 1)
            made = loaded(here.layout.version(here.latest.sequence))
            assert_equal(made, full(other, step))
        ranks.all("checkpoint_now", 3)
        ranks.all("over")
        ranks.all("resume", 3)
        ranks.all("save_whole", 4)
        assert_equal(full(other, 4), made)
