"""The files of a Hugging Face model folder besides weights: config, tokenizer, index, name map."""

from __future__ import annotations

import itertools
import json
import logging
import stat
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

import pydantic
import xxhash

from syncd.checkpoint.description import Tensors, flaws, wrong_dtypes
from syncd.checkpoint.name_map import NameMap, may_tie
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.whole_files import Merged
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import (
    ADAPTER_CONFIG,
    MANIFEST,
    MODEL_CONFIG,
    NAME_MAP,
    TEMPORARY,
    is_weights_name,
)
from syncd.protocol.records import Manifest, VersionFile
from syncd.protocol.version_events import ModelFilesWrong
from syncd.storage.calls import FileKind
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

INDEX: Final = "model.safetensors.index.json"
FILE_LIMIT: Final = 1024**3
TOTAL_LIMIT: Final = 4 * 1024**3
#: A longer config is not searched for ties: untrusted JSON takes up to 30 times its size in memory.
_CONFIG_LIMIT: Final = 4 * 1024 * 1024
_BUFFER: Final = 1024 * 1024
#: The most bytes of a config that is compared, the most differences in a message, and the longest
#: name or value there.
_COMPARED: Final = 1024 * 1024
_CHANGES: Final = 8
_SHOWN: Final = 80
#: Keys that only name the writer of the file, or its folder.
_NO_SETTINGS: Final = frozenset(
    {"transformers_version", "_name_or_path", "_commit_hash", "_attn_implementation_autoset"}
)
_ABSENT: Final = object()
#: Real folders have one or two levels.
_DEPTH_LIMIT: Final = 64
#: The jobs and kinds of flaws that were logged.
LOGGED: Final[set[tuple[Path, str]]] = set()


def copy_model_files(
    storage: Storage,
    source_hf: Path,
    folder: Path,
    *,
    cancel: Check,
    leave_out: Container[str] = (),
    listed: Container[str] = (),
    recursive: bool = True,
) -> dict[str, VersionFile]:
    """Copy and sync all files but weights from ``actor/huggingface/`` into a version's folder.

    Only regular files are copied. Links are never followed, because other users may have made
    them. A missing ``source_hf`` counts as empty. ``leave_out`` has the paths to skip, relative to
    ``source_hf``. If receipts have ``listed`` the folder's config, only what they list counts:
    other files were left by another save, perhaps of another model. Where the trainer writes no
    config, a user may have put files there. The result is sorted, by the paths in ``folder``.

    Raises:
        CheckpointError: a file is too large or has an impossible name, or the folder is too deep.
        OSError: storage failed; ``ENOENT`` if a file was deleted meanwhile.
    """
    copied = {}
    folders = {folder}
    left = TOTAL_LIMIT
    configs = MODEL_CONFIG, ADAPTER_CONFIG
    is_strict = any(f"{source_hf.name}/{config}" in listed for config in configs)
    found = _regular_files(storage, source_hf, PurePosixPath(), cancel, recursive=recursive)
    for path in sorted(found, key=lambda path: path.parts):
        cancel()
        if str(path) in leave_out or (is_strict and f"{source_hf.name}/{path}" not in listed):
            continue
        target = folder / path
        if target.parent not in folders:
            storage.make_folder(target.parent, below=folder)
            folders.add(target.parent)
        size, digest = _copy(storage, source_hf / path, target, min(FILE_LIMIT, left), cancel)
        left -= size
        try:
            copied[str(path)] = VersionFile(name=str(path), size=size, digest=digest)
        except pydantic.ValidationError as error:
            raise CheckpointError(
                f"{source_hf}: {str(path)!r} cannot be the name of a published file. Rename the "
                "file: the name must be valid UTF-8, without control characters, and not too long"
            ) from error
    for made in folders:
        cancel()
        storage.sync_folder(made)
    return copied


def read_model_config(
    storage: Storage, folder: Path, copied: Iterable[VersionFile], name: str = MODEL_CONFIG
) -> object:
    """The content of the copied ``config.json``; None if it is missing or unreadable."""
    size = next((file.size for file in copied if file.name == name), None)
    if size is None or size > _CONFIG_LIMIT:
        return None
    try:
        return json.loads(storage.read(folder / name, _CONFIG_LIMIT))
    except (ValueError, RecursionError):
        return None  # no engine can read it either; it is published as the trainer left it


def has_config_of(
    storage: Storage, folder: Path, source_hf: Path, manifest: Manifest, *, is_cast: bool
) -> bool:
    """True if a version's ``config.json`` is a save's, but for the dtype that the weights have."""
    try:
        there, told = (
            json.loads(storage.read(place / MODEL_CONFIG, _CONFIG_LIMIT))
            for place in (folder, source_hf)
        )
    except (ValueError, RecursionError):
        return False
    _set_dtype(told, manifest.tensors, is_cast=is_cast)
    return bool(there == told)


def flaws_in(storage: Storage, folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What the small files of a version wrongly say of its weights: kinds and reasons."""
    if manifest.kind == "full":
        configs = {
            name: read_model_config(storage, folder, manifest.files, name)
            for name in (MODEL_CONFIG, "tokenizer_config.json")
        }
        yield from flaws(configs, {file.name for file in manifest.files}, manifest.tensors)


def warn_once(actor: Path, flaw: str, reason: str, included: str = "") -> None:
    """Log a flaw of a save's small files, once a run for each kind; it says another one too."""
    key = actor.parent.parent, flaw
    if key not in LOGGED:
        LOGGED.update({key, (key[0], included)})
        ModelFilesWrong(actor, flaw, reason).tell(log)


def correct_dtype(
    storage: Storage,
    folder: Path,
    files: dict[str, VersionFile],
    config: object,
    tensors: Tensors,
    *,
    is_cast: bool,
) -> None:
    """Write the dtype of the weights into the ``config.json`` of a folder, if it has another."""
    if not _set_dtype(config, tensors, is_cast=is_cast):
        return
    with suppress(RecursionError):  # it is published as the trainer left it
        content = json.dumps(config, indent=2).encode() + b"\n"
        storage.unlink(folder / MODEL_CONFIG)
        files[MODEL_CONFIG] = write_file(storage, folder, MODEL_CONFIG, content)


def _set_dtype(config: object, tensors: Tensors, *, is_cast: bool) -> bool:
    """Set the dtype of the weights where a config has another; True if it had."""
    wrong = wrong_dtypes(config, tensors, is_cast=is_cast)
    for part, key, true in wrong:
        part[key] = true
    return bool(wrong)


def says_tied(config: object) -> bool:
    """True if the content of a ``config.json`` sets ``tie_word_embeddings``.

    False if ``text_config`` sets another value, because readers disagree on which value counts. A
    missing value contradicts nothing, because a config file leaves out defaults. False, too, for
    the classes of transformers that tie nothing, whatever their config says.
    """
    told: list[object] = [] if may_tie(config) else [False]
    while isinstance(config, dict):
        told.append(config.get("tie_word_embeddings"))
        config = config.get("text_config")
    # Compare by identity: the value may be 1, or a list, which cannot be looked up in a set.
    return any(said is True for said in told) and all(said is True or said is None for said in told)


def changed_settings(storage: Storage, before: Path, after: Path) -> list[str]:
    """The first few settings that differ between two versions' ``config.json``, as text.

    For example ``rope_scaling.factor (2.0 → 4.0)``. Keys that do not concern the model are ignored.
    Empty if a ``config.json`` is missing or unreadable.
    """
    try:
        contents = [storage.read(folder / MODEL_CONFIG, _COMPARED) for folder in (before, after)]
        if contents[0] == contents[1]:
            return []
        old, new = (json.loads(content) for content in contents)
        changes = list(itertools.islice(_changes(old, new, ""), _CHANGES + 1))
    except (OSError, ValueError, RecursionError):
        return []  # the version is published, whatever its config is
    return changes if len(changes) <= _CHANGES else [*changes[:_CHANGES], "and more"]


def _changes(old: object, new: object, name: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - _NO_SETTINGS):
            # Cut each name here, because long keys may be nested in long keys.
            inner = f"{name}.{key}" if name else key
            yield from _changes(old.get(key, _ABSENT), new.get(key, _ABSENT), inner[: _SHOWN + 1])
    elif old != new and repr(old) != repr(new):  # NaN is not equal to itself
        yield f"{shown(name, _SHOWN)} ({_described(old)} → {_described(new)})"


def _described(value: object) -> str:
    told = "absent" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return shown(told, _SHOWN)


def write_index(storage: Storage, folder: Path, merged: Merged) -> tuple[VersionFile, ...]:
    """Write and sync ``model.safetensors.index.json`` if there are several weight files."""
    if len(merged.files) == 1:
        return ()
    weights = {tensor.name: tensor.file for tensor in merged.tensors}
    index = {
        "metadata": {"total_size": merged.data_size},
        "weight_map": dict(sorted(weights.items())),
    }
    content = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
    return (write_file(storage, folder, INDEX, content),)


def write_name_map(
    storage: Storage, folder: Path, names: NameMap | None
) -> tuple[VersionFile, ...]:
    """Write and sync ``name_map.json`` if names differ on the hub, and the trainer wrote no map.

    Explorers that load in place need the map, whichever names the version has. If the hub's names
    are unknown, the map holds the reason, because some servers must refuse the version.
    """
    if names is None or not (names or names.refused) or storage.exists(folder / NAME_MAP):
        return ()
    return (write_file(storage, folder, NAME_MAP, names.encode()),)


def write_file(storage: Storage, folder: Path, name: str, content: bytes) -> VersionFile:
    """Write and sync a small file of a version; return its entry in the manifest."""
    storage.write_new(folder / name, content)
    digest = xxhash.xxh3_128_hexdigest(content)
    return VersionFile(name=name, size=len(content), digest=digest)


def _regular_files(
    storage: Storage,
    root: Path,
    below: PurePosixPath,
    cancel: Check,
    *,
    recursive: bool,
) -> Iterator[PurePosixPath]:
    status = storage.status(root / below)
    if status is None:
        return
    if not below.parts and not stat.S_ISDIR(status.st_mode):
        what = "file" if stat.S_ISREG(status.st_mode) else "pipe, socket or device"
        what = "link" if stat.S_ISLNK(status.st_mode) else what
        raise CheckpointError(
            f"{root} is a {what}, but must be the folder of the model's config and tokenizer: "
            f"remove this {what}, and save the step again"
        )
    if len(below.parts) > _DEPTH_LIMIT:
        raise CheckpointError(
            f"{root} has folders nested more than {_DEPTH_LIMIT} levels deep: remove these folders"
        )
    for name, kind in storage.kinds(root / below).items():
        cancel()
        path = below / name
        # The merge writes weights itself; temporary files are not part of the model.
        if path == PurePosixPath(MANIFEST) or is_weights_name(name) or name.startswith(TEMPORARY):
            continue
        if kind is FileKind.FOLDER and recursive:
            yield from _regular_files(storage, root, path, cancel, recursive=True)
        elif kind is FileKind.FILE:
            yield path
        elif kind is FileKind.LINK:
            reason = (
                f"syncd does not publish {shown(str(path))}, because it follows no links in a "
                "save. Replace this link by its file or folder (cp -RL), and save again"
            )
            warn_once(root.parent, "link", reason)


def _copy(
    storage: Storage, source: Path, target: Path, limit: int, cancel: Check
) -> tuple[int, str]:
    hasher = xxhash.xxh3_128()
    size = 0
    with storage.reading(source) as reading, storage.creating(target) as writing:
        while data := storage.read_part(reading, _BUFFER):
            cancel()
            size += len(data)
            if size > limit:
                raise CheckpointError(
                    f"{source} is larger than 1 GiB, or its folder is larger than 4 GiB: remove "
                    "all files except the config and the tokenizer"
                )
            hasher.update(data)
            storage.write_all(writing, data)
        storage.fsync(writing)
    return size, hasher.hexdigest()
