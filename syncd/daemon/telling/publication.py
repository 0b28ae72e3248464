"""The events of a version that became LATEST."""

from __future__ import annotations

from collections.abc import Iterator

from syncd.checkpoint.model_folder import changed_settings
from syncd.protocol.events import Event
from syncd.protocol.records import Latest, Manifest
from syncd.protocol.version_events import ModelConfigChanged, VersionNonfinite, VersionPublished
from syncd.storage.job import Job


def publication(
    job: Job,
    manifest: Manifest,
    before: Latest | None,
    *,
    seconds: float,
    latency: float,
    kind: type[VersionPublished] = VersionPublished,
) -> Iterator[Event]:
    """What to tell of a version; ``before`` is the LATEST before it.

    It was made in ``seconds``; ``latency`` is the time since its save was complete.
    """
    version, step, found = manifest.sequence, manifest.step, manifest.nonfinite
    bad = found if found and found.count else None
    yield kind(
        version=version,
        step=step,
        kind=manifest.kind,
        bytes=manifest.size,
        seconds=round(seconds, 3),
        latency_seconds=round(latency, 3),
        why_=str(bad) if bad else None,
    )
    if bad:
        yield VersionNonfinite(version, step, bad.count, list(bad.names), bad)
    if before is not None:
        folders = [job.layout.version(one) for one in (before.sequence, version)]
        if changes := changed_settings(job.storage, *folders):
            yield ModelConfigChanged(
                version=version,
                step=step,
                before=before.sequence,
                changes=changes,
                changes_="; ".join(changes),
            )
