"""The files of weights in a folder, by their names alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from syncd.protocol.names import (
    DCP_METADATA,
    DCP_SUFFIX,
    DCP_UNFINISHED,
    FULL_STATE_DICT,
    distcp_order,
    is_rank_metadata,
    parse_part_name,
    parse_shard_name,
    shard_name,
)

#: The files of a model, in order; or why some are missing, for a message.
FileSet = tuple[str, ...] | str


def weight_sets(names: Sequence[str], configured_size: Callable[[], object]) -> list[FileSet]:
    """The models in one folder, whose path the names may have.

    ``configured_size`` is the world size that a config names.
    """
    full = tuple(name for name in names if name.rpartition("/")[2] == FULL_STATE_DICT)
    found = (*_shard_sets(names, configured_size), full, _dcp_files(names), *_part_sets(names))
    return [one for one in found if one]


def _shard_sets(names: Sequence[str], configured_size: Callable[[], object]) -> list[FileSet]:
    """The complete sets of shards of all ranks; if there is none, a message about missing shards.

    Of several sets, ``configured_size`` can say which counts.
    """
    ranks: dict[int, set[int]] = {}
    for name in names:
        if parsed := parse_shard_name(name):
            ranks.setdefault(parsed[0], set()).add(parsed[1])
    whole = [size for size, found in ranks.items() if _missing_rank(size, found) is None]
    if whole and len(ranks) > 1:
        stated = configured_size()
        if type(stated) is int and stated in ranks:  # True is no size
            ranks, whole = {stated: ranks[stated]}, [stated] if stated in whole else []
    if ranks and not whole:
        return [_missing_shard(ranks)]
    return [tuple(shard_name(size, rank) for rank in range(size)) for size in sorted(whole)]


def _dcp_files(names: Sequence[str]) -> FileSet:
    """The files of DCP; empty if there are none; or the reason why the save is incomplete.

    All ``.distcp`` files count, because the metadata, which names the needed files, is not parsed.
    """
    files = sorted((name for name in names if name.endswith(DCP_SUFFIX)), key=distcp_order)
    if DCP_UNFINISHED in names:
        return f"has a {DCP_UNFINISHED}: torch.distributed.checkpoint has not finished this save"
    if DCP_METADATA in names:
        return (DCP_METADATA, *files)
    if any(map(is_rank_metadata, names)):
        return (
            f"has a metadata file for each rank, but no {DCP_METADATA} for all ranks, because "
            "the trainer saved with use_collectives=False. Save with use_collectives=True"
        )
    if files:
        return f"has no {DCP_METADATA} yet, which torch.distributed.checkpoint writes last"
    return ()


def _part_sets(names: Sequence[str]) -> list[FileSet]:
    """The sets of files of a Hugging Face model, named ``…-N-of-M``; a message if some miss.

    The names do not give the number of ranks. If the last ranks are missing, that is not found.
    """
    found = [
        (*parsed, name)
        for name in names
        if (parsed := parse_part_name(name.rpartition("/")[2])) is not None
    ]
    whole = [one for one in found if one[0] is None]
    sets: dict[int, list[tuple[int, int, str]]] = {}
    for shard, number, count, name in whole or found:  # whole tensors were made from the chunks
        sets.setdefault(count, []).append((shard or 0, number, name))
    return [
        _missing_part(count, parts) or tuple(name for *_, name in sorted(parts))
        for count, parts in sets.items()
    ]


def _missing_part(count: int, parts: Sequence[tuple[int, int, str]]) -> str:
    shards, numbers, _ = map(set, zip(*parts, strict=True))  # all shards are 0 of whole files
    for wanted, there, what in ((count, numbers, "file"), (max(shards), shards, "rank")):
        missing = _missing_rank(wanted, {number - 1 for number in there})
        if missing is not None:
            return f"has no data of {what} {missing + 1} of {wanted} yet"
    return ""


def _missing_rank(world_size: int, found: set[int]) -> int | None:
    return next((rank for rank in range(world_size) if rank not in found), None)


def _missing_shard(ranks: Mapping[int, set[int]]) -> str:
    size = max(ranks)
    missing = _missing_rank(size, ranks[size]) or 0
    told = f"has no {shard_name(size, missing)} yet"
    if len(ranks) == 1:
        return told
    others = " and ".join(map(str, sorted(ranks)[:-1][:5]))
    return f"{told}. The shards of world size {others} are incomplete too. Save again"
