"""The keys of the daemon's configuration and their types; ``configuration.py`` reads the values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

from syncd.checkpoint.tensor_rules import Cast, short_dtype
from syncd.protocol.names import STATE_POINTER, PointerName
from syncd.protocol.records import (
    DEFAULT_LEASE_TIME,
    LONGEST_LEASE_TIME,
    SHORTEST_LEASE_TIME,
    Names,
)

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", re.ASCII)


@dataclass(frozen=True)
class Quantity:
    """Marks a number that may be written with a unit, for example ``"30s"``.

    Attributes:
        unit: the unit of a bare number, for messages.
        units: a written unit → its size in ``unit``, for example ``"min"`` → 60.
    """

    unit: str
    examples: str
    units: tuple[tuple[str, float], ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def read(self, value: object) -> object:
        """Convert text with a unit to a number; return any other value unchanged.

        Raises:
            ValueError: the value is true or false, which Python counts as 1 and 0.
        """
        if isinstance(value, bool):
            raise ValueError("no number")  # noqa: TRY004 - pydantic does not catch TypeError
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
        """Return the path; ValueError if it has another suffix."""
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

    ``docs/configuration.md`` describes each key. An optional key set to "" is None here.

    Attributes:
        cast: rounds as torch does. Integer and bool tensors are not cast; quantized models are
            refused.
        dead_reader_grace: a dead explorer's lease stays so long, because its engine may still read.
        hang_time: must be above 300 s, the limit for reading a pickle, and above the time in which
            storage writes one file of ``max_shard_size``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pointer: PointerName = STATE_POINTER
    tick: Annotated[Seconds, Field(gt=0, le=60)] = 1.0
    keep: Annotated[Count, Field(ge=1)] = 2
    deltas: Literal["auto", "on", "off"] = "auto"
    keep_deltas: Annotated[Count, Field(ge=1)] = 16
    digests: bool = True
    cast: Annotated[Cast | None, BeforeValidator(short_dtype)] = None
    dcp_prefix: str | None = None
    names: Names | None = None
    max_shard_size: Annotated[Bytes, Field(ge=1)] = 1_000_000_000
    prune_steps: bool = True
    prune_foreign: bool = False
    refuse_nonfinite: bool = False
    dead_reader_grace: Annotated[Seconds, Field(ge=0)] = 300.0
    memory_dir: Path | None = None
    exit_when_idle: bool = False
    hang_time: Annotated[Seconds, Field(gt=0)] = 600.0
    shared_group: str | None = None
    lease_time: Annotated[Seconds, Field(ge=SHORTEST_LEASE_TIME, le=LONGEST_LEASE_TIME)] = (
        DEFAULT_LEASE_TIME
    )


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
        "prune_steps",
        "prune_foreign",
        "refuse_nonfinite",
        "dead_reader_grace",
        "exit_when_idle",
        "log_format",
        "log_level",
    }
)


class RunConfig(DaemonConfig):
    """All settings of ``syncd run``."""

    job: Path | None = None
    root: Path | None = None
    concurrent_merges: Annotated[Count, Field(ge=1)] = 2
    metrics_port: Annotated[Count, Field(ge=0, le=65535)] = 0
    metrics_textfile: PromFile | None = None
    log_format: Literal["human", "json"] = "human"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
