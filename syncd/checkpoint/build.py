"""From a whole save to a complete Hugging Face model folder with its manifest."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.checkpoint.merge import Merged, digest_safetensors, run_plan
from syncd.checkpoint.model_folder import copy_model_files, write_index
from syncd.checkpoint.plan import ShardIndex, plan_merge
from syncd.checkpoint.save import OpenSave, Save, confirm_unchanged, open_save
from syncd.protocol.errors import CheckpointError, SaveNotReadyError
from syncd.protocol.layout import FULL_STATE_DICT, HUGGINGFACE, MANIFEST
from syncd.protocol.records import Manifest, VersionFile, encode
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage, signature

_NO_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)


def build_model_folder(
    storage: Storage,
    actor: Path,
    save: Save,
    folder: Path,
    *,
    sequence: int,
    digests: bool,
    max_file_size: int,
    cancel: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> Manifest:
    """Merge a save into an empty folder, durably, the manifest last.

    Args:
        storage: the shared storage.
        actor: the ``actor/`` folder of the save.
        save: as it was looked at last.
        folder: an empty folder that nobody else looks at; its own entry is the caller's to sync.
        sequence: for the manifest; 0 for a folder that is not published.
        digests: whether the manifest carries digests.
        max_file_size: the most bytes of tensors in one file.
        cancel: called between chunks; raises to stop.
        clock: seconds, monotonic, for the timings in the manifest.

    Returns:
        The manifest, as written to ``manifest.json``.

    Raises:
        SaveNotReadyError: the save is not whole, or changed meanwhile.
        CheckpointError: it can never be merged as it is.
    """
    if save.identity is None:
        raise SaveNotReadyError(save.reason)
    begun = clock()
    try:
        with open_save(storage, actor, save, cancel=cancel) as opened:
            confirm_unchanged(storage, actor, save)
            checked = opened.checked
            # The small files first: where one is not what was vouched for, no weights are copied.
            models = _model_files(storage, actor / HUGGINGFACE, folder, cancel)
            _check_model_files(storage, actor, save, models)
            copied = clock()
            merged = _weights(
                storage, opened, actor, folder, digests=digests, size=max_file_size, cancel=cancel
            )
            merge_seconds = clock() - copied
    except CheckpointError:
        # What cannot be read may be what is being written: only a save at rest is judged.
        confirm_unchanged(storage, actor, save)
        raise
    except OSError as error:
        if is_gone(error) and storage.exists(folder):
            raise SaveNotReadyError(f"{error.filename or actor} went while it was read") from error
        raise
    files = [*merged.files, *models, *write_index(storage, folder, merged)]
    if not save.receipts:
        confirm_unchanged(storage, actor, save)
    if not digests:
        files = [file.model_copy(update={"digest": None}) for file in files]
    manifest = Manifest(
        sequence=sequence,
        step=save.step,
        save_id=save.identity,
        checked=checked,
        digests="xxh3-128" if digests else "off",
        files=tuple(files),
        tensors=merged.tensors,
        timings={"merge": round(merge_seconds, 6), "build": round(clock() - begun, 6)},
    )
    storage.write_new(folder / MANIFEST, encode(manifest))
    storage.sync_folder(folder)
    return manifest


def _weights(
    storage: Storage,
    opened: OpenSave,
    actor: Path,
    folder: Path,
    *,
    digests: bool,
    size: int,
    cancel: Callable[[], None],
) -> Merged:
    """The safetensors files: merged, or the trainer's own full state dict."""
    if opened.full is None:
        indexes = []
        for shard in opened.shards:
            cancel()
            indexes.append(ShardIndex(shard.path.name, opened.tensors(shard)))
        plan = plan_merge(indexes, max_file_size=size)
        return run_plan(
            storage,
            plan,
            opened.shards,
            folder,
            digests=digests,
            check_crc=opened.checked == "crc32",
            cancel=cancel,
        )
    target = folder / FULL_STATE_DICT
    linked = bool(opened.save.receipts) and _linked(storage, actor / FULL_STATE_DICT, target)
    if linked:
        # The name may have been replaced since the file was opened and checked.
        status = storage.status(target)
        if status is None or signature(status)[:2] != opened.full.signature[:2]:
            raise SaveNotReadyError(f"{actor / FULL_STATE_DICT} was replaced while it was linked")
    return digest_safetensors(
        storage, opened.full, copy_to=None if linked else target, digests=digests, cancel=cancel
    )


def _model_files(
    storage: Storage, source: Path, folder: Path, cancel: Callable[[], None]
) -> tuple[VersionFile, ...]:
    try:
        return copy_model_files(storage, source, folder, cancel=cancel)
    except RecursionError:
        raise CheckpointError(
            f"{source} has folders inside folders, hundreds deep: remove them"
        ) from None


def _linked(storage: Storage, source: Path, target: Path) -> bool:
    """Give the trainer's file a second name: our hook never writes in place, so it stays as it is.

    Returns:
        False where this storage has no hard links.
    """
    try:
        storage.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def _check_model_files(
    storage: Storage, actor: Path, save: Save, copied: tuple[VersionFile, ...]
) -> None:
    """The huggingface/ files must be those that rank 0 vouched for; all of them must be there."""
    prefix = f"{HUGGINGFACE}/"
    found = {prefix + file.name: (file.size, file.digest) for file in copied}
    for name, file in save.vouched().items():
        if not name.startswith(prefix):
            continue
        if name not in found and not storage.exists(actor / name):
            raise SaveNotReadyError(
                f"{actor / name} is gone, and the receipt of save {save.identity} vouches for it"
            )
        if found.get(name, (file.size, file.digest)) != (file.size, file.digest):
            raise SaveNotReadyError(
                f"{actor / name} is not the file that the receipt of save {save.identity} vouches "
                "for: it is being replaced, or was damaged"
            )
