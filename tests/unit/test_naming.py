"""Whose names the tensors of a job's versions have."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.version import read_manifest
from syncd.cli.status import page
from syncd.daemon.config import DaemonConfig, RunConfig
from syncd.daemon.host.services import JobSupervisor
from syncd.daemon.telling.journal import read_journal
from syncd.operate.job_state import look
from syncd.protocol.names import NAME_MAP, RECEIPTS, receipt_name
from syncd.protocol.records import Receipt, encode
from syncd.protocol.reports import ExplorerReport
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord
from syncd.storage.sessions import Session
from tests.commands import invoke
from tests.jobs import LEASE_TIME, Rounds, SmallJob, edit, read
from tests.storages import Clock

MAP = NameMapRecord(
    tensors={"weight": MappedTensor(shape=(3,), pieces=(HubPiece(name="hub.weight"),))}
)


def save(job: SmallJob, step: int, names: NameMapRecord = MAP) -> None:
    folder = job.actor(step) / "huggingface"
    folder.mkdir(parents=True)
    (folder / NAME_MAP).write_bytes(encode(names))
    job.save(step)


def publish(loop: Rounds, step: int) -> None:
    save(loop.job, step)
    loop.run_once()


@contextmanager
def explorer(job: SmallJob, name: str, *, hub_names: bool) -> Iterator[None]:
    with Session(job.layout, LEASE_TIME) as session:
        report = ExplorerReport(
            name=name, session=session.id, status="running", hub_names=hub_names, time=0.0
        )
        job.put_record(job.explorer(name), report)
        if not hub_names:  # as a release before there were any
            edit(job.explorer(name), ',"hub_names":false', "")
        yield


def tensors(job: SmallJob, sequence: int) -> tuple[str, list[str]]:
    """Whose names a version has, and which."""
    manifest = read_manifest(job.storage, job.version(sequence))
    return manifest.names or "none", [tensor.name for tensor in manifest.tensors]


HUB = ("hub", ["hub.weight"])
TRAINER = ("trainer", ["weight"])


def said(job: SmallJob) -> list[tuple[int | None, str | None, str | None]]:
    lines = (line for line in read_journal(job) if line.event == "names")
    return [(line.version, line.names, line.why) for line in lines]


@pytest.mark.parametrize(
    ("explorers", "names"),
    [
        ({}, HUB),
        ({"new": True}, HUB),
        ({"new": True, "old": False}, TRAINER),
    ],
)
def test_a_new_job_gets_the_hubs_names_if_all_live_explorers_take_them(
    job: SmallJob, explorers: dict[str, bool], names: object
) -> None:
    with ExitStack() as stack:
        for name, takes in explorers.items():
            stack.enter_context(explorer(job, name, hub_names=takes))
        with job.daemon() as loop:
            publish(loop, 1)
            seen = look(job)
    assert tensors(job, 1) == names
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(page(seen, 0.0, 100))
    shown = console.export_text()
    assert ("old did not report support for the hub's names" in shown) == (names == TRAINER)
    assert ("names    of the hub" in shown) == (names == HUB)
    why = "old did not report support for the hub's names" if names == TRAINER else None
    assert said(job) == [(1, names[0], why)]  # type: ignore[index] # one of the two above
    assert seen.daemon.names == names[0]  # type: ignore[union-attr, index]


def test_a_job_keeps_the_names_of_its_newest_version_over_daemons(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with explorer(job, "old", hub_names=False), job.daemon(clock=clock) as loop:
        publish(loop, 1)
    for step in (2, 3):
        with job.daemon(clock=clock) as loop:
            publish(loop, step)
            assert tensors(job, step) == TRAINER
    assert len(said(job)) == 1
    told = [record for record in caplog.records if getattr(record, "event", "") == "version_names"]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "--names hub" in told[0].getMessage()


def adapter(job: SmallJob, step: int) -> None:
    """A save of a LoRA adapter, without receipts."""
    folder = job.actor(step) / "lora_adapter"
    folder.mkdir(parents=True)
    a, b = (f"base_model.model.q.lora_{one}.weight" for one in "AB")
    entries = [HeaderEntry(a, "F32", (1, 2), 0, 8), HeaderEntry(b, "F32", (2, 1), 8, 16)]
    job.put(folder / "adapter_model.safetensors", header_bytes(entries) + bytes(16))
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    job.put(folder / "adapter_config.json", json.dumps(config).encode())
    job.point(step)


def remote(job: SmallJob, step: int) -> None:
    """A save that only names a path."""
    job.step(step).mkdir(parents=True)
    (job.step(step) / "remote_sampler_path.txt").write_text("/models/x\n")
    job.point(step)


@pytest.mark.parametrize("other", [adapter, remote])
def test_a_job_keeps_its_names_over_versions_that_have_none_and_daemons(
    job: SmallJob, clock: Clock, other: Callable[[SmallJob, int], None]
) -> None:
    config = DaemonConfig(keep=1, tick=0.001)
    with job.daemon(config, clock=clock) as loop:
        publish(loop, 1)
        other(job, 2)
        for _ in range(5):
            clock.advance(2.0)
            loop.run_once()
        assert job.latest.sequence == 2
    for step in (3, 4):
        with job.daemon(config, clock=clock) as loop:
            publish(loop, step)
        assert tensors(job, step) == HUB
    assert said(job) == [(1, "hub", None)]


def test_a_map_that_the_receipts_do_not_list_is_another_saves(job: SmallJob) -> None:
    save(job, 1)
    receipt = job.actor(1) / RECEIPTS / receipt_name(0)
    told = read(Receipt, receipt)
    files = tuple(file for file in told.files if not file.name.endswith(NAME_MAP))
    receipt.write_bytes(encode(told.model_copy(update={"files": files})))
    job.run()
    assert tensors(job, 1) == TRAINER
    assert not (job.version(1) / NAME_MAP).exists()


def test_a_change_of_names_is_said_once(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with job.daemon(DaemonConfig(names="trainer"), clock=clock) as loop:
        publish(loop, 1)
        loop.config = DaemonConfig(names="hub")
        for step in (2, 3):
            publish(loop, step)
    with job.daemon(DaemonConfig(names="hub"), clock=clock) as loop:
        publish(loop, 4)
    assert [tensors(job, n) for n in (3, 4)] == [HUB, HUB]
    assert said(job) == [(1, "trainer", None), (2, "hub", None)]
    assert "in the previous version they had the names of the trainer" in caplog.text


def test_a_map_that_maps_nothing_is_no_line(job: SmallJob) -> None:
    with job.daemon() as loop:
        save(job, 1, NameMapRecord())  # as a WeightStream does
        loop.run_once()
        loop.run_once()
        shown = invoke("status", job.root).output
        assert "step 1" in shown
        assert "names" not in shown
        publish(loop, 2)
        loop.run_once()
        assert "names" in invoke("status", job.root).output
    assert [line[:2] for line in said(job)] == [(2, "trainer")]


def test_a_rollback_brings_its_names_back_and_they_are_kept(job: SmallJob) -> None:
    with job.daemon(DaemonConfig(names="trainer", keep=9)) as loop:
        publish(loop, 1)
        loop.config = DaemonConfig(names="hub", keep=9)
        publish(loop, 2)
        loop.config = DaemonConfig(keep=9)
        job.ask_rollback(1)
        loop.run_once()
        publish(loop, 4)
    assert [tensors(job, n) for n in (2, 3, 4)] == [HUB, TRAINER, TRAINER]
    assert [line[:2] for line in said(job)] == [(1, "trainer"), (2, "hub"), (3, "trainer")]


def test_a_model_whose_names_are_the_same_is_nothing_to_be_said(job: SmallJob) -> None:
    with explorer(job, "old", hub_names=False), job.daemon() as loop:
        loop.publish(1)
        seen = look(job)
    assert said(job) == []
    assert seen.daemon is not None
    assert seen.daemon.names is None


def test_a_memory_folder_keeps_the_trainers_own_file_unless_told_otherwise(tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    told = {}
    for names in (None, "hub"):
        services = JobSupervisor(job.root, RunConfig(memory_dir=tmp_path / "memory", names=names))
        told[names] = [server.config.names for server in services._servers.values()]
    assert told == {None: [None, "trainer"], "hub": ["hub", "hub"]}


@pytest.mark.parametrize("killed", [False, True])
def test_an_explorer_that_is_gone_is_not_asked(job: SmallJob, clock: Clock, killed: bool) -> None:
    with explorer(job, "old", hub_names=False):
        report = job.explorer("old").read_bytes()
        heartbeat = next(path for path in job.layout.sessions.iterdir() if path.suffix == ".lock")
        left = heartbeat.read_bytes()
    if killed:
        job.put(job.explorer("old"), report)
        heartbeat.write_bytes(left)  # nobody touches it any more
    with job.daemon(clock=clock) as loop:
        loop.rounds(12 if killed else 0, LEASE_TIME / 4)
        publish(loop, 1)
    assert tensors(job, 1) == HUB
