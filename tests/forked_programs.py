"""Programs in children of a process that has imported what they import.

Torch and what is built on it cost seconds of each interpreter. A test run has one process that
imports a program's module the first time that any of its workers asks for it, and forks a child for
each run. The first worker to ask starts it, and it ends with that worker.

``python -m tests.forked_programs ADDRESS`` is that process.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import warnings
from typing import Any

from tests.places import ROOT

#: What modules read as they are imported. Who needs another value starts an interpreter.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: Of this test run; Linux keeps the name for as long as the process lives.
_ADDRESS = "syncd-tests-" + os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
#: A guard against a process that cannot start.
_TRIES = 20


class Forked:
    """``python -m MODULE ARGUMENTS``, without its imports, as the first of its process group.

    Args:
        module: what is run. It is imported first, by its own name.
        arguments: of the command line.
        files: the descriptors of stdin, stdout and stderr.
    """

    def __init__(self, module: str, *arguments: object, files: tuple[int, int, int]) -> None:
        order = {"module": module, "arguments": list(map(str, arguments)), "path": sys.path}
        self._connection, self.pid = _begun(json.dumps(order).encode(), files)

    def wait(self, timeout: float) -> int | None:
        """The exit status; None if the program goes on for longer."""
        if not select.select([self._connection], [], [], timeout)[0]:
            return None
        return int(self._connection.recv(64, socket.MSG_PEEK))  # whoever asks again hears it too

    def end(self) -> None:
        """End the program, and whatever it has started in its group."""
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.pid, signal.SIGKILL)
        self._connection.close()


def _begun(order: bytes, files: tuple[int, int, int]) -> tuple[socket.socket, int]:
    for _ in range(_TRIES):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The process of a worker that has just ended hears nothing any more.
        with contextlib.suppress(ConnectionError):
            connection.connect(f"\0{_ADDRESS}")
            socket.send_fds(connection, [order], files)
            if said := connection.recv(64):
                return connection, int(said)
        connection.close()
        _start()
    raise AssertionError("the process that forks programs does not start")


def _start() -> None:
    """Start the process, and wait until it can be connected to, or another worker's can."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, _ADDRESS],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.read()
    process.stdout.close()
    atexit.register(process.communicate)  # it ends at the end of its stdin


# -- the process -----------------------------------------------------------------------------------


def _serve(address: str) -> str:
    """Fork a child for each order. Returns in each of them: the module that it has to run."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind(f"\0{address}")
        except OSError:
            sys.exit()  # another worker was faster
        listening.listen()
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)  # tells who waits
        while 0 not in select.select([0, listening], [], [])[0]:  # the worker is there
            connection, _ = listening.accept()
            _reap(os.WNOHANG)
            with connection:
                if not _is_ours(connection):
                    continue
                content, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
                order = json.loads(content)
                sys.path[:] = order["path"]
                with contextlib.suppress(BaseException):  # the child says it
                    importlib.import_module(order["module"])
                gc.freeze()  # nor do children look through what is imported, or copy it
                if os.fork() == 0:
                    listening.close()
                    return _program(connection, order, files)
                for file in files:
                    os.close(file)
    _reap(0)
    sys.exit()


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of the same user asks: any user may connect to such an address."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", told)
    return bool(user == os.getuid())


def _reap(option: int) -> None:
    with contextlib.suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, option)[0]:
            pass


def _program(connection: socket.socket, order: dict[str, Any], files: list[int]) -> str:
    """Fork the program, in a group of its own, where this returns; wait for it."""
    program = os.fork()
    if program == 0:
        os.setsid()
        connection.sendall(str(os.getpid()).encode())
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.argv[1:] = order["arguments"]
        # It is there by its own name already, which what it imports may want.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        return order["module"]
    for file in files:
        os.close(file)
    # It keeps its number until it is reaped, so that nobody else's group is ended.
    ended = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(ConnectionError):  # nobody waits for it any more
        connection.sendall(str(status).encode())
        connection.recv(1)
    os.waitpid(program, 0)
    os._exit(0)


if __name__ == "__main__":
    runpy.run_module(_serve(sys.argv[1]), run_name="__main__", alter_sys=True)
