"""Makes versions whose weights are elsewhere."""

from __future__ import annotations

from pathlib import Path

from syncd.checkpoint.save import Remote
from syncd.checkpoint.step_save import look_into_step
from syncd.protocol.errors import SaveNotReadyError
from syncd.protocol.names import MANIFEST, REMOTE_PATH
from syncd.protocol.records import Manifest, encode
from syncd.storage.fsio import Storage


def write_remote(
    storage: Storage, source: Path, save: Remote, folder: Path, *, sequence: int
) -> Manifest:
    """Make a version of kind ``remote``: a folder that holds only a manifest.

    ``folder`` must be empty, and no other process may read it. The caller must sync its parent.

    Raises:
        SaveNotReadyError: the folder now holds another save.
    """
    now = look_into_step(storage, source, save.step)
    if not isinstance(now, Remote) or now.identity != save.identity:
        raise SaveNotReadyError(
            f"{source / REMOTE_PATH} changed while syncd published it. Perhaps the trainer saved "
            "the step again"
        )
    manifest = Manifest(
        sequence=sequence,
        step=save.step,
        save_id=now.identity,
        kind="remote",
        checked="stillness",
        digests="off",
        files=(),
        tensors=(),
        remote=now.path,
    )
    storage.write_new(folder / MANIFEST, encode(manifest))
    storage.sync_folder(folder)
    return manifest
