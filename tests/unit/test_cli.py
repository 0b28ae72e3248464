from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import syncd.cli as syncd_cli
from syncd import __version__
from syncd.cli import cli
from syncd.daemon.config import DaemonConfig
from syncd.protocol import errors
from tests.jobs import Job

FIXTURES = Path(__file__).parents[1] / "fixtures"
COMMANDS = cli.list_commands(click.Context(cli))


def syncd(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture
def served(job: Job) -> Job:
    """A job with versions 1 to 3, and steps 1 to 3."""
    with job.daemon(DaemonConfig(keep=9, prune_steps=False)) as loop:
        for step in (1, 2, 3):
            job.save(step)
            loop.run_once()
    return job


# -- every command ---------------------------------------------------------------------------------


def test_the_group_lists_every_command_there_is() -> None:
    result = syncd("-h")
    for name in COMMANDS:
        assert f"  {name} " in result.output
    modules = (path.stem for path in Path(syncd_cli.__file__).parent.glob("*.py"))
    ours = {
        name
        for name in modules
        if name != "__init__" and hasattr(import_module(f"syncd.cli.{name}"), "command")
    }
    added = {point.name for point in entry_points(group="syncd.commands")}
    assert set(COMMANDS) == ours | added


def test_an_unknown_command_or_option_is_an_error_of_use() -> None:
    assert syncd("nothing").exit_code == 2
    assert syncd("status", "job", "--nothing").exit_code == 2
    assert syncd("--version").output == f"syncd, version {__version__}\n"


# -- merge -----------------------------------------------------------------------------------------


def merged(tmp_path: Path, kind: str = "torch-2.15.0/fsdp2") -> Path:
    actor = tmp_path / "global_step_7" / "actor"
    actor.mkdir(parents=True)
    for shard in (FIXTURES / kind).glob("model_*.pt"):
        (actor / shard.name).write_bytes(shard.read_bytes())
    return actor


def test_a_checkpoint_is_merged_without_a_daemon_and_verified(tmp_path: Path) -> None:
    actor, out = merged(tmp_path), tmp_path / "out" / "model"
    result = syncd("merge", actor, out, "--no-fsync")
    assert result.exit_code == 0, result.output
    assert "checked by crc32" in result.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["sequence"], manifest["step"]) == (0, 7)
    assert (out / "model.safetensors").exists()
    verified = syncd("verify", out)
    assert verified.exit_code == 0
    assert "model: step 7, whole (sizes, headers, digests)" in verified.output


@pytest.mark.parametrize("terminal", [True, False])
def test_a_merge_shows_a_bar_on_a_terminal_and_nothing_elsewhere(
    tmp_path: Path, terminal: bool
) -> None:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    argv = (sys.executable, "-m", "syncd", "merge", merged(tmp_path), tmp_path / "out")
    with subprocess.Popen(
        [*map(str, argv), "--no-fsync"],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(theirs)
        told = b""
        with os.fdopen(ours, "rb", 0) as reading:
            try:
                while part := reading.read(4096):
                    told += part
            except OSError:
                pass  # how a terminal says that nobody holds its other end
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert printed.startswith(b"merged ")
    assert (b"29.7/29.7 kB" in told) == terminal
    assert told == b"" or terminal


def test_several_files_have_an_index(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--no-fsync", "--max-shard-size", 300, "--digest", "off")
    assert syncd("merge", merged(tmp_path), out, *arguments).exit_code == 0
    assert (out / "model.safetensors.index.json").exists()
    assert "sizes and headers alone" in syncd("verify", out).output


def test_a_folder_that_holds_something_is_never_merged_into(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    result = syncd("merge", merged(tmp_path), out)
    assert isinstance(result.exception, errors.InvalidSettingsError)
    assert list(out.iterdir()) == [out / "mine"]


@pytest.mark.parametrize(
    ("damage", "error"),
    [("missing rank", errors.SaveNotReadyError), ("torn shard", errors.ShardFormatError)],
)
def test_a_merge_that_fails_leaves_nothing(
    tmp_path: Path, damage: str, error: type[errors.SyncdError]
) -> None:
    actor, out = merged(tmp_path), tmp_path / "out"
    shard = actor / "model_world_size_4_rank_3.pt"
    if damage == "missing rank":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-10])
    result = syncd("merge", actor, out)
    assert isinstance(result.exception, error)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_7"]


# -- verify ----------------------------------------------------------------------------------------


def test_all_versions_of_a_job_are_verified(served: Job) -> None:
    result = syncd("verify", served.layout.root)
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.output.splitlines()] == served.versions


def test_a_damaged_version_is_named_and_the_others_are_still_read(served: Job) -> None:
    served.put(served.layout.version(2) / "config.json", b"other")
    result = syncd("verify", served.layout.root)
    assert isinstance(result.exception, errors.VerificationError)
    assert str(result.exception).endswith("v000002")
    assert "config.json: its size is not what the manifest says" in result.output
    assert result.output.count("whole") == 2


def test_a_folder_that_is_no_job_says_so(tmp_path: Path) -> None:
    result = syncd("verify", tmp_path)
    assert isinstance(result.exception, errors.InvalidSettingsError)
    assert "is no version, and no job with published versions" in str(result.exception)


# -- for scripts -----------------------------------------------------------------------------------


def test_what_was_done_is_one_json_object(served: Job, tmp_path: Path) -> None:
    def told(*arguments: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(syncd(*arguments, "--json").stdout)
        return found

    root = served.layout.root
    merged_into = told("merge", merged(tmp_path), tmp_path / "out", "--no-fsync")
    assert (merged_into["step"], merged_into["kind"], merged_into["checked"]) == (
        7,
        "full",
        "crc32",
    )
    assert "model.safetensors" in merged_into["files"]
    served.put(served.layout.version(2) / "config.json", b"other")
    assert {one["folder"]: one["outcome"] for one in told("verify", root)["folders"]} == {
        "v000001": "whole", "v000002": "damaged", "v000003": "whole",
    }  # fmt: skip
    assert syncd("verify", root, "--json").exception is not None
    would = told("prune", root, "--dry-run", "--keep", 2)
    assert (would["dry_run"], would["deleted"][0]["name"]) == (True, "v000001")
    assert told("prune", root, "--keep", 2)["deleted"] == would["deleted"]
    asked = told("rollback", root, "v2")
    assert (asked["of"], asked["version"]) == (2, None)
    assert "no daemon works" in asked["waits_for"]


# -- status ----------------------------------------------------------------------------------------


def test_status_as_json_is_one_object(served: Job) -> None:
    served.lease(2, "session", "node-1")
    seen = json.loads(syncd("status", served.layout.root, "--json").output)
    assert seen["latest"]["sequence"] == 3
    assert seen["daemon"]["state"] == "stopped"
    assert seen["versions"][1] == {"sequence": 2, "leases": ["node-1"], "pinned": False}
    assert (seen["publishing"], seen["daemon_lock_held"], seen["quarantined"]) == (False, False, [])


def test_status_for_people_says_what_is_published_and_leased(served: Job) -> None:
    served.lease(2, "session", "node-1")
    report = {"name": "node-1", "session": "s", "status": "running", "sequence": 2, "time": 1.0}
    served.layout.explorer("node-1").write_text(json.dumps(report))
    result = syncd("status", served.layout.root)
    assert result.exit_code == 0
    assert "latest   version 3, step 3" in result.output
    assert "on disk  1, 2 (node-1), 3" in result.output
    assert "3 published" in result.output
    assert re.search(r"^node-1 +running +2 +- +1 +- ", result.output, re.MULTILINE)


def test_status_shows_what_it_can_of_a_damaged_job(served: Job) -> None:
    for path in (served.layout.latest, served.layout.daemon_report):
        path.write_bytes(b"\x00")
    result = syncd("status", served.layout.root)
    assert result.exit_code == 0
    assert "nothing is published yet" in result.output


@pytest.mark.parametrize("name", ["status", "prune"])
def test_a_folder_that_syncd_never_served_says_so(tmp_path: Path, name: str) -> None:
    result = syncd(name, tmp_path)
    assert isinstance(result.exception, errors.JobUnavailableError)
    assert "is not a job that syncd has served" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


# -- prune -----------------------------------------------------------------------------------------


def everything(job: Job) -> set[Path]:
    return set(job.layout.root.rglob("*"))


def test_a_dry_run_says_what_would_go_and_changes_nothing(served: Job) -> None:
    before = everything(served)
    result = syncd("prune", served.layout.root, "--dry-run", "--keep", "1")
    assert result.exit_code == 0
    assert everything(served) == before
    assert result.output.splitlines() == [
        "would delete version v000001: not among the newest 1, and not leased",
        "would delete version v000002: not among the newest 1, and not leased",
        "would delete global_step_2: published, and not a full checkpoint",
        "would delete global_step_1: published, and not a full checkpoint",
    ]


def test_pruning_deletes_what_the_dry_run_said(served: Job) -> None:
    said = syncd("prune", served.layout.root, "--dry-run", "--keep", "2").output
    done = syncd("prune", served.layout.root, "--keep", "2").output
    assert done == said.replace("would delete", "deleted")
    assert served.versions == ["v000002", "v000003"]
    assert len(served.audit) == 3
    assert syncd("prune", served.layout.root).output == "nothing to delete\n"


# -- errors ----------------------------------------------------------------------------------------


def subclasses(base: type[errors.SyncdError]) -> set[type[errors.SyncdError]]:
    return {base}.union(*(subclasses(kind) for kind in base.__subclasses__()))


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        if len(words) > 1 and words[0].endswith("Error") and words[1].isdigit():
            drawn[words[0]] = int(words[1])
    kinds = subclasses(errors.SyncdError)
    assert drawn == {kind.__name__: kind.exit_code for kind in kinds}


def test_every_error_says_when_it_is_raised() -> None:
    for kind in subclasses(errors.SyncdError) - {errors.SyncdError}:
        assert (kind.__doc__ or "").startswith("Raised when ")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(["status", "."], 11, "syncd: . is not a job"), (["verify", "."], 2, "syncd: . is no version"),
     (["run", "missing"], 11, "missing is not there: create"),
     (["merge", ".", "out"], 5, "syncd: ")],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_an_error_is_one_line_and_its_exit_code(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "syncd", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == code
    assert done.stderr.startswith("syncd: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


# -- pin, rollback, pause --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "folder"),
    [("v2", "v000002"), ("v000002", "v000002"), ("2", "global_step_2"),
     ("global_step_2", "global_step_2")],
)  # fmt: skip
def test_a_bare_number_is_a_step_and_a_version_is_named_by_its_v(
    served: Job, given: str, folder: str
) -> None:
    assert syncd("pin", served.layout.root, given).output == f"{folder} is pinned\n"
    told = json.loads(syncd("status", served.layout.root, "--json").output)
    pinned = [v["sequence"] for v in told["versions"] if v["pinned"]]
    assert (pinned, told["pinned_steps"]) == (([2], []) if given[0] == "v" else ([], [2]))
    assert syncd("unpin", served.layout.root, given).output == f"{folder} is not pinned any more\n"
    assert syncd("unpin", served.layout.root, given).output == f"{folder} was not pinned\n"


@pytest.mark.parametrize("given", ["v", "v0", "-1", "two", "v2.0", "global_step_", "v-2", ""])
def test_what_is_no_name_of_a_version_or_step_is_an_error_of_use(served: Job, given: str) -> None:
    assert syncd("pin", served.layout.root, "--", given).exit_code == 2
    assert syncd("rollback", served.layout.root, "--", given).exit_code == 2


def test_a_rollback_to_a_step_says_which_name_was_meant(served: Job) -> None:
    result = syncd("rollback", served.layout.root, "2")
    assert result.exit_code == 2
    assert "say v2?" in result.output


def test_what_is_not_there_is_an_error_of_its_own(served: Job, tmp_path: Path) -> None:
    for arguments in (("pin", "v9"), ("rollback", "v9")):
        failed = syncd(arguments[0], served.layout.root, arguments[1]).exception
        assert isinstance(failed, errors.VersionGoneError)
    assert isinstance(syncd("pin", tmp_path, "1").exception, errors.JobUnavailableError)
    assert isinstance(syncd("pause", tmp_path).exception, errors.JobUnavailableError)


def test_a_paused_job_says_so_and_is_not_pruned_by_hand(served: Job) -> None:
    assert "no daemon works on this job now" in syncd("pause", served.layout.root).output
    assert "paused   by" in syncd("status", served.layout.root).output
    refused = syncd("prune", served.layout.root, "--keep", 1)
    assert "is paused" in str(refused.exception)
    assert syncd("prune", served.layout.root, "--dry-run").output == "nothing to delete\n"
    assert "as soon as a daemon works on it" in syncd("resume", served.layout.root).output
    assert syncd("resume", served.layout.root).output == "was not paused\n"
    assert syncd("prune", served.layout.root, "--keep", 1).exit_code == 0
    assert served.versions == ["v000003"]
