"""The keys of the daemon's configuration; a key is one field, and the text below it is its help.

``configuration.py`` reads the values, ``syncd.cli.options`` makes options of the fields, and
``tests.generated`` the lists of the documentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Final, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FiniteFloat

from syncd.checkpoint.tensor_rules import Cast, short_dtype
from syncd.protocol.names import STATE_POINTER, PointerName
from syncd.protocol.records import (
    DEFAULT_LEASE_TIME,
    LONGEST_LEASE_TIME,
    SHORTEST_LEASE_TIME,
    Names,
)

_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", re.ASCII)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Quantity:
    """Marks a number that may be written with a unit, for example ``"30s"``.

    Attributes:
        unit: the unit of a bare number, for messages.
        units: a written unit → its size in ``unit``, for example ``"min"`` → 60.
    """

    unit: str = ""
    examples: str = ""
    units: tuple[tuple[str, float], ...] = ()

    @property
    def words(self) -> str:
        """What to write, for messages."""
        if not self.unit:
            return "a whole number"
        return f"a number of {self.unit}, or text such as {self.examples}"

    def read(self, value: object) -> object:
        """Convert text with a unit to a number; return any other value unchanged.

        Raises:
            ValueError: the value is true or false, which Python counts as 1 and 0.
        """
        if isinstance(value, bool):
            raise ValueError("no number")  # noqa: TRY004 - pydantic does not catch TypeError
        if not isinstance(value, str) or not (written := _WRITTEN.fullmatch(value.strip())):
            return value
        size = dict(self.units).get(written[2])
        if size is None:
            return value
        number = float(written[1]) * size
        return int(number) if number.is_integer() else number


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
COUNT: Final = Quantity()
Seconds = Annotated[FiniteFloat, SECONDS, BeforeValidator(SECONDS.read)]
Bytes = Annotated[int, BYTES, BeforeValidator(BYTES.read)]
Count = Annotated[int, COUNT, BeforeValidator(COUNT.read)]


def _checked_prom(path: Path) -> Path:
    if path.suffix != ".prom":
        raise ValueError("the node exporter reads only files *.prom")
    return path


LIVE: Final = object()
#: A key that a running daemon reloads; all others need a restart. Mark a key only if the loop
#: applies it between two rounds.
Live = Annotated[_T, LIVE]


class PruningRules(BaseModel):
    """The keys that the daemon and ``syncd prune`` prune by; times are in seconds.

    An optional key set to "" is None here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    pointer: PointerName = STATE_POINTER
    """The file in the job that names the step to publish; jobs of plain verl have only
    `latest_checkpointed_iteration.txt`."""

    keep: Live[Annotated[Count, Ge(1)]] = 2
    """How many of the newest versions to keep, including LATEST; leased versions always stay."""

    deltas: Live[Literal["auto", "on", "off"]] = "auto"
    """Whether trainers may save [deltas](deltas.md). `auto`: if this host has the extra `deltas`;
    `on`: likewise, and refuse to start without it; `off`: never, delete all up to LATEST, and
    serve no save before its version."""

    keep_deltas: Live[Annotated[Count, Ge(1)]] = 16
    """The most deltas to keep up to LATEST, for hosts that lag behind; together they are at most
    half as large as a version."""

    prune_steps: Live[bool] = True
    """Delete published or skipped step folders, except full checkpoints."""

    prune_foreign: Live[bool] = False
    """Also delete steps without receipts, if `--pointer` is not the default."""

    dead_reader_grace: Live[Annotated[Seconds, Ge(0)]] = 300.0
    """How long to keep the lease of a dead explorer, because its engine may still read."""

    lease_time: Annotated[Seconds, Ge(SHORTEST_LEASE_TIME), Le(LONGEST_LEASE_TIME)] = (
        DEFAULT_LEASE_TIME
    )
    """A process without a heartbeat for this time counts as dead; fixed when the job is first
    opened."""


class DaemonConfig(PruningRules):
    """The keys that the loop of a job reads; sizes are in bytes."""

    tick: Live[Annotated[Seconds, Gt(0), Le(60)]] = 1.0
    """The time between two checks of the job, if no filesystem event arrives."""

    digests: Live[Annotated[bool, "--digest on|off"]] = True
    """Compute xxh3-128 digests, so that explorers notice damage."""

    cast: Live[Annotated[Cast | None, BeforeValidator(short_dtype), "--dtype"]] = None
    """Cast floating tensors to this dtype (also `bfloat16` and so on), rounded as in torch;
    what the model's type keeps in fp32 is fp32, and quantized models are refused. Needs the extra
    `torch`. By default tensors stay as saved."""

    dcp_prefix: str | None = None
    """The prefix of tensor names in saves of [`torch.distributed.checkpoint`](dcp.md), such as
    `model.`; by default syncd finds it."""

    names: Live[Names | None] = None
    """The tensor names in versions: as in checkpoints on the hub, or as in the trainer's module
    ([default](protocol.md#whose-names): the hub's, if all explorers take them)."""

    max_shard_size: Live[Annotated[Bytes, Ge(1)]] = 1_000_000_000
    """The most bytes of tensors in one file of a version."""

    refuse_nonfinite: Live[bool] = False
    """Quarantine a save with [NaN or Inf](trainer.md#nan-and-inf), instead of publishing it with a
    warning."""

    max_loading: Live[Annotated[Count, Ge(1)] | None] = None
    """At most so many explorers [pause and load](explorer.md#loads-take-turns) at a time; by
    default all at once."""

    memory_dir: Path | None = None
    """A second job directory, on this host's memory filesystem; the same daemon serves it."""

    exit_when_idle: Live[bool] = False
    """Wait for the first trainer or explorer; exit when all have ended and every save is
    published. If no trainer has come, wait for one, for 30 minutes after the last explorer."""

    shared_group: Annotated[str | None, "--shared-group GROUP"] = None
    """The [common Unix group](systemd.md#whose-user) of trainers, explorers and daemon."""

    # Above the 300 s for reading a pickle, and above the time for one file of max_shard_size.
    hang_time: Annotated[Seconds, Gt(0)] = 600.0
    """If storage does not answer for so long, [the daemon exits](systemd.md#what-systemd-is-told),
    so that another daemon can take over. A merge without a sign of life is begun again."""

    @property
    def has_tips(self) -> bool:
        """True if a save may be served before its version, which then has exactly its bytes."""
        return self.deltas != "off" and self.digests and self.cast is None


class RunConfig(DaemonConfig):
    """All settings of ``syncd run``."""

    job: Path | None = None
    """The job directory."""

    root: Path | None = None
    """A folder of jobs, instead of a job ([many jobs](systemd.md#many-jobs-one-daemon)). You can
    add and remove jobs at any time."""

    concurrent_merges: Annotated[Count, Ge(1)] = 2
    """The most jobs below `--root` to merge at the same time."""

    metrics_port: Annotated[Count, Ge(0), Le(65535)] = 0
    """The port on 127.0.0.1 for [metrics](metrics.md); 0: no port."""

    metrics_textfile: Annotated[Path, AfterValidator(_checked_prom)] | None = None
    """A file of [metrics](metrics.md) for the node exporter, `*.prom`."""

    log_format: Live[Literal["human", "json"]] = "human"
    """[Log](logging.md) lines as text for people, or as one JSON object on each line."""

    log_level: Live[Literal["debug", "info", "warning", "error"]] = "info"
    """The lowest level to log."""


_LIMITS: Final = {"gt": "above {}", "ge": "{} or more", "le": "at most {}"}


@dataclass(frozen=True)
class Annotation:
    """A type, taken apart.

    Attributes:
        base: the type without ``Annotated``, ``| None`` and ``tuple[…, ...]``.
        marks: what ``Annotated`` adds; NoneType if it may be None, and ``...`` for a tuple.
    """

    base: object
    marks: tuple[object, ...] = ()

    @classmethod
    def of(cls, hint: object, *marks: object) -> Annotation:
        """Take a type apart, which may have further marks."""
        if get_origin(hint) not in {Annotated, Union, UnionType, tuple}:
            return cls(hint, marks)
        inner, *more = get_args(hint)
        return cls.of(inner, *more, *marks)

    def marked(self, kind: type[_T]) -> _T | None:
        """The first mark of a class."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    @property
    def limits(self) -> str:
        """The bounds of a number, for example ``above 0, at most 60``."""
        return ", ".join(
            text.format(getattr(mark, name))
            for mark, (name, text) in product(self.marks, _LIMITS.items())
            if hasattr(mark, name)
        )

    @property
    def allowed(self) -> str:
        """The allowed values, for example ``a whole number, 1 or more``."""
        if get_origin(self.base) is Literal:
            words = "one of " + ", ".join(f'"{choice}"' for choice in get_args(self.base))
        elif self.base is bool:
            words = "true or false"
        elif self.base is Path:
            words = "an absolute path"
            words += " that ends with .prom" if self.marked(AfterValidator) else ""
        elif quantity := self.marked(Quantity):
            words = ", ".join(filter(None, (quantity.words, self.limits)))
        else:
            words = "text"
        return f'{words}, or "" to leave it unset' if NoneType in self.marks else words


#: What each key may be; the last mark is its help.
KEYS: Final = {
    key: Annotation.of(field.annotation, *field.metadata, field.description)
    for key, field in RunConfig.model_fields.items()
}
LIVE_KEYS: Final = frozenset(key for key, hint in KEYS.items() if LIVE in hint.marks)
