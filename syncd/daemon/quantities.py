"""Types of configuration keys: durations and sizes as people write them, names of a kind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", re.ASCII)


@dataclass(frozen=True)
class Quantity:
    """Marks a number that may be written with a unit.

    Attributes:
        unit: of a plain number, for messages.
        examples: for messages.
        units: what may be written → how many of ``unit`` that is.
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
            ValueError: true and false, which Python takes for 1 and 0.
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
    """Marks a path whose name must end with something.

    Attributes:
        suffix: what it must end with.
    """

    suffix: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check what pydantic has read."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, value: Path) -> Path:
        """The path as it is.

        Raises:
            ValueError: it ends otherwise.
        """
        if value.suffix != self.suffix:
            raise ValueError(f"it does not end with {self.suffix}")
        return value


_SECONDS = Quantity(
    "seconds",
    '"500ms", "30s", "5min", "2h"',
    (("ms", 0.001), ("s", 1), ("min", 60), ("h", 3600), ("d", 86400)),
)
_BYTES = Quantity(
    "bytes",
    '"500MB", "64GB", "1GiB"',
    (
        *((f"{prefix}B", 1000**power) for power, prefix in enumerate(("", "k", "M", "G", "T"))),
        *((f"{prefix}iB", 1024**power) for power, prefix in enumerate(("", "K", "M", "G", "T"))),
        ("KB", 1000),
    ),
)
_COUNT = Quantity("", "", ())

Seconds = Annotated[float, _SECONDS]
Bytes = Annotated[int, _BYTES]
Count = Annotated[int, _COUNT]
#: What the node exporter reads.
PromFile = Annotated[Path, Suffix(".prom")]
