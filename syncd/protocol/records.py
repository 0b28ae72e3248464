"""The JSON records of the protocol, as pydantic models.

Reading goes through :func:`parse`, which tells a newer protocol's record from a broken one.
Times are seconds since the epoch by the writer's clock, for people to read; nothing is decided by
comparing them (``docs/protocol.md``, "Sessions and time").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, model_validator

from syncd.protocol.errors import InvalidSettingsError, ProtocolMismatchError, RecordError
from syncd.protocol.layout import checked_name, printable

PROTOCOL: Final = 1

Sequence = Annotated[int, Field(ge=1, lt=2**63)]
Step = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0)]
#: xxh3-128, as 32 hexadecimal digits.
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
#: What a version is: a whole model, a LoRA adapter for one, or the path of weights elsewhere.
Kind = Literal["full", "adapter", "remote"]


def _stays_inside(path: str) -> str:
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or any(ord(c) < 32 for c in path):
        raise ValueError(f"{path!r} is not a plain path inside the folder")
    return path


#: A path inside a folder: relative, normal, without control characters.
RelativePath = Annotated[str, Field(max_length=1000), AfterValidator(_stays_inside)]


def _speakable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


#: Text for people: half a surrogate pair, from a file name that is not UTF-8, is written out.
Text = Annotated[str, AfterValidator(_speakable)]


def _names_a_heartbeat(session: str) -> str:
    try:
        return checked_name(session, "the session")
    except InvalidSettingsError as error:
        raise ValueError(str(error)) from None


#: A session whose heartbeat is looked at: its name leads to that file, and nowhere else.
SessionId = Annotated[str, AfterValidator(_names_a_heartbeat)]


class Record(BaseModel):
    """Base of all records: immutable, tagged with the protocol version, tolerant of new keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    protocol: int = PROTOCOL


R = TypeVar("R", bound=Record)
#: The most characters of what a file says that go into a message.
_SHOWN: Final = 200


def parse(model: type[R], content: bytes, where: object) -> R:
    """Read a record.

    Args:
        model: the record's class.
        content: the file's bytes.
        where: the file, for the message.

    Raises:
        ProtocolMismatchError: the record is of a newer protocol.
        RecordError: it is not such a record at all.
    """
    try:
        record = model.model_validate_json(content)
    except pydantic.ValidationError as error:
        # A newer protocol may have another shape: its tag is all that can be expected of it.
        _refuse_newer(content, where)
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        wrong = f"{place[:_SHOWN]}: {first['msg'][:_SHOWN]}"
        raise RecordError(
            f"{printable(where)} is not a {model.__name__} record: {printable(wrong)}"
        ) from None
    _refuse_newer_protocol(record, where)
    return record


def _refuse_newer(content: bytes, where: object) -> None:
    try:
        record = Record.model_validate_json(content)
    except pydantic.ValidationError:
        return
    _refuse_newer_protocol(record, where)


def _refuse_newer_protocol(record: Record, where: object) -> None:
    if record.protocol > PROTOCOL:
        shown = str(record.protocol)[:_SHOWN]
        raise ProtocolMismatchError(
            f"{printable(where)} is of protocol {shown}, this syncd reads up to {PROTOCOL}: "
            "install the newer syncd here too"
        )


def encode(record: Record) -> bytes:
    """The bytes of a record: one JSON object and a newline."""
    return record.model_dump_json(exclude_none=True).encode() + b"\n"


class Format(Record):
    """``.syncd/format.json``: written once, by whoever is first."""

    lease_time: Annotated[float, Field(gt=0, le=3600)] = 30.0


class Latest(Record):
    """``.syncd/LATEST``: the version that explorers should serve."""

    sequence: Sequence
    step: Step
    folder: Annotated[str, Field(pattern=r"^v[0-9]{6,18}$")]
    kind: Kind = "full"


class VersionFile(BaseModel):
    """A file of a version.

    ``digest`` of a safetensors file is the xxh3-128 of its header bytes followed by its tensors'
    digests (16 bytes each, in file order); of any other file, the xxh3-128 of its bytes.
    """

    model_config = ConfigDict(frozen=True)

    name: RelativePath
    size: Size
    digest: Digest | None = None


class TensorEntry(BaseModel):
    """A tensor of a version; ``dtype`` is safetensors' name for it."""

    model_config = ConfigDict(frozen=True)

    name: str
    dtype: str
    shape: Annotated[tuple[Size, ...], FailFast()]
    file: RelativePath
    digest: Digest | None = None


class RolledBack(BaseModel):
    """Of a version that an older one was republished as.

    Attributes:
        sequence: the older one.
        instead_of: the identity of the save that LATEST answered until then: that one is not
            published again, however long the pointer names it.
        request: who asked for it.
    """

    model_config = ConfigDict(frozen=True)

    sequence: Sequence
    instead_of: str | None = None
    request: str


class AdaptedModel(BaseModel):
    """The base model that an adapter is for, as ``adapter_config.json`` names it.

    Attributes:
        name: a model of a hub, or a folder as the trainer's host has it.
        revision: of the model on the hub; None for its newest.
    """

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    revision: Annotated[str, Field(max_length=4096)] | None = None


class Manifest(Record):
    """``manifest.json`` of a version: what it is and what its bytes must be.

    Attributes:
        sequence: which version; 0 for a folder merged by hand, which was never published.
        kind: ``full``, a Hugging Face model folder, ``adapter``, one that PEFT loads, or
            ``remote``, no weights but where they are.
        remote: that path, of kind ``remote`` alone.
        base_model: which model the adapter is for, of kind ``adapter`` alone; None also where the
            adapter does not say: then whoever loads it has to know.
        checked: how the trainer's files were checked while they were merged: ``receipt`` (our
            hook's), ``crc32`` (of every record, of a save without receipts), ``stillness`` (neither
            was to be had: names, sizes and times did not change).
        digests: which digests the entries carry.
        rolled_back: of what older version this one is the republication; None for a save's own.
        timings: seconds by name, measured by the daemon.
    """

    sequence: Size
    step: Step
    save_id: str
    kind: Kind = "full"
    checked: Literal["receipt", "crc32", "stillness"]
    digests: Literal["xxh3-128", "off"]
    # A file of nothing but mistakes is refused for its first one: kept all, they fill the memory.
    files: Annotated[tuple[VersionFile, ...], FailFast()]
    tensors: Annotated[tuple[TensorEntry, ...], FailFast()]
    remote: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    base_model: AdaptedModel | None = None
    rolled_back: RolledBack | None = None
    timings: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        if (self.kind == "remote") != (self.remote is not None):
            raise ValueError("a version of kind remote, and no other, has a remote path")
        return self

    @property
    def settles(self) -> str:
        """The identity of the save that needs no publishing while LATEST names this version."""
        back = self.rolled_back
        return self.save_id if back is None or back.instead_of is None else back.instead_of


_SAVE_ID: Final = re.compile(
    r"([^-]+)-(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})", re.ASCII | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class SaveId:
    """What tells one save from every other: written as ``run-step-counter``.

    Attributes:
        run: agreed once by the ranks of a trainer.
        step: the step that is saved.
        counter: how many saves this run began before this one.
    """

    run: str
    step: int
    counter: int

    def __str__(self) -> str:
        return f"{self.run}-{self.step}-{self.counter}"

    @classmethod
    def parse(cls, text: str) -> SaveId | None:
        """Read one, or None where the text is not one."""
        match = _SAVE_ID.fullmatch(text)
        return cls(match[1], int(match[2]), int(match[3])) if match else None

    def is_newer_than(self, other: SaveId) -> bool:
        """Whether it is a later save of the same run."""
        return self.run == other.run and self.counter > other.counter


class ReceiptFile(BaseModel):
    """A file that a receipt vouches for.

    ``digest`` is the xxh3-128 of ``over``: a torch.save file's zip central directory (which holds
    the CRC-32 of every record), a safetensors file's header, or the whole content.
    """

    model_config = ConfigDict(frozen=True)

    name: RelativePath
    size: Size
    digest: Digest
    over: Literal["central-directory", "header", "content"]


class Receipt(Record):
    """``actor/.receipts/rank_R.json``: what one rank has written, whole and durable.

    Attributes:
        save_id: run id, step and counter; the same on all ranks of one save.
        files: paths relative to ``actor/``. Rank 0's also lists the ``huggingface/`` and
            ``lora_adapter/`` files.
    """

    save_id: Annotated[str, Field(min_length=1, max_length=200)]
    step: Step
    rank: Annotated[int, Field(ge=0)]
    world_size: Annotated[int, Field(ge=1)]
    files: Annotated[tuple[ReceiptFile, ...], FailFast()]


class SaveOutcome(BaseModel):
    """What became of one save, by its identity.

    Attributes:
        model_only: of a save of ``torch.distributed.checkpoint``: whether it was seen to hold
            nothing but a model, and so is none to resume from; None where nobody has looked.
    """

    model_config = ConfigDict(frozen=True)

    identity: str
    outcome: Literal["published", "skipped", "quarantined"]
    sequence: Sequence | None = None
    model_only: bool | None = None


class Saves(Record):
    """``.syncd/saves.json``: the outcome of the last save in each step folder that still exists."""

    steps: dict[Step, SaveOutcome] = Field(default_factory=dict)


class Quarantine(Record):
    """``.syncd/quarantine/…json``: why a save could not be published."""

    step: Step
    identity: str
    error: str
    reason: Text
    time: float


class Reload(BaseModel):
    """How an engine came to the version that it serves: seconds by the explorer's clock.

    Attributes:
        sequence, step: the version.
        verify: to read all of it and to compare it with the manifest; with a stage folder that is
            one pass with the copy, or the wait for another explorer's copy.
        prepare: what the engine did while it still served, and what its user waited for.
        pause: how long it did not serve: from ``pause`` to the end of ``resume``.
        load: of that, what ``load`` took.
        staged: whether it was read from a copy on its own host; None where staging is off.
        not_staged: why it was not, where it should have been.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    sequence: Sequence
    step: Step
    verify: Seconds = 0.0
    prepare: Seconds = 0.0
    pause: Seconds = 0.0
    load: Seconds = 0.0
    staged: bool | None = None
    not_staged: Text | None = None

    @property
    def seconds(self) -> float:
        """From the moment that the version was held until it is served."""
        return self.verify + self.prepare + self.pause


class ExplorerReport(Record):
    """``.syncd/explorers/ID.json``: what an explorer says about itself.

    Attributes:
        sequence, step: the version that it serves; None before the first.
        nothing_new: how many waits ended without a newer version.
        refused: the newest version that it refused, and why.
        requests: how often it has required a sync; it waits now while its status says so.
        joined: the offer of a transfer that it has joined.
        reload: how it came to the version that it serves.
        fault: why it cannot be relied on: what its engine serves is not known, or nothing follows
            the job any more; None while all is well.
        workers: how many ranks of a weight group it is; 0 where it takes no part in broadcasts, as
            an explorer of before there were any, which says nothing of it.
        group: the name of the weight group that all its workers have open; None where they have
            none, or one of them has failed.
        received: the save id of the weights that it serves, where they came by a broadcast: then
            ``step`` is theirs, and ``sequence`` that of the newest version it holds the files of.
    """

    name: str
    session: SessionId
    status: Literal["running", "require_sync", "stopped"]
    sequence: Sequence | None = None
    step: Step | None = None
    nothing_new: Size = 0
    refused: Text | None = None
    requests: Size = 0
    joined: str | None = None
    reload: Reload | None = None
    fault: Text | None = None
    workers: Size = 0
    group: str | None = None
    received: str | None = None
    time: float

    @property
    def pause(self) -> float | None:
        """How long the engine did not serve while it loaded what it serves; None: not known."""
        if self.reload is None or self.reload.sequence != self.sequence:
            return None
        return self.reload.pause


class TrainerReport(Record):
    """``.syncd/trainer.json``: what the trainer says about itself.

    Attributes:
        step: the step that it last announced a save for; None before the first.
        name, session: None in the report of a trainer that does not register: then its status
            alone says whether it works.
        nothing_new: how often it has told explorers that wait that nothing newer will come.
    """

    run_id: str
    world_size: Annotated[int, Field(ge=1)]
    status: Literal["running", "require_sync", "stopped"]
    step: Step | None = None
    name: str | None = None
    session: SessionId | None = None
    nothing_new: Size = 0
    time: float


class DaemonCounters(BaseModel):
    """What a daemon has done since it took over."""

    model_config = ConfigDict(frozen=True)

    published: int = 0
    rolled_back: int = 0
    skipped: int = 0
    quarantined: int = 0
    versions_retired: int = 0
    steps_pruned: int = 0
    merged_bytes: int = 0


class MergeProgress(BaseModel):
    """How far the merge is that the daemon is at.

    Attributes:
        step: whose save.
        done, total: bytes of tensors.
        seconds: since it began, by the daemon's clock.
    """

    model_config = ConfigDict(frozen=True)

    step: Step
    done: Size
    total: Size
    seconds: Seconds


class DaemonReport(Record):
    """``.syncd/daemon.json``: state of the active daemon, for people and ``syncd status``.

    Attributes:
        paused: the id of the pause that this daemon keeps to; None where it publishes.
        memory_dir: the second job that the same process serves, on its own host.
        merge: how far it is, while the state is ``merging`` and some of it is done. It may be some
            seconds old.
    """

    session: str
    host: str
    pid: int
    epoch: int
    state: Literal["watching", "merging", "stopped"]
    detail: Text = ""
    sequence: Sequence | None = None
    step: Step | None = None
    paused: str | None = None
    memory_dir: Text | None = None
    counters: DaemonCounters = DaemonCounters()
    merge: MergeProgress | None = None
    time: float


class PublishNotice(Record):
    """``.syncd/publish.lock``: what is on its way. A hint only."""

    sequence: Sequence
    step: Step
    session: str


class AuditLine(Record):
    """One line of ``.syncd/audit.jsonl``: one deletion."""

    time: float
    what: Literal["version", "step", "lease"]
    name: Text
    why: Text
    session: str


class JournalLine(Record):
    """One line of ``.syncd/journal.jsonl``: what the active daemon did, or saw explorers do.

    Times are by that daemon's clock. What does not belong to an event is None.

    Attributes:
        event: ``active`` (a daemon took over), ``published``, ``adopted`` (a version that a daemon
            before this one had finished is LATEST), ``rolled_back``, ``live`` (an explorer serves
            it), ``skipped``, ``quarantined``, ``refused`` (a rollback).
        version: the version that it is about.
        step: its step, or that of the save.
        kind, bytes: of the version that was published.
        seconds: of ``published`` the merge, to LATEST; of ``live`` since LATEST named the version,
            None where a daemon before this one published it.
        pause: of ``live``: seconds for which the explorer's engine did not serve while it loaded
            the version, as its report says; None where it does not.
        latency: seconds from the first look that found the save whole to LATEST.
        of: the version that is served again.
        by: who asked for a rollback.
        explorer: who serves it.
        why: why it was quarantined or refused.
    """

    time: float
    event: Literal[
        "active", "published", "adopted", "rolled_back", "live", "skipped", "quarantined", "refused"
    ]
    version: Sequence | None = None
    step: Step | None = None
    kind: Kind | None = None
    bytes: Size | None = None
    seconds: Seconds | None = None
    pause: Seconds | None = None
    latency: Seconds | None = None
    of: Sequence | None = None
    by: Text | None = None
    explorer: Text | None = None
    why: Text | None = None
