"""The JSON records of the protocol, as pydantic models.

``time`` in a record is Unix time by the writer's clock. It is only for people: syncd bases no
decision on it (``docs/protocol.md``, "Sessions and time").
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, TypeVar

import pydantic
import xxhash
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    computed_field,
    model_validator,
)

from syncd.protocol.errors import InvalidSettingsError, ProtocolMismatchError, RecordError
from syncd.protocol.names import checked_name, has_control, printable

PROTOCOL: Final = 1

Sequence = Annotated[int, Field(ge=1, lt=2**63)]
Step = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0)]
#: Seconds. A shorter lease time costs too much work: three heartbeats are written in it.
SHORTEST_LEASE_TIME: Final = 0.05
LONGEST_LEASE_TIME: Final = 3600
DEFAULT_LEASE_TIME: Final = 30.0
LeaseTime = Annotated[float, Field(ge=SHORTEST_LEASE_TIME, le=LONGEST_LEASE_TIME)]
#: xxh3-128, as 32 hexadecimal digits.
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
#: The kinds of versions: a whole model, a LoRA adapter, or only the path of weights elsewhere.
Kind = Literal["full", "adapter", "remote"]
#: The origin of the names of a model's tensors: its checkpoint on the hub, or the trainer.
Names = Literal["hub", "trainer"]


def _stays_inside(path: str) -> str:
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or has_control(path):
        raise ValueError(
            f"{path!r} is not a plain path inside the folder: it must be relative, without '.', "
            "'..' or control characters"
        )
    return path


#: A path inside a folder: relative, normal, without control characters.
RelativePath = Annotated[str, Field(max_length=1000), AfterValidator(_stays_inside)]


def _speakable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


#: Text for people. A lone surrogate (a byte of a file name that is not UTF-8) is escaped.
Text = Annotated[str, AfterValidator(_speakable)]


def _names_a_heartbeat(session: str) -> str:
    try:
        return checked_name(session, "the session")
    except InvalidSettingsError as error:
        raise ValueError(str(error)) from None


#: A session's name, checked so that the path of its heartbeat cannot lead elsewhere.
SessionId = Annotated[str, AfterValidator(_names_a_heartbeat)]


class Fields(BaseModel):
    """Base of the parts of records: immutable, tolerant of new keys. An alias is 0.3's key."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, populate_by_name=True)


class Record(Fields):
    """Base of all records, which are tagged with the protocol version."""

    protocol: int = PROTOCOL


R = TypeVar("R", bound=Record)
#: The most characters of a file's text that go into a message.
_SHOWN: Final = 200
#: Before the digest at the end of a record. In a JSON text no value can contain these bytes.
_SEAL: Final = b',"xxh3-64":"'
#: The most tensors that a record of NaN and Inf names.
_NAMED: Final = 4


def parse(model: type[R], content: bytes | dict[str, object], where: object) -> R:
    """Read a record of the class ``model``; ``where`` is the file, for the error message.

    ``content`` is the file's, or the fields in it.

    Raises:
        ProtocolMismatchError: the record is of a newer protocol.
        RecordError: the content is not a record of this class, or not what was written.
    """
    if isinstance(content, bytes) and not _is_whole(content):
        raise RecordError(f"{printable(where)} is damaged: it does not have the digest at its end")
    try:
        record = _read(model, content)
    except pydantic.ValidationError as error:
        # A newer protocol may have another shape, so only its tag can be expected.
        with suppress(pydantic.ValidationError):
            _refuse_newer(_read(Record, content), where)
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        wrong = f"{place[:_SHOWN]}: {first['msg'][:_SHOWN]}"
        kind = re.sub("(?!^)(?=[A-Z])", " ", model.__name__).lower()
        raise RecordError(
            f"{printable(where)} is not a valid {kind} record: {printable(wrong)}"
        ) from None
    _refuse_newer(record, where)
    return record


def _read(model: type[R], content: bytes | dict[str, object]) -> R:
    if isinstance(content, bytes):
        return model.model_validate_json(content)
    return model.model_validate(content)


def _refuse_newer(record: Record, where: object) -> None:
    if record.protocol > PROTOCOL:
        shown = str(record.protocol)[:_SHOWN]
        raise ProtocolMismatchError(
            f"{printable(where)} is of protocol {shown}, but this syncd reads only protocols up to "
            f"{PROTOCOL}: install the newer syncd here too"
        )


def encode(record: Record) -> bytes:
    """The bytes of a record: one JSON object, whose last key is a digest of it, and a newline."""
    body = record.model_dump_json(by_alias=True, exclude_none=True).encode()[:-1]
    return b'%b%b%b"}\n' % (body, _SEAL, _digest(body))


def _is_whole(content: bytes) -> bool:
    at = content.rfind(_SEAL)
    return at < 0 or content.startswith(_digest(memoryview(content)[:at]), at + len(_SEAL))


def _digest(content: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


class Format(Record):
    """``.syncd/format.json``: written by the first process that needs it.

    ``id`` tells the job from every other one; in a job of 0.3.0 the next daemon adds it.
    """

    lease_time: LeaseTime
    id: Annotated[str, Field(max_length=100)] | None = None


#: A version's floating dtypes, that with the most bytes first: ``F8_E4M3, BF16``. None without any.
VersionDtype = Annotated[str, Field(max_length=200)] | None


class Tip(Fields):
    """The newest save that can be served, under the number of its version to come.

    Attributes:
        root: the number of the whole save that it is, or that deltas lead to it from; None if
            deltas lead to it from LATEST's version.
    """

    sequence: Sequence
    step: Step
    save_id: str
    root: Sequence | None = None

    def above(self, version: int) -> Tip | None:
        """The same tip while LATEST names this version; None if the version is not below it."""
        if self.sequence <= version:
            return None
        rests = self.root is not None and self.root > version
        return self if rests else self.model_copy(update={"root": None})


class Latest(Record):
    """``.syncd/LATEST``: the version that explorers should serve.

    Attributes:
        names: the origin of the tensor names that the job keeps. None if the hub's names and the
            trainer's names never differed.
        save_id: the save that the version was made from.
        no_deltas: why the daemon takes no delta until the next full version, if it takes none.
        rollback: the number of the last rollback; nobody loads the tip of a lower number any more.
    """

    sequence: Sequence
    step: Step
    folder: Annotated[str, Field(pattern=r"^v[0-9]{6,18}$")]
    save_id: str
    kind: Kind = "full"
    dtype: VersionDtype = None
    names: Names | None = None
    tip: Annotated[Tip | None, Field(validation_alias=AliasChoices("tip", "ahead"))] = None
    no_deltas: Annotated[Text | None, Field(alias="closed")] = None
    rollback: Sequence | None = None

    @computed_field
    def ahead(self) -> Tip | None:
        """The tip for explorers of 0.3, which follow only deltas."""
        return None if self.tip is None or self.tip.root else self.tip

    @property
    def newest(self) -> int:
        """The highest sequence that it names."""
        return max(self.sequence, self.tip.sequence if self.tip else 0)


class VersionFile(Fields):
    """A file of a version; ``digest`` is the xxh3-128 of its bytes.

    For a safetensors file, ``digest`` is the xxh3-128 of the header bytes, followed by the digests
    of the tensors (16 bytes each, in file order).
    """

    name: RelativePath
    size: Size
    digest: Digest | None = None


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a version; ``dtype`` is safetensors' name, for example ``BF16``.

    This is no pydantic model, because each would take a kilobyte, and a version can have a million
    tensors.
    """

    name: str
    dtype: str
    shape: Annotated[tuple[Size, ...], FailFast()]
    file: RelativePath
    digest: Digest | None = None


class RolledBack(Fields):
    """The origin of a version that republishes the older version ``sequence``.

    Attributes:
        instead_of: the identity of the save whose version LATEST named before the rollback. The
            daemon does not publish this save again, even while the pointer names it.
    """

    sequence: Sequence
    instead_of: str | None = None
    request: str


class AdaptedModel(Fields):
    """The base model of an adapter, as ``adapter_config.json`` names it.

    ``name`` is a hub model or a folder on the trainer's host. ``revision`` is None for the newest.
    """

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    revision: Annotated[str, Field(max_length=4096)] | None = None


class NonFinite(Fields):
    """The tensors with NaN or Inf, of one or several files.

    Attributes:
        count: the number of these tensors; a lower bound for several files.
        names: at most four of their names, shortened, because a daemon reads all receipts again and
            again.
    """

    count: Size
    names: Annotated[tuple[Text, ...], FailFast()] = ()

    @classmethod
    def of(cls, names: Collection[str]) -> NonFinite:
        """Make the record for the tensors with these names."""
        first = itertools.islice(names, _NAMED)
        shown = (printable(name[:_SHOWN])[:_SHOWN] for name in first)
        return cls(count=len(names), names=tuple(shown))

    @classmethod
    def of_all(cls, parts: Iterable[NonFinite]) -> NonFinite:
        """Combine the records of several files, which can hold parts of the same tensors."""
        parts = list(parts)
        together = cls.of(dict.fromkeys(name for part in parts for name in part.names))
        most = max((part.count for part in parts), default=0)
        return together.model_copy(update={"count": max(together.count, most)})

    def __str__(self) -> str:
        tensors = "tensor" if self.count == 1 else "tensors"
        more = ["…"] if self.count > len(self.names) else []
        return f"NaN or Inf in {self.count} {tensors} ({', '.join([*self.names, *more])})"


class Manifest(Record):
    """``manifest.json`` of a version: its kind, files, tensors and digests.

    Attributes:
        sequence: 0 if the folder was never published.
        remote: the path of the weights; only for kind ``remote``.
        base_model: only for kind ``adapter``; None if the adapter does not name its base model.
        checked: how the merge checked the trainer's files: ``receipt`` (against our hook's
            receipts). Without receipts: ``crc32`` (the CRC-32 of every record), or ``stillness``
            (names, sizes and times did not change).
        names: the origin of the tensors' names; ``trainer`` if the hub's are the same or unknown.
        nonfinite: the tensors with NaN or Inf, as the trainer saved them; None if nobody checked,
            as in a save without receipts.
        timings: seconds for each part of the daemon's work.
    """

    sequence: Size
    step: Step
    save_id: str
    kind: Kind = "full"
    checked: Literal["receipt", "crc32", "stillness"]
    digests: Literal["xxh3-128", "off"]
    # FailFast: a list of all mistakes of a hostile file would fill the memory.
    files: Annotated[tuple[VersionFile, ...], FailFast()]
    tensors: Annotated[tuple[TensorEntry, ...], FailFast()]
    remote: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    base_model: AdaptedModel | None = None
    dtype: VersionDtype = None
    rolled_back: RolledBack | None = None
    names: Names = "trainer"
    nonfinite: NonFinite | None = None
    timings: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _check_step(self.save_id, self.step)
        if (self.kind == "remote") != (self.remote is not None):
            raise ValueError(
                "the kind is remote, but there is no remote path"
                if self.remote is None
                else f"the version has a remote path, but its kind is {self.kind}"
            )
        listed = {file.name for file in self.files}
        for tensor in self.tensors:
            if tensor.file not in listed:
                raise ValueError(
                    f"tensor {tensor.name!r} is in {tensor.file!r}, but files lists no such file"
                )
        return self

    def tensors_by_file(self) -> dict[str, dict[str, TensorEntry]]:
        """The tensors of each file by their names; an empty dict for a file without tensors."""
        found: dict[str, dict[str, TensorEntry]] = {file.name: {} for file in self.files}
        for tensor in self.tensors:
            found[tensor.file][tensor.name] = tensor
        return found

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def settles(self) -> str:
        """The identity of the save that counts as published while LATEST names this version."""
        back = self.rolled_back
        return self.save_id if back is None or back.instead_of is None else back.instead_of


_SAVE_ID: Final = re.compile(
    r"([^-]+)-(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})", re.ASCII | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class SaveId:
    """The unique identity of a save, written as ``run-step-counter``.

    All ranks of a run share ``run``. ``counter`` is the number of earlier saves of this run.
    """

    run: str
    step: int
    counter: int

    def __str__(self) -> str:
        return f"{self.run}-{self.step}-{self.counter}"

    @classmethod
    def parse(cls, text: str) -> SaveId | None:
        """The save id in a text; None if the text is no save id."""
        match = _SAVE_ID.fullmatch(text)
        return cls(match[1], int(match[2]), int(match[3])) if match else None

    def is_newer_than(self, other: SaveId) -> bool:
        """True if both saves are of one run, and this save is the later one."""
        return self.run == other.run and self.counter > other.counter


def _check_step(save_id: str, step: int) -> None:
    saved = SaveId.parse(save_id)
    if saved is not None and saved.step != step:
        raise ValueError(f"step is {step}, but save_id names step {saved.step}")


class ReceiptFile(Fields):
    """A file that a receipt lists; ``nonfinite`` is None if the writer did not check.

    ``digest`` is the xxh3-128 of the part that ``over`` names: a torch.save file's zip central
    directory (which holds the CRC-32 of every record), a safetensors header, a delta's index, or
    all content.
    """

    name: RelativePath
    size: Size
    digest: Digest
    over: Literal["central-directory", "header", "index", "content"]
    nonfinite: NonFinite | None = None


class Receipt(Record):
    """``actor/.receipts/rank_R.json``: the files that one rank has written, whole and durable.

    Attributes:
        files: relative to ``actor/``; rank 0 also lists ``huggingface/`` and ``lora_adapter/``.
        sync_dtype: ``bf16`` or ``fp16``, to which this rank cast published tensors; None if none.
        fp32: with a delta: the tensors that this cast keeps in fp32, with ``#`` in
            place of each number in a name.
        base: the earlier save that the rank's delta file is relative to; None without such a file.
        tied: name that versions leave out → name of the same tensor; None if the config says it.
        of_base: the small files of a delta that its base has too, so that they are not written.
    """

    save_id: Annotated[str, Field(min_length=1, max_length=200)]
    step: Step
    rank: Annotated[int, Field(ge=0)]
    world_size: Annotated[int, Field(ge=1)]
    files: Annotated[tuple[ReceiptFile, ...], FailFast()]
    sync_dtype: Annotated[str, Field(max_length=20)] | None = None
    fp32: Annotated[tuple[str, ...], FailFast()] = ()
    base: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    tied: dict[str, str] | None = None
    of_base: Annotated[tuple[ReceiptFile, ...], FailFast()] = ()

    @model_validator(mode="after")
    def _is_of_its_step(self) -> Self:
        _check_step(self.save_id, self.step)
        return self


class SaveOutcome(Fields):
    """The outcome of a save.

    ``model_only`` is True if a DCP save holds only a model; None if nobody has checked.
    """

    # pydantic before 2.10 reserves all names that begin with model_, and warns.
    model_config = ConfigDict(protected_namespaces=())

    identity: str
    outcome: Literal["published", "skipped", "quarantined"]
    sequence: Sequence | None = None
    model_only: bool | None = None


class SaveOutcomes(Record):
    """``.syncd/saves.json``: the outcome of the newest save in each existing step folder."""

    steps: dict[Step, SaveOutcome] = Field(default_factory=dict)


class Quarantine(Record):
    """``.syncd/quarantine/…json``: why a save could not be published."""

    step: Step
    identity: str
    error: str
    reason: Text
    time: float


class PublishNotice(Record):
    """``.syncd/publish.lock``: the version that the daemon is making. Only a hint."""

    sequence: Sequence
    step: Step
    session: str
