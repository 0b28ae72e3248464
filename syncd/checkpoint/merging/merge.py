"""Running a merge plan: writing its files, several at a time, and checking the source files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock

from syncd.checkpoint.merging.file_copy import FileCopy
from syncd.checkpoint.merging.options import Checked, MergeOptions, Progress, Work
from syncd.checkpoint.merging.plan import MergePlan, PlannedFile, header_entries
from syncd.checkpoint.merging.source_reader import Source, SourceReader, record_checks
from syncd.checkpoint.parallel import Check, run_side_by_side, threads_here
from syncd.checkpoint.whole_files import Merged, WrittenFile, written_file
from syncd.storage.fsio import Storage


def run_plan(
    storage: Storage,
    plan: MergePlan,
    sources: Sequence[Source],
    folder: Path,
    *,
    options: MergeOptions,
    checked: Checked,
    work: Work,
    to: Storage | None = None,
) -> Merged:
    """Write and sync the files of a plan, in a folder that no other process may read.

    The plan must come from the indexes of ``sources``, in the same order and with the same options.
    The caller must sync the folder's parent. ``to`` is the folder's storage, if not that of the
    sources.

    If ``checked`` is ``crc32``, every record that has a CRC-32 is checked, even if no output needs
    the record. If ``checked`` is ``receipt``, blocks are shared with the sources. Then no process
    may write to the sources, because the digests are computed after the blocks are shared.

    Raises:
        SaveNotReadyError: a source became shorter.
        ShardFormatError: a record does not match its CRC-32.
        CoverageError: a plain tensor differs between ranks, or from the tensor that it is tied to.
    """
    to = to or storage
    checks = record_checks(sources, check_crc=checked == "crc32")
    counted = _Counted(plan.data_size, work.progress)

    def look() -> None:
        work.cancel()
        counted.tell()

    def write(file: PlannedFile, check: Check) -> WrittenFile:
        copy = FileCopy(
            to,
            SourceReader(storage, sources, checks=checks, cancel=check),
            sources,
            options=options,
            checked=checked,
            cancel=check,
            advanced=counted.add,
        )
        size = len(file.header) + file.data_size
        with to.creating(folder / file.name, size) as fd:
            found = copy.write(file, fd)
            to.fsync(fd)
        told = found if options.digests else None
        return written_file(
            file.name, file.header, file.data_size, header_entries(file.tensors), told, check
        )

    written = run_side_by_side(
        [partial(write, file) for file in plan.files],
        threads=threads_here(options.threads),
        look=look,
    )
    SourceReader(storage, sources, checks=checks, cancel=look).finish()
    counted.tell()
    return Merged.of(written, plan.data_size)


class _Counted:
    """Counts the bytes of all threads. Only one thread reports the count."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._lock = Lock()
        self._done, self._told, self._total = 0, -1, total
        self._progress = progress

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count

    def tell(self) -> None:
        if self._done != self._told:
            self._told = self._done
            self._progress(self._told, self._total)
