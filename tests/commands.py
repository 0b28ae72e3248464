"""Runs of the command line that share one interpreter's imports, which take most of their time.

Each run is a process of its own, forked once ``syncd`` is imported, from a parent with one thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.multiprocess.processes import DEADLINE
from tests.rank_programs import ENVIRONMENT

#: Reads a line of JSON for each run, and writes one: its exit code, stdout and stderr.
_SERVES: Final = """
import json, os, sys, tempfile
from contextlib import suppress
from syncd.cli import cli, main
for name in {imports}:
    __import__(name)
for line in sys.stdin:
    given = json.loads(line)
    with suppress(Exception):  # the run says it
        cli.get_command(None, given["arguments"][0])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.chdir(given["cwd"])
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.argv = ["syncd", *given["arguments"]]
                try:
                    main()
                    code = 0
                except SystemExit as end:
                    code = end.code or 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
        print(json.dumps([code, *said]), flush=True)
"""


def run_commands(
    *commands: Sequence[object],
    cwd: Path,
    begin: str = "",
    imports: Sequence[str] = (),
    environment: Mapping[str, str] = ENVIRONMENT,
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``syncd`` with the arguments of each command, one after the other.

    Args:
        commands: the arguments of each.
        cwd: where they run.
        begin: what the interpreter does first.
        imports: more modules that the commands would import.
        environment: of all of them.
    """
    program = begin + _SERVES.replace("{imports}", repr(list(imports)))
    asked = [[str(one) for one in arguments] for arguments in commands]
    lines = [json.dumps({"cwd": str(cwd), "arguments": one}) for one in asked]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(lines),
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, done.stdout.splitlines())
    return [
        subprocess.CompletedProcess(["syncd", *arguments], code, out, err)
        for arguments, (code, out, err) in zip(asked, answers, strict=True)
    ]
