"""The deltas of a job, read without its daemon."""

from __future__ import annotations

from typing import Any

from syncd.deltas.delta_folder import read_delta
from syncd.protocol.errors import RecordError
from syncd.protocol.names import parse_delta_folder
from syncd.protocol.records import Delta
from syncd.storage.job import Job


def delta_sequences(job: Job) -> list[int]:
    """The target versions of the deltas on disk; raises OSError if storage does not answer."""
    found = (parse_delta_folder(name) for name in job.storage.names(job.layout.deltas))
    return [sequence for sequence in found if sequence is not None]


def deltas_on_disk(job: Job) -> list[dict[str, Any]]:
    """The readable deltas, oldest first; ``docs/cli.md`` lists the keys."""
    try:
        sequences = delta_sequences(job)
    except OSError:
        return []
    found = []
    for sequence in sequences:
        try:
            delta = read_delta(job.storage, job.layout.delta(sequence))
        except (OSError, RecordError):
            continue  # pruned meanwhile, or damaged: 'syncd verify' says that
        told = {"sequence": sequence, "base": delta.base.sequence, "bytes": delta.bytes}
        found.append({**told, "changed": changed_part(delta)})
    return found


def changed_part(delta: Delta) -> float:
    """The fraction of elements that differ between the two versions, from 0 to 1."""
    return delta.changed / delta.elements if delta.elements else 0.0
