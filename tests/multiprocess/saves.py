"""Saves made in the test's own process, through the real hook, without a process group."""

import threading
from pathlib import Path

import torch
from torch import nn

from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import Latest
from tests.multiprocess.processes import wait_for_step
from trainer_hooks import SaveSettings, TrainerHook
from trainer_hooks.settings import WhenBusy


class Constant(nn.Module):
    """Tensors that all hold one number, so that a mixture of two saves shows.

    ``megabytes`` of float32 in ``tensors`` parts.
    """

    def __init__(self, megabytes: float = 0.1, tensors: int = 4) -> None:
        super().__init__()
        count = int(megabytes * 1e6 / 4 / tensors)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(count)) for _ in range(tensors))

    def become(self, number: float) -> None:
        with torch.no_grad():
            for part in self.parts:
                part.fill_(number)

    def numbers(self) -> set[float]:
        return {number for part in self.parts for number in part.unique().tolist()}


def trainer(job: Path, model: nn.Module, **settings: float) -> TrainerHook:
    return TrainerHook(
        job,
        model,
        settings=SyncSettings(**settings),  # type: ignore[arg-type] # int or float by key
        saving=SaveSettings(when_busy_sync=WhenBusy.WAIT),
    )


def save(job: Path, model: Constant, step: int) -> None:
    """One whole save, as a trainer that starts and ends with it; all its weights are the step."""
    model.become(step)
    with trainer(job, model) as hook:
        hook.after_step(step)


def save_meanwhile(job: Path, model: Constant, step: int) -> None:
    """The same, in a thread: at its end a trainer waits for what the daemon makes of its save."""
    threading.Thread(target=save, args=(job, model, step), daemon=True).start()


def serve(job: Path, model: Constant, step: int) -> Latest:
    """The same, until a daemon has published it."""
    save(job, model, step)
    return wait_for_step(job, step)
