"""Preparing a whole tip: a save's files are linked, checked and planned, but not copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path

import xxhash

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.file_copy import difference
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan import Duplicate, MergePlan, PlannedTensor, header_entries
from syncd.checkpoint.merging.plan_file import PlanSource, encode_plan
from syncd.checkpoint.merging.source_reader import Source
from syncd.checkpoint.merging.tiling import Run, Tile
from syncd.checkpoint.save import Shards, WholeSave
from syncd.checkpoint.tip_folder import NoTipError, TipRecord
from syncd.checkpoint.torch_files.shard_file import ShardFile, ZipRecord
from syncd.checkpoint.whole_files import Merged, link_own, written_file
from syncd.protocol.errors import ShardFormatError
from syncd.protocol.names import ACTOR, PLAN, SHARDS, TIP
from syncd.protocol.records import Manifest, encode
from syncd.storage.fsio import Storage


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
    casts = options.cast not in {None, save.sync_dtype}
    if not isinstance(save, Shards) or not save.receipts or casts:
        raise NoTipError(f"{actor} holds no shards with receipts, or they are to be cast")
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
