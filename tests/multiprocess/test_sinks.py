"""Nobody who reads a command's output, or does not read it, can block the command."""

import fcntl
import json
import os
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, wait_for_step, wait_until
from tests.multiprocess.saves import Constant, save
from tests.ports import free_port

SYNCD = sys.executable, "-m", "syncd"


def full_pipe() -> tuple[int, int]:
    """The two ends of a pipe that nobody reads."""
    out, end = os.pipe()
    os.write(end, bytes(fcntl.fcntl(end, fcntl.F_GETPIPE_SZ)))
    return out, end


def closed_pipe() -> tuple[int, int]:
    out, end = os.pipe()
    os.close(out)
    return os.open(os.devnull, os.O_RDONLY), end


def stopped_terminal() -> tuple[int, int]:
    """As by Ctrl-S."""
    out, end = os.openpty()
    termios.tcflow(end, termios.TCOOFF)
    return out, end


def full_disk() -> tuple[int, int]:
    return os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)


def is_served(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=DEADLINE):
        return True
    return False


@pytest.mark.parametrize("sink", [full_pipe, closed_pipe, stopped_terminal, full_disk])
def test_a_sink_that_takes_nothing_blocks_no_command(
    sink: Callable[[], tuple[int, int]], tmp_path: Path
) -> None:
    job, link, ends, port = tmp_path / "job", tmp_path / "link", sink(), free_port()
    job.mkdir()
    commands = (
        ["run", job, "--tick", "0.2"],
        ["follow", job, "--name", "e", "--link", link, "--json"],
        ["web", job, "--port", port],
    )
    processes = [
        subprocess.Popen(
            [*SYNCD, *map(str, command)], stdout=ends[1], stderr=ends[1], env=ENVIRONMENT
        )
        for command in commands
    ]
    try:
        for step in (1, 2):
            save(job, Constant(), step)
            wait_for_step(job, step)
            wait_until(lambda: link.resolve().name == f"v{step:06}", "it is followed")  # noqa: B023 # called at once
        wait_until(lambda: is_served(port), "the page is served")
        for process in processes:
            process.terminate()
        assert [process.wait(DEADLINE) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for end in ends:
            os.close(end)


#: More than the child and two pipes hold.
_LINES = 100_000
_TALKATIVE = """
import sys
from syncd.cli import sinks
sinks.start()
for number in range(int(sys.argv[1])):
    print(sys.argv[2] % number)
print(end="", flush=True)
print("all said", file=sys.stderr, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "form", ['{"line": %d, "of": "a log in JSON"}', "line %d, of a log for people"]
)
def test_dropped_lines_are_counted_and_the_last_ones_stay(form: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _TALKATIVE, str(_LINES), form],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stderr.readline() == "all said\n"
        lines = []
        while not lines or lines[-1] != form % (_LINES - 1):
            lines.append(process.stdout.readline().rstrip("\n"))
        process.stdin.close()
        assert process.stdout.read() == ""
    assert process.returncode == 0
    (note,) = (line for line in lines if "were dropped" in line)
    count = _LINES + 1 - len(lines)
    assert count > 0
    assert f"{count} lines were dropped" in note
    if form.startswith("{"):
        assert (json.loads(note)["event"], json.loads(note)["lines"]) == ("lines_dropped", count)
    at = lines.index(note)
    assert lines[:at] + lines[at + 1 :] == [
        form % number for number in (*range(at), *range(at + count, _LINES))
    ]
