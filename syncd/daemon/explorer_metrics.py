"""What explorers say of themselves, as metrics; those of an explorer go when its report does."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from syncd.protocol.errors import RecordError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import TEMPORARY, printable
from syncd.protocol.records import Latest, parse
from syncd.protocol.reports import ExplorerReport
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Storage

#: How many explorers of a job have metrics of their own.
_MOST: Final = 1000


class ExplorerMetrics:
    """The gauges of all explorers.

    Args:
        registry: holds them.
        job: the name of the label for the job directory.
    """

    def __init__(self, registry: CollectorRegistry, job: str) -> None:
        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"syncd_explorer_{name}", what, [job, "explorer"], registry=registry)

        self._lag = gauge("lag_versions", "Versions between LATEST and what an explorer serves.")
        self._steps = gauge("lag_steps", "Training steps between the two.")
        self._pause = gauge("pause_seconds", "How long its last load kept it from serving.")
        self._load = gauge("load_seconds", "How long its engine's last load took.")
        self._refused = gauge("refuses", "1 where it refused the newest version that it tried.")
        self._broken = gauge("broken", "1 where what its engine serves cannot be relied on.")
        self._all = (
            self._lag,
            self._steps,
            self._pause,
            self._load,
            self._refused,
            self._broken,
        )
        self._seen: dict[str, set[str]] = {}

    def look(self, job: str, storage: Storage, layout: JobLayout) -> None:
        """Read LATEST and all reports.

        Args:
            job: the label.
            storage: the shared storage.
            layout: the job.

        Raises:
            OSError: storage does not answer.
        """
        latest = _record(storage, layout)
        names = sorted(n for n in storage.names(layout.explorers) if not n.startswith(TEMPORARY))
        found: set[str] = set()
        for name in names[:_MOST]:
            try:
                path = layout.explorers / name
                report = parse(ExplorerReport, storage.read(path), path)
            except RecordError:
                continue
            except OSError as error:
                if is_gone(error) or is_no_record(error) or is_refused_here(error):
                    continue
                raise
            if report.status == "stopped":
                continue
            found.add(self._set(job, report, latest))
        self._keep(job, found)

    def forget(self, job: str) -> None:
        """Let the explorers of a job have no metrics, until they are looked at again."""
        self._keep(job, set())
        del self._seen[job]

    def _keep(self, job: str, names: set[str]) -> None:
        for gone in self._seen.get(job, set()) - names:
            for gauge in self._all:
                remove(gauge, job, gone)
        self._seen[job] = names

    def _set(self, job: str, report: ExplorerReport, latest: Latest | None) -> str:
        name = printable(report.name)
        # Before all that may fail: what has metrics and is not known here would have them for ever.
        self._seen.setdefault(job, set()).add(name)
        if latest is not None:
            self._lag.labels(job, name).set(latest.sequence - (report.sequence or 0))
        if latest is not None and report.step is not None:
            self._steps.labels(job, name).set(latest.step - report.step)
        else:
            remove(self._steps, job, name)  # of the explorer that had this name before
        self._refused.labels(job, name).set(report.refused is not None)
        self._broken.labels(job, name).set(report.fault is not None)
        if report.reload is not None:
            self._pause.labels(job, name).set(report.reload.pause)
            self._load.labels(job, name).set(report.reload.load)
        else:
            remove(self._pause, job, name)
            remove(self._load, job, name)
        return name


def remove(metric: Counter | Gauge | Histogram, *labels: str) -> None:
    """Take a metric with these labels away, if it is there."""
    try:
        metric.remove(*labels)
    except KeyError:
        pass  # in some releases of prometheus-client an error


def _record(storage: Storage, layout: JobLayout) -> Latest | None:
    try:
        return parse(Latest, storage.read(layout.latest), layout.latest)
    except RecordError:
        return None
    except OSError as error:
        if is_gone(error):
            return None
        raise
