"""The process that makes deltas: a version is published in time, whatever happens to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from explorer_hooks.reader import Reader
from syncd.deltas.delta_folder import read_delta, verify_delta
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import parse
from syncd.protocol.reports import DeltaProgress
from syncd.storage.fsio import Storage
from tests.crash.straced import why_not
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    epoch_content,
    wait_for_step,
    wait_until,
)
from tests.multiprocess.saves import trainer

ON = ("--deltas", "on", "--keep", "1")
SIZE = 100_000


class Sparse(nn.Module):
    """A tensor of which one element in a hundred changes from save to save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))


def save(job: Path, model: Sparse, step: int) -> None:
    with torch.no_grad():
        model.weight[step::100] = float(step)
    with trainer(job, model) as hook:
        hook.after_step(step)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    return folder


def delta_of(job: Path, sequence: int) -> float:
    """Wait for a delta; returns the part of the elements that differ."""
    folder = JobLayout(job).delta(sequence)
    wait_until(folder.exists, f"{folder} is there")
    delta = read_delta(Storage(), folder)
    verify_delta(Storage(), folder, delta)
    return delta.changed / delta.elements


def progress(job: Path) -> DeltaProgress | None:
    path = JobLayout(job).delta_progress
    try:
        return parse(DeltaProgress, path.read_bytes(), path)
    except FileNotFoundError:
        return None


def said(job: Path, sequence: int, state: str) -> bool:
    found = progress(job)
    return found is not None and (found.sequence, found.state) == (sequence, state)


def children(daemon: Daemon) -> list[int]:
    """The processes that make deltas for a daemon."""
    found = []
    for path in Path(f"/proc/{daemon.pid}/task").glob("*/children"):
        try:
            pids = path.read_text().split()
            found += [p for p in pids if b"delta_child" in Path(f"/proc/{p}/cmdline").read_bytes()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [int(pid) for pid in found]


def child_of(daemon: Daemon, signalled: int) -> int:
    """Send a signal to the child as soon as there is one."""
    while True:
        (pid, *_) = wait_until(partial(children, daemon), "a child is at work")
        try:
            os.kill(pid, signalled)
        except ProcessLookupError:
            continue
        return pid


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_each_version_gets_a_delta_and_the_daemon_never_imports_numpy(job: Path) -> None:
    model = Sparse()
    with Daemon(job, *ON) as daemon:
        save(job, model, 1)
        assert wait_for_step(job, 1).delta_from is None
        for step in (2, 3):
            save(job, model, step)
            assert wait_for_step(job, step).delta_from == step - 1
            assert delta_of(job, step) == 0.01
            wait_until(partial(said, job, step, "made"), "it is said")
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "numpy" not in maps
        assert "zstandard" not in maps
        # The base stayed for as long as it was needed.
        wait_until(lambda: not JobLayout(job).version(2).exists(), "version 2 is pruned")
        assert daemon.terminate() == 0
    with Reader(job, "reader") as reader:
        version = reader.next_version(0, DEADLINE)
        version.verify()
        version.release()


def goes_on(job: Path, model: Sparse, daemon: Daemon, step: int) -> None:
    """Once no work on a delta goes on any more, the next version has a delta again."""
    wait_until(lambda: (last := progress(job)) and last.state != "making", "it has ended")
    wait_until(lambda: not any(epoch_content(job).values()), "nothing is left in the room")
    daemon_round(job)
    save(job, model, step)
    wait_for_step(job, step)
    assert delta_of(job, step) == 0.01
    assert not JobLayout(job).delta(2).exists()
    assert daemon.terminate() == 0


def test_a_child_that_is_killed_costs_its_delta_and_one_warning(job: Path) -> None:
    model = Sparse()
    with Daemon(job, *ON) as daemon:
        save(job, model, 1)
        wait_for_step(job, 1)
        save(job, model, 2)
        child_of(daemon, signal.SIGKILL)
        wait_for_step(job, 2)
        line = daemon.wait_for_log("no delta to version 2 from version 1")
        assert "SIGKILL" in line
        assert said(job, 2, "none")
        goes_on(job, model, daemon, 3)


def test_a_child_that_is_stopped_shows_no_sign_of_life_and_is_ended(job: Path) -> None:
    model = Sparse()
    with Daemon(job, *ON) as daemon:
        save(job, model, 1)
        wait_for_step(job, 1)
        save(job, model, 2)
        pid = child_of(daemon, signal.SIGSTOP)
        wait_for_step(job, 2)
        path = JobLayout(job).delta_progress
        first = path.stat()

        def has_changed() -> bool:
            return not os.path.samestat(first, path.stat())

        save(job, model, 3)
        wait_for_step(job, 3)
        # Its base stays, though --keep is 1, for as long as the work goes on.
        assert JobLayout(job).version(1).exists() or has_changed()
        wait_until(has_changed, "the daemon gives the delta up")
        assert parse(DeltaProgress, path.read_bytes(), path).state == "none"
        wait_until(partial(is_gone, pid), "the child has ended")
        goes_on(job, model, daemon, 4)


def daemon_round(job: Path) -> None:
    """Wait for another report of the daemon."""
    path = JobLayout(job).daemon_report
    before = path.stat().st_ino
    wait_until(lambda: path.stat().st_ino != before, "the daemon reports again")


def test_a_child_that_is_slow_makes_its_delta_late(job: Path) -> None:
    model = Sparse()
    with Daemon(job, *ON) as daemon:
        save(job, model, 1)
        wait_for_step(job, 1)
        save(job, model, 2)
        pid = child_of(daemon, signal.SIGSTOP)
        wait_for_step(job, 2)
        assert not JobLayout(job).delta(2).exists()
        os.kill(pid, signal.SIGCONT)
        assert delta_of(job, 2) == 0.01
        assert daemon.terminate() == 0


@pytest.mark.parametrize("end", ["killed", "terminated"])
def test_the_child_ends_with_its_daemon_and_the_next_one_begins_clean(job: Path, end: str) -> None:
    model = Sparse()
    with Daemon(job, *ON) as daemon:
        save(job, model, 1)
        wait_for_step(job, 1)
        save(job, model, 2)
        pid = child_of(daemon, signal.SIGSTOP)
        wait_for_step(job, 2)
        if end == "killed":
            daemon.kill()
            os.kill(pid, signal.SIGCONT)  # it sees that nobody listens
        else:
            assert daemon.terminate() == 0
    wait_until(partial(is_gone, pid), "the child has ended")
    with Daemon(job, *ON) as daemon:
        daemon.wait_for_log("in epoch")
        wait_until(lambda: not any(epoch_content(job).values()), "nothing is left in any room")
        assert not JobLayout(job).delta(2).exists()
        assert progress(job) is None
        save(job, model, 3)
        wait_for_step(job, 3)
        assert delta_of(job, 3) == 0.01
        assert daemon.terminate() == 0


def test_a_version_that_changes_all_over_has_no_delta(job: Path) -> None:
    model = Sparse()
    with Daemon(job, *ON) as daemon:
        save(job, model, 1)
        wait_for_step(job, 1)
        with torch.no_grad():
            model.weight.normal_()
        save(job, model, 2)
        wait_for_step(job, 2)
        daemon.wait_for_log("no delta to version 2 from version 1")
        assert not JobLayout(job).delta(2).exists()
        save(job, model, 3)
        wait_for_step(job, 3)
        assert delta_of(job, 3) == 0.01
        assert daemon.terminate() == 0


@contextmanager
def traced(pid: int, log: Path) -> Iterator[None]:
    """Write down what a process and its children rename and execute."""
    calls = "trace=execve,rename,renameat,renameat2"
    with subprocess.Popen(
        ["strace", "-f", "-s", "300", "-o", str(log), "-e", calls, "-e", "signal=none",
         "-p", str(pid)],
        stderr=subprocess.PIPE,
        text=True,
    ) as tracer:  # fmt: skip
        assert tracer.stderr is not None
        assert "attached" in tracer.stderr.readline()
        try:
            yield
        finally:
            tracer.terminate()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "strace works")
def test_a_trace_shows_that_the_child_starts_after_latest_was_renamed(
    job: Path, tmp_path: Path
) -> None:
    model, log = Sparse(), tmp_path / "trace"
    with Daemon(job, *ON) as daemon:
        save(job, model, 1)
        wait_for_step(job, 1)
        with traced(daemon.pid, log):
            for step in (2, 3):
                save(job, model, step)
                wait_for_step(job, step)
                delta_of(job, step)
        assert daemon.terminate() == 0
    kinds = {
        "L": r'rename.*"LATEST"\) = 0',
        "C": r"execve\(.*delta_child",
        "D": r'rename.*"d00000\d"\) = 0',
    }
    lines = log.read_text().splitlines()
    order = [kind for line in lines for kind, seen in kinds.items() if re.search(seen, line)]
    assert "".join(order) == "LCDLCD"


def test_on_without_the_extra_is_refused_with_the_command(job: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import sys, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "found = lambda name, *more: None if name == 'zstandard' else real(name, *more)\n"
        "importlib.util.find_spec = found\n"
    )
    run: Callable[..., subprocess.CompletedProcess[str]] = partial(
        subprocess.run,
        ["python", "-m", "syncd", "run", str(job), "--deltas", "on"],
        env={**os.environ, "PYTHONPATH": f"{blocked}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    done = run()
    assert done.returncode == 2
    assert "pip install 'syncd[deltas]'" in done.stderr
    assert not (job / ".syncd").exists()
