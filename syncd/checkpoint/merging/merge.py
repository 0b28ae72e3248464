"""Running a merge plan: writing its files, several at a time, and checking the source files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import xxhash

from syncd.checkpoint.merging.cast import THREADS as CASTERS
from syncd.checkpoint.merging.cast import Caster
from syncd.checkpoint.merging.file_copy import BUFFER, FileCopy
from syncd.checkpoint.merging.options import Checked, MergeOptions, Progress, Work, unheard
from syncd.checkpoint.merging.plan import MergePlan, PlannedFile, PlannedTensor
from syncd.checkpoint.merging.source_reader import Source, SourceReader, record_checks, shorter
from syncd.checkpoint.parallel import Check, run_side_by_side, threads_here
from syncd.checkpoint.safetensors_file import SafetensorsFile, file_digest
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.protocol.records import TensorEntry, VersionFile
from syncd.storage.fsio import Storage


class Merged(NamedTuple):
    """The files, the tensors in file order, and the tensors' total bytes."""

    files: tuple[VersionFile, ...]
    tensors: tuple[TensorEntry, ...]
    data_size: int


#: A file, and the tensors in it.
_Written = tuple[VersionFile, list[TensorEntry]]


def run_plan(
    storage: Storage,
    plan: MergePlan,
    sources: Sequence[Source],
    folder: Path,
    *,
    options: MergeOptions,
    checked: Checked,
    work: Work,
    caster: Caster | None = None,
) -> Merged:
    """Write and sync the files of a plan, in a folder that no other process may read.

    The plan must come from the indexes of ``sources``, in the same order and with the same options.
    The caller must sync the folder's parent. ``caster`` is needed if ``plan.casts`` is True.

    If ``checked`` is ``crc32``, every record that has a CRC-32 is checked, even if no output needs
    the record. If ``checked`` is ``receipt``, blocks are shared with the sources. Then no process
    may write to the sources, because the digests are computed after the blocks are shared.

    Raises:
        SaveNotReadyError: a source became shorter.
        ShardFormatError: a record does not match its CRC-32.
        CoverageError: a plain tensor differs between ranks, or from the tensor that it is tied to.
    """
    checks = record_checks(sources, check_crc=checked == "crc32")
    counted = _Counted(plan.data_size, work.progress)
    threads = threads_here(options.threads)

    def look() -> None:
        work.cancel()
        counted.tell()

    def write(file: PlannedFile, check: Check) -> _Written:
        copy = FileCopy(
            storage,
            SourceReader(storage, sources, checks=checks, cancel=check),
            sources,
            options=options,
            checked=checked,
            caster=caster,
            cancel=check,
            advanced=counted.add,
        )
        fd = storage.create(folder / file.name)
        with storage.closing(fd):
            found = copy.write(file, fd)
            storage.fsync(fd)
        told = found if options.digests else None
        return _written(file.name, file.header, file.data_size, file.tensors, told, check)

    written = run_side_by_side(
        [partial(write, file) for file in plan.files],
        threads=min(threads, CASTERS) if plan.casts else threads,
        look=look,
    )
    SourceReader(storage, sources, checks=checks, cancel=look).finish()
    counted.tell()
    return Merged(
        tuple(file for file, _ in written),
        tuple(tensor for _, tensors in written for tensor in tensors),
        plan.data_size,
    )


def _written(
    name: str,
    header: bytes,
    data_size: int,
    tensors: Sequence[PlannedTensor | HeaderEntry],
    digests: Sequence[bytes] | None,
    cancel: Check,
) -> _Written:
    entries = []
    for number, tensor in enumerate(tensors):
        cancel()
        entries.append(
            TensorEntry(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                file=name,
                digest=digests[number].hex() if digests is not None else None,
            )
        )
    digest = file_digest(header, digests) if digests is not None else None
    return VersionFile(name=name, size=len(header) + data_size, digest=digest), entries


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


def digest_safetensors(
    storage: Storage,
    source: SafetensorsFile,
    *,
    digests: bool = True,
    cancel: Check,
    copy_to: Path | None = None,
    progress: Progress = unheard,
) -> Merged:
    """Read a safetensors file once, to make its manifest entries and, if wanted, a copy.

    The copy at ``copy_to`` is synced. The caller must sync its folder.

    Raises:
        SaveNotReadyError: the file became shorter during the call.
    """
    if copy_to is None:
        found = _stream(storage, source, None, cancel, progress) if digests else []
    else:
        target = storage.create(copy_to)
        with storage.closing(target):
            storage.pwrite_all(target, source.header, 0)
            found = _stream(storage, source, target, cancel, progress)
            storage.fsync(target)
    data_size = source.size - len(source.header)
    told = found if digests else None
    file, tensors = _written(
        source.path.name, source.header, data_size, source.entries, told, cancel
    )
    return Merged((file,), tuple(tensors), data_size)


def _stream(
    storage: Storage,
    source: SafetensorsFile,
    target: int | None,
    cancel: Check,
    progress: Progress,
) -> list[bytes]:
    view = memoryview(bytearray(BUFFER))
    found = []
    for entry in source.entries:
        cancel()
        hasher = xxhash.xxh3_128()
        at = entry.begin
        while at < entry.end:
            cancel()
            count = source.storage.pread_into(source.fd, view[: entry.end - at], at)
            if count == 0:
                raise shorter(source.path)
            hasher.update(view[:count])
            if target is not None:
                storage.pwrite_all(target, view[:count], at)
            at += count
            progress(at - len(source.header), source.size - len(source.header))
        found.append(hasher.digest())
    return found
