"""A save's receipts and failure records, in ``.receipts/``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from syncd.protocol.names import RECEIPTS, failure_name
from syncd.protocol.records import Receipt, SaveId
from syncd.storage.errnos import GONE, Ignoring
from syncd.storage.job import Job


@dataclass
class Notes:
    """The receipts and failures in the ``actor/`` or ``critic/`` folder of a step.

    A rank writes only its own files. All methods raise an OSError if storage fails.
    """

    job: Job
    part: Path

    def __post_init__(self) -> None:
        self.folder = self.part / RECEIPTS

    def receipt(self, name: str) -> Receipt | None:
        """A receipt; None if the file is missing or not a receipt."""
        return self.job.read(Receipt, self.folder / name)

    def written(self, name: str) -> SaveId | None:
        """The save that a receipt belongs to, or None."""
        receipt = self.receipt(name)
        return None if receipt is None else SaveId.parse(receipt.save_id)

    def failed(self, rank: int) -> SaveId | None:
        """The save that a rank failed to write, or that rank 0 gave up, or None."""
        with Ignoring(GONE):
            content = self.job.storage.read(self.folder / failure_name(rank))
            return SaveId.parse(content.decode(errors="replace").strip())
        return None

    def say_failed(self, rank: int, save_id: SaveId) -> None:
        """Record that this rank failed."""
        self.job.storage.make_folder(self.folder, below=self.part.parent)
        self.job.storage.replace(self.folder / failure_name(rank), f"{save_id}\n".encode())
