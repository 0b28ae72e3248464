"""A version's manifest and files: reading, verifying, copying, and publishing them again."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from syncd.checkpoint.merging.options import Progress, unheard
from syncd.checkpoint.parallel import Check, run_side_by_side, threads_here
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import SAVE_AGAIN
from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.whole_files import digest_file
from syncd.protocol.errors import CheckpointError, SaveNotReadyError, VerificationError
from syncd.protocol.names import MANIFEST, is_weights_name, printable
from syncd.protocol.records import Manifest, TensorEntry, VersionFile, encode, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import LONG_RECORD_LIMIT, Draft, Storage

#: The errors of :meth:`Storage.open_read` for a link, a pipe, a device or a folder.
_NOT_A_FILE: Final = frozenset({errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO})
WEIGHTS: Final = ".safetensors"
_BUFFER: Final = 1024 * 1024
#: The remedy for a damaged file of a version.
_PUBLISH_AGAIN: Final = (
    "Wait for the next version, or publish an older version with 'syncd rollback'. 'syncd verify' "
    "lists all damaged versions"
)


def read_manifest(storage: Storage, folder: Path) -> Manifest:
    """The manifest of a version's folder.

    Raises:
        RecordError: the file is not a manifest.
    """
    path = folder / MANIFEST
    return parse(Manifest, storage.read(path, LONG_RECORD_LIMIT), path)


def write_manifest(storage: Storage, source: Path, folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a version made of ``source``, and sync its folder.

    Raises:
        CheckpointError: the manifest would be too long.
    """
    content = encode(manifest)
    if len(content) > LONG_RECORD_LIMIT:
        raise CheckpointError(
            f"{source} has {len(manifest.tensors)} tensors. Their names would make the "
            f"{MANIFEST} {len(content)} bytes long, over the limit of {LONG_RECORD_LIMIT}. "
            "Save the model's own state dict"
        )
    storage.write_new(folder / MANIFEST, content)
    storage.sync_folder(folder)


def verify_version(
    storage: Storage,
    folder: Path,
    manifest: Manifest,
    *,
    threads: int = 4,
    cancel: Check = lambda: None,
    progress: Progress = unheard,
) -> None:
    """Compare the sizes, headers and digests of a version's files with the version's manifest.

    Each file must have a digest, unless the manifest's ``digests`` is ``off``. A published folder
    must hold no other weights. Up to ``threads`` files are read at a time, but no more than there
    are processors. ``cancel`` is called often, and raises an error to stop. ``progress`` gets the
    bytes that are done and the total bytes. Both are called in the calling thread.

    Raises:
        VerificationError: a file is missing, differs from the manifest, or is not listed there.
        OSError: storage failed, so the result is unknown.
    """
    done: dict[str, int] = {}  # each file is looked at by one thread

    def verify(file: VersionFile, told: Mapping[str, TensorEntry], check: Check) -> None:
        def advanced(so_far: int, _: int) -> None:
            done[file.name] = so_far

        _verify(storage, folder, file, told, check, progress=advanced)
        done[file.name] = file.size

    def look() -> None:
        cancel()
        if progress is not unheard:
            progress(sum(done.copy().values()), manifest.size)

    each_file(verify, storage, folder, manifest, threads, look)


def copy_version(
    storage: Storage,
    folder: Path,
    manifest: Manifest,
    *,
    to: Storage,
    target: Path,
    cancel: Check,
) -> None:
    """Copy a version's files, except the manifest, and verify them in the same pass.

    If possible, the new files are hard links, or share blocks. ``target`` must be an empty folder;
    the caller must sync it and its parent.

    Raises:
        VerificationError: verification fails (:func:`verify_version`), or ``target`` is missing.
    """
    folders = sorted({(target / file.name).parent for file in manifest.files} - {target})
    for below in folders:
        to.make_folder(below, below=target.parent)
    copy = partial(copy_file, storage, folder, to, target)
    each_file(copy, storage, folder, manifest, 4, cancel)
    for below in folders:
        to.sync_folder(below)


#: Works on one file of a version: its entry and its tensors in the manifest, and a check.
FileWork = Callable[[VersionFile, Mapping[str, TensorEntry], Check], None]


def each_file(
    work: FileWork,
    storage: Storage,
    folder: Path,
    manifest: Manifest,
    threads: int,
    cancel: Check,
) -> None:
    """Call ``work`` for each file of a version, several files at a time.

    Raises:
        VerificationError: the manifest lacks a digest, or does not list some weights in the folder.
        BaseException: the error of the work, or of ``cancel``.
    """
    told = manifest.tensors_by_file()
    for listed_file in manifest.files:
        if manifest.digests != "off" and listed_file.digest is None:
            raise VerificationError(
                f"the manifest of {folder} must give a digest for each file, but gives none for "
                f"{shown(listed_file.name)}: the manifest is damaged, or somebody has changed it"
            )
    # A server would load weights that the manifest does not list. A folder that was never published
    # is not checked: it may be the trainer's own ``huggingface/``, with ``training_args.bin``.
    for name in storage.names(folder) if manifest.sequence else ():
        if name not in told and is_weights_name(name):
            raise VerificationError(
                f"{folder / printable(name)} is not in the version's manifest, and a server would "
                "load it. Remove this file, and find out who put it there"
            )
    run_side_by_side(
        [partial(work, file, told[file.name]) for file in manifest.files],
        threads=threads_here(threads),
        look=cancel,
    )


def copy_file(
    storage: Storage,
    folder: Path,
    to: Storage,
    target: Path,
    file: VersionFile,
    told: Mapping[str, TensorEntry],
    cancel: Check,
) -> None:
    """Copy and verify one file; ``told`` has the manifest's entries of its tensors."""
    path, copy = folder / file.name, target / file.name
    linked = to.link_if_possible(path, copy)
    _verify(storage, folder, file, told, cancel, None if linked else _Copy(to, copy))


class _Copy(NamedTuple):
    storage: Storage
    path: Path

    def shares(self, fd: int, size: int) -> bool:
        """Share all blocks of an open file with the copy; False if that is not possible."""
        with self.storage.creating(self.path) as made:
            if self.storage.share_range(fd, made, size, 0, 0):
                self.storage.fsync(made)
                return True
        self.storage.unlink(self.path)
        return False


def _verify(
    storage: Storage,
    folder: Path,
    file: VersionFile,
    told: Mapping[str, TensorEntry],
    cancel: Check,
    copy: _Copy | None = None,
    progress: Progress = unheard,
) -> None:
    path = folder / file.name
    try:
        if file.name.endswith(WEIGHTS):
            _verify_weights(storage, path, file, told, cancel, copy, progress)
        else:
            _verify_other(storage, path, file, copy)
    except (CheckpointError, SaveNotReadyError) as error:
        raise VerificationError(str(error).replace(SAVE_AGAIN, _PUBLISH_AGAIN)) from error
    except OSError as error:
        if is_gone(error) or error.errno in _NOT_A_FILE:
            raise VerificationError(f"{path} is missing or not a file: {error}") from error
        raise


def _verify_weights(
    storage: Storage,
    path: Path,
    file: VersionFile,
    told: Mapping[str, TensorEntry],
    cancel: Check,
    copy: _Copy | None,
    progress: Progress,
) -> None:
    with SafetensorsFile.open(storage, path) as opened:
        _compare(path, "its size", opened.size, file.size)
        _compare(
            path,
            "its header",
            {entry.name: (entry.dtype, tuple(entry.shape)) for entry in opened.entries},
            {name: (entry.dtype, entry.shape) for name, entry in told.items()},
        )
        if copy is not None and copy.shares(opened.fd, opened.size):
            copy = None
        if file.digest is None and copy is None:
            return
        whole, tensors = digest_file(
            copy.storage if copy else storage,
            opened,
            digests=file.digest is not None,
            cancel=cancel,
            copy_to=copy.path if copy else None,
            progress=progress,
        )
    if file.digest is None:
        return
    for tensor in tensors:
        _compare(
            path, f"the digest of {shown(tensor.name)}", tensor.digest, told[tensor.name].digest
        )
    _compare(path, "its digest", whole.digest, file.digest)


def _verify_other(storage: Storage, path: Path, file: VersionFile, copy: _Copy | None) -> None:
    hasher = xxhash.xxh3_128()
    with storage.reading(path) as fd:
        _compare(path, "its size", storage.fstat(fd).st_size, file.size)
        with Draft(copy.storage, copy.path) if copy else nullcontext() as draft:
            while (file.digest is not None or draft) and (part := storage.read_part(fd, _BUFFER)):
                hasher.update(part)
                if draft:
                    draft.write(part)
            if draft:
                draft.commit()
    if file.digest is not None:
        _compare(path, "its digest", hasher.hexdigest(), file.digest)


def _compare(path: Path, what: str, found: object, told: object) -> None:
    if found != told:
        shown = f": {found} instead of {told}" if isinstance(found, int | str) else ""
        raise VerificationError(f"{path}: {what} is not what the manifest says{shown}")


_CHUNK: Final = 64 * 1024 * 1024


def link_or_copy(storage: Storage, source: Path, target: Path, cancel: Check) -> None:
    """Give a file a second name, or copy and sync it; the caller must sync the folder."""
    if storage.link_if_possible(source, target):
        return
    with storage.reading(source) as reading, storage.creating(target) as writing:
        at = 0
        while done := storage.copy_range(reading, writing, _CHUNK, at, at):
            cancel()
            at += done
        storage.fsync(writing)


def republish(
    storage: Storage,
    source: Path,
    folder: Path,
    manifest: Manifest,
    *,
    cancel: Check,
) -> None:
    """Fill a folder with a published version's files, write the manifest last, and sync the folder.

    The files are linked, or copied if this storage has no hard links. Links are safe, because no
    file of a version ever changes. No other process may read ``folder``, and the caller must sync
    its parent.

    Raises:
        VerificationError: a file's size differs from the size in the manifest.
        FileNotFoundError: a file is missing.
    """
    made = {folder}
    for file in manifest.files:
        cancel()
        target = folder / file.name
        if target.parent not in made:
            storage.make_folder(target.parent, below=folder)
            made.add(target.parent)
        link_or_copy(storage, source / file.name, target, cancel)
        status = storage.status(target)
        if status is None or status.st_size != file.size or not stat.S_ISREG(status.st_mode):
            raise VerificationError(
                f"{source / file.name} is no file of {file.size} bytes: it is damaged"
            )
    storage.write_new(folder / MANIFEST, encode(manifest))
    for path in sorted(made, reverse=True):
        storage.sync_folder(path)
