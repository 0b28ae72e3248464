"""A shell for what a page has people type: what it prints, and what goes on in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.doc_blocks import ROOT
from tests.multiprocess.processes import DEADLINE, ENVIRONMENT
from tests.programs import completed

LONG = 3 * DEADLINE
#: What ``pip install`` puts beside Python.
_INSTALLED = {
    "python": f'exec {sys.executable} "$@"',
    "syncd": f'exec {sys.executable} -m syncd "$@"',
}


class Terminal:
    """A shell in a folder, which finds what ``pip install`` would have put there.

    Args:
        folder: where commands run.
        programs: by name, the scripts of ``sh`` that stand in for what the machine has not.
    """

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, script in {**_INSTALLED, **programs}.items():
            program = bin_folder / name
            program.write_text(f"#!/bin/sh\n{script}\n")
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
