"""Processes that do what they are told, a call at a time.

They are forked from one process that has imported torch, so that many of them cost little.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

from syncd.protocol.errors import SyncdError
from tests.multiprocess.processes import DEADLINE, wait_until

CONTEXT = get_context("forkserver")
# fully_shard would import the first one in each rank.
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "tests.multiprocess.broadcasting", "tests.multiprocess.participants"]
)


@dataclass(frozen=True)
class Answer:
    """What a call came to: a value, or an error in words; and how long it took, in seconds."""

    value: Any
    error: str | None
    seconds: float


class Told:
    """Methods that a test calls by name, in a process of its own."""

    #: Ends the process: without waiting for ranks that are gone.
    exit: ClassVar[Callable[[int], object]] = os._exit


def _be_small() -> None:
    """As a rank that torchrun starts."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _rank(target: Callable[..., object], given: tuple[object, ...], rank: int) -> None:
    _be_small()
    target(*given, rank)


@contextmanager
def forked(
    target: Callable[..., object], *given: object, world_size: int = 2
) -> Iterator[list[ForkServerProcess]]:
    """Ranks that do something by themselves; they end with the block."""
    processes = [
        CONTEXT.Process(target=_rank, args=(target, given, rank)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE)


def _serve(make: type[Told], given: tuple[Any, ...], *connections: Connection) -> None:
    _be_small()
    told = make(*given)
    threads = [threading.Thread(target=_listen, args=(told, one)) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    make.exit(0)


def _listen(told: Told, connection: Connection) -> None:
    while True:
        try:
            command, given, named = connection.recv()
        except EOFError:
            return
        begun = time.monotonic()
        value, error = None, None
        try:
            value = getattr(told, command)(*given, **named)
        except SyncdError as failed:
            error = f"{type(failed).__name__}: {failed}"
        connection.send(Answer(value, error, time.monotonic() - begun))


class Peer:
    """One such process."""

    def __init__(self, make: type[Told], *given: Any, others: Any = ()) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(make, given, theirs, *others))
        self.process.start()
        theirs.close()

    def tell(self, command: str, *given: Any, **named: Any) -> None:
        self._connection.send((command, given, named))

    def hear(self) -> Answer:
        """What came of it."""
        assert self._connection.poll(3 * DEADLINE), "no answer"
        return self._connection.recv()

    def answer(self) -> Any:
        answer = self.hear()
        assert answer.error is None, answer.error
        return answer.value

    def refusal(self) -> str:
        """What a call is refused with: the class of the error, and its words."""
        answer = self.hear()
        assert answer.error is not None, answer
        return answer.error

    def __call__(self, command: str, *given: Any, **named: Any) -> Any:
        """Do something, and well."""
        self.tell(command, *given, **named)
        return self.answer()

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def has_answered(self, *, within: float) -> bool:
        return self._connection.poll(within)

    def wait_until_stopped(self) -> None:
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")

    def leave(self) -> None:
        """End by itself, well."""
        self("close")
        self.hang_up()

    def hang_up(self) -> None:
        """Let it end as programs do."""
        self._connection.close()
        self.process.join(DEADLINE)
        assert self.process.exitcode == 0

    def wait_until_killed(self) -> None:
        self.process.join(DEADLINE)
        assert self.process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self.process.kill()  # also where it is stopped, or ends at this moment
        self.process.join(DEADLINE)
        self._connection.close()


class Ranks(list[Peer]):
    """The ranks of one process group."""

    def all(self, command: str, *given: Any, **named: Any) -> list[Any]:
        """Tell all of them, then hear what each has to say."""
        for rank in self:
            rank.tell(command, *given, **named)
        return [rank.answer() for rank in self]


@contextmanager
def started(make: type[Told], job: Path, world_size: int, *more: Any) -> Iterator[Ranks]:
    """Ranks, which end with the block; each is given where they all meet."""
    with ExitStack() as stack, TemporaryDirectory() as folder:
        ranks, store = Ranks(), Path(folder, "store")
        for rank in range(world_size):
            ranks.append(Peer(make, job, store, rank, world_size, *more))
            stack.callback(ranks[-1].end)
        yield ranks
