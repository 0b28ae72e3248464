"""The places of deltas' pieces in a version, and the proof that they make all its tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from syncd.checkpoint.merging.plan import PlannedTensor, plan_merge
from syncd.checkpoint.merging.tiling import Run
from syncd.checkpoint.model_folder import read_model_config, says_tied
from syncd.checkpoint.name_map import NAME_MAP_LIMIT, NameMap
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.placement import Chunks, Local, Position, Shape
from syncd.checkpoint.tensor_rules import ITEMSIZE, is_output_embedding, shown
from syncd.deltas.delta_index import DeltaPiece
from syncd.deltas.limits import DeltaError
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import CheckpointError, RecordError
from syncd.protocol.names import NAME_MAP
from syncd.protocol.records import Manifest
from syncd.storage.fsio import Storage

#: The same in each delta of a run: the tensor's name, and the box.
PieceKey = tuple[str, Shape, Shape]


class Place(NamedTuple):
    """The bytes of a piece from ``begin`` on, and their offset in a tensor of the version."""

    begin: int
    length: int
    tensor: str
    offset: int


#: The places of all bytes of each piece, in order, except pieces of tensors that the version leaves
#: out. If all pieces are written in this order, so are the bytes of each tensor.
DeltaPlan = dict[PieceKey, list[Place]]


def key_of(piece: DeltaPiece) -> PieceKey:
    """The key of a piece."""
    return piece.name, *piece.box


class PlanBase(NamedTuple):
    """A version, its name map (if its names are the hub's), and whether its config says ties."""

    folder: Path
    manifest: Manifest
    names: bytes
    tied: bool

    @classmethod
    def read(cls, storage: Storage, version: WholeVersion) -> PlanBase:
        """Read what the plan needs of a version's folder; raises OSError."""
        folder, manifest = version.folder, version.manifest
        is_hub = manifest.names == "hub"
        names = storage.read(folder / NAME_MAP, NAME_MAP_LIMIT) if is_hub else b""
        tied = says_tied(read_model_config(storage, folder, manifest.files))
        return cls(folder, manifest, names, tied)


def plan_delta(
    ranks: Iterable[Sequence[DeltaPiece]], base: PlanBase, *, cancel: Check
) -> DeltaPlan:
    """Find the places of the pieces of all ranks in a version, by the rules of the merge.

    Raises:
        DeltaError: the pieces do not make exactly this version's tensors, or their bytes not in
            order; or two equal pieces have different bytes.
    """
    folder, manifest, names, tied = base
    pieces = _distinct([piece for rank in ranks for piece in rank if piece.box.size])
    tensors: dict[str, list[Local]] = {}
    begins: list[int] = []  # as if all pieces were in one file
    end = 0
    for name, dtype, box in ((piece.name, piece.dtype, piece.box) for piece in pieces):
        size = box.size * ITEMSIZE[dtype]
        position = Position(box.ends, box.offsets)
        tensors.setdefault(name, []).append(Local(dtype, box.shape, end, size, "", position))
        begins.append(end)
        end += size
    try:
        index = {name: _chunks(name, parts) for name, parts in tensors.items()}
        hub = NameMap.read(names, folder / NAME_MAP) if manifest.names == "hub" else None
        tied = tied and not any(is_output_embedding(tensor.name) for tensor in manifest.tensors)
        merge = plan_merge(
            [("the delta", index)], max_file_size=2**63, tied=tied, hub=hub, cancel=cancel
        )
    except (CheckpointError, RecordError) as error:
        raise DeltaError(str(error)) from error
    planned = {tensor.name: tensor for file in merge.files for tensor in file.tensors}
    _check_tensors(planned, manifest)

    def pieces_of(tensor: PlannedTensor, parts: Iterable[object]) -> list[tuple[int, Run]]:
        runs = [part for part in parts if isinstance(part, Run)]
        if sum(run.length for run in runs) != tensor.length:
            raise DeltaError(f"{shown(tensor.name)} is not cut into whole rows")
        return [(bisect_right(begins, run.offset) - 1, run) for run in runs]

    plan: DeltaPlan = {}
    for name in (tensor.name for tensor in manifest.tensors if tensor.name in planned):
        at, own = 0, pieces_of(planned[name], planned[name].parts)
        for copy in planned[name].copies:
            told = [pieces[number].digest for number, _ in pieces_of(planned[name], copy.parts)]
            if told != [pieces[number].digest for number, _ in own]:
                raise DeltaError(f"{shown(name)} and {shown(str(copy.tied))} should be equal")
        for number, run in own:
            place = Place(run.offset - begins[number], run.length, name, at)
            plan.setdefault(key_of(pieces[number]), []).append(place)
            at += run.length
    for places in plan.values():
        places.sort()
    _check_order(plan)
    return plan


def _distinct(pieces: Sequence[DeltaPiece]) -> list[DeltaPiece]:
    """The pieces without replicas, which must equal them."""
    found = {key_of(piece): piece for piece in pieces if not piece.is_replica}
    if len(found) + sum(piece.is_replica for piece in pieces) != len(pieces):
        raise DeltaError("two ranks have changes of the same part of a tensor")
    for piece in pieces:
        same = found.get(key_of(piece))
        if same is None or (same.digest, same.dtype) != (piece.digest, piece.dtype):
            raise DeltaError(f"{shown(piece.name)} differs between ranks")
    return sorted(found.values(), key=lambda piece: piece.box.offsets)


def _chunks(name: str, parts: Sequence[Local]) -> Chunks:
    ends = [part.position.global_shape for part in parts if part.position]
    if len({(part.dtype, len(part.local_shape)) for part in parts}) != 1:
        raise DeltaError(f"{shown(name)} has several dtypes or numbers of dimensions")
    return Chunks(parts[0].dtype, tuple(map(max, zip(*ends, strict=True))), tuple(parts))


def _check_tensors(planned: dict[str, PlannedTensor], version: Manifest) -> None:
    """Check that a version has these tensors, and no others that have elements."""
    wanted = {tensor.name: (tensor.dtype, tuple(tensor.shape)) for tensor in version.tensors}
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in planned.items()}
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name) and (name in found or 0 not in wanted[name][1]):
            raise DeltaError(
                f"{shown(name)} is {found.get(name, 'missing')}, but in "
                f"v{version.sequence} {wanted.get(name, 'missing')}"
            )


def _check_order(plan: DeltaPlan) -> None:
    ends: dict[str, int] = {}
    for _, length, tensor, offset in (place for places in plan.values() for place in places):
        if ends.get(tensor, 0) != offset:
            raise DeltaError(f"the parts of {shown(tensor)} cannot be written in order")
        ends[tensor] = offset + length
