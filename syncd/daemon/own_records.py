"""The records that only the active daemon writes: what others have damaged is written again."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from syncd.daemon.blocks import Blocks, Obstacle
from syncd.protocol.records import Format, Record, encode
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import LONG_RECORD_LIMIT, Signature, signature
from syncd.storage.job import IF_ANY, Job
from syncd.storage.judge import Clock


@dataclass
class OwnRecords:
    """Looks at each record's status in each round, and reads a record that has changed."""

    job: Job
    epoch: Epoch
    blocks: Blocks
    clock: Clock

    def __post_init__(self) -> None:
        self._format = self._with_id(self.job.read_format())
        self._seen: dict[Path, Signature] = {}
        self._wrong: dict[Path, float] = {}

    def _with_id(self, found: Format) -> Format:
        if found.id is None:  # a job of 0.3.0
            given = found.model_copy(update={"id": secrets.token_hex(16)})
            with suppress(OSError):  # the next take-over tries again
                self.epoch.replace_file(self.job.layout.format, encode(given))
                return given
        return found

    def look(self, records: Iterable[tuple[Path, Callable[[], Record | None]]]) -> None:
        """Compare each file with its record, and write a wrong file again.

        For a lease time that is a warning, because somebody writes there who must not.

        Raises:
            SupersededError: another daemon has taken over.
            OSError: storage refused to write.
        """
        for path, ours in records:
            record = self._differs(path, ours)
            if record is not None:
                self._wrong[path] = self.clock()
                self.epoch.replace_file(path, encode(record))
        remedy = "Find out who else writes into the job's .syncd folder"
        for path, since in self._wrong.items():
            if self.clock() - since < self.blocks.lease_time:
                what = f"{path} was not what the daemon had written, and was written again"
                self.blocks.meet(path.name, Obstacle("record", what, remedy, object()))
        at = self.job.layout.format
        if self._differs(at, lambda: self._format) is not None:
            what = f"{at} is not what it was when the daemon began"
            remedy = "Restore it from a backup, or copy that of a job with the same lease time"
            self.blocks.meet(at.name, Obstacle("record", what, remedy))

    def _differs(self, path: Path, ours: Callable[[], Record | None]) -> Record | None:
        """The record, if the file holds another one; a file as at the last look is not read."""
        status = self.job.storage.status(path)
        key = status and signature(status)
        if key is not None and key == self._seen.get(path):
            return None
        record = ours()
        if record is None or key is None:
            return record
        if self.job.read(type(record), path, IF_ANY, limit=LONG_RECORD_LIMIT) != record:
            return record
        self._seen[path] = key
        return None
