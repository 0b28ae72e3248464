"""One rank of a trainer that does what it is told: ``python -m tests.multiprocess.trainer_ranks``.

Each line on stdin is a JSON list, a command and what it takes; each is answered by a line of JSON
on stdout: ``{"metrics": …}``, or ``{"error": the class, "says": the message}``. Every weight of the
model is the step that was trained last.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from syncd.protocol.errors import SyncdError
from tests.hooks import DEADLINE, over
from tests.storages import CHANGES, RuledStorage, once, refuse
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook


class Rank:
    """A model, an optimizer, a hook, and a storage that fails when it is told to."""

    def __init__(self, job: Path) -> None:
        self._job = job
        self._storage = RuledStorage()
        self._released = threading.Event()
        self._hook: TrainerHook | None = None
        self._model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
        for layer in self._model:
            fully_shard(layer)
        fully_shard(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), momentum=0.9)

    @property
    def hook(self) -> TrainerHook:
        assert self._hook is not None
        return self._hook

    def open(
        self,
        settings: dict[str, Any],
        saving: dict[str, Any] | None = None,
        job: str | None = None,
        memory: str | None = None,
    ) -> None:
        self._hook = TrainerHook(
            job or self._job,
            self._model,
            optimizer=self._optimizer,
            settings=SyncSettings(**settings),
            saving=SaveSettings(**(saving or {})),
            memory_dir=memory,
            storage=None if memory else self._storage,
        )

    def step(self, step: int) -> dict[str, float]:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(step)
        return self.hook.after_step(step)

    def wait_for_data(self) -> dict[str, float]:
        return self.hook.sync_while_waiting()

    def checkpoint(self, step: int) -> dict[str, float]:
        return self.hook.save_checkpoint(step, block_until_saved=True)

    def over(self) -> None:
        over(self.hook)

    def close(self) -> None:
        self.hook.close()

    def full_disk(self, where: str) -> None:
        self._storage.rules.append(refuse("create", errno.ENOSPC, where=where))

    def read_only(self) -> None:
        for method in CHANGES:
            # What a folder that is there already says comes first.
            code = errno.EEXIST if method == "mkdir" else errno.EROFS
            self._storage.rules.append(refuse(method, code))

    def die_at(self, method: str, where: str) -> None:
        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        self._storage.rules.append(once(method, die, where=where))

    def hold(self, method: str, where: str) -> None:
        released = self._released = threading.Event()

        def wait(*_: object) -> None:
            assert released.wait(DEADLINE)

        self._storage.rules.append(once(method, wait, where=where))

    def release(self) -> None:
        self._released.set()

    def heal(self) -> None:
        self._storage.rules.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    given = parser.parse_args()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{given.rendezvous}",
        rank=given.rank,
        world_size=given.world_size,
    )
    rank = Rank(given.job)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = {"metrics": getattr(rank, command)(*arguments) or {}}
        except SyncdError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # without waiting for ranks that are gone


if __name__ == "__main__":
    main()
