"""Checks that every engine must pass. You can run these checks on your own engine.

With pytest::

    @pytest.mark.parametrize("check", CHECKS, ids=name_of)
    def test_my_engine(check, tmp_path):
        check(Subject(make=MyEngine, served=what_it_serves, tensors=specs), tmp_path)

The checks write the versions themselves, and need neither a daemon nor torch.
"""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import xxhash

from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.safetensors_file import file_digest
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.names import ADAPTER_WEIGHTS, MANIFEST
from syncd.protocol.records import (
    AdaptedModel,
    Kind,
    Manifest,
    Names,
    TensorEntry,
    VersionFile,
    encode,
)
from syncd.storage.fsio import Storage

__all__ = ["CHECKS", "ConformanceError", "Subject", "name_of"]
Check = Callable[["Subject", Path], None]


class ConformanceError(AssertionError):
    """Raised when an engine breaks a promise of the protocol."""


def _bits(version: LeasedVersion) -> object:
    return {
        entry.name: file.storage.pread_all(file.fd, entry.end - entry.begin, entry.begin)
        for file in version.open_weights()
        for entry in file.entries
    }


@dataclass(frozen=True)
class Subject:
    """An engine under test.

    Attributes:
        make: makes a new engine with its own model.
        served: returns the content that an engine serves, in the same form as ``expected``. By
            default this form maps each tensor's name to its bytes.
        tensors: the tensors that a version must have, by name. List tied tensors under one name.
        expected: returns the content that the engine must serve after it has loaded a version.
        kind: the kind of the versions.
        files: additional files in each version, by name.
        names: ``trainer`` or ``hub``: the origin of the names in ``tensors``; only used if
            ``files`` has a ``name_map.json``.
        all_or_nothing: True if a failed ``load`` changes nothing. False if the engine only promises
            that it can load the previous version again.
    """

    make: Callable[[], Engine]
    served: Callable[[Any], object]
    tensors: Mapping[str, TensorSpec]
    expected: Callable[[LeasedVersion], object] = _bits
    kind: Literal["full", "adapter"] = "full"
    files: Mapping[str, bytes] = field(default_factory=dict)
    names: Names = "trainer"
    all_or_nothing: bool = True

    def version(
        self,
        folder: Path,
        sequence: int,
        *,
        tensors: Mapping[str, TensorBytes] | None = None,
        storage: Storage | None = None,
    ) -> LeasedVersion:
        """Make a version with random weights, in a new folder below ``folder``.

        The weights depend on ``sequence``, or are given as ``tensors``. ``storage`` writes the
        version, and later reads it.
        """
        return make_version(
            folder / f"v{sequence:06d}",
            random_tensors(self.tensors, sequence) if tensors is None else tensors,
            sequence=sequence,
            kind=self.kind,
            files=self.files,
            names=self.names,
            storage=storage,
        )


def serves_the_bits_of_what_was_loaded(subject: Subject, folder: Path) -> None:
    """The engine serves the bits of the loaded version, with and without ``prepare``."""
    engine, first, second = subject.make(), subject.version(folder, 1), subject.version(folder, 2)
    for version in (first, first, second, first):
        engine.check(version)
        engine.load(version)
        _serves(subject, engine, version)
    for version in (second, second, first):
        engine.check(version)
        engine.prepare(version)
        engine.load(version)
        _serves(subject, engine, version)
    engine.close()


def follows_the_order_of_a_hook(subject: Subject, folder: Path) -> None:
    """Of all calls of a hook, only ``load`` changes the served weights."""
    engine, first, second = subject.make(), subject.version(folder, 1), subject.version(folder, 2)
    engine.attach()
    engine.load(first)
    calls: tuple[Callable[[], None], ...] = (
        partial(engine.check, second),
        partial(engine.prepare, second),
        engine.pause,
        engine.reset_cache,
        engine.resume,
    )
    for call in calls:
        call()
        _serves(subject, engine, first)
    engine.pause()
    engine.load(second)
    engine.reset_cache()
    engine.resume()
    _serves(subject, engine, second)
    engine.close()


def what_is_prepared_need_not_be_loaded(subject: Subject, folder: Path) -> None:
    """After ``prepare`` of a version that is then deleted, another version can be loaded."""
    engine, _ = _loaded(subject, folder)
    second, third = (subject.version(folder, sequence) for sequence in (2, 3))
    engine.prepare(second)
    Storage(durable=False).remove_tree(second.folder)
    engine.load(third)
    _serves(subject, engine, third)
    engine.close()


def resume_and_close_can_be_called_at_any_time(subject: Subject, folder: Path) -> None:
    """``resume`` works without ``pause``; ``resume`` and ``close`` work when called twice."""
    engine, version = subject.make(), subject.version(folder, 1)
    engine.resume()
    engine.load(version)
    engine.reset_cache()
    engine.resume()
    engine.pause()
    engine.resume()
    engine.resume()
    _serves(subject, engine, version)
    engine.close()
    engine.close()


def check_refuses_what_does_not_fit(subject: Subject, folder: Path) -> None:
    """``check`` refuses wrong tensors and unsupported kinds, and changes nothing."""
    engine, first = _loaded(subject, folder)
    for number, (what, wrong) in enumerate(_misfits(subject), 2):
        version = subject.version(folder, number, tensors=wrong)
        refused = _fails(engine.check, version, EngineMismatchError)
        _require(refused, f"check() did not refuse a version with {what}")
        _serves(subject, engine, first)
    for number, kind in enumerate(("full", "adapter", "remote"), 1000):
        if kind in engine.kinds:
            continue
        version = make_version(
            folder / f"v{number:06d}",
            {} if kind == "remote" else random_tensors(subject.tensors, 2),
            sequence=number,
            kind=kind,  # type: ignore[arg-type] # one of these three
            remote="elsewhere" if kind == "remote" else None,
        )
        refused = _fails(engine.check, version, EngineMismatchError)
        _require(refused, f"check() did not refuse a version of kind {kind}")
        _serves(subject, engine, first)
    engine.close()


def a_read_error_at_any_tensor_changes_nothing(subject: Subject, folder: Path) -> None:
    """After a read error the engine serves the old weights, and a later ``load`` works."""
    engine, first = _loaded(subject, folder)
    storage = FailingStorage()
    second = subject.version(folder, 2, storage=storage)
    places = [
        (file.path, entry)
        for file in second.open_weights()
        for entry in file.entries
        if entry.end > entry.begin
    ]
    for path, entry in places:
        for call in (engine.prepare, engine.load):
            storage.place = path, entry
            failed = _fails(call, second)
            storage.place = None
            if call == engine.load:
                _require(
                    failed, f"load() did not fail, although {entry.name} in {path} was unreadable"
                )
                _survives(subject, engine, first)
            _serves(subject, engine, first)
        engine.load(second)
        _serves(subject, engine, second)
        engine.load(first)
    engine.close()


def a_file_that_is_cut_short_changes_nothing(subject: Subject, folder: Path) -> None:
    """``load`` of a truncated file fails, and the engine serves the old weights."""
    engine, first = _loaded(subject, folder)
    storage = Storage(durable=False)
    second = subject.version(folder, 2, storage=storage)
    names = sorted({entry.file for entry in second.manifest.tensors}, reverse=True)
    for name in names:
        path = second.folder / name
        whole = path.read_bytes()
        for size in (len(whole) - 1, 9):
            storage.replace(path, whole[:size])
            _require(
                _fails(engine.load, second), f"load() did not fail, although {path} is truncated"
            )
            _survives(subject, engine, first)
            _serves(subject, engine, first)
    engine.close()


#: All checks. If several fail, look at the first one first.
CHECKS: Final[tuple[Check, ...]] = (
    serves_the_bits_of_what_was_loaded,
    follows_the_order_of_a_hook,
    what_is_prepared_need_not_be_loaded,
    resume_and_close_can_be_called_at_any_time,
    check_refuses_what_does_not_fit,
    a_read_error_at_any_tensor_changes_nothing,
    a_file_that_is_cut_short_changes_nothing,
)


def name_of(check: Check) -> str:
    """The name of a check, for the ids of a parametrized test."""
    return getattr(check, "__name__", str(check))


def _loaded(subject: Subject, folder: Path) -> tuple[Engine, LeasedVersion]:
    engine, version = subject.make(), subject.version(folder, 1)
    engine.load(version)
    return engine, version


def _misfits(subject: Subject) -> Iterator[tuple[str, dict[str, TensorBytes]]]:
    fitting = random_tensors(subject.tensors, 2)
    for name, tensor in fitting.items():
        yield f"{name} missing", {key: fitting[key] for key in fitting if key != name}
        longer = TensorSpec(tensor.dtype, (*tensor.shape, 2))
        yield f"{name} of another shape", fitting | random_tensors({name: longer}, 3)
        dtype = "I32" if tensor.dtype != "I32" else "F32"
        other = TensorSpec(dtype, tensor.shape)
        yield f"{name} of another dtype", fitting | random_tensors({name: other}, 3)
    more = {"a_tensor_that_no_model_has": TensorSpec("F32", (2,))}
    yield "an extra name", fitting | random_tensors(more, 3)


def _fails(
    call: Callable[[LeasedVersion], None],
    version: LeasedVersion,
    error: type[Exception] = Exception,  # each engine has its own errors
) -> bool:
    try:
        call(version)
    except error:
        return True
    return False


def _survives(subject: Subject, engine: Engine, version: LeasedVersion) -> None:
    """Load the previous version again, as a hook does."""
    if not subject.all_or_nothing:
        engine.load(version)


def _serves(subject: Subject, engine: Engine, version: LeasedVersion) -> None:
    _require(
        subject.served(engine) == subject.expected(version),
        f"the engine does not serve version {version.sequence}",
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ConformanceError(what)


class FailingStorage(Storage):
    """Storage that raises ``EIO`` for reads that overlap ``place``, a file and its tensor."""

    def __init__(self) -> None:
        super().__init__(durable=False)
        self.place: tuple[Path, HeaderEntry] | None = None

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """Read bytes, or raise ``EIO``."""
        self._look(fd, offset, count)
        return super().pread(fd, count, offset)

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        """Read bytes, or raise ``EIO``."""
        self._look(fd, offset, len(part))
        return super().pread_into(fd, part, offset)

    def _look(self, fd: int, offset: int, count: int) -> None:
        path, entry = self.place or (None, None)
        overlaps = entry and offset < entry.end and entry.begin < offset + count
        if path and overlaps and os.path.samestat(os.fstat(fd), path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


class TensorBytes(NamedTuple):
    """A tensor: the dtype's name in safetensors, the shape, and the bytes, C-contiguous."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


class NoLease:
    """A lease that does nothing."""

    def release(self) -> None:
        """Do nothing."""


def random_tensors(specs: Mapping[str, TensorSpec], seed: int) -> dict[str, TensorBytes]:
    """Make tensors of random bits, including NaNs. Equal seeds give equal tensors."""
    chance = random.Random(seed)  # noqa: S311 - nothing is secret
    found = {}
    for name, (dtype, shape) in specs.items():
        content = chance.randbytes(ITEMSIZE[dtype] * math.prod(shape))
        if dtype == "BOOL":  # a bool is 0 or 1
            content = bytes(byte & 1 for byte in content)
        found[name] = TensorBytes(dtype, shape, content)
    return found


def make_version(
    folder: Path,
    tensors: Mapping[str, TensorBytes],
    *,
    sequence: int = 1,
    step: int | None = None,
    kind: Kind = "full",
    files: Mapping[str, bytes] | None = None,
    remote: str | None = None,
    base_model: str | None = None,
    names: Names = "trainer",
    storage: Storage | None = None,
) -> LeasedVersion:
    """Write a version's folder as the daemon would publish it.

    ``folder`` must not exist, but its parent must. A full version with two or more tensors gets two
    files. ``step`` defaults to ``sequence``.
    """
    storage = storage or Storage(durable=False)
    storage.mkdir(folder)
    listed, entries = [], []
    for name, content in (files or {}).items():
        storage.write_new(folder / name, content)
        digest = xxhash.xxh3_128_hexdigest(content)
        listed.append(VersionFile(name=name, size=len(content), digest=digest))
    for name, group in _grouped(list(tensors), kind).items():
        content, told, digest = _weights({key: tensors[key] for key in group}, name)
        storage.write_new(folder / name, content)
        listed.append(VersionFile(name=name, size=len(content), digest=digest))
        entries.extend(told)
    manifest = Manifest(
        sequence=sequence,
        step=sequence if step is None else step,
        save_id=f"made-{sequence}-0",
        kind=kind,
        names=names,
        checked="receipt",
        digests="xxh3-128",
        files=tuple(listed),
        tensors=tuple(entries),
        remote=remote,
        base_model=AdaptedModel(name=base_model) if base_model else None,
    )
    storage.write_new(folder / MANIFEST, encode(manifest))
    return LeasedVersion(storage, folder, manifest, NoLease())


def _grouped(names: Sequence[str], kind: Kind) -> dict[str, Sequence[str]]:
    if names and kind == "adapter":
        return {ADAPTER_WEIGHTS: names}
    if len(names) < 2:
        return {"model.safetensors": names} if names else {}
    half = len(names) // 2
    return {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }


def _weights(tensors: Mapping[str, TensorBytes], file: str) -> tuple[bytes, list[TensorEntry], str]:
    fields, told, at = [], [], 0
    for name, (dtype, shape, content) in tensors.items():
        fields.append(HeaderEntry(name, dtype, shape, at, at + len(content)))
        at += len(content)
        digest = xxhash.xxh3_128_hexdigest(content)
        told.append(TensorEntry(name=name, dtype=dtype, shape=shape, file=file, digest=digest))
    header = header_bytes(fields)
    digests = [xxhash.xxh3_128_digest(tensor.content) for tensor in tensors.values()]
    data = b"".join(tensor.content for tensor in tensors.values())
    return header + data, told, file_digest(header, digests)
