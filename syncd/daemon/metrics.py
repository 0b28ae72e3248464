"""The metrics of a daemon, by Prometheus' conventions; ``docs/metrics.md`` lists them.

One registry holds those of all jobs of a process. Labels are bounded: the job directory, names of
errors, of outcomes, and of explorers, which go with their reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from syncd import __version__
from syncd.daemon.decide import Observation
from syncd.daemon.explorer_metrics import ExplorerMetrics, remove
from syncd.daemon.meter import Meter
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_lease_marker, printable
from syncd.protocol.records import Manifest
from syncd.storage.fsio import Storage

#: Prometheus has a label ``job`` of its own, which would hide one of ours.
JOB: Final = "job_dir"
#: Seconds between two looks at what is not looked at for the daemon's own work.
_SURVEY: Final = 10.0
_SHORT: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LONG: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
#: A name of ``DaemonCounters`` → the outcome, or the kind of thing deleted, that it is counted as.
_OUTCOMES: Final = {"skipped": "skipped", "quarantined": "quarantined", "published": "published"}
_PRUNED: Final = {"versions_retired": "version", "steps_pruned": "step", "leases_dropped": "lease"}


class Metrics:
    """All metrics of one process, in a registry of its own.

    Attributes:
        registry: what is served.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        info = self._gauge("build_info", "1; the version is its label.", "version")
        info.labels(__version__).set(1)
        self.reloaded = Gauge(
            "syncd_config_last_reload_successful",
            "Whether all of the configuration that was read last is in force.",
            registry=self.registry,
        )
        self.reloaded.set(1)
        self.active = self._gauge("daemon_active", "1 while this daemon serves, 0 in standby.", JOB)
        self.paused = self._gauge("paused", "1 while people have paused publishing.", JOB)
        self.last_scan = self._gauge(
            "last_scan_timestamp_seconds", "When the job was last looked at with success.", JOB
        )
        self.latest_version = self._gauge("latest_version", "The sequence of LATEST.", JOB)
        self.versions = self._gauge("versions", "Version folders on disk.", JOB)
        self.leases = self._gauge("leases", "Leases on versions.", JOB)
        self.free_bytes = self._gauge("free_bytes", "Room for this user on the storage.", JOB)
        self.free_inodes = self._gauge("free_inodes", "Files that can still be made.", JOB)
        self.saves = self._counter("saves", "Saves, by what became of them.", JOB, "outcome")
        self.rollbacks = self._counter("rollbacks", "Versions that were served again.", JOB)
        self.pruned = self._counter("pruned", "What was deleted.", JOB, "what")
        self.merged_bytes = self._counter("merge_bytes", "Bytes of published versions.", JOB)
        self.errors = self._counter("errors", "What was refused or went wrong.", JOB, "error")
        self.tick = self._histogram("tick_seconds", "One round, with all it did.", _LONG)
        self.merge = self._histogram("merge_seconds", "Beginning of a merge to LATEST.", _LONG)
        self.latency = self._histogram(
            "publish_latency_seconds", "First look at the whole save to LATEST.", _LONG
        )
        self.wake_up = self._histogram(
            "wake_up_seconds", "LATEST to the first look at an explorer's lease on it.", _SHORT
        )
        self.explorers = ExplorerMetrics(self.registry, JOB)

    def of_job(self, storage: Storage, layout: JobLayout) -> Meter:
        """The meter of one job."""
        return _JobMeter(self, storage, layout)

    def forget_state(self, job: str) -> None:
        """Let a job have no gauges, until they are set again."""
        state = (self.paused, self.latest_version, self.versions, self.leases)
        for gauge in (*state, self.free_bytes, self.free_inodes):
            remove(gauge, job)
        self.explorers.forget(job)

    def forget_job(self, root: Path) -> None:
        """Let a job that is served no more have no metrics: they would be there for ever."""
        job = printable(root)
        self.forget_state(job)
        for metric in (self.active, self.last_scan, self.rollbacks, self.merged_bytes):
            remove(metric, job)
        for histogram in (self.tick, self.merge, self.latency, self.wake_up):
            remove(histogram, job)
        for counter in (self.saves, self.pruned, self.errors):
            labels = [sample.labels for found in counter.collect() for sample in found.samples]
            for told in labels:
                if told[JOB] == job:
                    remove(counter, *told.values())

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"syncd_{name}", what, labels, registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"syncd_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"syncd_{name}", what, [JOB], buckets=buckets, registry=self.registry)


class _JobMeter(Meter):
    """Counts what happens in one job."""

    def __init__(
        self,
        metrics: Metrics,
        storage: Storage,
        layout: JobLayout,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._storage = storage
        self._layout = layout
        self._clock = clock
        self._wall = wall
        self._job = printable(layout.root)  # a name that is not UTF-8 can be no label
        self._latest = 0
        self._latest_at = 0.0
        self._holders: frozenset[str] = frozenset()
        self._awaited: set[str] = set()
        self._survey_at = float("-inf")
        # A counter that is not there yet does not grow from nothing to one: alerts would miss it.
        for outcome in _OUTCOMES.values():
            metrics.saves.labels(self._job, outcome)
        for what in _PRUNED.values():
            metrics.pruned.labels(self._job, what)
        for counter in (metrics.rollbacks, metrics.merged_bytes):
            counter.labels(self._job)

    def active(self, *, yes: bool) -> None:
        self._metrics.active.labels(self._job).set(yes)
        if not yes:  # what it saw last says nothing of a job that another daemon serves
            self._awaited.clear()
            self._metrics.forget_state(self._job)

    def scanned(self, seen: Observation) -> None:
        metrics, job = self._metrics, self._job
        metrics.last_scan.labels(job).set(self._wall())
        metrics.versions.labels(job).set(len(seen.versions))
        metrics.leases.labels(job).set(len(seen.leases))
        metrics.paused.labels(job).set(seen.pause is not None)
        metrics.latest_version.labels(job).set(seen.latest)
        held = [(lease.sequence, parse_lease_marker(lease.marker)) for lease in seen.leases]
        self._holders = frozenset(marker[1] for _, marker in held if marker)
        for sequence, marker in held:
            if marker and sequence == self._latest and marker[1] in self._awaited:
                self._awaited.discard(marker[1])
                metrics.wake_up.labels(job).observe(self._clock() - self._latest_at)

    def round_ended(self, seconds: float) -> None:
        self._metrics.tick.labels(self._job).observe(seconds)
        now = self._clock()
        if now - self._survey_at >= _SURVEY:
            self._survey_at = now
            self._survey()

    def counted(self, **more: int) -> None:
        metrics, job = self._metrics, self._job
        for name, by in more.items():
            if name in _OUTCOMES:
                metrics.saves.labels(job, _OUTCOMES[name]).inc(by)
            elif name in _PRUNED:
                metrics.pruned.labels(job, _PRUNED[name]).inc(by)
            elif name == "rolled_back":
                metrics.rollbacks.labels(job).inc(by)
            elif name == "merged_bytes":
                metrics.merged_bytes.labels(job).inc(by)

    def published(self, manifest: Manifest, *, seconds: float, latency: float) -> None:
        self._metrics.merge.labels(self._job).observe(seconds)
        self._metrics.latency.labels(self._job).observe(latency)
        # Who comes later, or comes back, was not woken up by this version.
        self._latest, self._latest_at = manifest.sequence, self._clock()
        self._awaited = set(self._holders)

    def failed(self, error: BaseException) -> None:
        self._metrics.errors.labels(self._job, type(error).__name__).inc()

    def _survey(self) -> None:
        try:
            free = self._storage.free(self._layout.state)
            if free.bytes is not None:
                self._metrics.free_bytes.labels(self._job).set(free.bytes)
            if free.inodes is not None:
                self._metrics.free_inodes.labels(self._job).set(free.inodes)
            self._metrics.explorers.look(self._job, self._storage, self._layout)
        except OSError as error:
            self.failed(error)
