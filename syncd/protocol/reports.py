"""Reports: files in which each trainer, explorer and daemon describes itself."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from syncd.protocol.policy import SyncSettings, SyncStyle, Version
from syncd.protocol.records import Names, Record, Seconds, Sequence, SessionId, Size, Step, Text

#: The number of loads that an explorer's report lists, the newest loads. The daemon misses no load,
#: because it reads each report at least once in 8 rounds, and publishes at most one version a
#: round.
LOADS_KEPT: Final = 16
#: Seconds between two signs of life while a delta is being made.
DELTA_SIGN: Final = 1.0


class Load(BaseModel):
    """A load: an explorer began to serve a version from files.

    Attributes:
        sequence: the version.
        time: seconds since the epoch, by the explorer's clock.
        pause: seconds for which the engine did not serve during the load; None if nobody measured
            the pause.
        delta_bytes: the bytes of the deltas that were read instead of the version's files; None if
            the version's files were read.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    sequence: Sequence
    time: float
    pause: Seconds | None = None
    delta_bytes: Size | None = None


class Reload(BaseModel):
    """Durations of the load of an engine's present version, in seconds by the explorer's clock.

    Attributes:
        sequence, step: the version; ``sequence`` is 0 for a step that was built for a bench.
        verify: the time to read the whole version and compare it with the manifest. With a stage
            folder this time includes the copy, or the wait for another explorer's copy.
        prepare: the time of the engine's preparations, while the engine still serves, and of the
            user's ``before_load``.
        pause: the time for which the engine did not serve: from the start of its ``pause`` to the
            end of its ``resume``.
        load: the part of ``pause`` in which the engine's ``load`` ran.
        staged: True if the version was read from a copy on the explorer's host; None if staging is
            off.
        not_staged: the reason why the version was not staged, although staging is on.
        full_bytes: the bytes of the version's own files that this explorer read from the job to
            make the copy. The number is 0 if another process on the host made the copy; None if
            staging is off.
        delta_bytes: the bytes of deltas that were read for the version; None if no delta was used.
        no_delta: the reason why no delta was used, if a delta was possible.
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
        """The seconds from the lease of the version until the engine serves it."""
        return self.verify + self.prepare + self.pause


def loads_with(
    loads: tuple[Load, ...], version: Version | None, time: float, reload: Reload | None
) -> tuple[Load, ...]:
    """Add the load of a version to an explorer's list of loads, and return the new list.

    If the version is not newer than the listed versions, the list stays unchanged. The list keeps
    the newest :data:`LOADS_KEPT` loads.

    Args:
        loads: the list so far.
        version: the version that the engine serves now; None to add no load.
        time: the time at which this version was loaded.
        reload: the times of the engine's most recent load, if known. These times are used only if
            that load was of this version.
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
    """A participant's sync settings, which must be equal in a trainer and its explorers.

    Attributes:
        style: the side that decides when weights travel.
        trainer_interval, explorer_interval: steps between two syncs of the trainer, and of an
            explorer.
    """

    model_config = ConfigDict(frozen=True)

    style: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    trainer_interval: Size
    explorer_interval: Size

    @classmethod
    def of(cls, settings: SyncSettings | None) -> SyncTerms | None:
        """The terms of these settings; None if ``settings`` is None."""
        if settings is None:
            return None
        return cls(
            style=settings.style.value,
            trainer_interval=settings.trainer_interval,
            explorer_interval=settings.explorer_interval,
        )

    def unlike(self, explorer: SyncTerms) -> str:
        """The differences between an explorer's settings and a trainer's settings (this object).

        The differences have the names that the settings have in SyncSettings.

        An explorer with style ``fully_async`` uses no interval. The style of such an explorer
        matters only if the trainer's style is ``explorer_driven``, because such a trainer waits for
        requests.

        Returns:
            The differences, in words; empty if there are none.
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
        sequence, step: the version that the explorer serves; None before the first version.
        nothing_new: the number of waits that ended without a newer version.
        refused: the newest version that the explorer refused, and the reason.
        requests: the number of syncs that the explorer has required. The explorer waits for a sync
            while its status is ``require_sync``.
        joined: the id of the offer of a transfer that the explorer has joined.
        reload: the times of loading the version that the explorer serves.
        loads: the newest loads of versions of this job, from old to new. The list includes loads of
            earlier explorers with this name. None if the explorer's release has no such list.
        fault: the reason why nobody can rely on the explorer: its engine's weights are unknown, or
            the explorer no longer follows the job. None if there is no fault.
        workers: the number of the explorer's ranks in a weight group; 0 if the explorer, or its
            release, does not take part in broadcasts.
        group: the name of the weight group that is open in all the explorer's workers; None if
            there is no such group, or if a worker has failed.
        received: the save id of the weights that the explorer serves, if a broadcast brought these
            weights. In that case ``step`` is the step of these weights, and ``sequence`` is the
            newest version whose files the explorer holds.
        bench: the step that the explorer evaluates. While the explorer evaluates, it does not
            follow the job: ``sequence``, ``step`` and ``reload`` are None, and nobody waits for the
            explorer.
        starting: the reason why the explorer waits before it runs for the first time. While the
            explorer waits, its status is ``stopped``, so that nobody waits for the explorer.
        sync: the sync settings of the explorer; None if the explorer has no sync settings.
        delta_base: the newest version of which the explorer's host has a whole copy, outside the
            filesystem of the job. A delta can make the next version from this copy. None if there
            is no such copy, or if the explorer's release has no deltas.
        hub_names: True if the explorer also accepts versions with the hub's names. Older releases
            do not write this field.
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
        """Seconds for which the engine did not serve while it loaded its version, if known."""
        if self.reload is None or self.reload.sequence != self.sequence:
            return None
        return self.reload.pause

    @property
    def last_loads(self) -> tuple[Load, ...]:
        """The newest loads; only the most recent load if the explorer's release lists none."""
        if self.loads is not None:
            return self.loads
        if self.sequence is None or self.received is not None:
            return ()  # weights from a broadcast are not a version's
        return (Load(sequence=self.sequence, time=self.time, pause=self.pause),)


class TrainerReport(Record):
    """``.syncd/trainer.json``: the trainer's report about itself.

    Attributes:
        step: the step of the newest save that the trainer announced; None before the first save.
        name, session: the trainer's name and session; None if the trainer does not register. In
            that case only ``status`` shows whether the trainer works.
        nothing_new: how often the trainer has told waiting explorers that no newer weights will
            follow.
        sync: the sync settings of the trainer; None if the trainer has no sync settings.
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
        done, total: the merged bytes of tensors, and the bytes of all tensors.
        seconds: the seconds since the merge began, by the daemon's clock.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    step: Step
    done: Size
    total: Size
    seconds: Seconds


class DeltaProgress(Record):
    """``.syncd/delta_progress.json``: the state of the newest delta. Only a hint.

    While the daemon makes the delta, it replaces the file every :data:`DELTA_SIGN` seconds for as
    long as the work advances.

    Attributes:
        sequence, base: the target version, and the version to which the delta is applied.
        state: ``making``: the daemon is making the delta; ``made``: the delta is in ``deltas/``;
            ``none``: the daemon made no delta, and ``why`` has the reason.
        done, total: the bytes of the version's tensors that were compared, and the bytes of all its
            tensors.
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
        memory_dir: the memory directory: a second job, which the same process serves on its host.
        merge: the progress of the merge while the state is ``merging``. This progress may be some
            seconds old.
        release: the daemon's release; None if the release has no bench requests.
        names: the origin of the tensors' names in LATEST's version; None if the hub's names and the
            trainer's names of that version are the same.
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
