"""The trainer's hook on real ranks: what they agree on, and what is left when one of them dies."""

import re
from contextlib import ExitStack
from pathlib import Path

from syncd.checkpoint.save import look_at_save
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import SAVING
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import NonFinite
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.multiprocess.by_hand import numbers
from tests.multiprocess.explorer_processes import ended, following
from tests.multiprocess.peers import started
from tests.multiprocess.processes import (
    DEADLINE,
    LEASE_TIME,
    Daemon,
    newest,
    wait_for_step,
    wait_until_gone,
)
from tests.multiprocess.trainer_ranks import Rank
from trainer_hooks import ServedStep, latest_checkpoint


def pointed(job: Path) -> int | None:
    path = JobLayout(job).state_pointer
    return int(path.read_text()) if path.exists() else None


def test_ranks_decide_alike_and_a_rank_that_fails_fails_the_save_alone(
    job: Path, tmp_path: Path
) -> None:
    layout = JobLayout(job)
    memory = tmp_path / "shm"
    memory.mkdir()
    Job.at(memory, Storage()).open(lease_time=LEASE_TIME)
    with started(Rank, job, 2) as ranks, Daemon(job):
        first, second = ranks
        # What one rank finds wrong is an error on all, and not a hang.
        first.tell("open", {}, {}, job)
        second.tell("open", {}, {}, tmp_path / "nowhere")
        for rank in ranks:
            assert re.match("JobUnavailableError: .*nowhere", rank.refusal())

        # Also where it can be read alone, and everything is there already.
        second("read_only")
        for rank in ranks:
            rank.tell("open", {})
        for rank in ranks:
            assert rank.refusal().startswith("JobUnavailableError")
        second("heal")

        ranks.all("open", {"save_timeout": 60, "sync_interval": 2})
        # Rank 0 waits for nobody.
        assert "time/sync_weight" in first("step", 2)
        assert "time/sync_weight" in second("step", 2)
        ranks.all("over")
        wait_for_step(job, 2)
        assert numbers(layout.version(1)) == {2.0}

        # A full checkpoint of that step completes the save: nothing is published twice.
        ranks.all("checkpoint", 2)
        assert latest_checkpoint(job) == 2

        # The disk is full on one rank only.
        second("full_disk", "rank_1.pt")
        ranks.all("step", 4)
        ranks.all("over")
        assert pointed(job) == 2
        assert not (layout.step(4) / SAVING).exists()
        second("heal")
        for rank, says in zip(ranks, ("rank 1 of 2 has not written", "No space left"), strict=True):
            rank.tell("step", 6)
            refusal = rank.refusal()
            assert refusal.startswith("SaveFailedError")
            assert "step 4" in refusal
            assert says in refusal
        ranks.all("over")
        assert pointed(job) == 6
        assert list(layout.actor(4).glob("*.pt")) == []  # also what rank 0 had written
        assert wait_for_step(job, 6).sequence == 2  # step 2 was published once

        # A sync that rank 0 leaves out is left out by all, and made up for by all.
        second("hold", "create", "rank_1.pt")
        ranks.all("step", 8)
        assert [one["sync/skipped"] for one in ranks.all("step", 10)] == [1, 1]
        second("release")
        ranks.all("over")
        assert all("time/sync_weight" in one for one in ranks.all("step", 11))
        ranks.all("close")
        wait_for_step(job, 11)

        # Explorers decide: rank 0 sees them, and all ranks save.
        ranks.all("open", {"save_timeout": 60, "style": "explorer_driven"})
        with ExplorerSynchronizer(job, "explorer") as explorer:
            explorer.set_explorer_status(RunningStatus.RUNNING)
            assert not any("time/sync_weight" in one for one in ranks.all("step", 12))
            explorer.set_explorer_status(RunningStatus.REQUIRE_SYNC)
            assert all("time/sync_weight" in one for one in ranks.all("wait_for_data"))
            ranks.all("over")
        wait_for_step(job, 12)
        ranks.all("close")

        # Rank 0 waits for an explorer that lags: the others wait for its word, in no collective.
        ranks.all("open", {"save_timeout": 60, "max_explorer_lag": 1, "sync_interval": 100})
        with ExplorerSynchronizer(job, "explorer") as explorer:
            explorer.set_explorer_status(RunningStatus.RUNNING)
            for rank in ranks:
                rank.tell("step", 12)
            assert not any(rank.has_answered(within=0.2) for rank in ranks)
        for rank in ranks:
            assert rank.answer()["time/wait_for_explorers"] > 0.2
        ranks.all("close")

        # Gathered on rank 0, into a memory folder; full checkpoints stay sharded in the job.
        settings = {"save_timeout": 60, "method": "memory", "save_interval": 13}
        ranks.all("open", settings, {"save_as_hf": "always"}, None, memory)
        with Daemon(memory):
            for metrics in ranks.all("step", 13):
                assert {"time/sync_weight", "time/save_checkpoint"} <= metrics.keys()
            ranks.all("over")
            wait_for_step(memory, 13)
            ranks.all("close")
        assert numbers(JobLayout(memory).version(1)) == {13.0}
        assert numbers(layout.actor(13) / "huggingface") == {13.0}
        assert len(list(layout.actor(13).glob("model_world_size_2_*.pt"))) == 2
        assert latest_checkpoint(job) == 13


def test_ranks_agree_whether_the_first_step_after_a_resume_syncs(job: Path) -> None:
    seldom = {"save_timeout": 60, "sync_interval": 100}
    with started(Rank, job, 2) as ranks, Daemon(job):
        ranks.all("open", seldom)
        ranks.all("save", 2)
        ranks.all("checkpoint", 2)
        wait_for_step(job, 2)
        ranks.all("save", 4)
        ranks.all("close")
        wait_for_step(job, 4)

        ranks.all("load")
        ranks.all("open", seldom)
        assert newest(job).step == 2
        assert numbers(JobLayout(job).version(3)) == {2.0}
        assert not any("time/sync_weight" in one for one in ranks.all("step", 3))
        ranks.all("fail")

        ranks.all("open", seldom)  # it loads by itself, or not at all
        assert all("time/sync_weight" in one for one in ranks.all("step", 5))
        ranks.all("close")


def test_a_killed_rank_costs_its_save_alone(job: Path) -> None:
    layout = JobLayout(job)
    settings = {"save_timeout": 60}
    with Daemon(job):
        with started(Rank, job, 2) as ranks:
            first, second = ranks
            ranks.all("open", settings)
            ranks.all("step", 1)
            wait_for_step(job, 1)
            ranks.all("over")
            ranks.all("close")
            # A rank is killed in the middle of a save: rank 0 gives it up, and says so.
            ranks.all("open", {"save_timeout": 2})
            second("die_at", "rename", "model_world_size_2_rank_1.pt")
            first("step", 2)
            second.tell("step", 2)
            second.wait_until_killed()
            first("over")
            first.tell("close")
            refusal = first.refusal()
            assert refusal.startswith("SaveFailedError")
            assert "rank 1 of 2 has not written its part of the save of step 2" in refusal
            assert pointed(job) == 1
            assert not (layout.step(2) / SAVING).exists()
        with started(Rank, job, 2) as ranks:
            first, second = ranks
            ranks.all("open", settings)
            ranks.all("step", 2)
            wait_for_step(job, 2)
            ranks.all("over")
            # Rank 0 is killed when all have written, and before the pointer moves.
            first("die_at", "rename", "latest_state_dict")
            second.tell("step", 3)
            first.tell("step", 3)
            first.wait_until_killed()
            second.answer()
            assert pointed(job) == 2
            second.tell("step", 4)
            assert "rank 0 did not send its decision about what to save" in second.refusal()
        assert sorted(path.name for path in layout.actor(3).glob("*.pt")) == [
            f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)
        ]
        with started(Rank, job, 2) as ranks:
            ranks.all("open", settings)  # once the dead trainer's name is free
            ranks.all("step", 3)
            found = wait_for_step(job, 3)
            ranks.all("close")
        assert found.sequence == 3  # nothing of the dead was published
        assert numbers(layout.version(3)) == {3.0}
        wait_until_gone(layout.step(2))


def test_the_last_step_is_saved_by_all_ranks_or_by_none(job: Path) -> None:
    """Weights are gathered: a rank that went on alone would wait in a collective for ever."""
    seldom, saving = {"sync_interval": 100}, {"layout": "full"}
    with started(Rank, job, 3) as ranks:
        first, second, third = ranks
        ranks.all("open", seldom, saving)
        ranks.all("step", 1)
        assert ranks.all("close") == [[], [], []]
        assert pointed(job) == 1
        assert numbers(JobLayout(job).actor(1)) == {1.0}

        # A rank does not come in time: the others go without it, and it goes without them.
        for late, save_timeout, step in ((2, 3.0, 3), (0, 0.5, 5)):
            others = [rank for number, rank in enumerate(ranks) if number != late]
            ranks.all("open", {**seldom, "save_timeout": save_timeout}, saving)
            if late == 2:
                ranks.all("save", 2)  # which may be under way still
            ranks.all("step", step)
            for rank in others:
                rank.tell("close")
            said = [rank.answer() for rank in others]
            (warning,) = said[0]
            assert said == [[warning], [warning]]
            assert f"not save step {step}" in warning
            assert f"rank {late} did not call close() within {save_timeout:g} s" in warning
            assert ranks[late]("close") == [warning]
            assert pointed(job) == 2

        # A rank fails after the last step: the others are told, and do not wait for it.
        ranks.all("open", {**seldom, "save_timeout": 10 * DEADLINE}, saving)
        ranks.all("step", 6)
        second("fail")
        for rank in (first, third):
            (warning,) = rank("close")
            assert "rank 1 has ended with an error" in warning

        ranks.all("open", {**seldom, "save_timeout": 10 * DEADLINE}, saving)
        ranks.all("step", 7)
        ranks.all("leave_group")
        for (warning,) in ranks.all("close"):
            assert "the process group was destroyed" in warning
        assert pointed(job) == 2


def test_each_rank_names_its_own_tensors_with_nan(job: Path) -> None:
    storage, layout = Storage(), JobLayout(job)
    weight, bias = "0.weight", "1.bias"
    with started(Rank, job, 2) as ranks:
        for step, where in ((1, "sharded"), (2, "full")):
            ranks.all("open", {"save_timeout": 60}, {"layout": where})
            for rank, name in zip(ranks, (weight, bias), strict=True):
                rank.tell("step", step, name)
            for rank in ranks:
                rank.answer()
            ranks.all("close")
            save = look_at_save(storage, layout.actor(step), step)
            told = [[file.nonfinite for file in one.files] for one in save.receipts]
            assert save.nonfinite == NonFinite.of([weight, bias])
            if where == "sharded":
                assert told == [[NonFinite.of([weight])], [NonFinite.of([bias])]]
            else:  # rank 0 writes all of it
                assert told == [[NonFinite.of([weight, bias])], []]


def test_all_ranks_get_the_same_answer_who_serves_a_step(job: Path) -> None:
    with Daemon(job), started(Rank, job, 2) as ranks, ExitStack() as stack:
        first, second = ranks
        commands = {"a": "true", "b": "true", "c": "test $SYNCD_STEP = 1"}
        followers = {
            name: stack.enter_context(ended(following(job, name, "--command", command)))
            for name, command in commands.items()
        }
        ranks.all("open", {"save_timeout": 60})
        ranks.all("step", 1)
        serving = dict.fromkeys(commands, 1)
        assert ranks.all("wait_served", 1, *commands) == 2 * [ServedStep(1, serving, {})]
        followers["b"].kill()
        ranks.all("step", 2)
        served, same = ranks.all("wait_served", 2, *commands)
        assert served == same
        assert served.serving == {"a": 2}
        assert served.missing["b"] == "has ended"
        assert served.missing["c"].startswith("v2: ")
        first.tell("wait_served", 2, "a")
        second.tell("wait_served", 3, "a")
        assert first.answer().serving == {"a": 2}
        assert second.refusal().startswith("OutOfStepError: rank 0 waited until step 2 is served")


def test_ranks_that_call_with_unlike_steps_are_told_both_steps_at_once(job: Path) -> None:
    said = "OutOfStepError: rank 0 called the hook with step {}, but rank 1 with step {}"
    with started(Rank, job, 2) as ranks:
        first, second = ranks
        ranks.all("open", {"save_timeout": 10})
        for method, step in (("step", 1), ("save", 2), ("checkpoint", 3)):
            first.tell(method, step)
            second.tell(method, step + 10)
            assert second.refusal().startswith(said.format(step, step + 10))
        # Rank 0 saves, waits in vain, and names the usual causes.
        assert "time/sync_weight" in first.answer()
        assert "time/sync_weight" in first.answer()
        assert "the same steps and the same job directory" in first.refusal()


def test_a_hook_on_one_rank_alone_names_the_other_and_gives_up(job: Path) -> None:
    with started(Rank, job, 2) as ranks:
        first, second = ranks
        warning, error = first("open_in_vain")
        assert warning == "rank 1 did not make its hook within 0.5 s; waiting on"
        assert error.startswith("rank 1 did not make its hook within 3 s. Make the hook on every")
        assert second("open_in_vain") == [error]
        assert ranks.all("open", {}) == [[], []]


def test_files_that_rank_0_cannot_write_are_refused_on_all_ranks(job: Path) -> None:
    with started(Rank, job, 2) as ranks:
        first, second = ranks.all("open_broken")
        assert first.startswith("model.config cannot be written: SystemExit")
        assert second == f"rank 0: {first}"
        assert ranks.all("open", {}) == [[], []]


def test_ranks_with_unlike_job_directories_are_warned_when_the_hook_is_made(
    job: Path, tmp_path: Path
) -> None:
    with started(Rank, job, 2) as ranks:
        assert ranks.all("open", {}) == [[], []]
        ranks.all("close")
        other = tmp_path / "other"
        other.mkdir()
        for rank, given in zip(ranks, (job, other), strict=True):
            rank.tell("open", {}, {}, given)
        first, second = [rank.answer() for rank in ranks]
        (warning,) = first
        assert warning.startswith(f"rank 0 saves in {job}, but rank 1 saves in {other}. ")
        assert second == []
