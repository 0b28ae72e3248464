"""A real trainer, a real daemon, and two explorers on one stage serve whole saves at once."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from syncd.protocol.names import MANIFEST
from syncd.protocol.records import Latest
from syncd.protocol.reports import DaemonReport
from syncd.storage.job import Job
from tests.deltas import contents
from tests.jobs import read
from tests.multiprocess.delta_ranks import DeltaRank
from tests.multiprocess.explorer_processes import ended, explorer_report, following, serves
from tests.multiprocess.peers import started
from tests.multiprocess.processes import Daemon, read_by, syncd, wait_until

NAMES = ("one", "two")


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_explorers_serve_each_whole_save_before_it_is_a_version(
    job: Path, tmp_path: Path, memory: Path, replicas: int
) -> None:
    layout = Job.at(job).layout

    def served(step: int) -> dict[str, bytes]:
        """The files that both serve, once they do."""

        def is_served() -> bool:
            return all(explorer_report(job, name).step == step for name in NAMES)

        wait_until(is_served, "both serve it")
        one, two = ((tmp_path / name).resolve() for name in NAMES)
        assert one == two
        return contents(one)

    def made(step: int) -> dict[str, bytes]:
        """The files of the version, once there is one."""
        wait_until(lambda: read(Latest, layout.latest).step == step, "it is made")
        return contents(layout.version(read(Latest, layout.latest).sequence))

    with (
        Daemon(job, "--keep", "9") as daemon,
        ExitStack() as stack,
        started(DeltaRank, job, 2 * replicas, "bfloat16", replicas) as ranks,
    ):
        for name in NAMES:
            options = ("--stage", memory, "--link", tmp_path / name)
            stack.enter_context(ended(following(job, name, *options)))
        ranks.all("open", {"deltas": False, "save_timeout": 60})
        ranks.all("train", 1)
        ranks.all("over")
        wait_until(lambda: all(serves(job, name, 1) for name in NAMES), "both serve the first")
        wait_until(lambda: read(DaemonReport, layout.daemon_report).takes_deltas, "it knows them")
        for step in (2, 3, 4):
            ranks.all("train", step)
            ranks.all("over")
            copy, version = served(step), made(step)
            del copy[MANIFEST], version[MANIFEST]
            assert copy == version
        nothing, of_tip = read_by(job, read(Latest, layout.latest).sequence, *NAMES)
        assert nothing == (0, 0)
        assert of_tip[0] > 0
        ranks.all("close")
        daemon.wait_for_log("by the trainer's files", times=2)
        assert "served step 4 ahead of" in syncd("status", job).stdout
        assert "Traceback" not in "".join(daemon.log)
