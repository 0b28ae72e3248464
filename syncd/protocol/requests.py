"""Records by which people steer a job: a pause, and requests to its daemon.

A pin is not a record but an empty file (:mod:`syncd.storage.leases`).
"""

from __future__ import annotations

from typing import Literal

from syncd.protocol.records import Record, Sequence, SessionId, Step, Text


class Pause(Record):
    """``.syncd/paused.json``: while this file exists, nothing is published or pruned.

    The daemon repeats the ``id`` in its report once it has paused.
    """

    id: str
    by: Text
    time: float


class RollbackRequest(Record):
    """``.syncd/requests/ID.json``: make an old version LATEST again, under a new sequence.

    The asking process writes the request with ``outcome`` ``asked``. From then on only the daemon
    may change the request. The daemon replaces the request by its answer, and the asking process
    removes the answer. ``sequence`` is the old version, and ``made`` is the new one.
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

    The daemon builds the step in ``.syncd/bench/SESSION/ID/``. The explorer writes the request with
    ``outcome`` ``asked``, and removes the request once it no longer needs the build. The daemon
    deletes a build if its request is gone, or if its session is dead. The daemon replaces a request
    only to refuse it.
    """

    id: SessionId
    session: SessionId
    step: Step
    by: Text
    time: float
    outcome: Literal["asked", "refused"] = "asked"
    why: Text = ""
