"""The rest of a Hugging Face model folder: config, tokenizer, the index of several weight files."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import pydantic
import xxhash

from syncd.checkpoint.merge import Merged
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import MANIFEST, MODEL_CONFIG, TEMPORARY, is_weights_name
from syncd.protocol.records import VersionFile
from syncd.storage.calls import Kind
from syncd.storage.fsio import Storage

INDEX: Final = "model.safetensors.index.json"
FILE_LIMIT: Final = 1024**3
TOTAL_LIMIT: Final = 4 * 1024**3
#: Real ones have kilobytes; what a longer one says of ties is not looked for. JSON takes up to 30
#: times its size in memory, and anyone may have written it.
_CONFIG_LIMIT: Final = 4 * 1024 * 1024
_BUFFER: Final = 1024 * 1024


def copy_model_files(
    storage: Storage,
    source_hf: Path,
    folder: Path,
    *,
    cancel: Callable[[], None],
    leave_out: Container[str] = (),
    recursive: bool = True,
) -> tuple[VersionFile, ...]:
    """Copy everything but weights from ``actor/huggingface/`` into a version's folder, durably.

    Only regular files; links are never followed. Without such a folder there is nothing to copy.

    Args:
        storage: the storage to write to.
        source_hf: the trainer's folder.
        folder: the version's folder, which is there already.
        cancel: called often; it raises to stop.
        leave_out: files that are not to be copied, by paths relative to the folder.
        recursive: whether the folders inside it are copied too.

    Returns:
        The files, by paths relative to ``folder``, sorted.

    Raises:
        CheckpointError: a file over 1 GiB, over 4 GiB in all, or a name that no manifest can hold.
        OSError: as the storage says, e.g. ``ENOSPC``, or ``ENOENT`` for a file that went away.
    """
    copied = []
    folders = {folder}
    left = TOTAL_LIMIT
    for path in sorted(_regular_files(storage, source_hf, PurePosixPath(), recursive=recursive)):
        if str(path) in leave_out:
            continue
        target = folder / path
        if target.parent not in folders:
            storage.make_folder(target.parent, below=folder)
            folders.add(target.parent)
        size, digest = _copy(storage, source_hf / path, target, min(FILE_LIMIT, left), cancel)
        left -= size
        try:
            copied.append(VersionFile(name=str(path), size=size, digest=digest))
        except pydantic.ValidationError as error:
            raise CheckpointError(
                f"{source_hf}: {str(path)!r} cannot be the name of a published file: rename it"
            ) from error
    for made in folders:
        storage.sync_folder(made)
    return tuple(copied)


def ties_embeddings(storage: Storage, folder: Path, copied: Iterable[VersionFile]) -> bool:
    """Whether ``config.json``, as it was copied, says ``tie_word_embeddings``.

    Of a model that holds a text model, both must say so that do say it: those that read it are not
    of one mind which one counts. Silence says nothing, since a default of the model's class is left
    out of the file.
    """
    size = next((file.size for file in copied if file.name == MODEL_CONFIG), None)
    if size is None or size > _CONFIG_LIMIT:
        return False
    try:
        return says_tied(json.loads(storage.read(folder / MODEL_CONFIG, _CONFIG_LIMIT)))
    except (ValueError, RecursionError):
        return False  # no engine can read it either; it is published as the trainer left it


def says_tied(config: object) -> bool:
    """Whether what a ``config.json`` holds says ``tie_word_embeddings``, as above."""
    told = []
    while isinstance(config, dict):
        told.append(config.get("tie_word_embeddings"))
        config = config.get("text_config")
    # By identity: what a file says may be a list, which no set can be asked for, or 1.
    return any(said is True for said in told) and all(said is True or said is None for said in told)


def write_index(storage: Storage, folder: Path, merged: Merged) -> tuple[VersionFile, ...]:
    """Write ``model.safetensors.index.json``, durably, where there are several weight files.

    Returns:
        The file; nothing where one weight file needs no index.
    """
    if len(merged.files) == 1:
        return ()
    weights = {tensor.name: tensor.file for tensor in merged.tensors}
    index = {
        "metadata": {"total_size": merged.data_size},
        "weight_map": dict(sorted(weights.items())),
    }
    content = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
    storage.write_new(folder / INDEX, content)
    digest = xxhash.xxh3_128_hexdigest(content)
    return (VersionFile(name=INDEX, size=len(content), digest=digest),)


def _regular_files(
    storage: Storage, root: Path, below: PurePosixPath, *, recursive: bool
) -> Iterator[PurePosixPath]:
    """The regular files under a folder that are no weights, relative to ``root``."""
    if not storage.exists(root / below):
        return
    for name, kind in storage.kinds(root / below).items():
        path = below / name
        # Weights are the merge's to write, and temporaries are nobody's.
        if path == PurePosixPath(MANIFEST) or is_weights_name(name) or name.startswith(TEMPORARY):
            continue
        if kind is Kind.FOLDER and recursive:
            yield from _regular_files(storage, root, path, recursive=True)
        elif kind is Kind.FILE:
            yield path


def _copy(
    storage: Storage, source: Path, target: Path, limit: int, cancel: Callable[[], None]
) -> tuple[int, str]:
    """Copy a file of at most ``limit`` bytes; returns its size and its digest."""
    hasher = xxhash.xxh3_128()
    size = 0
    reading = storage.open_read(source)
    try:
        writing = storage.create(target)
        with storage.closing(writing):
            while data := storage.read_part(reading, _BUFFER):
                cancel()
                size += len(data)
                if size > limit:
                    raise CheckpointError(
                        f"{source} is over 1 GiB, or its folder over 4 GiB: remove what is no "
                        "config or tokenizer from it"
                    )
                hasher.update(data)
                storage.write_all(writing, data)
            storage.fsync(writing)
    finally:
        storage.release(reading)
    return size, hasher.hexdigest()
