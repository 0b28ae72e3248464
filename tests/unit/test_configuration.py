import json
import re
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from syncd.cli import cli, options
from syncd.daemon.config import LIVE_KEYS, DaemonConfig, Quantity, RunConfig
from syncd.daemon.configuration import (
    DEFAULT,
    KEYS,
    ConfigReloader,
    GivenValue,
    load,
    misspelt,
    to_toml,
)
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.gone import GONE
from tests.commands import invoke
from tests.doc_blocks import blocks
from tests.programs import completed
from tests.refusals import invalid


def file(tmp_path: Path, content: str, name: str = "job.toml") -> Path:
    path = tmp_path / name
    path.write_text(content)
    return path


def mistakes(path: Path, **environ: str) -> list[str]:
    with pytest.raises(InvalidSettingsError) as raised:
        load(path, environ)
    assert raised.value.exit_code == 2
    return str(raised.value).splitlines()


# -- where values come from ------------------------------------------------------------------------


def test_of_four_sources_the_last_one_that_has_a_key_counts(tmp_path: Path) -> None:
    path = file(tmp_path, 'keep = 3\ntick = 2\nkeep_deltas = 8\njob = "/jobs/a"')
    environ = {"SYNCD_TICK": "3", "SYNCD_KEEP_DELTAS": "16", "SYNCD_LAB": "not ours", "KEEP": "9"}
    found = load(path, environ, {"keep_deltas": GivenValue(32, "--keep-deltas", is_local=True)})
    assert (found.config.keep, found.config.tick, found.config.keep_deltas) == (3, 3.0, 32)
    assert found.config.digests
    assert found.job == Path("/jobs/a")
    assert found.sources["keep"] == str(path)
    assert found.sources["tick"] == "SYNCD_TICK"
    assert found.sources["keep_deltas"] == "--keep-deltas"
    assert found.sources["digests"] == DEFAULT


def test_the_command_line_says_only_what_was_typed(tmp_path: Path) -> None:
    run = cli.get_command(click.Context(cli), "run")
    assert run is not None
    words = ["job", "--no-prune-foreign", "--digest", "off", "--keep", "2", "--dtype", "bf16"]
    said = options.given(run.make_context("run", words))
    assert {key: (one.value, one.source) for key, one in said.items()} == {
        "job": (Path("job"), "JOB"),
        "prune_foreign": (False, "--prune-foreign"),
        "digests": ("off", "--digest"),
        "keep": (2, "--keep"),
        "cast": ("bf16", "--dtype"),
    }
    found = load(file(tmp_path, "prune_foreign = true\nexit_when_idle = true\n"), {}, said).config
    assert (found.prune_foreign, found.digests, found.job) == (False, False, Path("job"))
    assert found.exit_when_idle


def test_a_daemon_without_a_job_says_where_to_name_it(tmp_path: Path) -> None:
    path = file(tmp_path, "keep = 3\n")
    with invalid(f"no job is given.*{path}"):
        CliRunner().invoke(cli, ["run", "--config", str(path)], catch_exceptions=False)


def test_no_file_and_no_environment_are_the_defaults() -> None:
    found = load(None, {})
    assert found.config == RunConfig()
    assert set(found.sources.values()) == {DEFAULT}
    with invalid("--config FILE"):
        _ = found.job


@pytest.mark.parametrize("said", ["true", "on", "yes", "1"])
def test_the_environment_says_yes_in_many_ways(said: str) -> None:
    assert load(None, {"SYNCD_EXIT_WHEN_IDLE": said}).config.exit_when_idle


def test_an_empty_text_stands_for_none(tmp_path: Path) -> None:
    path = file(tmp_path, 'cast = "bf16"\nmemory_dir = "/dev/shm/x"')
    found = load(path, {"SYNCD_CAST": "", "SYNCD_MEMORY_DIR": ""}).config
    assert (found.cast, found.memory_dir) == (None, None)


def test_variables_that_look_like_a_key_s_are_found_and_no_others() -> None:
    theirs = ("TEST_MOUNTS", "KILL_STRIDE", "LAB", "STEP", "SEQUENCE", "FOLDER", "KIND", "KEEP")
    environ = {f"SYNCD_{name}": "1" for name in theirs} | {"KEPE": "1", "SYNCD_KEPE": "1"}
    assert misspelt(environ) == {"SYNCD_KEPE": "SYNCD_KEEP"}


# -- durations and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "said", "meant"),
    [
        ("tick", "500ms", 0.5),
        ("tick", "2s", 2.0),
        ("dead_reader_grace", "15min", 900.0),
        ("dead_reader_grace", "1.5 h", 5400.0),
        ("dead_reader_grace", "1d", 86400.0),
        ("max_shard_size", "4GB", 4_000_000_000),
        ("max_shard_size", "1.5GiB", 1_610_612_736),
        ("max_shard_size", "250 MB", 250_000_000),
        ("max_shard_size", "7B", 7),
    ],
)
def test_durations_and_sizes_may_have_a_unit(
    tmp_path: Path, key: str, said: str, meant: float
) -> None:
    assert getattr(load(file(tmp_path, f'{key} = "{said}"'), {}).config, key) == meant
    assert getattr(load(None, {f"SYNCD_{key.upper()}": said}).config, key) == meant


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("keep = 0", "keep = 0: must be a whole number, 1 or more"),
        ("keep = 2.5", "keep = 2.5: must be a whole number, 1 or more"),
        ("keep = true", "keep = true: must be a whole number, 1 or more"),
        ("keep = []", "keep = []: must be a whole number, 1 or more"),
        ("metrics_port = 65536", "must be a whole number, 0 or more, at most 65535"),
        ('digests = "perhaps"', 'digests = "perhaps": must be true or false'),
        (
            'cast = "bf17"',
            'cast = "bf17": must be one of "bf16", "fp16", "fp32", or "" to leave it unset',
        ),
        (
            'memory_dir = "shm"',
            'memory_dir = "shm": must be an absolute path, or "" to leave it unset',
        ),
        (r'memory_dir = "/a\u0000b"', "must be an absolute path"),
        ("memory_dir = 3", 'memory_dir = 3: must be an absolute path, or "" to leave it unset'),
        (
            'metrics_textfile = "/var/syncd.txt"',
            'metrics_textfile = "/var/syncd.txt": must be an absolute path that ends with '
            '.prom, or "" to leave it unset',
        ),
        (
            'tick = "5 parsecs"',
            'tick = "5 parsecs": must be a number of seconds, or text such as "500ms", "30s", '
            '"5min", "2h", above 0, at most 60',
        ),
        ("lease_time = nan", "must be a number of seconds"),
        ("lease_time = 1e-300", "0.05 or more, at most 3600"),
        ("dead_reader_grace = inf", "must be a number of seconds"),
        ("dead_reader_grace = -1", "0 or more"),
        ("kepe = 3", "kepe = 3: unknown key; did you mean keep?"),
        ('dtype = "bf16"', "unknown key; did you mean cast?"),
        ("keep-versions = 3", "keep-versions = 3: unknown key"),
        (
            "[syncd]\nkeep = 3",
            "[syncd]: unknown key: write all keys at the top level of the file, without a table",
        ),
        ('"" = 1', "unknown key"),
        ("day = 1979-05-27", 'day = "1979-05-27": unknown key'),
    ],
)
def test_a_mistake_says_file_key_what_was_found_and_what_is_allowed(
    tmp_path: Path, content: str, said: str
) -> None:
    path = file(tmp_path, content)
    (line,) = mistakes(path)
    assert line.startswith(f"{path}: ")
    assert said in line


def test_a_removed_key_option_or_command_ends_with_what_to_do_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gone in ("keep_all", "unit keep-all"):
        monkeypatch.setitem(GONE, gone, "set keep")
    path = file(tmp_path, "keep_all = true")
    assert mistakes(path) == [f"{path}: keep_all = true: this key was removed: set keep"]
    environ = {"SYNCD_KEEP_ALL": "1"}
    (line,) = mistakes(file(tmp_path, ""), **environ)
    assert line == 'SYNCD_KEEP_ALL: keep_all = "1": this key was removed: set keep'
    assert misspelt(environ) == {}
    for words in (["run", "job", "--keep-all"], ["unit", "keep-all", "job"]):
        removed = invoke(*words).exception
        assert isinstance(removed, InvalidSettingsError)
        name = next(word for word in words if word.endswith("keep-all"))
        assert str(removed) == f"{name} was removed: set keep"


def test_every_mistake_has_a_line_of_its_own(tmp_path: Path) -> None:
    lines = mistakes(file(tmp_path, "keep = 0\ntick = 61\nkepe = 1\n"), SYNCD_KEEP_DELTAS="none")
    assert len(lines) == 4
    assert "the environment: SYNCD_KEEP_DELTAS" in next(x for x in lines if "DELTAS" in x)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"keep = ", "is not TOML"),
        (b"keep = 1\nkeep = 2", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"x = " + b"[" * 100_000, "is not TOML"),
        (b"keep = " + b"9" * 5000, "is not TOML"),
        (b"#" * (1024 * 1024 + 1), "larger than 1 MiB"),
    ],
)
def test_what_is_no_toml_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    (line,) = mistakes(path)
    assert said in line
    assert str(path) in line


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert "none.toml: No such file" in mistakes(tmp_path / "none.toml")[0]
    assert ": Is a directory" in mistakes(tmp_path)[0]


def test_a_value_cannot_add_lines_or_escapes_to_a_message(tmp_path: Path) -> None:
    (line,) = mistakes(file(tmp_path, 'cast = "a\\nb\\u001b[31m' + "x" * 1000 + '"'))
    assert line.isprintable()
    assert len(line) < 500


# -- the commands ----------------------------------------------------------------------------------


def test_check_says_that_a_file_can_be_used(tmp_path: Path) -> None:
    result = invoke("config", "check", file(tmp_path, 'job = "/jobs/a"\nkeep = 3'))
    assert result.exit_code == 0
    assert "can be used for the job /jobs/a; keys: 2" in result.output


def test_check_and_run_end_with_a_line_for_each_mistake(tmp_path: Path) -> None:
    path = file(tmp_path, "keep = 0\nkepe = 1\n")
    for command in (["config", "check", path], ["run", tmp_path, "--config", path]):
        done = completed([sys.executable, "-m", "syncd", *command])
        assert done.returncode == 2
        assert done.stderr.startswith(f"syncd: {path}: keep = 0")
        assert done.stderr.count("\n") == 2
        assert done.stdout == ""


def test_show_says_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCD_KEEP", "7")
    monkeypatch.setenv("SYNCD_TIKC", "7")
    path = file(tmp_path, 'tick = "500ms"')
    result = invoke("config", "show", path)
    assert re.search(rf"^tick = 0.5 +# {re.escape(str(path))}$", result.stdout, re.MULTILINE)
    assert re.search(r"^keep = 7 +# SYNCD_KEEP$", result.stdout, re.MULTILINE)
    assert re.search(r"^digests = true +# default$", result.stdout, re.MULTILINE)
    assert "ignoring SYNCD_TIKC; did you mean SYNCD_TICK?" in result.stderr
    told = json.loads(invoke("config", "show", path, "--json").stdout)
    assert told["keep"] == {"value": 7, "source": "SYNCD_KEEP"}
    assert set(told) == set(KEYS)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=20)
CONFIGS = st.builds(
    RunConfig,
    keep=st.integers(1, 2**62),
    tick=st.floats(0, 60, exclude_min=True),
    cast=st.sampled_from([None, "bf16", "fp16", "fp32"]),
    dead_reader_grace=st.floats(0, 1e300),
    memory_dir=st.none() | NAMES.map(lambda name: Path("/") / f"x{name}"),
    prune_steps=st.booleans(),
    job=NAMES.map(lambda name: Path("/jobs") / f"x{name}"),
)


@given(CONFIGS)
def test_what_show_prints_is_read_as_the_same_again(before: RunConfig) -> None:
    found = load(None, {}, {k: GivenValue(getattr(before, k), "", is_local=True) for k in KEYS})
    shown = tomllib.loads(to_toml(found))
    again = load(None, {}, {key: GivenValue(value, "") for key, value in shown.items()})
    assert again.config == before


@given(st.text(max_size=30), st.sampled_from(["tick", "max_shard_size", "keep", "cast", "job"]))
def test_any_text_is_a_value_or_a_mistake(text: str, key: str) -> None:
    try:
        load(None, {f"SYNCD_{key.upper()}": text})
    except InvalidSettingsError as error:
        said = str(error)
    else:
        said = "-"
    assert len(said.splitlines()) == 1


# -- reading it again ------------------------------------------------------------------------------


def test_a_new_configuration_is_taken_over_but_for_what_needs_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = file(tmp_path, 'job = "/jobs/a"\nkeep = 3\nmetrics_port = 1000\n')
    applied: list[RunConfig] = []
    reloader = ConfigReloader(lambda: load(path, {}), applied=applied.append)
    path.write_text('job = "/jobs/b"\nkeep = 1\nlease_time = 60\nmetrics_port = 1000\n')
    config = reloader.again()
    assert config is not None
    assert (config.keep, config.job, config.lease_time) == (1, Path("/jobs/a"), 30.0)
    assert reloader.current.config == config
    assert applied[1:] == [config]
    assert not reloader.whole
    assert [(r.event, r.fields.get("key")) for r in caplog.records] == [
        ("config_needs_restart", "job"),
        ("config_changed", "keep"),
        ("config_needs_restart", "lease_time"),
        ("config_read", None),
    ]
    caplog.clear()
    path.write_text('job = "/jobs/a"\nmetrics_port = 1000\n')
    again = reloader.again()
    assert again is not None
    assert again.keep == 2
    assert reloader.whole


def test_a_configuration_that_cannot_be_used_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file(tmp_path, "keep = 3\n")
    applied: list[RunConfig] = []
    reloader = ConfigReloader(lambda: load(path, {}), applied=applied.append)
    for content in ("keep = 1\ntick = 0\n", "keep = ", None):
        path.unlink() if content is None else path.write_text(content)
        assert reloader.again() is None
        assert not reloader.whole
    assert reloader.current.config.keep == 3
    assert len(applied) == 1
    assert "tick = 0: must be" in caplog.text
    assert "so the old one stays in force" in caplog.text


def test_the_command_line_stays_above_a_file_that_is_read_again(tmp_path: Path) -> None:
    path = file(tmp_path, "keep = 3\n")
    said = {"keep": GivenValue(5, "--keep", is_local=True)}
    reloader = ConfigReloader(lambda: load(path, {}, said))
    path.write_text("keep = 1\n")
    again = reloader.again()
    assert again is not None
    assert again.keep == 5
    assert reloader.whole


# -- the documentation -----------------------------------------------------------------------------


def test_the_example_of_the_documentation_can_be_used(tmp_path: Path) -> None:
    found = load(file(tmp_path, blocks("configuration.md", "toml")[0]), {})
    assert found.config.max_shard_size == 4_000_000_000
    assert found.config.dead_reader_grace == 600


def test_every_number_with_a_unit_says_which_one() -> None:
    for name, field in DaemonConfig.model_fields.items():
        if field.annotation is float:
            assert any(isinstance(mark, Quantity) for mark in field.metadata), name
    assert set(KEYS) >= LIVE_KEYS
