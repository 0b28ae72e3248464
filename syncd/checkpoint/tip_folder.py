"""A whole tip: a folder from which hosts and the daemon make the version of a save.

It has links to the trainer's files (``shards/``), the plan to merge them, the version's small
files, and its manifest, in which the weights have no digests yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path

import xxhash

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.file_copy import difference
from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan import Duplicate, MergePlan, PlannedTensor, header_entries
from syncd.checkpoint.merging.plan_file import PlanSource, encode_plan, read_plan
from syncd.checkpoint.merging.source_reader import Source, SourceFile
from syncd.checkpoint.merging.tiling import Run, Tile
from syncd.checkpoint.save import Shards, WholeSave
from syncd.checkpoint.torch_files.shard_file import ShardFile, ZipRecord
from syncd.checkpoint.version import copy_version, read_manifest, write_manifest
from syncd.checkpoint.whole_files import Merged, link_own, written_file
from syncd.protocol.errors import RecordError, ShardFormatError, VerificationError
from syncd.protocol.names import ACTOR, PLAN, SHARDS, TIP
from syncd.protocol.records import Digest, Manifest, Record, Size, encode, parse
from syncd.storage.fsio import Storage


class NoTipError(Exception):
    """Raised when a save has no tip that can be used, so that the save must be merged."""


class TipRecord(Record):
    """``tip.json``: the save that the tip serves, and the bytes and xxh3-128 of its plan."""

    target: str
    plan_size: Size
    plan_digest: Digest


def prepare_tip(
    storage: Storage,
    step: Path,
    save: WholeSave,
    folder: Path,
    *,
    options: MergeOptions,
    work: Work,
    sequence: int,
) -> Manifest:
    """Make an empty folder the whole tip ``sequence``; all files are synced.

    For the other arguments and errors see ``build_step``.

    Raises:
        NoTipError: the save must be merged.
    """
    actor = step / ACTOR
    if not isinstance(save, Shards) or not save.receipts:
        raise NoTipError(f"{actor} holds no shards with receipts")
    if taken := {PLAN, SHARDS, TIP}.intersection(storage.names(actor / save.model_folder)):
        raise NoTipError(f"{actor / save.model_folder} holds {', '.join(taken)}")
    write = partial(_write, save.identity)
    return build_model_folder(
        storage, actor, save, folder, options=options, work=work, sequence=sequence, write=write
    )


def _write(
    target: str,
    storage: Storage,
    plan: MergePlan,
    sources: Sequence[Source],
    folder: Path,
    *,
    work: Work,
    **_: object,
) -> Merged:
    """Link the sources and write the plan, in place of ``run_plan``."""
    shards = [source for source in sources if isinstance(source, ShardFile)]
    if len(shards) < len(sources):
        raise NoTipError("an adapter is small, so it needs no tip")
    storage.mkdir(folder / SHARDS)
    for shard in shards:
        work.cancel()
        to = folder / SHARDS / shard.path.name
        if not shard.has_crc or not link_own(storage, shard.path, shard.signature, to):
            raise NoTipError(f"{shard.path} cannot be linked, is another user's, or has no CRC-32s")
    storage.sync_folder(folder / SHARDS)
    plan = _without_equal_copies(plan, shards)
    try:
        content = encode_plan(
            plan, [PlanSource(shard.path.name, shard.size, shard.records) for shard in shards]
        )
    except ShardFormatError as error:
        raise NoTipError(str(error)) from error
    digest = xxhash.xxh3_128_hexdigest(content)
    record = TipRecord(target=target, plan_size=len(content), plan_digest=digest)
    storage.write_new(folder / PLAN, content)
    storage.write_new(folder / TIP, encode(record))
    written = [
        written_file(name, header, size, header_entries(tensors), None, work.cancel)
        for name, header, size, tensors in plan.files
    ]
    return Merged.of(written, plan.data_size)


def _without_equal_copies(plan: MergePlan, shards: Sequence[ShardFile]) -> MergePlan:
    """The plan without the copies whose records have the CRC-32s of the tensor's own.

    Raises:
        CoverageError: the CRC-32s differ.
    """

    @cache
    def records(source: int) -> Mapping[tuple[int, int], ZipRecord]:
        return {(one.offset, one.size): one for one in shards[source].records.values()}

    def record(part: Tile) -> ZipRecord | None:
        return records(part.source).get(part[1:]) if isinstance(part, Run) else None

    def is_equal(tensor: PlannedTensor, number: int, copy: Duplicate) -> bool:
        at = 0
        for own, other in zip_longest(map(record, tensor.parts), map(record, copy.parts)):
            if own is None or other is None or own.size != other.size:
                return False
            if own.crc32 != other.crc32:
                raise difference(tensor, number, at, shards)
            at += own.size
        return True

    def compared(tensor: PlannedTensor) -> PlannedTensor:
        copies = enumerate(tensor.copies)
        left = [copy for number, copy in copies if not is_equal(tensor, number, copy)]
        return tensor._replace(copies=tuple(left))

    files = [file._replace(tensors=tuple(map(compared, file.tensors))) for file in plan.files]
    return plan._replace(files=tuple(files))


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
