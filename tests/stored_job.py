"""A job directory with some of everything in it, made through the public API and the commands.

It uses only names that ``docs/api.md`` promises, so that any release can make it. Its one use is
``tests/fixtures/job-c7c4b4c1.tar.gz``, made by that commit::

    git worktree add --detach /tmp/before c7c4b4c1
    PYTHONPATH=/tmp/before python -P tests/stored_job.py tests/fixtures/job-c7c4b4c1.tar.gz
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from explorer_hooks import ExplorerHook, TorchModule
from explorer_hooks.reader import Reader
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook

_HANGS = 60.0


class Config:
    """The model's config; one that is not true of its weights makes a save be quarantined."""

    tied = False

    def save_pretrained(self, folder: str) -> None:
        """Write ``config.json``."""
        content = {"model_type": "tiny", "tie_word_embeddings": self.tied}
        (Path(folder) / "config.json").write_text(json.dumps(content))


class Model(nn.Module):
    """Two float32 tensors of shape (4, 2), all of whose values are one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.config = Config()
        self.embed_tokens = nn.Embedding(4, 2)
        self.lm_head = nn.Linear(2, 4, bias=False)
        self.fill(value)

    @torch.no_grad()
    def fill(self, value: float) -> None:
        """What training does."""
        self.embed_tokens.weight.fill_(value)
        self.lm_head.weight.fill_(-value)


def make(job: Path) -> None:
    """Make the job; its daemon and its trainer end, its explorers are cut off.

    ====  =======  ==================================================================
    step  version  what became of it
    ====  =======  ==================================================================
    1     1        published; held by the explorer ``held``
    2     2        published, and pinned; its full checkpoint is retired
    3              quarantined: its config is not true of its weights
    4     3        published, and the version pruned; its full checkpoint is retired
    5     4        published, and the version pruned
    1     5        version 1 again, by a rollback; served by the explorer ``serving``
    6              saved when the daemon had ended; the full checkpoint to resume from
    ====  =======  ==================================================================
    """
    run = [sys.executable, "-P", "-m", "syncd"]
    job.mkdir()
    daemon = subprocess.Popen(
        [*run, "run", str(job), "--tick", "0.05", "--lease-time", "2", "--keep", "1",
         "--no-prune-steps", "--log-level", "warning"]
    )  # fmt: skip
    try:
        _wait((job / ".syncd/format.json").exists)  # who opens the job first fixes its lease time
        model, served = Model(1), Model(0)
        holding = Reader(job, "held")
        serving = ExplorerHook(job, "serving", TorchModule(served))
        with TrainerHook(
            job,
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            settings=SyncSettings(sync_interval=1, save_interval=2, save_timeout=_HANGS),
            saving=SaveSettings(max_to_keep=1, when_busy_sync="wait"),
        ) as hook:
            for step in range(1, 6):
                model.fill(step)
                model.config.tied = step == 3
                hook.after_step(step)
                _wait(lambda step=step: str(step) in _saves(job))
                if step == 1:
                    holding.next_version(0, _HANGS)
                if step != 3:
                    serving.pull(_HANGS)
                if step == 2:
                    subprocess.run([*run, "pin", str(job), "v2"], check=True)
            subprocess.run([*run, "rollback", str(job), "v1"], check=True)
            serving.pull(_HANGS)
            assert served.embed_tokens.weight[0, 0] == 1
            _wait(lambda: not (job / "published/v000004").exists())
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(_HANGS)
            model.fill(6)
            hook.after_step(6)
    finally:
        if daemon.poll() is None:
            daemon.kill()
            daemon.wait(_HANGS)


def _saves(job: Path) -> dict[str, object]:
    """Step → what became of its save."""
    path = job / ".syncd/saves.json"
    return dict(json.loads(path.read_bytes())["steps"]) if path.exists() else {}


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _HANGS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("this release does not make this job")
        time.sleep(0.02)


def store(job: Path, archive: Path) -> None:
    """Put a job into a ``.tar.gz``, without the reserve, which a daemon fills again."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name.startswith(f"{job.name}/.syncd/reserve/"):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(job, job.name, filter=kept)


def main() -> None:
    """Make the job, and cut its explorers off: neither heartbeat nor lease ends by itself."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Path(folder) / "job"
        make(job)
        store(job, Path(sys.argv[1]))
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
