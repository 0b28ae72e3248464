"""Reports in which trainer, explorers and daemon describe themselves, and their agreements."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, model_validator

from syncd.protocol.mirrored import Mirroring
from syncd.protocol.names import STATE_POINTER, PointerName
from syncd.protocol.policy import SyncSettings, SyncStyle, Version, after_broadcast, lag
from syncd.protocol.records import (
    Fields,
    Latest,
    Names,
    Record,
    Seconds,
    Sequence,
    SessionId,
    Size,
    Step,
    Text,
    Tip,
)


class OfferedMember(Fields):
    """An explorer that receives an offer; ``workers`` is the number of its ranks."""

    name: str
    session: str
    workers: Annotated[int, Field(ge=1)] = 1


OfferId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class Offer(Record):
    """``.syncd/broadcast/offer.json``: the trainer is ready to transfer the weights of a step.

    Attributes:
        members: all explorers that must join before the transfer.
        decided: a copy of the verdict, for waiting explorers; None while the offer is open.
            ``files``: the offer was never open, because the weights travel by the checkpoint path.
    """

    offer: OfferId
    session: str
    step: Step
    members: tuple[OfferedMember, ...]
    decided: Literal["go", "off", "files"] | None = None


class OfferVerdict(Record):
    """``.syncd/broadcast/OFFER.verdict``: the outcome of an offer; the first verdict counts."""

    verdict: Literal["go", "off"]
    session: str


class GroupMember(OfferedMember):
    """An explorer in a weight group: its workers have consecutive ranks from ``rank_offset`` on."""

    rank_offset: Annotated[int, Field(ge=1)]


class Rendezvous(Record):
    """``.syncd/broadcast/group.json``: the address at which the members of a decided offer meet.

    Rank 0 of the group is the trainer's rank 0. The workers of the explorers have the next ranks,
    in the order of the offer. Each new group has a higher ``generation``. ``save_id`` names the
    transferred weights.
    """

    offer: OfferId
    generation: Annotated[int, Field(ge=1, lt=2**63)]
    group_name: Annotated[str, Field(min_length=1, max_length=200)]
    address: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=1)]
    backend: Literal["nccl", "gloo"]
    members: tuple[GroupMember, ...]
    save_id: Annotated[str, Field(min_length=1, max_length=200)]

    @model_validator(mode="after")
    def _ranks_are_contiguous(self) -> Self:
        rank = 1
        for member in self.members:
            if member.rank_offset != rank:
                raise ValueError(
                    f"the first rank of {member.name} is {member.rank_offset}, but should be {rank}"
                )
            rank += member.workers
        if rank != self.world_size:
            raise ValueError(f"the group has {rank} ranks, but world_size is {self.world_size}")
        return self


class SavedState(Record):
    """``.syncd/meta/…``: the last finished iteration and the user's own state, for resuming."""

    iteration: Step
    state: dict[str, JsonValue] = Field(default_factory=dict)


#: The number of newest loads in an explorer's report. The daemon misses none, because it reads each
#: report at least once in 8 rounds, and publishes at most one version a round.
LOADS_KEPT: Final = 16


class Load(Fields):
    """A load: an explorer began to serve a version from files.

    Attributes:
        pause: seconds for which the engine did not serve; None if not measured.
    """

    sequence: Sequence
    time: float
    pause: Seconds | None = None


class Reload(Fields):
    """Durations of the load of an engine's present version, in seconds by the explorer's clock.

    Attributes:
        sequence: 0 for a step that was built for a bench.
        verify: reading the version and comparing it with the manifest. With a stage folder it
            includes the copy, or the wait for another explorer's copy.
        prepare: the wait for a turn to load, ``before_load``, and preparations while the engine
            still serves.
        pause: the time without service: from the start of ``pause`` to the end of ``resume``.
        load: the part of ``pause`` in which the engine's ``load`` ran.
        staged: True if a copy on the explorer's host was read; None if staging is off.
        not_staged: the reason why there was no such copy, although staging is on.
        full_bytes: the bytes of the version's own files that were read from the job to make the
            copy; 0 if another process made the copy; None if staging is off.
        delta_bytes: the bytes of deltas that were read, if any.
        fetch, rebuild: the parts of ``verify`` in which the deltas were read, and in which the copy
            was made from them and all digests were compared.
        no_delta: the reason why deltas were not used.
    """

    sequence: Size
    step: Step
    verify: Seconds = 0.0
    prepare: Seconds = 0.0
    pause: Seconds = 0.0
    load: Seconds = 0.0
    staged: bool | None = None
    not_staged: Text | None = None
    full_bytes: Size | None = None
    delta_bytes: Size | None = None
    fetch: Seconds | None = None
    rebuild: Seconds | None = None
    no_delta: Text | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the lease of the version until the engine serves it."""
        return self.verify + self.prepare + self.pause


def loads_with(
    loads: tuple[Load, ...], version: Version | None, time: float, reload: Reload | None
) -> tuple[Load, ...]:
    """The list ``loads``, with the load of ``version`` if it is newer than the listed versions.

    ``reload`` has the times of the engine's last load. It is ignored if that load was of another
    version.
    """
    if version is None or (loads and version.sequence <= loads[-1].sequence):
        return loads
    known = reload if reload is not None and reload.sequence == version.sequence else None
    load = Load(sequence=version.sequence, time=time, pause=known and known.pause)
    return (*loads, load)[-LOADS_KEPT:]


class SyncTerms(Fields):
    """Sync settings that must be equal in a trainer and its explorers. Intervals are in steps."""

    style: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    trainer_interval: Size
    explorer_interval: Size

    @classmethod
    def of(cls, settings: SyncSettings | None) -> SyncTerms | None:
        """The terms of these settings, if any."""
        if settings is None:
            return None
        return cls(
            style=settings.style.value,
            trainer_interval=settings.trainer_interval,
            explorer_interval=settings.explorer_interval,
        )

    def unlike(self, explorer: SyncTerms) -> str:
        """The differences of an explorer's settings from this trainer's, in words; empty if none.

        An explorer with style ``fully_async`` uses no interval. Its style matters only if the
        trainer's style is ``explorer_driven``, because such a trainer waits for requests.
        """
        asked, follows = SyncStyle.EXPLORER_DRIVEN.value, SyncStyle.FULLY_ASYNC.value
        compared = []
        if explorer.style != follows or self.style == asked:
            compared.append(("style", self.style, explorer.style))
        if self.style == explorer.style != asked and self.style != follows:
            ours, theirs = self, explorer
            if all(one.trainer_interval == one.explorer_interval for one in (ours, theirs)):
                compared.append(("sync_interval", *_both(ours, theirs, "trainer_interval")))
            else:
                for side in ("trainer", "explorer"):
                    name = f"{side}_sync_interval (default: sync_interval)"
                    compared.append((name, *_both(ours, theirs, f"{side}_interval")))
        return ", ".join(
            f"{name} is {ours} for the trainer and {theirs} for the explorer"
            for name, ours, theirs in compared
            if ours != theirs
        )


def _both(ours: SyncTerms, theirs: SyncTerms, name: str) -> tuple[str, str]:
    return str(getattr(ours, name)), str(getattr(theirs, name))


class ExplorerReport(Record):
    """``.syncd/explorers/ID.json``: an explorer's report about itself.

    Attributes:
        sequence, step: the served version; None before the first version.
        nothing_new: the number of waits that ended without a newer version.
        refused: the newest version that the explorer refused, and the reason.
        requests: the number of syncs that the explorer has required (``require_sync``).
        joined: the id of the offer that the explorer has joined.
        loads: the newest loads, oldest first, with the loads of earlier explorers of this name.
        fault: the reason why nobody can rely on the explorer, for example because it no longer
            follows the job.
        workers: the number of its ranks in a weight group; 0 if it takes no part in broadcasts.
        group: the weight group that is open in all workers, if any.
        save_id: the save of the served weights, if known.
        received: the save id of the served weights, if a broadcast brought them. ``step`` is then
            their step, and ``sequence`` is the newest version whose files the explorer holds.
        of_another_job: True if the engine serves weights of a job that was at this path before.
            ``sequence`` and ``step`` are then None.
        bench: the step that a bench evaluates. ``sequence``, ``step`` and ``reload`` are then None,
            and nobody waits for the explorer.
        starting: the reason why the explorer waits before its first run. Its status is then
            ``stopped``, so that nobody waits for it.
        hub_names: True if the explorer also accepts versions with the hub's names.
        follows_deltas, follows_tip: True if the explorer makes its copies from deltas, or also
            from whole saves; False after it could not, until it serves this save or a later one.
        fetching: the number of the tip from which it makes a copy now, if any.
        loading: True while it loads in its turn, and False while it waits for it; else None.
        mirror: set if it only copies versions elsewhere, so that nobody waits for it.
    """

    name: str
    session: SessionId
    status: Literal["running", "require_sync", "stopped"]
    sequence: Sequence | None = None
    step: Step | None = None
    save_id: str | None = None
    nothing_new: Size = 0
    refused: Text | None = None
    requests: Size = 0
    joined: str | None = None
    reload: Reload | None = None
    loads: tuple[Load, ...] = ()
    fault: Text | None = None
    workers: Size = 0
    group: str | None = None
    received: str | None = None
    of_another_job: bool = False
    bench: Step | None = None
    starting: Text | None = None
    sync: SyncTerms | None = None
    hub_names: bool = False
    follows_deltas: Annotated[bool, Field(alias="follows_ahead")] = False
    follows_tip: bool = False
    fetching: Sequence | None = None
    loading: bool | None = None
    mirror: Mirroring | None = None
    time: float

    def newest(self, latest: Latest) -> Latest | Tip:
        """The newest of what LATEST names that the explorer can serve."""
        tip = latest.tip
        follows = tip and (self.follows_tip if tip.root else self.follows_deltas)
        return tip if tip and follows else latest

    def served(self, newest: Version | None, run: str | None) -> Version | None:
        """The version that counts as served; None before the first one.

        For weights from a broadcast of the trainer's ``run`` see :func:`.after_broadcast`.
        """
        if self.sequence is None or self.step is None:
            return None
        held = Version(self.sequence, self.step, self.received or self.save_id)
        if self.received is None or newest is None or held.run != run:
            return held
        return after_broadcast(held, newest)

    def lag(self, latest: Latest | None, run: str | None) -> tuple[int | None, int | None]:
        """By how many versions and steps the newest is newer than what is served, if known.

        ``run`` is the trainer's. For the steps see :func:`.policy.lag`.
        """
        if latest is None or self.bench is not None:
            return None, None
        newest = Version.of(self.newest(latest))
        held = self.served(newest, run)
        # One that no longer follows the tip can serve a version above LATEST.
        versions = max(0, newest.sequence - ((held or self).sequence or 0))
        return versions, None if held is None else lag(held, newest)


class ResumedFrom(Fields):
    """The save from which a trainer resumed; ``save_id`` as in LATEST, None if it is not known."""

    step: Step
    save_id: str | None = None


class TrainerReport(Record):
    """``.syncd/trainer.json``: the trainer's report about itself.

    Attributes:
        step: the step of the save that was begun last; None before the first save.
        saving: the id of the save that was begun last, until it is announced.
        base: the save that ``saving`` is relative to, if it is a delta.
        deltas: True if the trainer's settings ask for deltas.
        no_deltas: why it makes none, unless the daemon has the reason.
        resumed_from: the save that its model holds; None after its first save.
        name, session: None if the trainer does not register. Then only ``status`` shows whether the
            trainer works.
        nothing_new: how often the trainer told waiting explorers that no newer weights will follow.
        mirror: set if its saves come from a mirror; ``fault`` tells why that cannot go on.
    """

    run_id: str
    world_size: Annotated[int, Field(ge=1)]
    status: Literal["running", "require_sync", "stopped"]
    step: Step | None = None
    saving: Annotated[str, Field(max_length=200)] | None = None
    base: Annotated[str, Field(max_length=200)] | None = None
    deltas: bool = False
    no_deltas: Annotated[Text | None, Field(alias="no_links")] = None
    resumed_from: ResumedFrom | None = None
    name: str | None = None
    session: SessionId | None = None
    nothing_new: Size = 0
    sync: SyncTerms | None = None
    mirror: Mirroring | None = None
    fault: Text | None = None
    time: float


class DaemonCounters(Fields):
    """Counters of a daemon's work since it took over."""

    published: Size = 0
    rolled_back: Size = 0
    linked: Size = 0
    skipped: Size = 0
    quarantined: Size = 0
    versions_pruned: Annotated[Size, Field(alias="versions_retired")] = 0
    steps_pruned: Size = 0
    deltas_pruned: Size = 0
    merged_bytes: Size = 0


class MergeProgress(Fields):
    """The progress of the current merge: bytes of tensors, and seconds since the merge began."""

    step: Step
    done: Size
    total: Size
    seconds: Seconds


class BuildSettings(Fields):
    """The daemon's settings for its versions; explorers build the steps that they evaluate so.

    ``names`` is None if the daemon chooses. A save without receipts is built once it has not
    changed for ``tick`` seconds.
    """

    cast: Literal["bf16", "fp16", "fp32"] | None = None
    names: Names | None = None
    dcp_prefix: Text | None = None
    max_shard_size: Size
    digests: bool
    tick: Seconds


Reason = Literal[
    "room", "memory", "rights", "storage", "filesystem", "pointer", "save", "prune", "record"
]


#: 0 if all is well, 1 for a warning, 2 if critical.
Level = Annotated[int, Field(ge=0, le=2)]


def tens(seconds: float) -> float:
    """Whole tens of seconds, because the daemon writes each change of its report."""
    return seconds // 10 * 10


class Problem(Fields):
    """Something that somebody should know.

    Attributes:
        what: what happened, and to which file.
        remedy: what to do.
    """

    level: Level = 0
    what: Text
    remedy: Text


class Blocked(Problem):
    """Work of the daemon that cannot go on until somebody acts.

    Attributes:
        reason: its kind, for metrics and alerts.
        level: 0 at first, then higher, by the daemon's clock.
        seconds: since the first failure, in steps of ten (:func:`tens`).
    """

    reason: Reason
    seconds: Seconds = 0.0


class Unpublished(Fields):
    """The announced save, which is neither served nor overtaken by a served one of its run.

    Attributes:
        level: 0 as long as that is to be expected.
        seconds: since it was announced, likewise.
    """

    step: Step
    level: Level = 0
    seconds: Seconds = 0.0


class DaemonReport(Record):
    """``.syncd/daemon.json``: state of the active daemon, for people and ``syncd status``.

    Attributes:
        process: as in a :class:`Claim`; empty if it is not known.
        blocked: what cannot go on until somebody acts, the worst first.
        unpublished: the save that waits to be served, if any.
        paused: the id of the pause that is in force, if any.
        memory_dir: the memory directory that the same process serves.
        merge: the progress in state ``merging``, possibly some seconds old.
        names: the origin of the tensor names in LATEST's version; None if the hub's names and the
            trainer's names are the same.
        takes_deltas: True if the trainer may save deltas now: the daemon takes them, and a live
            explorer follows the tip.
        no_deltas: why not.
        max_loading: how many explorers may load at a time; None for all.
        fold: the progress of the fold, if any.
    """

    session: SessionId
    host: str
    pid: int
    epoch: int
    state: Literal["watching", "merging", "stopped"]
    builds: BuildSettings
    detail: Text = ""
    sequence: Sequence | None = None
    step: Step | None = None
    paused: str | None = None
    memory_dir: Text | None = None
    counters: DaemonCounters = DaemonCounters()
    merge: MergeProgress | None = None
    names: Names | None = None
    takes_deltas: Annotated[bool, Field(alias="links")] = False
    no_deltas: Annotated[Text | None, Field(alias="no_links")] = None
    fold: MergeProgress | None = None
    max_loading: Annotated[int, Field(ge=1)] | None = None
    pointer: PointerName = STATE_POINTER
    process: Text = ""
    blocked: tuple[Blocked, ...] = ()
    unpublished: Unpublished | None = None
    time: float
