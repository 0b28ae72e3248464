"""Make and parse the names of files and folders in the on-disk protocol."""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import Final, Literal

from syncd.protocol.errors import InvalidSettingsError

STATE_POINTER: Final = "latest_state_dict_iteration.txt"
CHECKPOINT_POINTER: Final = "latest_checkpointed_iteration.txt"
#: The pointers that a daemon can follow.
PointerName = Literal["latest_state_dict_iteration.txt", "latest_checkpointed_iteration.txt"]

#: The folders of a step: one for the model that is published, one for the critic.
ACTOR: Final = "actor"
CRITIC: Final = "critic"

SAVING: Final = ".saving"
FULL: Final = ".full_checkpoint"
RETIRED: Final = ".retired"
RECEIPTS: Final = ".receipts"
#: A user's pin: a file in a step folder, or in the lease folder of a version.
PINNED: Final = ".pinned"
FULL_STATE_DICT: Final = "model.safetensors"
#: The file that torch.distributed.checkpoint writes last, and its name during the write.
DCP_METADATA: Final = ".metadata"
DCP_UNFINISHED: Final = ".metadata.tmp"
DCP_SUFFIX: Final = ".distcp"
HUGGINGFACE: Final = "huggingface"
#: Where a whole model for people can be: by syncd and verl's FSDP; by verl's Megatron.
MODEL_FOLDERS: Final = (HUGGINGFACE, f"model/{HUGGINGFACE}")
#: The file with the path of the weights, from trainers that keep their weights elsewhere.
REMOTE_PATH: Final = "remote_sampler_path.txt"
#: Megatron's distributed checkpoint: a model and an optimizer.
MEGATRON: Final = "dist_ckpt"
#: The folder of a PEFT adapter, and PEFT's names for its files.
LORA_ADAPTER: Final = "lora_adapter"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_PICKLE: Final = "adapter_model.bin"
#: verl's file with the rank and alpha of an adapter, beside shards that hold the adapter.
LORA_TRAIN_META: Final = "lora_train_meta.json"
MODEL_CONFIG: Final = "config.json"
#: Beside config.json: the names of the model's tensors on the hub.
NAME_MAP: Final = "name_map.json"
FSDP_CONFIG: Final = "fsdp_config.json"
MANIFEST: Final = "manifest.json"
DELTA: Final = "delta.json"
#: In a whole tip: its record, the plan to make its version, and links to the save's files.
TIP: Final = "tip.json"
PLAN: Final = "plan"
SHARDS: Final = "shards"
#: A file whose name has this prefix is unfinished; it gets its final name by a rename.
TEMPORARY: Final = ".tmp-"

_STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,17})", re.ASCII)
_VERSION = re.compile(r"v([0-9]{6}|[1-9][0-9]{6,17})", re.ASCII)
_DELTA = re.compile(r"d([0-9]{6}|[1-9][0-9]{6,17})", re.ASCII)
_LOAD_TURN = re.compile(r"load\.(0|[1-9][0-9]{0,8})", re.ASCII)
_SHARD = re.compile(
    r"(model|master)_world_size_([1-9][0-9]{0,6})_rank_(0|[1-9][0-9]{0,6})\.pt", re.ASCII
)
_POINTER = re.compile(rb"\s*(-?[0-9]{1,18})\s*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", re.ASCII)
#: Files that protect a step folder from pruning, because a trainer could resume from them. A DCP
#: folder may hold anything, so all its files count, also the metadata of single ranks.
_RESUMABLE = re.compile(
    rf"(optim|extra_state|master)_.*|(__[0-9]+)?\.metadata|.*\.distcp|{MEGATRON}",
    re.ASCII | re.DOTALL,
)
_DISTCP = re.compile(r"__([0-9]{1,9})_([0-9]{1,9})\.distcp", re.ASCII)
_RANK_METADATA = re.compile(r"__[0-9]{1,9}\.metadata", re.ASCII)
_PART = re.compile(
    r"(?:shard-([0-9]{5,9})-)?model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors", re.ASCII
)
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|index\.json)", re.ASCII | re.DOTALL
)

_OTHER_STATE = re.compile(r"optim|sched|rng|random|scaler|extra|train|data_?loader", re.IGNORECASE)

_CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")
#: Invisible characters that are parts of words in Persian and Indic scripts, and of emoji.
_JOINERS: Final = "\u200c\u200d"


def is_other_state(name: str) -> bool:
    """True if a file with this name most likely holds no weights: an optimizer, random states."""
    return _OTHER_STATE.match(name) is not None


def is_weights_name(name: str) -> bool:
    """True if a file in ``huggingface/`` with this name holds weights or their index."""
    return _WEIGHTS.fullmatch(name) is not None


def step_folder(step: int) -> str:
    """The name of a step's folder, e.g. ``global_step_17``."""
    return f"global_step_{step}"


def parse_step_folder(name: str) -> int | None:
    """The step in a step folder's name; None for other names."""
    return _number(_STEP, name)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


def version_folder(sequence: int) -> str:
    """The name of a version's folder, e.g. ``v000017``."""
    return f"v{sequence:06d}"


def in_words(folder: str) -> str:
    """A folder as people call it: ``v17`` for ``v000017``, ``5`` for ``global_step_5``."""
    return re.sub("^global_step_|(?<=^[vd])0+", "", folder)


def parse_version_folder(name: str) -> int | None:
    """The sequence in a version folder's name; None for other names."""
    return _number(_VERSION, name)


def delta_folder(sequence: int) -> str:
    """The folder name of a delta, e.g. ``d000017``."""
    return f"d{sequence:06d}"


def parse_delta_folder(name: str) -> int | None:
    """The sequence in a delta folder's name; None for other names."""
    return _number(_DELTA, name)


def parse_load_turn(name: str) -> int | None:
    """The number in the name of a turn's claim, e.g. ``load.0``; None for other names."""
    return _number(_LOAD_TURN, name)


def shard_name(world_size: int, rank: int) -> str:
    """The name of a rank's model shard, as verl and Trinity-RFT write it."""
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def master_name(world_size: int, rank: int) -> str:
    """The name of a rank's file of uncast weights, if the weights in its shard are cast."""
    return f"master_world_size_{world_size}_rank_{rank}.pt"


def delta_name(world_size: int, rank: int) -> str:
    """The name of a rank's delta: what changed since an earlier save."""
    return f"link_world_size_{world_size}_rank_{rank}"


def optimizer_name(world_size: int, rank: int) -> str:
    """The name of a rank's optimizer state."""
    return f"optim_world_size_{world_size}_rank_{rank}.pt"


def extra_state_name(world_size: int, rank: int) -> str:
    """The name of a rank's extra state: scheduler and random number generators."""
    return f"extra_state_world_size_{world_size}_rank_{rank}.pt"


def parse_shard_name(name: str) -> tuple[int, int] | None:
    """``(world_size, rank)`` in a name of :func:`shard_name`; None for other names."""
    return _world_and_rank("model", name)


def _world_and_rank(kind: str, name: str) -> tuple[int, int] | None:
    match = _SHARD.fullmatch(name)
    return (int(match[2]), int(match[3])) if match and match[1] == kind else None


def parse_master_name(name: str) -> tuple[int, int] | None:
    """``(world_size, rank)`` in a name of :func:`master_name`; None for other names."""
    return _world_and_rank("master", name)


def distcp_order(name: str) -> tuple[int, int, str]:
    """The sort key of a ``.distcp`` file: rank, number, name. Files without a rank come last."""
    match = _DISTCP.fullmatch(name)
    return (int(match[1]), int(match[2]), name) if match else (sys.maxsize, 0, name)


def is_dcp_file(name: str) -> bool:
    """True for the files that ``torch.distributed.checkpoint`` writes."""
    return name == DCP_METADATA or name.endswith(DCP_SUFFIX)


def is_rank_metadata(name: str) -> bool:
    """True for the name of the DCP metadata of only one rank."""
    return _RANK_METADATA.fullmatch(name) is not None


def parse_part_name(name: str) -> tuple[int | None, int, int] | None:
    """``(shard, N, M)`` in ``shard-00001-model-N-of-M.safetensors``; None for other names.

    A rank wrote a file with ``shard-…`` through ``HuggingFaceStorageWriter``. A file without
    ``shard-…`` holds whole tensors, and its shard is None.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return None
    shard, file, files = match[1], int(match[2]), int(match[3])
    if not 1 <= file <= files or shard == "00000":
        return None
    return (None if shard is None else int(shard), file, files)


def part_name(world_size: int, rank: int) -> str:
    """The name of the file that holds one rank's whole tensors."""
    if world_size == 1:
        return FULL_STATE_DICT
    return f"model-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def receipt_name(rank: int) -> str:
    """The name of a rank's receipt inside ``.receipts/``."""
    return f"rank_{rank}.json"


_FULL_RECEIPT: Final = "full_rank_"


def full_receipt_name(rank: int) -> str:
    """The name of a rank's receipt for a full checkpoint."""
    return f"{_FULL_RECEIPT}{rank}.json"


def is_full_receipt_name(name: str) -> bool:
    """True for the names of :func:`full_receipt_name`."""
    return name.startswith(_FULL_RECEIPT)


def failure_name(rank: int) -> str:
    """The name of the file in which a rank reports a save that it could not write."""
    return f"failed_rank_{rank}.txt"


def is_resumable_state(name: str) -> bool:
    """True if a trainer could resume from a step with this file in ``actor/``."""
    return _RESUMABLE.fullmatch(name) is not None


def parse_pointer(content: bytes) -> int | None:
    """The step in a pointer file; negative if no step exists yet; None if empty or torn."""
    match = _POINTER.fullmatch(content)
    return int(match[1]) if match else None


def is_name(name: str) -> bool:
    """True if :func:`checked_name` accepts the name."""
    return _NAME.fullmatch(name) is not None


def checked_name(name: object, what: str) -> str:
    """Return the name if it can be part of a file name; ``what`` is for the error message.

    Raises:
        InvalidSettingsError: the name is empty, has more than 64 characters, begins with ``-``, or
            has a character that is not an ASCII letter, a digit, ``_`` or ``-``.
    """
    if not isinstance(name, str) or not is_name(name):
        raise InvalidSettingsError(
            f"{what} {name!r} cannot be part of a file name: use 1 to 64 ASCII letters, digits, "
            "'_' or '-', and do not begin with '-'"
        )
    return name


def lease_marker(name: str, session: str) -> str:
    """The file name of an explorer's lease: ``NAME.SESSION``."""
    return f"{name}.{session}"


def parse_lease_marker(marker: str) -> tuple[str, str] | None:
    """``(name, session)`` in a lease's file name; None for other names."""
    name, dot, session = marker.partition(".")
    return (name, session) if dot and is_name(name) and is_name(session) else None


def has_control(text: str) -> bool:
    """True if text has control characters (C0, DEL, C1)."""
    return _CONTROL.search(text) is not None


def printable(text: object) -> str:
    """Text from outside, as one line without characters that a terminal would obey.

    Control, bidi and other invisible characters, line ends, and bytes that are not UTF-8 are
    escaped. Spaces and joiners stay, because many writing systems need them.
    """
    plain = str(text)
    return plain if plain.isprintable() else "".join(map(_printable, plain))


def _printable(char: str) -> str:
    if char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode()
