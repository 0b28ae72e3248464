"""Small jobs whose trainer saves deltas, and folds of them without a child process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from syncd.checkpoint.boxes import Box
from syncd.deltas.delta_index import (
    Content,
    DeltaFolder,
    DeltaRecord,
    RawIndex,
    SavedPiece,
    load_index,
)
from syncd.deltas.delta_plan import PlanBase
from syncd.protocol.names import DELTA, RECEIPTS, delta_name, receipt_name
from syncd.protocol.records import (
    NonFinite,
    Receipt,
    ReceiptFile,
    VersionFile,
    encode,
)
from tests.delta_files import written
from tests.deltas import Tensors, write_version
from tests.jobs import SmallJob
from tests.storages import STORAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

Values = Sequence[float]


def write_delta_files(
    folder: Path, old: Tensors | None, new: Tensors, world_size: int, names: Sequence[str]
) -> list[ReceiptFile]:
    """Write the delta files of all ranks, each with uneven rows of the tensors.

    Tensors without rows are replicas on all ranks but the first. ``old`` is None for raw blocks.
    """
    listed = []
    for rank, file in enumerate(names):
        pieces = []
        for tensor, (dtype, values) in new.items():
            rows = values.shape[0] if values.shape else 0
            begin, end = (-(-rows // world_size) * r for r in (rank, rank + 1))
            box = Box((0,) * values.ndim, values.shape)
            if rows:
                box = Box(
                    (begin, *box.offsets[1:]), (max(0, min(end, rows) - begin), *box.shape[1:])
                )
                if not box.size:
                    continue
            part = slice(begin, end) if rows else ...
            before = None if old is None else _bytes(old[tensor][1][part])
            is_replica = not rows and rank > 0
            pieces.append(SavedPiece(tensor, dtype, box, _bytes(values[part]), before, is_replica))
        digest = written(folder / file, pieces)
        size = (folder / file).stat().st_size
        listed.append(ReceiptFile(name=file, size=size, digest=digest, over="index"))
    return listed


def _bytes(values: NDArray[Any]) -> Content:
    content = memoryview(values.tobytes())
    return lambda begin, end: content[begin:end]


def delta_folder(
    folder: Path, base: str, target: str, old: Tensors | None, new: Tensors, world_size: int = 1
) -> DeltaFolder:
    """A delta as the daemon makes it."""
    folder.mkdir()
    names = [f"rank-{rank}" for rank in range(world_size)]
    files = tuple(
        VersionFile(name=one.name, size=one.size, digest=one.digest)
        for one in write_delta_files(folder, old, new, world_size, names)
    )
    delta = DeltaRecord(base=base, target=target, files=files)
    (folder / DELTA).write_bytes(encode(delta))
    return DeltaFolder(folder, delta)


def values_of(step: int) -> Values:
    """The weights that ``SmallJob.save`` saves."""
    return (float(step), 2.0, 3.0)


def save_delta(
    job: SmallJob,
    step: int,
    base: int,
    *,
    world_size: int = 1,
    raw: bool = False,
    point: bool = True,
    run: str = "run",
    nonfinite: NonFinite | None = None,
    shape: int = 3,
) -> str:
    """Save what changed since step ``base``; the counters of the saves are their steps."""
    actor = job.actor(step)
    (actor / RECEIPTS).mkdir(parents=True, exist_ok=True)
    save_id = f"{run}-{step}-{step}"
    old, new = (
        {"weight": ("F32", np.array(values_of(one)[:shape], "<f4").view("<u4"))}
        for one in (base, step)
    )
    names = [delta_name(world_size, rank) for rank in range(world_size)]
    for rank, file in enumerate(
        write_delta_files(actor, None if raw else old, new, world_size, names)
    ):
        record = Receipt(
            save_id=save_id,
            step=step,
            rank=rank,
            world_size=world_size,
            files=(file.model_copy(update={"nonfinite": nonfinite}),),
            base=f"{run}-{base}-{base}",
        )
        job.put_record(actor / RECEIPTS / receipt_name(rank), record)
    if point:
        job.point(step)
    return save_id


def save_full(job: SmallJob, step: int, *, point: bool = True) -> str:
    """A full save."""
    return job.save(step, counter=step, point=point)


def small_delta(folder: Path, columns: int = 3) -> tuple[list[RawIndex], PlanBase]:
    """The indexes of two ranks, and a version with three columns."""
    tensors = {"weight": ("F32", np.ones((4, 3), "<u4"))}
    version = write_version(folder, 1, tensors)
    new = {"weight": ("F32", np.zeros((4, columns), "<u4"))}
    _, record = delta_folder(folder / "delta", "a", "b", None, new, world_size=2)
    indexes = [
        load_index(STORAGE, folder / "delta" / one.name, one.size, one.digest or "")
        for one in record.files
    ]
    return indexes, PlanBase.read(STORAGE, version)
