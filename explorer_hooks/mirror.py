"""``syncd mirror push``: an explorer that copies each newest version of a job to an object store.

It pushes while it checks a version, before a turn to load, so that no engine waits for it.
"""

from __future__ import annotations

import errno
import logging
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Annotated, Final, TypeVar

import click
import xxhash
from annotated_types import Ge, Gt

from explorer_hooks.bench import serve
from explorer_hooks.engines.base import InProcessEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.staging import Staging
from syncd.checkpoint.boxes import whole
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.checkpoint.version import WEIGHTS
from syncd.cli import options
from syncd.cli.mirror import Lines, RateLimit, tell
from syncd.cli.signals import handled_by
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.daemon.config import Count, Seconds
from syncd.deltas.delta_index import Content, SavedPiece
from syncd.mirror.object_store import MirrorStore, Rate, StoreError
from syncd.mirror.progress import Progress
from syncd.protocol.errors import (
    CancelledError,
    EngineMismatchError,
    InvalidSettingsError,
    SyncdError,
    VerificationError,
    VersionGoneError,
)
from syncd.protocol.mirrored import MirroredFile, MirroredSave, MirroredVersion
from syncd.protocol.names import NAME_MAP
from syncd.protocol.policy import Version
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

_CHUNK: Final = 1024 * 1024
_INDEX: Final = ".safetensors.index.json"
#: Seconds until the next try at the start.
_AGAIN: Final = 10.0
#: How often in a min_age old versions are removed.
_SWEEPS: Final = 8


@options.as_command(
    "mirror push /shared/jobs/qwen-grpo s3://bucket/qwen-grpo --stage /nvme/stage",
    group=click.Group(),
)
def command(
    job: options.Existing,
    url: str,
    *,
    name: Annotated[str, "The name of this explorer, unique in the job."] = "mirror",
    stage: Annotated[
        Path | None, "A folder of this host for copies: then saves need no version first."
    ] = None,
    keep: Annotated[Count, Ge(1), "How many of the newest versions to keep there."] = 3,
    min_age: Annotated[
        Seconds,
        Gt(0),
        "How long older versions stay there; no version may take half as long to push.",
    ] = 7200.0,
    rate: RateLimit = None,
    as_json: Lines = False,
) -> None:
    """Copy each newest version of JOB to URL, as an explorer of its own.

    URL is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER. The
    credentials are those of the environment, e.g. AWS_ACCESS_KEY_ID or a role.
    """
    stopped = Cancellation()
    store = MirrorStore(url, rate=Rate(rate), check=stopped.check)
    staging = Staging(stage) if stage is not None else None
    mirror = Mirror(Job.at(job), store, keep, timedelta(seconds=min_age), stage, stopped)
    cancels = [stopped.cancel]

    def end(*_: object) -> None:
        for cancel in cancels:
            cancel()

    with (
        handled_by(end, (signal.SIGTERM, signal.SIGINT)),
        ExplorerHook(job, name, mirror, staging=staging) as hook,
    ):
        cancels.append(hook.cancel)
        if stopped.is_done:  # by a signal before
            return
        mirror.opened(hook.synchronizer)
        serve(hook, lambda version: tell(version.sequence, version.step) if as_json else None)


_Part = TypeVar("_Part", bytes, memoryview)


@dataclass
class Mirror(InProcessEngine):
    """Copies versions into a mirror: whole, or as what changed since the version before.

    Args:
        keep: how many of the newest versions to keep.
        min_age: older versions, and objects that nothing needs, stay for as long.
        scratch: a folder of this host for deltas, until they are sent.
    """

    kinds = frozenset({"full", "adapter"})
    hub_names = True

    job: Job
    store: MirrorStore
    keep: int
    min_age: timedelta
    scratch: Path | None
    cancel: Cancellation = field(default_factory=Cancellation)
    wall: Clock = time.time

    def __post_init__(self) -> None:
        self.progress = Progress(self.store)
        #: The version that was pushed last: the hook holds it until it has loaded the next one.
        self._held: LeasedVersion | None = None
        self._first: LeasedVersion | None = None  # what this object holds itself
        self._newest: MirroredVersion | None = None
        self._is_whole = True  # the newest version there
        self._job = ""
        self._sweep_at = 0.0

    def attach(self) -> None:
        """Check the object store, once it answers.

        Raises:
            InvalidSettingsError: it has no conditional writes.
        """
        while True:
            try:
                self.store.check_conditions()
            except StoreError as error:
                log.warning("%s; trying again in %g s", error, _AGAIN)
                if not self.cancel.pause(_AGAIN):
                    continue
            return

    def opened(self, synchronizer: ExplorerSynchronizer) -> None:
        """Report by this synchronizer; if the job still has the newest version there, hold it.

        Raises:
            InvalidSettingsError: the mirror has versions of another job.
        """
        self.progress.tell = synchronizer.tell_mirror
        self.progress.report()
        try:
            if (newest := self._look()) is not None:
                last = newest.last
                self._first = synchronizer.hold(Version(last.sequence, last.step))
                self._first.verify(cancel=self.cancel.check)
                self._held = self._first
        except (VersionGoneError, VerificationError, OSError) as error:
            log.info("the next version is sent whole: %s", error)

    def is_away(self) -> bool:
        """True while the object store, or the job, does not answer as it should."""
        try:
            self._look()
        except (OSError, SyncdError) as error:
            self.progress.failed(error)
            return True
        return False

    def check(self, version: LeasedVersion) -> None:
        """Push a version, unless the mirror has it.

        Raises:
            EngineMismatchError: the version cannot be mirrored.
            OSError: the object store or the job's storage failed. The next try may succeed.
        """
        self.progress.begins(f"sending v{version.sequence}, step {version.step}")
        try:
            self._check(version)
        except (CancelledError, EngineMismatchError):
            raise
        except (OSError, SyncdError) as error:
            self.progress.failed(error)
            if isinstance(error, OSError):
                raise
            raise StoreError(str(error)) from error  # it is not the version's fault
        self.progress.ends(f"{self.store.url} has v{version.sequence}, step {version.step}")
        if self.wall() >= self._sweep_at:
            self._sweep_at = self.wall() + self.min_age.total_seconds() / _SWEEPS
            try:
                self.store.sweep(keep=self.keep, min_age=self.min_age)
                self._is_whole = self._newest is None or self.store.is_whole(self._newest)
            except (OSError, SyncdError) as error:
                log.warning("old versions were not removed: %s", error)

    def load(self, version: LeasedVersion) -> None:
        """Remember the version, from which the next one may be a delta."""
        self._held = version
        self.close()

    def close(self) -> None:
        """Release what this object holds itself."""
        if self._first is not None:
            self._first.release()
            self._first = None

    def _check(self, version: LeasedVersion) -> None:
        if version.manifest.digests == "off":
            raise EngineMismatchError(
                "it has no digests, which a mirror needs: run the daemon without --digest off"
            )
        newest = self._look()
        if newest is not None and newest.last.sequence >= version.sequence:
            last = newest.last
            if (last.sequence, last.save_id) == (version.sequence, version.manifest.save_id):
                return
            raise StoreError(
                f"{self.store.url} has v{last.sequence} already, but here the newest version is "
                f"v{version.sequence}. If this job is an older copy of that one, push it elsewhere"
            )
        pushed = self._push(version, newest if self._is_whole else None)
        if not self.store.add(pushed) and self.store.version(version.sequence) != pushed:
            raise StoreError(f"another pusher has just added v{version.sequence}")
        self._newest, self._is_whole = pushed, True

    def _look(self) -> MirroredVersion | None:
        """The newest version there."""
        self._job = self.job.open().id or ""
        known = self._newest.last.sequence if self._newest is not None else 0
        if (newer := self.store.newest(known)) is not None:
            self._newest, self._is_whole = newer, self.store.is_whole(newer)
        if self._newest is not None and self._newest.job != self._job:
            raise InvalidSettingsError(
                f"{self.store.url} has versions of another job: give each job its own prefix"
            )
        return self._newest

    def _push(self, version: LeasedVersion, newest: MirroredVersion | None) -> MirroredVersion:
        manifest, begun = version.manifest, self.wall()
        weights, others = _divided(version)
        small = tuple(self._file(version, name) for name in others)
        known = {file.key for file in newest.files()} if newest is not None else set[str]()
        # What the newest version needs stays for min_age, whatever comes.
        new = [file for file in small if file.key not in known]
        saves: tuple[MirroredSave, ...] = ()
        with ExitStack() as stack:
            spooled = None
            if newest is not None and newest.small == small and self._is_base(version, newest):
                spooled = self._delta(version, weights, newest.room(), stack)
            if newest is not None and spooled is not None:
                delta, spool = spooled
                saves, files = newest.saves, [delta]
                self.store.put(delta, self._watched(spool.read()))
            else:
                files = [self._file(version, name) for name in weights]
                new += [file for file in files if file.key not in known]
        uses_old, now = bool(known), self.store.now() if new else None
        for file in new:
            if now is not None and self.store.has(file, self.min_age, now):
                uses_old = True
            else:
                self.store.put(file, self._watched(_read(version, file.name)))
        if uses_old and self.wall() - begun > self.min_age.total_seconds() / 2:
            raise StoreError(
                f"v{version.sequence} took longer than half of --min-age to push, so the objects "
                "that were there before may be gone: increase --min-age"
            )
        save = MirroredSave(
            sequence=version.sequence,
            step=version.step,
            save_id=manifest.save_id,
            files=tuple(files),
            nonfinite=manifest.nonfinite,
        )
        return MirroredVersion(job=self._job, kind=manifest.kind, saves=(*saves, save), small=small)

    def _watched(self, content: Iterator[_Part]) -> Iterator[_Part]:
        for part in content:
            self.progress.look()
            yield part

    def _is_base(self, version: LeasedVersion, newest: MirroredVersion) -> bool:
        """True if the newest version is at hand, and has the tensors of this one."""
        held = self._held
        if held is None or newest.room() == 0 or version.kind != "full":
            return False
        was, now = held.manifest, version.manifest
        of_both = [
            [(tensor.name, tensor.dtype, tensor.shape, tensor.file) for tensor in each.tensors]
            for each in (was, now)
        ]
        last = newest.last
        is_held = (was.sequence, was.save_id) == (last.sequence, last.save_id)
        return is_held and of_both[0] == of_both[1]

    def _delta(
        self, version: LeasedVersion, weights: Sequence[str], room: int, stack: ExitStack
    ) -> tuple[MirroredFile, _Spool] | None:
        """The file of a delta; None if it is not worth it."""
        from syncd.deltas.delta_file import write_delta  # noqa: PLC0415 - it imports NumPy

        held, check = self._held, self.cancel.check
        assert held is not None  # noqa: S101 - it is the base

        def pieces() -> Iterator[SavedPiece]:
            for name in weights:
                old, new = (stack.enter_context(each.open_file(name)) for each in (held, version))
                before = {entry.name: entry for entry in old.entries}
                for entry in new.entries:
                    was, now = _content(old, before[entry.name], check), _content(new, entry, check)
                    yield SavedPiece(entry.name, entry.dtype, whole(entry.shape), now, was)

        spool = _Spool(stack.enter_context(self._temporary()), room)
        try:
            index = write_delta(spool.write, pieces())
            spool.file.flush()
        except OSError as error:
            if error.errno not in {errno.EFBIG, *NO_ROOM}:
                raise
            return None
        digest = spool.hasher.hexdigest()
        return MirroredFile(name="delta", size=spool.size, digest=digest, index=index), spool

    def _temporary(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self.scratch)

    def _file(self, version: LeasedVersion, name: str) -> MirroredFile:
        hasher, size = xxhash.xxh3_128(), 0
        for part in _read(version, name):
            self.cancel.check()
            hasher.update(part)
            size += len(part)
        return MirroredFile(name=name, size=size, digest=hasher.hexdigest())


@dataclass
class _Spool:
    """A temporary file for at most ``room`` bytes, whose digest is computed as it grows."""

    file: IO[bytes]
    room: int
    size: int = 0
    hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.size += len(data)
        if self.size > self.room:
            raise OSError(errno.EFBIG, "a whole version is worth more than such a delta")
        self.hasher.update(data)
        self.file.write(data)

    def read(self) -> Iterator[bytes]:
        """The bytes, in chunks."""
        self.file.seek(0)
        while part := self.file.read(_CHUNK):
            yield part


def _divided(version: LeasedVersion) -> tuple[list[str], list[str]]:
    """The names of the files of weights, in their order, and of the others, but for the index.

    A map of names goes along only if the weights have the trainer's names.
    """
    names = sorted(file.name for file in version.manifest.files)
    if version.manifest.names == "hub":
        names = [name for name in names if name != NAME_MAP]
    weights = [name for name in names if name.endswith(WEIGHTS)]
    others = [name for name in names if not name.endswith((WEIGHTS, _INDEX))]
    return weights, others


def _read(version: LeasedVersion, name: str) -> Iterator[memoryview]:
    storage, path = version.storage, version.folder / name
    with storage.reading(path) as fd:
        at, size = 0, storage.fstat(fd).st_size
        while at < size:
            part = _exactly(storage, fd, min(_CHUNK, size - at), at, path)
            yield part
            at += len(part)


def _exactly(storage: Storage, fd: int, count: int, offset: int, path: Path) -> memoryview:
    part = memoryview(bytearray(count))
    if storage.pread_fully(fd, part, offset) < count:
        raise VerificationError(f"{path} became shorter while it was read")
    return part


def _content(file: SafetensorsFile, entry: HeaderEntry, check: Check) -> Content:
    def read(begin: int, end: int) -> memoryview:
        check()
        return _exactly(file.storage, file.fd, end - begin, entry.begin + begin, file.path)

    return read
