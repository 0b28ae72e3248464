"""``syncd demo`` as its user sees it first; the whole of it is a step of ``.ci/run``."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from syncd.cli.status import command as status
from tests.multiprocess.processes import DEADLINE
from tests.rank_programs import ENVIRONMENT

CODES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
SPINNER = re.compile("[\u2800-\u28ff]")


def read(output: int) -> bytes:
    try:
        return os.read(output, 65536)
    except OSError:  # a terminal that nobody has any more
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_it_says_at_once_what_it_does_and_where_to_look(is_terminal: bool) -> None:
    output, theirs = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    # A short path, as of most temporary folders.
    with TemporaryDirectory(prefix="d-", dir="/tmp") as folder, open(output, "rb", 0):
        environment = {**ENVIRONMENT, "TMPDIR": folder, "TERM": "xterm", "FORCE_COLOR": "1"}
        environment.pop("NO_COLOR", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "syncd", "demo"], env=environment, stdout=theirs
        )
        os.close(theirs)
        try:
            told = b""
            while b"importing torch" not in told:
                chunk = read(output)
                assert chunk, told
                told += chunk
            lines = re.split(r"[\r\n]+", CODES.sub("", told.decode(errors="ignore")))
            job = next(one for one in lines if one.startswith("job: ")).split()[1]
            assert [f"  syncd status --watch {job}", f"  syncd web {job}"] == [
                one for one in lines if one.startswith("  syncd ")
            ]
            assert max(map(len, lines)) <= 80
            assert (b"\x1b[?25l" in told, bool(SPINNER.search(told.decode(errors="ignore")))) == (
                (True, True) if is_terminal else (False, False)
            )
            assert CliRunner().invoke(status, [job]).exit_code == 0
            process.send_signal(signal.SIGTERM)
            while read(output):
                pass
            assert process.wait(DEADLINE) == 128 + signal.SIGTERM
            assert list(Path(folder).iterdir()) == []
        finally:
            process.kill()
            process.wait()
