"""Whether there is room for what a save becomes, before it is begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.checkpoint.build import weights_size
from syncd.checkpoint.save import Save
from syncd.checkpoint.tensor_rules import Cast
from syncd.protocol.errors import NoRoomError
from syncd.storage.fsio import Storage

#: Bytes for config, tokenizer and manifest; and how many files a version may well have.
_SMALL_FILES: Final = 1024 * 1024
_FEW_INODES: Final = 32


class FreeSpace:
    """Looks whether the filesystem of a job has room.

    What a save that does not fit would take is remembered: all of it is parsed for that, and it is
    asked for again and again while the disk is full.

    Args:
        storage: the shared storage.
        folder: where it is written.
        root: of the job, for messages.
        advice: what to do where there is no room.
    """

    def __init__(self, storage: Storage, folder: Path, root: Path, *, advice: str) -> None:
        self._storage = storage
        self._folder = folder
        self._root = root
        self._advice = advice
        self._sized: tuple[tuple[str | None, Cast | None, str | None], int] | None = None

    def check(
        self,
        actor: Path,
        save: Save,
        *,
        cast: Cast | None,
        prefix: str | None,
        cancel: Callable[[], None],
    ) -> None:
        """Not to begin what cannot end. A quota that the filesystem hides is met on the way.

        Raises:
            NoRoomError: there is no room for what this save becomes.
            SaveNotReadyError, CheckpointError, OSError: as of ``build_model_folder``.
        """
        needed = 0
        for name in save.weights:
            status = self._storage.status(actor / name)
            needed += status.st_size if status else 0
        needed = _SMALL_FILES + (2 if cast == "fp32" else 1) * needed
        free = self._storage.free(self._folder)
        if free.bytes is not None and free.bytes < needed and save.remote is None:
            # It may be less: a file of our hook is linked, of a PEFT model the adapter is written.
            asked = (save.identity, cast, prefix)
            if self._sized is None or self._sized[0] != asked:
                size = weights_size(
                    self._storage, actor, save, cast=cast, prefix=prefix, cancel=cancel
                )
                self._sized = asked, size
            needed = _SMALL_FILES + self._sized[1]
        if free.bytes is not None and free.bytes < needed:
            raise NoRoomError(
                f"step {save.step} needs {needed / 1e6:.1f} MB, and {free.bytes / 1e6:.1f} MB are "
                f"free in {self._root}: {self._advice}"
            )
        if free.inodes is not None and free.inodes < _FEW_INODES:
            raise NoRoomError(
                f"only {free.inodes} more files can be made in {self._root} (its filesystem "
                "is out of inodes): remove some"
            )
