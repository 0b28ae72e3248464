"""One rank of a trainer that does what it is told; all its weights are the step trained last."""

import errno
import logging.handlers
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from syncd.protocol.errors import InvalidSettingsError, SaveFailedError
from tests.hooks import DEADLINE, over
from tests.multiprocess.peers import Told
from tests.process_groups import join
from tests.storages import CHANGES, RuledStorage
from trainer_hooks import (
    SaveSettings,
    ServedStep,
    SyncSettings,
    TrainerHook,
    load_checkpoint,
    ranks,
)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    handler, logged = logging.handlers.BufferingHandler(1000), list[str]()
    logger = logging.getLogger("trainer_hooks")
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)
        logged.extend(record.getMessage() for record in handler.buffer)


class Rank(Told):
    """A model, an optimizer, a hook, and a storage that fails when it is told to."""

    def __init__(self, job: Path, rendezvous: Path, rank: int, world_size: int) -> None:
        join(rank, world_size, rendezvous)
        self._job = job
        self._storage = RuledStorage()
        self._released = threading.Event()
        self._hook: TrainerHook | None = None
        self._model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
        fully_shard(self._model[0])
        fully_shard(self._model)  # the last layer is its own
        self._optimizer = torch.optim.SGD(self._model.parameters(), momentum=0.9)

    @property
    def hook(self) -> TrainerHook:
        assert self._hook is not None
        return self._hook

    def open(
        self,
        settings: dict[str, Any],
        saving: dict[str, Any] | None = None,
        job: Path | None = None,
        memory: Path | None = None,
    ) -> list[str]:
        """Make the hook; returns the warnings that this logs."""
        with _warnings() as logged:
            self._hook = TrainerHook(
                job or self._job,
                self._model,
                optimizer=self._optimizer,
                settings=SyncSettings(**settings),
                saving=SaveSettings(**(saving or {}), memory_dir=memory),
                storage=None if memory else self._storage,
            )
        return logged

    def open_in_vain(self) -> list[str]:
        """Make a hook that another rank does not make; returns the warnings and the error."""
        with (
            _warnings() as logged,
            mock.patch.object(ranks, "_WORD", 0.5),
            pytest.raises(SaveFailedError) as refused,
        ):
            self.open({"save_timeout": 3})
        return [*logged, str(refused.value)]

    def open_broken(self) -> str:
        """Make a hook whose config ends the process; returns the error."""
        config = mock.Mock(spec=["save_pretrained"], **{"save_pretrained.side_effect": SystemExit})
        self._model.config = config
        with pytest.raises(InvalidSettingsError) as refused:
            self.open({})
        del self._model.config
        return str(refused.value)

    def step(self, step: int, spoils: str | None = None) -> dict[str, float]:
        self._become(step, spoils)
        return self.hook.after_step(step)

    def save(self, step: int) -> dict[str, float]:
        self._become(step)
        return self.hook.save_state_dict(step)

    def _become(self, step: int, spoils: str | None = None) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.fill_(step)
                if name == spoils:  # this rank's part of it
                    parameter.to_local()[-1:].fill_(float("nan"))  # type: ignore[attr-defined]

    def wait_for_data(self) -> dict[str, float]:
        return self.hook.sync_while_waiting()

    def wait_served(self, step: int, *explorers: str) -> ServedStep:
        return self.hook.wait_served(step, explorers)

    def checkpoint(self, step: int) -> dict[str, float]:
        with torch.no_grad():
            self._model(torch.ones(2, 6))  # an evaluation, which leaves the root unsharded
        return self.hook.save_checkpoint(step, block_until_saved=True)

    def load(self) -> None:
        assert load_checkpoint(self._job, self._model, optimizer=self._optimizer) is not None

    def over(self) -> None:
        over(self.hook)

    def close(self) -> list[str]:
        """Close the hook; returns the warnings that this logs."""
        with _warnings() as logged:
            self.hook.close()
            assert not self.hook._planner.ranks._sent, "this process may end now"
        return logged

    def fail(self) -> None:
        """Leave the hook's block by an error."""
        self.hook.__exit__(ZeroDivisionError)

    def leave_group(self) -> None:
        dist.destroy_process_group()

    def full_disk(self, where: str) -> None:
        self._storage.refuse("create", errno.ENOSPC, where=where)

    def read_only(self) -> None:
        for method in CHANGES:
            # What a folder that is there already says comes first.
            code = errno.EEXIST if method == "mkdir" else errno.EROFS
            self._storage.refuse(method, code)

    def die_at(self, method: str, where: str) -> None:
        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        self._storage.once(method, die, where=where)

    def hold(self, method: str, where: str) -> None:
        released = self._released = threading.Event()

        def wait(*_: object) -> None:
            assert released.wait(DEADLINE)

        self._storage.once(method, wait, where=where)

    def release(self) -> None:
        self._released.set()

    def heal(self) -> None:
        self._storage.rules.clear()
