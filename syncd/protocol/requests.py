"""The records by which people steer a job: a pause, and requests to its daemon.

A pin is no record: it is an empty file, and all that counts is that it is there
(:mod:`syncd.storage.leases`).
"""

from __future__ import annotations

from typing import Literal

from syncd.protocol.records import Record, Sequence, SessionId, Step, Text


class Pause(Record):
    """``.syncd/paused.json``: while it is there nothing is published and nothing is pruned.

    Attributes:
        id: the daemon repeats it in its report once it keeps to this pause.
        by: who paused, for people.
    """

    id: str
    by: Text
    time: float


class RollbackRequest(Record):
    """``.syncd/requests/ID.json``: let an old version be LATEST again, under a new sequence.

    The asking process writes it with ``outcome`` ``asked``. From then on the file is the daemon's,
    which replaces it by its answer. Then the asking process removes it.

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
