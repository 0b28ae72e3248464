"""Deltas as folders of a job: their numbers, their recovery and their pruning."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from syncd.cli import cli
from syncd.daemon.config import DaemonConfig
from syncd.storage.fsio import Storage
from tests.jobs import SmallJob
from tests.storages import refuse

pytestmark = pytest.mark.lagging


def published(job: SmallJob, steps: int) -> None:
    """Steps 1, 2, …, each a version; nothing is pruned."""
    with job.daemon(DaemonConfig(keep=99)) as loop:
        for step in range(1, steps + 1):
            job.save(step)
            loop.run_once()


def add_deltas(job: SmallJob, *sequences: int) -> None:
    """Deltas of ten bytes, as a daemon has committed them, as far as this is about folders."""
    for sequence in sequences:
        folder = job.delta(sequence)
        folder.mkdir(parents=True)
        (folder / "delta.json").write_bytes(b"{}")
        (folder / "blocks").write_bytes(b"x" * 8)
    job.hosts.settle()


def deltas(job: SmallJob) -> list[str]:
    return sorted(os.listdir(job.layout.deltas))


def one_round(job: SmallJob, **settings: Any) -> None:
    job.run(DaemonConfig(keep=99, **settings))


def test_a_delta_above_latest_is_discarded_on_record_and_its_number_not_used_again(
    job: SmallJob,
) -> None:
    published(job, 2)
    add_deltas(job, 2, 3, 7)
    (job.delta(7) / "delta.json").unlink()
    (job.delta(7) / "delta.json").mkdir()
    with job.daemon() as loop:
        assert deltas(job) == ["d000002"]
        assert {("delta", "d000003"), ("delta", "d000007")} <= set(job.audit)
        job.save(3)
        loop.run_once()
        assert job.latest.sequence == 8


def test_the_delta_of_an_adopted_version_stays(job: SmallJob) -> None:
    published(job, 2)
    job.layout.latest.unlink()
    add_deltas(job, 2, 3)
    with job.daemon():
        assert job.latest.sequence == 2
        assert deltas(job) == ["d000002"]


def test_a_sequence_is_never_given_twice_though_nothing_but_a_delta_names_it(
    job: SmallJob,
) -> None:
    published(job, 2)
    add_deltas(job, 2)
    for path in (job.layout.latest, job.layout.saves, job.layout.daemon_report):
        path.unlink()
    for sequence in (1, 2):
        job.storage.remove_tree(job.version(sequence))
        job.storage.remove_tree(job.lease_folder(sequence))
    job.hosts.settle()
    one_round(job)
    assert job.latest.sequence == 3
    assert deltas(job) == []


def test_a_delta_that_cannot_be_discarded_keeps_nobody_from_new_weights(
    job: SmallJob,
) -> None:
    job.storage = job.hosts.ruled(refuse("rename", errno.EACCES, where="/deltas/"))
    published(job, 1)
    job.save(2)
    add_deltas(job, 5)
    one_round(job)
    assert job.serves == (6, 2)
    assert deltas(job) == ["d000005"]


def test_a_delta_of_an_unbelievable_number_is_nobodys(job: SmallJob) -> None:
    published(job, 1)
    job.save(2)
    add_deltas(job, 10**17)
    one_round(job)
    assert job.latest.sequence == 2
    assert job.delta(10**17).exists()


@pytest.mark.parametrize("thing", ["file", "foreign names"])
def test_something_else_under_the_name_of_the_folder_keeps_nobody_from_new_weights(
    job: SmallJob, thing: str
) -> None:
    published(job, 1)
    match thing:
        case "file":
            job.layout.deltas.write_bytes(b"mine")
        case "foreign names":
            (job.layout.deltas / "of the trainer").mkdir(parents=True)
            (job.layout.deltas / "d9").touch()
    job.save(2)
    job.hosts.settle()
    one_round(job)
    assert job.serves == (2, 2)
    assert thing != "foreign names" or deltas(job) == ["d9", "of the trainer"]


@pytest.mark.local_only("a lagging client follows links")
def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "d000009").mkdir(parents=True)
    root = tmp_path / "job"
    job = SmallJob(root, Storage(root, durable=False))
    published(job, 1)
    job.layout.deltas.symlink_to(elsewhere)
    job.save(2)
    one_round(job)
    assert job.serves == (2, 2)
    assert (elsewhere / "d000009").exists()


def test_old_deltas_go_by_number_and_by_bytes_each_with_an_audit_line(job: SmallJob) -> None:
    published(job, 6)
    add_deltas(job, *range(1, 7))
    one_round(job, keep_deltas=4)
    assert deltas(job) == ["d000003", "d000004", "d000005", "d000006"]
    full = sum(path.stat().st_size for path in job.version(6).iterdir())
    full -= (job.version(6) / "manifest.json").stat().st_size
    (job.delta(4) / "more").write_bytes(b"x" * (full // 2 - 30))
    job.hosts.settle()
    one_round(job, keep_deltas=4)
    assert deltas(job) == ["d000004", "d000005", "d000006"]
    assert sorted(name for what, name in job.audit if what == "delta") == [
        "d000001", "d000002", "d000003"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_read_keeps_no_delta_from_being_pruned(job: SmallJob) -> None:
    storage = job.storage = job.hosts.ruled()
    published(job, 6)
    add_deltas(job, *range(1, 7))
    storage.refuse("names", errno.EACCES, where="deltas/d000006")
    storage.refuse("open_read", errno.EIO, where="deltas/d000005")
    storage.refuse("names", errno.EIO, where="leases/v000004")
    storage.refuse("names", errno.EIO, where="global_step_3")
    one_round(job, keep_deltas=4)
    assert deltas(job) == ["d000003", "d000004", "d000005", "d000006"]


def test_off_deletes_deltas(job: SmallJob) -> None:
    published(job, 2)
    add_deltas(job, 2)
    one_round(job, deltas="off")
    assert deltas(job) == []


def test_deltas_give_way_to_a_version_that_finds_no_room(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.storage = job.hosts.ruled(refuse("rename", errno.EIO, where="deltas/d000001"))
    published(job, 2)
    add_deltas(job, 1, 2)
    real = job.storage.free

    def free(path: Path) -> Any:
        return real(path)._replace(bytes=0 if job.delta(2).exists() else 10**12)

    monkeypatch.setattr(job.storage, "free", free)
    with job.daemon(DaemonConfig(keep=99)) as loop:
        job.save(3)
        loop.run_once()
    assert job.latest.step == 3
    assert deltas(job) == ["d000001"]
    assert ("delta", "d000002") in job.audit


def test_the_dry_run_names_the_deltas_that_would_go(job: SmallJob) -> None:
    published(job, 3)
    add_deltas(job, 1, 2, 3)
    arguments = ["prune", str(job.root), "--keep-deltas", "1", "--keep", "9", "--json"]
    for more in (["--dry-run"], []):
        done = CliRunner().invoke(cli, [*arguments, "--no-prune-steps", *more])
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)["deleted"]
        assert [(one["what"], one["name"]) for one in told] == [
            ("delta", "d000002"), ("delta", "d000001")
        ]  # fmt: skip
        if more:
            assert deltas(job) == ["d000001", "d000002", "d000003"]
    assert deltas(job) == ["d000003"]
    assert job.audit[-2:] == [("delta", "d000002"), ("delta", "d000001")]


def test_a_half_deleted_delta_is_finished_by_the_next_daemon_on_record(
    job: SmallJob,
) -> None:
    storage = job.storage = job.hosts.ruled()
    published(job, 3)
    add_deltas(job, 1, 2, 3)
    storage.refuse("unlink", errno.EIO, where="/doomed/d000001")
    one_round(job, keep_deltas=2)
    assert deltas(job) == ["d000002", "d000003"]
    storage.rules.clear()
    one_round(job, keep_deltas=2)
    assert job.audit.count(("delta", "d000001")) >= 1
    assert not list(job.layout.epochs.glob("*/doomed/*"))
