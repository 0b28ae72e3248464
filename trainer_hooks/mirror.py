"""``syncd mirror pull``: the trainer of a job whose saves come from an object store.

A version is fetched into ``.syncd/mirror/`` and checked; then its files become a save with
receipts, like that of a ``WeightStream``: the daemon links whole files and deltas as they came.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import click
import xxhash
from annotated_types import Gt

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.save import ADAPTER
from syncd.checkpoint.version import WEIGHTS
from syncd.checkpoint.whole_files import Merged, digest_file
from syncd.cli import options
from syncd.cli.mirror import Lines, RateLimit, tell
from syncd.cli.signals import handled_by
from syncd.coordination.leased_version import read_latest
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.daemon.config import Seconds
from syncd.deltas.delta_index import DeltaFolder, DeltaRecord
from syncd.deltas.limits import DeltaError
from syncd.deltas.whole_version import WholeVersion
from syncd.mirror.object_store import MirrorStore, Rate
from syncd.mirror.progress import Progress
from syncd.protocol.errors import (
    CancelledError,
    InvalidSettingsError,
    SaveNotReadyError,
    SyncdError,
    VerificationError,
)
from syncd.protocol.mirrored import MirroredFile, MirroredSave, MirroredVersion
from syncd.protocol.names import (
    NAME_MAP,
    RECEIPTS,
    SAVING,
    delta_name,
    parse_pointer,
    part_name,
    receipt_name,
)
from syncd.protocol.policy import RunningStatus, SyncSettings, Version
from syncd.protocol.records import (
    Latest,
    Manifest,
    NonFinite,
    Receipt,
    ReceiptFile,
    SaveId,
    VersionFile,
    encode,
)
from syncd.protocol.tensor_names import NameMapRecord
from syncd.storage.calls import FileKind
from syncd.storage.errnos import GONE, Ignoring
from syncd.storage.fsio import Draft, Storage
from syncd.storage.job import Job, step_folders
from trainer_hooks.writing.writer import RankContents, RankWriter

log = logging.getLogger(__name__)

#: The longest pause in seconds after a failure; the first is that between two looks.
_LONGEST: Final = 30.0
#: Seconds for which a daemon may be busy before this is a fault.
_PATIENCE: Final = 60.0
#: The beginning of the run of all saves.
_RUN: Final = "mirror"


@options.as_command("mirror pull s3://bucket/qwen-grpo /shared/jobs/qwen-far", group=click.Group())
def command(
    url: str,
    job: options.Existing,
    *,
    every: Annotated[Seconds, Gt(0), "How long to wait between two looks for a version."] = 2.0,
    rate: RateLimit = None,
    as_json: Lines = False,
) -> None:
    """Save each newest version at URL in JOB, as the trainer of this job.

    For URL and the credentials see 'syncd mirror push --help'. JOB needs a daemon of its own.
    """
    stopped = Cancellation()
    store = MirrorStore(url, rate=Rate(rate), check=stopped.check)
    settings = SyncSettings(deltas=True)
    with (
        handled_by(lambda *_: stopped.cancel(), (signal.SIGTERM, signal.SIGINT)),
        TrainerSynchronizer(job, "mirror", settings=settings) as synchronizer,
    ):
        synchronizer.set_trainer_status(RunningStatus.RUNNING)
        mirrored = Mirrored(Job.at(job), store, synchronizer, settings.save_timeout, stopped)
        mirrored.progress.report()
        follow(mirrored, every, tell if as_json else lambda *_: None)


def follow(mirrored: Mirrored, every: float, told: Callable[[int, int], object]) -> None:
    """Save each newest version until the mirror is cancelled; call ``told`` after each.

    Raises:
        InvalidSettingsError: this is not the job's trainer any more.
    """
    progress, cancel = mirrored.progress, mirrored.cancel
    newest: MirroredVersion | None = None
    saved, wait = 0, 0.0
    while not cancel.pause(wait):
        try:
            newest = mirrored.store.newest(newest.last.sequence if newest else 0) or newest
            if newest is None or mirrored.has(newest):
                mirrored.answer()
                if progress.fault:
                    progress.report()
            elif mirrored.may_save():
                save = newest.last
                progress.begins(f"fetching v{save.sequence}, step {save.step}")
                mirrored.take(newest)
                progress.ends(
                    f"v{save.sequence} of {mirrored.store.url} is saved, step {save.step}"
                )
                if saved != save.sequence:
                    told(save.sequence, save.step)
                saved = save.sequence
            wait = every
        except (CancelledError, InvalidSettingsError):
            if cancel.is_done:
                return
            raise
        except (OSError, SyncdError, DeltaError) as error:
            progress.failed(error)
            wait = min(max(2 * wait, every), _LONGEST)
            log.warning("%s; trying again in %g s", error, wait)


@dataclass
class _Fetched:
    """A complete file, which gets its place in a save by a rename; ``index`` is a delta's."""

    storage: Storage
    path: Path
    index: str | None
    told: NonFinite | None
    nbytes: int = 0

    def write(self, draft: Draft) -> ReceiptFile:
        """Make the draft this file; return its receipt entry."""
        size, digest = 0, self.index
        if digest is None:
            with SafetensorsFile.open(self.storage, self.path) as file:
                size, digest = file.size, file.header_digest
        else:
            with self.storage.reading(self.path) as fd:
                size = self.storage.fstat(fd).st_size
        self.storage.rename(self.path, draft.temporary)
        draft.commit()
        return ReceiptFile(
            name=draft.path.name,
            size=size,
            digest=digest,
            over="header" if self.index is None else "index",
            nonfinite=self.told,
        )


@dataclass
class Mirrored:
    """Saves the versions of a mirror in a job, as its trainer.

    Args:
        save_timeout: as in ``SyncSettings``.
    """

    job: Job
    store: MirrorStore
    synchronizer: TrainerSynchronizer
    save_timeout: float
    cancel: Cancellation = field(default_factory=Cancellation)

    def __post_init__(self) -> None:
        self.progress = Progress(self.store, self.synchronizer.tell_mirror)
        self._scratch = self.job.layout.mirror
        self._writers: dict[tuple[int, int], RankWriter] = {}
        self._small: dict[str, bytes] = {}  # by the names of their objects
        self._waits_since: float | None = None
        for step in step_folders(self.job):
            self._end_save(step)

    def _end_save(self, step: int) -> None:
        """If a kill left an unfinished save of a mirror, remove it: its step may never come again.

        Only the daemon's outcomes let it prune a step, and this one has none.
        """
        storage, folder = self.job.storage, self.job.layout.step(step)
        receipts = self.job.layout.actor(step) / RECEIPTS
        if not storage.exists(folder / SAVING):
            return
        found = [self.job.read(Receipt, receipts / name) for name in storage.names(receipts)]
        if any(one is not None and one.save_id.startswith(_RUN) for one in found):
            if self._named()[0] == step:
                storage.unlink_if_there(folder / SAVING)
            else:
                storage.remove_tree(folder)

    def has(self, version: MirroredVersion) -> bool:
        """True if the job has a version, or will have it, or refuses it."""
        save_id, outcome = str(_id(version, version.last)), self.job.outcome(version.last.step)
        latest = read_latest(self.job)
        if latest is not None and save_id in {latest.save_id, latest.tip and latest.tip.save_id}:
            return True
        if outcome is not None and outcome.identity == save_id:
            return outcome.outcome != "skipped"  # a delta that was not taken
        return self._named()[1] == save_id

    def may_save(self) -> bool:
        """True unless the daemon still has to take the last save: only the newest one counts.

        Raises:
            SaveNotReadyError: it has not done so for long.
        """
        step, save_id = self._named()
        outcome = None if step is None else self.job.outcome(step)
        latest = read_latest(self.job)
        known = {outcome and outcome.identity, latest and latest.save_id}
        if save_id is None or not save_id.startswith(_RUN) or save_id in known:
            self._waits_since = None
            return True
        now = time.monotonic()
        self._waits_since = since = self._waits_since or now
        if now - since > _PATIENCE:
            raise SaveNotReadyError(
                f"step {step} is saved, but not served yet, so nothing newer is fetched; "
                f"{self.job.daemon_hint()}"
            )
        return False

    def answer(self) -> None:
        """Tell explorers that ask for a sync that there is nothing newer."""
        if self.synchronizer.explorer_requires_sync():
            self.synchronizer.notify_no_new_model_state_dict()

    def take(self, version: MirroredVersion) -> None:
        """Save a version.

        Raises:
            OSError: the object store or the job's storage failed; e.g. an object is not there.
            SaveFailedError: the save could not be written.
            DeltaError: a delta does not fit what it was made from.
            NameTakenError: another trainer works in this job.
        """
        ids = [_id(version, save) for save in version.saves]
        self._tidy(version)
        at = _index(ids, self._named()[1])
        if at is not None and at + 1 < len(ids) and self._takes_deltas(ids[at:]):
            for number in range(at + 1, len(ids)):
                self._save(version, number, self._fetch(version.saves[number]), ids[number - 1])
        else:
            paths = self._whole(version, ids, read_latest(self.job))
            self._save(version, len(ids) - 1, paths, None)
        self.job.storage.remove_tree(self._scratch)

    def _tidy(self, version: MirroredVersion) -> None:
        """Make the scratch folder, and remove what is of no use for a version: it takes room."""
        storage = self.job.storage
        storage.make_folder(self._scratch, below=self.job.layout.state)
        of_use = {name for save in version.saves for name in _names(save)}
        for name, kind in storage.kinds(self._scratch).items():
            if kind is FileKind.FOLDER:
                storage.remove_tree(self._scratch / name)
            elif name not in of_use:
                storage.unlink_if_there(self._scratch / name)

    def _takes_deltas(self, ids: Sequence[SaveId]) -> bool:
        ascends = all(low.step < high.step for low, high in pairwise(ids))
        return ascends and self.synchronizer.takes_deltas(ids[0])

    def _named(self) -> tuple[int | None, str | None]:
        """The step that the pointer names, and its save."""
        storage, layout = self.job.storage, self.job.layout
        step = receipt = None
        with Ignoring(GONE):
            step = parse_pointer(storage.read(layout.state_pointer))
            if step is not None:
                path = layout.actor(step) / RECEIPTS / receipt_name(0)
                receipt = self.job.read(Receipt, path)
        return step, None if receipt is None else receipt.save_id

    # -- saves -------------------------------------------------------------------------------------

    def _save(
        self, version: MirroredVersion, number: int, paths: Sequence[Path], base: SaveId | None
    ) -> None:
        """Make a save of fetched files: a delta, if it has a base, or a whole one."""
        save, small = version.saves[number], self._read(version.small)
        is_adapter, world_size = version.kind == "adapter", len(paths)
        name_of = delta_name if base else part_name
        contents = []
        for rank, path in enumerate(paths):
            # All ranks' are combined, so one tells of all.
            told = save.nonfinite and (NonFinite(count=0) if rank else save.nonfinite)
            index = save.files[rank].index if base else None
            contents.append(
                RankContents(
                    whole=_Fetched(self.job.storage, path, index, told),
                    whole_name=ADAPTER if is_adapter else name_of(world_size, rank),
                    adapter_files=lambda: small if is_adapter else {},
                    # The names are the hub's, or there is a map.
                    model_files=lambda: (
                        {} if is_adapter else {NAME_MAP: encode(NameMapRecord()), **small}
                    ),
                    base=str(base) if base else None,
                )
            )
        self._write(_id(version, save), contents, base)

    def _write(
        self, save_id: SaveId, contents: Sequence[RankContents], base: SaveId | None
    ) -> None:
        step, world_size = save_id.step, len(contents)
        begin = partial(self.synchronizer.begin_save, step, save_id, base)
        begin()
        for rank in reversed(range(world_size)):  # rank 0 announces
            if (world_size, rank) not in self._writers:
                timeout = self.save_timeout
                writer = RankWriter(self.job, rank, world_size, save_timeout=timeout, pauses=())
                self._writers[world_size, rank] = writer
            # Checks once more whether this is the job's trainer: it may have been paused.
            self._writers[world_size, rank].save(
                save_id,
                contents[rank]._replace(confirm=begin),
                lambda _: self.synchronizer.set_model_state_dict(None, step),
            )

    # -- files -------------------------------------------------------------------------------------

    def _whole(
        self, version: MirroredVersion, ids: Sequence[SaveId], latest: Latest | None
    ) -> list[Path]:
        """The whole files of a version, from a whole version and the deltas after it."""
        at = _index(ids[:-1], latest.save_id if latest else None)
        if len(ids) == 1:
            return self._fetch(version.last)
        if at is not None and latest is not None:
            held = self.synchronizer.hold(Version.of(latest))
            try:
                if held.manifest.names == "trainer":
                    return self._folded(version, ids, at, WholeVersion(held.folder, held.manifest))
            except (DeltaError, VerificationError) as error:
                log.info("v%d is no base, perhaps by a cast: %s", held.sequence, error)
            finally:
                held.release()
        return self._folded(version, ids, 0, self._root(version))

    def _folded(
        self, version: MirroredVersion, ids: Sequence[SaveId], at: int, base: WholeVersion
    ) -> list[Path]:
        from syncd.deltas.folding import fold  # noqa: PLC0415 - it imports NumPy

        storage, folder, deltas = self.job.storage, self._scratch / "folded", []
        for number in range(at + 1, len(ids)):
            save = version.saves[number]
            files = tuple(
                VersionFile(name=path.name, size=file.size, digest=file.index)
                for path, file in zip(self._fetch(save), save.files, strict=True)
            )
            record = DeltaRecord(base=str(ids[number - 1]), target=str(ids[number]), files=files)
            deltas.append(DeltaFolder(self._scratch, record))
        storage.remove_tree(folder)
        storage.make_folder(folder, below=self._scratch)
        work = Work(cancel=self.cancel.check)
        merged = fold(storage, base, deltas, folder, to=storage, work=work)
        return [folder / file.name for file in merged.files if file.name.endswith(WEIGHTS)]

    def _root(self, version: MirroredVersion) -> WholeVersion:
        """The whole version that all deltas lead from."""
        storage, root = self.job.storage, version.saves[0]
        folder = self._scratch / "root"
        storage.make_folder(folder, below=self._scratch)
        written = []
        for number, fetched in enumerate(self._fetch(root)):
            path = folder / part_name(len(root.files), number)
            storage.rename(fetched, path)
            with SafetensorsFile.open(storage, path) as opened:
                written.append(digest_file(storage, opened, cancel=self.cancel.check))
        merged = Merged.of(written, 0)
        manifest = Manifest(
            sequence=root.sequence,
            step=root.step,
            save_id=root.save_id,
            checked="receipt",
            digests="xxh3-128",
            files=merged.files,
            tensors=merged.tensors,
        )
        return WholeVersion(folder, manifest)

    def _read(self, files: Sequence[MirroredFile]) -> dict[str, bytes]:
        """The content of small files; the last ones are not fetched again."""
        self._small = {
            file.key: self._small.get(file.key) or b"".join(self.store.get(file)) for file in files
        }
        return {file.name: self._small[file.key] for file in files}

    def _fetch(self, save: MirroredSave) -> list[Path]:
        """The files of a save, whole and checked, in the scratch folder."""
        storage, paths = self.job.storage, [self._scratch / name for name in _names(save)]
        for path, file in zip(paths, save.files, strict=True):
            if storage.exists(path):
                continue  # a rename gave it this name, once it was checked
            with Draft(storage, path) as draft:
                for part in self.store.get(file):
                    self.progress.look()
                    draft.write(part)
                draft.commit()
        return paths


def _id(version: MirroredVersion, save: MirroredSave) -> SaveId:
    """The id of a save, the same wherever and whenever it is pulled."""
    run = f"{_RUN}{xxhash.xxh3_64_hexdigest(version.job.encode())}"
    return SaveId(run, save.step, save.sequence)


def _names(save: MirroredSave) -> list[str]:
    """The names of a save's files in the scratch folder; two files can be equal."""
    return [f"{save.sequence}-{number}-{file.digest}" for number, file in enumerate(save.files)]


def _index(ids: Sequence[SaveId], save_id: str | None) -> int | None:
    return next((at for at, one in enumerate(ids) if str(one) == save_id), None)
