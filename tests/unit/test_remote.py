"""Trainers whose weights are elsewhere: what they say becomes a version that hands the path out."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from explorer_hooks import ExplorerHook, TorchModule
from explorer_hooks.reader import Reader
from syncd.checkpoint.build import build_step
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import Remote, Unfinished
from syncd.checkpoint.step_save import look_into_step
from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import GiveUp, Merge, decide
from syncd.daemon.loop import Loop
from syncd.protocol.errors import RecordError, SaveNotReadyError
from syncd.protocol.names import REMOTE_PATH
from syncd.protocol.records import Manifest, parse
from tests.commands import invoke
from tests.jobs import SmallJob
from tests.refusals import unfit
from tests.storages import STORAGE, Clock
from tests.unit.test_decide import AT_9, CONFIG
from tests.unit.test_decide import job as observed
from tests.unit.test_steering import ask

TINKER = "tinker://run-1/sampler_weights/000009"


def point_to(
    job: SmallJob, step: int = 9, content: bytes | None = TINKER.encode(), *, point: bool = True
) -> None:
    """What a trainer leaves that samples elsewhere."""
    job.step(step).mkdir(exist_ok=True)
    if content is not None:
        job.put(job.step(step) / REMOTE_PATH, content)
    if point:
        job.point(step)


def let_lie(loop: Loop, clock: Clock) -> None:
    """Look, and once more when what is there has lain still."""
    loop.run_once()
    clock.advance(2)
    loop.run_once()


def rounds(job: SmallJob, *, pause: float = 2) -> None:
    job.run(rounds=3, seconds=pause)


@pytest.mark.lagging
def test_a_path_becomes_a_version_of_kind_remote(job: SmallJob) -> None:
    point_to(job, 9, f"{TINKER}\n".encode())
    rounds(job)
    assert (job.latest.sequence, job.latest.step, job.latest.kind) == (1, 9, "remote")
    manifest = read_manifest(STORAGE, job.version(1))
    assert (manifest.remote, manifest.files, manifest.tensors) == (TINKER, (), ())
    assert job.outcomes == {9: "published"}
    rounds(job)
    assert job.versions == ["v000001"]


@pytest.mark.lagging
def test_a_path_must_lie_still_and_a_new_one_is_a_new_version(job: SmallJob, clock: Clock) -> None:
    with job.daemon(clock=clock) as loop:
        point_to(job, 9, b"half of a pa")
        assert "have not changed for" in loop.run_once().waiting_for
        point_to(job)
        loop.run_once()
        assert not job.layout.latest.exists()
        clock.advance(2)
        loop.run_once()
        assert job.latest.sequence == 1
        point_to(job)  # the same line once more: other weights, for all we know
        let_lie(loop, clock)
    assert job.latest.sequence == 2
    assert read_manifest(STORAGE, job.version(2)).remote == TINKER


@pytest.mark.lagging
@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "is not there"), (b"", "is empty"), (b" \n", "is empty"), (b"\xff", "text in UTF-8"),
     (b"a\nb", "is not one line"), (b"x" * 5000, "is not a file, or is longer than")],
)  # fmt: skip
def test_what_never_says_where_is_quarantined_in_time_and_the_daemon_goes_on(
    job: SmallJob, clock: Clock, content: bytes | None, why: str
) -> None:
    point_to(job, 8, content)
    with job.daemon(DaemonConfig(prune_steps=False), clock=clock) as loop:
        assert why in loop.run_once().waiting_for
        clock.advance(59)
        assert why in loop.run_once().waiting_for
        assert list(job.layout.quarantine.iterdir()) == []
        clock.advance(1)
        for _ in range(3):
            loop.run_once()
            assert loop.run_once().waiting_for == ""
        assert len(list(job.layout.quarantine.iterdir())) == 1
        assert job.outcomes == {8: "quarantined"}
        point_to(job)
        let_lie(loop, clock)
        assert job.latest.step == 9
        point_to(job, 8)  # after all
        let_lie(loop, clock)
    assert (job.latest.step, job.latest.sequence) == (8, 2)


def test_weights_that_are_being_written_are_waited_for_as_long_as_it_takes(job: SmallJob) -> None:
    (job.actor(9) / "huggingface").mkdir(parents=True)
    (job.step(9) / ".saving").touch()
    job.point(9)
    rounds(job, pause=60)
    job.point(10)  # nothing there at all
    rounds(job, pause=60)
    assert list(job.layout.quarantine.iterdir()) == []


def test_weights_count_more_than_a_path_beside_them(job: SmallJob) -> None:
    point_to(job, point=False)
    job.save(9)
    rounds(job)
    assert job.latest.kind == "full"


def test_a_published_path_is_pruned_and_what_may_be_resumed_from_is_not(job: SmallJob) -> None:
    for step in (1, 2, 3):
        point_to(job, step)
        rounds(job)
        (job.step(2) / "remote_checkpoint_path.txt").parent.mkdir(exist_ok=True)
        (job.step(2) / "remote_checkpoint_path.txt").touch()
    rounds(job)
    assert not job.step(1).exists()
    assert job.step(2).exists()
    assert job.step(3).exists()


def test_a_folder_without_weights_and_path_is_never_put_on_record_as_skipped(job: SmallJob) -> None:
    (job.step(1) / "notes").mkdir(parents=True)
    job.save(1, point=False)
    with job.daemon() as loop:
        loop.run_once()
        Path(job.step(1) / "notes" / "text").write_text("mine")
        STORAGE.remove_tree(job.actor(1))
        job.save(2)
        loop.rounds(4, 70)
    assert job.outcomes == {2: "published"}
    assert (job.step(1) / "notes" / "text").exists()


def test_a_path_that_changes_while_it_is_published_is_looked_at_again(job: SmallJob) -> None:
    point_to(job)
    folder = job.step(9)
    save = look_into_step(STORAGE, folder, 9)
    point_to(job, 9, b"tinker://other")
    assert isinstance(save, Remote)
    room = job.root / "room"
    room.mkdir()
    with pytest.raises(SaveNotReadyError):
        build_step(
            STORAGE, folder, save, room, options=MergeOptions(), work=Work(lambda: None), sequence=1
        )
    assert list(room.iterdir()) == []


def test_explorers_get_the_path_and_there_is_nothing_to_verify(job: SmallJob) -> None:
    point_to(job)
    rounds(job)
    with Reader(job.root, "explorer") as reader:
        version = reader.next_version(0, 5)
        version.verify()
        assert (version.kind, version.remote_path, version.step) == ("remote", TINKER, 9)
        assert list(version.open_weights()) == []
        version.release()


def test_an_engine_that_loads_from_storage_refuses_it_by_its_path(job: SmallJob) -> None:
    point_to(job)
    rounds(job)
    with ExplorerHook(job.root, "explorer", TorchModule(nn.Linear(2, 2))) as hook:
        with unfit(TINKER):
            hook.pull(5)
        assert hook.version is None


def test_only_a_remote_version_has_a_path_and_it_has_one(job: SmallJob) -> None:
    point_to(job)
    rounds(job)
    content = (job.version(1) / "manifest.json").read_bytes().partition(b',"xxh3-64"')[0] + b"}"
    for broken in (
        content.replace(b'"kind":"remote"', b'"kind":"full"'),
        content.replace(b'"remote":"', b'"other":"'),
    ):
        with pytest.raises(RecordError):
            parse(Manifest, broken, "manifest.json")


def test_a_remote_version_is_rolled_back_to_as_any_other(job: SmallJob) -> None:
    for step in (1, 2):
        point_to(job, step, f"{TINKER}-{step}".encode())
        rounds(job)
    ask(job, 1)
    rounds(job)
    assert (job.latest.sequence, job.latest.kind) == (3, "remote")
    assert read_manifest(STORAGE, job.version(3)).remote == f"{TINKER}-1"


def test_the_command_that_verifies_says_where_the_weights_are(job: SmallJob) -> None:
    point_to(job)
    rounds(job)
    assert invoke("verify", job.root).output == f"v000001: step 9, remote: {TINKER}\n"


def test_decide_gives_up_only_what_is_overdue() -> None:
    awaiting = Unfinished(9, "no path", known_as="no-remote-path")
    early = observed(save=awaiting, save_still_for=59.0, pointer=AT_9)
    assert decide(early, CONFIG).waiting_for == "no path"
    late = replace(early, save_still_for=60.0)
    assert decide(late, CONFIG).actions == (GiveUp(awaiting),)
    assert decide(replace(late, outcome="quarantined"), CONFIG).actions == ()
    remote = Remote(9, "remote-1", path=TINKER)
    assert decide(observed(save=remote, save_still_for=1.0), CONFIG).actions == (Merge(remote),)
