"""Converting full checkpoints into Hugging Face models, in the steps' ``huggingface/`` folders.

``manifest.json`` in this folder lists the converted weights, and names the save that they were made
from.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from syncd.checkpoint.build import FreeSpace, build_model_folder
from syncd.checkpoint.masters import in_models_dtype
from syncd.checkpoint.merging.options import MergeOptions, Progress, Work, unheard
from syncd.checkpoint.model_folder import FILE_LIMIT, INDEX
from syncd.checkpoint.save import (
    Links,
    LoraAdapter,
    SavedWeights,
    Unfinished,
    confirm_unchanged,
    look_at_save,
)
from syncd.checkpoint.version import read_manifest
from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    RecordError,
    SaveNotReadyError,
)
from syncd.protocol.events import Watching
from syncd.protocol.names import (
    FULL,
    FULL_STATE_DICT,
    HUGGINGFACE,
    MANIFEST,
    MODEL_CONFIG,
    RECEIPTS,
    RETIRED,
    SAVING,
    TEMPORARY,
    is_resumable_state,
    is_weights_name,
    parse_part_name,
)
from syncd.protocol.records import Manifest
from syncd.storage.errnos import (
    GONE,
    NO_RECORD,
    REFUSED_HERE,
    Ignoring,
    again,
    is_gone,
    is_no_record,
)
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

log = logging.getLogger(__name__)

#: The prefix of a merge's temporary folder, which the daemon deletes if it is a leftover.
_ROOM: Final = f"{TEMPORARY}{HUGGINGFACE}-"
#: Seconds between signs of a running merge. After 3 times as long without a sign, it has ended.
_SIGN: Final = 10.0
_INDEX_LIMIT: Final = 64 * 1024 * 1024
#: The suffixes of a base model's config, tokenizer, chat template, and code.
_MODEL_SUFFIXES: Final = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})


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
        if isinstance(save, Links):
            advice = save.refusal(actor)
        raise InvalidSettingsError(f"{job.layout.step(step)} holds no full checkpoint: {advice}")
    if SAVING in names:
        raise SaveNotReadyError(
            f"the trainer is still writing {job.layout.step(step)}, or ended before the save was "
            "complete"
        )
    if isinstance(save, Unfinished):
        raise SaveNotReadyError(save.reason)
    if isinstance(save, LoraAdapter):
        raise _is_adapter(actor)
    return in_models_dtype(job.storage, actor, save)


def lacks_config(storage: Storage, actor: Path) -> bool:
    """True if a step's ``huggingface/`` has no ``config.json``."""
    return not storage.exists(actor / HUGGINGFACE / MODEL_CONFIG)


@contextmanager
def take_model_files(storage: Storage, actor: Path, base: Path) -> Iterator[list[str]]:
    """Copy the base model's config, tokenizer and code into a step's ``huggingface/``.

    Only files directly in ``base`` are copied, and no weights. Links are followed, and existing
    files are kept. ``config.json`` is written last, so that the next call finishes an interrupted
    copy. Yields the copied files' names. If the block fails, these files are removed again.

    Raises:
        SaveNotReadyError: the step was deleted meanwhile.
    """
    folder = actor / HUGGINGFACE
    names = [
        path.name
        for path in base.iterdir()
        if path.suffix in _MODEL_SUFFIXES
        and path.is_file()
        and not is_weights_name(path.name)
        and path.name not in {MANIFEST, MODEL_CONFIG}
    ]
    taken: list[str] = []
    try:
        with _gone_means_changed(storage, actor):
            storage.make_folder(folder, below=actor)
            for name in (*sorted(names), MODEL_CONFIG):
                if storage.exists(folder / name):
                    continue
                content = Storage().read((base / name).resolve(), FILE_LIMIT)
                draft = folder / f"{TEMPORARY}{name}-{secrets.token_hex(6)}"
                try:
                    storage.write_new(draft, content)
                    if name == MODEL_CONFIG:
                        storage.sync_folder(folder)
                    if not storage.link_if_possible(draft, folder / name):
                        storage.rename(draft, folder / name)
                    taken.append(name)
                except FileExistsError:
                    pass  # the trainer has just written its own file
                finally:
                    storage.unlink_if_there(draft)
            storage.sync_folder(folder)
        yield taken
    except BaseException:
        for name in reversed(taken):
            storage.unlink_if_there(folder / name)
        raise


def has_weights(storage: Storage, folder: Path, save: SavedWeights) -> bool:
    """True if ``folder`` has weights that a merge of ``save`` wrote, or the trainer's own model."""
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


def convert_step(
    job: Job,
    save: SavedWeights,
    options: MergeOptions,
    *,
    progress: Progress = unheard,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Manifest:
    """Merge a full checkpoint into ``huggingface/``.

    The files are made in a temporary folder, then renamed: first ``manifest.json``, then the
    weights, last the index. A crash therefore leaves a whole model or no model, and the next call
    starts again.

    If a trainer saves this step again during the renames, ``manifest.json`` may name the earlier
    save. Then the next call converts the new save.

    Raises:
        NoRoomError: there is not enough disk space. Nothing was changed.
        JobUnavailableError: another process is converting the checkpoint.
        SaveNotReadyError: the save is not whole, changed meanwhile, or is a LoRA adapter.
        CheckpointError: the save cannot be merged.
    """
    actor = job.layout.actor(save.step)
    room = actor / f"{_ROOM}{secrets.token_hex(6)}"
    _sweep(job.storage, actor, sleep)
    said_at = clock()

    def sign() -> None:
        nonlocal said_at
        if clock() - said_at >= _SIGN:
            said_at = clock()
            # The daemon deletes such folders if they do not change.
            for path in (room, *(room / name for name in job.storage.names(room))):
                with Ignoring(GONE):
                    job.storage.refresh(path)

    FreeSpace(job.storage, actor, job.layout.root, advice="make room there").check(
        actor, save, options, sign
    )
    with _gone_means_changed(job.storage, job.layout.step(save.step)):
        try:
            _make_room(job.storage, room, job.layout.step(save.step))
            manifest = build_model_folder(
                job.storage,
                actor,
                save,
                room,
                options=options,
                work=Work(sign, progress),
            )
            if manifest.kind != "full":
                raise _is_adapter(actor)
            confirm_unchanged(job.storage, actor, save)
            if job.storage.exists(job.layout.step(save.step) / SAVING):
                raise SaveNotReadyError(
                    f"{job.layout.step(save.step)} is being saved again. Run 'syncd convert' "
                    "again after the save"
                )
            _put_in_place(job.storage, room, actor / HUGGINGFACE, manifest)
        finally:
            job.storage.remove_tree(room)
    return manifest


def _is_adapter(actor: Path) -> SaveNotReadyError:
    return SaveNotReadyError(f"{actor} holds a LoRA adapter, which PEFT loads as it is")


def _is_whole_model(storage: Storage, folder: Path) -> bool:
    names = set(storage.names(folder))
    if FULL_STATE_DICT in names:
        return True
    if INDEX not in names:
        return False
    # The index may be cut off, or no index at all.
    no_index = suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with no_index, Ignoring(GONE | NO_RECORD):
        index = json.loads(storage.read(folder / INDEX, _INDEX_LIMIT))
        return bool(index["weight_map"]) and names.issuperset(index["weight_map"].values())
    return False


def _put_in_place(storage: Storage, room: Path, folder: Path, manifest: Manifest) -> None:
    """Rename the weights into the folder, so that no loader mixes the files of two merges.

    The file that a loader looks for first is removed first and renamed last. Unlisted weights are
    removed too, because an engine loads all weights if there is no index.
    """
    weights = [file.name for file in manifest.files if is_weights_name(file.name)]
    storage.make_folder(folder, below=folder.parent)
    sought = [FULL_STATE_DICT, INDEX]
    old = {*weights, *filter(parse_part_name, storage.names(folder))}
    with suppress(RecordError), Ignoring(GONE | NO_RECORD):
        old.update(file.name for file in read_manifest(storage, folder).files)
    old = set(filter(is_weights_name, old))
    for name in (*sought, *sorted(old.difference(sought))):
        storage.unlink_if_there(folder / name)
    storage.sync_folder(folder)
    storage.rename(room / MANIFEST, folder / MANIFEST)
    for name in sorted(weights, key=sought.__contains__):
        if name in sought:
            storage.sync_folder(folder)
        storage.rename(room / name, folder / name)
    storage.sync_folder(folder)


def _sweep(storage: Storage, actor: Path, sleep: Callable[[float], None]) -> None:
    """Remove temporary folders of killed processes; raise an error if one still changes."""
    before = _rooms(storage, actor)
    if not before:
        return
    Watching(actor, 3 * _SIGN).tell(log)
    sleep(3 * _SIGN)
    now = _rooms(storage, actor)
    for room, seen in before.items():
        if now.get(room, seen) != seen:
            raise _busy(actor)
        storage.remove_tree(room)


def _make_room(storage: Storage, room: Path, step: Path) -> None:
    """Make the temporary folder with a file in it, because the daemon deletes an empty folder."""

    def make() -> None:
        storage.make_folder(room, below=step)
        storage.write_new(room / f"{TEMPORARY}began", b"")

    again(make)
    # Look only after our room exists: if two processes begin at the same time, at least one of
    # them then sees the other's room.
    if _rooms(storage, room.parent).keys() != {room}:
        raise _busy(room.parent)


def _busy(actor: Path) -> JobUnavailableError:
    return JobUnavailableError(
        f"another process is converting {actor}: wait until that process has finished"
    )


def _rooms(storage: Storage, actor: Path) -> dict[Path, frozenset[tuple[str, int, int]]]:
    """The size and time of each file, by temporary folder. A running merge changes them."""
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
    """Open a file for its status, because network filesystems cache the status."""
    with Ignoring(GONE | NO_RECORD | REFUSED_HERE):
        return storage.look_into(path, storage.fstat)
    return storage.status(path)


@contextmanager
def _gone_means_changed(storage: Storage, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_gone(error) and not storage.exists(folder):
            raise SaveNotReadyError(f"{folder} disappeared while it was converted") from error
        raise
