"""Publishing a version again, under a new sequence: its files get a second name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

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
    cancel: Callable[[], None],
) -> None:
    """Fill a folder with the files of a published version, durably, the manifest last.

    They are linked, or copied if this storage has no hard links. Files of a
    version never change, so either of the two versions may be deleted first.

    Args:
        storage: the shared storage.
        source: the version's folder.
        folder: an empty folder that nobody else looks at; the caller syncs the folder's own entry.
        manifest: the manifest to write; it lists the files.
        cancel: called between chunks; raises to stop.

    Raises:
        VerificationError: a file has not the size that the manifest says.
        FileNotFoundError: a file is not there.
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
            raise VerificationError(f"{source / file.name} is not {file.size} bytes: it is damaged")
    storage.write_new(folder / MANIFEST, encode(manifest))
    for path in sorted(made, reverse=True):
        storage.sync_folder(path)


def _copy(storage: Storage, source: Path, target: Path, cancel: Callable[[], None]) -> None:
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
