"""Whatever the shell hands down, tests see the same."""

import os
import subprocess
import sys

from tests.rank_programs import ROOT

#: What a careless shell, a CI or a service leaves its children.
CARELESS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM, signal.SIGUSR1})
os.umask(0o077)
os.closerange(0, 1)
os.environ.update(TZ="Asia/Kathmandu", COLUMNS="20", LC_ALL="POSIX", SYNCD_KEEP="7", http_proxy="x")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
#: Says how it stands with what a test starts.
NEUTRAL = """
import os, subprocess, sys
from tests.shell_state import neutralize
neutralize()
names = sorted(os.environ.keys() & {"TZ", "COLUMNS", "LC_ALL", "SYNCD_KEEP", "http_proxy"})
print(names, sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3], flush=True)
subprocess.run(["grep", "-E", "^(Umask|SigBlk|SigIgn)", "/proc/self/status"], check=True)
"""


def test_tests_inherit_nothing_from_a_careless_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CARELESS, "-c", NEUTRAL],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    python, *kernel = done.stdout.splitlines()
    assert python == "[] [0, 1, 2]"
    state = dict(line.split(":\t") for line in kernel)
    assert state["Umask"] == "0022"
    assert int(state["SigBlk"], 16) == int(state["SigIgn"], 16) == 0
