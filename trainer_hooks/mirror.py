"""``syncd mirror pull``: the trainer of a job whose saves come from an object store.

A version is fetched into ``.syncd/mirror/`` and checked; then its files become a save with
receipts, like that of a ``WeightStream``: the daemon links whole files and deltas as they came.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import click
import xxhash
from annotated_types import Gt

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.whole_files import Merged, digest_file
from syncd.cli import options
from syncd.cli.mirror import Lines, RateLimit, tell
from syncd.cli.signals import handled_by
from syncd.coordination.leased_version import read_latest
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.daemon.config import Seconds
from syncd.deltas.delta_index import DeltaFolder, DeltaRecord
from syncd.deltas.folding import fold
from syncd.deltas.limits import DeltaError
from syncd.deltas.whole_version import WholeVersion
from syncd.mirror.object_store import MirrorStore, Rate
from syncd.mirror.progress import Progress
from syncd.protocol.errors import (
    CancelledError,
    RecordError,
    SaveFailedError,
    VerificationError,
    VersionGoneError,
)
from syncd.protocol.mirrored import MirroredFile, MirroredSave, MirroredVersion
from syncd.protocol.names import (
    NAME_MAP,
    RECEIPTS,
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
from syncd.storage.errnos import GONE, Ignoring
from syncd.storage.fsio import Draft, Storage
from syncd.storage.job import Job
from trainer_hooks.state.small_files import Files
from trainer_hooks.writing.writer import RankContents, RankWriter

log = logging.getLogger(__name__)

#: The longest pause in seconds after a failure; the first is that between two looks.
_LONGEST: Final = 30.0


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
    """Save each newest version until the mirror is cancelled; call ``told`` after each."""
    last, pause, progress = 0, every, mirrored.progress
    while not mirrored.cancel.is_done:
        try:
            newest = mirrored.store.newest(last)
            if newest is not None:
                save = newest.last
                progress.begins(f"pulling v{save.sequence}")
                mirrored.take(newest)
                last = save.sequence
                took, received = progress.ends()
                log.info(
                    "v%d of %s is saved as step %d after %.3f s; received %d bytes",
                    last,
                    mirrored.store.url,
                    save.step,
                    took,
                    received,
                )
                told(last, save.step)
            elif pause > every:
                progress.report()  # it goes on
        except CancelledError:
            return
        except _PASSING as error:
            progress.failed(error)
            log.warning("%s; trying again in %g s", error, pause)
            mirrored.cancel.pause(pause)
            pause = min(2 * pause, _LONGEST)
        else:
            pause = every
            mirrored.cancel.pause(every)


#: After these the next try may succeed, perhaps with a newer version.
_PASSING: Final = (
    OSError,
    RecordError,
    SaveFailedError,
    DeltaError,
    VerificationError,
    VersionGoneError,
)


@dataclass
class _Fetched:
    """A complete file, which gets its place in a save by a rename; ``index`` is a delta's."""

    storage: Storage
    path: Path
    index: str | None
    told: NonFinite
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
    """Saves the versions of a bucket in a job.

    Args:
        synchronizer: of the trainer that this is.
        run: the run of its saves: the same wherever and whenever the mirror is pulled.
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

    def take(self, version: MirroredVersion) -> bool:
        """Save a version, unless the job has it; return whether it was saved.

        Raises:
            OSError: an object store, or the job's storage failed; e.g. an object is not there.
            SaveFailedError: the save could not be written.
            DeltaError: a delta does not fit what it was made from.
        """
        chain = [_id(version, save) for save in version.saves]
        self.job.storage.make_folder(self._scratch, below=self.job.layout.state)
        told, latest = self._announced(), read_latest(self.job)
        outcome = self.job.outcome(version.last.step)
        if str(chain[-1]) in {told, outcome and outcome.identity}:
            return False
        at = _index(chain, told)
        if version.kind == "adapter":
            self._save_adapter(version, chain[-1])
        elif at is not None and self._takes_deltas(version, chain, at):
            for number in range(at + 1, len(chain)):
                self._save_delta(version, number, chain)
        else:
            self._save_whole(version, chain, latest)
        self.job.storage.remove_tree(self._scratch)
        return True

    def _takes_deltas(self, version: MirroredVersion, chain: Sequence[SaveId], at: int) -> bool:
        steps = [save.step for save in version.saves[at:]]
        ascends = all(low < high for low, high in pairwise(steps))
        return ascends and self.synchronizer.takes_deltas(chain[at])

    def _announced(self) -> str | None:
        """The save that the pointer names."""
        storage, layout = self.job.storage, self.job.layout
        with Ignoring(GONE):
            step = parse_pointer(storage.read(layout.state_pointer))
            if step is not None:
                path = layout.actor(step) / RECEIPTS / receipt_name(0)
                receipt = self.job.read(Receipt, path)
                return receipt.save_id if receipt is not None else None
        return None

    # -- saves -------------------------------------------------------------------------------------

    def _save_adapter(self, version: MirroredVersion, save_id: SaveId) -> None:
        files = self._small((*version.small, *version.last.files))
        self._write(save_id, 1, [RankContents(adapter_files=lambda: files)])

    def _save_delta(self, version: MirroredVersion, number: int, chain: Sequence[SaveId]) -> None:
        save = version.saves[number]
        self._save(
            version,
            save,
            chain[number],
            [self._fetch(file) for file in save.files],
            chain[number - 1],
        )

    def _save_whole(
        self, version: MirroredVersion, chain: Sequence[SaveId], latest: Latest | None
    ) -> None:
        if len(chain) == 1:
            paths = [self._fetch(file) for file in version.last.files]
        else:
            paths = self._folded(version, chain, latest)
        self._save(version, version.last, chain[-1], paths, None)

    def _save(
        self,
        version: MirroredVersion,
        save: MirroredSave,
        save_id: SaveId,
        paths: Sequence[Path],
        base: SaveId | None,
    ) -> None:
        world_size = len(paths)
        small = {**self._small(version.small), NAME_MAP: encode(NameMapRecord())}
        name_of = part_name if base is None else delta_name
        contents = []
        for rank, path in enumerate(paths):
            index = None if base is None else save.files[rank].index
            told = save.nonfinite or NonFinite(count=0)
            contents.append(
                RankContents(
                    whole=_Fetched(self.job.storage, path, index, told),
                    whole_name=name_of(world_size, rank),
                    model_files=lambda: small,
                    base=None if base is None else str(base),
                )
            )
        self._write(save_id, world_size, contents, base)

    def _write(
        self,
        save_id: SaveId,
        world_size: int,
        contents: Sequence[RankContents],
        base: SaveId | None = None,
    ) -> None:
        self.synchronizer.begin_save(save_id.step, save_id, base)
        for rank in reversed(range(world_size)):  # rank 0 announces
            writer = self._writers.setdefault(
                (world_size, rank),
                RankWriter(self.job, rank, world_size, save_timeout=self.save_timeout, pauses=()),
            )
            writer.save(save_id, contents[rank], lambda _: self._tell(save_id.step))

    def _tell(self, step: int) -> None:
        self.synchronizer.set_model_state_dict(None, step)

    # -- files -------------------------------------------------------------------------------------

    def _folded(
        self, version: MirroredVersion, chain: Sequence[SaveId], latest: Latest | None
    ) -> list[Path]:
        """The whole files of a version, from the newest whole version at hand and deltas."""
        storage, scratch = self.job.storage, self._scratch
        with ExitStack() as stack:
            at = None if latest is None else _index(chain, latest.save_id)
            if at is not None and latest is not None:
                held = self.synchronizer.hold(Version.of(latest))
                stack.callback(held.release)
                base = WholeVersion(held.folder, held.manifest)
            else:
                at, base = 0, self._whole(version)
            deltas = []
            for number in range(at + 1, len(chain)):
                files = []
                for file in version.saves[number].files:
                    path = self._fetch(file)
                    files.append(VersionFile(name=path.name, size=file.size, digest=file.index))
                record = DeltaRecord(
                    base=str(chain[number - 1]), target=str(chain[number]), files=tuple(files)
                )
                deltas.append(DeltaFolder(scratch, record))
            folder = scratch / "folded"
            storage.remove_tree(folder)
            storage.make_folder(folder, below=scratch)
            work = Work(cancel=self.cancel.check)
            merged = fold(storage, base, deltas, folder, to=storage, work=work)
        return [folder / file.name for file in merged.files if file.name.endswith(".safetensors")]

    def _whole(self, version: MirroredVersion) -> WholeVersion:
        """The whole version that all deltas lead from."""
        storage, root = self.job.storage, version.saves[0]
        folder = self._scratch / "whole"
        storage.make_folder(folder, below=self._scratch)
        written = []
        for number, file in enumerate(root.files):
            path = folder / part_name(len(root.files), number)
            storage.rename(self._fetch(file), path)
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

    def _small(self, files: Sequence[MirroredFile]) -> Files:
        return {file.name: b"".join(self.store.get(file)) for file in files}

    def _fetch(self, file: MirroredFile) -> Path:
        """A file of the bucket, whole and checked, in the scratch folder."""
        storage, path = self.job.storage, self._scratch / file.key.rpartition("/")[2]
        if storage.exists(path):
            return path  # a rename has given it this name, once it was checked
        with Draft(storage, path) as draft:
            for part in self.store.get(file):
                self.cancel.check()
                self.progress.look()
                draft.write(part)
            draft.commit()
        return path


def _id(version: MirroredVersion, save: MirroredSave) -> SaveId:
    """The id of a save in each job that pulls it: a run of its own, and the number there."""
    run = f"mirror{xxhash.xxh3_64_hexdigest(version.job.encode())}"
    return SaveId(run, save.step, save.sequence)


def _index(chain: Sequence[SaveId], save_id: str | None) -> int | None:
    told = [str(one) for one in chain]
    return told.index(save_id) if save_id in told else None
