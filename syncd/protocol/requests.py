"""The records by which people steer a job: a pause, and requests to its daemon.

A pin is no record: it is an empty file, and all that counts is that it is there
(:mod:`syncd.storage.pins`).
"""

from __future__ import annotations

from typing import Literal

from syncd.protocol.records import Record, Sequence, Text


class Pause(Record):
    """``.syncd/paused.json``: while it is there nothing is published and nothing is pruned.

    Attributes:
        id: what the daemon repeats in its report once it keeps to this pause.
        by: who paused, for people.
    """

    id: str
    by: Text
    time: float


class RollbackRequest(Record):
    """``.syncd/requests/ID.json``: let an old version be LATEST again, under a new sequence.

    Whoever asks writes it with ``outcome`` ``asked``; from then on it is the daemon's, which
    replaces it by its answer; whoever asked then removes it.

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
