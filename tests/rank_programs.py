"""Programs that fork real ranks, run to their end: each once for all workers of a test run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import FileLock

if TYPE_CHECKING:
    import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
ENVIRONMENT: Final = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
#: Seconds: a guard against hanging, within that of a test; ranks wait for one that fails.
DEADLINE: Final = 240.0
#: What a program has said on stderr, beside what it wrote.
SAID: Final = "said.txt"


def written_by(
    factory: pytest.TempPathFactory, module: str, *, check: bool = True, **environment: str
) -> Path:
    """The folder that ``python -m MODULE FOLDER`` has filled; whoever asks first runs it.

    Tests of other workers read there too: nobody may change what is there.

    Args:
        factory: pytest's.
        module: what is run.
        check: whether it must end well. What it has said is in :data:`SAID` in any case.
        environment: added to this process's own.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker's own is inside the run's
        base = base.parent
    name = module.rpartition(".")[2]
    folder, made = base / name, base / f"{name}.made"
    with FileLock(base / f"{name}.lock"):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            run_ranks(module, folder, said=folder / SAID, check=check, **environment)
            made.touch()
    return folder


def run_ranks(
    module: str, *arguments: object, said: Path, check: bool = True, **environment: str
) -> None:
    """Run a program to its end, and end the ranks with it; what it has said is in a file."""
    with said.open("wb") as stderr:
        launcher = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env=ENVIRONMENT | environment,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        status = launcher.wait(DEADLINE)
    finally:
        if launcher.poll() is None:  # ranks that wait for each other outlive it
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    words = said.read_text(errors="replace")[-6000:]
    assert status == 0 or not check, f"{module} ended with {status}: {words}"
