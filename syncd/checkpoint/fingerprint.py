"""The identity of a save without receipts: its files' names, sizes, inodes and times."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

import xxhash

from syncd.protocol.names import (
    DCP_METADATA,
    HUGGINGFACE,
    LORA_ADAPTER,
    MANIFEST,
    TEMPORARY,
    is_dcp_file,
    is_weights_name,
)
from syncd.storage.fsio import Storage

#: How the identity of a folder of ``torch.distributed.checkpoint`` begins; then come those of its
#: ``.metadata``, of its ``.distcp`` files, and of all.
_DCP: Final = "foreign-dcp-"


def fingerprint(storage: Storage, actor: Path, weights: tuple[str, ...]) -> str:
    """The identity of the save that is there, through fresh opens of all its weights.

    Args:
        storage: the shared storage.
        actor: the ``actor/`` folder.
        weights: the names of the files in it that the save is made of.

    Raises:
        OSError: as the storage says; a FileNotFoundError where a file went meanwhile.
    """
    hasher = xxhash.xxh3_128()
    parts = {True: xxhash.xxh3_64(), False: xxhash.xxh3_64()}  # of .metadata, and of the others
    # Merged weights in huggingface/, which 'syncd convert' may put there at any time, are made of
    # the save, and no part of it.
    model_files = (
        f"{folder}/{name}"
        for folder in (HUGGINGFACE, LORA_ADAPTER)
        for name in storage.names(actor / folder)
        if not name.startswith(TEMPORARY)
        and not (folder == HUGGINGFACE and (is_weights_name(name) or name == MANIFEST))
    )
    for name in dict.fromkeys((*weights, *model_files)):
        path = actor / name
        status = storage.status(path)
        if status is not None and name in weights:
            # An open makes a network filesystem ask the server; a bare stat may be stale.
            fd = storage.open_read(path)
            try:
                status = storage.fstat(fd)
            finally:
                storage.release(fd)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, "went while it was looked at", str(path))
        line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\n"
        hasher.update(line.encode(errors="surrogateescape"))
        if is_dcp_file(name):
            parts[name == DCP_METADATA].update(line.encode(errors="surrogateescape"))
    if DCP_METADATA in weights:
        told = "-".join(parts[part].hexdigest() for part in (True, False))
        return f"{_DCP}{told}-{hasher.hexdigest()}"
    return f"foreign-{hasher.hexdigest()}"


def is_saved_over(identity: str, known: str) -> bool:
    """Whether a folder is being saved into again, by ``torch.distributed.checkpoint``.

    That writes over the files where they are, each rank in its own time, and replaces
    ``.metadata`` last: until then the folder looks whole, and has some files of each save.

    Args:
        identity: of the folder as it is now.
        known: that of a save that was whole, and published.
    """
    now, before = (told.removeprefix(_DCP).split("-") for told in (identity, known))
    both = identity.startswith(_DCP) and known.startswith(_DCP)
    return both and now[0] == before[0] and now[1] != before[1]
