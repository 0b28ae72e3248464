"""Apply deltas: make a version's files from an older version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from syncd.checkpoint.merging.options import Progress, unheard
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.safetensors_file import SafetensorsFile, file_digest
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.checkpoint.version import WEIGHTS, copy_file, each_file
from syncd.deltas.delta_folder import BLOCK
from syncd.deltas.delta_reader import DeltaReader
from syncd.deltas.encoding import Decoder, as_elements
from syncd.deltas.ends import NoDeltaError, elements_of, in_order, why_no_chain
from syncd.deltas.whole_version import Places, WholeVersion, check_header, open_weights
from syncd.protocol.errors import CheckpointError, SaveNotReadyError, VerificationError
from syncd.protocol.records import Delta, TensorEntry, VersionFile
from syncd.storage.fsio import Storage, named

#: Bytes between two fsyncs.
_SYNC_EVERY: Final = 256 * 1024 * 1024


class Link(NamedTuple):
    """A delta in a chain: its folder and its record."""

    folder: Path
    delta: Delta


def apply_chain(
    storage: Storage,
    target: WholeVersion,
    chain: Sequence[Link],
    base: WholeVersion,
    *,
    to: Storage,
    draft: Path,
    threads: int = 4,
    cancel: Check = lambda: None,
    progress: Progress = unheard,
) -> None:
    """Make all files of a version except the manifest, and verify them in the same pass.

    Args:
        storage: the storage of the deltas and of the target.
        target: the published version. Its tensors are not read, only headers and small files.
        chain: the deltas from the base to the target, in order.
        base: a whole version. Nobody may delete it during the call.
        to: the storage of the draft and of the base.
        draft: an empty folder. The caller must sync its parent, or remove the draft on errors.
        threads: the most files to make at a time, also limited by the number of processors.
        cancel: called often, in this thread. It can raise an error to stop the work.
        progress: called in this thread, with the bytes of tensors done, and of all tensors.

    Raises:
        NoDeltaError: the deltas do not make this version from this base.
        VerificationError: the files of the target differ from its manifest.
        OSError: a storage failed.
    """
    why = why_no_chain([link.delta for link in chain], base.manifest, target.manifest)
    if why is not None:
        raise NoDeltaError(why)
    tensors = in_order(target.manifest)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(DeltaReader(storage, link.folder, link.delta, tensors))
            for link in chain
        ]
        places = stack.enter_context(open_weights(to, base))
        making = _Making(storage, target, readers, places, to, draft)
        for name in sorted({file.name for file in target.manifest.files if "/" in file.name}):
            to.make_folder((draft / name).parent, below=draft.parent)

        def look() -> None:
            cancel()
            progress(sum(making.done.copy().values()), making.total)

        each_file(making.make, storage, target.folder, target.manifest, threads, look)


@dataclass(eq=False)
class _Making:
    """Makes all files of a version. Several threads can call :meth:`make`."""

    storage: Storage
    target: WholeVersion
    readers: Sequence[DeltaReader]
    places: Places
    to: Storage
    draft: Path

    def __post_init__(self) -> None:
        tensors = in_order(self.target.manifest)
        self.numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
        self.done: dict[str, int] = {}
        self.total = sum(elements_of(tensor) * ITEMSIZE[tensor.dtype] for tensor in tensors)

    def make(self, file: VersionFile, told: Mapping[str, TensorEntry], check: Check) -> None:
        if not file.name.endswith(WEIGHTS):
            copy_file(self.storage, self.target.folder, self.to, self.draft, file, told, check)
            return
        path = self.target.folder / file.name
        try:
            published = SafetensorsFile.open(self.storage, path)
        except (CheckpointError, SaveNotReadyError) as error:
            raise VerificationError(str(error)) from error
        with published:
            if published.size != file.size:
                raise VerificationError(f"{path}: its size is not what the manifest says")
            check_header(published, told)
            digests = [bytes.fromhex(told[entry.name].digest or "") for entry in published.entries]
            if file_digest(published.header, digests) != file.digest:
                raise VerificationError(f"{path}: its header is not what the manifest says")
        fd = self.to.create(self.draft / file.name)
        with self.to.closing(fd):
            _FileMaking(self, file.name, fd, check).run(published, digests)
            self.to.fsync(fd)


class _FileMaking:
    """Makes one file of weights, with a buffer of one block, and checks its tensors' digests."""

    def __init__(self, making: _Making, name: str, fd: int, check: Check) -> None:
        self._making = making
        self._name = name
        self._fd = fd
        self._check = check
        self._decoder = Decoder()
        self._memory = memoryview(bytearray(0))
        self._unsynced = 0
        making.done[name] = 0

    def run(self, published: SafetensorsFile, digests: Sequence[bytes]) -> None:
        self._write(published.header, 0)
        for entry, digest in zip(published.entries, digests, strict=True):
            if self._tensor(entry) != digest:
                raise NoDeltaError(
                    f"the digest of {shown(entry.name)} differs from the manifest. Either "
                    "the copy of the base version or a delta is damaged"
                )

    def _tensor(self, entry: HeaderEntry) -> bytes:
        source, place = self._making.places[entry.name]
        number = self._making.numbers[entry.name]
        width = ITEMSIZE[entry.dtype]
        hasher = xxhash.xxh3_128()
        step = BLOCK * width
        size = entry.end - entry.begin
        if len(self._memory) < min(step, size):
            self._memory = memoryview(bytearray(min(step, size)))
        for block, begin in enumerate(range(0, size, step)):
            self._check()
            part = self._memory[: min(step, size - begin)]
            if self._making.to.pread_fully(source.fd, part, place.begin + begin) < len(part):
                raise NoDeltaError(f"{source.path} became shorter while it was read")
            elements = as_elements(part, width)
            for reader in self._making.readers:
                reader.apply(number, block, elements, self._decoder)
            hasher.update(part)
            self._write(part, entry.begin + begin)
            self._making.done[self._name] += len(part)
        return hasher.digest()

    def _write(self, part: bytes | memoryview, offset: int) -> None:
        with named(self._making.draft / self._name):
            self._making.to.pwrite_all(self._fd, part, offset)
        self._unsynced += len(part)
        if self._unsynced >= _SYNC_EVERY:
            self._making.to.fsync(self._fd)  # an fsync of gigabytes could not be interrupted
            self._unsynced = 0
