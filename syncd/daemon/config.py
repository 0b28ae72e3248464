"""The keys of the daemon's configuration and their types; ``configuration.py`` reads the values.

Durations and sizes may be written with a unit, for example ``"30s"`` or ``"1GiB"``.
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
        unit: the unit of a number without a written unit, for messages.
        units: a unit as people write it → its size, counted in ``unit``.
    """

    unit: str
    examples: str
    units: tuple[tuple[str, float], ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def read(self, value: object) -> object:
        """The number that a text with a unit means; any other value is returned unchanged.

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
    """Marks a path that must end with ``suffix``."""

    suffix: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: Path) -> Path:
        """The path, unchanged; raises ValueError if the path has another suffix."""
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
    """All keys of a daemon with their defaults; times are in seconds, sizes in bytes.

    Attributes:
        pointer: the file that names the step to publish. Plain verl jobs have only
            ``latest_checkpointed_iteration.txt``.
        tick: the time between two scans of the job if no event reports a change earlier.
        keep: how many of the newest versions to keep, LATEST included; leased versions stay too.
        deltas: whether to make a delta to each new version from the previous version, for explorers
            that stage on another filesystem: ``on``, ``off``, or ``auto``, which makes deltas while
            two or more live explorers could use them.
        keep_deltas: the most deltas to keep, the newest ones; fewer if their total size would
            exceed half the size of a version.
        digests: whether versions have xxh3-128 digests, which explorers check.
        cast: the dtype to cast the floating tensors of versions to, with torch's rounding:
            ``bf16``, ``fp16``, ``fp32``, or None for no cast. Fp8 tensors are not cast.
        dcp_prefix: the prefix to remove from the tensor names in saves of
            ``torch.distributed.checkpoint``, e.g. ``model.``; None to detect the prefix.
        names: the names of the tensors in versions. ``hub``: as in the model's checkpoints on the
            hub. ``trainer``: as in the trainer's module. None: the names of the newest version; in
            a new job ``hub`` if all live explorers accept the hub's names, else ``trainer``.
        max_shard_size: the most bytes of tensors in one file of a version.
        copy_threads: how many files of a version to write at a time, up to one for each processor.
        prune_steps: whether to delete step folders after their saves were published or skipped.
        prune_foreign: whether ``prune_steps`` applies also to saves without receipts in a job whose
            pointer is not ``latest_state_dict_iteration.txt``.
        refuse_nonfinite: whether to quarantine a save whose receipts name tensors with NaN or Inf,
            instead of publishing it with a warning.
        remote_timeout: how long a step folder may have neither weights nor the path of remote
            weights, until its save is quarantined.
        dead_reader_grace: how long to keep a dead explorer's lease, because its engine may still
            read the version.
        leftover_grace: how old an orphaned temporary file must be before the daemon deletes it.
        memory_dir: a second job directory that the same process serves, on a memory filesystem that
            all processes of one host share. The daemon creates this directory if it is missing.
        exit_when_idle: whether the daemon ends when all trainers and explorers have left and no
            save has to be published. It does not end before it has seen a trainer or an explorer.
        hang_time: if storage has not answered for this long, the process ends itself. The value
            must be above 300 s, the limit for reading a pickle, and above the time in which storage
            writes one file of ``max_shard_size``.
        shared_group: a group, by name or number, of trainers, explorers and this daemon. The group
            may read and write all files that the daemon makes.
        lease_time: a process without a heartbeat for this long counts as dead. The setting takes
            effect only in a new job.
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
    """All settings of ``syncd run``: the settings of a daemon, and the settings of its process.

    Attributes:
        job: the job directory.
        root: a folder of jobs to serve instead of one job; jobs may be added and removed.
        concurrent_merges: how many jobs below ``root`` may merge saves at the same time.
        metrics_port: the port on 127.0.0.1 where metrics are served; 0 to serve no metrics there.
        metrics_textfile: a file on this host for the node exporter, with metrics.
        log_format: ``human`` logs lines for people; ``json`` logs one JSON object per line.
    """

    job: Path | None = None
    root: Path | None = None
    concurrent_merges: Annotated[Count, Field(ge=1)] = 2
    metrics_port: Annotated[Count, Field(ge=0, le=65535)] = 0
    metrics_textfile: PromFile | None = None
    log_format: Literal["human", "json"] = "human"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
