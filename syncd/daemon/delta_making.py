"""Deltas: a save's files of changes get a second name in ``deltas/``, after they are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from syncd.checkpoint.model_folder import has_config_of
from syncd.checkpoint.save import SavedWeights, confirm_unchanged
from syncd.checkpoint.version import link_or_copy, read_manifest
from syncd.daemon.publish import Publisher
from syncd.daemon.tenure import Tenure
from syncd.deltas.delta_check import CHECKING, SMALL, BusyError, check_delta
from syncd.deltas.delta_index import INDEX_LIMIT, DeltaRecord, load_index
from syncd.deltas.delta_plan import PlanBase
from syncd.deltas.limits import DeltaError
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.names import DELTA, HUGGINGFACE, MODEL_CONFIG, delta_folder, delta_name
from syncd.protocol.records import VersionFile, encode
from syncd.storage.fsio import Storage

#: The most bytes of all ranks' indexes.
_MOST: Final = 4 * INDEX_LIMIT


def make_delta(tenure: Tenure, publisher: Publisher, save: SavedWeights, whole: Path) -> int:
    """Make a delta; returns its sequence.

    Its base is a delta, or the save of ``whole``, the folder of LATEST's version or a whole tip.

    Raises:
        DeltaError: the save cannot be taken as a delta.
        SaveNotReadyError, OSError: this can be tried again; for example, the save has changed.
        BusyError: another job's delta is checked first.
        SupersededError: another daemon has taken over.
    """
    job, epoch, sequence = tenure.job, tenure.epoch, publisher.reserve()
    actor, vouched = job.layout.actor(save.step), save.vouched()
    version = WholeVersion(whole, read_manifest(job.storage, whole))
    with epoch.build(delta_folder(sequence)) as folder:  # mkdir building/d000017
        files = []
        for rank in range(len(save.receipts)):
            tenure.cancel()
            file = vouched.get(delta_name(len(save.receipts), rank))
            if file is None:
                raise DeltaError(f"the receipt of rank {rank} lists no delta")
            target = folder / f"rank-{rank}"
            link_or_copy(job.storage, actor / file.name, target, tenure.cancel)
            files.append(VersionFile(name=target.name, size=file.size, digest=file.digest))
        # Read all receipts again by name, so that all files are of this save.
        confirm_unchanged(job.storage, actor, save)
        # Read the indexes, but none of the blocks.
        indexes, size = [], 0
        for made in files:
            index = load_index(job.storage, folder / made.name, made.size, made.digest or "")
            size += len(index.content)
            if size > _MOST:
                raise DeltaError(f"the indexes of its ranks have more than {_MOST} bytes")
            if size > SMALL and CHECKING.locked():
                raise BusyError
            indexes.append(index)
        _check_small_files(job.storage, actor, save, version)
        check_delta(indexes, PlanBase.read(job.storage, version), cancel=tenure.cancel)
        record = DeltaRecord(
            base=save.base or "",
            target=save.identity,
            files=tuple(files),
            nonfinite=save.nonfinite,
        )
        job.storage.write_new(folder / DELTA, encode(record))
        job.storage.sync_folder(folder)
        # First, because a delta whose save has no outcome would count as skipped.
        publisher.outcomes.published(save.step, save.identity, sequence)
        if error := publisher.outcomes.unwritten:
            raise error
        # Rename building/d000017 to deltas/d000017. Fsync deltas/.
        epoch.commit_delta(folder.name)
    return sequence


def _check_small_files(
    storage: Storage, actor: Path, save: SavedWeights, version: WholeVersion
) -> None:
    has = {file.name: (file.size, file.digest) for file in version.manifest.files}
    of_base = {file.name: file for file in save.receipts[0].of_base}
    for path, file in (of_base | save.vouched()).items():
        folder, _, name = path.partition("/")
        if folder != HUGGINGFACE or has.get(name) == (file.size, file.digest):
            continue
        # A config of the base was compared when that was taken.
        if name != MODEL_CONFIG or not (
            path in of_base
            or has_config_of(
                storage,
                version.folder,
                actor / HUGGINGFACE,
                version.manifest,
                is_cast=save.sync_dtype is not None,
            )
        ):
            raise DeltaError(f"{path} differs from that of v{version.manifest.sequence}")
