"""What trainers, explorers and the daemon say about themselves, each in a file that it replaces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from syncd.protocol.records import Record, Seconds, Sequence, SessionId, Size, Step, Text


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

    published: Size = 0
    rolled_back: Size = 0
    skipped: Size = 0
    quarantined: Size = 0
    versions_retired: Size = 0
    steps_pruned: Size = 0
    merged_bytes: Size = 0


class MergeProgress(BaseModel):
    """How far the merge is that the daemon is at.

    Attributes:
        step: whose save.
        done, total: bytes of tensors.
        seconds: since it began, by the daemon's clock.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

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
