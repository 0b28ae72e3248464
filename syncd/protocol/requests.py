"""The records by which people steer a job: a pause, and requests to its daemon.

A pin is not a record but an empty file (:mod:`syncd.storage.leases`).
"""

from __future__ import annotations

from typing import Literal

from syncd.protocol.records import Record, Sequence, SessionId, Step, Text


class Pause(Record):
    """``.syncd/paused.json``: while it is there, nothing is published or pruned.

    Attributes:
        id: the daemon repeats it in its report once it has paused.
        by: who paused, for people.
    """

    id: str
    by: Text
    time: float


class RollbackRequest(Record):
    """``.syncd/requests/ID.json``: make an old version LATEST again, under a new sequence.

    The asking process writes it with ``outcome`` ``asked``. Then only the daemon may change it, and
    replaces it by its answer, which the asking process removes.

    Attributes:
        id: as in the file's name.
        sequence: the old version.
        by: who asked, for people.
        made: the new version, once it is done.
        why: why it was refused.
    """

    id: str
    sequence: Sequence
    by: Text
    time: float
    outcome: Literal["asked", "done", "refused"] = "asked"
    made: Sequence | None = None
    why: Text = ""


class BenchRequest(Record):
    """``.syncd/bench/ID.json``: build a step for one explorer alone.

    The build is ``.syncd/bench/SESSION/ID/``. The explorer writes the request with ``outcome``
    ``asked``, and removes it once it needs the build no more. The daemon deletes a build whose
    request is gone, or whose session is dead. It replaces the request only to refuse it.

    Attributes:
        id: as in the file's name; the build has the same name.
        session: the heartbeat of the explorer.
        by: the explorer's name, for people.
        why: why it was refused.
    """

    id: SessionId
    session: SessionId
    step: Step
    by: Text
    time: float
    outcome: Literal["asked", "refused"] = "asked"
    why: Text = ""
