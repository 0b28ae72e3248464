"""Files of whole tensors: their digests, copies of them, and links that publish a trainer's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from syncd.checkpoint.parallel import Check
from syncd.checkpoint.safetensors_file import SafetensorsFile, file_digest
from syncd.checkpoint.safetensors_header import HeaderEntry, broken
from syncd.protocol.errors import SaveNotReadyError
from syncd.protocol.records import TensorEntry, VersionFile
from syncd.storage.fsio import Signature, Storage, signature

_BUFFER: Final = 1024 * 1024


class Merged(NamedTuple):
    """The files, the tensors in file order, and the tensors' total bytes."""

    files: tuple[VersionFile, ...]
    tensors: tuple[TensorEntry, ...]
    data_size: int

    @classmethod
    def of(cls, written: Sequence[WrittenFile], data_size: int) -> Merged:
        """Join the entries of several files."""
        files = tuple(file for file, _ in written)
        return cls(files, tuple(one for _, tensors in written for one in tensors), data_size)


#: A file, and the tensors in it.
WrittenFile = tuple[VersionFile, list[TensorEntry]]


def written_file(
    name: str,
    header: bytes,
    data_size: int,
    tensors: Iterable[HeaderEntry],
    digests: Sequence[bytes] | None,
    cancel: Check,
) -> WrittenFile:
    """The manifest's entries of a file. ``digests`` are in the order of ``tensors``."""
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
    whole = file_digest(header, digests) if digests is not None else None
    return VersionFile(name=name, size=len(header) + data_size, digest=whole), entries


def publish_files(
    storage: Storage,
    sources: Sequence[SafetensorsFile],
    folder: Path,
    *,
    vouched: bool,
    digests: bool,
    cancel: Check,
    progress: Callable[[int, int], None],
) -> Merged:
    """Make the files of a version from a trainer's files, which have the same names.

    If receipts vouch for the files, they are linked where storage allows it, and a header that has
    its tensors' digests is believed; then no tensor is read. Otherwise the files are copied.

    Raises:
        SaveNotReadyError: a file became shorter, or got another name's content meanwhile.
        ShardFormatError: a copied tensor does not have the digest in the header.
    """
    total = sum(file.size - len(file.header) for file in sources)
    written, done = [], 0

    def advanced(now: int, _: int) -> None:
        progress(done + now, total)

    for file in sources:
        cancel()
        target = folder / file.path.name
        # Our hooks never write in place, so linked files stay as they are.
        linked = vouched and link_own(storage, file.path, file.signature, target)
        said = file.said_digests if vouched and digests else None
        if linked and (said is not None or not digests):
            size = file.size - len(file.header)
            made = written_file(target.name, file.header, size, file.entries, said, cancel)
        else:
            made = digest_file(
                storage,
                file,
                copy_to=None if linked else target,
                digests=digests,
                cancel=cancel,
                progress=advanced,
            )
            found = [bytes.fromhex(tensor.digest or "") for tensor in made[1]]
            if said is not None and found != said:
                raise broken(
                    str(file.path), "its tensors differ from the tensors that the trainer wrote"
                )
        written.append(made)
        done += file.size - len(file.header)
    progress(total, total)
    return Merged.of(written, total)


def link_own(storage: Storage, source: Path, opened: Signature, target: Path) -> bool:
    """Link a trainer's file; False if storage cannot do it, or the file is another user's.

    Raises:
        SaveNotReadyError: the file is not the one that was ``opened``.
    """
    if not storage.link_if_possible(source, target):
        return False
    status = storage.status(target)
    if status is None or signature(status)[:2] != opened[:2]:
        raise SaveNotReadyError(
            f"{source} was replaced by another file while syncd linked it. Perhaps the trainer "
            "saved the step again"
        )
    if status.st_uid == os.geteuid():
        return True
    storage.unlink(target)  # a link keeps the owner and the mode
    return False


def digest_file(
    storage: Storage,
    source: SafetensorsFile,
    *,
    digests: bool = True,
    cancel: Check,
    copy_to: Path | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> WrittenFile:
    """Read a safetensors file once, to make its manifest entries and, if wanted, a copy.

    The copy at ``copy_to`` is synced. The caller must sync its folder.

    Raises:
        SaveNotReadyError: the file became shorter during the call.
    """
    if copy_to is None:
        found = _stream(storage, source, None, cancel, progress) if digests else []
    else:
        with storage.creating(copy_to, source.size) as target:
            storage.pwrite_all(target, source.header, 0)
            found = _stream(storage, source, target, cancel, progress)
            storage.fsync(target)
    data_size = source.size - len(source.header)
    told = found if digests else None
    return written_file(source.path.name, source.header, data_size, source.entries, told, cancel)


def _stream(
    storage: Storage,
    source: SafetensorsFile,
    target: int | None,
    cancel: Check,
    progress: Callable[[int, int], None],
) -> list[bytes]:
    view = memoryview(bytearray(_BUFFER))
    found = []
    for entry in source.entries:
        cancel()
        hasher = xxhash.xxh3_128()
        at = entry.begin
        while at < entry.end:
            cancel()
            count = source.storage.pread_into(source.fd, view[: entry.end - at], at)
            if count == 0:
                raise SaveNotReadyError(f"{source.path} became shorter while syncd read it")
            hasher.update(view[:count])
            if target is not None:
                storage.pwrite_all(target, view[:count], at)
            at += count
            progress(at - len(source.header), source.size - len(source.header))
        found.append(hasher.digest())
    return found
