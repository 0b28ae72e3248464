import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import pytest

import syncd.cli as syncd_cli
from syncd import __version__
from syncd.cli import cli, steer
from syncd.daemon.config import DaemonConfig
from syncd.operate.offline import prune_now
from syncd.protocol import errors
from syncd.protocol.names import MANIFEST
from syncd.storage.job import Job, step_folders
from syncd.storage.judge import Judge
from syncd.storage.sessions import DaemonLock
from tests.commands import Result, invoke
from tests.explorers import publish
from tests.jobs import LEASE_TIME, SmallJob, edit
from tests.multiprocess.processes import wait_until
from tests.storages import FastStorage

FIXTURES = Path(__file__).parents[1] / "fixtures"
COMMANDS = cli.list_commands(click.Context(cli))


def syncd(command: str, *arguments: object) -> Result:
    """A command; a job stands for its path."""
    words = (given.layout.root if isinstance(given, Job) else given for given in arguments)
    return invoke(command, *words)


def failed(kind: type[errors.SyncdError], command: str, *arguments: object) -> Result:
    result = syncd(command, *arguments)
    assert isinstance(result.exception, kind)
    return result


def printed(command: str, *arguments: object) -> dict[str, Any]:
    return json.loads(syncd(command, *arguments, "--json").stdout)


@pytest.fixture
def served(job: SmallJob) -> SmallJob:
    """A job with versions 1 to 3, and steps 1 to 3."""
    with job.daemon(DaemonConfig(keep=9, prune_steps=False)) as loop:
        loop.publish(1, 2, 3)
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
    steering = {name for name, one in vars(steer).items() if isinstance(one, click.Command)}
    added = {point.name for point in entry_points(group="syncd.commands")}
    assert set(COMMANDS) == ours | steering | added


def test_the_help_says_of_a_hooks_command_what_it_says_of_itself() -> None:
    with click.Context(cli) as context:
        command = cli.get_command(context, "follow")
    assert command is not None
    assert command.get_short_help_str(limit=100) in syncd_cli._COMMANDS.values()


def test_an_unknown_command_or_option_is_an_error_of_use() -> None:
    assert syncd("nothing").exit_code == 2
    assert syncd("status", "job", "--nothing").exit_code == 2
    assert "Did you mean 'status'?" in syncd("statsu").output
    assert "Did you mean" not in syncd("zzz").output
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
        shown = b""
        with os.fdopen(ours, "rb", 0) as reading:
            try:
                while part := reading.read(4096):
                    shown += part
            except OSError:
                pass  # how a terminal says that nobody holds its other end
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert printed.startswith(b"merged ")
    assert (b"29.7/29.7 kB" in shown) == terminal
    assert shown == b"" or terminal


def test_several_files_have_an_index(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--no-fsync", "--max-shard-size", "0.3kB", "--digest", "off")
    assert syncd("merge", merged(tmp_path), out, *arguments).exit_code == 0
    assert (out / "model.safetensors.index.json").exists()
    assert "only sizes and headers" in syncd("verify", out).output


def test_a_folder_that_holds_something_is_never_merged_into(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    failed(errors.InvalidSettingsError, "merge", merged(tmp_path), out)
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
    failed(error, "merge", actor, out)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_7"]


def test_a_folder_without_a_save_says_what_was_looked_for(tmp_path: Path) -> None:
    actor, out = merged(tmp_path), tmp_path / "new" / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path, actor.parent):
        said = str(failed(errors.SaveNotReadyError, "merge", folder, out).exception)
        assert said.startswith(f"{folder} ")
        assert "looked for model_world_size_N_rank_R.pt, model.safetensors, " in said
        assert (f"give its actor folder instead: {actor}" in said) == (folder == actor.parent)
    assert not out.parent.exists()


# -- verify ----------------------------------------------------------------------------------------


def test_all_versions_of_a_job_are_verified(served: SmallJob) -> None:
    result = syncd("verify", served)
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.output.splitlines()] == served.versions


def test_a_damaged_version_is_named_and_the_others_are_still_read(served: SmallJob) -> None:
    served.put(served.version(2) / "config.json", b"other")
    result = failed(errors.VerificationError, "verify", served)
    assert str(result.exception).endswith("v000002")
    assert "config.json: its size is not what the manifest says" in result.output
    assert result.output.count("whole") == 2


def test_weights_that_nobody_listed_are_named_in_a_version_and_let_be_in_a_merged_folder(
    served: SmallJob, tmp_path: Path
) -> None:
    (served.version(2) / "z.safetensors").write_bytes(b"weights")
    result = failed(errors.VerificationError, "verify", served)
    assert "z.safetensors is not in the version's manifest" in result.output
    assert result.output.count("whole") == 2
    out = tmp_path / "out"
    syncd("merge", merged(tmp_path), out, "--no-fsync")
    (out / "training_args.bin").write_bytes(b"as transformers' Trainer leaves it")
    assert syncd("verify", out).exit_code == 0


def test_a_file_name_in_a_manifest_is_shown_as_text_on_its_own_line(served: SmallJob) -> None:
    edit(served.version(2) / MANIFEST, "config.json", "\u202egnp\u2028v9: whole")
    result = failed(errors.VerificationError, "verify", served)
    assert r"\u202egnp\u2028v9: whole is missing or not a file" in result.output
    assert [line.split(":")[0] for line in result.output.splitlines()] == served.versions


def test_a_job_without_a_version_is_not_verified_and_the_remedy_is_named(job: SmallJob) -> None:
    said = str(syncd("verify", job).exception)
    assert f"'syncd status {job.root}' shows what the daemon waits for" in said


def test_a_count_that_is_no_number_or_too_small_is_refused_with_its_bounds(tmp_path: Path) -> None:
    result = syncd("prune", tmp_path, "--keep", "three")
    assert result.exit_code == 2
    assert "'three' must be a whole number, 1 or more" in result.output
    assert "'0' must be a whole number, 1 or more" in syncd("prune", tmp_path, "--keep", 0).output


# -- for scripts -----------------------------------------------------------------------------------


def test_what_was_done_is_one_json_object(served: SmallJob, tmp_path: Path) -> None:
    merged_into = printed("merge", merged(tmp_path), tmp_path / "out", "--no-fsync")
    assert [merged_into[key] for key in ("step", "kind", "checked")] == [7, "full", "crc32"]
    assert "model.safetensors" in merged_into["files"]
    served.put(served.version(2) / "config.json", b"other")
    assert {one["folder"]: one["outcome"] for one in printed("verify", served)["folders"]} == {
        "v000001": "whole", "v000002": "damaged", "v000003": "whole",
    }  # fmt: skip
    assert syncd("verify", served, "--json").exception is not None
    would = printed("prune", served, "--dry-run", "--keep", 2)
    assert (would["dry_run"], would["deleted"][0]["name"]) == (True, "v000001")
    assert printed("prune", served, "--keep", 2)["deleted"] == would["deleted"]
    asked = printed("rollback", served, "v2")
    assert (asked["of"], asked["version"]) == (2, None)
    assert "no daemon runs" in asked["waits_for"]


def test_what_was_steered_and_checked_is_one_json_object(served: SmallJob, tmp_path: Path) -> None:
    root = served.root
    pinned = {"job": str(root), "folder": "v000002", "pinned": True}
    assert printed("pin", served, "v2") == pinned
    unpinned = {**pinned, "pinned": False, "was_pinned": True}
    assert printed("unpin", served, "v2") == unpinned
    assert printed("unpin", served, "v2") == {**unpinned, "was_pinned": False}
    paused = printed("pause", served)
    assert (paused["job"], paused["paused"]) == (str(root), True)
    assert "no daemon runs" in paused["waits_for"]
    resumed = {"job": str(root), "paused": False, "was_paused": True, "daemon_works": False}
    assert printed("resume", served) == resumed

    file = tmp_path / "job.toml"
    file.write_text(f'job = "{root}"\ntick = "2s"\n')
    assert printed("config", "check", file) == {"file": str(file), "usable": True, "wrong": []}
    template, drop_in = printed("unit", "print", "job", "--config", file)["files"]
    assert template == "/etc/systemd/system/syncd@.service"
    assert drop_in == "/etc/systemd/system/syncd@job.service.d/job.conf"
    file.write_text("keep = 0\nkepe = 1\n")
    refused = syncd("config", "check", file, "--json")
    found = json.loads(refused.stdout)
    assert (found["usable"], len(found["wrong"])) == (False, 2)
    assert isinstance(refused.exception, errors.InvalidSettingsError)


# -- status ----------------------------------------------------------------------------------------


def test_status_as_json_is_one_object(served: SmallJob) -> None:
    served.lease(2, "session", "node-1")
    seen = printed("status", served)
    assert seen["latest"]["sequence"] == 3
    assert seen["daemon"]["state"] == "stopped"
    assert seen["versions"][1] == {"sequence": 2, "leases": ["node-1"], "pinned": False}
    assert (seen["publishing"], seen["daemon_lock_held"], seen["quarantined"]) == (False, False, [])


def test_status_for_people_says_what_is_published_and_leased(served: SmallJob) -> None:
    served.lease(2, "session", "node-1")
    report = {"name": "node-1", "session": "s", "status": "running", "sequence": 2, "time": 1.0}
    served.explorer("node-1").write_text(json.dumps(report))
    served.session("s").touch()
    result = syncd("status", served)
    assert result.exit_code == 0
    assert "latest   v3, step 3" in result.output
    assert "on disk  v1, v2 (node-1), v3" in result.output
    assert "3 published" in result.output
    assert re.search(r"^node-1 +running +v2 +- +1 +- ", result.output, re.MULTILINE)


def test_status_shows_what_it_can_of_a_damaged_job(served: SmallJob) -> None:
    for path in (served.layout.latest, served.layout.daemon_report):
        path.write_bytes(b"\x00")
    result = syncd("status", served)
    assert result.exit_code == 0
    assert "nothing is published yet" in result.output


@pytest.mark.parametrize("name", ["status", "prune"])
def test_a_folder_that_syncd_never_served_says_so(tmp_path: Path, name: str) -> None:
    result = failed(errors.JobUnavailableError, name, tmp_path)
    assert "is not a job that syncd has served" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


# -- prune -----------------------------------------------------------------------------------------


def everything(job: SmallJob) -> set[Path]:
    return set(job.root.rglob("*"))


def test_a_dry_run_says_what_would_go_and_changes_nothing(served: SmallJob) -> None:
    before = everything(served)
    result = syncd("prune", served, "--dry-run", "--keep", "1")
    assert result.exit_code == 0
    assert everything(served) == before
    assert result.output.splitlines() == [
        "would prune version v1: not among the newest 1, and not leased",
        "would prune version v2: not among the newest 1, and not leased",
        "would prune step 2: published, and not a full checkpoint",
        "would prune step 1: published, and not a full checkpoint",
    ]


def test_pruning_deletes_what_the_dry_run_said(served: SmallJob) -> None:
    said = syncd("prune", served, "--dry-run", "--keep", "2").output
    assert syncd("prune", served, "--keep", "2").output == said.replace("would prune", "pruned")
    assert served.versions == ["v000002", "v000003"]
    assert len(served.audit) == 3
    for step in (4, 5, 6):  # which no daemon has served
        served.save(step)
    for more in (["--dry-run"], []):
        assert "global_step_4" not in syncd("prune", served, *more).output
    assert step_folders(served) == [4, 5, 6]


class Held:
    """The daemon's lock, held here; a waiting prune's pauses are counted, and this one beats."""

    def __init__(self, job: SmallJob, lease_time: float, *, beats_at: int | None = None) -> None:
        self.pauses: list[float] = []
        self._beats_at = beats_at
        self._job = job
        self.lock = DaemonLock(job, lease_time, Judge(job.storage, lease_time))
        assert self.lock.try_acquire()

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if self._beats_at is None:
            time.sleep(seconds)
        elif len(self.pauses) == self._beats_at:
            os.utime(self._job.layout.daemon_lock)


def test_pruning_beside_a_daemon_refuses_at_its_next_heartbeat_and_says_what_it_waits_for(
    served: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    held, before = Held(served, LEASE_TIME, beats_at=3), everything(served)
    with caplog.at_level("INFO", "syncd"):
        with pytest.raises(
            errors.JobUnavailableError,
            match=rf"another daemon \(pid {os.getpid()} on .*\) serves",
        ):
            prune_now(served, DaemonConfig(keep=1), sleep=held.sleep)
        (line,) = (one.getMessage() for one in caplog.records if "heartbeat" in one.getMessage())
    assert line.startswith(
        f"{served.layout.daemon_lock} is locked: watching its heartbeat for up to"
    )
    assert len(held.pauses) == 3
    assert max(held.pauses) < LEASE_TIME / 3 / 2, "the stopwatch for a silent one must run"
    assert everything(served) == before
    held.lock.release()


def test_pruning_takes_over_from_a_daemon_of_another_host_that_is_silent(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    Job.at(tmp_path / "job", FastStorage()).open(lease_time=0.2)
    job = SmallJob(tmp_path / "job")
    publish(job, 1, 2)
    held = Held(job, 0.2)
    marker = job.layout.daemon_lock.read_bytes()
    held.lock.release()
    job.layout.daemon_lock.write_bytes(marker.replace(socket.gethostname().encode(), b"elsewhere"))
    prune_now(job, DaemonConfig(keep=1), sleep=held.sleep)
    assert held.pauses
    assert job.versions == ["v000002"]


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_every_command_with_130(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.get_command(click.Context(cli), name), "make_context", interrupted)
    assert syncd(name).exit_code == 130


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prune", "pause"])
def test_ctrl_c_ends_a_wait_for_the_daemon_and_leaves_nothing_behind(
    served: SmallJob, name: str
) -> None:
    held = Held(served, LEASE_TIME)
    argv = [sys.executable, "-m", "syncd", name, str(served.root)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        if name == "prune":
            assert "watching its heartbeat" in process.stderr.readline()
        else:
            wait_until(served.layout.paused.exists, "the pause on record")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == ""
    assert list(served.layout.sessions.iterdir()) == []
    held.lock.release()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(["status", "."], 11, "0 is not a job"),
     (["verify", "."], 2, "syncd: . is neither a version nor a job with published versions"),
     (["run", "missing"], 11, "no such folder: "),
     (["run", "missing/job", "--make"], 11, "no such folder: missing"),
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


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["history"], ["prune"], ["prune", "--dry-run"], ["pin", "v1"],
     ["unpin", "v1"], ["rollback", "v1"], ["pause"], ["resume"], ["doctor"], ["run"],
     ["run", "--root"], ["status", "--json"], ["history", "--json"],
     ["follow", "--name", "e", "--command", "true"], ["verify"], ["convert"], ["merge", "out"],
     ["web"]],
    ids=" ".join,
)  # fmt: skip
def test_a_path_that_is_not_there_is_no_such_folder(tmp_path: Path, arguments: list[str]) -> None:
    missing = tmp_path / "missing"
    command, *rest = arguments
    last = command == "run" and rest  # the path is an option's value then
    given = [*rest, missing] if last else [missing, *rest]
    result = failed(errors.JobUnavailableError, command, *given)
    assert str(result.exception).startswith(f"no such folder: {missing}")
    assert not missing.exists()


# -- pin, rollback, pause --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [("v2", "v2"), ("v000002", "v2"), ("2", "step 2"), ("global_step_2", "step 2")],
)  # fmt: skip
def test_a_bare_number_is_a_step_and_a_version_is_named_by_its_v(
    served: SmallJob, given: str, name: str
) -> None:
    assert syncd("pin", served, given).output == f"{name} is pinned\n"
    seen = printed("status", served)
    pinned = [v["sequence"] for v in seen["versions"] if v["pinned"]]
    assert (pinned, seen["pinned_steps"]) == (([2], []) if given[0] == "v" else ([], [2]))
    assert syncd("unpin", served, given).output == f"{name} is no longer pinned\n"
    assert syncd("unpin", served, given).output == f"{name} was not pinned\n"


@pytest.mark.parametrize("given", ["v", "v0", "-1", "two", "v2.0", "global_step_", "v-2", ""])
def test_what_is_no_name_of_a_version_or_step_is_an_error_of_use(
    served: SmallJob, given: str
) -> None:
    assert syncd("pin", served, "--", given).exit_code == 2
    assert syncd("rollback", served, "--", given).exit_code == 2


def test_a_rollback_to_a_step_says_which_name_was_meant(served: SmallJob) -> None:
    result = syncd("rollback", served, "2")
    assert result.exit_code == 2
    assert "did you mean v2?" in result.output


def test_what_is_not_there_is_an_error_of_its_own(served: SmallJob, tmp_path: Path) -> None:
    for command in ("pin", "rollback"):
        failed(errors.VersionGoneError, command, served, "v9")
    failed(errors.JobUnavailableError, "pin", tmp_path, "1")
    failed(errors.JobUnavailableError, "pause", tmp_path)


def test_a_paused_job_says_so_and_is_not_pruned_by_hand(served: SmallJob) -> None:
    assert "no daemon runs on this job now" in syncd("pause", served).output
    assert "paused by" in syncd("status", served).output
    assert "is paused" in str(syncd("prune", served, "--keep", 1).exception)
    assert syncd("prune", served, "--dry-run").output == "nothing to prune\n"
    assert "takes effect when a daemon runs" in syncd("resume", served).output
    assert syncd("resume", served).output == "was not paused\n"
    assert syncd("prune", served, "--keep", 1).exit_code == 0
    assert served.versions == ["v000003"]
