"""The storage calls of merge, publish, pull and delta, counted: ``python -m tests.storage_calls``.

It uses only names that also the release before has, so that it can count there too::

    git worktree add --detach /tmp/before c7c4b4c1
    cp tests/storage_calls.py /tmp/before/tests/ && cd /tmp/before && python -m tests.storage_calls
"""

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedConfig

from explorer_hooks import ExplorerHook, TorchModule
from syncd.daemon.config import DaemonConfig
from syncd.protocol.names import delta_name, receipt_name
from syncd.storage.fsio import Storage
from tests.commands import invoke
from tests.delta_saves import offered
from tests.hooks import written
from tests.jobs import SmallJob
from tests.places import FIXTURES
from tests.storages import CHANGES, SEAM, Clock
from trainer_hooks import SyncSettings, TrainerHook

_SHARDS = FIXTURES / "torch-2.15.0" / "fsdp2"
_HANGS = 60.0


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of all storages of this process, by their names."""
    calls: Counter[str] = Counter()
    lock = threading.Lock()

    def counting(name: str) -> Callable[..., Any]:
        real = getattr(Storage, name)

        def method(self: Storage, *given: Any) -> Any:
            with lock:
                calls[name] += 1
            return real(self, *given)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in SEAM:
            patch.setattr(Storage, name, counting(name))
        yield calls


def merge(folder: Path) -> Counter[str]:
    """``syncd merge`` of four ranks' shards, without receipts, into one file."""
    with counted() as calls:
        done = invoke("merge", _SHARDS, folder / "merged")
    assert done.exit_code == 0, done.output
    return calls


def publish(folder: Path) -> Counter[str]:
    """The round of a daemon that publishes a save with a receipt, as the second version."""
    job = SmallJob(folder / "job")
    with job.daemon(DaemonConfig(), clock=Clock()) as loop:
        job.save(1)
        for _ in range(3):
            loop.run_once()
        job.save(2)
        with counted() as calls:
            loop.run_once()
    assert job.versions == ["v000001", "v000002"]
    return calls


def pull(folder: Path) -> Counter[str]:
    """An explorer that has version 1 pulls version 2, which is there: all but ``close``."""
    job = SmallJob(folder / "pulled")
    model = nn.Module()
    model.weight = nn.Parameter(nn.Linear(3, 1).weight[0].detach())
    with job.daemon(DaemonConfig()) as loop:
        loop.publish(1)
        with ExplorerHook(job.root, "explorer", TorchModule(model)) as hook:
            hook.pull(_HANGS)
            loop.publish(2)
            with counted() as calls:
                assert hook.pull(_HANGS).sequence == 2
    return calls


def delta(folder: Path) -> Counter[str]:
    """A trainer of one rank saves one changed element of a model with a config."""
    model, settings = nn.Linear(3, 1), SyncSettings(deltas=True)
    model.config = PreTrainedConfig()
    with offered(folder) as job, TrainerHook(folder, model, settings=settings) as hook:
        hook.save_state_dict(1)
        written(hook)
        model.weight.data[0, 0] += 1
        with counted() as calls:
            hook.save_state_dict(2)
            written(hook)
        files = filter(Path.is_file, job.layout.actor(2).rglob("*"))
        assert {path.name for path in files} == {delta_name(1, 0), receipt_name(0)}
    return calls


#: What is counted, by its name.
WORK = {"merge": merge, "publish": publish, "pull": pull, "delta": delta}


def summary(calls: Counter[str]) -> dict[str, int]:
    """The number of syncs, of calls that change storage, and of those that only look."""
    changes = sum(calls[name] for name in CHANGES)
    syncs = calls["fsync"] + calls["sync_folder"]
    return {"syncs": syncs, "changes": changes, "looks": calls.total() - changes}


def main() -> None:
    """Print the calls of each."""
    for name, work in WORK.items():
        with tempfile.TemporaryDirectory() as folder:
            calls = work(Path(folder))
        told = ", ".join(f"{call} {count}" for call, count in sorted(calls.items()))
        print(f"{name}: {summary(calls)}\n    {told}")


if __name__ == "__main__":
    main()
