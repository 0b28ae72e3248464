"""A job that is mirrored through a folder: near and far daemons, push, pull, and explorers."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore")

from syncd.checkpoint.version import read_manifest
from syncd.protocol.layout import JobLayout
from syncd.protocol.mirrored import version_key
from syncd.protocol.names import REMOTE_PATH
from syncd.storage.fsio import Storage
from tests.deltas import contents
from tests.jobs import flip, weights
from tests.merging import assert_equal, loaded
from tests.multiprocess.explorer_processes import ended, following, serves
from tests.multiprocess.mirroring import Mirrored, trainer_report
from tests.multiprocess.processes import (
    Daemon,
    Program,
    explorer_report,
    newest,
    said_by_syncd,
    verified,
    wait_for_step,
    wait_until,
)
from tests.multiprocess.saves import Constant, trainer
from tests.products import product


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Mirrored]:
    with Mirrored(tmp_path) as mirrored:
        yield mirrored


BOTH = (False, True)


@pytest.mark.parametrize(
    ("deltas", "stages", "far_stages"),
    product(BOTH, BOTH, BOTH, usual=lambda *axes: sum(axes) in {0, 3}),
)
def test_every_save_arrives_bit_for_bit_by_few_bytes(
    mirrored: Mirrored, memory: Path, tmp_path: Path, deltas: bool, stages: bool, far_stages: bool
) -> None:
    near, link = mirrored.near, tmp_path / "link"
    mirrored.enter(Daemon(near, "--keep", "9"))
    far = mirrored.far()
    push = mirrored.push(*["--stage", memory] * stages)
    trainer = mirrored.trainer(deltas=deltas)
    arrivals = mirrored.arrivals(far, trainer)
    options = ("--stage", memory) if far_stages else ()
    with ended(following(far, "follower", *options, "--link", link)):
        for step in (1, 2, 3):
            arrivals.until(trainer.next(step))
        arrivals.until(trainer.next(2))  # the trainer has gone back
        said_by_syncd("rollback", near, "v1")
        arrivals.until(0)
        arrivals.until(trainer.next(4))
        assert arrivals.seen == [0, 1, 2, 3, 0, 4]
        sequence = newest(far).sequence
        wait_until(lambda: serves(far, "follower", sequence), "it serves the last one")
        assert trainer.is_saved(loaded(link.resolve())) == 4
    sizes = [size for name, size in mirrored.objects().items() if name.startswith("objects/")]
    assert sum(size > 250_000 for size in sizes) <= 2
    assert "Traceback" not in "".join(push.log)


def received(pull: Program) -> list[int]:
    """The bytes of each version that a pull has saved."""
    return [int(n) for line in pull.log for n in re.findall(r": (\d+) bytes in", line)]


def test_whoever_is_killed_comes_back_and_goes_on_by_deltas(mirrored: Mirrored) -> None:
    """Two jobs pull: one stages nothing, and the daemon of the other takes no deltas."""
    mirrored.enter(Daemon(mirrored.near, "--keep", "9"))
    fars = mirrored.far("far", pulls=False), mirrored.far("plain", "--deltas", "off", pulls=False)
    push = mirrored.push()
    pulls = [mirrored.pull(far) for far in fars]
    trainer = mirrored.trainer()
    arrivals = [mirrored.arrivals(far, trainer) for far in fars]

    def arrive(number: int) -> None:
        for each in arrivals:
            each.until(number)

    arrive(trainer.next(1))
    push.kill()
    trainer.next(2)
    push = mirrored.push()
    arrive(trainer.next(3))
    for pull in pulls:
        pull.kill()
    for step in (4, 5):
        push.wait_for_log(f"has v{trainer.next(step) + 1}, step {step}: ")
    pulls = [mirrored.pull(far) for far in fars]
    arrive(trainer.next(6))
    leases = f"v*/mirror.{explorer_report(mirrored.near, 'mirror').session}"
    held = JobLayout(mirrored.near).leases
    wait_until(lambda: len(list(held.glob(leases))) == 1, "one version is held")
    assert sorted(mirrored.objects().values())[-2] < 250_000
    for pull in pulls:
        assert max(received(pull)) < 250_000
        pull.kill()
    for step, part in ((7, 0.02), (8, 1.0), (9, 0.02)):  # a whole one, too
        trainer.changed = part
        push.wait_for_log(f"has v{trainer.next(step) + 1}, step {step}: ")
    for far in fars:
        mirrored.pull(far)
    arrive(trainer.next(10))
    late = mirrored.far("late")
    mirrored.arrivals(late, trainer).until(9)
    for each in arrivals:
        assert each.seen == sorted(set(each.seen))


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove, "it is not there"),
        (_truncate, "is shorter than its name says"),
        (flip, "bytes that its name says"),
    ],
)
def test_an_object_that_is_gone_or_damaged_costs_its_version_alone(
    mirrored: Mirrored, damage: Callable[[Path], None], words: str
) -> None:
    mirrored.enter(Daemon(mirrored.near))
    far = mirrored.far(pulls=False)
    push, trainer = mirrored.push(), mirrored.trainer()
    trainer.next(1)
    push.wait_for_log("has v1, step 1: ")
    (large,) = (name for name, size in mirrored.objects().items() if size > 250_000)
    damage(mirrored.folder / "bucket" / large)
    pull = mirrored.pull(far)
    pull.wait_for_log("trying again")
    fault = json.loads(said_by_syncd("status", far, "--json"))["trainer"]["fault"]
    assert re.search(words, fault)
    trainer.changed = 1.0
    mirrored.arrivals(far, trainer).until(trainer.next(2))
    wait_until(lambda: trainer_report(far).fault is None, "it is well again")
    assert newest(far).sequence == 1
    assert pull.running


def test_two_pushers_of_a_job_do_not_disturb_each_other(mirrored: Mirrored, memory: Path) -> None:
    mirrored.enter(Daemon(mirrored.near))
    far = mirrored.far()
    pushers = [mirrored.push("--name", "a"), mirrored.push("--name", "b", "--stage", memory)]
    trainer = mirrored.trainer()
    arrivals = mirrored.arrivals(far, trainer)
    for step in range(1, 9):
        if step == 6:
            pushers[0].kill()
        arrivals.until(trainer.next(step))
    assert arrivals.seen == list(range(8))
    for pusher in pushers:  # who begins before the daemon says so
        lines = [line for line in pusher.log if "no daemon works there" not in line]
        assert not [line for line in lines if "WARNING" in line or "ERROR" in line]


def test_a_prefix_is_of_one_job_and_an_older_copy_of_it_is_told(mirrored: Mirrored) -> None:
    trainer, copy = mirrored.trainer(), mirrored.folder / "copy"
    with Daemon(mirrored.near):
        trainer.next(1)
        wait_for_step(mirrored.near, 1)
    shutil.copytree(mirrored.near, copy, symlinks=True)
    mirrored.enter(Daemon(mirrored.near))
    push = mirrored.push()
    for step in (2, 3):
        push.wait_for_log(f"has v{trainer.next(step) + 1}, step {step}: ")
    other = mirrored.job("other")
    mirrored.trainer(other).next(1)
    for each in (other, copy):
        mirrored.enter(Daemon(each))
    refused = mirrored.push(job=other)
    refused.wait_for_log("has versions of another job: give each job its own prefix")
    assert refused.wait() != 0
    told = "has v3 already, but here the newest version is v1. If this job is an older copy"
    mirrored.push(job=copy).wait_for_log(told)
    wait_until(lambda: told in said_by_syncd("status", copy, "--json"), "the status tells it")
    assert sorted(mirrored.objects())[-3:] == [version_key(number) for number in (1, 2, 3)]


def test_adapters_are_mirrored_and_remote_versions_refused(mirrored: Mirrored) -> None:
    near, layout = mirrored.near, JobLayout(mirrored.near)
    mirrored.enter(Daemon(near))
    far = mirrored.far()
    push = mirrored.push()
    for step in (1, 2, 3):
        actor = layout.actor(step)
        config = {"peft_type": "LORA", "r": 2, "target_modules": ["q"]}
        files = {
            "adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": weights(
                step, 2.0, name="base_model.model.q.lora_A.weight"
            ),
        }
        (actor / "lora_adapter").mkdir(parents=True)
        for name, content in files.items():
            (actor / "lora_adapter" / name).write_bytes(content)
        layout.state_pointer.write_text(f"{step}\n")
        found = wait_for_step(far, step)
        assert found.kind == "adapter"
        verified(far, found.sequence)
        served = contents(JobLayout(far).version(found.sequence))
        assert files.items() <= served.items()
    layout.step(4).mkdir()
    (layout.step(4) / REMOTE_PATH).write_text("tinker://run/4")
    layout.state_pointer.write_text("4\n")
    push.wait_for_log("is of kind remote, but this engine loads only from storage")
    wait_until(lambda: explorer_report(near, "mirror").refused, "its report tells it, too")
    assert push.running


def test_versions_of_several_files_arrive_with_what_is_known_of_them(mirrored: Mirrored) -> None:
    """Merged by the daemon, with an index of their own."""
    near = mirrored.near
    mirrored.enter(Daemon(near, "--max-shard-size", "30000"))
    far = mirrored.far()
    mirrored.push()
    model = Constant(tensors=8)
    with trainer(near, model) as hook:
        for step, value in ((1, 1.0), (2, 2.0), (3, math.nan)):
            with torch.no_grad():
                model.parts[step][:2] = value
            hook.after_step(step)
            there, here = (
                JobLayout(job).version(wait_for_step(job, step).sequence) for job in (far, near)
            )
            assert_equal(loaded(there), loaded(here))
            manifests = [read_manifest(Storage(), folder) for folder in (there, here)]
            assert manifests[0].tensors == manifests[1].tensors
            assert manifests[0].nonfinite == manifests[1].nonfinite
    assert max(mirrored.objects().values()) < 30_000
    assert sum(mirrored.objects().values()) < 130_000  # of 117 kB a version
