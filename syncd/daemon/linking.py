"""Links: a save's files of changes get a second name in ``deltas/``, after they are checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.save import SavedWeights, confirm_unchanged
from syncd.checkpoint.version import read_manifest
from syncd.daemon.publish import Publisher
from syncd.daemon.tenure import Tenure
from syncd.deltas.ends import NoDeltaError
from syncd.deltas.link_index import Link, read_index
from syncd.deltas.link_plan import plan_links
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import SaveNotReadyError
from syncd.protocol.names import DELTA, HUGGINGFACE, delta_folder, link_name
from syncd.protocol.records import Latest, ReceiptFile, VersionFile, encode
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Draft

_BUFFER: Final = 1024 * 1024


@dataclass
class Linker:
    """Makes links of saves; each leads from LATEST's version, or from an earlier link."""

    tenure: Tenure
    publisher: Publisher

    def __post_init__(self) -> None:
        self._served: WholeVersion | None = None

    def link(self, save: SavedWeights, latest: Latest) -> int:
        """Make a link whose base is linked, or LATEST's save; returns its sequence.

        Raises:
            NoDeltaError: the save cannot be linked.
            SaveNotReadyError: the save changed meanwhile.
            SupersededError: another daemon has taken over.
        """
        job, epoch, sequence = self.tenure.job, self.tenure.epoch, self.publisher.reserve()
        name, actor, vouched = delta_folder(sequence), job.layout.actor(save.step), save.vouched()
        version = self._version(latest)
        folder = epoch.start_build(name)  # mkdir building/d000017
        try:
            files, pieces = [], []
            for rank in range(len(save.receipts)):
                self.publisher.cancel()
                file = vouched.get(link_name(len(save.receipts), rank))
                if file is None:
                    raise NoDeltaError(f"the receipt of rank {rank} lists no link")
                # Link or copy the file, and read its index, but none of its blocks.
                target = folder / f"rank-{rank}"
                self._take(actor / file.name, target)
                pieces.append(read_index(job.storage, target, file.size, file.digest))
                files.append(VersionFile(name=target.name, size=file.size, digest=file.digest))
            # Read all receipts again by name, so that all files are of this save.
            confirm_unchanged(job.storage, actor, save)
            _check_small_files(vouched, version)
            plan_links(pieces, version, job.storage, cancel=self.publisher.cancel)
            record = Link(
                base=save.base or "",
                target=save.identity,
                files=tuple(files),
                nonfinite=save.nonfinite,
            )
            job.storage.write_new(folder / DELTA, encode(record))
            job.storage.sync_folder(folder)
            # saves.json names the sequence first, so that older daemons do not use it again.
            self.publisher.outcomes.published(save.step, save.identity, sequence)
            # Rename building/d000017 to deltas/d000017. Fsync deltas/.
            epoch.commit_delta(name)
        except OSError as error:
            epoch.raise_if_superseded(error)
            if is_gone(error) and job.storage.exists(folder):
                raise SaveNotReadyError(f"{error.filename or actor} is gone") from error
            raise
        finally:
            if job.storage.exists(folder):
                job.storage.remove_tree(folder)
        return sequence

    def _version(self, latest: Latest) -> WholeVersion:
        if self._served is None or self._served.manifest.sequence != latest.sequence:
            folder = self.tenure.job.layout.version(latest.sequence)
            self._served = WholeVersion(folder, read_manifest(self.tenure.job.storage, folder))
        return self._served

    def _take(self, source: Path, target: Path) -> None:
        storage = self.tenure.job.storage
        linked = storage.link_if_possible(source, target)
        status = storage.status(target) if linked else None
        if status is not None and status.st_uid == os.geteuid():
            return
        if linked:  # a link keeps the owner and the mode
            storage.unlink(target)
        with storage.reading(source) as reading, Draft(storage, target) as draft:
            while part := storage.read_part(reading, _BUFFER):
                self.publisher.cancel()
                draft.write(part)
            draft.commit()


def _check_small_files(vouched: Mapping[str, ReceiptFile], version: WholeVersion) -> None:
    has = {file.name: (file.size, file.digest) for file in version.manifest.files}
    for path, file in vouched.items():
        folder, _, name = path.partition("/")
        if folder == HUGGINGFACE and has.get(name) != (file.size, file.digest):
            raise NoDeltaError(f"{path} differs from that of version {version.manifest.sequence}")
