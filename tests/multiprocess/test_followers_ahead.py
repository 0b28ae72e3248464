"""A real trainer, a real daemon, and two explorers on one stage: what they serve is the fold."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from syncd.protocol.names import MANIFEST
from syncd.protocol.records import Latest
from syncd.protocol.reports import DaemonReport
from syncd.storage.job import Job
from tests.deltas import contents
from tests.jobs import read
from tests.multiprocess.link_ranks import LinkRank
from tests.multiprocess.peers import Peer, Ranks
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    read_by,
    said_by_syncd,
    wait_until,
)
from tests.rank_programs import ENVIRONMENT

NAMES = ("one", "two")
WORLD_SIZE = 2


class Follower:
    """``syncd follow --stage``."""

    def __init__(self, job: Path, name: str, stage: Path, link: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "syncd", "follow", str(job), "--name", name, "--json",
             "--stage", str(stage), "--link", str(link)],
            stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        self._served: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def serves(self) -> int:
        """Wait until it serves another version; returns the version."""
        return self._served.get(timeout=DEADLINE)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._served.put(json.loads(line)["version"])

    def end(self) -> None:
        self._process.terminate()
        try:
            assert self._process.wait(DEADLINE) == 0
        finally:
            self._process.kill()
            self._listener.join()


@contextmanager
def followers(job: Path, stage: Path, links: Path) -> Iterator[list[Follower]]:
    started: list[Follower] = []
    try:
        started += (Follower(job, name, stage, links / name) for name in NAMES)
        yield started
    finally:
        for follower in started:
            follower.end()


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
        followers(job, memory, tmp_path) as both,
        ExitStack() as stack,
    ):
        ranks = Ranks()
        for rank in range(WORLD_SIZE):
            ranks.append(Peer(LinkRank, job, tmp_path / "store", rank, WORLD_SIZE, "bfloat16"))
            stack.callback(ranks[-1].end)
        ranks.all("open", {"deltas": True, "save_timeout": 60})
        ranks.all("train", 1)
        ranks.all("over")
        assert [follower.serves() for follower in both] == [1, 1]
        wait_until(lambda: read(DaemonReport, layout.daemon_report).links, "links are offered")
        for step in (2, 3, 4):
            if step == 3:
                flip((tmp_path / "one").resolve() / "model.safetensors")
            ranks.all("train", step)
            ranks.all("over")
            assert [follower.serves() for follower in both] == [step, step]
            served = contents((tmp_path / "one").resolve())
            assert (tmp_path / "one").resolve() == (tmp_path / "two").resolve()
            # One of them has read the links, and once the version, too.
            nothing, (of_version, of_links) = read_by(job, step, *NAMES)
            assert nothing == (0, 0)
            assert of_links > 0
            assert (of_version > 0) == (step == 3)
            whole = folded(step)
            del served[MANIFEST], whole[MANIFEST]
            assert served == whole
        ranks.all("close")
        assert "by delta" in said_by_syncd("status", job)
        loads = json.loads(said_by_syncd("history", "--json", job))["versions"][-1]["live"]
        assert any(one["delta_bytes"] and "rebuild" in one["phases"] for one in loads)
        assert "Traceback" not in "".join(daemon.log)
