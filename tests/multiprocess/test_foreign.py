"""Saves of trainers that know nothing of syncd: torch.save in place, and a pointer."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.version import read_manifest
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER, shard_name
from syncd.protocol.records import Receipt, ReceiptFile, encode
from syncd.storage.fsio import Storage
from tests.jobs import SmallJob
from tests.merging import assert_equal, loaded
from tests.multiprocess.processes import Daemon, report, wait_for_step, wait_until, wait_until_gone
from tests.places import FIXTURES
from tests.shards import Built, Named, dtensor, shard, tensor


def put(job: Path, kind: str, step: int, torch_version: str = "2.15.0") -> Path:
    """Copy a fixture's shards into a step's folder, as a trainer would leave them."""
    actor = JobLayout(job).actor(step)
    actor.mkdir(parents=True)
    for path in sorted((FIXTURES / f"torch-{torch_version}" / kind).rglob("model_world_size_*.pt")):
        shutil.copyfile(path, actor / path.name)
    return actor


def save_summands(job: Path, step: int) -> None:
    """A save of what no rank has reduced."""
    actor = JobLayout(job).actor(step)
    actor.mkdir(parents=True)
    for rank in range(2):
        partial = Built(
            Named("torch.distributed.tensor.placement_types", "Partial"), (), {"reduce_op": "sum"}
        )
        mesh = {"_coordinate_on_dim": (rank,), "mesh": tensor((2,), (1,))}
        weight = dtensor(mesh=mesh, placements=(partial,))
        (actor / shard_name(2, rank)).write_bytes(shard({"weight": weight}))


def check(job: Path, sequence: int, truth: dict[str, torch.Tensor]) -> None:
    assert_equal(loaded(JobLayout(job).version(sequence)), truth)


def truth_of(kind: str, torch_version: str = "2.15.0") -> dict[str, torch.Tensor]:
    path = FIXTURES / f"torch-{torch_version}" / kind / "truth.pt"
    return torch.load(path, weights_only=True)


def _said(daemon: Daemon, words: str) -> int:
    return len([line for line in daemon.log if words in line])


def test_every_kind_of_shard_that_trainers_write_is_served_one_after_the_other(job: Path) -> None:
    kinds = sorted(folder.name for folder in (FIXTURES / "torch-2.15.0").iterdir())
    with Daemon(job):
        for step, kind in enumerate(kinds, 1):
            put(job, kind, step)
            (job / STATE_POINTER).write_text(str(step))
            check(job, wait_for_step(job, step).sequence, truth_of(kind))


def test_a_daemon_that_casts_publishes_what_torch_would_make_of_it(job: Path) -> None:
    with Daemon(job, "--dtype", "fp32") as daemon:
        for step in (1, 2):
            put(job, "fsdp_tp", step)
            (job / STATE_POINTER).write_text(str(step))
            latest = wait_for_step(job, step)
            truth = truth_of("fsdp_tp")
            wanted = {name: t.float() if t.is_floating_point() else t for name, t in truth.items()}
            assert any(t.dtype == torch.bfloat16 for t in truth.values())
            check(job, latest.sequence, wanted)
        assert "torch" not in Path(f"/proc/{daemon.pid}/maps").read_text()  # its child has it


@pytest.mark.parametrize("torch_version", ["2.5.1", "2.15.0"])
def test_a_plain_verl_job_is_served_and_never_pruned(job: Path, torch_version: str) -> None:
    with Daemon(job, "--pointer", CHECKPOINT_POINTER, "--keep", "1"):
        for step in (1, 2):
            put(job, "fsdp2", step, torch_version)
            (job / CHECKPOINT_POINTER).write_text(str(step))
            check(job, wait_for_step(job, step).sequence, truth_of("fsdp2", torch_version))
        layout = JobLayout(job)
        assert read_manifest(Storage(), layout.version(2)).checked == "crc32"
        wait_until_gone(layout.version(1))
        assert layout.step(1).exists()


def test_a_save_that_cannot_be_merged_is_quarantined_and_the_next_one_served(job: Path) -> None:
    layout = JobLayout(job)
    with Daemon(job) as daemon:
        save_summands(job, 1)
        (job / STATE_POINTER).write_text("1")
        daemon.wait_for_log("quarantined step")
        told = SmallJob(job).refused
        assert told.error == "PlacementError"
        assert "weight has placements (Partial(reduce_op=sum))" in told.reason
        assert not layout.latest.exists()
        put(job, "fsdp2", 2)
        (job / STATE_POINTER).write_text("2")
        check(job, wait_for_step(job, 2).sequence, truth_of("fsdp2"))
        assert _said(daemon, "quarantined step") == 1
        assert layout.step(1).exists()


def test_a_shard_that_is_still_being_written_is_waited_for(job: Path) -> None:
    layout = JobLayout(job)
    last = sorted(put(job, "fsdp2", 1).iterdir())[-1]
    content = last.read_bytes()
    with Daemon(job) as daemon:
        for refused, part in enumerate((100, len(content) // 2, len(content) - 10), 1):
            last.write_bytes(content[:part])
            (job / STATE_POINTER).write_text("1")
            wait_until(
                lambda refused=refused: _said(daemon, "quarantined step") == refused,
                "what lies still and cannot be read is refused, under its own identity",
            )
            assert not layout.latest.exists()
        last.write_bytes(content)
        check(job, wait_for_step(job, 1).sequence, truth_of("fsdp2"))


def test_pointers_that_name_nothing_are_logged_once_and_looked_at_again(job: Path) -> None:
    pointer = job / STATE_POINTER
    with Daemon(job) as daemon:
        for content, said in [
            (None, f"{STATE_POINTER} is not there"),
            ("", "is empty"),
            ("12x", "is not a number"),
            ("-1", "is negative"),
            ("7", "global_step_7/actor is not there"),
        ]:
            if content is not None:  # at once: a file that is being written is empty, too
                (job / "draft").write_text(content)
                (job / "draft").replace(pointer)
            daemon.wait_for_log(said)
        # Before the folder is filled: then the reasons may come back in any order.
        waiting = [line.split("waiting: ")[1] for line in daemon.log if "waiting: " in line]
        assert len(waiting) == len(set(waiting)) == 4
        assert sum("is not a number" in line for line in daemon.log) == 1  # somebody must act
        put(job, "fsdp2", 7)
        wait_for_step(job, 7)


def test_saves_that_the_pointer_has_passed_are_skipped_counted_and_pruned(job: Path) -> None:
    layout = JobLayout(job)
    for step in (1, 2, 3):
        put(job, "fsdp2", step)
    (job / STATE_POINTER).write_text("3")
    with Daemon(job):
        assert wait_for_step(job, 3).sequence == 1
        # What lies below a pointer that was never seen to move may be a resumed trainer's.
        assert layout.step(1).exists()
        put(job, "fsdp2", 4)
        (job / STATE_POINTER).write_text("4")
        wait_until(
            lambda: not any(layout.step(step).exists() for step in (1, 2, 3)), "pruned", 4 * 60
        )
        wait_until(
            lambda: (found := report(job)) and found.counters.steps_pruned == 3, "all are counted"
        )
        # Step 4 has to be still for a tick, and the others may go before it is published.
        wait_until(
            lambda: (found := report(job)) and found.counters.published == 2, "step 4 is counted"
        )
        found = report(job)
        assert found is not None
        assert (found.counters.published, found.counters.skipped) == (2, 2)


@pytest.mark.parametrize("has_receipt", [True, False])
def test_a_full_state_dict_is_linked_when_it_has_our_receipt_else_copied(
    job: Path, *, has_receipt: bool
) -> None:
    layout = JobLayout(job)
    actor = layout.actor(1)
    (actor / ".receipts").mkdir(parents=True) if has_receipt else actor.mkdir(parents=True)
    truth = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(7, dtype=torch.int64)}
    path = actor / "model.safetensors"
    save_file(truth, path)
    if has_receipt:
        with SafetensorsFile.open(Storage(), path) as file:
            vouched = ReceiptFile(
                name=path.name, size=file.size, digest=file.header_digest, over="header"
            )
        receipt = Receipt(save_id="run-1-0", step=1, rank=0, world_size=1, files=(vouched,))
        (actor / ".receipts" / "rank_0.json").write_bytes(encode(receipt))
    with Daemon(job):
        (job / STATE_POINTER).write_text("1")
        latest = wait_for_step(job, 1)
        published = layout.version(latest.sequence) / "model.safetensors"
        assert published.samefile(path) is has_receipt
        check(job, latest.sequence, truth)
        wait_until(lambda: (found := report(job)) and found.counters.published == 1, "counted")
