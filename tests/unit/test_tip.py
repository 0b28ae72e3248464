"""The daemon takes the trainer's changes at once, and folds them into full versions."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.version import read_manifest
from syncd.coordination.synchronizer import TrainerSynchronizer
from syncd.coordination.versions import Versions
from syncd.daemon import delta_making
from syncd.daemon.config import DaemonConfig
from syncd.daemon.orders import FoldOrder
from syncd.operate.history import history
from syncd.operate.job_state import look
from syncd.protocol.names import delta_name
from syncd.protocol.records import Manifest, NonFinite, SaveId, Tip
from syncd.protocol.reports import ExplorerReport, Load, TrainerReport
from syncd.storage.sessions import Session
from tests.commands import invoke
from tests.crash.scenarios import ranks_save
from tests.jobs import LEASE_TIME, Rounds, SmallJob, edit, flip, nothing
from tests.makers import MakerHere, work
from tests.refusals import no_checkpoint
from tests.saved_deltas import save_delta, save_full
from tests.storages import STORAGE, Clock, RuledStorage, refuse

CONFIG = DaemonConfig(keep=1)
NO = Tip(sequence=1, step=0, save_id="none")


def tip(number: int) -> Tip:
    """The delta of a save whose step is its number."""
    return Tip(sequence=number, step=number, save_id=f"run-{number}-{number}")


@pytest.fixture
def job(ruled: SmallJob) -> SmallJob:
    return ruled


@contextmanager
def daemon(job: SmallJob, newest: int = 0, config: DaemonConfig = CONFIG) -> Iterator[Rounds]:
    """A daemon that has published step 1 and made deltas to ``newest``, or finds what is there."""
    with job.daemon(config, deltas=work()) as loop:
        for step in range(1, newest + 1):
            if step == 1:
                save_full(job, 1)
            else:
                save_delta(job, step, step - 1)
            loop.run_once()
        yield loop


def deltas(job: SmallJob) -> list[str]:
    return sorted(path.name for path in job.layout.deltas.iterdir())


def live(loop: Rounds, session: str, rounds: int = 12, **changes: object) -> None:
    """Rounds in which an explorer lives, and serves version 1."""
    report = ExplorerReport(
        name="e", session=session, status="running", sequence=1, time=0.0, follows_deltas=True
    )
    loop.job.put_record(loop.job.layout.explorer("e"), report.model_copy(update=changes))
    for _ in range(rounds):
        loop.clock.advance(LEASE_TIME / 5)
        loop.job.layout.session(session).write_text(str(loop.clock.now))
        loop.run_once()


def is_merge_of(job: SmallJob, sequence: int, step: int, tmp_path: Path) -> bool:
    """True if a version has the bytes of a merge of the same weights, manifest apart."""
    other = SmallJob(tmp_path / "other")
    other.save(step)
    other.run()
    one, two = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
        for folder in (job.version(sequence), other.version(1))
    )
    return one == two


def delta(loop: Rounds, step: int) -> None:
    """A delta from the step before is saved and seen."""
    save_delta(loop.job, step, step - 1)
    loop.run_once()


def fold(loop: Rounds) -> None:
    """Let no save come for a while."""
    loop.rounds(4, 600)


def lost_in_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_another_save(path: Path) -> None:
    """In a record without a digest, as 0.3.0 wrote it; a file's index would tell."""
    if path.suffix:
        edit(path, '"target":"run-2-', '"target":"run-6-')
    else:
        flip(path, 0)


def begins_again(loop: Rounds, step: int) -> None:
    """After a whole save deltas are taken again."""
    save_full(loop.job, step)
    loop.run_once()
    assert (loop.job.latest.step, loop.job.latest.no_deltas) == (step, None)
    delta(loop, step + 1)
    assert loop.job.latest.tip is not None


def tip_of(job: SmallJob) -> Tip:
    return job.latest.tip or NO


def test_deltas_become_the_tip_and_a_fold_is_equal_to_a_merge(
    job: SmallJob, tmp_path: Path
) -> None:
    with daemon(job, 1) as loop:
        assert job.latest.save_id == "run-1-1"
        for step in (2, 3, 4):
            save_id = save_delta(job, step, step - 1, world_size=2)
            loop.run_once()
            assert job.latest.sequence < step
            assert job.latest.tip == tip(step)
            loop.clock.advance(CONFIG.tick)
        assert deltas(job) == ["d000002", "d000003", "d000004"]
        fold(loop)
        assert (job.latest.sequence, job.latest.tip) == (4, None)
        assert job.latest.save_id == save_id
        assert is_merge_of(job, 4, 4, tmp_path)
        save_delta(job, 5, 4, world_size=2)
        loop.run_once()
        assert job.latest.tip == tip(5)
        fold(loop)
    assert is_merge_of(job, 5, 5, tmp_path / "5")
    assert job.versions == ["v000005"]
    assert set(job.outcomes) == {5}
    assert not job.leftovers()


def test_a_delta_without_its_base_stops_deltas_until_the_next_full_version(
    job: SmallJob,
) -> None:
    with daemon(job, 1) as loop:
        delta(loop, 3)
        assert job.latest.no_deltas is None  # first it asks the server
        loop.run_once()
        assert job.latest.no_deltas is not None
        assert job.outcomes[3] == "skipped"
        loop.run_once()
        begins_again(loop, 4)


@pytest.mark.parametrize(
    "fault",
    [
        "config", "base", "shape", "index", "short", "no version", "no delta", "symlink", "folder",
        "many",
    ],
)  # fmt: skip
def test_a_delta_that_does_not_fit_stops_deltas(
    job: SmallJob, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f'{{"name":"huggingface/config.json","size":2,"digest":"{0:032}","over":"content"}}'
    with daemon(job, 1) as loop:
        save_delta(job, 2, 1, shape=2 if fault == "shape" else 3)
        actor = job.actor(2)
        path = actor / delta_name(1, 0)
        content = path.read_bytes()
        if fault == "index":
            job.put(path, content[:-12] + b"{" + content[-11:])
        if fault == "short":
            job.put(path, content[:-1])
        if fault == "config":
            (actor / "huggingface").mkdir()
            job.put(actor / "huggingface" / "config.json", b"{}")
            edit(actor / ".receipts" / "rank_0.json", '"files":[', f'"files":[{line},')
        if fault == "base":
            line = line.replace("config", "tokenizer")
            edit(actor / ".receipts" / "rank_0.json", '"of_base":[', f'"of_base":[{line}')
        if fault == "many":
            monkeypatch.setattr(delta_making, "_MOST", 1)
        if fault == "no version":
            STORAGE.remove_tree(job.version(1))
        missing = fault in {"no version", "no delta", "symlink", "folder"}
        if missing and fault != "no version":
            path.unlink()
        if fault == "symlink":
            path.symlink_to("elsewhere")
        if fault == "folder":
            path.mkdir()
        loop.run_once()
        assert (job.latest.no_deltas is None) is missing  # then the daemon asks the server first
        if missing:
            save_delta(job, 3, 2)
            loop.rounds(3, CONFIG.tick)
        assert job.latest.no_deltas is not None
        assert job.latest.tip is None
        loop.rounds(3, 0)
        assert set(job.outcomes.values()) == {"skipped"}
        save_full(job, 4)
        loop.run_once()
        assert (job.latest.step, job.latest.no_deltas) == (4, None)
    assert job.layout.journal.read_bytes().count(b'"closed"') == 1


@pytest.mark.parametrize(
    ("kind", "where"),
    [("open_read", "rank-0"), ("open_read", "actor/model.safetensors"), ("create", "saves.json")],
)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_after_a_lease_time_of_errors_whole_weights_come_and_the_save_is_still_tried(
    job: SmallJob, storage: RuledStorage, code: int, kind: str, where: str
) -> None:
    with daemon(job, 1) as loop:
        live(loop, "living")
        base = 2 if where.startswith("actor") else 1
        if base == 2:  # a full save, on which later deltas are based
            save_full(job, base)
        save_delta(job, 3, base)
        storage.refuse(kind, code, where=where)
        live(loop, "living", 4)
        assert (job.latest.no_deltas, job.latest.tip) == (None, None)
        live(loop, "living", 12)
        assert job.latest.no_deltas is not None
        assert 3 not in job.outcomes
        storage.rules.clear()
        live(loop, "living", 12)
        assert tip_of(job).step == 3
        begins_again(loop, 4)


def test_a_first_save_that_cannot_be_merged_is_no_base_for_deltas(
    job: SmallJob, storage: RuledStorage
) -> None:
    with daemon(job) as loop:
        live(loop, "living", sequence=None)
        save_full(job, 1)
        storage.refuse("open_read", errno.EIO, where="actor/model.safetensors")
        live(loop, "living", 30, sequence=None)
        assert job.outcomes == {1: "skipped"}
        with TrainerSynchronizer(job.root) as trainer:
            assert not trainer.takes_deltas(SaveId("run", 1, 1))
        storage.rules.clear()
        live(loop, "living", 12, sequence=None)
        assert (job.latest.step, job.outcomes) == (1, {1: "published"})


def test_a_refused_save_with_nan_is_a_delta_but_never_the_tip(job: SmallJob) -> None:
    config = CONFIG.model_copy(update={"refuse_nonfinite": True})
    with daemon(job, 2, config) as loop:
        save_delta(job, 3, 2, nonfinite=NonFinite(count=1, names=("weight",)))
        loop.rounds(3, 0)
        assert job.latest.tip == tip(2)
        assert job.outcomes[3] == "quarantined"
        delta(loop, 4)
        assert job.latest.tip == tip(4)
    assert deltas(job) == ["d000002", "d000003", "d000004"]
    assert "cannot be" not in look(job).health.text


def test_deltas_above_latest_stay_and_those_below_go_as_deltas_do(job: SmallJob) -> None:
    config = CONFIG.model_copy(update={"keep_deltas": 1})
    with daemon(job, 1, config) as loop:
        for step in range(2, 8):
            save_delta(job, step, step - 1, raw=True)  # together they exceed a version
            loop.run_once()
            if job.latest.sequence == 1:
                assert len(deltas(job)) == step - 1
        fold(loop)
    assert job.latest.sequence == 7
    assert len(deltas(job)) <= 1


def test_a_full_disk_takes_no_delta_above_latest(job: SmallJob) -> None:
    with daemon(job, 2) as loop:
        loop._tidying.after(OSError(errno.ENOSPC, "no room"))  # as a merge that found no room
        loop.run_once()
        assert deltas(job) == ["d000002"]


def test_saves_that_the_pointer_has_passed_become_deltas_first_and_kept(job: SmallJob) -> None:
    with daemon(job) as loop:
        job.save(1, counter=1, config=b'{"long": "%1000d"}' % 0)  # so that no fold is due
        loop.run_once()
        for step in (2, 3, 4):
            save_delta(job, step, step - 1)
        loop.run_once()
        assert deltas(job) == ["d000002", "d000003", "d000004"]
        assert job.latest.tip == tip(4)
        loop.rounds(2, 0)
        steps = {path.name for path in job.root.glob("global_step_*")}
        assert steps == {"global_step_2", "global_step_3", "global_step_4"}
        fold(loop)
        steps = {path.name for path in job.root.glob("global_step_*")}
    assert steps == {"global_step_4"}


def test_a_take_over_keeps_the_tip_and_discards_deltas_that_do_not_lead_from_latest(
    job: SmallJob,
) -> None:
    with daemon(job, 3):
        pass
    stray = job.delta(9)
    stray.mkdir()
    shutil.copy(job.delta(3) / "delta.json", stray)
    edit(stray / "delta.json", "run-2-2", "run-7-7")
    with daemon(job):
        assert job.latest.tip == tip(3)
        assert deltas(job) == ["d000002", "d000003"]
    STORAGE.remove_tree(job.delta(2))
    with daemon(job) as loop:  # LATEST's tip cannot be reached: it is made again
        assert job.latest.tip is None
        loop.run_once()
        assert tip_of(job).step == 3
        assert tip_of(job).sequence > 3


def test_a_tip_that_was_made_but_not_named_is_named_by_the_next_daemon(job: SmallJob) -> None:
    with daemon(job, 1) as loop:
        before = job.layout.latest.read_bytes()
        delta(loop, 2)
    job.put(job.layout.latest, before)
    with daemon(job) as loop:
        loop.run_once()
        assert job.latest.tip == tip(2)
    assert deltas(job) == ["d000002"]


def test_an_unnamed_fold_is_adopted_with_the_later_tip(job: SmallJob) -> None:
    with daemon(job, 2) as loop:
        before = job.latest
        fold(loop)
        assert job.latest.sequence == 2
        delta(loop, 3)
        assert job.latest.tip == tip(3)
    job.put_record(job.layout.latest, before.model_copy(update={"tip": tip(3)}))
    with daemon(job):
        assert (job.latest.sequence, job.latest.tip) == (2, tip(3))


def test_a_rollback_ends_the_tip_and_deltas_until_the_next_full_version(job: SmallJob) -> None:
    config = CONFIG.model_copy(update={"keep": 9})
    with daemon(job, 2, config) as loop:
        job.ask_rollback(1)  # LATEST itself, because the tip is newer
        loop.run_once()
        assert job.serves == (3, 1)
        assert job.latest.tip is None
        assert job.latest.no_deltas is not None
        back = read_manifest(STORAGE, job.version(3)).rolled_back
        assert back is not None
        assert back.instead_of == "run-2-2"
        loop.rounds(3, 0)
        assert job.latest.sequence == 3  # the old tip does not come back
        save_delta(job, 4, 2)  # planned before the rollback
        loop.rounds(3, 0)
        assert (job.latest.sequence, job.outcomes[4]) == (3, "skipped")
        begins_again(loop, 5)


def test_a_pause_takes_no_delta_and_publishes_no_fold(job: SmallJob) -> None:
    with daemon(job, 2) as loop:
        pause = b'{"protocol":1,"id":"p","by":"me","time":0}'
        job.put(job.layout.paused, pause)
        save_delta(job, 3, 2)
        fold(loop)
        assert (job.latest.sequence, job.latest.tip) == (1, tip(2))
        job.layout.paused.unlink()
        loop.run_once()
        assert tip_of(job).step == 3


@pytest.mark.parametrize("name", ["rank-0", "delta.json"])
@pytest.mark.parametrize("damage", [flip, Path.unlink, lost_in_a_folder, of_another_save])
def test_the_fold_of_a_damaged_delta_stops_deltas(
    job: SmallJob, name: str, damage: Callable[[Path], None]
) -> None:
    with daemon(job, 2) as loop:
        delta(loop, 3)
        damage(job.delta(2) / name)
        for _ in range(4):
            fold(loop)
        assert (job.latest.sequence, job.outcomes[3]) == (1, "skipped")
        assert job.latest.no_deltas is not None
        begins_again(loop, 4)


def test_storage_errors_put_a_fold_off_and_after_a_lease_time_whole_weights_come(
    job: SmallJob, storage: RuledStorage
) -> None:
    with daemon(job, 2) as loop:
        loop.clock.advance(600)
        storage.rules.append(refuse("create", errno.EIO, where="building/v"))
        loop.rounds(2, 0)
        assert job.latest.sequence == 1
        assert "could not be folded" in job.daemon_says.blocked[0].what
        save_delta(job, 3, 2)  # deltas go on
        loop.run_once()
        assert (tip_of(job).step, job.latest.no_deltas) == (3, None)
        fold(loop)
        assert job.latest.no_deltas is not None
        storage.rules.clear()
        fold(loop)
        assert job.latest.sequence == 3
        assert not job.daemon_says.blocked


@pytest.mark.parametrize("gone", ["stopped", "dead", "report gone"])
def test_the_report_offers_deltas_only_while_an_explorer_follows_the_tip(
    job: SmallJob, gone: str
) -> None:
    with daemon(job, 1) as loop:
        assert not job.daemon_says.takes_deltas
        assert "syncd[deltas]" in str(job.daemon_says.no_deltas)
        live(loop, "living", sequence=None)
        assert job.daemon_says.takes_deltas
        assert job.daemon_says.no_deltas is None
        if gone == "stopped":
            live(loop, "living", 1, sequence=None, status="stopped")
        elif gone == "report gone":
            job.explorer("e").unlink()
            loop.rounds(16, 0)
        else:
            loop.rounds(16, LEASE_TIME / 4)
        assert not job.daemon_says.takes_deltas


def test_deltas_are_folded_at_once_for_an_explorer_that_cannot_follow_now(job: SmallJob) -> None:
    with daemon(job, 1) as loop:
        live(loop, "living")
        save_delta(job, 2, 1)
        loop.rounds(3, 0)
        assert job.latest.sequence == 1
        live(loop, "living", 0, follows_deltas=False)
        loop.rounds(3, 0)
        assert job.latest.sequence == 2
        for step in range(3, 6):  # although each round has a delta to make
            delta(loop, step)
        assert job.latest.sequence == 4


def test_a_load_of_a_delta_is_history_before_it_is_folded(job: SmallJob) -> None:
    with daemon(job, 2) as loop:
        live(loop, "living", 1, sequence=2, loads=(Load(sequence=2, time=0.0),))
    assert history(job, 1)[-1].live[0].seconds == LEASE_TIME / 5


def test_an_explorer_that_starts_anew_under_its_name_is_seen(job: SmallJob) -> None:
    """Although it serves LATEST, so that nothing but its session is new."""
    with daemon(job, 1) as loop:
        for session in ("before", "after"):
            live(loop, session)
            assert job.daemon_says.takes_deltas, session


def test_status_history_and_verify_tell_of_deltas(job: SmallJob) -> None:
    trainer = TrainerReport(run_id="r", world_size=1, status="running", deltas=True, time=0.0)
    job.put_record(job.layout.trainer_report, trainer)
    with daemon(job, 2) as loop:
        save_delta(job, 4, 3)
        loop.rounds(2, 0)
    seen = look(job)
    assert [delta.sequence for delta in seen.deltas] == [2]
    assert seen.latest is not None
    assert seen.latest.tip is not None
    assert seen.latest.tip.step == 2
    text = invoke("status", job.root).output
    assert "ahead: step 2, by 1 delta (" in text
    assert "no deltas its base has neither a delta nor a version" in text
    told = json.loads(invoke("status", job.root, "--json").output)
    assert (told["latest"]["ahead"]["step"], told["links"][0]["sequence"]) == (2, 2)
    assert told["no_links"] == seen.no_deltas
    first, second = history(job, 9)
    assert (first.version, second.version) == (1, 2)
    assert first.published is not None
    assert second.published is None
    assert second.linked is not None
    assert "ahead" in invoke("history", job.root).output
    verified = invoke("verify", job.root)
    assert verified.exit_code == 0
    assert "d000002: delta from run-1-1, whole" in verified.output


def test_what_needs_whole_weights_refuses_a_delta_and_names_the_way(job: SmallJob) -> None:
    with daemon(job, 2):
        pass
    for command in (
        ("pin", job.root, 2),
        ("merge", job.actor(2), job.root / "x"),
        ("convert", job.step(2)),
    ):
        told = invoke(*command)
        assert told.exit_code != 0
        assert "holds only what changed since run-1-1" in str(told.exception) + told.output
    save = look_at_save(STORAGE, job.actor(2), 2)
    with no_checkpoint("the version of step 2"):
        build_model_folder(
            STORAGE, job.actor(2), save, job.root,
            options=MergeOptions(), work=Work(nothing), sequence=0,
        )  # fmt: skip


def test_an_explorer_waits_for_the_fold_of_a_delta(job: SmallJob) -> None:
    save_full(job, 1)
    with daemon(job) as loop, Session(job.layout, LEASE_TIME) as session:
        loop.run_once()
        versions = Versions(job, "explorer", session, clock=Clock())
        assert versions.on_its_way() is None
        delta(loop, 2)
        assert versions.on_its_way() == 2


def test_an_unseen_save_keeps_the_steps_below_only_for_a_while(job: SmallJob) -> None:
    """A cache may still hide the save, whose base one of the steps may be; or it never comes."""
    with daemon(job, 1) as loop:
        job.point(3)
        loop.rounds(2, 0)
        assert job.step(1).exists()
        loop.clock.advance(1000)
        loop.rounds(2, 0)
        assert not job.step(1).exists()


def test_a_passed_full_save_is_merged_first_although_a_save_between_is_unseen(
    job: SmallJob,
) -> None:
    with daemon(job, 1) as loop:
        save_full(job, 2, point=False)
        save_delta(job, 4, 3)
        loop.rounds(3, 0)
        save_delta(job, 3, 2, point=False)
        loop._scanner.look_again()
        loop.rounds(3, 0)
    assert (job.latest.step, tip_of(job).step) == (2, 4)


def test_a_delta_before_any_version_is_skipped_once(job: SmallJob) -> None:
    with daemon(job) as loop:
        save_delta(job, 2, 1)
        loop.rounds(5, 0)
    assert job.outcomes[2] == "skipped"
    assert job.layout.journal.read_bytes().count(b'"closed"') == 1


def test_a_fold_keeps_the_reason_to_take_no_deltas(job: SmallJob) -> None:
    with daemon(job, 2, DaemonConfig(exit_when_idle=True)) as loop:
        save_delta(job, 4, 3)
        loop.rounds(4, 20 * CONFIG.tick)
        assert job.latest.sequence == 2
        assert job.latest.no_deltas is not None
    assert job.layout.journal.read_bytes().count(b'"closed"') == 1


def test_a_fold_is_named_only_after_its_folder_is_synced(
    job: SmallJob, storage: RuledStorage
) -> None:
    with daemon(job, 2) as loop:
        storage.refuse("sync_folder", errno.EIO, where="published")
        fold(loop)
        assert (job.latest.sequence, job.versions) == (1, ["v000001", "v000002"])
        storage.rules.clear()
        fold(loop)
        assert job.latest.sequence == 2


def test_a_fold_that_fails_waits_as_long_as_it_took(job: SmallJob) -> None:
    save_full(job, 1)
    clock = Clock()
    begun = []

    class Slow(MakerHere):
        def poll(self) -> Manifest | None:
            if not isinstance(self.order, FoldOrder):
                return super().poll()
            begun.append(clock.now)
            clock.advance(100)
            raise OSError(errno.EIO, "a storage error at the end")

    with job.daemon(CONFIG, clock=clock, deltas=replace(work(), maker=Slow)) as loop:
        loop.run_once()
        delta(loop, 2)
        while len(begun) < 3:
            clock.advance(10)
            loop.run_once()
    assert begun[2] - begun[1] >= 200


def test_a_step_that_is_saved_again_while_its_delta_is_made_does_not_stop_deltas(
    job: SmallJob,
    storage: RuledStorage,
) -> None:
    with daemon(job, 1) as loop:
        save_delta(job, 2, 1)

        def again(*_: Path) -> None:
            save_delta(job, 2, 1, run="later", raw=True)

        storage.once("link", again, where="rank_0")
        loop.run_once()
        assert job.latest.no_deltas is None


@pytest.mark.parametrize("step", [1, 2])
def test_a_full_checkpoint_below_the_tip_is_served_again_when_its_trainer_goes_back(
    job: SmallJob, step: int
) -> None:
    with daemon(job) as loop:
        for number in (1, 2, 3):
            ranks_save(job, "run", number, full=number < 3, delta=number > 1)
            loop.run_once()
        assert (job.latest.sequence, tip_of(job).sequence) == (1, 3)
        job.layout.state_pointer.write_text(f"{step}\n")
        loop.run_once()
        assert (job.latest.sequence, job.latest.step, job.latest.tip) == (4, step, None)
        assert job.latest.save_id == f"run-{step}-0"
        assert load_file(job.version(4) / "model.safetensors")["weight"].tolist() == [step] * 3
        loop.rounds(4, 600)
        assert job.latest.sequence == 4


def test_a_delta_below_the_tip_whose_weights_are_nowhere_whole_is_left_alone(job: SmallJob) -> None:
    with daemon(job, 3) as loop:
        job.layout.state_pointer.write_text("2\n")
        loop.run_once()
        assert (job.latest.sequence, job.latest.tip) == (1, tip(3))
        outcome = job.outcome(2)
        assert outcome is not None
        assert outcome.outcome == "published"
