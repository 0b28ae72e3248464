"""Requests of people to the daemon: a pause, or a rollback."""

from __future__ import annotations

from typing import Literal

from syncd.protocol.records import Record, Sequence, Text


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
