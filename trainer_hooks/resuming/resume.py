"""Loads a full checkpoint, on any number of ranks and any device mesh."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncd.checkpoint.adapter import are_two_models
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import ACTOR, CRITIC, extra_state_name
from syncd.protocol.policy import check_step, given_or_default
from syncd.protocol.reports import ResumedFrom
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from trainer_hooks.ranks import Ranks
from trainer_hooks.resuming.loaded import remember
from trainer_hooks.resuming.loading import Loading, loadings
from trainer_hooks.resuming.resumable import (
    FullCheckpoint,
    find_checkpoint,
    latest_checkpoint,
    look_at_checkpoint,
)
from trainer_hooks.resuming.saved_files import SavedFiles, few_names
from trainer_hooks.state.full_checkpoint import (
    AVERAGES,
    BASE_MODEL,
    RNG,
    SCHEDULER,
    USER_STATE,
    Critic,
    Some,
    Stateful,
    check_stateful,
    each_of,
    set_rng_state,
)
from trainer_hooks.state.lora import base_name
from trainer_hooks.state.wrappers import adapters_of, own_buffers, trained_model, unwrapped
from trainer_hooks.writing.retire import pointed_step

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Resumed", "latest_checkpoint", "load_checkpoint"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that was resumed from.

    Attributes:
        step: the saved step; training continues with the next step.
        user_state: the result of the hook's ``user_state`` on this rank; None if the checkpoint has
            no user state. If the number of ranks has changed, all ranks get rank 0's result.
        save_id: the id of the save; None for a save of another trainer.
        world_size: the number of ranks that saved the checkpoint.
        is_exact: whether the number of ranks is the same as at the save. Only then the random
            number generators continue, too.
    """

    step: int
    user_state: dict[str, Any] | None
    save_id: str | None
    world_size: int
    is_exact: bool


@without_modes()
def load_checkpoint(
    job_dir: str | Path,
    model: nn.Module,
    *,
    optimizer: Some[Stateful] = None,
    scheduler: Some[Stateful] = None,
    critic: Critic | None = None,
    step: int | None = None,
    storage: Storage | None = None,
) -> Resumed | None:
    """Load a full checkpoint that :class:`~trainer_hooks.TrainerHook` has saved.

    Wrap the models and make the optimizers as for training. Then call this function on every rank
    with the same arguments, before the first step. Each rank reads only the bytes of its own part
    of each tensor. So the number of ranks and the mesh may differ from those of the save (FSDP1,
    FSDP2, with or without tensor parallelism, DDP, one process). Floating values are cast to the
    floating dtype of the given model's tensor, and integers to its integer dtype.

    Promised:

    - All loaded data are of the same save, and are the bytes that were written. Every file is
      checked against its receipt, and one rank checks every byte against the file's CRC-32. Two
      kinds of files have no CRC-32: ``model.safetensors``, and files of a trainer that switched
      CRC-32 off.
    - Either all ranks return, or all ranks raise.
    - With the same number of ranks and the same mesh, training continues as if it had never
      stopped.

    Not promised:

    - That model and optimizer are unchanged after an error. A damaged file may be found after a
      part of it was loaded.
    - That the result of a module's ``get_extra_state`` is restored: the result is ignored.
    - With another number of ranks: that each rank's random number generators, user state and
      scheduler are restored. The generators stay unchanged, all ranks get the user state and the
      scheduler of rank 0, and a warning says so.

    Args:
        job_dir: the job directory; nothing in it is changed.
        model: gets the actor's weights, in place. A hook that is made of it lets explorers serve
            them before the first step.
        optimizer: gets the saved state. It is a ``torch.optim.Optimizer`` of this model; a sequence
            of several, in any order; or any other object with ``load_state_dict``, which can resume
            only on the same number of ranks. If None, the saved state is ignored.
        scheduler: the learning rate's scheduler, or a sequence of several, in the same order as at
            the save. If None, the saved state is ignored.
        critic: another model and its optimizer, which get what is saved in ``critic/``.
        step: the step to load; by default the result of :func:`latest_checkpoint`.
        storage: set only by tests.

    Returns:
        The checkpoint; None if no ``step`` is given, and nothing was ever saved.

    Raises:
        CheckpointError: a file of the step is missing or damaged, or belongs to another model or
            optimizer; or there are full checkpoints, but none is complete.
        InvalidSettingsError: the step is not a whole number; an optimizer or a scheduler has no
            ``state_dict``, for example because it is a class; or, of several optimizers, one is not
            torch's, or two update the same parameter.
        JobUnavailableError: the job directory does not exist.
        OSError: the job directory cannot be read now.
    """
    check_stateful(optimizer=optimizer, scheduler=scheduler)
    critic = given_or_default("critic", Critic, critic)
    if step is not None:
        check_step(step)
    job = Job.at(Path(job_dir).absolute(), storage)
    ranks = Ranks()
    chosen = ranks.of_first(lambda: _chosen(job, step))
    if chosen is None:
        return None
    saved = job.layout.step(chosen.step)
    is_exact = chosen.world_size == ranks.world_size
    own = ranks.rank if is_exact else None
    checked = range(ranks.rank, chosen.world_size, ranks.world_size)
    with ExitStack() as stack:
        parts: list[Loading] = []

        def files(folder: str, names: Sequence[str], *, is_optimizer: bool = False) -> SavedFiles:
            vouched = chosen.vouched.get(folder)
            return SavedFiles(job.storage, saved / folder, names, vouched, is_optimizer)

        def open_parts() -> dict[str, Any]:
            for folder, module, its in (
                (ACTOR, trained_model(model), optimizer),
                (CRITIC, critic.model, critic.optimizer),
            ):
                if module is None:
                    continue
                weights = files(folder, chosen.weights_in(folder))
                states = files(folder, chosen.optimizers, is_optimizer=True)
                for part in loadings(module, its, weights, states):
                    parts.append(part)
                    stack.enter_context(part.files)
                    part.open(own, checked)
            parts.sort(key=lambda part: part.is_optimizer, reverse=True)
            name = extra_state_name(chosen.world_size, own or 0)
            extra = _extra_state(files(ACTOR, [name]))
            _check_base(extra, model, saved)
            return extra

        extra = ranks.together(open_parts)
        # From here on FSDP1's collectives run between each rank's own work.
        undo = stack.enter_context(ExitStack())
        for part in parts:
            undo.callback(part.forget)
            part.prepare()
        ranks.together(lambda: _each(parts, lambda part: part.plan(own)))
        _all_is_used(ranks, parts)
        ranks.together(lambda: _each(parts, lambda part: part.fill(checked)))
        # A scheduler may change its optimizer's options as it loads: the saved ones count.
        ranks.together(lambda: _load_schedulers(extra, scheduler, saved))
        for part in parts:
            part.load()
        undo.pop_all()
        if own is not None:
            ranks.together(lambda: set_rng_state(extra[RNG]))
        averages = extra.get(AVERAGES, {})
        for name, value in own_buffers(model).items():
            if name in averages:
                value.copy_(averages[name])
            else:
                log.warning("%s has no %s, so the average begins anew", saved, name)
    if not is_exact:
        warnings.warn(
            f"{saved} was saved by {chosen.world_size} ranks and is resumed by "
            f"{ranks.world_size} ranks. Random number generators are not restored. All ranks get "
            "the user state and the scheduler of rank 0",
            stacklevel=3,
        )
    log.info("resumed from %s", saved)
    remember(model, ResumedFrom(step=chosen.step, save_id=chosen.identity))
    return Resumed(chosen.step, extra.get(USER_STATE), chosen.save_id, chosen.world_size, is_exact)


def _each(parts: Iterable[Loading], work: Callable[[Loading], None]) -> None:
    for part in parts:
        work(part)


def _chosen(job: Job, step: int | None) -> FullCheckpoint | None:
    if step is None:
        found = find_checkpoint(job)
        if found.checkpoint is None and found.reasons:
            raise CheckpointError(
                f"{job.layout.root} has no complete full checkpoint ({'; '.join(found.reasons)}). "
                "Restore a full checkpoint. To train from the beginning, use another job "
                "directory"
            )
        return found.checkpoint
    checkpoint = look_at_checkpoint(job, step, is_pointed=pointed_step(job) == step)
    if isinstance(checkpoint, str):
        raise CheckpointError(f"training cannot resume from step {step}, because {checkpoint}")
    return checkpoint


def _all_is_used(ranks: Ranks, parts: list[Loading]) -> None:
    """Raise if no rank uses some saved value, e.g. because the model has fewer layers."""
    _each({part.files.kind: part for part in parts}.values(), lambda part: part.say())
    # A rank may lack an optimizer of other ranks. Several optimizers have the same files.
    unused = ranks.gathered({part.files.kind: part.unused() for part in parts})
    if not any(any(names.values()) for names in unused):
        return
    taken = ranks.gathered({part.files.kind: part.files.taken for part in parts})
    for part in parts:
        left = set().union(*(names.get(part.files.kind, ()) for names in unused))
        left -= set().union(*(names.get(part.files.kind, ()) for names in taken))
        if left:
            raise CheckpointError(
                f"{part.files.paths[0]} and the files beside it have {few_names(sorted(left))}, "
                f"which {part.whose} does not have. The files belong to another model or optimizer"
            )


def _extra_state(files: SavedFiles) -> dict[str, Any]:
    found = files.loaded(0)
    if not isinstance(found, dict) or RNG not in found:
        raise CheckpointError(
            f"{files.paths[0]} does not contain the extra state that trainer_hooks saves (such as "
            "the states of random number generators). Load another save"
        )
    return found


def _check_base(extra: Mapping[str, Any], model: nn.Module, folder: Path) -> None:
    """Raise if the adapters were saved for another base model."""
    saved, here = extra.get(BASE_MODEL), None
    if adapters_of(model):
        here = base_name(unwrapped(model))
    if not isinstance(saved, str) or here is None:
        return
    differs = are_two_models(saved, here)
    if differs:
        raise CheckpointError(
            f"{folder} holds adapters of the base model {shown(saved)}, but the base model of "
            f"this process is {shown(here)}. Use the same base model as at the save"
        )
    if differs is None:
        log.warning(
            "%s holds adapters that were trained on the base model %s, and the base model of "
            "this process is %s. syncd cannot tell whether these base models are the same. If they "
            "differ, resume with the base model of the save",
            folder,
            shown(saved),
            shown(here),
        )


def _load_schedulers(extra: Mapping[str, Any], scheduler: Some[Stateful], folder: Path) -> None:
    schedulers, states = each_of(scheduler), each_of(extra.get(SCHEDULER))
    if len(schedulers) not in {0, len(states)}:
        raise CheckpointError(
            f"{folder} was saved with {len(states)} schedulers, not {len(schedulers)}. Give those "
            "of the save, in the same order, or scheduler=None"
        )
    for one, state in zip(schedulers, states, strict=False):
        one.load_state_dict(state)
