"""A real trainer, a real daemon, and two explorers on one stage: what they serve is the fold."""

import os
from contextlib import ExitStack
from pathlib import Path

from syncd.protocol.names import MANIFEST
from syncd.protocol.records import Latest
from syncd.protocol.reports import DaemonReport
from syncd.storage.job import Job
from tests.deltas import contents
from tests.jobs import read
from tests.multiprocess.delta_ranks import DeltaRank
from tests.multiprocess.explorer_processes import ended, following, serves
from tests.multiprocess.peers import started
from tests.multiprocess.processes import (
    Daemon,
    read_by,
    said_by_syncd,
    wait_until,
)

NAMES = ("one", "two")


def flip(path: Path) -> None:
    """A byte that no save changes more often than others."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_two_explorers_serve_each_save_before_it_is_a_version(
    job: Path, tmp_path: Path, memory: Path
) -> None:
    layout = Job.at(job).layout

    def folded(step: int) -> dict[str, bytes]:
        """The files of the full version, once there is one."""
        wait_until(lambda: read(Latest, layout.latest).sequence == step, "it is folded")
        return contents(layout.version(step))

    with (
        Daemon(job, "--keep", "9") as daemon,
        ExitStack() as stack,
        started(DeltaRank, job, 2, "bfloat16") as ranks,
    ):
        for name in NAMES:
            options = ("--stage", memory, "--link", tmp_path / name)
            stack.enter_context(ended(following(job, name, *options)))
        ranks.all("open", {"deltas": True, "save_timeout": 60})
        ranks.all("train", 1)
        ranks.all("over")
        wait_until(lambda: all(serves(job, name, 1) for name in NAMES), "both serve the first")
        wait_until(
            lambda: read(DaemonReport, layout.daemon_report).takes_deltas, "deltas are offered"
        )
        for step in (2, 3, 4):
            if step == 3:
                flip((tmp_path / "one").resolve() / "model.safetensors")
            ranks.all("train", step)
            ranks.all("over")
            nothing, (of_version, of_deltas) = read_by(job, step, *NAMES)
            served = contents((tmp_path / "one").resolve())
            assert (tmp_path / "one").resolve() == (tmp_path / "two").resolve()
            # One of them has read the deltas, and once the version, too.
            assert nothing == (0, 0)
            assert of_deltas > 0
            assert (of_version > 0) == (step == 3)
            whole = folded(step)
            del served[MANIFEST], whole[MANIFEST]
            assert served == whole
        ranks.all("close")
        assert "by delta" in said_by_syncd("status", job)
        assert "Traceback" not in "".join(daemon.log)
