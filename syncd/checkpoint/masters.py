"""The weights of a full checkpoint in the model's dtype, if the published weights were cast.

They are in ``master_world_size_W_rank_R.pt`` files, which the full checkpoint's own receipts ("full
receipts") list. Without receipts, syncd looks for such files.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from syncd.checkpoint.save import (
    RECEIPTS_LIMIT,
    Delta,
    FullStateDict,
    SavedWeights,
    Shards,
    read_receipt,
)
from syncd.protocol.errors import RecordError, SaveNotReadyError
from syncd.protocol.names import (
    RECEIPTS,
    full_receipt_name,
    master_name,
    parse_master_name,
    shard_name,
)
from syncd.storage.fsio import Storage


def in_models_dtype(storage: Storage, actor: Path, save: SavedWeights) -> SavedWeights:
    """Replace cast weights by the weights in the model's dtype.

    Returns ``save`` itself if its weights were not cast, or if it is a LoRA model, because no file
    holds a whole LoRA model in the model's dtype.

    Raises:
        SaveNotReadyError: the weights in the model's dtype, or the full receipts, are not whole.
    """
    if not save.receipts:
        masters = foreign_masters(storage, actor, save)
        names = storage.names(actor)
        if missing := next((name for name in masters if name not in names), None):
            raise SaveNotReadyError(
                f"{actor} lacks {missing}. The weights of other ranks are there in the model's "
                "dtype. If the folder is a copy, copy the whole folder again"
            )
        return Shards(save.step, save.identity, masters) if masters else save
    if save.sync_dtype is None and not isinstance(save, Delta):
        return save
    full, left = [], RECEIPTS_LIMIT
    try:
        for rank in range(len(save.receipts)):
            receipt, left = read_receipt(storage, actor, full_receipt_name(rank), left)
            full.append(receipt)
    except (FileNotFoundError, RecordError) as error:
        raise _without_receipts(actor, str(error)) from error
    for rank, receipt in enumerate(full):
        if receipt.save_id != save.identity:
            raise _without_receipts(
                actor,
                f"{full_receipt_name(rank)} belongs to save {receipt.save_id}, but the cast "
                f"weights belong to save {save.identity}",
            )
    told = {file.name for one in full for file in one.files}
    weights = resumed_weights(told, len(full))
    if told.isdisjoint(master_name(len(full), rank) for rank in range(len(full))):
        return save
    return Shards(save.step, save.identity, weights, tuple(full))


def resumed_weights(names: Container[str], world_size: int) -> tuple[str, ...]:
    """The files to resume from: each rank's ``master_`` file if ``names`` has it, else its shard.

    ``names`` are the names in the full receipts.
    """
    return tuple(
        master
        if (master := master_name(world_size, rank)) in names
        else shard_name(world_size, rank)
        for rank in range(world_size)
    )


def foreign_masters(storage: Storage, actor: Path, save: SavedWeights) -> tuple[str, ...]:
    """All ranks' files with weights in the model's dtype, for a save without receipts.

    The result includes missing files. It is empty if no such file exists.

    Raises:
        SaveNotReadyError: syncd cannot tell which files belong together.
    """
    found = {parsed[0] for name in storage.names(actor) if (parsed := parse_master_name(name))}
    if not found:
        return ()
    sizes = found | ({len(save.weights)} if isinstance(save, Shards) else set())
    if len(sizes) > 1 or not isinstance(save, Shards | FullStateDict):
        told = " and ".join(map(str, sorted(sizes)[:5]))
        raise SaveNotReadyError(
            f"{actor} holds files of several saves: {master_name(max(found), 0)} does not belong "
            f"to the other weights there (world sizes found: {told}). Remove the files of the "
            "older save"
        )
    (world_size,) = sizes
    return tuple(master_name(world_size, rank) for rank in range(world_size))


def _without_receipts(actor: Path, why: str) -> SaveNotReadyError:
    return SaveNotReadyError(
        f"{actor} holds weights for explorers. The full receipts, which list the files in the "
        f"model's dtype, cannot be used: {why}. Copy the folder again, together with "
        f"{actor / RECEIPTS}"
    )
