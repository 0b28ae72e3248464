"""Writes a full state dict in a thread, while the training thread gathers its tensors."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from syncd.protocol.errors import SaveFailedError
from syncd.protocol.records import ReceiptFile
from syncd.storage.fsio import Draft
from syncd.storage.job import Job
from trainer_hooks.writing.parts import saying_which

if TYPE_CHECKING:
    from trainer_hooks.state.full_file import FullStateStream

log = logging.getLogger(__name__)


@dataclass
class Spool:
    """A file that is written, under a temporary name, while its tensors are being gathered.

    The temporary file is in ``.syncd/drafts/``. The daemon deletes it if this process is killed. A
    failed write is not repeated, because the gathered tensors are freed as they are written.
    ``size`` (bytes) is approximate, for the message on a full disk.
    """

    job: Job
    path: Path
    stream: FullStateStream
    size: int

    def __post_init__(self) -> None:
        self._draft = Draft(self.job.storage, self.path, room=self.job.layout.drafts)
        self._stack = ExitStack()
        self._file: ReceiptFile | None = None
        self._named = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="syncd-spool", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            # Outermost, so that the temporary file is deleted before free space is measured.
            with (
                saying_which(self.job.storage, self.path, lambda: self.size),
                ExitStack() as stack,
            ):
                draft = stack.enter_context(self._draft)
                self._file = self.stream.write(draft)
                draft.finish()
                self._stack = stack.pop_all()
        except Exception as error:  # noqa: BLE001 - raised by `commit`, in the thread that saves
            self._error = error
            self.stream.abort(error)

    def commit(self) -> ReceiptFile:
        """Wait until the file is complete, and rename it. After an OSError, call it again.

        Raises:
            OSError: storage failed.
            SaveFailedError: the pruner deleted the folder that contains the file.
            Exception: the error that ended the gathering or the writing.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._file is None:
            raise AssertionError("the written stream has no receipt")
        if not self._named:
            self.job.storage.rename(self._draft.temporary, self.path)
            self._named = True
        elif not self.job.storage.exists(self.path):
            raise SaveFailedError(
                f"{self.path} was deleted during the save, and the gathered tensors are no "
                "longer in memory. Save the step again"
            )
        self.job.storage.sync_folder(self.path.parent)
        return self._file

    def close(self) -> None:
        """Delete the temporary file, if it is still there. Safe to call twice."""
        self.stream.abort(RuntimeError("the save is over"))
        self._thread.join()
        try:
            self._stack.close()
        except OSError as error:
            log.warning(
                "cannot delete %s; the daemon deletes it later: %s", self._draft.temporary, error
            )
