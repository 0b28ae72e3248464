"""Running a merge plan: writing its files, several at a time, and checking the source files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, groupby
from pathlib import Path
from threading import Lock
from typing import Final

from syncd.checkpoint.merging.file_copy import FileCopy
from syncd.checkpoint.merging.options import Checked, MergeOptions, Progress, Work
from syncd.checkpoint.merging.plan import MergePlan, PlannedFile, PlannedTensor, header_entries
from syncd.checkpoint.merging.source_reader import Source, SourceReader, record_checks
from syncd.checkpoint.parallel import Check, run_side_by_side, threads_here
from syncd.checkpoint.whole_files import Merged, WrittenFile, written_file
from syncd.storage.fsio import Storage

#: A share of a file for a thread of its own has at least so many bytes.
_SHARE: Final = 32 * 1024 * 1024


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
    threads = threads_here(options.threads)
    of_a_file = max(1, threads // max(1, len(plan.files)))

    def look() -> None:
        work.cancel()
        counted.tell()

    def copy(fd: int, at: int, tensors: Sequence[PlannedTensor], check: Check) -> list[bytes]:
        one = FileCopy(
            to,
            SourceReader(storage, sources, checks=checks, cancel=check),
            sources,
            options=options,
            checked=checked,
            cancel=check,
            advanced=counted.add,
        )
        return one.write(tensors, fd, at)

    def write(file: PlannedFile, check: Check) -> WrittenFile:
        size = len(file.header) + file.data_size
        with to.creating(folder / file.name, size) as fd:
            to.pwrite_all(fd, file.header, 0)
            tasks = [partial(copy, fd, *share) for share in _shares(file, of_a_file)]
            found = run_side_by_side(tasks, threads=of_a_file, look=check)
            to.fsync(fd)
        told = list(chain(*found)) if options.digests else None
        return written_file(
            file.name, file.header, file.data_size, header_entries(file.tensors), told, check
        )

    written = run_side_by_side(
        [partial(write, file) for file in plan.files],
        threads=threads,
        look=look,
    )
    SourceReader(storage, sources, checks=checks, cancel=look).finish()
    counted.tell()
    return Merged.of(written, plan.data_size)


def _shares(file: PlannedFile, most: int) -> Iterator[tuple[int, list[PlannedTensor]]]:
    """Cut a file's tensors into up to ``most`` shares of bytes; yield each with its offset."""
    size = max(_SHARE, file.data_size / most)
    begins = accumulate((tensor.length for tensor in file.tensors), initial=0)
    placed = zip(begins, file.tensors, strict=False)
    for _, share in groupby(placed, key=lambda one: one[0] // size):
        (begin, *_), tensors = zip(*share, strict=True)
        yield len(file.header) + begin, list(tensors)


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
