"""A rank of a soak's trainer, which saves with deltas, by one of two programs."""

import faulthandler
import logging
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from syncd.protocol.errors import SyncdError
from tests.hooks import written
from tests.multiprocess.by_hand import elements
from tests.multiprocess.peers import Told
from tests.multiprocess.soak_programs import ERA, MEGABYTES
from tests.process_groups import join
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, WeightStream

_TENSORS = 4
#: Of each tensor, in float32: two of bf16 make one.
_ELEMENTS = int(MEGABYTES * 1e6 / 4 / _TENSORS)
_SAVE_TIMEOUT = 10.0


def make_model() -> nn.ParameterList:
    return nn.ParameterList(
        torch.zeros(2 * _ELEMENTS, dtype=torch.bfloat16) for _ in range(_TENSORS)
    )


class SoakRank(Told):
    """Saves weights that are all one number.

    Args:
        program: what saves: ``WeightStream``, or ``TrainerHook``, which has weights of FSDP2, and
            saves no deltas for ``whole saves``.
    """

    def __init__(self, job: Path, store: Path, rank: int, world_size: int, program: str) -> None:
        logging.disable(logging.ERROR)  # what fails is told in the answer
        faulthandler.register(signal.SIGUSR1)
        self._rank, self._world_size = rank, world_size
        self._hook: TrainerHook | None = None
        self._model = make_model()
        settings = SyncSettings(deltas=program != "whole saves", save_timeout=_SAVE_TIMEOUT)
        try:
            if program == "WeightStream":
                self._stream = WeightStream(
                    job, rank=rank, world_size=world_size, settings=settings
                )
                return
            join(rank, world_size, store, timeout=timedelta(seconds=2 * _SAVE_TIMEOUT))
            fully_shard(self._model)
            saving = SaveSettings(final=False)
            self._hook = TrainerHook(job, self._model, settings=settings, saving=saving)
        except (SyncdError, OSError, RuntimeError) as error:  # full, or a rank was killed
            sys.exit(f"rank {rank} does not begin: {error}")

    def begun(self) -> None:
        """It has, if this is answered."""

    def save(self, step: int, number: float) -> None:
        state = self._model.state_dict()
        if self._hook is None:
            names = list(state)[self._rank :: self._world_size]
            self._stream.save(step, dict.fromkeys(names, _part(number, 0, _ELEMENTS)))
            self._stream.wait()
            return
        for value in state.values():
            part = value.to_local()
            part.copy_(_part(number, self._rank, len(part) // 2))
        self._hook.save_state_dict(step)
        written(self._hook)


def _part(number: float, place: int, count: int) -> Tensor:
    data = elements(number, range(place * count, (place + 1) * count), ERA)
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
