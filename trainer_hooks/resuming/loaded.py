"""The content of models while no hook trains them: a checkpoint, or the work of the last hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from trainer_hooks.resuming.resumable import FullCheckpoint, look_at_checkpoint
from trainer_hooks.state.wrappers import trained_model, unwrapped
from trainer_hooks.writing.retire import pointed_step

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from syncd.protocol.reports import ResumedFrom
    from syncd.storage.job import Job

#: A path is that of the job whose hook has trained the model. Models are known by the module inside
#: all wrappers, because a model can get a wrapper after its loading.
_held: Final[WeakKeyDictionary[nn.Module, ResumedFrom | Path]] = WeakKeyDictionary()


def remember(model: nn.Module, held: ResumedFrom | Path) -> None:
    """Remember that a model holds a checkpoint, or what a hook of this job has trained."""
    _held[_inner(model)] = held


def held_by(model: nn.Module) -> ResumedFrom | Path | None:
    """What a model holds; None if it is not known."""
    return _held.get(_inner(model))


def forget(model: nn.Module) -> None:
    """Forget what a model holds, because it is trained now."""
    _held.pop(_inner(model), None)


def _inner(model: nn.Module) -> nn.Module:
    return unwrapped(trained_model(model))


def is_in(job: Job, save: ResumedFrom) -> bool:
    """True if a job has this save as a full checkpoint; False for an archive's."""
    found = look_at_checkpoint(job, save.step, is_pointed=pointed_step(job) == save.step)
    return isinstance(found, FullCheckpoint) and found.identity == save.save_id
