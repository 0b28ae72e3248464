"""A job directory: its storage, paths and step folders, and the format that all agree on."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from syncd.protocol.errors import (
    JobUnavailableError,
    ProtocolMismatchError,
    RecordError,
    SaveNotReadyError,
)
from syncd.protocol.events import LeftAlone, RecordLost
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    TEMPORARY,
    parse_delta_folder,
    parse_step_folder,
    parse_version_folder,
)
from syncd.protocol.records import (
    DEFAULT_LEASE_TIME,
    Format,
    Quarantine,
    R,
    SaveOutcome,
    SaveOutcomes,
    encode,
    parse,
)
from syncd.protocol.reports import LOADS_KEPT, ExplorerReport, Load
from syncd.storage.errnos import (
    GONE,
    NOT_EMPTY,
    REFUSED_HERE,
    Ignoring,
    again,
    is_gone,
    is_no_record,
    is_unreadable,
    unwritable_storage,
)
from syncd.storage.fsio import (
    LONG_RECORD_LIMIT,
    RECORD_LIMIT,
    Signature,
    Storage,
    signature,
)

log = logging.getLogger(__name__)


def _warn(path: Path, error: Exception) -> None:
    RecordLost(path, error).tell(log)


@dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """The failures of a read that raise no error: by default, a missing file and a damaged record.

    Attributes:
        absent: returns True for an OSError that counts as a missing file, which is not logged.
        damaged: returns True for an OSError that counts as an unreadable record.
        newer: if False, a record of a newer protocol raises; otherwise it counts as unreadable.
        say: logs the path and the error of an unreadable record.
    """

    absent: Callable[[OSError], bool] = is_gone
    damaged: Callable[[OSError], bool] = lambda _: False
    newer: bool = True
    say: Callable[[Path, Exception], None] = _warn


EXPECTED: Final = ReadPolicy()
#: Like :data:`EXPECTED`, but nothing is logged.
SILENT: Final = ReadPolicy(say=lambda *_: None)
#: For reading many files: unreadable files are ignored. Only a failure of the storage is an error.
OF_OTHERS: Final = ReadPolicy(
    absent=lambda error: is_gone(error) or is_unreadable(error),
    say=lambda _, error: log.debug("%s", error),
)
#: For showing people every record that can be read: no failure is an error.
IF_ANY: Final = ReadPolicy(absent=lambda _: True, say=lambda *_: None)


def readable_lines(model: type[R], lines: Iterable[bytes], path: Path) -> Iterator[R]:
    """The records in a file with one record a line. Torn, empty and newer lines are left out."""
    for line in lines:
        try:
            record = parse(model, line, path)
        except RecordError:
            continue
        yield record


def move_away(storage: Storage, path: Path) -> None:
    """Rename a foreign file or folder whose name syncd needs for its own file; delete nothing."""
    away = path.with_name(f"{path.name}.moved-{secrets.token_hex(6)}")
    storage.rename(path, away)
    LeftAlone(away, f"it was {path.name}, but no file of syncd; you may remove it").tell(log)


@dataclass(eq=False)
class Job:
    """A job directory: its storage, as this host has mounted it, and its paths."""

    storage: Storage
    layout: JobLayout

    @classmethod
    def at(cls, root: str | Path, storage: Storage | None = None) -> Self:
        """The job in a folder. The folder is not read, and need not exist."""
        layout = JobLayout(Path(root).absolute())  # messages have commands to copy
        return cls(storage or Storage(layout.root), layout)

    def open(self, *, lease_time: float | None = None) -> Format:
        """Make the missing folders of ``.syncd`` and ``published``, and agree on the format.

        The first process that opens a job fixes its ``lease_time`` (seconds, by default 30). Later
        values are ignored, because all processes of a job must use the same lease time.

        Raises:
            JobUnavailableError: the job directory is missing or cannot be written.
            NoRoomError: the disk is full.
            ProtocolMismatchError: the job is of a newer protocol.
        """
        storage, layout = self.storage, self.layout
        try:
            with registering(layout):
                status = storage.status(layout.root)
                if status is None or not os.path.isdir(layout.root):
                    raise no_folder(layout.root)
                self._check_is_no_part()
                for folder in layout.folders:
                    storage.make_folder(folder, below=layout.root)
                self.check_folders()
                return self._agree(lease_time)
        except OSError as error:
            if not (is_no_record(error) or is_gone(error)):
                raise
            raise JobUnavailableError(
                f"{error}. Another file or folder has a name that syncd needs. Move it away"
            ) from error

    def _check_is_no_part(self) -> None:
        """Refuse a part of another job, for example that job's ``published``."""
        root = self.layout.root
        for outer in map(JobLayout, (root.parent, root.parent.parent)):
            below = root.relative_to(outer.root).parts[:1]
            own = {outer.published.name, outer.deltas.name, outer.state.name}
            if any(name in own or parse_step_folder(name) is not None for name in below) and (
                self.storage.exists(outer.format)
            ):
                raise JobUnavailableError(
                    f"{root} is a part of the job {outer.root}: give {outer.root}"
                )

    def unserved(self) -> JobUnavailableError:
        """The error for a folder that syncd has not served as a job."""
        root = self.layout.root
        if not self.storage.exists(root):
            return no_folder(root)
        self._check_is_no_part()
        return JobUnavailableError(
            f"{root} is not a job that syncd has served: it has no .syncd/format.json. "
            "'syncd run' with this path starts a daemon for this job"
        )

    def is_there(self) -> bool:
        """True if this job is still present. The job must have been opened before.

        If False, do not rely on the job's files, because storage that is not mounted looks empty.
        """
        return self.storage.exists(self.layout.format)

    def check_is_there(self) -> None:
        """Raise JobUnavailableError unless :meth:`is_there`."""
        if not self.is_there():
            raise JobUnavailableError(f"{self.layout.format} is not there: is its storage mounted?")

    def lease_time(self) -> float:
        """The lease time of an existing job, in seconds.

        Raises:
            JobUnavailableError: syncd has never served this job.
            RecordError: the job's format file holds no valid record.
        """
        self.check_folders()
        path = self.layout.format
        try:
            return self.read_format().lease_time
        except OSError as error:
            if is_gone(error):
                raise self.unserved() from error
            raise JobUnavailableError(f"{path} cannot be read: {error}") from error

    def check_folders(self) -> None:
        """Raise JobUnavailableError if one of syncd's folders is replaced by a file or a link."""
        at = self.layout
        for folder in (at.state, at.published, at.epochs, at.leases, at.sessions):
            status = self.storage.status(folder)
            if status is not None and not stat.S_ISDIR(status.st_mode):  # filelock follows links
                raise JobUnavailableError(
                    f"{folder} is a link or a file, and syncd needs a folder there: move it away"
                )

    def _agree(self, lease_time: float | None) -> Format:
        """The format on disk. If it is missing, write it by a hard link, which replaces no file."""
        storage, layout = self.storage, self.layout
        if not storage.exists(layout.format):
            seconds = DEFAULT_LEASE_TIME if lease_time is None else lease_time
            ours = Format(lease_time=seconds, id=secrets.token_hex(16))
            mine = layout.state / f"{TEMPORARY}format-{secrets.token_hex(6)}"
            if not storage.write_first(layout.format, encode(ours), mine):
                storage.sync_folder(layout.state)  # another process was first: its format counts
        return self.read_format()

    def read_format(self) -> Format:
        """The format on disk.

        Raises:
            OSError: the file is missing or cannot be read.
            RecordError: the file holds no valid record.
            ProtocolMismatchError: the record is of a newer protocol.
        """
        path = self.layout.format
        try:
            return parse(Format, self.storage.read(path), path)
        except ProtocolMismatchError:
            raise
        except RecordError as error:
            raise RecordError(
                f"{error}. Copy this file from another job with the same lease time"
            ) from None

    def read(
        self,
        model: type[R],
        path: Path,
        policy: ReadPolicy = EXPECTED,
        *,
        limit: int = RECORD_LIMIT,
        unreadable: R | None = None,
    ) -> R | None:
        """Read a record of at most ``limit`` bytes.

        Returns:
            None if there is no file; ``unreadable`` if the file holds no record.

        Raises:
            OSError: the policy does not ignore this error.
            ProtocolMismatchError: the record is of a newer protocol, and the policy forbids that.
        """
        try:
            return parse(model, self.storage.read(path, limit), path)
        except OSError as error:
            if policy.absent(error):
                return None
            if not policy.damaged(error):
                raise
            policy.say(path, error)
        except RecordError as error:
            if isinstance(error, ProtocolMismatchError) and not policy.newer:
                raise
            policy.say(path, error)
        return unreadable

    def outcome(self, step: int) -> SaveOutcome | None:
        """The recorded outcome of a step's last save; None if there is none yet."""
        saves = self.read(SaveOutcomes, self.layout.saves, limit=LONG_RECORD_LIMIT)
        return saves.steps.get(step) if saves is not None else None

    def refusal(self, step: int, identity: object) -> str:
        """The daemon's reason why it refuses a save, for a message."""
        path = self.layout.quarantined(step, str(identity))
        record = self.read(Quarantine, path, IF_ANY)
        return f"the daemon refuses it, see {path}" if record is None else record.reason

    def daemon_hint(
        self, lives: Callable[[], bool] | None = None, *, is_memory: bool = False
    ) -> str:
        """The end of an error message: why nothing was published, and the remedy.

        ``lives`` tells whether a daemon works there; by default, whether the daemon's lock exists.
        """
        try:
            self.check_is_there()
            is_live = self.storage.exists(self.layout.daemon_lock) if lives is None else lives()
        except JobUnavailableError as error:
            return str(error)
        except OSError as error:
            return f"cannot check whether a daemon is running there: {error}"
        path = shlex.quote(str(self.layout.root))
        if is_live:
            return f"see `syncd status {path}`, which shows what the daemon waits for"
        job = f"JOB --memory-dir {path}" if is_memory else path
        return f"no daemon works there: start `syncd run {job}`"

    def previous_loads(self, name: str) -> tuple[Load, ...]:
        """The newest loads in the report of the previous explorer of this name.

        The new explorer repeats them in case the daemon has not read the previous report yet.
        """
        report = self.read(ExplorerReport, self.layout.explorer(name), IF_ANY)
        return report.loads[-LOADS_KEPT:] if report else ()

    def explorer_reports(
        self, names: Iterable[str], policy: ReadPolicy
    ) -> Iterator[ExplorerReport]:
        """The reports in the files with these ``names``, except temporary files."""
        for name in (name for name in names if not name.startswith(TEMPORARY)):
            report = self.read(ExplorerReport, self.layout.explorers / name, policy)
            if report is not None:
                yield report


class Identity:
    """Tells whether another job has taken the place of a job: at its path, or behind a link to it.

    Nobody can tell while ``format.json`` is missing, cannot be read, or has no ``id``.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._known: str | None = None
        self._seen: Signature | None = None
        self.changed()

    def changed(self) -> tuple[Format, bool] | None:
        """If the file is another one than at the last look: the format, and True for another job.

        A restored job has another file, but is the same job.
        """
        path = self.job.layout.format
        status = self.job.storage.status(path)
        now = status and signature(status)
        if now is None or now == self._seen:
            return None
        found = self.job.read(Format, path, OF_OTHERS)
        self._seen = now
        if found is None:
            return None
        before = self._known
        self._known = found.id or before
        return found, before not in {None, self._known}


def no_folder(path: object) -> JobUnavailableError:
    """The error for a folder that is missing or is no folder."""
    if os.path.exists(str(path)) and not os.path.isdir(str(path)):
        return JobUnavailableError(f"{path} is not a folder: give the folder of a job")
    return JobUnavailableError(f"no such folder: {path}. Create the folder, or mount its storage")


@contextmanager
def registering(layout: JobLayout) -> Iterator[None]:
    """Turn an OSError of read-only or full storage, or of missing rights, into a SyncdError."""
    try:
        yield
    except OSError as error:
        if (unwritable := unwritable_storage(error, layout.root)) is not None:
            raise unwritable from error
        raise


def numbers_in(storage: Storage, folder: Path, parse: Callable[[str], int | None]) -> list[int]:
    """The numbers of the versions, deltas or steps in a folder, lowest first."""
    return sorted(n for name in storage.names(folder) if (n := parse(name)) is not None)


def step_folders(job: Job) -> list[int]:
    """The steps that have a folder, lowest first."""
    return numbers_in(job.storage, job.layout.root, parse_step_folder)


def version_folders(job: Job) -> list[int]:
    """The numbers of the versions that have a folder, lowest first."""
    return numbers_in(job.storage, job.layout.published, parse_version_folder)


def delta_folders(job: Job) -> list[int]:
    """The numbers of the deltas that have a folder, lowest first."""
    return numbers_in(job.storage, job.layout.deltas, parse_delta_folder)


def has_marks(job: Job) -> bool:
    """True if a folder has ``.syncd`` or a pointer file. The folder is not listed."""
    at = job.layout
    return any(map(job.storage.exists, (at.state, at.state_pointer, at.checkpoint_pointer)))


def ask_server(job: Job) -> None:
    """Make the next reads of pointers and step folders ask the server, not this client's cache."""
    # A user who may only read the job sees changes when this client's cache expires.
    with Ignoring(REFUSED_HERE):
        job.storage.refresh(job.layout.root)


def check_on_disk(job: Job, step: int) -> None:
    """Check on the server that a step has a folder, because listings can be late.

    Raises:
        SaveNotReadyError: the step has no folder.
        JobUnavailableError: the job is missing now, for example unmounted.
    """
    ask_server(job)
    if job.storage.exists(job.layout.step(step)):
        return
    job.check_is_there()
    there = ", ".join(map(str, step_folders(job)))
    raise SaveNotReadyError(
        f"step {step} is not on disk; the steps on disk are {there}"
        if there
        else f"step {step} is not on disk; {job.layout.root} has no steps"
    )


def make_step_folder(job: Job, step: int, *, mark: str | None = None) -> None:
    """Make the step's folder, if it is missing, by a rename out of ``drafts/``.

    So nothing is made in the mount point of an unmounted job. ``mark`` names an empty file that the
    folder has from the start. Without it, another process that makes the folder at the same time
    could replace the folder, because it is empty.
    """
    folder = job.layout.step(step)

    def make() -> None:
        draft = job.layout.drafts / f"{TEMPORARY}{folder.name}-{secrets.token_hex(6)}"
        try:
            job.storage.mkdir(draft)
            if mark is not None:
                job.storage.close(job.storage.create(draft / mark))
            job.storage.rename(draft, folder)
        except OSError as error:
            with Ignoring(GONE):
                if mark is not None:
                    job.storage.unlink_if_there(draft / mark)
                job.storage.rmdir(draft)
            if error.errno in NOT_EMPTY:
                return
            raise
        job.storage.sync_folder(folder.parent)

    again(make)  # if this process was paused for long, a daemon may have deleted the draft


def point(job: Job, pointer: Path, step: int) -> None:
    """Write the number of a step into a pointer, by one rename."""
    job.storage.replace(pointer, f"{step}\n".encode(), room=job.layout.drafts)
