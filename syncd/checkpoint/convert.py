"""Full checkpoints as Hugging Face models: the merged weights of a step in its ``huggingface/``.

What is put there is the trainer's folder's own, and never read again: not by a later merge of the
step, and not to tell one save from another. ``manifest.json`` beside it says which save it is of,
and which files there must be.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.free_space import FreeSpace
from syncd.checkpoint.merge import Progress, unheard
from syncd.checkpoint.model_folder import INDEX
from syncd.checkpoint.save import Save, confirm_unchanged, look_at_save
from syncd.checkpoint.tensor_rules import Cast
from syncd.checkpoint.version import read_manifest
from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    RecordError,
    SaveNotReadyError,
)
from syncd.protocol.layout import JobLayout
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
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Storage
from syncd.storage.steps import step_folders

log = logging.getLogger(__name__)

#: Where the merge is made, beside ``huggingface/``: the daemon collects what lies still there.
_ROOM: Final = f"{TEMPORARY}{HUGGINGFACE}-"
#: Seconds between two signs that a merge in such a room goes on; without one for three times as
#: long, whoever made it is gone.
_SIGN: Final = 10.0
#: How often such a room is begun: one may be taken away before anything is in it.
_ATTEMPTS: Final = 5
_INDEX_LIMIT: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Found:
    """A full checkpoint, and what is to be done about it.

    Attributes:
        step: whose folder it is in.
        save: the save, as it was looked at.
        has_weights: that its weights are in ``huggingface/`` already.
        why_not: why it is none to convert: its trainer writes it, or it is an adapter.
    """

    step: int
    save: Save
    has_weights: bool = False
    why_not: str = ""


def full_steps(storage: Storage, layout: JobLayout) -> list[int]:
    """The steps that hold a full checkpoint, lowest first.

    With our hook's receipts that is said by ``.full_checkpoint`` alone; of another trainer also by
    an optimizer's, an extra or a ``torch.distributed.checkpoint`` file in ``actor/``. What its
    trainer has retired is none any more.

    Raises:
        JobUnavailableError: the job is not there.
        OSError: storage does not answer.
    """
    if not storage.exists(layout.root):
        raise JobUnavailableError(f"{layout.root} is not there: is its storage mounted?")
    return [step for step in step_folders(storage, layout) if _is_full(storage, layout, step)]


def look_at_step(storage: Storage, layout: JobLayout, step: int) -> Found:
    """What there is to convert in a step's folder.

    Raises:
        InvalidSettingsError: it holds no full checkpoint.
        SaveNotReadyError: its weights are not whole.
        OSError: storage does not answer.
    """
    actor = layout.actor(step)
    if not _is_full(storage, layout, step):
        raise InvalidSettingsError(
            f"{layout.step(step)} holds no full checkpoint: merge what is in it into a folder of "
            f"your own with 'syncd merge {actor} FOLDER'"
        )
    save = look_at_save(storage, actor, step)
    if storage.exists(layout.step(step) / SAVING):
        return Found(step, save, why_not="its trainer is writing it, or was cut off")
    if save.identity is None:
        raise SaveNotReadyError(save.reason)
    if save.is_adapter:
        return Found(step, save, why_not="it is a LoRA adapter, which PEFT loads as it is")
    return Found(step, save, has_weights=_has_weights(storage, actor / HUGGINGFACE, save))


def convert_step(
    storage: Storage,
    layout: JobLayout,
    found: Found,
    *,
    max_file_size: int,
    cast: Cast | None = None,
    prefix: str | None = None,
    threads: int = 1,
    progress: Progress = unheard,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Manifest | None:
    """Merge a full checkpoint into its ``huggingface/`` folder.

    The weights, in files as ``build_model_folder`` makes them, are renamed into it, after
    ``manifest.json``; of several files the index comes last. Cut off anywhere, there is a whole
    model or none, and the next call does it again. Nothing else in the step's folder is changed.

    Not promised: that a trainer which saves this step again at that very moment is noticed. Then
    ``manifest.json`` names the save before, and the next call converts the new one.

    Args:
        storage: the shared storage.
        layout: the job.
        found: what :func:`look_at_step` found.
        max_file_size: the most bytes of tensors in one file.
        cast: what floating tensors are to become; None for what they are.
        prefix: of names in a save of ``torch.distributed.checkpoint``; None to find out.
        threads: how many files are written at a time.
        progress: called with the bytes of tensors that are done, and those of all.
        sleep: waits so many seconds.
        clock: seconds, monotonic.

    Returns:
        The manifest; None where the shards turned out to hold a LoRA adapter.

    Raises:
        NoRoomError: there is no room for it; nothing was begun.
        JobUnavailableError: another process is converting it.
        SaveNotReadyError: the save is not whole, or changed meanwhile.
        CheckpointError: it cannot be merged.
        OSError: storage refused.
    """
    actor = layout.actor(found.step)
    room = actor / f"{_ROOM}{secrets.token_hex(6)}"
    _sweep(storage, actor, sleep)
    said_at = clock()

    def sign() -> None:
        nonlocal said_at
        if clock() - said_at >= _SIGN:
            said_at = clock()
            _refresh_all(storage, room)

    FreeSpace(storage, actor, layout.root, advice="make room there").check(
        actor, found.save, cast=cast, prefix=prefix, cancel=sign
    )
    with _gone_means_changed(storage, layout.step(found.step)):
        try:
            _make_room(storage, room, layout.step(found.step))
            manifest = build_model_folder(
                storage,
                actor,
                found.save,
                room,
                sequence=0,
                digests=True,
                max_file_size=max_file_size,
                cast=cast,
                prefix=prefix,
                threads=threads,
                cancel=sign,
                progress=progress,
            )
            if manifest.kind != "full":
                return None
            confirm_unchanged(storage, actor, found.save)
            if storage.exists(layout.step(found.step) / SAVING):
                raise SaveNotReadyError(f"{layout.step(found.step)} is being saved again")
            _put_in_place(storage, room, actor / HUGGINGFACE, manifest)
        finally:
            storage.remove_tree(room)
    return manifest


def _is_full(storage: Storage, layout: JobLayout, step: int) -> bool:
    names = storage.names(layout.step(step))
    if FULL in names or RETIRED in names:
        return FULL in names
    inside = storage.names(layout.actor(step))
    return RECEIPTS not in inside and any(map(is_resumable_state, inside))


def _has_weights(storage: Storage, folder: Path, save: Save) -> bool:
    """Whether a ``huggingface/`` folder has the weights of a save.

    Of what has no manifest, its trainer's own, it counts that it is whole.
    """
    try:
        manifest = read_manifest(storage, folder)
    except RecordError:
        return False
    except OSError as error:
        if not (is_gone(error) or is_no_record(error)):
            raise
        return _is_whole_model(storage, folder)
    sizes = {file.name: file.size for file in manifest.files if is_weights_name(file.name)}
    return manifest.save_id == save.identity and all(
        (status := storage.status(folder / name)) is not None and status.st_size == size
        for name, size in sizes.items()
    )


def _is_whole_model(storage: Storage, folder: Path) -> bool:
    names = set(storage.names(folder))
    if FULL_STATE_DICT in names:
        return True
    if INDEX not in names:
        return False
    try:
        index = json.loads(storage.read(folder / INDEX, _INDEX_LIMIT))
        return bool(index["weight_map"]) and names.issuperset(index["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # cut off, or none at all
    except OSError as error:
        if is_gone(error) or is_no_record(error):
            return False
        raise


def _put_in_place(storage: Storage, room: Path, folder: Path, manifest: Manifest) -> None:
    """Rename the weights into the folder: nobody finds files of two merges as one model.

    The old ones go first, and what a loader looks for first; the new ones come the other way round.
    Those too that no manifest lists: engines load whatever has such a name, where no index says
    what counts.
    """
    weights = [file.name for file in manifest.files if is_weights_name(file.name)]
    storage.make_folder(folder, below=folder.parent)
    sought = [FULL_STATE_DICT, INDEX]
    old = _listed(storage, folder).union(weights, filter(parse_part_name, storage.names(folder)))
    for name in (*sought, *sorted(old.difference(sought))):
        storage.unlink_if_there(folder / name)
    storage.sync_folder(folder)
    storage.rename(room / MANIFEST, folder / MANIFEST)
    for name in sorted(weights, key=sought.__contains__):
        if name in sought:
            storage.sync_folder(folder)
        storage.rename(room / name, folder / name)
    storage.sync_folder(folder)


def _listed(storage: Storage, folder: Path) -> set[str]:
    """The weights that an earlier merge put there."""
    try:
        files = read_manifest(storage, folder).files
    except RecordError:
        return set()
    except OSError as error:
        if is_gone(error) or is_no_record(error):
            return set()
        raise
    return {file.name for file in files if is_weights_name(file.name)}


def _sweep(storage: Storage, actor: Path, sleep: Callable[[float], None]) -> None:
    """Remove the rooms of processes that were killed: those that give no sign for long enough.

    Raises:
        JobUnavailableError: there is one that does.
    """
    before = _rooms(storage, actor)
    if not before:
        return
    log.debug("%s: what was left there is watched for %g s", actor, 3 * _SIGN)
    sleep(3 * _SIGN)
    now = _rooms(storage, actor)
    for room, seen in before.items():
        if now.get(room, seen) != seen:
            raise _busy(actor)
        storage.remove_tree(room)


def _make_room(storage: Storage, room: Path, step: Path) -> None:
    """Make a room, and something in it: the daemon takes an empty one away at once.

    Raises:
        JobUnavailableError: another process made one at the same time.
    """
    for left in reversed(range(_ATTEMPTS)):
        storage.make_folder(room, below=step)
        try:
            storage.write_new(room / f"{TEMPORARY}began", b"")
            break
        except FileNotFoundError:
            if not left:
                raise
    # After ours is there: of two that began at once, and saw none, one sees the other at least.
    if _rooms(storage, room.parent).keys() != {room}:
        raise _busy(room.parent)


def _busy(actor: Path) -> JobUnavailableError:
    return JobUnavailableError(f"another process is converting {actor}: wait for its end")


def _rooms(storage: Storage, actor: Path) -> dict[Path, frozenset[tuple[str, int, int]]]:
    """Each room, and what would change in it if someone were at work there."""
    found = {}
    for name in storage.names(actor):
        if not name.startswith(_ROOM):
            continue
        room = actor / name
        inside = {path: _fresh_status(storage, room / path) for path in (".", *storage.names(room))}
        found[room] = frozenset(
            (path, status.st_size, status.st_mtime_ns)
            for path, status in inside.items()
            if status is not None
        )
    return found


def _fresh_status(storage: Storage, path: Path) -> os.stat_result | None:
    """Through an open: what a client of a network filesystem remembers may be a minute old."""
    try:
        return storage.look_into(path, storage.fstat)
    except OSError as error:
        if not (is_gone(error) or is_no_record(error) or is_refused_here(error)):
            raise
    return storage.status(path)


def _refresh_all(storage: Storage, room: Path) -> None:
    """Say that this process is at work: what lies still for long is collected."""
    for path in (room, *(room / name for name in storage.names(room))):
        try:
            storage.refresh(path)
        except OSError as error:
            if not is_gone(error):
                raise


@contextmanager
def _gone_means_changed(storage: Storage, folder: Path) -> Iterator[None]:
    """A step that its trainer, or the pruner, takes away meanwhile is none to convert."""
    try:
        yield
    except OSError as error:
        if is_gone(error) and not storage.exists(folder):
            raise SaveNotReadyError(f"{folder} went while it was converted") from error
        raise
