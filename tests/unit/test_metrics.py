import errno
import json
import os
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from syncd.daemon.config import DaemonConfig
from syncd.daemon.service import Service
from syncd.daemon.telling.metrics import HOST, Exporter, Metrics
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.events import DaemonPaused
from syncd.protocol.mirrored import Mirroring
from syncd.protocol.records import encode
from syncd.protocol.reports import Load, Reload, TrainerReport
from tests.doc_blocks import blocks
from tests.doc_links import anchors
from tests.doc_lists import page
from tests.generated import find
from tests.jobs import LEASE_TIME, SmallJob
from tests.measured import Measured, announce, report
from tests.multiprocess.processes import Program, serving, wait_until
from tests.places import DOCS
from tests.ports import free_port
from tests.storages import Clock, RuledStorage

RULES = DOCS / "monitoring" / "alerts.yml"
RUNBOOK = "https://github.com/OWNER/syncd/blob/main/docs/operations.md"
#: Metrics whose names come with a suffix.
SAMPLES = ("_bucket", "_count", "_sum")


@pytest.fixture
def said(job: SmallJob, clock: Clock) -> Measured:
    return Measured(job, clock)


def test_what_a_daemon_does_is_counted(job: SmallJob, clock: Clock, said: Measured) -> None:
    with said.daemon(DaemonConfig(keep=1)) as loop:
        assert said("saves_total", outcome="quarantined") == 0  # else an alert would miss the first
        for step in (1, 2):
            loop.publish(step)
            clock.advance(60)
            loop.run_once()
        job.save(3)
        (job.actor(3) / "model.safetensors").write_bytes(b"nothing")
        job.point(3)
        loop.rounds(40, 5)
    assert said("saves_total", outcome="published") == 2
    assert said("latest_version") == 2
    assert said("versions") == 1
    assert said("pruned_total", what="version") == 1
    assert said("pruned_total", what="step") == 2
    assert said("merge_bytes_total") == loop._journal.counters.merged_bytes > 0
    assert said("merge_seconds_count") == said("publish_latency_seconds_count") == 2
    assert said("last_scan_timestamp_seconds") == 1234.5
    assert said("tick_seconds_count") == 44
    assert said("paused") == 0
    assert (said("free_bytes") or 0) > 0
    assert said("saves_total", outcome="quarantined") == 1
    classes = said.names("errors_total", "error")
    assert classes
    assert all(re.fullmatch(r"[A-Z]\w+Error", name) for name in classes)


def test_publish_latency_begins_with_the_first_look_at_the_whole_save(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    with said.daemon() as loop:
        job.save(1)
        job.layout.paused.write_bytes(b"{}")  # seen, and not published yet
        loop.run_once()
        clock.advance(7)
        job.layout.paused.unlink()
        loop.run_once()
    assert said("publish_latency_seconds_count") == 1
    assert said("publish_latency_seconds_sum") == pytest.approx(7)
    assert said("merge_seconds_sum") == pytest.approx(0)


def test_deltas_and_folds_are_measured(job: SmallJob, said: Measured) -> None:
    pytest.importorskip("numpy")
    from tests.makers import work  # noqa: PLC0415 # they need NumPy
    from tests.saved_deltas import save_delta, save_full  # noqa: PLC0415 # likewise

    save_full(job, 1)
    with said.daemon(deltas=work()) as loop:
        loop.run_once()
        for step in (2, 3):
            save_delta(job, step, step - 1)
            loop.run_once()
        loop.run_once()
        assert (said("latest_version"), said("ahead_version"), said("links")) == (1, 3, 2)
        assert (said("link_bytes") or 0) > 0
        loop.rounds(3, 600)
        assert (said("latest_version"), said("ahead_version"), said("links")) == (3, 3, 0)
        save_delta(job, 5, 4)
        loop.rounds(3, 1)
    assert said("saves_total", outcome="linked") == 2
    assert said("folds_total", outcome="made") == said("fold_seconds_count") == 1
    assert said("publish_latency_seconds_count") == 1
    assert said("links_closed_total") == 1


def test_each_load_is_measured_and_of_an_explorers_first_one_the_pause_alone(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    with said.daemon() as loop:
        loads: list[Load] = []
        for step in (1, 2, 3):
            loop.publish(step)
            clock.advance(3)
            loads.append(Load(sequence=step, time=float(step), pause=0.5))
            if step != 2:  # then two at once
                report(job, "a", step, loads=loads, time=float(step))
                report(job, "b", step, loads=loads[-1:], time=float(step))
                loop.run_once()
                loop.run_once()
    assert said("load_pause_seconds_count") == 3 + 2
    assert said("load_pause_seconds_sum") == pytest.approx(2.5)
    assert said("live_seconds_count") == 2 + 1
    assert said("live_seconds_sum") == pytest.approx(3 + 3 + (6 - 1))


def test_who_is_dead_and_when_anything_was_published_is_measured(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    def rounds(*beating: str) -> None:
        for _ in range(12):
            for session in beating:
                clock.advance(1)
                job.session(session).touch()
            clock.advance(LEASE_TIME / 3 - len(beating))
            loop.run_once()

    with said.daemon() as loop:
        loop.publish(1)
        report(job, "a", 1)
        announce(job, "running")
        rounds("t", "s-a")
        assert said("trainer_up") == 1
        assert said("explorer_up", explorer="a") == 1
        assert said("last_publish_timestamp_seconds") == job.layout.latest.stat().st_mtime
        rounds()
        assert (said("trainer_up"), said("explorer_up", explorer="a")) == (0, 0)
        announce(job, "stopped")
        rounds()
        assert said("trainer_up") is None


def test_an_explorer_s_metrics_come_with_its_report_and_go_with_it(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    with said.daemon() as loop:
        loop.publish(1, 2, 3)
        report(job, "fast", 4)  # it follows the tip
        report(job, "slow", 1, refused="it does not fit")
        report(job, "new", None)
        (job.layout.explorers / "odd.json").write_bytes(b"odd")
        (job.layout.explorers / ".tmp-x").write_bytes(b"")
        clock.advance(10)
        loop.run_once()
        assert said("explorer_lag_versions", explorer="fast") == 0
        assert said("explorer_lag_versions", explorer="slow") == 2
        assert said("explorer_lag_steps", explorer="slow") == 2
        assert said("explorer_lag_versions", explorer="new") == 3
        assert said("explorer_lag_steps", explorer="new") is None
        assert said("explorer_refuses", explorer="slow") == 1
        assert said("explorer_refuses", explorer="fast") == 0
        (job.layout.explorers / "slow.json").unlink()
        report(job, "fast", 3, status="stopped")
        clock.advance(1)
        loop.run_once()
        assert said.names("explorer_lag_versions") == {"fast", "slow", "new"}, "looked at too often"
        clock.advance(9)
        loop.run_once()
        assert said.names("explorer_lag_versions") == {"new"}
        assert said.names("explorer_refuses") == {"new"}


def test_a_round_reads_a_tenth_of_many_reports_and_ten_rounds_read_all(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    everybody = {f"e{number}" for number in range(700)}
    for name in everybody:
        report(job, name, 1)
    known = 0
    for _ in range(10):
        said.meter.round_ended(0.0)
        before, known = known, len(said.names("explorer_refuses"))
        assert known - before <= 71
    assert said.names("explorer_refuses") == everybody
    for name in everybody - {"e1"}:
        (job.layout.explorers / f"{name}.json").unlink()
    clock.advance(10)
    said.meter.round_ended(0.0)
    assert said.names("explorer_refuses") == {"e1"}


def test_a_survey_of_explorers_ends_when_another_daemon_takes_over(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    for number in range(200):
        report(job, f"e{number}", 1)
    said.meter.active(yes=True)
    said.meter.round_ended(0.0)
    assert len(said.names("explorer_refuses")) == 64
    said.meter.active(yes=False)
    clock.advance(1)
    said.meter.round_ended(0.0)
    assert said.names("explorer_refuses") == set()


def test_explorers_that_measure_have_pause_and_load(job: SmallJob, said: Measured) -> None:
    report(job, "a", 1, reload=Reload(sequence=1, step=1, pause=0.5, load=0.25))
    report(job, "b", 1, fault="its engine died")
    said.meter.round_ended(0.0)
    assert said("explorer_pause_seconds", explorer="a") == 0.5
    assert said("explorer_load_seconds", explorer="a") == 0.25
    assert said("explorer_broken", explorer="a") == 0
    assert said("explorer_pause_seconds", explorer="b") is None
    assert said("explorer_broken", explorer="b") == 1


def test_mirrors_of_both_kinds_have_metrics_until_they_stop(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    mirror = Mirroring(url="s3://b/p", moved=5, errors=2, lag=61.0)
    report(job, "push", 1, mirror=mirror)
    trainer = TrainerReport(run_id="r", world_size=1, status="running", name="pull", time=0.0,
                            mirror=mirror, fault="403")  # fmt: skip
    job.layout.trainer_report.write_bytes(encode(trainer))
    said.meter.round_ended(0.0)
    for name, blocked in (("push", 0), ("pull", 1)):
        found = [said(f"mirror_{what}", mirror=name) for what in ("lag_seconds", "bytes", "errors")]
        assert (*found, said("mirror_blocked", mirror=name)) == (61, 5, 2, blocked)
    stopped = trainer.model_copy(update={"status": "stopped"})
    job.layout.trainer_report.write_bytes(encode(stopped))
    clock.advance(10)
    said.meter.round_ended(0.0)
    assert said("mirror_bytes", mirror="pull") is None
    assert said("mirror_bytes", mirror="push") == 5


def test_a_daemon_that_stands_by_says_nothing_of_the_job(
    job: SmallJob, clock: Clock, said: Measured
) -> None:
    said.meter.active(yes=True)
    assert (said("daemon_active"), said("last_scan_timestamp_seconds")) == (1, 1234.5)
    with said.daemon() as loop:
        loop.publish(1)
        report(job, "a", 1)
        clock.advance(10)
        loop.run_once()
    assert said("explorer_lag_versions", explorer="a") == 0
    said.meter.active(yes=False)
    said.meter.active(yes=False)
    assert said("daemon_active") == 0
    for gauge in ("latest_version", "versions", "leases", "paused", "free_bytes"):
        assert said(gauge) is None
    assert said("explorer_lag_versions", explorer="a") is None
    assert said("saves_total", outcome="published") == 1


def test_what_alerts_need_is_there_from_the_first_round_on(job: SmallJob, said: Measured) -> None:
    service = Service(job.root, DaemonConfig(tick=0.05), meter_of=said.metrics.of_job)
    with serving(service):
        opened = job.layout.format.stat().st_mtime
        wait_until(lambda: said("job_opened_timestamp_seconds") == opened, "the first round ends")
        first = {"daemon_active": 1, "paused": 0, "announced_step": -1, "latest_step": -1,
                 "version_bytes": 0, "nonfinite_tensors": 0, "unpublished_seconds": 0}  # fmt: skip
        assert {name: said(name) for name in first} == first
        assert said("last_publish_timestamp_seconds") is None
        away = job.root.rename(job.root.with_name("away"))
        wait_until(lambda: said("blocked", reason="storage") == 1, "the job is missed")
        assert (said("daemon_active"), said("unpublished_seconds")) == (0, None)
        away.rename(job.root)
        wait_until(lambda: said("daemon_active") == 1, "the job is served again")
        job.save(5)
        wait_until(lambda: said("latest_step") == said("announced_step") == 5, "it is published")
        assert (said("version_bytes") or 0) > 0
        assert said("blocked", reason="storage") == 0


def test_a_daemon_that_stands_by_is_not_blocked(job: SmallJob, said: Measured) -> None:
    service = Service(job.root, DaemonConfig(tick=0.05), meter_of=said.metrics.of_job)
    service.open()
    for _ in range(2):
        service._say(DaemonPaused(job.root, OSError(errno.ENOSPC, "full")))
    assert said("blocked", reason="room") == 1
    with job.daemon(), serving(service):
        wait_until(lambda: said("blocked", reason="room") == 0, "it stands by")


def test_storage_that_fails_is_counted_and_stops_nothing(
    ruled: SmallJob, storage: RuledStorage, clock: Clock
) -> None:
    storage.refuse("names", errno.EIO, where="explorers")
    said = Measured(ruled, clock)
    said.meter.round_ended(0.1)
    assert said("errors_total", error="OSError") == 1


def test_an_explorer_that_goes_while_storage_fails_has_no_metrics_for_ever(
    ruled: SmallJob, storage: RuledStorage, clock: Clock
) -> None:
    said = Measured(ruled, clock)
    report(ruled, "a", 1)
    report(ruled, "b", 1)
    storage.refuse("open_read", errno.EIO, where="b.json")
    said.meter.round_ended(0.1)
    assert said.names("explorer_refuses") == {"a"}
    storage.rules.clear()
    (ruled.layout.explorers / "a.json").unlink()
    clock.advance(10)
    said.meter.round_ended(0.1)
    assert said.names("explorer_refuses") == {"b"}


# -- where they can be had -------------------------------------------------------------------------


def test_they_are_served_on_this_host_alone(said: Measured) -> None:
    said.meter.failed(ValueError("x"))
    said.meter.active(yes=True)
    port = free_port()
    with Exporter(said.metrics, port=port, textfile=None):
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
            families = {f.name for f in text_string_to_metric_families(answer.read().decode())}
        assert "syncd_daemon_active" in families
        assert len(families) > 10
        listening = [
            line.split()[1]
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
        ]
        assert listening == [f"0100007F:{port:04X}"]
        with pytest.raises(InvalidSettingsError, match=f"metrics_port = {port} cannot be used"):
            Exporter(said.metrics, port=port, textfile=None)
    with socket.socket() as probe:
        assert probe.connect_ex((HOST, port)) == errno.ECONNREFUSED


def test_the_file_is_whole_at_each_time_and_written_once_more_at_the_end(
    tmp_path: Path, clock: Clock, said: Measured
) -> None:
    path = tmp_path / "metrics" / "syncd.prom"
    path.parent.mkdir()

    def version() -> str:
        found = re.search(r"^syncd_latest_version{.*} (.*)$", path.read_text(), re.MULTILINE)
        return found[1] if found else ""

    gauge = said.metrics.gauges["latest_version"].labels(said.job)
    with Exporter(said.metrics, port=0, textfile=path, clock=clock) as exporter:
        for number, seen in ((1, "1.0"), (2, "1.0"), (3, "3.0")):
            gauge.set(number)
            exporter.tick()
            assert version() == seen
            clock.advance(8)
        gauge.set(4)
    assert version() == "4.0"
    assert list(path.parent.iterdir()) == [path]


def test_a_job_whose_name_is_no_text_has_metrics_too(tmp_path: Path, clock: Clock) -> None:
    job = SmallJob(tmp_path / os.fsdecode(b"caf\xe9"))
    said = Measured(job, clock)
    report(job, "b", 1)
    said.meter.round_ended(0.1)
    said.meter.active(yes=True)
    path = tmp_path / "syncd.prom"
    with Exporter(said.metrics, port=0, textfile=path, clock=clock):
        pass
    assert r"caf\\udce9" in path.read_text()


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, clock: Clock, said: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "none" / "syncd.prom"
    with Exporter(said.metrics, port=0, textfile=path, clock=clock) as exporter:
        for _ in range(3):
            exporter.tick()
            clock.advance(15)
    assert [record.event for record in caplog.records] == ["metrics_unwritten"]


@pytest.mark.parametrize(
    ("name", "folder"), [("PROMETHEUS_MULTIPROC_DIR", "none"), ("prometheus_multiproc_dir", ".")]
)
def test_metrics_are_not_written_for_an_inference_server(
    job: SmallJob, tmp_path: Path, name: str, folder: str
) -> None:
    path, of_server = tmp_path / "syncd.prom", tmp_path / "server"
    of_server.mkdir()
    command = (sys.executable, "-m", "syncd", "run", job.root, "--metrics-textfile", path)
    with Program(*command, **{name: str(of_server / folder)}):
        wait_until(lambda: path.exists() and "daemon_active" in path.read_text(), "it has metrics")
    assert os.listdir(of_server) == []


# -- the documentation -----------------------------------------------------------------------------


def described(metrics: Metrics) -> dict[str, tuple[str, set[str]]]:
    """Name as Prometheus has it → type and labels."""
    found = {}
    for collector in set(metrics.registry._collector_to_names):
        for family in collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            found[name] = family.type, set(collector._labelnames)
    return found


def test_the_page_has_the_list_of_the_metrics() -> None:
    assert (DOCS / "metrics.md").read_text() == page("metrics.md")


def test_names_are_by_prometheus_conventions() -> None:
    for name, (kind, _) in described(Metrics()).items():
        assert name.startswith("syncd_")
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|gb)(_|$)", name)
        if kind == "histogram":
            assert name.endswith("_seconds")


def uses(expression: str) -> dict[str, set[str]]:
    """The metrics of ours that an expression names → labels that it selects them by."""
    return {
        name: set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        for name, selector in re.findall(r"\b(syncd_\w+)(?:\{([^}]*)\})?", expression)
    }


def known(name: str) -> tuple[str, set[str]]:
    """Type and labels of a metric, or of that of which this is a sample."""
    metrics = described(Metrics())
    base = next((name.removesuffix(s) for s in SAMPLES if name.endswith(s)), name)
    return metrics[name if name in metrics else base]


def labels_of(expression: str) -> set[str]:
    return {label for name in uses(expression) for label in known(name)[1]}


def check(expression: str) -> None:
    found = uses(expression)
    assert found, expression
    for name, labels in found.items():
        kind, may = known(name)
        assert (kind == "histogram") == name.endswith(SAMPLES), name
        assert labels <= may, name
    grouped = {
        word.strip()
        for group in re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", expression)
        for word in group.split(",")
    }
    assert grouped <= {"le", "instance"} | labels_of(expression)


def test_every_metric_that_an_alert_names_is_there() -> None:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names))
    for rule in group["rules"]:
        check(rule["expr"])
        assert rule["labels"]["severity"] in {"warning", "critical"}
        notes = rule["annotations"]
        used = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
        grouped = re.findall(r"by \(([^)]*)\)", rule["expr"])
        assert used <= (set(grouped[0].split(", ")) if grouped else {"instance"})
        command = re.findall(r"'([^'{]+)", notes["description"])[0]
        assert command in {"ls ", "df -i "} or find(command.removesuffix(" FILE").strip())
        assert notes["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"
        assert rule["alert"].lower() in anchors(DOCS / "operations.md")


def test_prometheus_scrapes_under_the_name_that_alerts_ask_for() -> None:
    (text,) = blocks("operations.md", "yaml")
    (scraped,) = yaml.safe_load(text)["scrape_configs"]
    assert f'up{{job="{scraped["job_name"]}"}} == 0' in RULES.read_text()
    assert scraped["static_configs"] == [{"targets": ["127.0.0.1:9464"]}]


def test_every_metric_that_the_dashboard_names_is_there_and_none_is_missing() -> None:
    board = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    shown: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            check(target["expr"])
            shown |= set(uses(target["expr"]))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert "syncd_latest_version" in board["templating"]["list"][1]["query"]["query"]
    elsewhere = {"build_info", "config_last_reload_successful", "job_opened_timestamp_seconds",
                 "last_scan_timestamp_seconds", "rollbacks_total", "paused",
                 "last_publish_timestamp_seconds", "trainer_up", "explorer_up"}  # fmt: skip
    bases = {re.sub(r"_bucket$", "", name) for name in shown}
    assert set(described(Metrics())) - bases == {f"syncd_{name}" for name in elsewhere}
