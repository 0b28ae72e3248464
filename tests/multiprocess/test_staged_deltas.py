"""Deltas between real processes: a daemon that makes them, and followers on two hosts."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from syncd.protocol.names import DELTA
from tests.deltas import contents
from tests.jobs import LEASE_TIME, SmallJob
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    explorer_report,
    said_by_syncd,
    wait_until,
)
from tests.rank_programs import ENVIRONMENT

NAMES = ("host-0", "host-1")
#: float32 elements of the model; each save changes a few.
ELEMENTS = 200_000


class Follower:
    """``syncd follow --stage`` with a folder of its own in memory, as if on a host of its own."""

    def __init__(self, job: Path, name: str, stage: Path, link: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "syncd", "follow", str(job), "--name", name, "--json",
             "--stage", str(stage), "--link", str(link)],
            stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        self._served: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def serves(self, sequence: int) -> None:
        """Wait until it serves a version."""
        while self._served.get(timeout=DEADLINE) < sequence:
            pass

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._served.put(json.loads(line)["version"])

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        self._process.terminate()
        try:
            assert self._process.wait(DEADLINE) == 0
        finally:
            self._process.kill()
            self._listener.join()


@contextmanager
def followers(job: Path, memory: Path, links: Path) -> Iterator[list[Follower]]:
    started: list[Follower] = []
    try:
        for name in NAMES:
            (memory / name).mkdir()
            started.append(Follower(job, name, memory / name, links / name))
        yield started
    finally:
        for follower in started:
            follower.end()


def test_two_hosts_read_a_version_whole_once_and_then_what_changed(
    tmp_path: Path, memory: Path
) -> None:
    """Both are on this host, for which ``auto`` makes none.

    The followers are stopped while the deltas are made: a model this small is copied sooner.
    """
    trainer = SmallJob(tmp_path / "job")
    root, layout = trainer.layout.root, trainer.layout
    values = [float(number) for number in range(ELEMENTS)]
    with (
        Daemon(root, "--deltas", "on", lease_time=LEASE_TIME) as daemon,
        followers(root, memory, tmp_path) as both,
    ):
        trainer.save(1, *values)
        for name, follower in zip(NAMES, both, strict=True):
            follower.serves(1)
            wait_until(lambda n=name: explorer_report(root, n).delta_base == 1, "it has a base")
            follower.stop()
        wait_until(
            lambda: layout.journal.read_text().count('"live"') == len(NAMES),
            "the daemon has read their reports",
        )
        for step in (2, 3, 4):
            values[step * 1000 : step * 1000 + 500] = [0.5 * step] * 500
            trainer.save(step, *values)
            wait_until((layout.delta(step) / DELTA).exists, f"the delta to version {step}")
        for name, follower in zip(NAMES, both, strict=True):
            follower.go_on()
            follower.serves(4)
            assert contents(tmp_path / name) == contents(layout.version(4))
            wait_until(lambda n=name: explorer_report(root, n).sequence == 4, "it has reported")
            reload = explorer_report(root, name).reload
            assert reload is not None
            assert reload.no_delta is None
            assert reload.delta_bytes is not None
            assert reload.full_bytes is not None
            assert 0 < reload.delta_bytes + reload.full_bytes < 4 * ELEMENTS / 50
        assert "Traceback" not in "".join(daemon.log)
        assert "by delta" in said_by_syncd("status", root)
        assert "delta" in said_by_syncd("history", root)
