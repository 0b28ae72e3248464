"""The records of growing files, one a line: the audit log and the journal."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from syncd.protocol.records import Kind, Names, Record, Seconds, Sequence, Size, Step, Text


class AuditLine(Record):
    """One line of ``.syncd/audit.jsonl``: one deletion."""

    time: float
    what: Literal["version", "step", "lease", "delta"]
    name: Text
    why: Text
    session: str


class JournalLine(Record):
    """One line of ``.syncd/journal.jsonl``: an action of the daemon, or of an explorer.

    Times are by that daemon's clock. Fields that do not belong to an event are None.

    Attributes:
        event: ``active`` (a daemon took over), ``published``, ``adopted`` (a version that a daemon
            before this one had finished is LATEST), ``rolled_back``, ``live`` (an explorer serves
            it), ``skipped``, ``quarantined``, ``refused`` (a rollback), ``delta`` (one was made),
            ``no_delta`` (one was begun, or wanted, and there is none), ``names`` (its tensors have
            other names than those of the version before, or could have).
        version: the version that it is about.
        step: its step, or that of the save.
        kind, bytes: the published version's.
        seconds: for ``published``, from the start of the merge to LATEST; for ``live``, since
            LATEST named the version, None if an earlier daemon published it.
        pause: for ``live``: seconds for which the explorer's engine did not serve while it loaded
            the version; None if its report has none.
        latency: seconds from the first look that found the save whole to LATEST.
        of: the version that is served again; for ``delta`` and ``no_delta``, the base.
        changed: for ``delta``: the fraction of the elements that differ, 0 to 1.
        delta_bytes: for ``delta``, its bytes; for ``live``, the bytes of the deltas that the
            explorer read instead of the version's files, None if it read the files.
        by: who asked for a rollback.
        explorer: the explorer that serves it.
        names: whose names the tensors have.
        why: why it was quarantined or refused, or why there is no delta; for ``published``, its NaN
            and Inf, if any; for ``names``, the reason for the trainer's names, if nobody asked for
            them.
    """

    time: float
    event: Literal[
        "active", "published", "adopted", "rolled_back", "live", "skipped", "quarantined",
        "refused", "delta", "no_delta", "names",
    ]  # fmt: skip
    version: Sequence | None = None
    step: Step | None = None
    kind: Kind | None = None
    bytes: Size | None = None
    seconds: Seconds | None = None
    pause: Seconds | None = None
    latency: Seconds | None = None
    of: Sequence | None = None
    by: Text | None = None
    explorer: Text | None = None
    changed: Annotated[float, Field(ge=0, le=1)] | None = None
    delta_bytes: Size | None = None
    names: Names | None = None
    why: Text | None = None
