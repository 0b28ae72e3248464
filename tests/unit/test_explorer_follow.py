"""``syncd follow``: what it gives versions to, and how the command line finds it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from explorer_hooks.follow import CommandEngine, LinkEngine, command
from explorer_hooks.server_fit import Fits
from syncd.protocol.errors import CommandFailedError, EngineMismatchError
from tests.explorers import held, publish
from tests.jobs import SmallJob
from tests.multiprocess.processes import ENVIRONMENT
from tests.places import ROOT
from tests.programs import completed
from tests.refusals import invalid, unfit

WRITES = 'printf "%s %s %s %s\\n" "$SYNCD_SEQUENCE" "$SYNCD_STEP" "$SYNCD_KIND" "$SYNCD_FOLDER"'


def follow(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_a_command_is_told_of_the_version_in_its_environment(job: SmallJob, tmp_path: Path) -> None:
    publish(job, 3)
    engine = CommandEngine(f"{WRITES} >> {tmp_path}/told", timeout=60)
    with held(job) as version:
        engine.check(version)
        engine.load(version)
    assert (tmp_path / "told").read_text() == f"1 3 full {job.version(1)}\n"


def test_a_command_that_fails_or_hangs_has_not_taken_the_version(
    job: SmallJob, tmp_path: Path
) -> None:
    publish(job, 3)
    with held(job) as version:
        with pytest.raises(CommandFailedError, match="status 3 for v1, step 3"):
            CommandEngine("exit 3", timeout=60).load(version)
        # What it has started is killed with it: nothing holds the pipe for long.
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(CommandFailedError, match=r"for v1 did not finish within 0\.2 s"):
            CommandEngine(f"(sleep 600; true) > {pipe}; true", timeout=0.2).load(version)
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""
        os.close(reader)


def test_a_command_is_given_only_what_fits_what_it_took_before(job: SmallJob) -> None:
    publish(job, 1)
    engine = CommandEngine("true", timeout=60)
    with held(job) as version:
        engine.check(version)
        engine.load(version)
        engine.check(version)
    job.save(2, 1.0, 2.0, 3.0, 4.0)
    job.run()
    with held(job) as version, unfit("the command accepted"):
        engine.check(version)


def test_a_link_is_moved_by_one_rename_and_leads_to_the_version(
    job: SmallJob, tmp_path: Path
) -> None:
    link = tmp_path / "model"
    engine = LinkEngine(link)
    assert engine.target is None
    for step in (1, 2):
        publish(job, step)
        with held(job) as version:
            engine.check(version)
            engine.load(version)
        assert engine.target == job.version(step)
        assert (link / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "model"]


def test_a_link_replaces_nothing_but_a_link(job: SmallJob, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with invalid("is not a link, so syncd does not replace it"):
        LinkEngine(tmp_path / "file")
    with invalid("create this folder first"):
        LinkEngine(tmp_path / "nowhere" / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    publish(job, 1)
    with held(job) as version:
        LinkEngine(tmp_path / "dangling").load(version)
        with pytest.raises(EngineMismatchError):
            LinkEngine(
                tmp_path / "dangling",
                fits=Fits(version.manifest.model_copy(update={"tensors": ()})),
            ).check(version)
    assert (tmp_path / "dangling" / "config.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--name", "a"],
        ["--name", "a", "--command", "true", "--link", "model"],
        ["--command", "true"],
        ["--name", "a", "--command", "true", "--budget", "5"],
        ["--name", "a", "--command", "true", "--broadcast"],
        ["--name", "a", "--command", "true", "--ready-file", "ready"],
        ["--name", "a", "--engine", "vllm", "--url", "http://127.0.0.1:1", "--max-behind", "1"],
    ],
)
def test_options_that_make_no_sense_are_refused(job: SmallJob, options: list[str]) -> None:
    assert follow(job.root, *options).exit_code == 2


def test_a_timeout_of_broadcasts_is_for_who_takes_them(job: SmallJob) -> None:
    timed = ["--name", "a", "--link", "model", "--broadcast-timeout", "600"]
    assert "needs --broadcast" in follow(job.root, *timed).output


@pytest.mark.slow
def test_each_version_that_is_served_is_a_line_of_json(job: SmallJob, tmp_path: Path) -> None:
    publish(job, 3)
    argv = [sys.executable, "-m", "syncd", "follow", job.root, "--name", "a", "--json"]
    with subprocess.Popen(
        [*map(str, argv), "--link", str(tmp_path / "link")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {
                "explorer": "a",
                "version": 1,
                "step": 3,
            }
            process.terminate()
            output, logged = process.communicate(timeout=60)
            assert output == ""
            assert logged.count("v1 (step 3) is live on a") == 1
            assert process.returncode == 0
        finally:
            process.kill()


def syncd_with(entry_point: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, where a package is installed that adds a command."""
    package = folder / "added-1.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[syncd.commands]\n{entry_point}\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return completed(
        [sys.executable, "-m", "syncd", *arguments], env=ENVIRONMENT | {"PYTHONPATH": path}
    )


@pytest.mark.slow
def test_a_package_adds_commands_and_replaces_none(tmp_path: Path) -> None:
    ours = "follow2 = explorer_hooks.follow:command\nstatus = explorer_hooks.follow:command"
    listed = syncd_with(ours, tmp_path, "--help").stdout
    assert "follow2 Load the versions of JOB into a running server" in " ".join(listed.split())
    assert syncd_with(ours, tmp_path, "follow2", "--help").returncode == 0
    assert "the explorers that serve" in syncd_with(ours, tmp_path, "status", "--help").stdout


def test_a_package_that_is_broken_keeps_nobody_from_the_rest(tmp_path: Path) -> None:
    broken = "lost = no.such.module:command"
    listed = syncd_with(broken, tmp_path, "--help")
    assert listed.returncode == 0
    assert "cannot be loaded" in " ".join(listed.stdout.split())
    used = syncd_with(broken, tmp_path, "lost")
    assert used.returncode == 2
    assert "syncd: the command lost of no.such.module:command cannot be loaded" in used.stderr


def test_a_server_that_is_given_twice_is_refused(job: SmallJob) -> None:
    twice = ["--name", "a", "--engine", "vllm", *["--url", "http://127.0.0.1:1"] * 2]
    assert "the same address" in follow(job.root, *twice).output
