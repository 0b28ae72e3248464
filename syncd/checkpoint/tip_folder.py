"""A whole tip: a folder from which hosts and the daemon make the version of a save.

It has links to the trainer's files (``shards/``), the plan to merge them, the version's small
files, and its manifest, in which the weights have no digests yet.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan_file import PlanSource, read_plan
from syncd.checkpoint.merging.source_reader import SourceFile
from syncd.checkpoint.version import copy_version, read_manifest, write_manifest
from syncd.protocol.errors import RecordError, ShardFormatError, VerificationError
from syncd.protocol.names import PLAN, SHARDS, TIP
from syncd.protocol.records import Digest, Manifest, Record, Size, parse
from syncd.storage.fsio import Storage


class NoTipError(Exception):
    """Raised when a save has no tip that can be used, so that the save must be merged."""


class TipRecord(Record):
    """``tip.json``: the save that the tip serves, and the bytes and xxh3-128 of its plan."""

    target: str
    plan_size: Size
    plan_digest: Digest


def read_tip(storage: Storage, tip: Path) -> tuple[TipRecord, Manifest]:
    """The record and the manifest in a tip's folder.

    Raises:
        RecordError: one of them is damaged.
    """
    path = tip / TIP
    return parse(TipRecord, storage.read(path), path), read_manifest(storage, tip)


def make_from_tip(
    storage: Storage, tip: Path, folder: Path, *, to: Storage, work: Work
) -> Manifest:
    """Make the version of a tip, in an empty ``folder`` of ``to``; the manifest is written last.

    On another storage the CRC-32 of each needed record is checked. On the tip's own, blocks are
    shared if possible. All is synced, but for the folder's name.

    Raises:
        NoTipError: a file of the tip is damaged, or of another release.
        CheckpointError: a record does not match its CRC-32, or tensors differ that must be equal.
        SaveNotReadyError: a file became shorter meanwhile.
        OSError: a file is missing, or a storage failed.
    """
    begun = work.clock()
    try:
        record, manifest = read_tip(storage, tip)
        plan, sources = read_plan(storage, tip / PLAN, record.plan_size, record.plan_digest)
        planned = {file.name: len(file.header) + file.data_size for file in plan.files}
        small = [file for file in manifest.files if file.name not in planned]
        listed = {file.name: file.size for file in manifest.files}
        if record.target != manifest.save_id or not planned.items() <= listed.items():
            raise NoTipError(f"the files in {tip} are of several saves. Save again")
        others = manifest.model_copy(update={"files": small, "tensors": ()})
        copy_version(storage, tip, others, to=to, target=folder, cancel=work.cancel)
    except (RecordError, ShardFormatError, VerificationError) as error:
        raise NoTipError(str(error)) from error
    with ExitStack() as stack:
        merged = run_plan(
            storage,
            plan,
            [_opened(storage, tip / SHARDS, source, stack) for source in sources],
            folder,
            options=MergeOptions(digests=manifest.digests != "off"),
            checked="receipt" if to is storage else "crc32",
            work=work,
            to=to,
        )
    manifest = manifest.model_copy(
        update={
            "files": (*merged.files, *small),
            "tensors": merged.tensors,
            "timings": {"build": round(work.clock() - begun, 6)},
        }
    )
    write_manifest(to, tip, folder, manifest)
    return manifest


def _opened(storage: Storage, shards: Path, source: PlanSource, stack: ExitStack) -> SourceFile:
    path = shards / source.name
    fd = stack.enter_context(storage.reading(path))
    if storage.fstat(fd).st_size != source.size:
        raise NoTipError(f"{path} does not have {source.size} bytes any more. Save again")
    return SourceFile(path, fd, bool(source.records), source.records)
