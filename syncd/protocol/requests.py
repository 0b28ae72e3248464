"""Records by which people steer a job: a pause, and requests to its daemon.

A pin is an empty file, not a record (:mod:`syncd.storage.leases`).
"""

from __future__ import annotations

from typing import Literal

from syncd.protocol.records import Record, Sequence, SessionId, Step, Text


class Pause(Record):
    """``.syncd/paused.json``: while this file exists, nothing is published or pruned.

    Once the daemon has paused, its report repeats the ``id``.
    """

    id: str
    by: Text
    time: float


class RollbackRequest(Record):
    """``.syncd/requests/ID.json``: make an old version LATEST again, under a new sequence.

    ``sequence`` is the old version, and ``made`` is the new one. The asking process writes
    ``outcome`` ``asked``. The daemon replaces this request by its answer, which the asking process
    removes.
    """

    id: str
    sequence: Sequence
    by: Text
    time: float
    outcome: Literal["asked", "done", "refused"] = "asked"
    made: Sequence | None = None
    why: Text = ""


class BenchRequest(Record):
    """``.syncd/bench/ID.json``: build a step for the single explorer with this session.

    The daemon builds the step in ``.syncd/bench/SESSION/ID/``. It replaces a request only to refuse
    it. Once the explorer has removed the request, or its session is dead, the daemon deletes the
    build.
    """

    id: SessionId
    session: SessionId
    step: Step
    by: Text
    time: float
    outcome: Literal["asked", "refused"] = "asked"
    why: Text = ""
