"""Checks that every engine must pass. You can run these checks on your own engine.

With pytest::

    @pytest.mark.parametrize("check", CHECKS, ids=name_of)
    def test_my_engine(check, tmp_path):
        check(Subject(make=MyEngine, served=what_it_serves, tensors=specs), tmp_path)

The checks write the versions themselves, and need neither a daemon nor torch.
"""

from __future__ import annotations

import errno
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.fitting import TensorSpec, differences
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.model_folder import write_file
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.checkpoint.whole_files import Merged, WrittenFile, digest_file
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.names import ADAPTER_WEIGHTS, MANIFEST
from syncd.protocol.records import Kind, Manifest, Names, encode
from syncd.storage.fsio import Storage

__all__ = ["CHECKS", "ConformanceError", "Subject", "name_of"]
Check = Callable[["Subject", Path], None]
#: The version that the engine must serve after each step of a check.
Steps = Iterator[LeasedVersion]
_STORAGE: Final = Storage(durable=False)


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
    kind: Kind = "full"
    files: Mapping[str, bytes] = field(default_factory=dict)
    names: Names = "trainer"
    all_or_nothing: bool = True

    def version(self, folder: Path, sequence: int, *, storage: Storage = _STORAGE) -> LeasedVersion:
        """Make a version in a new folder below ``folder``; its weights depend on ``sequence``.

        ``storage`` writes the version, and later reads it.
        """
        return make_version(
            folder / f"v{sequence:06d}",
            random_tensors(self.tensors, sequence),
            sequence=sequence,
            kind=self.kind,
            files=self.files,
            names=self.names,
            storage=storage,
        )


class _Trial(NamedTuple):
    """A new engine, and two versions for it. ``storage`` reads the second version."""

    engine: Engine
    first: LeasedVersion
    second: LeasedVersion
    storage: FailingStorage
    subject: Subject
    folder: Path

    def load_fails(self) -> bool:
        """Try to load the second version. After an error load the first, if the engine needs it."""
        failed = _fails(self.engine.load, self.second)
        if failed and not self.subject.all_or_nothing:
            self.engine.load(self.first)  # as a hook does
        return failed


def _check(steps: Callable[[_Trial], Steps]) -> Check:
    """Make a check that compares the served content after each step."""

    @wraps(steps)
    def check(subject: Subject, folder: Path) -> None:
        storage = FailingStorage(durable=False)
        first, second = subject.version(folder, 1), subject.version(folder, 2, storage=storage)
        trial = _Trial(subject.make(), first, second, storage, subject, folder)
        for version in steps(trial):
            if subject.served(trial.engine) != subject.expected(version):
                raise ConformanceError(f"the engine does not serve v{version.sequence}")
        trial.engine.close()

    return check


@_check
def serves_the_bits_of_what_was_loaded(trial: _Trial) -> Steps:
    """The engine serves the bits of the loaded version, with and without ``prepare``."""
    engine, first, second, *_ = trial
    for number, version in enumerate((first, first, second, first, second, second, first)):
        engine.check(version)
        if number > 3:
            engine.prepare(version)
        engine.load(version)
        yield version


@_check
def follows_the_order_of_a_hook(trial: _Trial) -> Steps:
    """Of all calls of a hook, only ``load`` changes the served weights."""
    engine, first, second, *_ = trial
    engine.attach()
    engine.load(first)
    before = partial(engine.check, second), partial(engine.prepare, second), engine.pause
    after = engine.reset_cache, engine.resume
    for call in (*before, *after):
        call()
        yield first
    for call in (engine.pause, partial(engine.load, second), *after):
        call()
    yield second


@_check
def what_is_prepared_need_not_be_loaded(trial: _Trial) -> Steps:
    """After ``prepare`` of a version that is then deleted, another version can be loaded."""
    engine, first, second, *_ = trial
    engine.load(first)
    engine.prepare(second)
    second.storage.remove_tree(second.folder)
    third = trial.subject.version(trial.folder, 3)
    engine.load(third)
    yield third


@_check
def resume_and_close_can_be_called_at_any_time(trial: _Trial) -> Steps:
    """``resume`` works without ``pause``; ``resume`` and ``close`` work when called twice."""
    engine, first, *_ = trial
    engine.resume()
    engine.load(first)
    engine.reset_cache()
    for call in (engine.resume, engine.pause, engine.resume, engine.resume):
        call()
    yield first
    engine.close()


@_check
def check_refuses_what_does_not_fit(trial: _Trial) -> Steps:
    """``check`` refuses wrong tensors and unsupported kinds, and changes nothing."""
    engine, first, *_, subject, folder = trial
    engine.load(first)
    for number, misfit in enumerate(_misfits(subject, engine.kinds), 3):
        if not _fails(engine.check, misfit.version(folder, number), EngineMismatchError):
            wrong = differences(misfit.tensors, subject.tensors, "the engine")
            raise ConformanceError(
                f"check() did not refuse a version of kind {misfit.kind}, which differs in: {wrong}"
            )
        yield first


@_check
def a_read_error_at_any_tensor_changes_nothing(trial: _Trial) -> Steps:
    """After a read error the engine serves the old weights, and a later ``load`` works."""
    engine, first, second, storage, *_ = trial
    engine.load(first)
    for reads in itertools.count():
        storage.reads = reads
        _fails(engine.prepare, second)  # it may read nothing
        yield first
        storage.reads = reads
        failed = trial.load_fails()
        storage.reads = math.inf
        if failed:
            yield first
            engine.load(second)
        yield second
        if not failed:
            break
        engine.load(first)
    if not reads:
        raise ConformanceError(f"load() did not fail, although {second.folder} was unreadable")


@_check
def a_file_that_is_cut_short_changes_nothing(trial: _Trial) -> Steps:
    """``load`` of a truncated file fails, and the engine serves the old weights."""
    trial.engine.load(trial.first)
    for file in reversed(list(trial.second.open_weights())):
        whole = file.path.read_bytes()
        for size in (len(whole) - 1, 9):
            trial.storage.replace(file.path, whole[:size])
            if not trial.load_fails():
                raise ConformanceError(f"load() did not fail, although {file.path} is truncated")
            yield trial.first


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
    return check.__name__


def _misfits(subject: Subject, kinds: frozenset[str]) -> Iterator[Subject]:
    fitting = subject.tensors
    wrong = [{**fitting, "a_tensor_that_no_model_has": TensorSpec("F32", (2,))}]
    for name, (dtype, shape) in fitting.items():
        wrong += [
            {key: spec for key, spec in fitting.items() if key != name},
            {**fitting, name: TensorSpec(dtype, (*shape, 2))},
            {**fitting, name: TensorSpec("I32" if dtype != "I32" else "F32", shape)},
        ]
    yield from (replace(subject, tensors=tensors) for tensors in wrong)
    for kind in get_args(Kind):
        if kind not in kinds:
            yield replace(subject, kind=kind, tensors={} if kind == "remote" else fitting)


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


class FailingStorage(Storage):
    """Storage that raises ``EIO`` for all reads but the next ``reads``."""

    reads = math.inf

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """Read bytes, or raise ``EIO``."""
        self._fail_in_time()
        return super().pread(fd, count, offset)

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        """Read bytes, or raise ``EIO``."""
        self._fail_in_time()
        return super().pread_into(fd, part, offset)

    def _fail_in_time(self) -> None:
        self.reads -= 1
        if self.reads < 0:
            raise OSError(errno.EIO, "the storage of this check failed")


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
    kind: Kind = "full",
    files: Mapping[str, bytes] | None = None,
    names: Names = "trainer",
    storage: Storage = _STORAGE,
) -> LeasedVersion:
    """Write a version's folder as the daemon would publish it.

    ``folder`` must not exist, but its parent must. A full version with two or more tensors gets two
    files. The version's step is its sequence.
    """
    storage.mkdir(folder)
    listed = list(tensors.items())
    half = len(listed) // 2
    files_of = {
        "model-00001-of-00002.safetensors": listed[:half],
        "model-00002-of-00002.safetensors": listed[half:],
    }
    if kind == "adapter" or not half:
        files_of = {ADAPTER_WEIGHTS if kind == "adapter" else "model.safetensors": listed}
    weights = [
        _write_weights(storage, folder / name, part) for name, part in files_of.items() if part
    ]
    merged = Merged.of(weights, 0)
    small = [write_file(storage, folder, *file) for file in (files or {}).items()]
    manifest = Manifest(
        sequence=sequence,
        step=sequence,
        save_id=f"made-{sequence}-0",
        kind=kind,
        names=names,
        checked="receipt",
        digests="xxh3-128",
        files=(*small, *merged.files),
        tensors=merged.tensors,
        remote="elsewhere" if kind == "remote" else None,
    )
    storage.write_new(folder / MANIFEST, encode(manifest))
    return LeasedVersion(storage, folder, manifest, NoLease())


def _write_weights(
    storage: Storage, path: Path, tensors: Sequence[tuple[str, TensorBytes]]
) -> WrittenFile:
    entries, data = [], b""
    for name, (dtype, shape, content) in tensors:
        entries.append(HeaderEntry(name, dtype, shape, len(data), len(data) + len(content)))
        data += content
    storage.write_new(path, header_bytes(entries) + data)
    with SafetensorsFile.open(storage, path) as file:
        return digest_file(storage, file, cancel=lambda: None)
