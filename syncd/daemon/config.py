"""The keys of the daemon's configuration and their types; ``configuration.py`` reads the values.

People may write durations and sizes with a unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

from syncd.checkpoint.tensor_rules import Cast
from syncd.protocol.names import STATE_POINTER
from syncd.protocol.records import LONGEST_LEASE_TIME, SHORTEST_LEASE_TIME, Names

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", re.ASCII)


@dataclass(frozen=True)
class Quantity:
    """Marks a number that may be written with a unit.

    Attributes:
        unit: the unit of a plain number, for messages.
        examples: examples for messages.
        units: unit as written → its size in ``unit``.
    """

    unit: str
    examples: str
    units: tuple[tuple[str, float], ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Read text with a unit first; pydantic's own rules follow."""
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def read(self, value: object) -> object:
        """A number for text with a unit; anything else as it is.

        Raises:
            ValueError: the value is true or false, which Python counts as 1 and 0.
        """
        if isinstance(value, bool):
            raise ValueError("no number")  # noqa: TRY004 - pydantic hears of no TypeError
        if not isinstance(value, str) or not (found := _WRITTEN.fullmatch(value.strip())):
            return value
        size = dict(self.units).get(found[2])
        if size is None:
            return value
        number = float(found[1]) * size
        return int(number) if number.is_integer() else number


@dataclass(frozen=True)
class Suffix:
    """Marks a path that must have a certain suffix.

    Attributes:
        suffix: the required ending.
    """

    suffix: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check the value that pydantic has read."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: Path) -> Path:
        """The path as it is.

        Raises:
            ValueError: it ends otherwise.
        """
        if value.suffix != self.suffix:
            raise ValueError(f"it does not end with {self.suffix}")
        return value


SECONDS: Final = Quantity(
    "seconds",
    '"500ms", "30s", "5min", "2h"',
    (("ms", 0.001), ("s", 1), ("min", 60), ("h", 3600), ("d", 86400)),
)
BYTES: Final = Quantity(
    "bytes",
    '"500MB", "64GB", "1GiB"',
    (
        *((f"{prefix}B", 1000**power) for power, prefix in enumerate(("", "k", "M", "G", "T"))),
        *((f"{prefix}iB", 1024**power) for power, prefix in enumerate(("", "K", "M", "G", "T"))),
        ("KB", 1000),
    ),
)
_COUNT = Quantity("", "", ())

Seconds = Annotated[float, SECONDS]
Bytes = Annotated[int, BYTES]
Count = Annotated[int, _COUNT]
#: A file that the node exporter reads.
PromFile = Annotated[Path, Suffix(".prom")]


class DaemonConfig(BaseModel):
    """Every key with its default; times in seconds, sizes in bytes.

    Attributes:
        pointer: the file that names the step to publish. Plain verl jobs have only
            ``latest_checkpointed_iteration.txt``.
        tick: how often to look at the job if no event reports a change.
        keep: how many of the newest versions to keep besides leased ones; LATEST is one of them.
        deltas: whether to make a delta to each new version from the one before it, which explorers
            that stage on another filesystem read instead: ``on``, ``off``, or ``auto``, while two
            or more live explorers could use one.
        keep_deltas: how many of the newest deltas to keep at most; fewer if their bytes together
            are more than half of a version's.
        digests: whether versions carry xxh3-128 digests, which explorers check.
        cast: the dtype to cast floating tensors of versions to: ``bf16``, ``fp16`` or ``fp32``,
            rounded as torch does; None keeps the saved dtypes. Integers, bool and fp8 stay.
        dcp_prefix: the prefix of the model's tensor names in saves of
            ``torch.distributed.checkpoint``, e.g. ``model.``; the daemon removes it. None: detect.
        names: the names of the tensors in versions: ``hub``, those of the model's checkpoints on
            the hub, or ``trainer``, those of the trainer's module. None: those of the job's newest
            version; in a new job ``hub`` if all live explorers take them, else ``trainer``.
        max_shard_size: the most bytes of tensors in one file of a version.
        copy_threads: how many files of a version to write at a time; never more than there are
            processors.
        prune_steps: whether to delete step folders that were published or skipped.
        prune_foreign: whether to do so also for saves without receipts in a job that has no
            ``latest_state_dict_iteration.txt``.
        refuse_nonfinite: whether to quarantine a save whose receipts name tensors with NaN or Inf,
            instead of publishing it with a warning.
        remote_timeout: how long to wait for a step folder that has neither weights nor the path of
            remote ones, before it is quarantined.
        dead_reader_grace: how long to keep a dead explorer's lease, because its engine may still
            read.
        leftover_grace: how old an orphaned temporary file must be before the daemon deletes it.
        memory_dir: a second job directory that the same process serves, on a memory filesystem that
            trainer, daemon and explorers of one host share. The daemon creates it if it is missing.
        exit_when_idle: whether the daemon ends once all trainers and explorers are gone, at least
            one was there, and nothing is left to publish.
        hang_time: if storage has not answered for this long, the process ends itself. It must be
            longer than storage takes to write one file of ``max_shard_size``, and than the limit
            for reading a pickle (300 s).
        shared_group: a group, by name or number, that trainers, explorers and this daemon all
            belong to; it may read and write all files that the daemon makes.
        lease_time: a process without a heartbeat for this long counts as dead. It takes effect
            only in a new job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pointer: Literal["latest_state_dict_iteration.txt", "latest_checkpointed_iteration.txt"] = (
        STATE_POINTER
    )
    tick: Annotated[Seconds, Field(gt=0, le=60)] = 1.0
    keep: Annotated[Count, Field(ge=1)] = 2
    deltas: Literal["auto", "on", "off"] = "auto"
    keep_deltas: Annotated[Count, Field(ge=1)] = 16
    digests: bool = True
    cast: Cast | None = None
    dcp_prefix: str | None = None
    names: Names | None = None
    max_shard_size: Annotated[Bytes, Field(ge=1)] = 1_000_000_000
    copy_threads: Annotated[Count, Field(ge=1, le=64)] = 4
    prune_steps: bool = True
    prune_foreign: bool = False
    refuse_nonfinite: bool = False
    remote_timeout: Annotated[Seconds, Field(ge=0)] = 60.0
    dead_reader_grace: Annotated[Seconds, Field(ge=0)] = 300.0
    leftover_grace: Annotated[Seconds, Field(gt=0)] = 900.0
    memory_dir: Path | None = None
    exit_when_idle: bool = False
    hang_time: Annotated[Seconds, Field(gt=0)] = 600.0
    shared_group: str | None = None
    lease_time: Annotated[Seconds, Field(ge=SHORTEST_LEASE_TIME, le=LONGEST_LEASE_TIME)] = 30.0


#: The keys that a running daemon reloads; all others need a restart. Add a new key here only if the
#: loop applies it between two rounds.
LIVE_KEYS: Final = frozenset(
    {
        "tick",
        "keep",
        "deltas",
        "keep_deltas",
        "digests",
        "cast",
        "names",
        "max_shard_size",
        "copy_threads",
        "prune_steps",
        "prune_foreign",
        "refuse_nonfinite",
        "remote_timeout",
        "dead_reader_grace",
        "leftover_grace",
        "exit_when_idle",
        "log_format",
        "log_level",
    }
)


class RunConfig(DaemonConfig):
    """All settings of ``syncd run``: those of a daemon and those of its process.

    Attributes:
        job: the job directory.
        root: instead of one job, a folder that contains jobs, which may come and go.
        concurrent_merges: how many jobs below ``root`` may merge saves at the same time.
        metrics_port: the port on 127.0.0.1 where metrics are served; 0 for none.
        metrics_textfile: a file of this host that metrics are written to, for the node exporter.
        log_format: lines for people, or one JSON object a line.
        log_level: the lowest level to log.
    """

    job: Path | None = None
    root: Path | None = None
    concurrent_merges: Annotated[Count, Field(ge=1)] = 2
    metrics_port: Annotated[Count, Field(ge=0, le=65535)] = 0
    metrics_textfile: PromFile | None = None
    log_format: Literal["human", "json"] = "human"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
