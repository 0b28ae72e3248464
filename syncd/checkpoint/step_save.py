"""The save in a step's folder: weights, or a line with the path of weights elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

from syncd.checkpoint.save import Remote, Save, Unfinished, look_at_save
from syncd.protocol.names import ACTOR, REMOTE_PATH, SAVING
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage

_LONGEST: Final = 4096
#: The daemon's key for a folder without a remote path.
_NO_PATH: Final = "no-remote-path"


def look_into_step(
    storage: Storage, folder: Path, step: int, names: list[str] | None = None
) -> Save:
    """The save in a step's folder. No content of the folder causes an exception."""
    actor = folder / ACTOR
    save = look_at_save(storage, actor, step, names)
    if save.identity is not None:
        return save
    try:
        if not storage.exists(folder):
            return save
        names = storage.names(folder)
        # If the trainer is writing weights, wait for them, however long it takes.
        if SAVING in names:
            return Unfinished(step, save.reason)
        if ACTOR in names and storage.names(actor):
            return save
        return _look_at_path(storage, folder / REMOTE_PATH, step)
    except OSError as error:
        return Unfinished(step, f"{folder} cannot be read now: {error}")


def _look_at_path(storage: Storage, path: Path, step: int) -> Unfinished | Remote:
    """The remote save. A rewritten line is a new save, because the weights may be new."""
    try:
        content, (_, inode, size, mtime, _) = storage.read_with_signature(path, _LONGEST)
    except OSError as error:
        if is_gone(error):
            why = f"{path} is not there, and there are no weights in {path.parent / ACTOR}"
        elif is_no_record(error):
            why = f"{path} is not a file, or is longer than {_LONGEST} bytes"
        else:
            raise
        return Unfinished(step, why, _NO_PATH)
    text = content.decode(errors="surrogateescape").strip()
    if not text.isprintable() or not text:
        fault = "not one line of text in UTF-8" if text else "empty"
        return Unfinished(step, f"{path} is {fault}", _NO_PATH)
    digest = xxhash.xxh3_128_hexdigest(f"{text}\0{size}\0{mtime}\0{inode}".encode())
    return Remote(step, f"remote-{digest}", path=text)
