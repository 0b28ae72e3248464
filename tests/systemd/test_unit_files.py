"""What ``syncd unit`` prints, read by systemd's own tools where they are at hand."""

import getpass
import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest

from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    ServerUnreachableError,
)
from syncd.units import files as unit_files
from syncd.units.files import DAEMON, FOLLOWER, program, quoted
from tests.commands import Result, invoke
from tests.programs import completed

ROOT = Path(__file__).parents[2]
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def syncd(*arguments: object) -> Result:
    return invoke("unit", *arguments)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    path = tmp_path / "demo.toml"
    path.write_text(f'job = "{tmp_path}/job"\n')
    return path


def installed(tmp_path: Path, config: Path, *more: object) -> tuple[Path, Path]:
    """The files that the printed script writes, in another folder than systemd's."""
    result = syncd("print", "demo", "--config", config, *more)
    assert result.exit_code == 0, result.output
    to = tmp_path / "a folder" / "units"
    script = result.output.replace("/etc/systemd/system", shlex.quote(str(to)))
    subprocess.run(["sh", "-eu"], input=script, text=True, check=True)
    return to / DAEMON, to / "syncd@demo.service.d" / "job.conf"


def settings(text: str) -> dict[str, list[str]]:
    """Each key's values, in order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_units_in_the_checkout_are_those_that_are_installed() -> None:
    for name in (DAEMON, FOLLOWER):
        theirs = resources.files("syncd.units").joinpath(name).read_text("utf-8")
        assert (ROOT / "systemd" / name).read_text() == theirs


def test_the_script_writes_the_printed_files_with_the_jobs_own_settings(
    tmp_path: Path, config: Path
) -> None:
    config.write_text(
        f'job = "{tmp_path}/job"\nmemory_dir = "/dev/shm/demo"\nshared_group = "rl"\n'
        f'metrics_textfile = "{tmp_path}/metrics/syncd.prom"\n'
    )
    template, drop_in = installed(tmp_path, config, "--group", "users")
    assert settings(template.read_text())["Type"] == ["notify"]
    found = settings(drop_in.read_text())
    places = f"{tmp_path}/job /dev/shm {tmp_path}/metrics"
    assert found["RequiresMountsFor"] == [places]
    assert found["ReadWritePaths"] == [" ".join(f"-{place}" for place in shlex.split(places))]
    assert found["User"] == [getpass.getuser()]
    assert found["Group"] == ["users"]
    assert found["SupplementaryGroups"] == ["rl"]
    assert found["ExecStart"][0] == ""
    assert found["ExecStart"][1].endswith(f"run --config {config}")
    assert found["ExecReload"][1].endswith(f"config check {config}")
    assert found["ExecReload"][2] == "/bin/kill -HUP $MAINPID"
    printed = syncd("print", "demo", "--config", config, "--group", "users", "--json")
    assert [*json.loads(printed.output)["files"].values()] == [
        template.read_text(), drop_in.read_text()
    ]  # fmt: skip


def test_names_that_systemd_would_read_with_their_quotes_are_numbers(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users, groups = {"CORP\\alice": 5556, "alice$": 5557}, {"domain users": 5555, "a,b": 5558}
    monkeypatch.setattr("pwd.getpwnam", lambda name: SimpleNamespace(pw_uid=users[name]))
    monkeypatch.setattr("grp.getgrnam", lambda name: SimpleNamespace(gr_gid=groups[name]))

    def printed(user: str, group: str, shared: str) -> list[str]:
        config.write_text(f'job = "{config.parent}/job"\nshared_group = "{shared}"\n')
        result = syncd("print", "demo", "--config", config, "--user", user, "--group", group)
        found = settings(result.output.partition("job.conf <<'END'")[2])
        return [*found["User"], *found["Group"], *found["SupplementaryGroups"]]

    assert printed("CORP\\alice", "domain users", "a,b") == ["5556", "5555", "5558"]
    assert printed("alice$", "5", "rl") == ["5557", "5", "rl"]
    plain = ["alice@corp.example.com", "r_l-1", "domain.users"]
    assert printed(*plain) == plain


def test_a_unit_runs_the_program_beside_this_python_or_else_the_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "scripts"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert program() == (sys.executable, "-m", "syncd")
    for name in ("path", "scripts"):
        made = tmp_path / name / "syncd"
        made.parent.mkdir()
        made.touch(0o755)
        assert program() == (str(made),)


@pytest.mark.parametrize(("hang_time", "watchdog"), [("10min", None), ("2h", "7920s")])
def test_the_watchdog_waits_longer_than_the_daemon_itself(
    tmp_path: Path, config: Path, hang_time: str, watchdog: str | None
) -> None:
    config.write_text(f'job = "{tmp_path}/job"\nhang_time = "{hang_time}"\n')
    _, drop_in = installed(tmp_path, config)
    assert settings(drop_in.read_text()).get("WatchdogSec") == (watchdog and [watchdog])


def test_a_stop_leaves_alone_what_the_user_has_in_memory() -> None:
    for name in (DAEMON, FOLLOWER):
        text = resources.files("syncd.units").joinpath(name).read_text("utf-8")
        assert settings(text)["RemoveIPC"] == ["no"]


def test_what_would_be_hidden_from_the_service_is_shown_to_it(tmp_path: Path) -> None:
    def drop_in(job: str) -> dict[str, list[str]]:
        instance = unit_files.Instance("x", "u", "g", writes=(Path(job),))
        return settings(unit_files.unit_files(instance)["syncd@x.service.d/job.conf"])

    assert drop_in("/home/u/job")["ProtectHome"] == ["read-only"]
    assert drop_in("/tmp/job")["PrivateTmp"] == ["no"]  # noqa: S108 - named, not used
    assert tmp_path


def test_a_follower_has_its_command_line_and_may_write_where_it_stages(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    said = "curl -d \"$SYNCD_FOLDER\" 'http://localhost/100%'"
    result = syncd(
        "print", "gpu0", "--follow", tmp_path / "job", "--stage", "/nvme/stage/gpu0",
        "--budget", "64", "--command", said, "--memory-dir", "/memory/job", "--option=--ask",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = settings(result.output.partition("syncd-follow@gpu0.service.d/job.conf <<'END'\n")[2])
    reset, command = found["ExecStart"]
    assert reset == ""
    words = shlex.split(command.replace("$$", "$").replace("%%", "%"))
    assert words[-12:] == [
        str(tmp_path / "job"), "--name", "gpu0", "--stage", "/nvme/stage/gpu0",
        "--budget", "64", "--command", said, "--memory-dir", "/memory/job", "--ask",
    ]  # fmt: skip
    assert found["ReadWritePaths"] == [f"-{tmp_path}/job -/nvme/stage -/memory"]
    # A filesystem of its own is written to as it is: names beside it are none of ours.
    result = syncd("print", "x", "--follow", tmp_path / "job", "--stage", "/proc", "--command", "c")
    assert f"ReadWritePaths=-{tmp_path}/job -/proc\n" in result.output


def test_an_engines_follower_has_its_servers_and_a_command_line_that_is_understood(
    tmp_path: Path,
) -> None:
    """Nobody listens at port 9; to wait for that server is what comes after all checks."""
    job = tmp_path / "job"
    job.mkdir()
    servers = ["--engine", "vllm", "--url", "http://127.0.0.1:9/v1", "--url", "http://127.0.0.1:10"]
    waits = ["--option=--start-timeout", "--option=0"]
    result = syncd("print", "gpu0", "--follow", job, *servers, *waits)
    assert result.exit_code == 0, result.output
    found = settings(result.output.partition("syncd-follow@gpu0.service.d/job.conf <<'END'\n")[2])
    words = shlex.split(found["ExecStart"][1])
    at = words.index("follow")
    assert words[at:] == [
        "follow", str(job), "--name", "gpu0", *servers, "--start-timeout", "0",
    ]  # fmt: skip
    assert found["ReadWritePaths"] == [f"-{job}"]
    # One of several servers is waited for longer.
    ended = completed([sys.executable, "-m", "syncd", *words[at:-4], *words[-2:]])
    assert ended.returncode == ServerUnreachableError.exit_code, ended.stderr


@pytest.mark.parametrize(
    ("given", "command", "writes"),
    [
        (["--push", "s3://b/50%", "--stage", "/nvme/stage"],
         ["push", "JOB", "s3://b/50%", "--name", "m", "--stage", "/nvme/stage"], " -/nvme"),
        (["--pull", "s3://b/x", "--option=--rate=1MB"],
         ["pull", "s3://b/x", "JOB", "--rate=1MB"], ""),
    ],
)  # fmt: skip
def test_a_mirrors_unit_has_a_command_line_that_is_understood(
    tmp_path: Path, given: list[str], command: list[str], writes: str
) -> None:
    result = syncd("print", "m", "--follow", tmp_path, *given)
    found = settings(result.output.partition("syncd-follow@m.service.d/job.conf <<'END'\n")[2])
    words = shlex.split(found["ExecStart"][1].replace("%%", "%"))
    at = words.index("mirror")
    assert words[at + 1 :] == [str(tmp_path) if one == "JOB" else one for one in command]
    assert found["ReadWritePaths"] == [f"-{tmp_path}{writes}"]
    assert "--json" in completed([sys.executable, "-m", "syncd", *words[at:], "--help"]).stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["demo", "--stage", "/x/y"], "need --follow"),
        (["demo", "--url", "http://h"], "need --follow"),
        (
            ["demo", "--follow", "{job}"],
            "give one of --engine, --link, --command, --push and --pull",
        ),
        (["demo", "--follow", "{job}", "--engine", "vllm"], "--engine and --url belong together"),
        (["demo", "--follow", "{job}", "--engine", "x"], "'x' is not one of 'vllm', 'sglang'"),
        (["demo", "--follow", "{job}", "--link", "/link"], "is in the root folder"),
        (["../demo"], "cannot be part of a file name"),
        (["demo", "--config", "{job}/none.toml"], "cannot read the configuration"),
        (["demo", "--follow", "{job}", "--link", "/link/a\nb"], "a unit file cannot hold"),
        (["demo", "--user", "a\nb", "--config", "{job}/../demo.toml"], r"a\nb, and this host does"),
        (
            ["demo", "--group", "no one", "--config", "{job}/../demo.toml"],
            "give the number instead",
        ),
    ],
)
def test_what_cannot_be_a_unit_is_said(
    tmp_path: Path, config: Path, words: list[str], why: str
) -> None:
    assert config.exists()
    result = syncd("print", *(word.format(job=tmp_path / "job") for word in words))
    assert result.exit_code != 0
    assert why in result.output + str(result.exception)


@pytest.mark.parametrize("text", ["", "job = 1\n", 'job = "a/b"\n', "job = [\n"])
def test_a_configuration_without_a_job_is_no_unit(config: Path, text: str) -> None:
    config.write_text(text)
    result = syncd("print", "demo", "--config", config)
    assert isinstance(result.exception, InvalidSettingsError)
    assert str(config) in str(result.exception)


def test_a_job_that_is_not_there_is_said(tmp_path: Path, config: Path) -> None:
    (tmp_path / "job").rmdir()
    assert isinstance(syncd("print", "demo", "--config", config).exception, JobUnavailableError)


# -- read by systemd -------------------------------------------------------------------------------


@needs_systemd
def test_the_daemons_unit_is_hardened(tmp_path: Path, config: Path) -> None:
    """1.5 at most; a unit that says nothing of it has 9.6."""
    template, _ = installed(tmp_path, config, "--user", "trainer")
    unit = template.with_name("syncd@demo.service")
    shutil.copy(template, unit)  # with the drop-in of that name
    done = completed(
        ["systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager", unit]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout


@needs_systemd
@pytest.mark.parametrize("name", ["plain", "a b", 'a "b"', "100%", "back\\slash", "dollar$HOME"])
def test_systemd_reads_any_path_as_it_was_meant(tmp_path: Path, name: str) -> None:
    job = tmp_path / name
    job.mkdir()
    config = tmp_path / "demo.toml"
    escaped = str(job).replace("\\", "\\\\").replace('"', '\\"')
    config.write_text(f'job = "{escaped}"\n')
    template, drop_in = installed(tmp_path, config, "--user", "root")
    assert quoted(job) in drop_in.read_text()
    unit = template.with_name("syncd@demo.service")
    shutil.copy(template, unit)
    done = completed(
        ["systemd-analyze", "verify", "--man=no", unit],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    ours = [line for line in done.stderr.splitlines() if "syncd@demo" in line or "job.conf" in line]
    assert ours == []
