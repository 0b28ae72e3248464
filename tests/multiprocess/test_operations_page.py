"""What docs/operations.md has people type, with stand-ins for systemd and pip."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from syncd.storage.job import Job
from tests.doc_blocks import blocks, text_of
from tests.multiprocess.mounts import Filler, tmpfs
from tests.multiprocess.processes import newest, wait_for_step, wait_until
from tests.multiprocess.saves import Constant, save, save_meanwhile, serve
from tests.multiprocess.terminal import Terminal
from trainer_hooks import SyncSettings, TrainerHook, load_checkpoint

START, UPGRADE, BACK_UP, RESTORE, GO_BACK, GO_ON = blocks("operations.md", "sh")
(RESUMED,) = blocks("operations.md")
#: Alert → what its runbook has people type first.
FIRST = dict(re.findall(r"^### (\w+)\n\n`([^`]+)`", text_of("docs/operations.md"), re.MULTILINE))
#: systemd's part: it starts the unit's daemon, and stops it by SIGTERM.
SYSTEMCTL = """
echo "$*" >>told
case "$1" in daemon-reload | status | reload) exit ;; esac
if [ -e pid ] && [ "$1" != start ]; then
  kill "$(cat pid)"
  while kill -0 "$(cat pid)" 2>/dev/null; do sleep 0.05; done
  rm pid
fi
[ "$1" = stop ] && exit
setsid syncd run --config unit.toml >log 2>&1 &
echo $! >pid
until grep -q "serving" log; do sleep 0.05; done
"""


class Host(Terminal):
    """A host with the job's unit; the page's words stand for its paths.

    Attributes:
        job: the job directory.
    """

    def __init__(self, folder: Path, job: Path) -> None:
        super().__init__(
            folder, systemctl=SYSTEMCTL, journalctl="cat log", pip='echo "pip $*" >>told'
        )
        self.job = job
        job.mkdir()
        (folder / "unit.toml").write_text(f'job = "{job}"\nlease_time = 2\ntick = 0.2\nkeep = 3\n')

    def types(self, block: str, **words: str) -> str:
        """What a block of the page prints."""
        words |= {"JOB": str(self.job), "COPY": f"{self.job}.copy", "NAME": "qwen-grpo"}
        words |= {
            "NAME | sh": "NAME --config unit.toml >unit.sh",
            "/etc/syncd/NAME.toml": "unit.toml",
        }
        for word in sorted(words, key=len, reverse=True):
            block = block.replace(word, words[word])
        return self.run(block)

    def stops(self) -> None:
        """Stop the daemon, if one runs."""
        self.run("[ ! -e pid ] || systemctl stop syncd@NAME")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, tmp_path / "job")
    yield made
    made.stops()


def linked(host: Host) -> set[float]:
    """The numbers in the weights that the explorer's link leads to."""
    files = (host.folder / "link").glob("*.safetensors")
    return {number for file in files for one in load_file(file).values() for number in one.tolist()}


FOLLOW = "syncd follow job --name f --stage stage --link link"


def test_a_daemon_is_started_and_upgraded(host: Host) -> None:
    assert "watching" in host.types(START)
    serve(host.job, Constant(), 1)
    assert "v1" in host.types(UPGRADE, RELEASE="syncd.whl")
    wait_until(lambda: "healthy" in host.types("syncd status JOB"), "the new daemon works")
    told = (host.folder / "told").read_text().splitlines()
    assert told[1:] == [
        "pip install --upgrade syncd.whl",
        "daemon-reload",
        "restart syncd@qwen-grpo",
    ]
    assert "epoch 2" in (host.folder / "log").read_text()
    assert "[Service]" in (host.folder / "unit.sh").read_text()
    assert serve(host.job, Constant(), 2).sequence == 2


def test_a_copy_of_a_live_job_is_restored(host: Host) -> None:
    host.types(START)
    model = Constant()
    serve(host.job, model, 1)
    save_meanwhile(host.job, model, 2)  # in the copy it is whole, cut off, or not there
    assert "whole" in host.types(BACK_UP)
    wait_for_step(host.job, 2)
    serve(host.job, model, 3)
    with host.started(FOLLOW):
        wait_until(lambda: linked(host) == {3}, "the newest is served")
        host.stops()
        assert "paused" not in host.types(RESTORE).splitlines()[1:]
        assert newest(host.job).sequence < 3
        assert linked(host) == {3}, "what the page says of a running explorer"
    with host.started(FOLLOW):
        wait_until(lambda: linked(host) <= {1, 2}, "a new one serves what is there")
    serve(host.job, model, 4)


def test_a_bad_step_is_left_behind(host: Host) -> None:
    host.types(START)
    model = Constant()
    optimizer = torch.optim.SGD(model.parameters())
    given: dict[str, Any] = {"job": host.job, "model": model, "optimizer": optimizer}

    def hook() -> TrainerHook:
        settings = SyncSettings(save_interval=1)
        return TrainerHook(host.job, model, optimizer=optimizer, settings=settings)

    def trains(hook: TrainerHook, step: int, number: float) -> None:
        model.become(number)
        hook.after_step(step)

    with host.started(FOLLOW):
        pause, rest = GO_BACK.split("\n", 1)
        with hook() as bad:
            for step in (1, 2, 3):
                trains(bad, step, step)
                wait_for_step(host.job, step)
            host.types(pause)
            trains(bad, 4, 4)
        host.types(rest, v12="v2")
        wait_until(lambda: linked(host) == {2}, "the good version is served again")
        exec(RESUMED.replace("240", "2"), {"load_checkpoint": load_checkpoint}, given)  # noqa: S102 # what users run
        assert given["resumed"].step == 2
        assert model.numbers() == {2}
        with hook() as good:
            trains(good, 3, 30)
        assert linked(host) == {2}
        host.types(GO_ON)
        wait_until(lambda: linked(host) == {30}, "the new step is served")
    assert (newest(host.job).sequence, newest(host.job).step) == (5, 3)


def test_the_first_command_of_each_alert_can_be_typed(host: Host) -> None:
    host.types(START)
    serve(host.job, Constant(), 1)
    for command in set(FIRST.values()):
        host.types(command)


def test_on_a_full_disk_the_first_command_says_why_nothing_is_published(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", megabytes=64) as disk:
        host = Host(tmp_path, disk / "job")
        Job.at(host.job).open(lease_time=2)
        save(host.job, Constant(megabytes=8), 1)
        filler = Filler(disk)
        filler.fill("bytes", leave=2_000_000)
        host.types(START)
        first = FIRST["SyncdBlocked"]
        wait_until(lambda: "problem" in host.types(first), "a problem is said")
        said = " ".join(host.types(first).split())
        assert "step 1 needs" in said
        assert "Make room" in said
        filler.clear()
        wait_for_step(host.job, 1)
        host.stops()
