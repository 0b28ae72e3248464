"""Folds of links are equal to merges of the same steps, whichever rank and daemon die meanwhile."""

from pathlib import Path
from random import Random

import pytest

from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from tests.deltas import contents
from tests.jobs import SmallJob
from tests.link_saves import follower, is_link
from tests.multiprocess.link_ranks import LinkRank
from tests.multiprocess.peers import started
from tests.multiprocess.processes import Daemon, dying_at, epoch_content, wait_until

DELTAS = {"deltas": True, "save_timeout": 60}
OPTIONS = ("--keep", "99", "--keep-deltas", "1")
#: A phase → the rename at which a rank dies; and those at the last of which the daemon dies, having
#: met the others. None: it is killed from outside, when the other one has died.
PHASES: dict[str, tuple[str | None, list[str]]] = {
    "announce": ("latest_state_dict", []),
    "link": ("world_size_4", ["deltas/d"]),
    "ahead": (None, ["deltas/d", ".syncd/LATEST"]),
    "fold": (None, ["fold-v"]),
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
    random, step, linked = Random(rounds), 0, set[int]()
    here, other = SmallJob(job), SmallJob(tmp_path / "whole")
    pointer = here.state_pointer

    def is_linked() -> bool:
        if not here.layout.latest.exists() or not here.daemon_says.links:
            return False
        return (here.latest.ahead or here.latest).step == step

    def is_folded() -> bool:
        return not pointer.exists() or here.latest.step == int(pointer.read_text())

    with follower(here, "ahead"), follower(here, "whole", ahead=False):
        for phase in [*random.sample([*PHASES], 5) * rounds, None]:
            place, words = PHASES[phase] if phase else (None, [])
            dying = dying_at(*words, after=random.choice([True, False]))
            with (
                Daemon(job, *OPTIONS, program=dying) as daemon,
                started(LinkRank, job, 4, dtype) as ranks,
            ):
                wait_until(lambda: is_folded() or not daemon.running, "the last save is folded")
                ranks.all("open", DELTAS, saving)
                ranks.all("open_whole", other.root, saving)
                for _ in range(3):
                    step += 1
                    ranks.all("train", step)
                    ranks.all("over")
                    if is_link(here, step):
                        linked.add(step)
                    wait_until(lambda: is_linked() or not daemon.running, f"{step} is linked")
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
    assert here.latest.closed is None
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
            folds |= {step} & linked
    assert len(folds) >= 2 * rounds
