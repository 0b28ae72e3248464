"""Examining a trainer's save: its files, its completeness, and its identity.

A save of ``trainer_hooks`` has receipts, and its identity is the save_id in them. Another trainer's
save has no receipts, and its identity is the :func:`fingerprint` of its files: a changed file makes
a new save.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import pydantic
import xxhash

from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.weight_sets import weight_sets
from syncd.protocol.errors import RecordError, SaveNotReadyError
from syncd.protocol.names import (
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    DCP_METADATA,
    FSDP_CONFIG,
    FULL_STATE_DICT,
    HUGGINGFACE,
    LORA_ADAPTER,
    LORA_TRAIN_META,
    MANIFEST,
    MEGATRON,
    MODEL_FOLDERS,
    RECEIPTS,
    TEMPORARY,
    delta_name,
    is_dcp_file,
    is_other_state,
    is_weights_name,
    parse_master_name,
    parse_part_name,
    part_name,
    receipt_name,
    shard_name,
    step_folder,
)
from syncd.protocol.records import NonFinite, Receipt, ReceiptFile, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import RECORD_LIMIT, Storage

#: The start of a DCP save's identity; digests of ``.metadata``, ``.distcp`` and all files follow.
_DCP: Final = "foreign-dcp-"
#: The most ranks of a save, and the most bytes of all its receipts, which are read at every look.
RANK_LIMIT: Final = 100_000
RECEIPTS_LIMIT: Final = 16 * 1024 * 1024

ADAPTER: Final = f"{LORA_ADAPTER}/{ADAPTER_WEIGHTS}"
#: The possible names of the files of weights, for messages.
LOOKED_FOR: Final = (
    f"model_world_size_N_rank_R.pt, {FULL_STATE_DICT}, model-N-of-M.safetensors, {DCP_METADATA} "
    f"(torch.distributed.checkpoint), {LORA_ADAPTER}/, or a model in {HUGGINGFACE}/"
)
PICKLED_ADAPTER: Final = f"{LORA_ADAPTER}/{ADAPTER_PICKLE}"


@dataclass(frozen=True)
class Unfinished:
    """A step's folder without a whole save.

    Attributes:
        reason: why there is no whole save, for a message.
        known_as: the daemon's key for files that never make a save as they are, so it gives up if
            they lie still; None if files are missing.
        is_certain: True if no file that is possibly still being written could change that.
    """

    step: int
    reason: str
    known_as: str | None = None
    is_certain: bool = False
    identity: ClassVar[None] = None
    weights: ClassVar[tuple[str, ...]] = ()
    is_for_people: ClassVar[bool] = False
    receipts: ClassVar[tuple[Receipt, ...]] = ()


@dataclass(frozen=True)
class _WholeSave:
    """The base of all saves that are whole.

    Attributes:
        identity: a text that no other save has.
        weights: the files of weights, by name inside ``actor/``, in rank order.
        receipts: the receipts of all ranks, in rank order; empty for a foreign trainer's save.
        adapters: an adapter's files beside the weights, which count if the weights hold it too.
    """

    step: int
    identity: str
    weights: tuple[str, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    adapters: tuple[str, ...] = ()
    reason: ClassVar[str] = ""

    @property
    def known_as(self) -> str:
        return self.identity

    def vouched(self) -> dict[str, ReceiptFile]:
        """The files that the receipts list, by name inside ``actor/``."""
        return {file.name: file for receipt in self.receipts for file in receipt.files}

    @property
    def base(self) -> str | None:
        """The save that the delta files of all ranks are relative to; None without such files."""
        bases = {receipt.base for receipt in self.receipts}
        return bases.pop() if len(bases) == 1 else None

    @property
    def sync_dtype(self) -> str | None:
        """The dtype that the trainer has cast the weights to; None if they were not cast."""
        if any(map(parse_master_name, self.weights)):
            return None
        return next((one.sync_dtype for one in self.receipts if one.sync_dtype), None)

    @property
    def model_folder(self) -> str:
        """The folder of config and tokenizer inside ``actor/``."""
        return _model_folder(self.weights)

    @property
    def is_for_people(self) -> bool:
        """True if the weights are a whole Hugging Face model beside its config."""
        return any(name.startswith(f"{self.model_folder}/") for name in self.weights[:1])

    @property
    def tied(self) -> Mapping[str, str] | None:
        """The tied tensors, if the trainer knows them."""
        return self.receipts[0].tied if self.receipts else None

    @property
    def nonfinite(self) -> NonFinite | None:
        """The weights with NaN or Inf, according to the receipts; None if that is unknown."""
        vouched = self.vouched()
        recorded = [vouched[name].nonfinite for name in self.weights if name in vouched]
        known = [part for part in recorded if part is not None]
        if len(known) < len(recorded) and not any(part.count for part in known):
            return None
        return NonFinite.of_all(known) if known else None


class Shards(_WholeSave):
    """A ``torch.save`` file of each rank."""


class Delta(_WholeSave):
    """Only what changed since the save ``base``: a delta file of each rank."""

    def refusal(self, actor: Path) -> str:
        """Why nothing can be made of these files alone, for a message."""
        return (
            f"{actor} holds only what changed since {self.base}. Use the version of step "
            f"{self.step}, once 'syncd history' does not say 'ahead' for it"
        )


class FullStateDict(_WholeSave):
    """A single ``model.safetensors``."""


class LoraAdapter(_WholeSave):
    """The adapter in ``lora_adapter/``, and no other weights that count."""


class Dcp(_WholeSave):
    """A folder of ``torch.distributed.checkpoint``; the first file is its ``.metadata``."""


class HuggingFaceParts(_WholeSave):
    """Safetensors files: of each rank's whole tensors, or, without receipts, perhaps of chunks."""


@dataclass(frozen=True)
class Remote(_WholeSave):
    """A save that has only the path of weights elsewhere (:mod:`.remote`)."""

    path: str = ""


def _model_folder(weights: tuple[str, ...]) -> str:
    of_weights = weights[0].rpartition("/")[0] if weights else ""
    return of_weights if of_weights in MODEL_FOLDERS else HUGGINGFACE


#: A whole save that has its weights in ``actor/``.
SavedWeights: TypeAlias = Shards | FullStateDict | LoraAdapter | Dcp | HuggingFaceParts | Delta
#: A whole save.
WholeSave: TypeAlias = SavedWeights | Remote
#: The state of a step's folder at the last look.
Save: TypeAlias = Unfinished | WholeSave


def look_at_save(
    storage: Storage, actor: Path, step: int, names: list[str] | None = None
) -> Unfinished | SavedWeights:
    """Find out if a save in ``actor/`` is whole. No content of the folder causes an exception.

    ``names`` are those in ``actor/``, if they are known.
    """
    try:
        names = storage.names(actor) if names is None else names
        if not names:
            return Unfinished(step, f"{actor} is not there, or empty")
        if RECEIPTS in names:
            return _vouched_save(storage, actor, step)
        return _foreign_save(storage, actor, step, names)
    except RecordError as error:
        return Unfinished(step, str(error))
    except OSError as error:
        if is_gone(error):
            return Unfinished(step, f"{error.filename or actor} disappeared while it was read")
        # One unreadable folder must not keep the daemon from the others.
        return Unfinished(step, f"{actor} cannot be read now: {error}")


def confirm_unchanged(storage: Storage, actor: Path, save: Unfinished | SavedWeights) -> None:
    """Check that ``actor`` still holds this save, unchanged.

    Raises:
        SaveNotReadyError: the folder now holds another save, or the save is no longer whole.
    """
    now = look_at_save(storage, actor, save.step)
    if now.identity != save.identity:
        raise SaveNotReadyError(
            f"{actor} changed while it was read: "
            f"{now.reason or f'it holds save {now.identity} now'}"
        )


def _vouched_save(storage: Storage, actor: Path, step: int) -> Unfinished | SavedWeights:
    try:
        first, left = read_receipt(storage, actor, receipt_name(0), RECEIPTS_LIMIT)
    except FileNotFoundError:
        return Unfinished(step, f"{actor}: rank 0 has not written its receipt yet")
    if first.world_size > RANK_LIMIT or not first.save_id.isprintable():
        return Unfinished(
            step,
            f"{actor}: rank 0's receipt names over {RANK_LIMIT} ranks, or a save_id that is not "
            "printable. trainer_hooks writes no such receipt. Save again",
        )
    if step not in {0, first.step}:  # 0 is a folder without a step in its name
        return Unfinished(
            step,
            f"{actor} is a copy of step {first.step}, as its receipts say. Name the copy's folder "
            f"{step_folder(first.step)}",
        )
    receipts = [first]
    for rank in range(1, first.world_size):
        try:
            receipt, left = read_receipt(storage, actor, receipt_name(rank), left)
        except FileNotFoundError:
            receipt = None
        if receipt is None or (receipt.save_id, receipt.world_size, receipt.rank) != (
            first.save_id,
            first.world_size,
            rank,
        ):
            return Unfinished(
                step,
                f"{actor}: rank {rank} of {first.world_size} has not written its "
                f"receipt of save {first.save_id} yet",
            )
        receipts.append(receipt)
    told = {file.name for receipt in receipts for file in receipt.files}
    shards, parts, deltas = (
        tuple(name_of(first.world_size, rank) for rank in range(first.world_size))
        for name_of in (shard_name, part_name, delta_name)
    )
    kinds = ((ADAPTER,), (PICKLED_ADAPTER,), shards, (FULL_STATE_DICT,), parts, deltas)
    weights = next(filter(told.issuperset, kinds), None)
    if weights is None:
        return Unfinished(step, f"{actor}: the receipts of save {first.save_id} list no weights")
    return _whole(first.step, first.save_id, weights, tuple(receipts))


def read_receipt(storage: Storage, actor: Path, name: str, left: int) -> tuple[Receipt, int]:
    """Read a receipt of at most ``left`` bytes; return it, and ``left`` minus its size.

    Raises:
        RecordError: the receipt is damaged.
        FileNotFoundError: the receipt does not exist.
    """
    path = actor / RECEIPTS / name
    content = storage.read(path, min(left, RECORD_LIMIT))
    return parse(Receipt, content, path), left - len(content)


def _foreign_save(
    storage: Storage, actor: Path, step: int, names: list[str]
) -> Unfinished | SavedWeights:
    """A save of another trainer.

    An adapter beside other weights counts only if they hold its tensors, which their content shows.
    """
    kinds = weight_sets(names, lambda: _configured_size(storage, actor))
    if not kinds:  # beside other weights these are derived from them, for people
        for folder in MODEL_FOLDERS:
            models = storage.names(actor / folder) if folder.partition("/")[0] in names else []
            files = [f"{folder}/{name}" for name in models if name.endswith(".safetensors")]
            # A manifest shows what 'syncd convert' made, for people to keep.
            kinds += weight_sets(files, int) if MANIFEST not in models else []
        unread = [name for name in names if is_weights_name(name) and not is_other_state(name)]
        kinds += [(name,) for name in unread if kinds]
    inside = storage.names(actor / LORA_ADAPTER) if LORA_ADAPTER in names else []
    adapters = tuple(path for path in (ADAPTER, PICKLED_ADAPTER) if Path(path).name in inside)
    if len(kinds) > 1:
        forms = [kind if isinstance(kind, str) else f"has {kind[0]}" for kind in kinds[:5]]
        return _refused(
            step,
            names,
            f"{actor} holds weights of several saves, or in several forms: it "
            f"{shown(' and '.join(forms), 400)}. syncd cannot know which of them count (only of "
            f"shards {FSDP_CONFIG} can tell it). Remove the older files, or let the trainer save "
            "one form only",
        )
    weights = kinds[0] if kinds else adapters
    if isinstance(weights, str):
        return Unfinished(step, f"{actor} {weights}")
    if not weights:
        return _without_weights(storage, step, actor, names)
    beside = (*adapters[:1], *{LORA_TRAIN_META}.intersection(names))
    identity = fingerprint(storage, actor, weights, beside)
    return _whole(step, identity, weights, adapters=adapters if kinds else ())


def _configured_size(storage: Storage, actor: Path) -> object:
    """The world size in ``fsdp_config.json``; None if it has none."""
    with suppress(OSError, pydantic.ValidationError):
        content = storage.read(actor / FSDP_CONFIG)
        return pydantic.TypeAdapter(dict[str, object]).validate_json(content).get("world_size")
    return None


def _refused(
    step: int, names: Sequence[str], reason: str, *, is_certain: bool = True
) -> Unfinished:
    told = xxhash.xxh3_128_hexdigest("\0".join(sorted(names)).encode(errors="surrogateescape"))
    return Unfinished(step, reason, f"refused-{told}", is_certain)


def _without_weights(storage: Storage, step: int, actor: Path, names: Sequence[str]) -> Unfinished:
    if MEGATRON in {*names, *storage.names(actor / "model")}:
        return _refused(
            step,
            names,
            f"{actor} holds a distributed checkpoint of Megatron ({MEGATRON}/), which syncd cannot "
            f"merge, and no model in {' or '.join(MODEL_FOLDERS)}. Let the trainer save that too "
            "(in verl: use_mbridge=True, and 'hf_model' in checkpoint.save_contents)",
        )
    told = ", ".join(shown(name) for name in sorted(names)[:5])
    reason = f"{actor} holds no weights (only {told}{'…' * (len(names) > 5)}): looked for "
    return _refused(step, names, reason + LOOKED_FOR, is_certain=False)


def _whole(
    step: int,
    identity: str,
    weights: tuple[str, ...],
    receipts: tuple[Receipt, ...] = (),
    adapters: tuple[str, ...] = (),
) -> SavedWeights:
    kinds: dict[str, type[SavedWeights]] = {
        FULL_STATE_DICT: FullStateDict,
        ADAPTER_WEIGHTS: LoraAdapter,
        ADAPTER_PICKLE: LoraAdapter,
        DCP_METADATA: Dcp,
        delta_name(len(weights), 0): Delta,
    }
    first = weights[0].rpartition("/")[2]
    kind = kinds.get(first, Shards if parse_part_name(first) is None else HuggingFaceParts)
    return kind(step, identity, weights, receipts, adapters)


def fingerprint(
    storage: Storage, actor: Path, weights: tuple[str, ...], beside: tuple[str, ...]
) -> str:
    """The identity of the save in a folder: a digest of its files' names, sizes, inodes and times.

    ``weights`` are the save's files in ``actor/``, without config and tokenizer; ``beside`` are
    others that may count.

    Raises:
        FileNotFoundError: a file was deleted meanwhile.
    """
    hasher = xxhash.xxh3_128()
    parts = {True: xxhash.xxh3_64(), False: xxhash.xxh3_64()}  # of .metadata, and of the others
    folders = dict.fromkeys((_model_folder(weights), LORA_ADAPTER))
    for name in dict.fromkeys((*beside, *weights, *_model_files(storage, actor, folders))):
        path = actor / name
        status = storage.status(path)
        if status is not None and name in weights:
            # An open makes a network filesystem ask the server; a bare stat may be stale.
            with storage.reading(path) as fd:
                status = storage.fstat(fd)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, "disappeared while it was read", str(path))
        line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\n"
        hasher.update(line.encode(errors="surrogateescape"))
        if is_dcp_file(name):
            parts[name == DCP_METADATA].update(line.encode(errors="surrogateescape"))
    if DCP_METADATA in weights:
        told = "-".join(part.hexdigest() for part in parts.values())
        return f"{_DCP}{told}-{hasher.hexdigest()}"
    return f"foreign-{hasher.hexdigest()}"


def _model_files(storage: Storage, actor: Path, folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        names = storage.names(actor / folder)
        status = None if names else storage.status(actor / folder)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            yield folder  # a save with such a folder is never published
        for name in names:
            # 'syncd convert' may add merged weights at any time: they are not part of the save.
            merged = folder != LORA_ADAPTER and (is_weights_name(name) or name == MANIFEST)
            if not name.startswith(TEMPORARY) and not merged:
                yield f"{folder}/{name}"


def is_saved_over(identity: str, known: str) -> bool:
    """True if ``torch.distributed.checkpoint`` is saving into a folder again.

    Each rank overwrites its files in place, and ``.metadata`` is replaced last. Until then the
    folder looks whole, but mixes two saves. ``identity`` is the folder's identity now; ``known`` is
    the published save's identity.
    """
    now, before = (told.removeprefix(_DCP).split("-") for told in (identity, known))
    both = identity.startswith(_DCP) and known.startswith(_DCP)
    return both and now[0] == before[0] and now[1] != before[1]
