"""What processes inherit from the shell, made the same for all tests.

``tests/conftest.py`` calls :func:`neutralize` before any module with tests is imported.
"""

from __future__ import annotations

import os
import signal
import time

#: What tests and ``.ci/run`` themselves are told by variables whose names begin with ``SYNCD_``.
#: Any other is a setting of the daemon, or a key.
_OF_TESTS = (
    "SYNCD_DEEP", "SYNCD_KILL_STRIDE", "SYNCD_STRIDE", "SYNCD_LAB", "SYNCD_TEST_", "SYNCD_VLLM_",
    "SYNCD_VERL_", "SYNCD_SGLANG_",
)  # fmt: skip
#: The beginnings of variables that change what programs print, where they listen, or who they are.
_OF_USERS = (
    "SYNCD_", "LANG", "LC_", "TERM", "COLUMNS", "LINES", "TZ", "NO_COLOR", "FORCE_COLOR",
    "CLICOLOR", "TTY_", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONOPTIMIZE",
    "PYTHONSAFEPATH", "PYTHONUTF8", "PYTHONWARNINGS", "NOTIFY_SOCKET", "WATCHDOG_", "SLURM_",
    "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GLOO_", "OMP_", "TRANSFORMERS_", "GIT_",
)  # fmt: skip
#: Proxies of HTTP: the tests' servers listen on loopback.
_PROXY = "_proxy"

#: Python ignores these itself; ``subprocess`` gives them back to what it starts.
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def neutralize() -> None:
    """Set signals, mask, umask, standard files and environment as a plain shell has them."""
    for number in signal.valid_signals():
        # Processes inherit that a signal is ignored, but no handler: so whoever runs the tests
        # under nohup keeps what they asked for, and what the tests start gets the default.
        if signal.getsignal(number) is signal.SIG_IGN and number not in _OF_PYTHON:
            signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:  # closed: the next file that is opened would take its place
            os.open(os.devnull, os.O_RDWR)
    for name in list(os.environ):
        theirs = name.startswith(_OF_USERS) and not name.startswith(_OF_TESTS)
        if theirs or name.lower().endswith(_PROXY):
            del os.environ[name]
    time.tzset()


def _do_nothing(_number: int, _frame: object) -> None:
    """Handle a signal that the shell has asked to ignore."""
