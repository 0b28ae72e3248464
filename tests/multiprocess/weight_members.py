"""Members of weight groups as processes.

One process imports torch, and forks a member each time that it is asked to: a member costs
milliseconds. Each does what it is told by its connection, one call after the other, and answers.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.coordination.broadcast.addresses import listen
from syncd.coordination.broadcast.group import WeightGroup
from syncd.protocol.errors import BroadcastError
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.records import SaveId
from syncd.protocol.reports import GroupMember, Rendezvous
from tests.forked_programs import Forked
from tests.multiprocess.processes import DEADLINE, wait_until

CPU = torch.device("cpu")
#: Bytes of a tensor: more than sockets hold, so that who sends needs who receives.
SIZE = 16 << 20


def rendezvous(port: int, *names: str, generation: int = 1, name: str = "group") -> Rendezvous:
    """Of a trainer on this host and explorers of one worker each."""
    return Rendezvous(
        offer="0" * 12,
        generation=generation,
        group_name=f"{name}-{generation}",
        address="127.0.0.1",
        port=port,
        world_size=1 + len(names),
        backend="gloo",
        members=tuple(
            GroupMember(name=one, session=one, rank_offset=rank)
            for rank, one in enumerate(names, 1)
        ),
        save_id="run-1-1",
    )


class Actor:
    """What a member can be told to do. Whatever a call returns is sent back."""

    def __init__(self) -> None:
        self._listening: socket.socket | None = None
        self._group: WeightGroup | None = None
        self._sync: TrainerSynchronizer | ExplorerSynchronizer | None = None

    # -- a group by itself ---------------------------------------------------------------------

    def have_a_default_group(self, path: str) -> None:
        """Of this process alone, as a trainer of one rank has it."""
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)

    def listen(self, port: int = 0) -> int:
        self._listening = listen("127.0.0.1", port)
        return int(self._listening.getsockname()[1])

    def join(self, met: Rendezvous, rank: int, deadline: float = DEADLINE) -> str:
        listening, self._listening = self._listening, None
        self._group = WeightGroup.join(
            met, rank, deadline=deadline, device=CPU, listening=listening if rank == 0 else None
        )
        return self._group.name

    def begin(self, deadline: float) -> None:
        """Begin a transfer with less time than there was to form the group: CI may be slow."""
        group = self.group
        group.deadline = deadline
        group.begin()

    def send(self, value: int, buckets: int = 1, ok: bool = True) -> list[int] | None:
        """A transfer, or the rest of one: the values that arrived; None where it was refused."""
        arrived = [self.bucket(value + number) for number in range(buckets)]
        return arrived if self.group.agree(ok) else None

    def bucket(self, value: int) -> int:
        """One broadcast; the value that all of its bytes have here."""
        group = self.group
        tensor = torch.full((SIZE,), value if group.rank == 0 else 255, dtype=torch.uint8)
        group.broadcast(tensor).wait()
        assert bool((tensor == tensor[0]).all())
        return int(tensor[0])

    def agree(self, ok: bool = True) -> bool:
        return self.group.agree(ok)

    def close(self) -> None:
        self.group.close()

    def left_behind(self) -> list[str]:
        """Threads of weight groups, once those that only end have ended."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            found = [
                one.name
                for one in threading.enumerate()
                if one.name.startswith("syncd-weight-group")
            ]
            if not found:
                break
            time.sleep(0.01)
        return found

    # -- the same through the Synchronizer -----------------------------------------------------

    def register(self, role: str, job: Path, name: str, workers: int = 1, **options: Any) -> None:
        settings = SyncSettings(method="nccl", master_address="127.0.0.1", **options)  # type: ignore[arg-type] # as from a file
        if role == "trainer":
            trainer = TrainerSynchronizer(job, name, settings=settings)
            trainer.set_trainer_status(RunningStatus.RUNNING)
            self._sync = trainer
        else:
            explorer = ExplorerSynchronizer(job, name, settings=settings, workers=workers)
            explorer.set_explorer_status(RunningStatus.RUNNING)
            self._sync = explorer

    def meet(self, step: int = 0) -> tuple[int | None, str, int]:
        """Agree on a transfer, and open its group: the step, the group's name, and our rank."""
        sync = self._sync
        if isinstance(sync, TrainerSynchronizer):
            agreed = sync.ready_to_nccl_sync(step, timeout=DEADLINE)
            self._group = sync.open_group(SaveId("run", step, 1), CPU)
        else:
            assert sync is not None
            agreed = sync.ready_to_nccl_sync(timeout=DEADLINE)
            self._group = sync.open_group(CPU)
        return agreed, self.group.name, self.group.rank

    def where(self) -> tuple[Rendezvous, int]:
        """An explorer of several workers agrees, and learns where its workers meet."""
        assert isinstance(self._sync, ExplorerSynchronizer)
        assert self._sync.ready_to_nccl_sync(timeout=DEADLINE) is not None
        return self._sync.rendezvous()

    def succeeded(self, step: int) -> None:
        if isinstance(self._sync, TrainerSynchronizer):
            self._sync.nccl_sync_succeeded()
        else:
            assert self._sync is not None
            self._sync.nccl_sync_succeeded(step)

    def call(self, method: str, *given: Any, **more: Any) -> Any:
        """Any other method of the Synchronizer's."""
        return getattr(self._sync, method)(*given, **more)

    @property
    def group(self) -> WeightGroup:
        assert self._group is not None
        return self._group


@dataclass(frozen=True)
class Answer:
    """What a call came to: a value, or an error in words; and how long it took, in seconds."""

    value: Any
    error: str | None
    seconds: float


class Process:
    """A member as its test sees it."""

    def __init__(self, connection: Connection, reap: Callable[[int], int]) -> None:
        self._connection = connection
        self._reap = reap
        self._has_ended = False
        self.pid: int = connection.recv()

    def tell(self, method: str, *given: Any, **more: Any) -> None:
        """Let it begin something."""
        self._connection.send((method, given, more))

    def hear(self) -> Answer:
        """What came of it."""
        assert self._connection.poll(3 * DEADLINE), f"process {self.pid} does not answer"
        return Answer(*self._connection.recv())

    def __call__(self, method: str, *given: Any, **more: Any) -> Any:
        """Do something, and well."""
        self.tell(method, *given, **more)
        answer = self.hear()
        assert answer.error is None, answer.error
        return answer.value

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.status()

    def leave(self) -> int:
        """Let it end as programs do; its exit status."""
        self._connection.close()
        return self.status()

    def status(self) -> int:
        """The exit status, once it has ended."""
        self._has_ended = True
        return self._reap(self.pid)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        if not self._has_ended:  # its number may be another's by now
            self.kill()
        self._connection.close()


class Members:
    """Starts members."""

    def __init__(self, listener: Listener, zygote: Connection) -> None:
        self._listener = listener
        self._zygote = zygote
        self.started: list[Process] = []

    def __call__(self) -> Process:
        self._zygote.send(None)
        self.started.append(Process(self._listener.accept(), self._reap))
        return self.started[-1]

    def _reap(self, pid: int) -> int:
        self._zygote.send(pid)
        assert self._zygote.poll(DEADLINE), f"process {pid} does not end"
        status = self._zygote.recv()
        assert isinstance(status, int)
        return status

    def end(self) -> None:
        """End all that were started."""
        while self.started:
            self.started.pop().end()


@contextmanager
def members(folder: Path) -> Iterator[Members]:
    """Members, all of which end with the block."""
    address = str(folder / "members")
    with Listener(address, "AF_UNIX") as listener:
        output = sys.__stderr__.fileno()
        with open(os.devnull, "rb") as nothing:
            process = Forked(__name__, address, files=(nothing.fileno(), output, output))
        found: Members | None = None
        try:
            with listener.accept() as zygote:
                found = Members(listener, zygote)
                yield found
        finally:
            if found is not None:
                found.end()
            process.end()


def _act(address: str) -> None:
    actor = Actor()
    with Client(address, "AF_UNIX") as connection:
        connection.send(os.getpid())
        while True:
            try:
                method, given, more = connection.recv()
            except EOFError:
                return
            begun = time.monotonic()
            value, error = None, None
            try:
                value = getattr(actor, method)(*given, **more)
            except BroadcastError as failed:
                error = str(failed)
            connection.send((value, error, time.monotonic() - begun))


def main() -> None:
    address = sys.argv[1]
    torch.set_num_threads(1)
    with Client(address, "AF_UNIX") as asked:
        while True:
            try:
                pid = asked.recv()
            except EOFError:
                return
            if pid is not None:
                asked.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            elif os.fork() == 0:
                asked.close()
                _act(address)
                return


if __name__ == "__main__":
    main()
