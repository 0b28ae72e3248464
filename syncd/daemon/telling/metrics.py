"""The metrics of a daemon, by Prometheus' conventions; ``docs/metrics.md`` lists the metrics.

The number of label values is bounded: labels are job directories, names of errors, outcomes, and
names of explorers. An explorer's metrics are removed with its report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from syncd import __version__
from syncd.daemon.decide import Observation
from syncd.daemon.telling.meter import Meter
from syncd.protocol.names import TEMPORARY, printable
from syncd.protocol.records import DEFAULT_LEASE_TIME, Format, Latest, Manifest
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.job import Job
from syncd.storage.record_files import OF_OTHERS

#: The most explorers of a job that have their own metrics.
_MOST: Final = 1000
#: Prometheus has its own label ``job``, which would hide a label of this name.
JOB: Final = "job_dir"
#: Seconds between two reads of files that only metrics need.
_SURVEY: Final = 10.0
#: The least number of reports that a round reads; many reports are read within ``_ROUNDS`` rounds.
_AT_A_TIME: Final = 64
_ROUNDS: Final = 10
_SHORT: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LONG: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
#: Names of ``DaemonCounters`` that are outcomes of saves.
_OUTCOMES: Final = ("skipped", "quarantined", "published")
_DELTAS: Final = ("made", "none")
#: A counter's name in ``DaemonCounters`` → the kind of deletion that it counts.
_PRUNED: Final = {
    "versions_retired": "version",
    "steps_pruned": "step",
    "leases_dropped": "lease",
    "deltas_pruned": "delta",
}
#: The gauges of an explorer, in the order of ``ExplorerMetrics._set``.
_OF_EXPLORERS: Final = {
    "up": "1 if the explorer's heartbeat goes on.",
    "lag_versions": "Versions between LATEST and the served version.",
    "lag_steps": "Training steps between LATEST and the served step.",
    "pause_seconds": "Time for which the last load paused the explorer.",
    "load_seconds": "How long the last load of an explorer's engine took.",
    "full_bytes": "Bytes of version files read for an explorer's last load.",
    "delta_bytes": "Bytes of deltas read for an explorer's last load.",
    "refuses": "1 if the explorer refused the newest version that it tried.",
    "broken": "1 if the explorer's engine might serve wrong weights.",
}


class Metrics:
    """All metrics of one process, in its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        info = self._gauge("build_info", "Always 1; the label names the release.", "version")
        info.labels(__version__).set(1)
        self.reloaded = Gauge(
            "syncd_config_last_reload_successful",
            "1 if all settings of the last configuration reload are in force, else 0.",
            registry=self.registry,
        )
        self.reloaded.set(1)
        self.active = self._gauge("daemon_active", "1 while this daemon serves, 0 in standby.", JOB)
        self.paused = self._gauge("paused", "1 while publishing is paused by 'syncd pause'.", JOB)
        self.last_scan = self._gauge(
            "last_scan_timestamp_seconds", "Time of the last successful scan of the job.", JOB
        )
        self.latest_version = self._gauge(
            "latest_version", "The number of the version that LATEST names.", JOB
        )
        self.last_publish = self._gauge(
            "last_publish_timestamp_seconds", "Time of the last update of LATEST.", JOB
        )
        self.trainer_up = self._gauge("trainer_up", "1 if the trainer's heartbeat goes on.", JOB)
        self.trainer_step = self._gauge("trainer_step", "The step announced last.", JOB)
        self.versions = self._gauge("versions", "Version folders on disk.", JOB)
        self.leases = self._gauge("leases", "Leases on versions.", JOB)
        self.free_bytes = self._gauge(
            "free_bytes", "Free bytes for this user on the job's storage.", JOB
        )
        self.free_inodes = self._gauge("free_inodes", "Free inodes on the job's storage.", JOB)
        self.saves = self._counter("saves", "Saves, by outcome.", JOB, "outcome")
        self.nonfinite = self._counter(
            "nonfinite_versions", "Published versions that hold NaN or Inf.", JOB
        )
        self.rollbacks = self._counter("rollbacks", "Rollbacks: old versions published again.", JOB)
        self.pruned = self._counter(
            "pruned", "Deleted versions, deltas, steps and leases.", JOB, "what"
        )
        self.merged_bytes = self._counter("merge_bytes", "Bytes of published versions.", JOB)
        self.deltas = self._counter(
            "deltas", "Attempts to make a delta, by outcome: made or none.", JOB, "outcome"
        )
        self.delta_bytes = self._counter(
            "delta_bytes", "Bytes of the deltas that the daemon made.", JOB
        )
        self.errors = self._counter("errors", "Errors, by class.", JOB, "error")
        self.tick = self._histogram(
            "tick_seconds", "Duration of one round of the daemon, with all its work.", _LONG
        )
        self.merge = self._histogram(
            "merge_seconds", "Time from the beginning of a merge to the update of LATEST.", _LONG
        )
        self.latency = self._histogram(
            "publish_latency_seconds",
            "Time from when the daemon first saw the complete save to the update of LATEST.",
            _LONG,
        )
        self.delta_changed = self._gauge(
            "delta_changed_ratio", "Fraction of elements that the last delta changes, 0 to 1.", JOB
        )
        self.delta_seconds = self._histogram(
            "delta_seconds",
            "Time from the update of LATEST until the delta to that version exists.",
            _LONG,
        )
        self.live = self._histogram(
            "live_seconds",
            "Time from the update of LATEST until an explorer serves that version.",
            _SHORT,
        )
        self.load_pause = self._histogram(
            "load_pause_seconds", "How long a load kept an explorer from serving.", _SHORT
        )
        self.explorers = ExplorerMetrics(self.registry, JOB)

    def of_job(self, job: Job) -> Meter:
        """The meter of one job."""
        return _JobMeter(self, job)

    def forget_state(self, job: str) -> None:
        """Remove the gauges that describe a job's state."""
        state = (self.paused, self.latest_version, self.versions, self.leases)
        trainer = (self.last_publish, self.trainer_up, self.trainer_step)
        for gauge in (*state, *trainer, self.free_bytes, self.free_inodes, self.delta_changed):
            remove(gauge, job)
        self.explorers.forget(job)

    def forget_job(self, root: Path) -> None:
        """Remove all metrics of a job that is no longer served."""
        job = printable(root)
        self.forget_state(job)
        for gauge in (self.active, self.last_scan):
            remove(gauge, job)
        for count in (self.nonfinite, self.rollbacks, self.merged_bytes, self.delta_bytes):
            remove(count, job)
        for histogram in (
            self.tick,
            self.merge,
            self.latency,
            self.delta_seconds,
            self.live,
            self.load_pause,
        ):
            remove(histogram, job)
        for counter in (self.saves, self.pruned, self.deltas, self.errors):
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
    def __init__(
        self,
        metrics: Metrics,
        job: Job,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._job = job
        self._clock = clock
        self._wall = wall
        self._label = printable(job.layout.root)  # a name that is not UTF-8 can be no label
        self._survey_at = float("-inf")
        self._survey: Iterator[None] = iter(())
        # Counters begin at 0, because alerts would miss a counter that appears with the value 1.
        for outcome in _OUTCOMES:
            metrics.saves.labels(self._label, outcome)
        for what in _PRUNED.values():
            metrics.pruned.labels(self._label, what)
        for outcome in _DELTAS:
            metrics.deltas.labels(self._label, outcome)
        for counter in (
            metrics.nonfinite,
            metrics.rollbacks,
            metrics.merged_bytes,
            metrics.delta_bytes,
        ):
            counter.labels(self._label)

    def active(self, *, yes: bool) -> None:
        self._metrics.active.labels(self._label).set(yes)
        if not yes:  # another daemon may serve the job, so its values may be outdated
            self._survey = iter(())
            self._metrics.forget_state(self._label)

    def scanned(self, seen: Observation) -> None:
        metrics, job = self._metrics, self._label
        metrics.last_scan.labels(job).set(self._wall())
        metrics.versions.labels(job).set(len(seen.versions))
        metrics.leases.labels(job).set(len(seen.leases))
        metrics.paused.labels(job).set(seen.pause is not None)
        metrics.latest_version.labels(job).set(seen.latest)

    def round_ended(self, seconds: float) -> None:
        self._metrics.tick.labels(self._label).observe(seconds)
        try:
            for _ in self._survey:
                return
            if self._clock() - self._survey_at >= _SURVEY:
                self._survey_at = self._clock()
                self._survey = self._look()
                next(self._survey, None)
        except OSError as error:
            self.failed(error)

    def counted(self, **more: int) -> None:
        metrics, job = self._metrics, self._label
        for name, by in more.items():
            if name in _OUTCOMES:
                metrics.saves.labels(job, name).inc(by)
            elif name in _PRUNED:
                metrics.pruned.labels(job, _PRUNED[name]).inc(by)
            elif name == "rolled_back":
                metrics.rollbacks.labels(job).inc(by)
            elif name == "merged_bytes":
                metrics.merged_bytes.labels(job).inc(by)

    def published(self, manifest: Manifest, *, seconds: float, latency: float) -> None:
        self._metrics.merge.labels(self._label).observe(seconds)
        self._metrics.latency.labels(self._label).observe(latency)
        if manifest.nonfinite is not None and manifest.nonfinite.count:
            self._metrics.nonfinite.labels(self._label).inc()

    def live(self, *, seconds: float | None, pause: float | None) -> None:
        if seconds is not None:
            self._metrics.live.labels(self._label).observe(seconds)
        if pause is not None:
            self._metrics.load_pause.labels(self._label).observe(pause)

    def delta_made(self, size: int, *, changed: float, seconds: float) -> None:
        self._metrics.deltas.labels(self._label, "made").inc()
        self._metrics.delta_bytes.labels(self._label).inc(size)
        self._metrics.delta_changed.labels(self._label).set(changed)
        self._metrics.delta_seconds.labels(self._label).observe(seconds)

    def no_delta(self) -> None:
        self._metrics.deltas.labels(self._label, "none").inc()

    def failed(self, error: BaseException) -> None:
        self._metrics.errors.labels(self._label, type(error).__name__).inc()

    def _look(self) -> Iterator[None]:
        """Read the files that only metrics need; each yield ends the work of a round."""
        free = self._job.storage.free(self._job.layout.state)
        if free.bytes is not None:
            self._metrics.free_bytes.labels(self._label).set(free.bytes)
        if free.inodes is not None:
            self._metrics.free_inodes.labels(self._label).set(free.inodes)
        latest = self._job.storage.status(self._job.layout.latest)
        if latest is not None:
            self._metrics.last_publish.labels(self._label).set(latest.st_mtime)
        form = self._job.read(Format, self._job.layout.format, OF_OTHERS)
        lease_time = form.lease_time if form else DEFAULT_LEASE_TIME
        trainer = self._job.read(TrainerReport, self._job.layout.trainer_report, OF_OTHERS)
        if trainer is not None:
            put(self._metrics.trainer_up, self._job.heard(trainer, lease_time)[1], self._label)
            put(self._metrics.trainer_step, trainer.step, self._label)
        yield from self._metrics.explorers.look(self._label, self._job, lease_time)


class ExplorerMetrics:
    """The gauges of all explorers; ``job`` is the label for the job directory."""

    def __init__(self, registry: CollectorRegistry, job: str) -> None:
        self._gauges = {
            name: Gauge(f"syncd_explorer_{name}", what, [job, "explorer"], registry=registry)
            for name, what in _OF_EXPLORERS.items()
        }
        self._seen: dict[str, set[str]] = {}

    def look(self, label: str, job: Job, lease_time: float) -> Iterator[None]:
        """Set the gauges from LATEST and the reports; OSError if storage does not answer.

        Yields between two parts of the reports.
        """
        names = job.storage.names(job.layout.explorers)
        names = [name for name in names if not name.startswith(TEMPORARY)][:_MOST]
        share = max(_AT_A_TIME, math.ceil(len(names) / _ROUNDS))
        found: set[str] = set()
        for begin in range(0, len(names), share):
            if begin:
                yield
            latest = job.read(Latest, job.layout.latest, OF_OTHERS)
            reports = job.explorer_reports(names[begin : begin + share], OF_OTHERS)
            found |= {
                self._set(label, one, latest, up=job.heard(one, lease_time)[1])
                for one in reports
                if one.status != "stopped"
            }
        self._keep(label, found)

    def forget(self, job: str) -> None:
        """Remove the metrics of a job's explorers."""
        self._keep(job, set())
        del self._seen[job]

    def _keep(self, job: str, names: set[str]) -> None:
        for gone in self._seen.get(job, set()) - names:
            for gauge in self._gauges.values():
                remove(gauge, job, gone)
        self._seen[job] = names

    def _set(
        self, job: str, report: ExplorerReport, latest: Latest | None, *, up: bool | None
    ) -> str:
        name = printable(report.name)
        # First, because a failure below would otherwise keep this explorer's metrics for ever.
        self._seen.setdefault(job, set()).add(name)
        lag = steps = pause = load = full = delta = None
        if latest is not None and report.bench is None:
            lag = latest.sequence - (report.sequence or 0)
        if latest is not None and report.step is not None:
            steps = latest.step - report.step
        if report.reload is not None:
            pause, load, full = report.reload.pause, report.reload.load, report.reload.full_bytes
        if report.reload is not None and full is not None:
            delta = report.reload.delta_bytes or 0
        refuses, broken = report.refused is not None, report.fault is not None
        values = (up, lag, steps, pause, load, full, delta, refuses, broken)
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            put(gauge, value, job, name)
        return name


def put(gauge: Gauge, value: float | None, *labels: str) -> None:
    """Set a gauge; None removes the value, for example that of an earlier explorer of this name."""
    if value is None:
        remove(gauge, *labels)
    else:
        gauge.labels(*labels).set(value)


def remove(metric: Counter | Gauge | Histogram, *labels: str) -> None:
    """Remove the values of a metric with these labels, if there are any."""
    try:
        metric.remove(*labels)
    except KeyError:
        pass  # some releases of prometheus-client raise this
