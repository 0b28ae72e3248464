"""Many jobs in one process: whose turn it is to merge, which ones there are, what is said."""

import errno
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from syncd.cli.log_lines import Flood, HumanLines, JsonLines
from syncd.daemon.config import DaemonConfig, RunConfig
from syncd.daemon.configuration import GivenValue, load
from syncd.daemon.host.services import Discovery, RootSupervisor
from syncd.daemon.signs import HangGuard, ServiceManager
from syncd.daemon.telling.metrics import Metrics
from syncd.daemon.turns import LEAST, PATIENCE, LateError, Turn, Turns
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.events import JOB_THREAD
from syncd.protocol.names import STATE_POINTER
from tests.commands import invoke
from tests.doc_blocks import blocks
from tests.jobs import SmallJob, nothing
from tests.refusals import invalid
from tests.storages import Clock, FastStorage, RuledStorage, refuse

#: A guard: what is waited for takes a few milliseconds.
LONG = 60.0


# -- turns -----------------------------------------------------------------------------------------


class Merging:
    """Jobs that ask for their turns, and who was woken."""

    def __init__(self, most: int) -> None:
        self.clock = Clock()
        self.woken: list[str] = []
        self.turns = Turns(most, clock=self.clock)

    def go_on(self, seconds: float) -> None:
        """All merges give signs of life meanwhile."""
        self.clock.advance(seconds)
        for turn, merging in self.turns.merging.items():
            turn.progress(merging.done, merging.total)

    def __call__(self, job: str) -> Turn:
        return Turn(self.turns, job, lambda: self.woken.append(job))

    def all(self, jobs: str) -> list[Turn]:
        return [self(job) for job in jobs.split()]


def test_so_many_merge_and_the_next_is_whoever_asked_first() -> None:
    merging = Merging(2)
    a, b, c, d = merging.all("a b c d")
    assert a.take()
    assert b.take()
    assert not c.take()
    assert not d.take()
    a.leave()
    assert merging.woken == ["c", "d"]
    assert not d.take()
    assert not a.take()  # it merged just now: it is behind the others
    assert c.take()
    b.leave()
    assert d.take()
    c.leave()
    assert a.take()


def test_who_has_nothing_to_merge_any_more_leaves_its_place() -> None:
    a, b, c = Merging(1).all("a b c")
    assert a.take()
    assert not b.take()
    assert not c.take()
    b.leave()
    a.leave()
    assert c.take()


def test_who_waits_and_asks_no_more_loses_its_place() -> None:
    merging = Merging(1)
    a, hangs, c = merging.all("a hangs c")
    assert a.take()
    assert not hangs.take()
    assert not c.take()
    a.leave()
    assert not c.take()
    merging.clock.advance(PATIENCE)
    assert c.take()
    assert not hangs.take()


def test_a_merge_whose_storage_hangs_holds_up_nobody_for_ever() -> None:
    merging = Merging(1)
    hangs, other, third = merging.all("hangs other third")
    assert hangs.take()
    assert not other.take()
    merging.clock.advance(PATIENCE)
    assert other.take()
    hangs.progress(1, 2)  # it came back, in the middle of its merge
    assert not third.take()
    other.leave()
    assert not third.take()
    hangs.leave()
    assert third.take()


@given(
    most=st.integers(1, 4),
    moves=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=100),
)
def test_never_more_than_so_many_and_nobody_waits_for_ever(
    most: int, moves: list[tuple[int, bool]]
) -> None:
    merging = Merging(most)
    turns = [merging(str(job)) for job in range(8)]
    have: set[int] = set()
    for job, wants in moves:
        if job in have or not wants:
            turns[job].leave()
            have.discard(job)
        elif turns[job].take():
            have.add(job)
        assert len(have) <= most
    # All want to merge, and each that has a turn ends it: as many rounds as it takes.
    done: set[int] = set()
    for _ in range(8):
        for job in have:
            turns[job].leave()
        done |= have
        have = {job for job in range(8) if job not in done and turns[job].take()}
    assert done | have == set(range(8))


def never() -> bool:
    return False


def test_a_late_merge_goes_on_beside_the_others_and_no_second_one() -> None:
    merging = Merging(2)
    sick, ill, well, last = merging.all("sick ill well last")
    assert sick.take("a")
    assert ill.take("b")
    assert not well.take("c")
    merging.go_on(LEAST - 1)
    assert not well.take("c")
    assert not sick.check(never)
    merging.go_on(1)
    assert sick.check(never)  # it is said once
    assert merging.woken == ["well"]
    assert well.take("c")
    assert not sick.check(never)
    assert not ill.check(never)  # it holds up nobody yet
    assert not last.take("d")
    merging.go_on(1)
    with pytest.raises(LateError, match="Other jobs wait"):
        ill.check(never)
    ill.leave()
    assert last.take("d")
    # It waits for the place beside, which has no end; what its trainer saves next does not.
    well.leave()
    assert not ill.take("b")
    assert ill.take("e")
    ill.leave()
    assert not ill.take("b")
    sick.leave()
    assert ill.take("b")
    merging.go_on(100 * LEAST)
    assert not ill.check(never)
    # Nor does it count there.
    assert sick.take("f")
    last.leave()
    assert well.take("g")


def test_a_late_merge_that_holds_up_nobody_is_left_to_its_end() -> None:
    merging = Merging(2)
    sick, ill = merging.all("sick ill")
    assert sick.take("a")
    assert ill.take("b")
    for _ in range(10):
        merging.go_on(LEAST)
        sick.check(never)
        ill.check(never)


def test_how_long_a_merge_may_take_is_said_by_its_bytes_and_those_before() -> None:
    merging = Merging(1)
    first, second, third = merging.all("first second third")
    gigabytes = 10**9
    assert first.take("a")
    first.progress(10 * gigabytes, 10 * gigabytes)
    merging.go_on(100)  # 100 MB/s
    first.leave()
    assert second.take("b")
    second.progress(0, 10 * gigabytes)
    merging.go_on(20 * 100 - 1)
    assert not second.check(never)
    assert not third.take("c")
    merging.go_on(1)
    assert second.check(never)
    assert third.take("c")


def test_a_merge_is_ended_by_a_newer_save_if_it_is_late_and_the_next_has_twice_as_long() -> None:
    merging = Merging(1)
    job = merging("job")
    for times in (1, 2, 4):
        assert job.take(f"save {times}")
        merging.go_on(times * LEAST - 1)
        job.check(lambda: True)
        merging.go_on(2)
        with pytest.raises(LateError, match="newer save"):
            job.check(lambda: True)
        job.leave()
    assert job.take("the last")
    merging.go_on(7 * LEAST)
    job.check(lambda: True)
    job.progress(1, 1)
    job.leave()
    assert job.take("one more")
    merging.go_on(LEAST + 1)
    with pytest.raises(LateError):
        job.check(lambda: True)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [LEAST - 10, 7 * LEAST])
def test_saves_that_come_twice_in_the_time_of_a_merge_are_still_published(
    job: SmallJob, seconds: float
) -> None:
    """Whether merges are late or not; of those that are, one of each few is."""
    clock, steps = Clock(), iter(range(2, 1000))
    due = [clock()]

    def time_passes(method: str, given: tuple[object, ...]) -> None:
        del given
        if method == "pread_into":
            clock.advance(seconds / 6)
            if clock() >= due[0]:
                due[0] = clock() + seconds / 2
                job.save(next(steps), *values)

    job.storage = storage = RuledStorage()
    values = [1.0] * (6 * 2**18)
    job.save(1, *values)
    published = set()
    with job.daemon(DaemonConfig(prune_steps=False), clock=clock) as loop:
        loop.turn = Turn(Turns(clock=clock))
        storage.rules.append(time_passes)
        for _ in range(8):
            loop.run_once()
            if job.layout.latest.exists():
                published.add(job.latest.step)
    assert len(published) == (8 if seconds < LEAST else 2), published


def test_a_save_waits_for_its_turn_and_the_rest_of_the_round_does_not(job: SmallJob) -> None:
    class Never(Turn):
        def take(self, save: str | None = None) -> bool:  # noqa: ARG002 # its name
            return False

    for step in (1, 2):
        job.save(step)
    with job.daemon(DaemonConfig(keep=1)) as loop:
        loop.run_once()
        loop.run_once()
        job.save(3)
        mine, loop.turn = loop.turn, Never()
        loop.run_once()
        assert "concurrent_merges" in loop._journal.waiting_for
        assert not job.step(1).exists()
        assert job.latest.step == 2
        loop.turn = mine
        loop.run_once()
    assert job.latest.step == 3


def test_a_loop_that_has_nothing_to_merge_lets_others_go_first(job: SmallJob) -> None:
    left: list[bool] = []

    class Noted(Turn):
        def leave(self) -> None:
            left.append(True)

    with job.daemon() as loop:
        loop.turn = Noted()
        loop.run_once()
        assert left


# -- discovery -------------------------------------------------------------------------------------


def found(root: Path, storage: FastStorage, **more: Any) -> Discovery:
    given = {"changed": nothing, "clock": Clock(), "every": 0.01, **more}
    return Discovery(root, STATE_POINTER, storage=storage, **given)


def make_jobs(root: Path, *names: str) -> None:
    for name in names:
        (root / name / ".syncd").mkdir(parents=True, exist_ok=True)


def test_a_job_is_a_folder_with_a_pointer_or_a_trainer_s_or_daemon_s(tmp_path: Path) -> None:
    make_jobs(tmp_path, "new", ".trash")
    for name in ("verl", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "verl" / STATE_POINTER).touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("new")
    look = found(tmp_path, FastStorage())
    assert look.jobs is None
    look.look()
    assert look.jobs == {"new", "verl"}
    assert not (tmp_path / "logs" / ".syncd").exists()
    (tmp_path / "logs" / STATE_POINTER).touch()
    look.look()
    assert look.jobs == {"new", "verl", "logs"}


def test_a_job_is_gone_when_three_listings_in_a_row_do_not_have_it(tmp_path: Path) -> None:
    job = tmp_path / "job"
    make_jobs(tmp_path, "job")
    look = found(tmp_path, FastStorage())
    look.look()
    job.rename(tmp_path / ".away")
    for _ in range(2):
        look.look()
        assert look.jobs == {"job"}
    (tmp_path / ".away").rename(job)
    look.look()
    job.rename(tmp_path / ".away")
    for _ in range(3):
        assert look.jobs == {"job"}
        look.look()
    assert look.jobs == set()


def test_a_root_that_cannot_be_listed_says_nothing_about_its_jobs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_jobs(tmp_path, "job")
    storage = RuledStorage()
    look = found(tmp_path, storage)
    look.look()
    storage.refuse("kinds", errno.EIO)
    for _ in range(5):
        look.look()
    assert look.jobs == {"job"}
    assert caplog.text.count("cannot list ") == 1


def test_a_folder_that_may_not_be_looked_into_is_let_be(tmp_path: Path) -> None:
    make_jobs(tmp_path, "kept-from-us", "ours")
    look = found(tmp_path, RuledStorage(refuse("status", errno.EACCES, where="kept-from-us")))
    look.look()
    assert look.jobs == {"ours"}


def test_a_folder_whose_storage_hangs_keeps_nobody_from_finding_the_others(
    tmp_path: Path,
) -> None:
    make_jobs(tmp_path, "a", "hangs", "z")
    answers, asked, changed = threading.Event(), threading.Event(), threading.Event()

    def rule(method: str, given: tuple[object, ...]) -> None:
        if method == "status" and "hangs" in Path(str(given[0])).parts:
            asked.set()
            assert answers.wait(LONG)

    clock = Clock()
    look = found(tmp_path, RuledStorage(rule), clock=clock, changed=changed.set)
    look.start()
    try:
        assert asked.wait(LONG)
        look.supervise()
        assert look.jobs is None
        clock.advance(60.0)
        look.supervise()
        assert changed.wait(LONG)
        assert look.jobs == {"a", "z"}
        changed.clear()
        answers.set()
        assert changed.wait(LONG)
        assert look.jobs == {"a", "hangs", "z"}
    finally:
        answers.set()
        look.close()


def test_a_folder_that_answers_as_it_is_left_behind_is_found_all_the_same(tmp_path: Path) -> None:
    make_jobs(tmp_path, "hangs", "next")
    asked, answers, went_on, left = (threading.Event() for _ in range(4))
    lookers: list[threading.Thread] = []

    def rule(method: str, given: tuple[object, ...]) -> None:
        looks_into = Path(str(given[0])).parent.name if method == "status" else ""
        if looks_into == "hangs" and not lookers:
            lookers.append(threading.current_thread())
            asked.set()
            assert answers.wait(LONG)
        elif looks_into == "next" and threading.current_thread() in lookers:
            went_on.set()  # as if it had not been left behind
            assert left.wait(LONG)

    class Answers(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002 # logging's name
            answers.set()
            while lookers[0].is_alive() and not went_on.wait(0.01):
                pass

    clock = Clock()
    look = found(tmp_path, RuledStorage(rule), clock=clock)
    log, said = logging.getLogger("syncd.daemon.host.services"), Answers(logging.ERROR)
    log.addHandler(said)
    look.start()
    try:
        assert asked.wait(LONG)
        clock.advance(60.0)
        look.supervise()
        left.set()
        deadline = time.monotonic() + LONG
        while look.jobs != {"hangs", "next"} and time.monotonic() < deadline:
            time.sleep(0.01)
        assert look.jobs == {"hangs", "next"}
    finally:
        log.removeHandler(said)
        answers.set()
        left.set()
        look.close()


def test_a_look_costs_one_listing_and_what_is_no_job_yet(tmp_path: Path) -> None:
    storage = RuledStorage()
    look = found(tmp_path, storage)
    calls = []
    for jobs in (50, 100, 200):
        make_jobs(tmp_path, *(f"job-{number}" for number in range(jobs)))
        look.look()
        storage.calls.clear()
        look.look()
        calls.append(len(storage.calls))
    assert calls == calls[:1] * 3


# -- what hangs ------------------------------------------------------------------------------------


def test_of_many_jobs_the_process_ends_only_where_none_makes_progress() -> None:
    clock = Clock()
    guard = HangGuard(30.0, ServiceManager(), together=False, clock=clock)
    one, _ = guard.watch("one"), guard.watch("two")
    for _ in range(60):
        clock.advance(1.0)
        one()
        assert guard._deadline > clock()
    assert guard.silence("one") == 0
    assert guard.silence("two") == 60
    assert guard.silence("gone") == 0
    clock.advance(31.0)
    assert guard._deadline < clock()


# -- what is said of them --------------------------------------------------------------------------


def record(job: str, message: str = "published") -> logging.LogRecord:
    made = logging.LogRecord("syncd", logging.INFO, "", 1, message, None, None)
    made.threadName = f"{JOB_THREAD}{job}"
    return made


def test_each_line_of_one_of_many_jobs_says_which_one() -> None:
    assert HumanLines().format(record("/jobs/qwen")).endswith(" INFO [qwen] published")
    assert '"job": "/jobs/qwen"' in JsonLines().format(record("/jobs/qwen"))
    alone = record("")
    alone.threadName = "MainThread"
    assert HumanLines().format(alone).endswith(" INFO published")
    assert '"job"' not in JsonLines().format(alone)


def test_what_one_job_says_often_keeps_no_other_from_saying_it() -> None:
    flood = Flood()
    assert not all(flood.filter(record("/jobs/a")) for _ in range(30))
    assert flood.filter(record("/jobs/b"))


def test_a_job_that_is_served_no_more_has_no_metrics(job: SmallJob, tmp_path: Path) -> None:
    other = SmallJob(tmp_path / "other")
    metrics = Metrics()
    for one in (job, other):
        meter = metrics.of_job(one)
        meter.active(yes=True)
        one.save(1)
        one.run(meter=meter)
        meter.failed(OSError())
        meter.active(yes=False)
    metrics.forget_job(job.root)
    said = generate_latest(metrics.registry).decode()
    assert f'"{job.root}"' not in said
    assert f'"{other.root}"' in said
    metrics.forget_job(job.root)


# -- the configuration -----------------------------------------------------------------------------


def test_one_job_or_many_and_not_both(tmp_path: Path) -> None:
    told = load(
        None, {"SYNCD_ROOT": "/jobs"}, {"job": GivenValue(Path("job"), "JOB", is_local=True)}
    )
    with invalid(r"many jobs: job = .*JOB.*SYNCD_ROOT"):
        _ = told.root
    config = tmp_path / "syncd.toml"
    config.write_text('root = "/jobs"\n')
    checked = invoke("config", "check", config)
    assert checked.output.endswith("can be used for all jobs in /jobs; keys: 1\n")


@pytest.mark.parametrize("key", ["memory_dir", "exit_when_idle"])
def test_what_only_one_job_can_have_is_refused(tmp_path: Path, key: str) -> None:
    config = RunConfig.model_validate({"root": tmp_path, key: tmp_path if "dir" in key else True})
    with invalid(key):
        RootSupervisor(tmp_path, config)


def test_a_root_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(JobUnavailableError, match="no such folder"):
        RootSupervisor(tmp_path / "missing", RunConfig())


@pytest.mark.parametrize("mark", [".syncd", "latest_state_dict_iteration.txt", "global_step_7"])
def test_a_root_that_is_itself_a_job_is_refused_with_the_command_for_it(
    tmp_path: Path, mark: str
) -> None:
    (tmp_path / mark).mkdir()
    error = invoke("run", "--root", tmp_path).exception
    assert isinstance(error, InvalidSettingsError)
    assert f"{tmp_path} is itself a job" in str(error)
    assert f"run 'syncd run {tmp_path}'" in str(error)


def test_the_example_of_the_documentation_can_be_used_and_made_a_unit_of(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    root.mkdir()
    config = tmp_path / "all.toml"
    config.write_text(blocks("systemd.md", "toml")[0].replace("/shared/jobs", str(root)))
    told = load(config, {})
    assert (told.root, told.config.concurrent_merges) == (root, 2)
    assert f"ReadWritePaths=-{root}\n" in invoke("unit", "print", "all", "--config", config).output
