"""Members of weight groups as processes."""

import ctypes
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch

from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.coordination.broadcast.addresses import listen
from syncd.coordination.broadcast.group import WeightGroup
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Rendezvous
from tests.multiprocess.peers import Told
from tests.multiprocess.processes import DEADLINE
from tests.process_groups import join

CPU = torch.device("cpu")
#: Bytes of a tensor: more than sockets hold, so that who sends needs who receives.
SIZE = 16 << 20


class Actor(Told):
    """What a member of a weight group can be told to do."""

    exit = ctypes.pythonapi.Py_Exit  # as programs end: with their threads, and by atexit

    def __init__(self) -> None:
        self._listening: socket.socket | None = None
        self._group: WeightGroup | None = None
        self._sync: TrainerSynchronizer | ExplorerSynchronizer | None = None

    # -- a group by itself ---------------------------------------------------------------------

    def have_a_default_group(self, path: Path) -> None:
        """Of this process alone, as a trainer of one rank has it."""
        join(0, 1, path)

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
