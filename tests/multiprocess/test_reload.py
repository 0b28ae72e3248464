"""SIGHUP lets a daemon read its configuration again: a real process, its log, and its metrics."""

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from syncd.protocol.layout import JobLayout
from tests.jobs import SmallJob
from tests.multiprocess.processes import LEASE_TIME, Daemon, wait_for_step, wait_until
from tests.ports import free_port


def events(daemon: Daemon) -> list[dict[str, Any]]:
    """Every line so far; one that is no JSON fails."""
    return [json.loads(line) for line in daemon.log]


def wait_for(daemon: Daemon, event: str, **fields: object) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        for line in events(daemon):
            if line["event"] == event and fields.items() <= line.items():
                return line
        return None

    return wait_until(found, f"{event} {fields} in {daemon.log}")


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(name)]
    return float(value)


def test_a_running_daemon_takes_over_what_may_change_and_refuses_what_cannot_be_used(
    job: Path, tmp_path: Path
) -> None:
    memory, config, port = tmp_path / "memory", tmp_path / "job.toml", free_port()
    textfile = tmp_path / "syncd.prom"
    base = f'memory_dir = "{memory}"\nmetrics_port = {port}\nmetrics_textfile = "{textfile}"\n'
    base += 'log_format = "json"\n'
    config.write_text(f"{base}keep = 3\nprune_steps = false\n")
    both = SmallJob(job), SmallJob(memory)
    with Daemon(job, "--config", str(config)) as daemon:
        for step in (1, 2, 3):
            for one in both:
                one.save(step)
                wait_for_step(one.root, step)
        assert [len(one.versions) for one in both] == [3, 3]
        assert metric(port, "syncd_config_last_reload_successful") == 1
        for one in both:
            name = f'syncd_saves_total{{job_dir="{one.root}",outcome="published"}}'
            wait_until(lambda name=name: metric(port, name) == 3, "they are counted, one by one")

        config.write_text(f"{base}keep = 1\nprune_steps = false\npointer = 3\n")
        os.kill(daemon.pid, signal.SIGHUP)
        refused = wait_for(daemon, "config_refused", file=str(config))
        assert refused["reason"].startswith(f"{config}: pointer = 3: must be")
        wait_until(lambda: metric(port, "syncd_config_last_reload_successful") == 0, "it is told")

        other = base.replace(f"metrics_port = {port}", "metrics_port = 1")
        config.write_text(f"{other}keep = 1\nprune_steps = false\nlog_level = 'warning'\n")
        os.kill(daemon.pid, signal.SIGHUP)
        wait_for(daemon, "config_changed", key="keep", value=1, before=3)
        wait_for(daemon, "config_needs_restart", key="metrics_port", value=1, in_force=port)
        for one in both:
            wait_until(lambda one=one: one.versions == ["v000003"], "what is kept is less now")
        assert metric(port, "syncd_config_last_reload_successful") == 0
        assert {one.step(1).exists() for one in both} == {True}

        config.write_text(f"{base}keep = 1\n")
        os.kill(daemon.pid, signal.SIGHUP)
        for one in both:
            wait_until(lambda one=one: not one.step(1).exists(), "steps are pruned now")
        wait_until(lambda: metric(port, "syncd_config_last_reload_successful") == 1, "it is told")
        wait_for(daemon, "config_read", file=str(config))
        said = [line["event"] for line in events(daemon)]
        assert said.count("config_read") == 1  # the level was another one at the second
    assert f'syncd_daemon_active{{job_dir="{job}"}} 0.0' in textfile.read_text()
    events(daemon)


def test_a_standby_takes_a_new_configuration_over_and_works_by_it_later(
    job: Path, tmp_path: Path
) -> None:
    config = tmp_path / "job.toml"
    config.write_text('keep = 3\nlog_format = "json"\nprune_steps = false\n')
    told = SmallJob(job)
    with Daemon(job) as first:
        first.wait_for_log("in epoch")
        with Daemon(job, "--config", str(config)) as second:
            wait_for(second, "daemon_stands_by", job=str(job))
            config.write_text('keep = 1\nlog_format = "json"\nprune_steps = false\n')
            os.kill(second.pid, signal.SIGHUP)
            wait_for(second, "config_changed", key="keep")
            assert first.terminate() == 0
            for step in (1, 2):
                told.save(step)
                wait_for_step(job, step)
            wait_until(lambda: told.versions == ["v000002"], "one version is kept")


def test_without_a_file_sighup_ends_the_daemon_as_it_ends_any_program(job: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets a child ignore it
    try:
        with Daemon(job, lease_time=LEASE_TIME) as daemon:
            daemon.wait_for_log("in epoch")
            os.kill(daemon.pid, signal.SIGHUP)
            assert daemon.wait() == -signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
    assert JobLayout(job).root.exists()
