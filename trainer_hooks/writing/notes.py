"""A save's receipts and failures, as its ranks leave them in ``.receipts/``.

Any rank reads them; each writes its own alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from syncd.protocol.names import RECEIPTS, failure_name
from syncd.protocol.records import Receipt, SaveId, encode
from syncd.storage.errnos import is_gone
from syncd.storage.job import Job

log = logging.getLogger(__name__)


class Notes:
    """The receipts and failures in the ``actor/``, or the ``critic/``, of one step.

    Args:
        job: the job.
        part: that folder.
    """

    def __init__(self, job: Job, part: Path) -> None:
        self._job = job
        self._part = part
        self.folder = part / RECEIPTS

    def receipt(self, name: str) -> Receipt | None:
        """A receipt; None where there is none, or what is there is none.

        Raises:
            OSError: storage failed.
        """
        return self._job.read(Receipt, self.folder / name)

    def written(self, name: str) -> SaveId | None:
        """The save that a receipt is of.

        Raises:
            OSError: storage failed.
        """
        receipt = self.receipt(name)
        return None if receipt is None else SaveId.parse(receipt.save_id)

    def failed(self, rank: int) -> SaveId | None:
        """The save that a rank could not write, or rank 0 has given up.

        Raises:
            OSError: storage failed.
        """
        try:
            content = self._job.storage.read(self.folder / failure_name(rank))
        except OSError as error:
            if is_gone(error):
                return None
            raise
        return SaveId.parse(content.decode(errors="replace").strip())

    def write_receipt(self, name: str, receipt: Receipt) -> None:
        """Say what this rank has written, whole and durable."""
        self._job.storage.replace(self.folder / name, encode(receipt))

    def say_failed(self, rank: int, save_id: SaveId) -> None:
        """Let nobody wait for this rank; where that cannot be said, they wait in vain."""
        try:
            self._job.storage.make_folder(self.folder, below=self._part.parent)
            self._job.storage.replace(self.folder / failure_name(rank), f"{save_id}\n".encode())
        except OSError as error:
            log.warning("rank %d cannot tell the other ranks that it failed: %s", rank, error)
