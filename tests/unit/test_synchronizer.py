"""The Synchronizer's methods among participants of one process: what each promises."""

import ast
import asyncio
import errno
import inspect
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from syncd.coordination import ExplorerSynchronizer, Synchronizer, TrainerSynchronizer
from syncd.coordination.member import Doubles
from syncd.coordination.waiting import Cancellation, Waits
from syncd.protocol.errors import (
    CancelledError,
    InvalidSettingsError,
    InvalidTransitionError,
    NameTakenError,
    SaveFailedError,
    SaveNotReadyError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.mirrored import Mirroring
from syncd.protocol.names import FULL
from syncd.protocol.policy import RunningStatus, SyncMethod, SyncSettings, Version
from syncd.protocol.records import SaveId, SaveOutcome, SaveOutcomes, Tip, encode
from syncd.protocol.reports import ExplorerReport, ResumedFrom, TrainerReport
from tests.doc_blocks import blocks
from tests.jobs import SmallJob, read
from tests.multiprocess.processes import wait_until
from tests.places import DOCS
from tests.refusals import invalid, save_fails, too_late, unfit
from tests.storages import Clock, RuledStorage, fails

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus
LONG = 60.0
DOUBLES = Doubles(poll=0.02)


class Members:
    """Makes participants, and ends them with the test."""

    def __init__(self, job: SmallJob, stack: ExitStack) -> None:
        self.job = job
        self.stack = stack
        self.threads = stack.enter_context(ThreadPoolExecutor(8))
        self.storage = RuledStorage()
        self.doubles = Doubles(storage=self.storage, poll=0.02)

    def trainer(self, **options: Any) -> TrainerSynchronizer:
        made = TrainerSynchronizer(self.job.root, **{"doubles": DOUBLES, **options})
        made.set_trainer_status(RUNNING)
        return self.stack.enter_context(made)

    def explorer(self, name: str = "explorer", **options: Any) -> ExplorerSynchronizer:
        made = ExplorerSynchronizer(self.job.root, name, **{"doubles": self.doubles, **options})
        made.set_explorer_status(RUNNING)
        return self.stack.enter_context(made)

    def aside(self, call: Callable[..., Any], *given: Any, **named: Any) -> Future[Any]:
        return self.threads.submit(call, *given, **named)

    def waiting(self, explorer: ExplorerSynchronizer, held: Version | None = None) -> Future[Any]:
        """A wait that has begun."""
        waiting = self.aside(explorer.wait_new_model_state_dict, held, timeout=LONG)
        self.wait_for_status(REQUIRE_SYNC, explorer.name)
        return waiting

    def quarantine(self, step: int, identity: str) -> None:
        outcome = SaveOutcome(identity=identity, outcome="quarantined")
        self.job.layout.saves.write_bytes(encode(SaveOutcomes(steps={step: outcome})))

    def publish(self, step: int, *values: float) -> Version:
        self.job.save(step, *values, counter=step)
        self.job.run()
        return Version(self.job.latest.sequence, self.job.latest.step)

    def report(self, name: str = "explorer") -> ExplorerReport:
        return read(ExplorerReport, self.job.explorer(name))

    @property
    def status(self) -> str:
        return self.report().status

    def wait_for_status(self, status: RunningStatus, name: str = "explorer") -> None:
        wait_until(lambda: self.report(name).status == status.value, f"{name} is {status}")


def goes_on(waiting: Future[Any]) -> None:
    with pytest.raises(TimeoutError):
        waiting.result(0.2)


@pytest.fixture
def members(job: SmallJob) -> Iterator[Members]:
    with ExitStack() as stack:
        yield Members(job, stack)


@pytest.fixture
def trainer(members: Members) -> TrainerSynchronizer:
    return members.trainer()


@pytest.fixture
def explorer(members: Members) -> ExplorerSynchronizer:
    return members.explorer()


def loaded(by: TrainerSynchronizer | ExplorerSynchronizer, *whose: Any) -> tuple[int, object]:
    state = by.load_state(*whose)
    assert state is not None
    return state.iteration, state.state


# -- registration and statuses -----------------------------------------------------------------


def test_both_sides_begin_stopped_and_are_counted_as_they_say(job: SmallJob) -> None:
    with (
        TrainerSynchronizer(job.root) as trainer,
        ExplorerSynchronizer(job.root, "a") as a,
        ExplorerSynchronizer(job.root, "b") as b,
    ):
        assert a.get_trainer_status() is STOPPED
        assert trainer.get_explorer_status_counts() == {RUNNING: 0, REQUIRE_SYNC: 0, STOPPED: 2}
        trainer.set_trainer_status(RUNNING)
        a.set_explorer_status(RUNNING, STOPPED)
        assert a.get_trainer_status() is RUNNING
        assert b.get_explorer_status_counts() == {RUNNING: 1, REQUIRE_SYNC: 0, STOPPED: 1}
        assert a.trainer_requires_weight_sync() is False
        trainer.set_trainer_status(REQUIRE_SYNC)
        assert a.trainer_requires_weight_sync() is True
        trainer.set_trainer_status(STOPPED)
        assert a.trainer_requires_weight_sync() is None
        with pytest.raises(InvalidTransitionError):
            a.set_explorer_status(RUNNING, RUNNING)
        with pytest.raises(InvalidTransitionError, match="the present status is running"):
            a.set_explorer_status(RUNNING, REQUIRE_SYNC)


def test_a_live_ones_name_is_refused_and_a_closed_ones_is_free(members: Members) -> None:
    first = members.explorer()
    with invalid("cannot be part of a file name"):
        ExplorerSynchronizer(members.job.root, "a/b")
    with invalid("neither 'trainer' nor 'explorer'"):
        Synchronizer(members.job.root, "tester", "a")  # type: ignore[arg-type] # that is the test
    first.close()
    first.close()
    assert members.status == "stopped"
    members.explorer()


def test_modules_are_all_that_registered_and_whether_they_live(members: Members) -> None:
    trainer, explorer = members.trainer(), members.explorer("a")
    assert {(m.role, m.name, m.status, m.alive) for m in trainer.modules()} == {
        ("trainer", "trainer", RUNNING, True),
        ("explorer", "a", RUNNING, True),
    }
    assert not trainer.all_modules_gone()
    explorer.close()
    assert trainer.all_modules_gone()
    trainer.add_module()


def test_one_who_lost_its_name_is_told_at_its_next_word_and_saves_over_nobodys_state(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    explorer.save_state(1, {})
    claim = members.job.layout.claim("explorer", "explorer")
    claim.write_bytes(claim.read_bytes().replace(explorer.session_id.encode(), b"another"))
    for say in (
        partial(explorer.save_state, 2, {}),
        partial(explorer.set_explorer_status, STOPPED),
    ):
        with pytest.raises(NameTakenError, match="session another now holds"):
            say()
    assert loaded(explorer) == (1, {})


def test_one_that_is_closed_does_not_take_its_name_again(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    explorer.close()
    for say in (explorer.add_module, partial(explorer.set_explorer_version, Version(1, 1))):
        with pytest.raises(CancelledError, match="is closed"):
            say()
    assert list(members.job.layout.claims.iterdir()) == []


# -- waiting for a newer version ---------------------------------------------------------------


def test_what_is_there_is_taken_at_once_and_nothing_is_required(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.trainer()
    version = members.publish(3)
    assert explorer.wait_new_model_state_dict(None) == version
    assert explorer.wait_new_model_state_dict(version, no_wait=True) == version
    assert members.report().requests == 0


def test_a_wait_ends_with_a_newer_version_and_with_nothing_else(
    members: Members, trainer: TrainerSynchronizer, explorer: ExplorerSynchronizer
) -> None:
    waiting = members.waiting(explorer, members.publish(1))
    trainer.begin_save(2)  # a word of the trainer, and no new version
    members.explorer("other")
    goes_on(waiting)
    second = members.publish(2)
    assert waiting.result(LONG) == second
    assert (members.status, members.report().requests) == ("running", 1)


def test_nothing_new_ends_a_wait_with_what_is_held(
    members: Members, trainer: TrainerSynchronizer, explorer: ExplorerSynchronizer
) -> None:
    trainer.notify_no_new_model_state_dict()  # to those who waited before
    held = members.publish(1)
    waiting = members.waiting(explorer, held)
    goes_on(waiting)
    trainer.notify_no_new_model_state_dict()
    assert waiting.result(LONG) == held
    assert (members.status, members.report().nothing_new) == ("running", 1)


def test_a_version_that_nothing_replaces_is_warned_of_once(
    members: Members,
    caplog: pytest.LogCaptureFixture,
    trainer: TrainerSynchronizer,
    explorer: ExplorerSynchronizer,
) -> None:
    held = members.publish(3)
    for _ in range(2):
        waiting = members.waiting(explorer, held)
        trainer.notify_no_new_model_state_dict()
        assert waiting.result(LONG) == held
    assert [line for line in caplog.messages if "nothing newer" in line] == [
        f"nothing newer than step 3 was published: {explorer.name} keeps its weights"
    ]


@pytest.mark.parametrize("ends", ["stops", "dies"])
def test_a_trainer_that_stops_or_dies_ends_a_wait(
    members: Members, ends: str, trainer: TrainerSynchronizer, explorer: ExplorerSynchronizer
) -> None:
    waiting = members.waiting(explorer)
    if ends == "stops":
        trainer.set_trainer_status(STOPPED)
    else:
        trainer._me.session.close()
    assert waiting.result(LONG) is None
    assert members.status == "running"


def test_without_a_trainer_nobody_who_holds_a_version_waits(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    held = members.publish(1)
    assert explorer.wait_new_model_state_dict(held) == held
    assert members.report().requests == 0


@pytest.mark.parametrize("gone", ["daemon", "job", ""])
def test_a_wait_says_once_that_no_daemon_works_or_that_the_job_has_gone(
    members: Members, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    clock, layout = Clock(), members.job.layout
    if gone:
        layout.daemon_lock.touch()
    why = f"{layout.format} is not there" if gone == "job" else "no daemon works there"
    said = f"waits for weights from {layout.root}, but {why}"
    explorer = members.explorer(doubles=Doubles(clock=clock, poll=0.02))

    def is_said() -> bool:
        clock.advance(60.0 if gone else 0.0)  # without a lock it says so at once
        return said in caplog.text

    for _ in range(1 if gone else 2):
        cancel = Cancellation()
        waiting = members.aside(explorer.wait_for_newer, None, timeout=math.inf, cancel=cancel)
        members.wait_for_status(REQUIRE_SYNC)
        if gone == "job":
            layout.root.rename(layout.root.with_name("moved"))
        wait_until(is_said, "it says so")
        cancel.cancel()
        assert isinstance(waiting.exception(LONG), CancelledError)
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("daemon", ["never ran", "was killed", "starts late"])
def test_a_trainer_whose_saves_no_daemon_takes_says_so_later_and_once(
    members: Members, caplog: pytest.LogCaptureFixture, daemon: str
) -> None:
    clock, lock = Clock(), members.job.layout.daemon_lock
    trainer = members.trainer(doubles=Doubles(clock=clock))
    if daemon == "was killed":
        lock.touch()
    for step in range(9):
        if daemon == "starts late" and step:
            lock.write_text(str(step))  # a heartbeat
        trainer.begin_save(step)
        assert step or not caplog.messages
        clock.advance(60.0)
    said = f"trainer saves in {members.job.root}, but no daemon works there: start `syncd run "
    assert caplog.text.count(said) == (daemon != "starts late")


def test_a_timeout_is_an_error_and_puts_the_status_back(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.trainer()
    with too_late("no daemon works there: start `syncd run "):
        explorer.wait_new_model_state_dict(None, timeout=0.1)
    assert members.status == "running"
    assert explorer.get_explorer_status_counts()[REQUIRE_SYNC] == 0


def test_a_wait_that_begins_in_another_ends_in_its_own_time(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.trainer()
    waiting = members.waiting(explorer)
    with too_late("while another wait of the same participant"):
        explorer.set_model_state_dict_with_step_num(3, timeout=0.1)
    assert not waiting.done()
    explorer.close()
    assert isinstance(waiting.exception(LONG), CancelledError)


def test_a_cancelled_or_closed_wait_puts_the_status_back(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.trainer()
    cancel = Cancellation()
    waiting = members.aside(explorer.wait_new_model_state_dict, None, cancel=cancel)
    members.wait_for_status(REQUIRE_SYNC)
    cancel.cancel()
    assert isinstance(waiting.exception(LONG), CancelledError)
    assert members.status == "running"
    waiting = members.waiting(explorer)
    explorer.close()
    assert isinstance(waiting.exception(LONG), CancelledError)
    assert members.status == "stopped"


def test_a_wait_that_was_next_when_all_ended_watches_nothing(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    looked: list[Path] = []
    asked = threading.Event()

    def worth_a_look() -> dict[Path, frozenset[str]]:
        looked.append(folders[len(looked)])
        return {looked[-1]: frozenset({"LATEST"})}

    def clock() -> float:
        if threading.current_thread() is not threading.main_thread():
            asked.set()  # it is not cancelled yet, and asks for its turn next
        return 0.0

    def waits_too() -> None:
        with waits.one(LONG, None):
            pass

    waits = Waits("explorer", worth_a_look, poll=LONG, clock=clock)
    with ThreadPoolExecutor(1) as threads:
        with waits.one(LONG, None):
            other = threads.submit(waits_too)
            assert asked.wait(LONG)
            with waits.ended():
                pass
        assert isinstance(other.exception(LONG), CancelledError)
    assert looked == folders[:1]


def test_a_signal_handler_may_close_what_its_thread_waits_for(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.trainer()

    def handle(*_: object) -> None:
        explorer.close()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        members.aside(lambda: (members.wait_for_status(REQUIRE_SYNC),
                               os.kill(os.getpid(), signal.SIGUSR1)))  # fmt: skip
        with pytest.raises(CancelledError):
            explorer.wait_new_model_state_dict(None, timeout=LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert members.status == "stopped"


def test_a_storage_that_is_away_at_the_end_is_no_error(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.storage.refuse("open_read", errno.EIO)
    explorer.close()
    assert members.status == "running"
    assert list(members.job.layout.sessions.iterdir()) == []


def test_storage_that_fails_in_a_wait_leaves_no_status_behind(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.trainer()
    waiting = members.waiting(explorer)
    members.storage.refuse("open_read", errno.EIO, where="LATEST")
    with fails(errno.EIO):
        waiting.result(LONG)
    assert members.status == "running"


@pytest.mark.parametrize("ends", ["there is a version", "the trainer has stopped"])
def test_a_wait_that_need_not_wait_puts_back_what_was_required_before_it(
    members: Members, ends: str, trainer: TrainerSynchronizer, explorer: ExplorerSynchronizer
) -> None:
    explorer.set_explorer_status(REQUIRE_SYNC)
    version = members.publish(1)
    held = None
    if ends == "the trainer has stopped":
        held = version
        trainer.set_trainer_status(STOPPED)
    assert explorer.wait_new_model_state_dict(held, no_wait=True) == version
    assert members.status == "require_sync"
    assert explorer.wait_new_model_state_dict(held, timeout=LONG) == version
    assert members.status == "running"


@pytest.mark.parametrize("said", ["by the wait", "before it"])
def test_a_request_that_storage_refuses_is_made_again_by_the_wait(
    members: Members,
    caplog: pytest.LogCaptureFixture,
    said: str,
    explorer: ExplorerSynchronizer,
    trainer: TrainerSynchronizer,
) -> None:
    ask = partial(explorer.wait_new_model_state_dict, None, timeout=LONG)
    members.storage.refuse("rename", errno.EIO, where="explorer.json")
    if said == "by the wait":
        tried = members.storage.count("rename", members.job.layout.drafts)
        waiting = members.aside(ask)
        wait_until(
            lambda: members.storage.count("rename", members.job.layout.drafts) > tried + 2,
            "it tries to ask",
        )
        members.storage.rules.clear()
        assert caplog.text.count("cannot ask for weights now") == 1
    else:
        with fails(errno.EIO):
            explorer.set_explorer_status(REQUIRE_SYNC)
        members.storage.rules.clear()
        waiting = members.aside(ask)
    wait_until(trainer.explorer_requires_sync, "it is asked")
    version = members.publish(1)
    assert waiting.result(LONG) == version
    assert members.status == "running"


def test_a_transfer_that_storage_refuses_to_begin_can_be_begun_again(members: Members) -> None:
    trainer, explorer = members.trainer(doubles=members.doubles), members.explorer()
    for name in ("trainer.json", "explorer.json"):
        members.storage.refuse("rename", errno.EIO, where=name)
    for refused in (partial(trainer.ready_to_nccl_sync, 4), explorer.ready_to_nccl_sync):
        with fails(errno.EIO):
            refused(timeout=LONG)
    members.storage.rules.clear()
    ready = members.aside(explorer.ready_to_nccl_sync, timeout=LONG)
    assert (trainer.ready_to_nccl_sync(4, timeout=LONG), ready.result(LONG)) == (4, 4)


def test_a_trainer_answers_each_request_once(
    members: Members, trainer: TrainerSynchronizer, explorer: ExplorerSynchronizer
) -> None:
    assert not trainer.explorer_requires_sync()
    waiting = members.waiting(explorer)
    assert trainer.explorer_requires_sync()
    members.job.save(2)
    trainer.set_model_state_dict(None, 2)
    assert not trainer.explorer_requires_sync()  # the daemon is at it
    assert trainer.save_is_on_its_way()
    asked_too = members.waiting(members.explorer("other"))
    assert trainer.explorer_requires_sync()
    version = members.publish(2)
    assert waiting.result(LONG) == asked_too.result(LONG) == version
    assert not trainer.save_is_on_its_way()
    again = members.waiting(explorer, version)
    assert trainer.explorer_requires_sync()
    trainer.notify_no_new_model_state_dict()
    assert again.result(LONG) == version


def test_an_explorer_that_does_not_count_its_requests_is_answered_once_a_wait(
    trainer: TrainerSynchronizer, job: SmallJob
) -> None:
    with Reader(job.root, "uncounted") as reader:
        for step in (1, 2):
            reader.report(RunningStatus.REQUIRE_SYNC, sequence=None, step=None)
            wait_until(trainer.explorer_requires_sync, "it asks")
            trainer.set_model_state_dict(None, step)
            assert not trainer.explorer_requires_sync()
            reader.report(RunningStatus.RUNNING, sequence=None, step=None)
            assert not trainer.explorer_requires_sync()


def test_a_hook_asks_and_is_answered_by_the_next_version(
    members: Members, trainer: TrainerSynchronizer, job: SmallJob
) -> None:
    with ExplorerHook(job.root, "hook", FakeEngine(), poll=0.02) as hook:
        for step in (1, 2):
            pulling = members.aside(hook.pull, LONG)
            wait_until(trainer.explorer_requires_sync, "it asks")
            trainer.set_model_state_dict(None, step)
            assert not trainer.explorer_requires_sync()
            members.publish(step)
            assert pulling.result(LONG).step == step
            assert not trainer.explorer_requires_sync()


def test_a_status_that_storage_does_not_take_at_the_end_is_said_with_the_next_word(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.trainer()
    waiting = members.waiting(explorer)
    members.storage.refuse("rename", errno.ENOSPC, where="explorer.json")
    version = members.publish(1)
    assert waiting.result(LONG) == version
    members.storage.rules.clear()
    assert members.status == "require_sync"
    explorer.set_explorer_version(version)
    assert (members.status, members.report().sequence) == ("running", 1)


def test_a_save_that_was_refused_is_not_on_its_way(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    assert not trainer.save_is_on_its_way()
    trainer.set_model_state_dict(None, 2)
    assert trainer.save_is_on_its_way()
    members.quarantine(2, "r-2-0")
    assert not trainer.save_is_on_its_way()


# -- weights -----------------------------------------------------------------------------------


def test_tensors_are_streamed_from_the_newest_version_while_it_is_leased(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    assert list(explorer.get_model_state_dict_iterator()) == []
    assert explorer.get_state_dict_meta() == []
    members.publish(1, 1.0, 2.0)
    assert explorer.get_state_dict_meta() == [("weight", "torch.float32", (2,))]
    leases = members.job.lease_folder(1)
    tensors = explorer.get_model_state_dict_iterator()
    name, tensor = next(tensors)
    assert (name, tensor.tolist()) == ("weight", [1.0, 2.0])
    explorer.get_state_dict_meta()  # a second hold of the same version lets the first one be
    assert len(list(leases.iterdir())) == 1
    tensors.close()
    assert list(leases.iterdir()) == []


def test_a_second_look_at_a_version_that_storage_refuses_does_not_let_it_go(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    members.publish(1, 1.0)
    tensors = explorer.get_model_state_dict_iterator()
    next(tensors)
    members.storage.refuse("open_read", errno.EIO, where="manifest.json")
    with suppress(OSError):
        explorer.get_state_dict_meta()
    assert len(list(members.job.lease_folder(1).iterdir())) == 1
    tensors.close()


def test_the_tensors_are_those_of_the_version_that_a_wait_returned(members: Members) -> None:
    explorer, layout = members.explorer(), members.job.layout
    members.publish(1, 1.0)
    version = explorer.wait_new_model_state_dict(None)
    tensors = explorer.get_model_state_dict_iterator(version)
    assert next(tensors)[1].tolist() == [1.0]
    members.publish(2, 2.0, 2.0)
    with pytest.raises(StopIteration):
        next(tensors)
    again = explorer.get_model_state_dict_iterator(version)
    assert [tensor.tolist() for _, tensor in again] == [[1.0]]
    assert explorer.get_state_dict_meta(version)[0][2] == (1,)
    assert explorer.get_state_dict_meta()[0][2] == (2,)
    members.publish(3, 3.0)
    members.publish(4, 4.0)
    assert not layout.version(1).exists()
    with pytest.raises(VersionGoneError, match=r"v1 .* was pruned"):
        next(explorer.get_model_state_dict_iterator(version))


def test_a_version_that_only_this_client_still_takes_for_the_newest_is_passed_over(
    members: Members, explorer: ExplorerSynchronizer, job: SmallJob
) -> None:
    layout = job.layout
    members.publish(1)
    old = layout.latest.read_bytes()
    members.publish(2)
    now = layout.latest.read_bytes()
    layout.lease_folder(1).rmdir()  # retired
    job.put(layout.latest, old)  # as a cache has it, until the server is asked
    members.storage.once("utime", lambda *_: job.put(layout.latest, now))
    assert [name for name, _ in explorer.get_model_state_dict_iterator()] == ["weight"]


def test_paths_and_versions_are_of_the_newest(members: Members) -> None:
    explorer, layout = members.explorer(), members.job.layout
    assert explorer.get_latest_model_version() is None
    assert explorer.get_latest_model_path() is None
    version = members.publish(7)
    assert explorer.get_latest_model_version() == version
    assert explorer.get_latest_model_path(use_huggingface=True) == layout.version(1)
    assert explorer.get_latest_model_path() == layout.actor(7)


def test_a_state_dict_goes_through_the_writer(members: Members) -> None:
    written: list[tuple[Any, int]] = []
    trainer = members.trainer(writer=lambda state, step: written.append((state, step)))
    trainer.set_model_state_dict({"weight": 1}, 4)
    assert written == [({"weight": 1}, 4)]
    trainer.close()
    with invalid("has no writer"):
        members.trainer().set_model_state_dict({}, 4)


def test_a_remote_path_is_written_and_pointed_to(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    trainer, layout = members.trainer(), members.job.layout
    trainer.set_model_state_dict("tinker://run/sampler/5", 5)
    path = layout.step(5) / "remote_sampler_path.txt"
    assert path.read_text() == "tinker://run/sampler/5\n"
    assert layout.state_pointer.read_text() == "5\n"
    trainer.set_model_state_dict("tinker://run/sampler/5b", 5)
    assert path.read_text() == "tinker://run/sampler/5b\n"
    with members.job.daemon() as loop:
        loop.rounds(3, 5)  # without a receipt it is known by its stillness
    assert explorer.get_latest_model_path() == "tinker://run/sampler/5b"
    with unfit("is remote: its weights are not in its folder"):
        next(explorer.get_model_state_dict_iterator())


def test_a_step_on_disk_is_published_by_its_number(
    members: Members, explorer: ExplorerSynchronizer, job: SmallJob
) -> None:
    assert explorer.set_model_state_dict_with_step_num() is None
    job.save(1)
    (job.step(1) / FULL).touch()  # else it is pruned
    assert [members.publish(step).sequence for step in (1, 2)] == [1, 2]
    assert explorer.set_model_state_dict_with_step_num(2, 1) == Version(2, 2)
    assert explorer.set_model_state_dict_with_step_num() == Version(2, 2)
    back = members.aside(explorer.set_model_state_dict_with_step_num, 1, timeout=LONG)
    wait_until(lambda: job.pointed == "1\n", "it is pointed to")
    job.run()
    assert back.result(LONG) == Version(3, 1)
    with pytest.raises(SaveNotReadyError, match="model_world_size_2_rank_0"):
        explorer.set_model_state_dict_with_step_num(9, 2)
    for step in (8, 9):
        job.actor(step).mkdir(parents=True)
    members.quarantine(9, "r-9-0")
    with save_fails("step 9 was quarantined"):
        explorer.set_model_state_dict_with_step_num(9)
    with pytest.raises(WaitTimeoutError):
        explorer.set_model_state_dict_with_step_num(8, timeout=0.1)


def test_a_step_that_was_refused_and_is_saved_again_is_published_by_its_number(
    members: Members, explorer: ExplorerSynchronizer, job: SmallJob
) -> None:
    members.quarantine(4, job.save(4, counter=1))
    with pytest.raises(SaveFailedError):
        explorer.set_model_state_dict_with_step_num(4, timeout=LONG)
    job.save(4, counter=2)
    waiting = members.aside(explorer.set_model_state_dict_with_step_num, 4, timeout=LONG)
    goes_on(waiting)
    job.run()
    assert waiting.result(LONG) == Version(1, 4)


def test_an_explorer_chooses_no_step_while_the_trainer_works(members: Members) -> None:
    members.trainer()
    members.publish(1)
    members.job.save(2, point=False)
    with invalid("the trainer is running"):
        members.explorer().set_model_state_dict_with_step_num(2)


def test_versions_may_be_in_a_second_job_directory(members: Members, tmp_path: Path) -> None:
    memory = SmallJob(tmp_path / "memory")
    aside = Members(memory, members.stack)
    trainer = members.trainer(memory_dir=memory.root)
    explorer = members.explorer(memory_dir=memory.root)
    waiting = members.waiting(explorer)
    assert trainer.explorer_requires_sync(), "it asks in the first job"
    version = aside.publish(4, 8.0)
    trainer.set_model_state_dict(None, 4)
    assert waiting.result(LONG) == version
    assert [t.tolist() for _, t in explorer.get_model_state_dict_iterator()] == [[8.0]]
    assert not members.job.layout.latest.exists()
    announced = read(TrainerReport, memory.layout.trainer_report)
    assert announced.step == 4  # nothing from here on is pruned there either
    trainer.close()
    assert read(TrainerReport, memory.layout.trainer_report).status == "stopped"


# -- staleness ---------------------------------------------------------------------------------


def test_a_stale_explorer_may_not_produce(members: Members) -> None:
    explorer = members.explorer(settings=SyncSettings(max_staleness=1))
    assert explorer.may_produce()
    version = members.publish(2)
    assert not explorer.may_produce()
    explorer.set_explorer_version(version)
    assert explorer.may_produce()
    members.publish(3)
    assert explorer.may_produce()
    members.publish(4)
    assert not explorer.may_produce()


def test_the_trainer_waits_for_the_slowest_explorer_and_not_for_ever(members: Members) -> None:
    trainer = members.trainer(settings=SyncSettings(max_explorer_lag=1, sync_timeout=LONG))
    fast, slow, gone = (members.explorer(name) for name in ("fast", "slow", "gone"))
    version = members.publish(5)
    fast.set_explorer_version(version)
    assert not trainer.wait_for_explorers(0.1)
    waiting = members.aside(trainer.wait_for_explorers)
    goes_on(waiting)
    gone.close()
    slow.set_explorer_version(version)
    assert waiting.result(LONG)


def test_the_trainer_waits_for_those_who_follow_the_tip_until_they_serve_it(
    members: Members,
) -> None:
    trainer = members.trainer(settings=SyncSettings(max_explorer_lag=1, sync_timeout=LONG))
    follower, other = members.explorer("follower", follows_tip=True), members.explorer("other")
    version = members.publish(1)
    for explorer in (follower, other):
        explorer.set_explorer_version(version)
    tip = Tip(sequence=2, step=9, save_id="run-9-2")
    latest = members.job.latest.model_copy(update={"tip": tip})
    members.job.layout.latest.write_bytes(encode(latest))
    assert not trainer.wait_for_explorers(0.1)
    follower.set_explorer_version(Version(2, 9))
    assert trainer.wait_for_explorers(0.1)


def test_the_trainer_does_not_wait_for_an_explorer_that_refused_the_version(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    trainer = members.trainer(settings=SyncSettings(max_explorer_lag=0, sync_timeout=LONG))
    first, second = members.publish(1), members.publish(2)
    explorer.set_explorer_version(first)
    assert not trainer.wait_for_explorers(0.1)
    explorer.set_explorer_version(first, f"v{second.sequence}: it does not fit")
    assert trainer.wait_for_explorers(0.1)
    explorer.set_explorer_version(first)
    assert not trainer.wait_for_explorers(0.1)


def test_the_trainer_does_not_wait_for_a_mirror(
    members: Members, explorer: ExplorerSynchronizer
) -> None:
    trainer = members.trainer(settings=SyncSettings(max_explorer_lag=0, sync_timeout=LONG))
    first, _ = members.publish(1), members.publish(2)
    assert not trainer.wait_for_explorers(0.1)
    explorer.tell_mirror(Mirroring(url="s3://b/p"), "403")
    explorer.set_explorer_version(first)
    assert trainer.wait_for_explorers(0.1)


# -- transfers ---------------------------------------------------------------------------------


def test_an_explorer_of_before_there_were_broadcasts_holds_none_up(members: Members) -> None:
    trainer, _ = members.trainer(), members.explorer()
    assert trainer.takers() == (1, 1)
    path = members.job.explorer("explorer")
    told = json.loads(path.read_bytes())
    del told["workers"]
    path.write_text(json.dumps(told))
    assert trainer.takers() == (1, 0)


def test_a_transfer_takes_place_once_all_explorers_are_ready(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    explorers = [members.explorer(f"e{number}") for number in range(3)]
    members.explorer("stopped").set_explorer_status(STOPPED)
    for step in (4, 8):
        ready = [members.aside(one.ready_to_nccl_sync, timeout=LONG) for one in explorers[1:]]
        offering = members.aside(trainer.ready_to_nccl_sync, step, timeout=LONG)
        goes_on(offering)
        ready.append(members.aside(explorers[0].ready_to_nccl_sync, timeout=LONG))
        assert [one.result(LONG) for one in (offering, *ready)] == [step] * 4
        assert trainer.get_explorer_status_counts() == {RUNNING: 3, REQUIRE_SYNC: 0, STOPPED: 1}
        assert trainer.get_trainer_status() is RUNNING
        assert members.report("e1").step == (None if step == 4 else 4)
        for one in explorers:
            one.nccl_sync_succeeded(step)
    assert len([*members.job.layout.offer.parent.iterdir()]) == 2  # the offer, its verdict


def test_who_takes_part_in_a_transfer_has_time_to_load_it_and_who_came_after_has_missed_it(
    members: Members, clock: Clock
) -> None:
    settings = SyncSettings(max_staleness=1, broadcast_timeout=1.0)
    trainer = members.trainer(
        settings=settings, run_id="run", doubles=Doubles(poll=0.02, clock=clock)
    )
    sent = SaveId("run", 4, 1)
    version = members.publish(2)
    assert not trainer.has_missed(sent), "nobody is there"
    takes = members.explorer("takes")
    takes.set_explorer_version(version)
    ready = members.aside(takes.ready_to_nccl_sync, timeout=LONG)
    assert trainer.ready_to_nccl_sync(4, timeout=LONG) == ready.result(LONG) == 4
    assert not trainer.has_missed(sent), "it loads that"
    late = members.explorer("late")
    late.set_explorer_version(version)
    assert trainer.has_missed(sent)
    assert not trainer.has_missed(SaveId("run", 3, 1)), "it may produce by that"
    late.close()
    assert not trainer.has_missed(sent)
    clock.advance(3.1)
    assert trainer.has_missed(sent), "it does not say so"
    takes.report(Version(version.sequence, 4), received=str(sent))
    assert not trainer.has_missed(sent)


def test_what_a_resumed_trainer_sent_counts_instead_of_what_it_resumed_from(
    members: Members,
) -> None:
    settings = SyncSettings(method=SyncMethod.NCCL, max_staleness=1)
    trainer = members.trainer(settings=settings, run_id="new")
    version = members.publish(2)
    takes, late = (members.explorer(name, settings=settings) for name in ("takes", "late"))
    for explorer in (takes, late):
        explorer.set_explorer_version(version)
    trainer._me.update(resumed_from=ResumedFrom(step=2, save_id=version.save_id))
    assert late.may_produce()
    ready = [members.aside(one.ready_to_nccl_sync, timeout=LONG) for one in (takes, late)]
    assert trainer.ready_to_nccl_sync(6, timeout=LONG) == 6
    assert [one.result(LONG) for one in ready] == [6, 6]
    takes.report(Version(version.sequence, 6), received=str(SaveId("new", 6, 1)))
    assert takes.may_produce()
    assert not late.may_produce()


def test_no_transfer_without_explorers_or_without_a_trainer(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    assert trainer.ready_to_nccl_sync(4) is None
    explorer = members.explorer()
    trainer.set_trainer_status(STOPPED)
    assert explorer.ready_to_nccl_sync() is None


def test_when_one_is_not_ready_in_time_none_is(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    ready, _ = members.explorer("ready"), members.explorer("busy")
    waiting = members.aside(ready.ready_to_nccl_sync, timeout=1.0)
    assert trainer.ready_to_nccl_sync(4, timeout=0.3) is None
    assert waiting.result(LONG) is None
    assert trainer.get_explorer_status_counts()[RUNNING] == 2
    assert trainer.get_trainer_status() is RUNNING


def test_one_that_dies_is_left_out_and_the_others_transfer(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    left, dies = members.explorer("left"), members.explorer("dies")
    ready = members.aside(left.ready_to_nccl_sync, timeout=LONG)
    offering = members.aside(trainer.ready_to_nccl_sync, 4, timeout=LONG)
    members.wait_for_status(REQUIRE_SYNC, "left")
    dies._me.session.close()
    assert (offering.result(LONG), ready.result(LONG)) == (4, 4)


# -- awaited -----------------------------------------------------------------------------------


def test_the_awaited_methods_do_what_their_twins_do(members: Members) -> None:
    root = members.job.root

    async def scenario() -> None:
        async with (
            await Synchronizer.open(root, "trainer", "t", doubles=DOUBLES) as trainer,
            await Synchronizer.open(root, "explorer", "e", doubles=DOUBLES) as explorer,
        ):
            await trainer.set_trainer_status(RUNNING)
            await explorer.set_explorer_status(RUNNING)
            waiting = asyncio.create_task(explorer.wait_new_model_state_dict(None, timeout=LONG))
            while not await trainer.explorer_requires_sync():
                await asyncio.sleep(0.01)
            version = await asyncio.to_thread(members.publish, 2)
            await trainer.set_model_state_dict(None, 2)
            assert await waiting == version
            found = [name async for name, _ in explorer.get_model_state_dict_iterator()]
            assert found == ["weight"]
            both = asyncio.gather(
                trainer.ready_to_nccl_sync("trainer", 2, timeout=LONG),
                explorer.ready_to_nccl_sync("explorer", 0, timeout=LONG),
            )
            assert await both == [2, 2]
            await asyncio.gather(*(one.nccl_sync_succeeded(2) for one in (trainer, explorer)))
            await asyncio.gather(*(one.group_failed() for one in (trainer, explorer)))
            assert [one.name for one in await trainer.modules()] == ["e", "t"]
            assert await explorer.wait_for_newer(None, asks=False) == version
            await trainer.save_state(2, {"next_task": 16})
            state = await explorer.load_state("trainer")
            assert state is not None
            assert state.state == {"next_task": 16}
            with invalid("is an explorer"):
                await explorer.set_trainer_status(STOPPED)
            with invalid("is the trainer"):
                await trainer.set_explorer_status(STOPPED)
            with invalid("is an explorer"):
                await explorer.ready_to_nccl_sync("trainer", 2)

    asyncio.run(scenario())


def test_the_code_of_the_page_loads_what_is_published(members: Members) -> None:
    version = members.publish(3)
    loaded: list[Version] = []
    names = {
        "job_dir": members.job.root,
        "settings": SyncSettings(),
        "step": 1,
        "version": None,
        "work": iter((True, False)).__next__,
        "roll_out": lambda _: None,
        "load": loaded.append,
    }
    (page,) = blocks("synchronizer.md")
    code = compile(page, "synchronizer.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, names))  # noqa: S307 # what a user pastes
    assert (loaded, names["version"]) == ([version], version)
    assert members.report("explorer-0").step == 3


TWINS = (TrainerSynchronizer, ExplorerSynchronizer)


def methods_of(*classes: type) -> set[str]:
    return {name for one in classes for name in dir(one) if not name.startswith("_")}


def test_the_awaited_methods_are_those_of_the_twins_with_their_arguments() -> None:
    methods, awaited = methods_of(*TWINS), methods_of(Synchronizer)
    assert awaited - methods == {"open"}
    assert methods - awaited == {
        "open_group", "session_id", "is_ours", "lead", "passes", "is_elsewhere", "tell_mirror"
    }  # fmt: skip
    for name in awaited:
        method = getattr(Synchronizer, name)
        assert inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method), name
    for name in awaited - {"open", "ready_to_nccl_sync", "nccl_sync_succeeded"}:
        for twin in TWINS:
            if hasattr(twin, name):
                taken = inspect.signature(getattr(twin, name)).parameters.keys()
                assert inspect.signature(getattr(Synchronizer, name)).parameters.keys() == (
                    taken - {"cancel"}
                )


def test_the_page_has_every_method() -> None:
    said = (DOCS / "synchronizer.md").read_text(encoding="utf-8")
    methods = methods_of(Synchronizer, *TWINS)
    assert {name for name in methods if f"{name}(" not in said and f"{name}`" not in said} == set()


def test_a_task_that_is_cancelled_again_and_again_has_put_the_status_back(
    members: Members,
) -> None:
    root, storage, may_go_on = members.job.root, RuledStorage(), threading.Event()
    members.trainer()

    def hold_up(method: str, given: tuple[Any, ...]) -> None:
        if method == "rename" and "e.json" in str(given):
            assert may_go_on.wait(LONG)

    async def scenario() -> None:
        doubles = Doubles(storage=storage, poll=0.02)
        async with await Synchronizer.open(root, "explorer", "e", doubles=doubles) as explorer:
            await explorer.set_explorer_status(RUNNING)
            waiting = asyncio.create_task(explorer.wait_new_model_state_dict(None))
            await asyncio.to_thread(members.wait_for_status, REQUIRE_SYNC, "e")
            storage.rules.append(hold_up)
            for _ in range(3):
                waiting.cancel()
                await asyncio.sleep(0.01)
                assert not waiting.done()
            may_go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert members.report("e").status == "running"

    asyncio.run(scenario())


def test_an_open_that_is_cancelled_leaves_nobody_behind(members: Members) -> None:
    layout, storage, may_go_on = members.job.layout, RuledStorage(), threading.Event()

    def hold_up(*_: object) -> None:
        assert may_go_on.wait(LONG)

    storage.once("link", hold_up, where="claims")

    async def scenario() -> None:
        doubles = Doubles(storage=storage)
        opening = asyncio.create_task(
            Synchronizer.open(layout.root, "explorer", "e", doubles=doubles)
        )
        while not any(method == "link" for method, _ in storage.calls):
            await asyncio.sleep(0.01)
        opening.cancel()
        await asyncio.sleep(0.01)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert members.report("e").status == "stopped"
        assert list(layout.claims.iterdir()) == list(layout.sessions.iterdir()) == []

    asyncio.run(scenario())


def test_a_stream_that_ends_after_its_synchronizer_lets_the_version_go(members: Members) -> None:
    members.publish(1)
    leases = members.job.lease_folder(1)

    async def scenario() -> None:
        explorer = await Synchronizer.open(members.job.root, "explorer", "e", doubles=DOUBLES)
        async with aclosing(explorer.get_model_state_dict_iterator()) as tensors:
            assert (await anext(tensors))[0] == "weight"
            assert len(list(leases.iterdir())) == 1
            await explorer.close()
        assert list(leases.iterdir()) == []

    asyncio.run(scenario())


# -- what is needed to resume ------------------------------------------------------------------


def test_a_saved_state_is_there_for_the_next_one_of_that_name(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    explorer = members.explorer("e")
    assert explorer.load_state() is None
    for iteration in (1, 2):
        explorer.save_state(iteration, {"seen": [iteration], "note": None})
    members.explorer("other").save_state(9, {})
    trainer.save_state(4, {})
    explorer.close()
    assert loaded(members.explorer("e")) == (2, {"seen": [2], "note": None})


def test_another_participants_saved_state_is_read_while_it_works_and_after(
    members: Members,
) -> None:
    trainer, explorer = members.trainer(name="t"), members.explorer("e")
    assert explorer.load_state("trainer") is None
    assert trainer.load_state("explorer", "e") is None
    trainer.save_state(4, {"next_task": 32})
    explorer.save_state(7, {})
    for one in (explorer, trainer):
        assert loaded(one, "trainer") == (4, {"next_task": 32})
        assert loaded(one, "explorer", "e") == (7, {})
    assert explorer.load_state("explorer", "nobody") is None
    assert loaded(explorer) == (7, {})
    trainer.close()
    assert explorer.load_state("trainer") is not None


@pytest.mark.parametrize(
    "whose", [("explorer",), (None, "e"), ("Trainer",), ("explorer", "../e"), ("daemon", "e")]
)
def test_a_saved_state_that_nobody_can_have_is_an_error(
    members: Members, whose: tuple[Any, ...]
) -> None:
    with pytest.raises(InvalidSettingsError):
        members.explorer().load_state(*whose)


def test_a_first_state_that_is_saved_while_it_is_looked_for_is_not_called_torn(
    members: Members, trainer: TrainerSynchronizer, explorer: ExplorerSynchronizer
) -> None:
    def save(*_: object) -> None:
        trainer.save_state(1, {})

    members.storage.once("open_read", save, where="trainer_meta.json.previous")
    assert explorer.load_state("trainer") is None
    assert explorer.load_state("trainer") is not None
