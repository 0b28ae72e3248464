"""Publishing a version again under a new sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from syncd.checkpoint.parallel import Check
from syncd.protocol.errors import VerificationError
from syncd.protocol.names import MANIFEST
from syncd.protocol.records import Manifest, encode
from syncd.storage.fsio import Storage

_CHUNK: Final = 64 * 1024 * 1024


def republish(
    storage: Storage,
    source: Path,
    folder: Path,
    manifest: Manifest,
    *,
    cancel: Check,
) -> None:
    """Fill a folder with a published version's files, write the manifest last, and sync the folder.

    The files are linked, or copied if this storage has no hard links. Links are safe, because no
    file of a version ever changes. No other process may read ``folder``, and the caller must sync
    its parent.

    Raises:
        VerificationError: a file's size differs from the size in the manifest.
        FileNotFoundError: a file is missing.
    """
    made = {folder}
    for file in manifest.files:
        cancel()
        target = folder / file.name
        if target.parent not in made:
            storage.make_folder(target.parent, below=folder)
            made.add(target.parent)
        if not storage.link_if_possible(source / file.name, target):
            _copy(storage, source / file.name, target, cancel)
        status = storage.status(target)
        if status is None or status.st_size != file.size:
            raise VerificationError(
                f"{source / file.name} does not have {file.size} bytes: the file is damaged"
            )
    storage.write_new(folder / MANIFEST, encode(manifest))
    for path in sorted(made, reverse=True):
        storage.sync_folder(path)


def _copy(storage: Storage, source: Path, target: Path, cancel: Check) -> None:
    reading = storage.open_read(source)
    try:
        writing, at = storage.create(target), 0
        with storage.closing(writing):
            while done := storage.copy_range(reading, writing, _CHUNK, at, at):
                cancel()
                at += done
            storage.fsync(writing)
    finally:
        storage.release(reading)
