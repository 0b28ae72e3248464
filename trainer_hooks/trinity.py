"""Trinity-RFT's FSDP helpers, which save through syncd. To port a trainer, change the import.

The functions have the names, arguments and meaning of the functions in
``trinity.trainer.verl.fsdp_engine``; ``docs/trinity.md`` lists the differences. Call them on all
ranks. An engine is verl's ``FSDPEngine`` (``engine.actor.engine`` of a worker), or any object that
has ``module``. The attributes ``checkpoint_manager.processing_class``, ``get_per_tensor_param`` and
``_strategy`` are optional.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import SyncMethod, SyncSettings, given_or_default
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from trainer_hooks.ranks import LedRanks, Ranks
from trainer_hooks.saver import ClosingSaver, Saver
from trainer_hooks.settings import SaveSettings
from trainer_hooks.state.full_checkpoint import loadable
from trainer_hooks.state.gather import full_tensor
from trainer_hooks.state.host_buffers import HostBuffers
from trainer_hooks.state.hub_names import HubNames
from trainer_hooks.state.model_files import Pretrained, model_files
from trainer_hooks.state.small_files import Files, SmallFiles
from trainer_hooks.state.state_dict import fsdp_version, sharded_state_dict
from trainer_hooks.writing.rank_files import RankContents
from trainer_hooks.writing.writer import RankWriter

log = logging.getLogger(__name__)

__all__ = [
    "CheckpointCoordinator",
    "FSDPEngine",
    "StateDictWriter",
    "fsdp_save_state_dict",
    "fsdp_state_dict_meta",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
]


class FSDPEngine(Protocol):
    """The part of verl's engine that is needed here.

    Attributes:
        module: the trained model: a plain module, or one under FSDP1 or FSDP2.
    """

    @property
    def module(self) -> nn.Module:
        """The model."""


def fsdp_save_state_dict(
    engine: FSDPEngine,
    local_path: str | Path | None,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: logging.Logger,
) -> None:
    """Save each rank's shard of the engine's model for explorers. Call it on all ranks.

    Each rank copies its shard to host memory, and writes the copy in the background. Rank 0 also
    saves the config, and the tokenizer of ``engine.checkpoint_manager.processing_class``.
    ``local_path`` must be ``JOB/global_step_N/actor``, where N is ``global_step``. If it is None,
    nothing is saved. ``coordinator`` must be this rank's coordinator. ``logger`` gets a message
    when the save has begun.

    Raises:
        InvalidSettingsError: the daemon would not find the save in ``local_path``, or a value in
            the state dict is no tensor.
        SaveFailedError: an earlier save failed.
    """
    if local_path is None:
        return
    coordinator.check_path(local_path, global_step)
    checkpoints = getattr(engine, "checkpoint_manager", None)
    files = model_files(engine.module, getattr(checkpoints, "processing_class", None))()
    coordinator.save_model(engine.module, global_step, model_files=(files,))
    logger.info("the state dict of step %d is being written to %s", global_step, local_path)


def fsdp_upload_state_dict(
    engine: FSDPEngine,
    synchronizer: TrainerSynchronizer | None,
    global_step: int,
    logger: logging.Logger,
) -> None:
    """Give the engine's full state dict to rank 0's Synchronizer. Call it on all ranks.

    Rank 0 holds the whole state dict in host memory, and training waits until the state dict is
    written. The other ranks wait in a collective of the default process group, so the timeout of
    that group (10 minutes for NCCL by default) must be longer than the write. Prefer a
    :class:`~trainer_hooks.hook.TrainerHook` with ``method="memory"``: it writes in a thread.

    On rank 0, ``synchronizer`` must be a ``TrainerSynchronizer`` of syncd with a
    :class:`StateDictWriter`, not a Ray actor. On other ranks it is None. If ``global_step`` is 0,
    nothing is uploaded. ``logger`` gets a message when the state dict is written.

    Raises:
        InvalidSettingsError: rank 0 has no ``TrainerSynchronizer`` of syncd; raised on all ranks.
        SaveFailedError: the state dict was not written; raised on all ranks.
    """
    if global_step == 0:
        return
    ranks = Ranks()
    whole = {
        name: tensor.detach().cpu()
        for name, value in sharded_state_dict(engine.module).items()
        if isinstance(value, Tensor) and (tensor := full_tensor(value, rank=ranks.rank)) is not None
    }

    def upload() -> None:
        if ranks.rank > 0:
            return
        if not isinstance(synchronizer, TrainerSynchronizer):
            raise InvalidSettingsError(
                f"step {global_step} cannot be uploaded to {type(synchronizer).__name__}. On rank "
                "0 pass a syncd.coordination.TrainerSynchronizer that has a StateDictWriter"
            )
        synchronizer.set_model_state_dict(whole, global_step)

    # In place of the original's barrier, so that an error on rank 0 is raised everywhere.
    ranks.together(upload)
    logger.info("the state dict of step %d was uploaded", global_step)


@torch.no_grad()
def fsdp_sync_weight_nccl(engine: FSDPEngine, model_update_group: dist.ProcessGroup | None) -> None:
    """Broadcast the full weights, tensor by tensor. Call it on all ranks.

    All ranks take part in each gathering; only rank 0 takes part in the broadcasts. Receivers must
    expect the tensors in the order of :func:`fsdp_state_dict_meta`.

    Args:
        engine: the FSDPEngine. If the engine's ``_strategy`` is not ``fsdp`` (FSDP1), and the
            engine has ``get_per_tensor_param()``, the weights are the result of that method.
        model_update_group: a process group of any backend, with the trainer's rank 0 as its rank 0,
            and the receivers. Ignored on other ranks.

    Raises:
        InvalidSettingsError: rank 0 has no group; raised only on rank 0, after all gatherings.
        RuntimeError: a collective of torch failed.
    """
    device: torch.device | None = None
    rank = Ranks().rank
    for _, weight in _weights(engine):
        whole = full_tensor(weight, rank=rank)
        if whole is not None and model_update_group is not None:
            device = whole.device
            dist.broadcast(whole.detach().contiguous(), 0, group=model_update_group)
    if model_update_group is None and rank == 0:
        # For torch, None is the default group, in which there are no receivers.
        raise InvalidSettingsError(
            "the weights cannot be broadcast: rank 0 has no model_update_group with the receivers"
        )
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def fsdp_state_dict_meta(engine: FSDPEngine) -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors that :func:`fsdp_sync_weight_nccl` broadcasts, in order. Call it on all ranks.

    Returns:
        On rank 0 the name, the dtype (e.g. ``bfloat16``) and the whole shape of each tensor, as
        Trinity's ``get_weight_sync_info`` returns them; an empty list on other ranks.
    """
    # Each rank knows the whole shape of its parts, so nothing is gathered for it.
    told = [
        (name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
        for name, weight in _weights(engine)
    ]
    return told if Ranks().rank == 0 else []


class CheckpointCoordinator(ClosingSaver):
    """Writes one rank's saves in a thread, one by one. Replaces Trinity-RFT's class of this name.

    Promised: the pointer names a step only when every rank's shard of one save is complete and
    durable. If a save fails on a rank, the next call on that rank raises the error once. So does
    the next call on rank 0.

    Not promised: that a save is announced when a call returns. :meth:`wait_all` waits for the
    announcement. This class never moves the checkpoint pointer,
    ``latest_checkpointed_iteration.txt``.

    Construct the coordinator on every rank. Call the same methods in the same order on all ranks.

    Args:
        job_dir: an existing folder on storage that all ranks, the daemon and the explorers share.
        settings: only ``save_timeout`` and ``method`` are used. ``method`` must be ``checkpoint``.
        name: the name of the trainer; a job has one trainer.

    Raises:
        JobUnavailableError: the job directory is missing or not writable on some rank.
        NameTakenError: another trainer works in this job. The check may take one lease time.
        InvalidSettingsError: the method is not ``checkpoint``.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        settings: SyncSettings | None = None,
        name: str = "trainer",
        storage: Storage | None = None,
    ) -> None:
        settings = given_or_default("settings", SyncSettings, settings)
        if settings.method is not SyncMethod.CHECKPOINT:
            raise InvalidSettingsError(
                f"CheckpointCoordinator supports only method checkpoint, not {settings.method}"
            )
        alone = Ranks()
        self._saver = saver = Saver(
            job_dir,
            alone.rank,
            alone.world_size,
            settings=settings,
            saving=SaveSettings(name=name),
            storage=storage,
        )
        saver.open_together(LedRanks(timeout=saver.patience, save_timeout=settings.save_timeout))
        self._hub_names: HubNames | None = None
        self._closed = False

    def save_async(
        self,
        name: str,
        save_fn: Callable[[], object],
        global_step: int,
        is_state_dict: bool = False,
    ) -> None:
        """Call ``save_fn`` in the background, when all earlier functions have returned.

        With ``is_state_dict``, ``save_fn`` must write this rank's part of the state dict with
        ``torch.save`` to ``JOB/global_step_N/actor/model_world_size_W_rank_R.pt``. N is
        ``global_step``, W the number of ranks and R this rank. The folder exists. The pointer moves
        to the step once all ranks have written. If storage fails for a moment, ``save_fn`` is
        called again and must start over.

        Training must not change the tensors before ``save_fn`` has returned. ``name`` is for
        messages.

        Raises:
            SaveFailedError: an earlier save failed, or this save waited too long for earlier saves.
        """
        self._check_open()
        saver, told = self._saver, f"{name} of step {global_step}"
        if is_state_dict:
            contents = RankContents(written_by=save_fn)
            saver.save(saver.new(global_step), lambda *_: contents, name=told)
        elif saver.has_room():
            saver.submit(global_step, save_fn)
        else:
            saver.refuse(told)
        saver.raise_failure()

    def save_model(
        self,
        model: nn.Module,
        global_step: int,
        *,
        model_files: tuple[Callable[[Path], object], ...] = (),
    ) -> None:
        """Copy this rank's part of a model to host memory, and save it as ``global_step`` later.

        The ``model`` is plain, or under DDP, FSDP1, FSDP2 or tensor parallelism. With FSDP1 this
        call is collective. ``model_files`` are functions that write the config or the tokenizer
        into a given folder; only rank 0 calls them.

        Raises:
            InvalidSettingsError: a value in the state dict is no tensor.
            SaveFailedError: an earlier save failed, or this save waited too long for earlier saves.
        """
        self._check_open()
        saver = self._saver

        def write_all(folder: Path) -> Iterator[object]:
            for write in model_files:
                made = write(folder)
                if isinstance(made, Iterator):
                    yield from made

        def copied(buffers: HostBuffers | None, _: ExitStack) -> RankContents:
            state = loadable(sharded_state_dict(model))
            files: Callable[[], Files] = dict
            if saver.rank == 0:
                if self._hub_names is None or self._hub_names.model is not model:
                    self._hub_names, self._small_files = HubNames(model), SmallFiles()
                names = self._hub_names.files(state)
                files = partial(dict, names)
                if model_files:
                    files = partial(self._small_files.files, write_all, self._hub_names.key, names)
            return RankContents(
                model=None if buffers is None else buffers.copy(state),
                model_files=files,
                fsdp_version=fsdp_version(model),
            )

        name = f"the state dict of step {global_step}"
        saver.save(saver.new(global_step), copied, name=name)
        saver.raise_failure()

    def check_path(self, local_path: str | Path, global_step: int) -> None:
        """Check that the daemon would find a save of ``global_step`` in ``local_path``.

        Raises:
            InvalidSettingsError: the daemon looks for the step in another folder.
        """
        actor = self._saver.writer.job.layout.actor(global_step)
        if Path(local_path).absolute() != actor:
            raise InvalidSettingsError(
                f"step {global_step} cannot be saved to {local_path}, because the daemon looks "
                f"for this step in {actor}. Save to that folder, or give the "
                "CheckpointCoordinator another job_dir"
            )

    def wait_all(self) -> None:
        """Wait until all saves are announced (on rank 0) or written (on other ranks).

        Raises:
            SaveFailedError: a save failed, or is unfinished after four times the ``save_timeout``.
        """
        self._saver.wait()
        self._saver.raise_failure()


class StateDictWriter:
    """Writes the state dicts that a ``TrainerSynchronizer`` gets, and moves the pointer.

    Promised: the pointer names a step only when its weights are complete and durable. Only rank 0
    needs a StateDictWriter. It uses no process group.

    Args:
        model, tokenizer: the model's config and the tokenizer's files become part of each version.
        save_timeout: seconds that a save waits until storage shows its receipt.

    Raises:
        JobUnavailableError: ``job_dir`` is missing or not writable.
        InvalidSettingsError: the config or the tokenizer cannot be written.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        model: nn.Module | None = None,
        tokenizer: Pretrained | None = None,
        save_timeout: float = 300.0,
        storage: Storage | None = None,
    ) -> None:
        job = Job.at(Path(job_dir).absolute(), storage)
        job.open()
        self._writer = RankWriter(job, 0, 1, save_timeout=save_timeout)
        if model is None:
            model, tokenizer = nn.Module(), None
        self._files = model_files(model, tokenizer)
        self._small_files = SmallFiles()
        self._small_files.files(self._files())
        self._hub_names = HubNames(model)
        self._run_id = secrets.token_hex(6)
        self._counter = 0

    def __call__(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Write the full state dict of a step.

        ``state_dict`` must have whole tensors on the CPU, by the names of the plain model.

        Raises:
            InvalidSettingsError: a value is no tensor.
            SaveFailedError: the state dict could not be written; the previous version stays
                published.
        """
        state_dict = loadable(state_dict)
        self._counter += 1
        save_id = SaveId(self._run_id, step, self._counter)
        names = self._hub_names.files(state_dict)
        files = partial(self._small_files.files, self._files(), self._hub_names.key, names)
        self._writer.save(save_id, RankContents(model=dict(state_dict), model_files=files))


def _weights(engine: FSDPEngine) -> Iterable[tuple[str, Tensor]]:
    """This rank's part of each weight, in the order of the state dict."""
    per_tensor_param = getattr(engine, "get_per_tensor_param", None)
    if getattr(engine, "_strategy", "fsdp") != "fsdp" and per_tensor_param is not None:
        # The engine renames, splits and merges as needed; it may have gathered already.
        weights, _ = per_tensor_param()
        yield from weights
        return
    for name, value in sharded_state_dict(engine.module).items():
        if isinstance(value, Tensor):
            yield name, value
