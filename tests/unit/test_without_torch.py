"""The base install: the daemon, the command line, ``follow`` and the Reader, without torch.

``.ci/run`` runs this where torch is not installed. In every other environment the programs that
these tests start cannot find it.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.by_hand import TrainerByHand
from tests.multiprocess.processes import DEADLINE, Daemon, wait_for_step, wait_until
from tests.programs import completed
from tests.rank_programs import ENVIRONMENT, ROOT

#: Begins each program: the module that it imports next finds neither of them.
_HIDES = "import sys; sys.modules.update(torch=None, numpy=None)\n"
_SYNCD = f"{_HIDES}from syncd.cli import main\nmain()"
_COMMAND = "pip install 'syncd[torch]'"
#: Imports every module that needs no torch; of the others only this error is expected.
_IMPORTS = """
import pkgutil, importlib, syncd, explorer_hooks
for package in (syncd, explorer_hooks):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert error.name.partition(".")[0] in {"torch", "numpy"}, error
"""
_READS = """
from explorer_hooks import Reader
with Reader(sys.argv[1], "reader") as reader:
    version = reader.next_version(0)
    version.verify()
    print(version.step, (version.folder / "model.safetensors").exists())
    version.release()
"""


def _python(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = completed(
        [sys.executable, *arguments],
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        timeout=DEADLINE,
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_a_job_is_served_followed_and_read(tmp_path: Path) -> None:
    job, config, link = tmp_path / "job", tmp_path / "config.toml", tmp_path / "model"
    job.mkdir()
    config.write_text("keep = 2\n")
    with Daemon(job, "--config", str(config), program=("-c", _SYNCD)) as daemon:
        daemon.wait_for_log("in epoch")
        TrainerByHand(job).save(1)
        wait_for_step(job, 1)
        assert _python("-c", _HIDES + _READS, job).stdout == "1 True\n"
        follower = subprocess.Popen(
            [sys.executable, "-c", _SYNCD, "follow", job, "--name", "f", "--link", link],
            env=ENVIRONMENT,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(link.exists, "follow has made its link")
        finally:
            follower.terminate()
            follower.wait(DEADLINE)
        for command in ("status", "history", "verify"):
            _python("-c", _SYNCD, command, job)
        # A daemon that is told to cast later says what it lacks, and goes on as it was.
        config.write_text('cast = "bf16"\n')
        os.kill(daemon.pid, signal.SIGHUP)
        daemon.wait_for_log(_COMMAND)
        TrainerByHand(job).save(2)
        wait_for_step(job, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "user"),
    [
        (("demo",), "syncd demo"),
        (("merge", ".", "out", "--dtype", "bf16"), "--dtype"),
        (("convert", ".", "--dtype", "bf16"), "--dtype"),
        (("run", "job", "--dtype", "bf16"), "cast, set by --dtype,"),
        (("run", "--config", "config.toml"), "cast, set by config.toml,"),
    ],
)
def test_a_command_that_needs_torch_says_in_one_line_how_to_install_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    user: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text('job = "/job"\ncast = "bf16"\n')
    (line,) = _python("-c", _SYNCD, *arguments, code=2).stderr.splitlines()
    assert line.startswith(f"syncd: {user} needs torch")
    assert line.endswith(_COMMAND)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_deltas_that_are_on_without_their_packages_are_refused(tmp_path: Path) -> None:
    done = _python("-c", _SYNCD, "run", tmp_path, "--deltas", "on", code=2)
    assert "cannot be imported: pip install 'syncd[deltas]'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("imports", "user"),
    [
        ("from trainer_hooks import TrainerHook", "trainer_hooks.TrainerHook"),
        ("from explorer_hooks import TorchModule", "explorer_hooks.TorchModule"),
        ("from explorer_hooks import TransformersModel", "explorer_hooks.TransformersModel"),
    ],
)
def test_an_import_that_needs_torch_is_an_import_error_with_the_command(
    imports: str, user: str
) -> None:
    told = _python("-c", _HIDES + imports, code=1).stderr.splitlines()[-1]
    assert f"TorchMissingError: {user} needs torch" in told
    assert told.endswith(_COMMAND)
    caught = f"{_HIDES}try: {imports}\nexcept ImportError as error: assert error.name == 'torch'"
    _python("-c", caught)


def test_no_import_warns() -> None:
    _python("-W", "error::UserWarning", "-c", _HIDES + _IMPORTS)
