"""Make a whole version from an older one, and from deltas that lead from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import xxhash

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.parallel import Check, run_side_by_side, threads_here
from syncd.checkpoint.safetensors_file import with_digests
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.checkpoint.version import copy_file, read_manifest
from syncd.checkpoint.whole_files import Merged, written_file
from syncd.deltas.delta_file import DeltaReader
from syncd.deltas.delta_index import DeltaFolder, DeltaRecord, read_index
from syncd.deltas.delta_plan import DeltaPlan, PieceKey, Place, PlanBase, key_of, plan_delta
from syncd.deltas.encoding import Decoder
from syncd.deltas.limits import BLOCK, DeltaError
from syncd.deltas.whole_version import Places, WholeVersion, open_weights
from syncd.protocol.names import DELTA, MANIFEST
from syncd.protocol.records import Latest, Manifest, NonFinite, Tip, encode, parse
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

#: Bytes between two fsyncs, because an fsync of gigabytes could not be interrupted.
_SYNC_EVERY: Final = 256 * 1024 * 1024
_MOST_THREADS: Final = 4
#: The most delta files that stay open.
_MOST_OPEN: Final = 256


def fold(
    storage: Storage,
    base: WholeVersion,
    chain: Sequence[DeltaFolder],
    folder: Path,
    *,
    to: Storage,
    work: Work,
) -> Merged:
    """Write all files of the version to which deltas lead, except the manifest; sync the files.

    Args:
        storage: the storage of the deltas.
        base: a whole version. Nobody may delete it during the call.
        chain: the deltas from the base's save on, in order.
        folder: an empty folder. The caller must sync its parent, or remove the folder on errors.
        to: the storage of the folder and of the base.
        work: its callbacks are called in this thread.

    Raises:
        DeltaError: a delta is damaged, or the base is, or they do not fit.
        VerificationError: a small file of the base is damaged.
        OSError: a file is missing, or a storage failed.
    """
    with ExitStack() as stack:
        stay_open = sum(len(each.record.files) for each in chain) <= _MOST_OPEN
        deltas = [_open(storage, each, stack, stay_open=stay_open) for each in chain]
        plan = plan_delta(
            [reader.pieces for reader in deltas[-1]], PlanBase.read(to, base), cancel=work.cancel
        )
        places = stack.enter_context(open_weights(to, base))
        files = {file.path.name: file for file, _ in places.values()}
        made = {(folder / file.name).parent for file in base.manifest.files}
        for below in sorted(made - {folder}):
            to.make_folder(below, below=folder.parent)
        for file in base.manifest.files:
            if file.name not in files:
                copy_file(to, base.folder, to, folder, file, {}, work.cancel)
        fds = {
            name: stack.enter_context(to.closing(to.create_sized(folder / name, file.size)))
            for name, file in files.items()
        }
        folding = _Folding(to, [_by_key(readers) for readers in deltas], plan, places, fds)
        total = sum(entry.end - entry.begin for _, entry in places.values())

        def look() -> None:
            work.cancel()
            work.progress(sum(folding.done.copy().values()), total)

        units = [partial(folding.write, unit) for unit in _units(plan)]
        run_side_by_side(units, threads=threads_here(_MOST_THREADS), look=look)
        written = []
        for name, source in files.items():
            digests = [
                folding.digests.get(entry.name) or xxhash.xxh3_128_digest(b"")
                for entry in source.entries
            ]
            header = with_digests(source.header, digests)
            to.pwrite_all(fds[name], header, 0)
            to.fsync(fds[name])
            size = source.size - len(header)
            written.append(written_file(name, header, size, source.entries, digests, work.cancel))
    for below in sorted(made - {folder}, reverse=True):
        to.sync_folder(below)
    merged = Merged.of(written, total)
    files_made = {file.name: file for file in merged.files}
    listed = tuple(files_made.get(file.name, file) for file in base.manifest.files)
    return merged._replace(files=listed)


def fold_version(
    job: Job, latest: Latest, chain: Sequence[int], folder: Path, work: Work
) -> Manifest:
    """Fold deltas into LATEST's version; the new one is what LATEST names as its tip.

    The folder must be empty; the caller must sync its parent. For the errors see :func:`fold`.
    """
    storage, source, tip = job.storage, job.layout.version(latest.sequence), latest.tip
    version = WholeVersion(source, read_manifest(storage, source))
    deltas = [
        DeltaFolder(path, parse(DeltaRecord, storage.read(path / DELTA), path / DELTA))
        for path in map(job.layout.delta, chain)
    ]
    # From the version to the tip each save is told twice.
    bases, targets = zip(*((delta.base, delta.target) for _, delta in deltas), strict=True)
    if tip is None or (version.manifest.save_id, *bases, tip.save_id) != (
        latest.save_id,
        latest.save_id,
        *targets,
    ):
        raise DeltaError(f"{source} and the deltas above are of other saves than LATEST says")
    merged = fold(storage, version, deltas, folder, to=storage, work=work)
    manifest = manifest_of(version, merged, tip, deltas[-1].record.nonfinite)
    storage.write_new(folder / MANIFEST, encode(manifest))
    storage.sync_folder(folder)
    return manifest


def manifest_of(
    base: WholeVersion, merged: Merged, target: Tip, nonfinite: NonFinite | None
) -> Manifest:
    """The manifest of the version ``target``, which deltas make of ``base``."""
    return base.manifest.model_copy(
        update={
            **dict(target),
            "files": merged.files,
            "tensors": merged.tensors,
            "rolled_back": None,
            "nonfinite": nonfinite,
            "timings": {},
        }
    )


def _open(
    storage: Storage, at: DeltaFolder, stack: ExitStack, *, stay_open: bool
) -> list[DeltaReader]:
    readers = []
    for file in at.record.files:
        path = at.folder / file.name
        pieces = read_index(storage, path, file.size, file.digest or "")
        readers.append(
            stack.enter_context(DeltaReader(storage, path, pieces, stays_open=stay_open))
        )
    return readers


def _by_key(readers: Iterable[DeltaReader]) -> dict[PieceKey, tuple[DeltaReader, int]]:
    return {
        key_of(piece): (reader, number)
        for reader in readers
        for number, piece in enumerate(reader.pieces)
        if piece.box.size and not piece.is_replica
    }


def _units(plan: DeltaPlan) -> Iterator[list[PieceKey]]:
    """Groups of pieces, each with all pieces of some tensors, for one thread each."""
    last = {place.tensor: number for number, key in enumerate(plan) for place in plan[key]}
    unit: list[PieceKey] = []
    until = -1
    for number, (key, places) in enumerate(plan.items()):
        if unit and number > until:
            yield unit
            unit = []
        unit.append(key)
        until = max(until, *(last[place.tensor] for place in places))
    if unit:
        yield unit


def _within(places: Sequence[Place], begin: int, end: int) -> Iterator[tuple[str, int, slice]]:
    """A tensor, an offset in it, and its bytes among the bytes ``begin`` to ``end - 1``."""
    for at, length, tensor, offset in places:
        first, last = max(begin, at), min(end, at + length)
        if first < last:
            yield tensor, offset + first - at, slice(first - begin, last - begin)


@dataclass(eq=False)
class _Folding:
    """Writes pieces. Several threads can call :meth:`write`, for different tensors."""

    to: Storage
    deltas: Sequence[Mapping[PieceKey, tuple[DeltaReader, int]]]
    plan: DeltaPlan
    places: Places
    fds: Mapping[str, int]
    digests: dict[str, bytes] = field(default_factory=dict)
    done: dict[PieceKey, int] = field(default_factory=dict)

    def write(self, unit: Sequence[PieceKey], check: Check) -> None:
        """Write the new bytes of these pieces, and compute the digests of their tensors."""
        decoder = Decoder()
        hashers = {place.tensor: xxhash.xxh3_128() for key in unit for place in self.plan[key]}
        unsynced = 0
        for key in unit:
            self.done[key] = 0
            for content in self._new(key, decoder):
                check()
                begin = self.done[key]
                for tensor, offset, part in _within(self.plan[key], begin, begin + len(content)):
                    file, entry = self.places[tensor]
                    fd = self.fds[file.path.name]
                    hashers[tensor].update(content[part])
                    self.to.pwrite_all(fd, content[part], entry.begin + offset)
                    unsynced += part.stop - part.start
                    if unsynced >= _SYNC_EVERY:
                        self.to.fsync(fd)
                        unsynced = 0
                self.done[key] += len(content)
        self.digests.update((tensor, hasher.digest()) for tensor, hasher in hashers.items())

    def _new(self, key: PieceKey, decoder: Decoder) -> Iterator[memoryview]:
        blocks = self._old(key)
        for delta in self.deltas:
            if key not in delta:
                raise DeltaError("the deltas divide the tensors in different ways")
            reader, number = delta[key]
            blocks = reader.apply(number, blocks, decoder)
        return blocks

    def _old(self, key: PieceKey) -> Iterator[memoryview]:
        places = self.plan[key]
        width = ITEMSIZE[self.places[places[0].tensor][1].dtype]
        size = sum(place.length for place in places)
        memory = memoryview(bytearray(min(size, BLOCK * width)))
        for begin in range(0, size, BLOCK * width):
            part = memory[: size - begin]
            for tensor, offset, at in _within(places, begin, begin + len(part)):
                file, entry = self.places[tensor]
                count = self.to.pread_fully(file.fd, part[at], entry.begin + offset)
                if count < at.stop - at.start:
                    raise DeltaError(f"{file.path} became shorter while it was read")
            yield part
