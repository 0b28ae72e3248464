"""Links of real ranks, linked and folded by a daemon, are equal to merges of the same steps."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.protocol.names import link_name, shard_name
from tests.jobs import SmallJob
from tests.link_saves import offered
from tests.made_deltas import work
from tests.multiprocess.link_ranks import LinkRank
from tests.multiprocess.peers import Peer, Ranks
from tests.storages import Clock

DELTAS = {"deltas": True, "save_timeout": 60}
CONFIG = DaemonConfig(keep=99, prune_steps=False, refuse_nonfinite=False)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


@pytest.mark.parametrize(
    ("dtype", "saving"), [("bfloat16", {}), ("float32", {"sync_dtype": "bf16"})]
)
def test_each_fold_has_the_files_of_a_merge(
    tmp_path: Path, dtype: str, saving: dict[str, str]
) -> None:
    job, other = SmallJob(tmp_path / "linked"), SmallJob(tmp_path / "whole")
    clock = Clock()
    with offered(job.layout.root), ExitStack() as stack:
        ranks = Ranks()
        for rank in range(4):
            ranks.append(Peer(LinkRank, job.layout.root, tmp_path / "one", rank, 4, dtype, 1))
            stack.callback(ranks[-1].end)
        assert ranks.all("open", DELTAS, saving) == [[]] * 4
        ranks.all("open_whole", other.layout.root, saving)
        for step in range(1, 7):
            ranks.all("train", step)
            ranks.all("over")
        ranks.all("close_whole")
        ranks.all("close")
    assert (job.layout.actor(3) / link_name(4, 3)).exists()
    assert not (job.layout.actor(3) / shard_name(4, 3)).exists()
    with job.daemon(CONFIG, clock=clock, deltas=work()) as loop, other.daemon(CONFIG) as merging:
        for step in range(1, 7):
            job.point(step)
            for _ in range(5):
                loop.run_once()
                clock.advance(20 * CONFIG.tick)
            other.point(step)
            merging.run_once()
            merging.run_once()
            assert job.latest.step == other.latest.step == step
            one = files(job.layout.version(job.latest.sequence))
            assert one == files(other.layout.version(other.latest.sequence))
