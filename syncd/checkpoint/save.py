"""Which files make a save, and whether it is whole.

Two kinds of save are served. One written by ``trainer_hooks`` carries receipts, and its identity is
the save_id that all of them name. One written by another trainer has none: its identity is made of
the names, sizes, inodes and times of its files, and it must not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pydantic

from syncd.checkpoint.fingerprint import fingerprint
from syncd.protocol.errors import RecordError, SaveNotReadyError
from syncd.protocol.names import (
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    DCP_METADATA,
    DCP_SUFFIX,
    DCP_UNFINISHED,
    FSDP_CONFIG,
    FULL_STATE_DICT,
    LORA_ADAPTER,
    RECEIPTS,
    distcp_order,
    is_dcp_file,
    is_rank_metadata,
    parse_part_name,
    parse_shard_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import Receipt, ReceiptFile, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import RECORD_LIMIT, Storage

#: The most ranks of a save with receipts, and the most bytes of all of these: they are read at
#: every look.
RANK_LIMIT: Final = 100_000
RECEIPTS_LIMIT: Final = 16 * 1024 * 1024

ADAPTER: Final = f"{LORA_ADAPTER}/{ADAPTER_WEIGHTS}"
_MIXED: Final = (
    "holds model_world_size_*.pt shards and files of torch.distributed.checkpoint, and nothing "
    "says which of them are of an older save: remove those"
)
PICKLED_ADAPTER: Final = f"{LORA_ADAPTER}/{ADAPTER_PICKLE}"


@dataclass(frozen=True, slots=True)
class Save:
    """A save as it was last looked at.

    Attributes:
        step: whose folder it is in.
        identity: what tells this save from every other one; None while it is not whole.
        reason: what is missing, while it is not whole.
        weights: the files that hold the weights, by name inside ``actor/``, in rank order.
        receipts: the receipts of all ranks, in rank order; empty for a foreign trainer's save.
        remote: where the weights are, of a save that has none itself (:mod:`.remote`).
        awaits_path: that even this is missing, in a step folder without weights.
    """

    step: int
    identity: str | None
    reason: str = ""
    weights: tuple[str, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    remote: str | None = None
    awaits_path: bool = False

    @property
    def known_as(self) -> str | None:
        """What it is on record as: its identity; what awaits a path is all one."""
        return "no-remote-path" if self.awaits_path else self.identity

    @property
    def is_full_state_dict(self) -> bool:
        """Whether the weights are one ``model.safetensors`` instead of shards."""
        return self.weights == (FULL_STATE_DICT,)

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are those in ``lora_adapter/``, whatever else is beside them.

        Shards may turn out to hold an adapter too.
        """
        return self.weights in {(ADAPTER,), (PICKLED_ADAPTER,)}

    @property
    def is_dcp(self) -> bool:
        """Whether the weights are in a folder of ``torch.distributed.checkpoint``.

        Then the first file is its ``.metadata``.
        """
        return self.weights[:1] == (DCP_METADATA,)

    @property
    def is_in_parts(self) -> bool:
        """Whether the weights are several safetensors files, of whole tensors or of chunks."""
        return bool(self.weights) and parse_part_name(self.weights[0]) is not None

    @property
    def is_one_file(self) -> bool:
        """Whether the weights are one safetensors file, to be published as it is."""
        return self.is_full_state_dict or self.is_adapter

    def vouched(self) -> dict[str, ReceiptFile]:
        """What the receipts say of each file, by its name inside ``actor/``."""
        return {file.name: file for receipt in self.receipts for file in receipt.files}


def look_at_save(storage: Storage, actor: Path, step: int) -> Save:
    """Look whether the save in an ``actor/`` folder is whole. What is in it never raises."""
    try:
        names = storage.names(actor)
        if not names:
            return Save(step, None, f"{actor} is not there, or empty")
        if RECEIPTS in names:
            return _vouched_save(storage, actor, step)
        return _foreign_save(storage, actor, step, names)
    except RecordError as error:
        return Save(step, None, str(error))
    except OSError as error:
        if is_gone(error):
            return Save(step, None, f"{error.filename or actor} went while it was looked at")
        # One folder that cannot be read (a link, a name too long, no permission) must not keep the
        # daemon from the others.
        return Save(step, None, f"{actor} cannot be looked at now: {error}")


def confirm_unchanged(storage: Storage, actor: Path, save: Save) -> None:
    """Look at a save again, by name and through fresh opens.

    Raises:
        SaveNotReadyError: it is another save by now, or not whole any more.
    """
    now = look_at_save(storage, actor, save.step)
    if now.identity != save.identity:
        raise SaveNotReadyError(
            f"{actor} changed while it was read: "
            f"{now.reason or f'it holds save {now.identity} now'}"
        )


def _vouched_save(storage: Storage, actor: Path, step: int) -> Save:
    """A save of our own hook: rank 0's receipt says how many others there must be."""
    try:
        first, left = _receipt(storage, actor, 0, RECEIPTS_LIMIT)
    except FileNotFoundError:
        return Save(step, None, f"{actor}: rank 0 has not written its receipt yet")
    if first.world_size > RANK_LIMIT or not first.save_id.isprintable():
        return Save(
            step,
            None,
            f"{actor}: rank 0's receipt is of over {RANK_LIMIT} ranks, or has a save_id that is no "
            "text: it is not one of trainer_hooks; save again",
        )
    receipts = [first]
    for rank in range(1, first.world_size):
        try:
            receipt, left = _receipt(storage, actor, rank, left)
        except FileNotFoundError:
            receipt = None
        if receipt is None or (receipt.save_id, receipt.world_size, receipt.rank) != (
            first.save_id,
            first.world_size,
            rank,
        ):
            return Save(
                step,
                None,
                f"{actor}: rank {rank} of {first.world_size} has not written its "
                f"receipt of save {first.save_id} yet",
            )
        receipts.append(receipt)
    told = {file.name for receipt in receipts for file in receipt.files}
    shards = tuple(shard_name(first.world_size, rank) for rank in range(first.world_size))
    weights: tuple[str, ...]
    if adapter := _adapter_of(told):
        weights = (adapter,)
    elif told.issuperset(shards):
        weights = shards
    elif FULL_STATE_DICT in told:
        weights = (FULL_STATE_DICT,)
    else:
        return Save(
            step,
            None,
            f"{actor}: the receipts of save {first.save_id} vouch for no weights",
        )
    return Save(step, first.save_id, weights=weights, receipts=tuple(receipts))


def _receipt(storage: Storage, actor: Path, rank: int, left: int) -> tuple[Receipt, int]:
    """A receipt of at most ``left`` bytes, and how many bytes are left for others."""
    path = actor / RECEIPTS / receipt_name(rank)
    content = storage.read(path, min(left, RECORD_LIMIT))
    return parse(Receipt, content, path), left - len(content)


def _adapter_of(names: Container[str]) -> str | None:
    """The adapter's weights among names inside ``actor/``."""
    return next((name for name in (ADAPTER, PICKLED_ADAPTER) if name in names), None)


def _foreign_save(storage: Storage, actor: Path, step: int, names: list[str]) -> Save:
    """A save of another trainer: all shards of one world size, or one file, or what DCP writes.

    An adapter beside shards stands for them, but it counts only when they are whole too: its
    trainer may be writing both.
    """
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    for name in names:
        if parsed := parse_shard_name(name):
            ranks[parsed[0]].add(parsed[1])
    whole = [size for size, found in ranks.items() if _missing_rank(size, found) is None]
    if len(whole) > 1:
        told = _told_world_size(storage, actor)
        sizes = " and ".join(map(str, sorted(whole)[:5]))
        if told not in whole:
            return Save(
                step,
                None,
                f"{actor} holds complete shards of world sizes {sizes}, and {FSDP_CONFIG} does not "
                "say which one counts: remove the older set",
            )
        whole = [told]
    shards: tuple[str, ...] = ()
    is_mixed = any(map(is_dcp_file, names))
    if whole and not is_mixed:
        shards = tuple(shard_name(whole[0], rank) for rank in range(whole[0]))
    elif ranks:
        return Save(step, None, f"{actor} {_MIXED if is_mixed else _missing_shard(ranks)}")
    adapter = None
    if LORA_ADAPTER in names:
        adapter = _adapter_of([f"{LORA_ADAPTER}/{n}" for n in storage.names(actor / LORA_ADAPTER)])
    beside: tuple[str, ...] = shards
    if not shards and FULL_STATE_DICT not in names:
        chunked = _dcp_files(names) or (() if adapter is not None else _parts(names))
        if isinstance(chunked, str):
            return Save(step, None, f"{actor} {chunked}")
        beside = chunked
    if adapter is not None:
        weights: tuple[str, ...] = (adapter,)
    elif beside:
        weights = beside
    else:
        weights = (FULL_STATE_DICT,)
    still = tuple(dict.fromkeys((*weights, *beside)))
    return Save(step, fingerprint(storage, actor, still), weights=weights)


def _dcp_files(names: Sequence[str]) -> tuple[str, ...] | str:
    """The files of a folder of ``torch.distributed.checkpoint``; or why it is none yet.

    Nothing where there is no trace of one. All ``.distcp`` files count: which of them the metadata
    names is only known once it is parsed.
    """
    files = sorted((name for name in names if name.endswith(DCP_SUFFIX)), key=distcp_order)
    if DCP_UNFINISHED in names:
        return f"has a {DCP_UNFINISHED}: torch.distributed.checkpoint has not finished this save"
    if DCP_METADATA in names:
        return (DCP_METADATA, *files)
    if any(map(is_rank_metadata, names)):
        return (
            f"has a metadata file of each rank, and no {DCP_METADATA} of all: save without "
            "use_collectives=False"
        )
    if files:
        return f"has no {DCP_METADATA} yet, which torch.distributed.checkpoint writes last"
    return ()


def _parts(names: Sequence[str]) -> tuple[str, ...] | str:
    """The files of a Hugging Face model of which each says of how many it is one; or why not.

    Those of ranks do not say how many ranks there were: a gap in their numbers is a missing file,
    and one behind the last cannot be seen.
    """
    found = {name: parsed for name in names if (parsed := parse_part_name(name)) is not None}
    whole = {name: parsed for name, parsed in found.items() if parsed[0] is None}
    used = whole or found  # chunks beside whole tensors are what these were made of
    if not used:
        return "holds no weights yet"
    counts = {files for _, _, files in used.values()}
    if len(counts) > 1:
        told = " and ".join(map(str, sorted(counts)[:5]))
        return f"holds model files of {told} in all: remove those of an older save"
    shards = {shard for shard, _, _ in used.values() if shard is not None}
    numbers = {number for _, number, _ in used.values()}
    (count,) = counts
    for wanted, there, what in ((count, numbers, "file"), (max(shards, default=0), shards, "rank")):
        missing = _missing_rank(wanted, {number - 1 for number in there})
        if missing is not None:
            return f"has nothing of {what} {missing + 1} of {wanted} yet"
    return tuple(sorted(used, key=lambda name: (used[name][0] or 0, used[name][1])))


def _missing_rank(world_size: int, found: set[int]) -> int | None:
    return next((rank for rank in range(world_size) if rank not in found), None)


def _missing_shard(ranks: Mapping[int, set[int]]) -> str:
    """Which shard is missing, where none of several sets is complete."""
    size = max(ranks)
    missing = _missing_rank(size, ranks[size]) or 0
    told = f"has no {shard_name(size, missing)} yet, of {size} ranks"
    if len(ranks) == 1:
        return told
    others = " and ".join(map(str, sorted(ranks)[:-1][:5]))
    return f"{told}; shards of world size {others} are there too, and no set is whole: save again"


def _told_world_size(storage: Storage, actor: Path) -> int | None:
    """What ``fsdp_config.json`` says, or None where it says nothing of use."""
    try:
        content = storage.read(actor / FSDP_CONFIG)
        told = pydantic.TypeAdapter(dict[str, object]).validate_json(content).get("world_size")
    except (OSError, pydantic.ValidationError):
        return None
    return told if type(told) is int else None  # True is no size
