"""The metrics of a daemon, by Prometheus' conventions; ``docs/metrics.md`` has their list.

They are served over HTTP on loopback, and written to a file for the node exporter.

The number of label values is bounded: labels are job directories, names of errors, outcomes, and
names of explorers. An explorer's metrics are removed with its report.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    write_to_textfile,
)

from syncd import __version__
from syncd.closing import Closing
from syncd.daemon.loopback import HOST, LoopbackRequest, LoopbackServer
from syncd.daemon.observation import Observation
from syncd.daemon.telling.journal import Meter
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.events import Event, MetricsServed, MetricsUnwritten
from syncd.protocol.names import TEMPORARY, printable
from syncd.protocol.records import Latest
from syncd.protocol.reports import Blocked, ExplorerReport, Reason, TrainerReport
from syncd.protocol.version_events import (
    DeltasStopped,
    FoldDelayed,
    VersionFolded,
    VersionLive,
    VersionPublished,
    VersionRolledBack,
)
from syncd.storage.job import OF_OTHERS, Job
from syncd.storage.judge import Clock
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

#: The most connections at a time; Prometheus needs one.
_CONNECTIONS: Final = 16
#: The media type of ``generate_latest``'s output.
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Seconds between two writes of the file; Prometheus reads it about as often.
_WRITE: Final = 15.0
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
#: The gauges that a daemon in standby has.
_STANDBY: Final = ("daemon_active", "last_scan_timestamp_seconds", "blocked")
_GAUGES: Final = {
    "daemon_active": "1 while this daemon serves the job, 0 in standby or without storage.",
    "paused": "1 while publishing is paused by a user.",
    "last_scan_timestamp_seconds": "Time of the last successful scan of the job, or take-over.",
    "job_opened_timestamp_seconds": "Time when the job was made, by the storage's clock.",
    "announced_step": "The step that the trainer's pointer names; -1 if it names none.",
    "latest_version": "The sequence in LATEST; 0 before the first version.",
    "latest_step": "The step of LATEST; -1 before the first version.",
    "version_bytes": "Bytes of LATEST's version; 0 before the first version.",
    "nonfinite_tensors": "Tensors of LATEST's version with NaN or Inf, by the trainer's hook.",
    "ahead_version": "The sequence of the tip; of LATEST if no deltas lead from it.",
    "links": "Number of deltas above LATEST.",
    "link_bytes": "Bytes of these deltas.",
    "last_publish_timestamp_seconds": (
        "Time of LATEST's last change, by the storage's clock; absent before the first version."
    ),
    "trainer_up": "1 while the trainer's heartbeat goes on, 0 if lost; absent after a stop.",
    "blocked": "1 while work of this kind cannot go on until somebody acts.",
    "unpublished_seconds": "Time since the save was announced that is not served; 0 if none waits.",
    "versions": "Number of version folders.",
    "leases": "Number of leases on versions.",
    "free_bytes": "Free space on the job's filesystem; a quota may leave less.",
    "free_inodes": "Number of files that still fit on the job's filesystem, if known.",
    "explorer_up": "1 while the explorer's heartbeat goes on, 0 if it is lost.",
    "explorer_lag_versions": "Versions behind LATEST or the tip; absent in evaluations.",
    "explorer_loading": "1 while it loads in its turn, 0 while it waits for it; else absent.",
    "explorer_lag_steps": "Steps behind LATEST or the tip; of another run, at least the versions.",
    "explorer_pause_seconds": "Time without service during the last load, if reported.",
    "explorer_load_seconds": "Time of the engine's last load, if reported.",
    "explorer_full_bytes": "Bytes of the version's files that the last load read, if reported.",
    "explorer_delta_bytes": "Bytes of deltas that the last load read.",
    "explorer_refuses": "1 if the explorer refused the last version that it tried.",
    "explorer_broken": "1 if the explorer reports that its engine's weights are unknown.",
    "mirror_lag_seconds": "Time for which a version has waited for its mirror; 0 if none waits.",
    "mirror_bytes": "Bytes that the mirror has sent or received since its start.",
    "mirror_errors": "Failures of the mirror since its start.",
    "mirror_blocked": "1 while the mirror cannot go on.",
}
_COUNTERS: Final = {
    "saves": "Saves linked as deltas, published (also by folds), skipped or quarantined.",
    "rollbacks": "Old versions that were published again.",
    "pruned": "Deletions: version, delta, step, lease.",
    "merge_bytes": "Bytes of published versions.",
    "folds": "Attempts to fold deltas into a version: made or delayed.",
    "links_closed": "Times when no more deltas were made until the next full version.",
    "errors": "Refusals and failures, by error class; each attempt counts.",
}
#: Counter → the values of its label that begin at 0.
_OUTCOMES: Final = {
    "saves": ("skipped", "quarantined", "published", "linked"),
    "pruned": ("version", "step", "lease", "delta"),
    "folds": ("made", "delayed"),
}
#: Metric → its label besides the job.
_LABELS: Final = {
    **{name: ["outcome"] for name in _OUTCOMES},
    **{name: ["explorer"] for name in _GAUGES if name.startswith("explorer_")},
    **{name: ["mirror"] for name in _GAUGES if name.startswith("mirror_")},
    "blocked": ["reason"],
    "pruned": ["what"],
    "errors": ["error"],
}
_HISTOGRAMS: Final = {
    "tick_seconds": (
        "Time of one round: a scan of the job, and the work that follows from the scan.",
        _LONG,
    ),
    "merge_seconds": ("Time from the start of a merge until LATEST names the version.", _LONG),
    "publish_latency_seconds": (
        "Time from the scan that finds a save complete until LATEST names the version.",
        _LONG,
    ),
    "fold_seconds": ("Time from the start of a fold until LATEST names the version.", _LONG),
    "live_seconds": (
        "Time after LATEST names a version until an explorer serves it; not of first loads.",
        _SHORT,
    ),
    "load_pause_seconds": (
        "Time for which a load kept an explorer's engine from serving.",
        _SHORT,
    ),
}

_M = TypeVar("_M", Gauge, Counter, Histogram)


class Metrics:
    """All metrics of one process, in its own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        what = "Always 1; the label is syncd's release."
        info = Gauge("syncd_build_info", what, ["version"], registry=registry)
        info.labels(__version__).set(1)
        self.reloaded = Gauge(
            "syncd_config_last_reload_successful",
            "1 if the daemon uses all settings of the configuration file as last read.",
            registry=registry,
        )
        self.reloaded.set(1)
        labels = {name: [JOB, *_LABELS.get(name, ())] for name in (*_GAUGES, *_COUNTERS)}
        self.gauges = {
            name: Gauge(f"syncd_{name}", what, labels[name], registry=registry)
            for name, what in _GAUGES.items()
        }
        self.counters = {
            name: Counter(f"syncd_{name}", what, labels[name], registry=registry)
            for name, what in _COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(f"syncd_{name}", what, [JOB], buckets=buckets, registry=registry)
            for name, (what, buckets) in _HISTOGRAMS.items()
        }
        #: Job → name and labels → metric.
        self._used: dict[str, dict[tuple[str, ...], Gauge | Counter | Histogram]] = {}

    def of_job(self, job: Job) -> Meter:
        """The meter of one job."""
        return _JobMeter(self, job)

    def labelled(self, metrics: dict[str, _M], name: str, *labels: str) -> _M:
        """The metric with these labels, of which the first is the job."""
        self._used.setdefault(labels[0], {})[name, *labels] = metrics[name]
        return metrics[name].labels(*labels)

    def forget(self, job: str, gone: Callable[[tuple[str, ...]], bool]) -> None:
        """Remove the metrics whose name and labels are ``gone``."""
        used = self._used.get(job, {})
        for key in [key for key in used if gone(key)]:
            used.pop(key).remove(*key[1:])

    def forget_job(self, root: Path) -> None:
        """Remove all metrics of a job that is no longer served."""
        self.forget(printable(root), lambda _: True)


@dataclass
class _JobMeter(Meter):
    metrics: Metrics
    job: Job
    clock: Clock = time.monotonic
    wall: Clock = time.time

    def __post_init__(self) -> None:
        self._label = printable(self.job.layout.root)  # a name that is not UTF-8 can be no label
        self._watched: Collection[str] = ()
        self._living: Collection[str] = ()
        self._survey_at = -math.inf
        self._survey: Iterator[None] = iter(())
        self._fresh: set[tuple[str, ...]] = set()  # the gauges that the survey has set
        # Counters begin at 0, because alerts would miss a counter that appears with the value 1.
        for name in _COUNTERS.keys() - _LABELS.keys():
            self._count(name, by=0)
        for name, outcomes in _OUTCOMES.items():
            for outcome in outcomes:
                self._count(name, outcome, by=0)

    def active(self, *, yes: bool) -> None:
        self._set(daemon_active=yes)
        if yes:
            self._set(last_scan_timestamp_seconds=self.wall())
        else:  # another daemon may serve the job, so its values may be outdated
            self._survey = iter(())
            state = _GAUGES.keys() - _STANDBY
            self.metrics.forget(self._label, lambda key: key[0] in state)

    def scanned(self, seen: Observation, latest: Latest | None) -> None:
        self._watched, self._living = seen.sessions, seen.living
        self._set(
            last_scan_timestamp_seconds=self.wall(),
            versions=len(seen.versions),
            leases=len(seen.leases),
            paused=seen.pause is not None,
            announced_step=-1 if seen.pointer.step is None else seen.pointer.step,
            latest_version=seen.latest,
            latest_step=latest.step if latest else -1,
            version_bytes=seen.full_bytes or 0,
            nonfinite_tensors=seen.nonfinite,
            ahead_version=seen.tip.sequence if seen.tip else seen.latest,
            links=len(seen.deltas_to),
            link_bytes=sum(chain[-1].bytes for chain in seen.deltas_to.values()),
        )

    def round_ended(self, seconds: float) -> None:
        self._observe("tick_seconds", seconds)
        try:
            for _ in self._survey:
                return
            if self.clock() - self._survey_at >= _SURVEY:
                self._survey_at = self.clock()
                self._survey = self._look()
                next(self._survey, None)
        except OSError as error:
            self.failed(error)

    def tell(self, event: Event) -> None:
        if event.counter in _OUTCOMES["saves"]:
            self._count("saves", event.counter)
        match event:
            case VersionFolded():
                self._count("folds", "made")
                self._count("merge_bytes", by=event.bytes)
                self._observe("fold_seconds", event.seconds)
            case FoldDelayed():
                self._count("folds", "delayed")
            case DeltasStopped():
                self._count("links_closed")
            case VersionPublished():
                self._count("merge_bytes", by=event.bytes)
                self._observe("merge_seconds", event.seconds)
                self._observe("publish_latency_seconds", event.latency_seconds)
            case VersionRolledBack():
                self._count("rollbacks")
            case VersionLive():
                self._observe("live_seconds", None if event.is_first_ else event.seconds)
                self._observe("load_pause_seconds", event.pause)

    def pruned(self, what: str) -> None:
        self._count("pruned", what)

    def waits(self, blocked: Collection[Blocked], unpublished: float | None = None) -> None:
        reasons = {one.reason for one in blocked if one.level}
        for reason in get_args(Reason):
            self._set(reason, blocked=reason in reasons)
        self._set(unpublished_seconds=unpublished)

    def failed(self, error: BaseException) -> None:
        self._count("errors", type(error).__name__)

    def _set(self, *labels: str, **gauges: float | None) -> None:
        for name, value in gauges.items():
            if value is not None:
                self.metrics.labelled(self.metrics.gauges, name, self._label, *labels).set(value)
                self._fresh.add((name, self._label, *labels))

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self.metrics.labelled(self.metrics.counters, name, self._label, *labels).inc(by)

    def _observe(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self.metrics.labelled(self.metrics.histograms, name, self._label).observe(seconds)

    def _look(self) -> Iterator[None]:
        """Read the files that only metrics need; each yield ends the work of a round."""
        layout, self._fresh = self.job.layout, set()
        free = self.job.storage.free(layout.state)
        self._set(free_bytes=free.bytes, free_inodes=free.inodes)
        for path, time_of in (
            (layout.format, "job_opened_timestamp_seconds"),
            (layout.latest, "last_publish_timestamp_seconds"),
        ):
            if (status := self.job.storage.status(path)) is not None:
                self._set(**{time_of: status.st_mtime})
        trainer = self.job.read(TrainerReport, layout.trainer_report, OF_OTHERS)
        if trainer is not None:
            self._set(trainer_up=self._up(trainer))
            self._mirror(trainer)
        names = self.job.storage.names(layout.explorers)
        names = [name for name in names if not name.startswith(TEMPORARY)][:_MOST]
        share = max(_AT_A_TIME, math.ceil(len(names) / _ROUNDS))
        for begin in range(0, len(names), share):
            if begin:
                yield
            latest = self.job.read(Latest, layout.latest, OF_OTHERS)
            for report in self.job.explorer_reports(names[begin : begin + share], OF_OTHERS):
                if report.status != "stopped":
                    self._explorer(report, latest, trainer.run_id if trainer else None)
        fresh = self._fresh
        self.metrics.forget(
            self._label,
            lambda key: (
                key[0].startswith(("explorer_", "mirror_", "trainer_up")) and key not in fresh
            ),
        )

    def _up(self, report: TrainerReport | ExplorerReport) -> bool | None:
        """Whether the daemon sees the heartbeat go on; None if it does not watch it."""
        watched = report.session in self._watched and report.status != "stopped"
        return report.session in self._living if watched else None

    def _mirror(self, report: TrainerReport | ExplorerReport) -> None:
        if (mirror := report.mirror) is not None and report.status != "stopped":
            self._set(
                printable(report.name),
                mirror_lag_seconds=mirror.lag,
                mirror_bytes=mirror.moved,
                mirror_errors=mirror.errors,
                mirror_blocked=report.fault is not None,
            )

    def _explorer(self, report: ExplorerReport, latest: Latest | None, run: str | None) -> None:
        reload, (lag, steps), delta = report.reload, report.lag(latest, run), None
        if reload is not None and reload.full_bytes is not None:
            delta = reload.delta_bytes or 0
        self._mirror(report)
        self._set(
            printable(report.name),
            explorer_up=self._up(report),
            explorer_lag_versions=lag,
            explorer_lag_steps=steps,
            explorer_pause_seconds=reload.pause if reload else None,
            explorer_load_seconds=reload.load if reload else None,
            explorer_full_bytes=reload.full_bytes if reload else None,
            explorer_delta_bytes=delta,
            explorer_refuses=report.refused is not None,
            explorer_broken=report.fault is not None,
            explorer_loading=report.loading,
        )


@dataclass
class Exporter(Closing):
    """Serves metrics over HTTP, and writes them to a file, while it is open.

    The file is replaced at ticks. Port 0 serves nothing.

    Raises:
        InvalidSettingsError: the port cannot be used.
    """

    metrics: Metrics
    port: int
    textfile: Path | None
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._written_at = -math.inf
        self._repeats = Repeats(clock=self.clock)
        self._server: _Server | None = None
        if self.port:
            try:
                self._server = _Server(self.port, self.metrics.registry)
            except OSError as error:
                raise InvalidSettingsError(
                    f"metrics_port = {self.port} cannot be used: {error.strerror}. Give another "
                    "port, or 0 to serve no metrics"
                ) from error
            self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
            self._thread.start()
            MetricsServed(f"http://{HOST}:{self.port}/metrics").tell(log)

    def tick(self) -> None:
        """Write the file if the last write was at least 15 s ago."""
        if self.clock() - self._written_at >= _WRITE:
            self._write()

    def close(self) -> None:
        """Write the file once more, and stop serving."""
        self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _write(self) -> None:
        path, self._written_at = self.textfile, self.clock()
        if path is None:
            return
        try:
            write_to_textfile(str(path), self.metrics.registry)
        except OSError as error:
            if self._repeats.due(path):
                MetricsUnwritten(path, error).tell(log)
        else:
            self._repeats.forget(path)


class _Server(LoopbackServer):
    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        self.registry = registry
        super().__init__(port, _Scrape, _CONNECTIONS)


class _Scrape(LoopbackRequest):
    server: _Server

    def answer(self) -> None:
        """Answer a request for any path with all metrics."""
        self.send(generate_latest(self.server.registry), _TEXT)
