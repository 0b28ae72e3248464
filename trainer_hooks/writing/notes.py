"""What the ranks have said of a save in its ``.receipts/``: who has written it, and who could not.

Any rank reads them; each writes its own alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from syncd.protocol.names import RECEIPTS, failure_name
from syncd.protocol.records import Receipt, SaveId, encode
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage
from syncd.storage.reading import read_if_there

log = logging.getLogger(__name__)


class Notes:
    """The receipts and failures in the ``actor/``, or the ``critic/``, of one step.

    Args:
        storage: the shared storage.
        part: that folder.
    """

    def __init__(self, storage: Storage, part: Path) -> None:
        self._storage = storage
        self._part = part
        self.folder = part / RECEIPTS

    def receipt(self, name: str) -> Receipt | None:
        """A receipt; None where there is none, or what is there is none.

        Raises:
            OSError: storage failed.
        """
        return read_if_there(self._storage, Receipt, self.folder / name)

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
            content = self._storage.read(self.folder / failure_name(rank))
        except OSError as error:
            if is_gone(error):
                return None
            raise
        return SaveId.parse(content.decode(errors="replace").strip())

    def write_receipt(self, name: str, receipt: Receipt) -> None:
        """Say what this rank has written, whole and durable."""
        self._storage.replace(self.folder / name, encode(receipt))

    def say_failed(self, rank: int, save_id: SaveId) -> None:
        """Let nobody wait for this rank; where that cannot be said, they wait in vain."""
        try:
            self._storage.make_folder(self.folder, below=self._part.parent)
            self._storage.replace(self.folder / failure_name(rank), f"{save_id}\n".encode())
        except OSError as error:
            log.warning("rank %d cannot tell the others that it failed: %s", rank, error)
