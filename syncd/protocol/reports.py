"""Reports: trainers, explorers and the daemon each describe themselves in a file of their own."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from syncd.protocol.policy import SyncSettings, SyncStyle, Version
from syncd.protocol.records import Names, Record, Seconds, Sequence, SessionId, Size, Step, Text

#: How many of its last loads an explorer's report lists. The daemon misses none: it reads each
#: report at least once in half as many rounds, and publishes at most one version a round.
LOADS_KEPT: Final = 16
#: Seconds between two signs of life while a delta is being made.
DELTA_SIGN: Final = 1.0


class Load(BaseModel):
    """An explorer began to serve a version from its files.

    Attributes:
        sequence: the version.
        time: seconds since the epoch, by the explorer's clock.
        pause: seconds for which its engine did not serve meanwhile; None if nobody measured that.
        delta_bytes: the bytes of the deltas that it was read from; None if its files were read.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    sequence: Sequence
    time: float
    pause: Seconds | None = None
    delta_bytes: Size | None = None


class Reload(BaseModel):
    """The times of loading the version that an engine serves: seconds by the explorer's clock.

    Attributes:
        sequence, step: the version; sequence 0 for a step that was built for a bench.
        verify: reading all of it and comparing it with the manifest; with a stage folder this
            includes the copy, or the wait for another explorer's copy.
        prepare: the engine's work while it still served, and the time that its user waited.
        pause: how long the engine did not serve: from ``pause`` to the end of ``resume``.
        load: the part of the pause for ``load``.
        staged: whether it was read from a copy on the explorer's host; None if staging is off.
        not_staged: why it was not staged, if it should have been.
        full_bytes: the bytes of the version's own files that this explorer read from the job to
            copy it: 0 if another process on its host made the copy; None if staging is off.
        delta_bytes: the bytes of deltas that were read for it; None if no delta was used.
        no_delta: why no delta was used, if one could have been.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

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
    no_delta: Text | None = None

    @property
    def seconds(self) -> float:
        """The seconds from the lease of the version until it is served."""
        return self.verify + self.prepare + self.pause


def loads_with(
    loads: tuple[Load, ...], version: Version | None, time: float, reload: Reload | None
) -> tuple[Load, ...]:
    """An explorer's last loads, with a version's if that is newer; the oldest are dropped.

    Args:
        loads: the last loads.
        version: the version that is served now; None to add none.
        time: the time of its load.
        reload: the times of that load, if known.
    """
    if version is None or (loads and version.sequence <= loads[-1].sequence):
        return loads
    known = reload if reload is not None and reload.sequence == version.sequence else None
    load = Load(
        sequence=version.sequence,
        time=time,
        pause=known and known.pause,
        delta_bytes=known and known.delta_bytes,
    )
    return (*loads, load)[-LOADS_KEPT:]


class SyncTerms(BaseModel):
    """The settings that must be equal in a trainer and its explorers, as one of them reports them.

    Attributes:
        style: the side that decides when weights travel.
        trainer_interval, explorer_interval: steps between two syncs of either side.
    """

    model_config = ConfigDict(frozen=True)

    style: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    trainer_interval: Size
    explorer_interval: Size

    @classmethod
    def of(cls, settings: SyncSettings | None) -> SyncTerms | None:
        """The terms of some settings; None if there are no settings."""
        if settings is None:
            return None
        return cls(
            style=settings.style.value,
            trainer_interval=settings.trainer_interval,
            explorer_interval=settings.explorer_interval,
        )

    def unlike(self, explorer: SyncTerms) -> str:
        """The differences between an explorer's settings and these, a trainer's; empty if none.

        An explorer that follows in the background uses no interval; it only has to ask for syncs if
        the trainer waits for requests.
        """
        asked, follows = SyncStyle.EXPLORER_DRIVEN.value, SyncStyle.FULLY_ASYNC.value
        compared = []
        if explorer.style != follows or self.style == asked:
            compared.append(("style", self.style, explorer.style))
        if self.style == explorer.style != asked and self.style != follows:
            ours, theirs = self, explorer
            compared.append(("the trainer's interval", *_both(ours, theirs, "trainer_interval")))
            compared.append(("the explorer's interval", *_both(ours, theirs, "explorer_interval")))
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
        sequence, step: the version that it serves; None before the first.
        nothing_new: how many waits ended without a newer version.
        refused: the newest version that it refused, and why.
        requests: how often it has required a sync; it waits now while its status says so.
        joined: the id of the offer of a transfer that it has joined.
        reload: the times of loading the version that it serves.
        loads: its last loads of versions of this job, the newest last, with those of earlier
            explorers of its name; None in the report of a release that does not list them.
        fault: why it cannot be relied on: its engine's weights are unknown, or nothing follows the
            job any more; None while all is well.
        workers: how many ranks of a weight group it has; 0 if it takes no part in broadcasts, as
            for an explorer of a release without broadcasts.
        group: the name of the weight group that all its workers have open; None if there is none,
            or a worker has failed.
        received: the save id of the weights that it serves, if they came by a broadcast. Then
            ``step`` is their step, and ``sequence`` the newest version whose files it holds.
        bench: the step that it evaluates. Meanwhile it does not follow the job: ``sequence``,
            ``step`` and ``reload`` are None, and nobody waits for it.
        starting: the reason why it waits before it runs for the first time. Meanwhile its status is
            ``stopped``, so that nobody waits for it.
        sync: the settings that it syncs by; None if it was given none.
        delta_base: the newest version of which its host has a whole copy, on another filesystem
            than the job's, so that a delta can make the next version from it; None if there is
            none, as in the reports of releases before deltas.
        hub_names: whether it also takes versions with the hub's names. Older releases do not report
            it.
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
    loads: tuple[Load, ...] | None = None
    fault: Text | None = None
    workers: Size = 0
    group: str | None = None
    received: str | None = None
    bench: Step | None = None
    starting: Text | None = None
    sync: SyncTerms | None = None
    delta_base: Sequence | None = None
    hub_names: bool = False
    time: float

    @property
    def pause(self) -> float | None:
        """Seconds that the engine did not serve while it loaded its version; None: not known."""
        if self.reload is None or self.reload.sequence != self.sequence:
            return None
        return self.reload.pause

    @property
    def last_loads(self) -> tuple[Load, ...]:
        """Its last loads; if its release does not name them, the load of the version it serves."""
        if self.loads is not None:
            return self.loads
        if self.sequence is None or self.received is not None:
            return ()  # weights from a broadcast are not a version's
        return (Load(sequence=self.sequence, time=self.time, pause=self.pause),)


class TrainerReport(Record):
    """``.syncd/trainer.json``: the trainer's report about itself.

    Attributes:
        step: the step that it last announced a save for; None before the first.
        name, session: None in the report of a trainer that does not register: then only its status
            shows whether it works.
        nothing_new: how often it has told waiting explorers that nothing newer will come.
        sync: the settings that it syncs by; None if it was given none.
    """

    run_id: str
    world_size: Annotated[int, Field(ge=1)]
    status: Literal["running", "require_sync", "stopped"]
    step: Step | None = None
    name: str | None = None
    session: SessionId | None = None
    nothing_new: Size = 0
    sync: SyncTerms | None = None
    time: float


class DaemonCounters(BaseModel):
    """Counters of a daemon's work since it took over."""

    model_config = ConfigDict(frozen=True)

    published: Size = 0
    rolled_back: Size = 0
    skipped: Size = 0
    quarantined: Size = 0
    versions_retired: Size = 0
    steps_pruned: Size = 0
    deltas_made: Size = 0
    deltas_pruned: Size = 0
    merged_bytes: Size = 0


class MergeProgress(BaseModel):
    """The progress of the daemon's current merge.

    Attributes:
        step: the step of the save.
        done, total: bytes of tensors.
        seconds: since the merge began, by the daemon's clock.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    step: Step
    done: Size
    total: Size
    seconds: Seconds


class DeltaProgress(Record):
    """``.syncd/delta_progress.json``: the delta that is being made, or was made last. A hint.

    While it is being made, the daemon replaces the file every :data:`DELTA_SIGN` seconds for as
    long as the work advances.

    Attributes:
        sequence, base: the target version, and the version that the delta starts from.
        state: ``making``; ``made``: it is in ``deltas/``; or ``none``: there is none, for the
            reason ``why``.
        done, total: the compared bytes of the version's tensors, and all of them.
    """

    sequence: Sequence
    base: Sequence
    state: Literal["making", "made", "none"]
    done: Size = 0
    total: Size = 0
    why: Text | None = None
    time: float


class DaemonReport(Record):
    """``.syncd/daemon.json``: state of the active daemon, for people and ``syncd status``.

    Attributes:
        paused: the id of the pause that is in force; None if the daemon publishes.
        memory_dir: the second job that the same process serves, on its own host.
        merge: the merge's progress while the state is ``merging``. It may be some seconds old.
        release: the daemon's release; None for a release without bench requests.
        names: whose names the tensors of LATEST have; None if they could have no others.
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
    release: Text | None = None
    names: Names | None = None
    time: float
