"""A job directory changes hands between the release before and this one, in both directions."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from explorer_hooks import ExplorerHook, TorchModule
from explorer_hooks.reader import LeasedVersion, Reader
from syncd.cli import cli
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import FULL, RETIRED
from syncd.storage.job import Job
from tests.delta_saves import follower, is_delta, receipts
from tests.hooks import written
from tests.jobs import SmallJob
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    dying_at,
    wait_for_step,
    wait_until,
    wait_until_gone,
)
from tests.programs import completed
from tests.rank_programs import ENVIRONMENT, ROOT
from tests.stored_job import Model
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, load_checkpoint
from trainer_hooks.settings import SyncDtype

#: The release before, 0.3.0; ``tests/stored_job.py`` made the job with it.
BEFORE = "c7c4b4c1"
STORED = ROOT / "tests" / "fixtures" / f"job-{BEFORE}.tar.gz"
PACKAGES = ("syncd", "trainer_hooks", "explorer_hooks")
PYTHON = (sys.executable, "-P")
DAEMON = ("--tick", "0.05", "--keep", "1", "--no-prune-steps")

#: Commands, explorers and a trainer that resumes; run by the release before.
RELEASE_BEFORE = """
import json, sys
from explorer_hooks import ExplorerHook, TorchModule
from explorer_hooks.reader import Reader
from trainer_hooks import load_checkpoint
import syncd
import torch
from click.testing import CliRunner
from syncd.cli import cli
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)
        self.lm_head = nn.Linear(2, 4, bias=False)

def said(*arguments):
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, (arguments, done.output)
    return done.stdout

job, model, resumed = sys.argv[1], Model(), Model()
status, history = (json.loads(said(name, job, "--json")) for name in ("status", "history"))
said("verify", job)
with Reader(job, "reader-before") as reader:
    version = reader.next_version(0, 60)
    version.verify()
    version.release()
with ExplorerHook(job, "explorer-before", TorchModule(model)) as hook:
    pulled = hook.pull(60)
found = load_checkpoint(job, resumed, optimizer=torch.optim.SGD(resumed.parameters(), lr=0.1))
print(json.dumps({
    "code": syncd.__file__,
    "latest": status["latest"]["sequence"],
    "versions": [one["version"] for one in history["versions"]],
    "verified": version.sequence,
    "pulled": [pulled.sequence, pulled.step, model.lm_head.weight[0, 0].item()],
    "resumed": [found.step, resumed.embed_tokens.weight[0, 0].item()],
}))
"""


#: An explorer that comes before the first version; run by the release before.
EXPLORER_BEFORE = """
import sys
from explorer_hooks import ExplorerHook, TorchModule
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)
        self.lm_head = nn.Linear(2, 4, bias=False)

model = Model()
with ExplorerHook(sys.argv[1], "explorer-before", TorchModule(model)) as hook:
    for _ in range(int(sys.argv[2])):
        print(hook.pull(60).step, model.lm_head.weight[0, 0].item(), flush=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The stored job; its last save is not yet published."""
    subprocess.run(["tar", "-xzf", str(STORED), "-C", str(tmp_path)], check=True)
    return tmp_path / "job"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The packages of the release before, from the history of this checkout."""
    archive = ["git", "-C", str(ROOT), "archive", BEFORE, *PACKAGES]
    try:
        packed = subprocess.run(archive, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"git cannot give the files of {BEFORE}: no history, or a shallow clone")
    tree = tmp_path / "before"
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", str(tree)], input=packed, check=True)
    return tree


def environment(before: Path) -> dict[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": str(before)}


@contextmanager
def served_by(before: Path, job: Path, step: int) -> Iterator[LeasedVersion]:
    """The version of a step, of a daemon of the release before that works beside the block."""
    with older(before, job):
        sequence = wait_for_step(job, step).sequence
        with Reader(job, "checker") as reader:
            version = reader.next_version(sequence - 1, DEADLINE)
            version.verify()
            yield version
            version.release()


@contextmanager
def older(before: Path, job: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon of the release before, which ends well."""
    run = [*PYTHON, "-m", "syncd", "run", str(job), *DAEMON]
    with subprocess.Popen(run, env=environment(before), stderr=subprocess.DEVNULL) as old:
        try:
            yield old
            old.terminate()
            assert old.wait(DEADLINE) == 0
        finally:
            old.kill()


def files(folder: Path) -> Mapping[str, bytes]:
    """The content of all files in a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def journal(job: Path) -> list[dict[str, Any]]:
    """The lines of a job's journal."""
    lines = filter(None, JobLayout(job).journal.read_bytes().splitlines())
    return [json.loads(line) for line in lines]


def said(*arguments: object) -> str:
    """The words of a command that succeeds."""
    done = CliRunner().invoke(cli, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def save(
    job: Path, step: int, sync_dtype: SyncDtype | None = None, *, several: bool = False
) -> None:
    """A trainer of this release resumes, saves one full checkpoint, keeps no older and ends."""
    model = Model(0)
    parts = model.children() if several else [model]
    optimizer = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    resumed = load_checkpoint(job, model, optimizer=optimizer)
    assert resumed is not None
    assert model.embed_tokens.weight[0, 0] == resumed.step == step - 1
    with TrainerHook(
        job,
        model,
        optimizer=optimizer,
        settings=SyncSettings(sync_interval=1, save_interval=1),
        saving=SaveSettings(max_to_keep=1, sync_dtype=sync_dtype),
    ) as hook:
        model.fill(step)
        hook.after_step(step)


def test_a_job_of_the_release_before_is_served_on(job: Path) -> None:
    layout = JobLayout(job)
    kept = {path: path.read_bytes() for path in layout.quarantine.iterdir()}
    lines, audit = journal(job), layout.audit.read_bytes()
    versions = {name: files(layout.published / name) for name in ("v000001", "v000002", "v000005")}
    status = json.loads(said("status", job, "--json"))
    assert [status["latest"][key] for key in ("sequence", "step")] == [5, 1]
    assert [explorer["name"] for explorer in status["explorers"]] == ["serving"]
    history = json.loads(said("history", job, "--json"))
    told = [(one["version"], one["step"]) for one in history["versions"]]
    assert sorted(told) == [(1, 1), (2, 2), (3, 4), (4, 5), (5, 1)]
    assert said("verify", job).count("\n") == 2

    model = Model(0)
    with ExplorerHook(job, "serving", TorchModule(model)) as explorer:
        assert explorer.pull(DEADLINE).sequence == 5  # of the release before, by a rollback
        assert model.embed_tokens.weight[0, 0] == 1
        with Daemon(job, *DAEMON):
            wait_for_step(job, 6)  # which a trainer of the release before saved
            version = explorer.pull(DEADLINE)
            assert (version.sequence, version.step) == (6, 6)
            save(job, 7)
            version = explorer.pull(DEADLINE)
            assert (version.sequence, version.step) == (7, 7)
            assert model.lm_head.weight[0, 0] == -7
            wait_until_gone(layout.version(6))

    assert {path: path.read_bytes() for path in layout.quarantine.iterdir()} == kept
    outcomes = json.loads(layout.saves.read_bytes())["steps"]
    assert outcomes["3"]["outcome"] == "quarantined"
    assert {step: outcomes[step].get("sequence") for step in "124567"} == {
        "1": 1, "2": 2, "4": 3, "5": 4, "6": 6, "7": 7
    }  # fmt: skip
    # The explorers of 1 and 5 have not been seen dead for --dead-reader-grace; 2 is pinned.
    assert {name: files(layout.published / name) for name in versions} == versions
    assert journal(job)[: len(lines)] == lines
    assert layout.audit.read_bytes().startswith(audit)
    assert (layout.step(6) / RETIRED).exists()
    assert (layout.step(7) / FULL).exists()
    again = json.loads(said("history", job, "--json"))
    assert [one["version"] for one in again["versions"]] == [*range(1, 8)]


def test_an_explorer_and_a_standby_of_the_release_before_take_deltas(
    tmp_path: Path, before: Path
) -> None:
    here, model = SmallJob(tmp_path / "new"), Model(0).bfloat16()
    program = EXPLORER_BEFORE.replace("Model()", "Model().bfloat16()")
    explorer = [*PYTHON, "-c", program, str(here.root), "6"]
    standby = [*PYTHON, "-m", "syncd", "run", str(here.root), *DAEMON]

    def save(step: int) -> bool:
        with torch.no_grad():
            model.lm_head.weight[0, 0] = -step
        hook.after_step(step)
        written(hook)
        return is_delta(here, step)

    def serves(step: int) -> bool:
        assert old.stdout is not None
        return old.stdout.readline().split() == [str(step), f"{-step}.0"]

    def serve(step: int) -> bool:
        is_small = save(step)
        assert serves(step)
        return is_small

    settings = SyncSettings(deltas=True, sync_interval=1)
    with ExitStack() as stack:
        stack.enter_context(follower(here, "tip"))
        hook = stack.enter_context(TrainerHook(here.root, model, settings=settings))
        old = subprocess.Popen(explorer, env=environment(before), stdout=subprocess.PIPE, text=True)
        stack.callback(old.kill)
        dying = dying_at(*2 * ["deltas/d", ".syncd/LATEST"], after=True)
        daemon = stack.enter_context(Daemon(here.root, *DAEMON, program=dying))
        assert not serve(1)
        second = subprocess.Popen(standby, env=environment(before), stderr=subprocess.DEVNULL)
        stack.callback(second.kill)
        wait_until(lambda: here.daemon_says.takes_deltas, "deltas are offered")
        assert serve(2)
        assert save(3)
        assert daemon.wait() == -9
        assert here.latest.tip is not None
        wait_until(lambda: here.daemon_says.pid == second.pid, "the standby has taken over")
        assert serves(3)
        wait_until(lambda: here.daemon_says.takes_deltas, "deltas are offered")
        assert serve(4)
        assert receipts(here, 4)[0].of_base  # which the standby does not know
        second.terminate()
        assert second.wait(DEADLINE) == 0
        stack.enter_context(Daemon(here.root, *DAEMON))
        wait_until(lambda: here.daemon_says.takes_deltas, "deltas are offered")
        serve(5)
        serve(6)
        assert old.wait(DEADLINE) == 0


def test_an_explorer_and_a_standby_of_the_release_before_take_whole_saves(
    tmp_path: Path, before: Path, memory: Path
) -> None:
    """Daemon first: while the trainer saves, the daemon alone is of this release, or the other."""
    (root := tmp_path / "new").mkdir()
    Job.at(root).open(lease_time=2.0)  # the standby takes over soon
    here, model = SmallJob(root), Model(0)
    staged = f"TorchModule(model), staging=Staging({str(memory)!r})"
    program = EXPLORER_BEFORE.replace("TorchModule(model)", staged)
    program = f"from explorer_hooks.staging import Staging\n{program}"
    explorer = [*PYTHON, "-c", program, str(here.root), "5"]

    def serve(step: int) -> int:
        with torch.no_grad():
            model.lm_head.weight[0, 0] = -step
        hook.after_step(step)
        written(hook)
        assert old.stdout is not None
        assert old.stdout.readline().split() == [str(step), f"{-step}.0"]
        return wait_for_step(here.root, step).sequence

    with ExitStack() as stack:
        hook = stack.enter_context(
            TrainerHook(here.root, model, settings=SyncSettings(sync_interval=1))
        )
        old = subprocess.Popen(explorer, env=environment(before), stdout=subprocess.PIPE, text=True)
        stack.callback(old.kill)
        with older(before, here.root):
            numbers = [serve(1)]
        stack.enter_context(follower(here, "tip", whole=True))
        dying = dying_at("deltas/d", ".syncd/LATEST", after=True)
        daemon = stack.enter_context(Daemon(here.root, *DAEMON, program=dying))
        wait_until(lambda: here.daemon_says.pid == daemon.pid, "it works")
        wait_until(lambda: here.daemon_says.takes_deltas, "the follower is seen")
        with older(before, here.root) as standby:
            numbers.append(serve(2))
            assert daemon.wait() == -9
            assert here.daemon_says.pid == standby.pid
            numbers.append(serve(3))
        stack.enter_context(Daemon(here.root, *DAEMON))
        numbers += [serve(4), serve(5)]
        assert old.wait(DEADLINE) == 0
        print(numbers, here.latest, sorted(here.layout.deltas.iterdir()), here.outcomes)
    # The number of the tip that the standby did not know is used for no other save.
    assert numbers == [1, 3, 4, 5, 6]


def test_the_release_before_serves_on_a_job_of_this_one(job: Path, before: Path) -> None:
    layout = JobLayout(job)
    with Daemon(job, *DAEMON):
        wait_for_step(job, 6)
        save(job, 7)
        wait_for_step(job, 7)

    done = completed(
        [*PYTHON, "-c", RELEASE_BEFORE, job], env=environment(before), timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "code": str(before / "syncd" / "__init__.py"),
        "latest": 7,
        "versions": [*range(1, 8)],
        "verified": 7,
        "pulled": [7, 7, -7.0],
        "resumed": [7, 7.0],
    }

    save(job, 8)
    outcomes, lines = layout.saves.read_bytes(), journal(job)
    with served_by(before, job, 8) as version:
        assert version.sequence == 8
    after = json.loads(layout.saves.read_bytes())["steps"]
    assert {step: after[step] for step in "1234567"} == json.loads(outcomes)["steps"]
    assert journal(job)[: len(lines)] == lines

    save(job, 9, several=True)
    again = completed(
        [*PYTHON, "-c", RELEASE_BEFORE, job], env=environment(before), timeout=DEADLINE
    )
    assert "'(several optimizers)', which SGD does not have" in again.stderr


def test_weights_that_are_cast_go_on_where_the_release_before_kept_the_models_dtype(
    job: Path,
) -> None:
    model = Model(0)
    with (
        ExplorerHook(job, "fp32", TorchModule(model, cast=True)) as explorer,
        Daemon(job, *DAEMON),
    ):
        wait_for_step(job, 6)
        for step in (7, 8):  # one that resumes from the release before, and one from this one
            save(job, step, "bf16")
            wait_for_step(job, step)  # else the first pull may take step 6
            assert explorer.pull(DEADLINE).step == step
            latest = json.loads(said("status", job, "--json"))["latest"]
            assert (latest["step"], latest["dtype"]) == (step, "BF16")
            assert model.lm_head.weight[0, 0] == -step
