"""A full state dict that is gathered by the training thread, and written beside it."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
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


class Spool:
    """A file that is written, under a temporary name, while its tensors are being gathered.

    The temporary name is in ``.syncd/drafts/``: so that it needs no step folder, and waits for no
    save that is being written. It is collected there if this process is killed.

    Promised: the file has its name only once it is whole and durable. Not promised: a second
    attempt; what is gathered is gone.

    Args:
        storage, layout: the job's.
        path: the file.
        stream: what it holds.
        size: its bytes, about, for the message on a full disk.
    """

    def __init__(self, job: Job, path: Path, stream: FullStateStream, *, size: int) -> None:
        self.path = path
        self._job = job
        self._stream = stream
        self._size = size
        self._draft = Draft(job.storage, path, room=job.layout.drafts)
        self._stack = ExitStack()
        self._file: ReceiptFile | None = None
        self._named = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="syncd-spool", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            # Outermost: what is free is asked for once the temporary file is gone.
            with (
                saying_which(self._job.storage, self.path, lambda: self._size),
                ExitStack() as stack,
            ):
                draft = stack.enter_context(self._draft)
                self._file = self._stream.write(draft)
                draft.finish()
                self._stack = stack.pop_all()
        except Exception as error:  # noqa: BLE001 - raised by `commit`, in the thread that saves
            self._error = error
            self._stream.abort(error)

    def commit(self) -> ReceiptFile:
        """Wait until all is written, and give it its name. Again, where storage refused that.

        Raises:
            OSError: storage refused; names the file.
            SaveFailedError: the pruner took the folder away with the file in it.
            Exception: whatever ended the gathering.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._file is None:
            raise AssertionError("a stream that was written has a receipt")
        if not self._named:
            self._job.storage.rename(self._draft.temporary, self.path)
            self._named = True
        elif not self._job.storage.exists(self.path):
            raise SaveFailedError(f"{self.path} is gone, and what was gathered with it")
        self._job.storage.sync_folder(self.path.parent)
        return self._file

    def close(self) -> None:
        """Remove what has no name of its own. Safe to call twice, and after :meth:`commit`."""
        self._stream.abort(RuntimeError("the save is over"))
        self._thread.join()
        try:
            self._stack.close()
        except OSError as error:
            log.warning("%s is left for the daemon to collect: %s", self._draft.temporary, error)
