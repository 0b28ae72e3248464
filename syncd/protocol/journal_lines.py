"""The records of the audit log and the journal, two files with one record in each line."""

from __future__ import annotations

from typing import Literal

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
        event: the action. The less obvious ones are:
            - ``active``: a daemon began to serve the job;
            - ``adopted``: a version that an earlier daemon had finished became LATEST;
            - ``linked``: the save became the tip, under the number of the version to come;
            - ``closed``: no delta is made until the next full version;
            - ``live``: an explorer began to serve the version;
            - ``refused``: the daemon refused a rollback;
            - ``names``: new versions changed from the trainer's tensor names to the hub's, or back;
              or the two kinds of names differ for the first time.

        seconds: for ``published``: from the start of the merge until LATEST named the version. For
            ``live``: from the update of LATEST until the explorer served the version; None if an
            earlier daemon published the version.
        pause: seconds for which the explorer's engine did not serve; None if not reported.
        latency: for ``published``: seconds from the time when the daemon found the save whole until
            LATEST named the version.
        of: the version that is published again.
        by: the person or process that asked for a rollback.
        delta_bytes: the size of the delta.
        why: the reason. For ``published``: the tensors with NaN or Inf, if any. For ``names``: why
            the trainer's names are used, if no setting asks for them.
    """

    time: float
    event: Literal[
        "active", "published", "adopted", "rolled_back", "live", "skipped", "quarantined",
        "refused", "names", "linked", "closed",
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
    delta_bytes: Size | None = None
    names: Names | None = None
    why: Text | None = None
