"""The checkpoints that models hold, from their loading until a hook takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from syncd.protocol.reports import ResumedFrom
from trainer_hooks.resuming.resumable import FullCheckpoint, look_at_checkpoint
from trainer_hooks.state.wrappers import trained_model, unwrapped
from trainer_hooks.writing.retire import pointed_step

if TYPE_CHECKING:
    from torch import nn

    from syncd.storage.job import Job

#: By the module inside all wrappers, because a model can get a wrapper after its loading.
_loaded: Final[WeakKeyDictionary[nn.Module, ResumedFrom]] = WeakKeyDictionary()


def remember(model: nn.Module, checkpoint: FullCheckpoint) -> None:
    """Remember that a model holds a checkpoint."""
    resumed = ResumedFrom(step=checkpoint.step, save_id=checkpoint.identity)
    _loaded[unwrapped(trained_model(model))] = resumed


def loaded_into(model: nn.Module) -> ResumedFrom | None:
    """The checkpoint that was loaded into a model last."""
    return _loaded.get(unwrapped(trained_model(model)))


def forget(model: nn.Module) -> None:
    """Forget the checkpoint, because the model is trained now."""
    _loaded.pop(unwrapped(trained_model(model)), None)


def is_in(job: Job, resumed: ResumedFrom | None) -> bool:
    """True if a job has this save as a full checkpoint; False for an archive's."""
    if resumed is None:
        return False
    is_pointed = pointed_step(job) == resumed.step
    found = look_at_checkpoint(job, resumed.step, is_pointed=is_pointed)
    return isinstance(found, FullCheckpoint) and found.identity == resumed.save_id
