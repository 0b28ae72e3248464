"""What the daemon can be told. ``configuration.py`` says where it is told from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from syncd.checkpoint.tensor_rules import Cast
from syncd.daemon.quantities import Bytes, Count, PromFile, Seconds
from syncd.protocol.names import STATE_POINTER


class DaemonConfig(BaseModel):
    """Every key with its default; times in seconds, sizes in bytes.

    Attributes:
        pointer: the file that names the step to publish. Plain verl jobs have only
            ``latest_checkpointed_iteration.txt``.
        tick: how often the job is looked at when no event says that something changed.
        keep: how many versions stay published besides those that are leased; LATEST is one.
        digests: whether versions carry xxh3-128 digests, which explorers check.
        cast: what floating tensors of versions become: ``bf16``, ``fp16`` or ``fp32``, rounded as
            torch does; None for what the trainer saved. Integers, bool and fp8 stay.
        dcp_prefix: what the names of the model's tensors begin with in saves of
            ``torch.distributed.checkpoint``, e.g. ``model.``; it is taken away. None to find out.
        max_shard_size: the most bytes of tensors in one file of a version.
        copy_threads: how many files of a version are written at a time, and no more than there are
            processors.
        prune_steps: whether step folders that were published or skipped are deleted.
        prune_foreign: whether that goes also for saves without receipts in a job that has no
            ``latest_state_dict_iteration.txt``.
        remote_timeout: how long a step folder that has neither weights nor the path of remote ones
            is waited for, before it is quarantined.
        dead_reader_grace: how long a dead explorer's lease is kept; an engine may read on.
        leftover_grace: how long a temporary file of a killed process lies still before it goes.
        memory_dir: a second job directory that the same process serves, on a memory filesystem that
            trainer, daemon and explorers of one host share. Its folder is made where it is missing.
        exit_when_idle: whether the daemon ends once all trainers and explorers are gone, of which
            it has seen one at least, and nothing is left to publish.
        hang_time: after how long without an answer of storage this process ends itself. Longer than
            storage takes to write one file of ``max_shard_size`` out, and than a pickle may be read
            (300 s).
        shared_group: a group, by name or number, that trainers, explorers and this daemon are all
            in: what the daemon makes is the group's, to read and to write.
        lease_time: after how long without a heartbeat a process counts as dead. Only heard in a job
            that has none yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pointer: Literal["latest_state_dict_iteration.txt", "latest_checkpointed_iteration.txt"] = (
        STATE_POINTER
    )
    tick: Annotated[Seconds, Field(gt=0, le=60)] = 1.0
    keep: Annotated[Count, Field(ge=1)] = 2
    digests: bool = True
    cast: Cast | None = None
    dcp_prefix: str | None = None
    max_shard_size: Annotated[Bytes, Field(ge=1)] = 1_000_000_000
    copy_threads: Annotated[Count, Field(ge=1, le=64)] = 4
    prune_steps: bool = True
    prune_foreign: bool = False
    remote_timeout: Annotated[Seconds, Field(ge=0)] = 60.0
    dead_reader_grace: Annotated[Seconds, Field(ge=0)] = 300.0
    leftover_grace: Annotated[Seconds, Field(gt=0)] = 900.0
    memory_dir: Path | None = None
    exit_when_idle: bool = False
    hang_time: Annotated[Seconds, Field(gt=0)] = 600.0
    shared_group: str | None = None
    lease_time: Annotated[Seconds, Field(gt=0, le=3600)] = 30.0


#: What a running daemon hears of; all else needs a restart. A new key belongs here only once the
#: loop takes it over between two rounds.
LIVE_KEYS: Final = frozenset(
    {
        "tick",
        "keep",
        "digests",
        "cast",
        "max_shard_size",
        "copy_threads",
        "prune_steps",
        "prune_foreign",
        "remote_timeout",
        "dead_reader_grace",
        "leftover_grace",
        "exit_when_idle",
        "log_format",
        "log_level",
    }
)


class RunConfig(DaemonConfig):
    """What ``syncd run`` can be told: a daemon's configuration, and its process's.

    Attributes:
        job: the job directory.
        root: instead of one job, the folder whose folders are jobs, as they come and go.
        concurrent_merges: of how many jobs below ``root`` saves are merged at a time.
        metrics_port: the port on 127.0.0.1 where metrics are served; 0 for none.
        metrics_textfile: a file of this host that metrics are written to, for the node exporter.
        log_format: lines for people, or one JSON object a line.
        log_level: the least that is logged.
    """

    job: Path | None = None
    root: Path | None = None
    concurrent_merges: Annotated[Count, Field(ge=1)] = 2
    metrics_port: Annotated[Count, Field(ge=0, le=65535)] = 0
    metrics_textfile: PromFile | None = None
    log_format: Literal["human", "json"] = "human"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
