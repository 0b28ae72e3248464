"""What ``docs/getting-started.md`` has people type, in three terminals and a fourth."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.doc_blocks import ROOT, blocks
from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, newest, report, wait_until
from tests.programs import completed

PAGE = "getting-started.md"
INSTALL, MAKE, RUN, TRAIN, EXPLORE, LOOK, KILL, RUN_AGAIN, LOOK_AGAIN, CLEAN = blocks(PAGE, "sh")
FILES = dict(zip(("model.py", "train.py", "explore.py"), blocks(PAGE), strict=True))
#: What ``pip install`` puts beside Python.
PROGRAMS = {"python": "", "syncd": "-m syncd"}
#: As many steps as it takes to kill a daemon in between; the page has time to look at it.
STEPS = 6
LONG = 3 * DEADLINE


class Terminal:
    """A shell in a folder, which finds what ``pip install`` would have put there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, module in PROGRAMS.items():
            program = bin_folder / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            program.chmod(0o755)
        path = f"{bin_folder}:{os.environ['PATH']}"
        self._env = {**ENVIRONMENT, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}

    def run(self, block: str) -> str:
        """What a block prints; it must end well."""
        done = completed(["bash", "-ec", block], cwd=self.folder, env=self._env, timeout=LONG)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def started(self, command: str) -> Iterator[Running]:
        """A command that goes on; what is left of it ends with the ``with`` block."""
        running = Running(
            subprocess.Popen(
                ["bash", "-ec", f"exec {command}"],
                cwd=self.folder,
                env=self._env,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        try:
            yield running
        finally:
            running.end()


class Running:
    """A program that goes on in a terminal, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def status(self) -> int:
        """Its exit status, once it has ended and all that it has printed is there."""
        status = self._process.wait(LONG)
        self._listener.join(LONG)
        return status

    def ctrl_c(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them have ended
        self._process.wait(DEADLINE)
        self._listener.join(DEADLINE)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self.lines.extend(iter(lines.readline, ""))


def fewer(block: str) -> str:
    """The same command of fewer and shorter steps."""
    program, found, seconds = block.strip().partition(" 300")
    assert found
    return f"{program} {STEPS} {'0.3' if seconds else ''}"


def numbers(pattern: str, lines: list[str]) -> list[float]:
    """The one number of each line."""
    return [float(number) for line in lines for number in re.findall(pattern, line)]


def works(job: Path, epoch: int) -> bool:
    found = report(job)
    return found is not None and found.epoch == epoch


def test_what_a_newcomer_types_trains_serves_and_outlives_a_daemon(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.run(MAKE)
    terminal.folder = tmp_path / "first"
    for name, text in FILES.items():
        assert f"`{name}`" in (ROOT / "docs" / PAGE).read_text()
        (terminal.folder / name).write_text(text)
    job = terminal.folder / "job"

    with (
        terminal.started(fewer(TRAIN)) as trainer,
        terminal.started(fewer(EXPLORE)) as explorer,
    ):
        with terminal.started(RUN) as daemon:
            wait_until(lambda: explorer.lines, "the explorer has a version", LONG)
            seen = terminal.run(LOOK)
            assert "explorer-0" in seen
            assert "announced step" in seen
            terminal.run(KILL)
            assert daemon.status() == -signal.SIGKILL
        assert trainer.status() == 0, "nobody waits for the daemon"
        with terminal.started(RUN_AGAIN) as daemon:
            # Where much else is done here, all was published before the first one was killed.
            wait_until(lambda: works(job, 2), "the second daemon works")
            assert explorer.status() == 0
            assert newest(job).step == STEPS
            daemon.ctrl_c()
            assert daemon.status() == 0
    losses = numbers(r"loss ([\d.]+), stood still \d+ ms$", trainer.lines)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    steps = numbers(r"^step (\d+): after 3, 4, 5, 6 comes \d+$", explorer.lines)
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS

    seen = terminal.run(LOOK_AGAIN)
    assert "explorer-0" in seen
    terminal.run(CLEAN)
    assert not terminal.folder.exists()
