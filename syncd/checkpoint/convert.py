"""Converting full checkpoints into Hugging Face models, in the steps' ``huggingface/`` folders.

``manifest.json`` in this folder lists the converted weights, and names the save that they were made
from.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from syncd.checkpoint.build import FreeSpace, build_model_folder
from syncd.checkpoint.masters import in_models_dtype
from syncd.checkpoint.merging.options import MergeOptions, Progress, Work, unheard
from syncd.checkpoint.model_folder import INDEX
from syncd.checkpoint.save import (
    Delta,
    LoraAdapter,
    SavedWeights,
    Unfinished,
    confirm_unchanged,
    look_at_save,
)
from syncd.checkpoint.version import read_manifest
from syncd.protocol.errors import (
    InvalidSettingsError,
    RecordError,
    SaveNotReadyError,
)
from syncd.protocol.names import (
    FULL,
    FULL_STATE_DICT,
    HUGGINGFACE,
    MANIFEST,
    RECEIPTS,
    RETIRED,
    SAVING,
    TEMPORARY,
    is_resumable_state,
    is_weights_name,
    parse_part_name,
)
from syncd.protocol.records import Manifest
from syncd.storage.errnos import GONE, Ignoring, is_gone
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

#: The prefix of a merge's temporary folder. It is not in ``actor/``, because the daemon deletes
#: temporary files there that do not change.
_ROOM: Final = f"{TEMPORARY}{HUGGINGFACE}-"
#: Loaders look for one of these first.
_SOUGHT: Final = (FULL_STATE_DICT, INDEX)


def look_at_step(job: Job, step: int) -> SavedWeights:
    """Find the checkpoint to convert in a step's folder.

    Raises:
        InvalidSettingsError: the folder holds no full checkpoint.
        SaveNotReadyError: no weights are whole, or the only whole weights were cast for explorers,
            or they are a LoRA adapter.
    """
    actor = job.layout.actor(step)
    names, inside = job.storage.names(actor.parent), job.storage.names(actor)
    foreign = RETIRED not in names and RECEIPTS not in inside
    save = look_at_save(job.storage, actor, step)
    if FULL not in names and not (foreign and any(map(is_resumable_state, inside))):
        advice = f"merge its shards into a folder of your own with 'syncd merge {actor} FOLDER'"
        if isinstance(save, Delta):
            advice = save.refusal(actor)
        raise InvalidSettingsError(f"{actor.parent} holds no full checkpoint: {advice}")
    if SAVING in names:
        raise SaveNotReadyError(
            f"the trainer is still writing {actor.parent}, or ended before the save was complete. "
            "Run 'syncd convert' again after the save"
        )
    if isinstance(save, Unfinished):
        raise SaveNotReadyError(save.reason)
    if isinstance(save, LoraAdapter):
        raise _is_adapter(actor)
    if save.is_for_people:
        raise InvalidSettingsError(f"{actor / save.model_folder} is a Hugging Face model already")
    return in_models_dtype(job.storage, actor, save)


def has_weights(storage: Storage, folder: Path, save: SavedWeights) -> bool:
    """True if ``folder`` has weights that a merge of ``save`` wrote, or the trainer's own model."""
    names = storage.names(folder)
    if MANIFEST not in names:
        is_whole = not isinstance(look_at_save(storage, folder, save.step), Unfinished)
        return is_whole and not set(_SOUGHT).isdisjoint(names)
    try:
        manifest = read_manifest(storage, folder)
    except RecordError:
        return False
    return manifest.save_id == save.identity and all(
        (status := storage.status(folder / name)) is not None and status.st_size == size
        for name, size in weight_sizes(manifest).items()
    )


def convert_step(
    job: Job, save: SavedWeights, options: MergeOptions, *, progress: Progress = unheard
) -> Manifest:
    """Merge a full checkpoint into ``huggingface/``.

    The files are made in a temporary folder, then renamed: first ``manifest.json``, then the
    weights, last the index. A crash therefore leaves a whole model or no model, and the next call
    starts again. If several processes convert a checkpoint, all but one fail.

    If a trainer saves this step again during the renames, ``manifest.json`` may name the earlier
    save. Then the next call converts the new save.

    Raises:
        NoRoomError: there is not enough disk space.
        SaveNotReadyError: the save is not whole, changed meanwhile, is a LoRA adapter, or is
            converted by another process.
        CheckpointError: the save cannot be merged.
    """
    storage, actor = job.storage, job.layout.actor(save.step)
    work = Work(lambda: None, progress)
    space = FreeSpace(storage, actor, job.layout.root, advice=": make room there")
    room = job.layout.step(save.step) / f"{_ROOM}{secrets.token_hex(6)}"
    try:
        _make_room(storage, room)
        space.check(actor, save, options, work.cancel)
        options = options._replace(keeps_config=True)  # the folder's own, which receipts list
        manifest = build_model_folder(storage, actor, save, room, options=options, work=work)
        if manifest.kind != "full":
            raise _is_adapter(actor)
        look_at_step(job, save.step)
        confirm_unchanged(storage, actor, save)
        _put_in_place(storage, room, actor / HUGGINGFACE, weight_sizes(manifest))
    except OSError as error:
        if is_gone(error) and not storage.exists(room):
            raise SaveNotReadyError(
                f"{room} disappeared while {actor} was converted: another process now converts it, "
                "or deleted the step"
            ) from error
        raise
    finally:
        storage.remove_tree(room)
    return manifest


def _is_adapter(actor: Path) -> SaveNotReadyError:
    return SaveNotReadyError(f"{actor} holds a LoRA adapter, which PEFT loads as it is")


def weight_sizes(manifest: Manifest) -> dict[str, int]:
    """The bytes of each file of weights, by name."""
    return {file.name: file.size for file in manifest.files if is_weights_name(file.name)}


def _make_room(storage: Storage, room: Path) -> None:
    """Make the temporary folder, and take away those of other processes, which fail if they run.

    One rename takes a folder away. Of several processes that begin at the same time one keeps its
    folder: who has lost the own one has no place any more to move another one to.
    """
    storage.mkdir(room)
    for name in storage.names(room.parent):
        if name.startswith(_ROOM) and name != room.name:
            with Ignoring({*GONE, errno.EINVAL}):  # EINVAL: ours is in the other one
                storage.rename(room.with_name(name), room / name)
            storage.remove_tree(room / name)


def _put_in_place(storage: Storage, room: Path, folder: Path, weights: Iterable[str]) -> None:
    """Rename the weights into the folder, so that no loader mixes the files of two merges.

    The file that a loader looks for first is removed first and renamed last. All parts are removed,
    because an engine loads all weights if there is no index.
    """
    storage.make_folder(folder, below=folder.parent)
    storage.refresh(room.parent)
    storage.utime(room)  # an error, before anything changes, if another process has taken it away
    for name in (*_SOUGHT, *filter(parse_part_name, storage.names(folder))):
        storage.unlink_if_there(folder / name)
    storage.sync_folder(folder)
    for name in (MANIFEST, *sorted(weights, key=_SOUGHT.__contains__)):
        if name in _SOUGHT:
            storage.sync_folder(folder)
        storage.rename(room / name, folder / name)
    storage.sync_folder(folder)
