"""What a fresh reader broke once: each of these ended a daemon, or let LATEST go back."""

import errno
import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.save import SavedWeights, look_at_save
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import RetireVersion
from syncd.daemon.orders import MergeOrder
from syncd.daemon.prune import Pruner
from syncd.daemon.publish import Publisher
from syncd.daemon.tenure import Tenure
from syncd.protocol.errors import SupersededError, SyncdError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import version_folder
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.judge import Judge
from syncd.storage.watch import Watcher
from tests.jobs import SmallJob, nothing
from tests.lagging import Hosts
from tests.storages import Clock, FastStorage, RuledStorage, once, refuse

pytestmark = pytest.mark.lagging


def saved_with_a_nested_folder(job: SmallJob, step: int) -> SavedWeights:
    """transformers writes additional_chat_templates/ beside the tokenizer."""
    job.save(step, receipts=False)
    nested = job.actor(step) / "huggingface" / "additional_chat_templates"
    nested.mkdir(exist_ok=True)
    (nested / "tool.jinja").write_text("x")
    save = look_at_save(job.storage, job.actor(step), step)
    assert isinstance(save, SavedWeights)
    return save


def publisher(job: SmallJob, storage: Storage, epoch: Epoch) -> Publisher:
    session = cast("Any", SimpleNamespace(id="session"))
    tenure = Tenure(Job(storage, job.layout), session, epoch, Judge(storage, 30.0))
    made = Publisher(tenure, DaemonConfig())
    made.recover()
    return made


def merge(publisher: Publisher, save: SavedWeights) -> None:
    """Make a version of a save, and publish it."""
    job, epoch = publisher.tenure.job, publisher.tenure.epoch
    sequence = publisher.next_sequence()
    folder = epoch.start_build(version_folder(sequence))
    order = MergeOrder(folder, save.step, save.identity, sequence, publisher.merge_options())
    publisher.publish(save, order.make(job, Work(nothing)))


def test_a_superseded_daemon_that_makes_a_nested_folder_brings_no_room_back(
    job: SmallJob, hosts: Hosts
) -> None:
    storage = hosts.ruled()
    old = publisher(job, storage, Epoch.take_over(Job(storage, job.layout)))
    merge(old, saved_with_a_nested_folder(job, 1))
    second = saved_with_a_nested_folder(job, 2)

    def overtake(*_: object) -> None:
        fast = FastStorage()
        epoch = Epoch.take_over(Job(fast, job.layout))
        new = publisher(job, fast, epoch)
        for step in (3, 4):
            merge(new, saved_with_a_nested_folder(job, step))
        pruner = Pruner(Job(fast, job.layout), epoch, "session")
        for sequence in (1, 2):
            assert pruner.retire_version(RetireVersion(sequence, "in the way"))

    storage.once("mkdir", overtake, where="additional_chat_templates")
    with pytest.raises((SupersededError, FileNotFoundError)):
        merge(old, second)
    assert job.latest.sequence == 3
    assert [name.partition("-")[0] for name in os.listdir(job.layout.epochs)] == ["2"]


def test_a_kill_between_lease_folder_and_version_uses_up_no_sequence(
    job: SmallJob, hosts: Hosts
) -> None:
    job.save(1)
    job.run()
    job.save(2)
    job.storage = hosts.ruled(refuse("rename", errno.EIO, where="published/v000002"))
    job.run()
    assert job.lease_folder(2).exists()
    assert job.versions == ["v000001"]
    job.storage = FastStorage()
    job.run()
    assert job.latest.sequence == 2


class NoListing(FastStorage):
    """A client whose listing of the leases fails as if they were gone."""

    def names(self, path: Path) -> list[str]:
        return [] if path.name == "leases" else super().names(path)


def test_one_empty_listing_of_the_leases_deletes_no_version_that_is_kept(job: SmallJob) -> None:
    for step in (1, 2, 3):
        job.save(step)
        job.run(DaemonConfig(keep=5))
    job.storage = NoListing()
    job.run(DaemonConfig(keep=5))
    assert job.versions == ["v000001", "v000002", "v000003"]


@pytest.mark.parametrize("step", [3, 5])
def test_a_folder_that_cannot_be_looked_at_keeps_nobody_from_the_others(
    job: SmallJob, step: int
) -> None:
    actor = job.actor(step)
    actor.mkdir(parents=True)
    os.symlink("/nowhere", actor / "model_world_size_1_rank_0.pt")
    job.point(step)
    with job.daemon() as loop:
        loop.run_once()
        loop.publish(6)
        assert job.latest.step == 6


def fill(storage: RuledStorage) -> None:
    """From now on there is no room for a new file."""
    for method in ("create", "mkdir", "open_append"):
        storage.refuse(method, errno.ENOSPC)


def test_a_full_disk_keeps_nothing_from_being_pruned(
    tmp_path: Path, clock: Clock, hosts: Hosts
) -> None:
    storage = hosts.ruled()
    job = SmallJob(tmp_path / "job", storage, hosts=hosts)
    with job.daemon(DaemonConfig(keep=1, prune_steps=False), clock=clock) as loop:
        for step in (1, 2):
            job.save(step)
            lease = job.lease(step - 1, "session") if step > 1 else None
            loop.run_once()
        assert lease is not None
        lease.release()
        job.save(3)
        fill(storage)
        loop.run_once()
        assert job.versions == ["v000002"]
        storage.rules.clear()
        clock.advance(60)
        loop.run_once()
        assert job.latest.step == 3


def odd_tensor_name(layout: JobLayout) -> None:
    header = json.dumps({"\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (layout.actor(1) / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("what", ["odd name", "fault"])
def test_whatever_is_wrong_with_one_save_the_next_one_is_served(
    job: SmallJob, what: str, hosts: Hosts
) -> None:
    job.save(1, receipts=False)
    if what == "odd name":
        odd_tensor_name(job.layout)
    else:

        def break_down(*_: object) -> None:
            raise RuntimeError("half a surrogate \ud800, and a fault of ours")

        job.storage = hosts.ruled(once("create", break_down, where="v000001/"))

    with job.daemon() as loop:
        loop.rounds(3, 2)
        assert job.outcomes == {1: "quarantined"}
        job.save(2, receipts=False)
        loop.rounds(3, 2)
        assert job.latest.step == 2


def test_a_watcher_waits_in_a_process_with_more_than_1024_open_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    try:
        with Watcher({tmp_path: frozenset({"LATEST"})}) as watcher:
            watcher.wake()
            assert watcher.wait(60)
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_every_error_of_ours_has_an_exit_code_and_its_place_in_the_tree() -> None:
    pending, found = [SyncdError], []
    while pending:
        kind = pending.pop()
        found.append(kind)
        pending.extend(kind.__subclasses__())
    assert all(1 <= kind.exit_code < 64 and kind.__doc__ for kind in found)
