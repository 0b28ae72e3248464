"""The records of the audit log and the journal, two files with one record in each line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from syncd.protocol.records import Kind, Names, Record, Seconds, Sequence, Size, Step, Text


class AuditLine(Record):
    """One line of ``.syncd/audit.jsonl``, for one deletion."""

    time: float
    what: Literal["version", "step", "lease", "delta"]
    name: Text
    why: Text
    session: str


class JournalLine(Record):
    """One line of ``.syncd/journal.jsonl``: an action of the daemon, or of an explorer.

    Times are by the clock of the daemon that writes the line. A field that does not belong to the
    line's event is None.

    Attributes:
        event: the action:

            - ``active``: a daemon took over;
            - ``published``: the daemon published a version;
            - ``adopted``: a version that an earlier daemon had finished became LATEST;
            - ``rolled_back``: the daemon published an older version again;
            - ``live``: an explorer began to serve the version;
            - ``skipped``, ``quarantined``: the daemon did not publish a save;
            - ``refused``: the daemon refused a rollback;
            - ``delta``: the daemon made a delta to the version;
            - ``no_delta``: the daemon began or wanted a delta to the version, but made none;
            - ``names``: the origin of the tensors' names has changed. This line is also written for
              the job's first version for which the hub's names and the trainer's names differ.
        version: the version that the line is about.
        step: the step of that version, or of the save.
        kind, bytes: the kind and size of the published version.
        seconds: for ``published``: the time from the start of the merge until LATEST named the
            version. For ``live``: the time from the update of LATEST until the explorer served the
            version; None if an earlier daemon published the version.
        pause: for ``live``: seconds for which the explorer's engine did not serve while loading
            the version; None if the explorer's report has no pause.
        latency: for ``published``: seconds from the time when the daemon found the save whole until
            LATEST named the version.
        of: for ``rolled_back``: the older version that is published again. For ``delta`` and
            ``no_delta``: the base of the delta.
        changed: for ``delta``: the fraction of the elements that differ, 0 to 1.
        delta_bytes: for ``delta``: the size of the delta. For ``live``: the bytes of the deltas
            that the explorer read instead of the version's files; None if the explorer read the
            version's files.
        by: the person or process that asked for a rollback.
        explorer: the explorer that serves the version.
        names: the origin of the names of the version's tensors.
        why: the reason for ``quarantined``, ``refused`` and ``no_delta``. For ``published``: the
            tensors with NaN or Inf, if any. For ``names``: the reason why the tensors have the
            trainer's names although no setting asks for these names.
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
