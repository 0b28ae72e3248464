"""Programs that fork real ranks, run to their end: each once for all workers of a test run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from tests.forked_programs import ROOT, Forked

if TYPE_CHECKING:
    import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
#: Seconds: a guard against hanging, within that of a test; ranks wait for one that fails.
DEADLINE = 240.0
#: What a program has said on stderr, beside what it wrote.
SAID = "said.txt"


def written_by(
    factory: pytest.TempPathFactory, module: str, *, check: bool = True, **environment: str
) -> Path:
    """The folder that ``python -m MODULE FOLDER`` has filled; whoever asks first runs it.

    Tests of other workers read there too: nobody may change what is there. One that fails is not
    run again either: it fails whoever asks, with the same words.

    Args:
        factory: pytest's.
        module: what is run.
        check: whether it must end well. What it has said is in :data:`SAID` in any case.
        environment: added to this process's own; the program has an interpreter of its own then.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker's own is inside the run's
        base = base.parent
    name = module.rpartition(".")[2]
    folder, ended = base / name, base / f"{name}.ended"
    with FileLock(base / f"{name}.lock"):
        if not ended.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                run_ranks(module, folder, said=folder / SAID, check=check, **environment)
            except AssertionError as error:
                ended.write_text(str(error))
                raise
            ended.touch()
    failure = ended.read_text()
    assert not failure, failure
    return folder


def run_ranks(
    module: str, *arguments: object, said: Path, check: bool = True, **environment: str
) -> None:
    """Run a program to its end, and end the ranks with it; what it has said is in a file."""
    if environment:  # which modules may read as they are imported
        status = _run_afresh(module, arguments, said, environment)
    else:
        with forked(module, *arguments, said=said) as launcher:
            status = launcher.wait(DEADLINE)
    words = said.read_text(errors="replace")[-6000:]
    assert status is not None, f"{module} has not ended in {DEADLINE:g} s: {words}"
    assert status == 0 or not check, f"{module} ended with {status}: {words}"


@contextlib.contextmanager
def forked(module: str, *arguments: object, said: Path) -> Iterator[Forked]:
    """A program that runs beside the block, and ends with it, and its ranks too."""
    with open(os.devnull, "rb") as nothing, said.open("wb") as stderr:
        files = nothing.fileno(), stderr.fileno(), stderr.fileno()
        launcher = Forked(module, *arguments, files=files)
    try:
        yield launcher
    finally:
        launcher.end()  # ranks that wait for each other outlive it


def _run_afresh(
    module: str, arguments: tuple[object, ...], said: Path, environment: dict[str, str]
) -> int | None:
    """The same by an interpreter; returns None if it has not ended in time."""
    with said.open("wb") as stderr:
        launcher = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env=ENVIRONMENT | environment,
            stderr=stderr,
            start_new_session=True,
        )
    status = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = launcher.wait(DEADLINE)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    return status
