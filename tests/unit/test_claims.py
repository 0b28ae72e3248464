import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from syncd.coordination.participant import HeldName, read_claim
from syncd.protocol.claims import Claim
from syncd.protocol.errors import NameTakenError
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.sessions import Session, _process, boot_id, has_ended, this_process
from tests.jobs import LEASE_TIME, SmallJob
from tests.programs import completed
from tests.storages import CHANGES, AnswerLost, Clock, RuledStorage, fail, once

pytestmark = pytest.mark.lagging


Take = Callable[..., HeldName]


class Heartbeat(Session):
    """A session that a test lets beat."""

    def __init__(self, job: SmallJob, name: str) -> None:
        self.id, self.lease_time = name, LEASE_TIME
        self.path = job.session(name)
        self.path.write_bytes(b"")

    def beat(self) -> None:
        status = self.path.stat()
        os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def taken(
    job: SmallJob,
    clock: Clock,
    session: Session | str,
    *,
    storage: Storage | None = None,
    role: str = "explorer",
    name: str = "x",
    beating: Sequence[Heartbeat] = (),
) -> HeldName:
    """Take a name, for a session or a new one of this name."""

    def pause(seconds: float) -> None:
        clock.advance(seconds)
        for heartbeat in beating:
            heartbeat.beat()

    taker = Heartbeat(job, session) if isinstance(session, str) else session
    there = Job(storage or job.hosts.storage(), job.layout)
    return HeldName.take(there, role, name, taker, clock=clock, pause=pause)


@pytest.fixture
def take(job: SmallJob, clock: Clock) -> Take:
    return partial(taken, job, clock)


def holder(job: SmallJob, name: str = "x") -> str | None:
    return read_claim(job.storage, job.layout.claim("explorer", name))


def test_a_live_participants_name_is_refused_within_a_lease(
    job: SmallJob, clock: Clock, take: Take
) -> None:
    first = Heartbeat(job, "first")
    take(first)
    begun = clock.now
    with pytest.raises(NameTakenError, match=r"explorer 'x' works in .* \(session first\)"):
        take("second", beating=[first])
    assert clock.now - begun <= LEASE_TIME
    assert holder(job) == "first"
    take("third", name="y")


def test_a_second_trainer_is_told_who_works_there(job: SmallJob, take: Take) -> None:
    first = Heartbeat(job, "node-7-4711-0a1b2c3d")

    def take_as(name: str, session: Heartbeat | str) -> None:
        take(session, role="trainer", name=name, beating=[first])

    take_as("grpo\n", first)
    with pytest.raises(NameTakenError) as told:
        take_as("intruder", "newcomer")
    who = rf"trainer 'grpo\n' works in {job.root} already (process 4711 on host node-7, "
    assert str(told.value).startswith(who)
    assert "another job directory" in str(told.value)
    assert "another name" not in str(told.value)
    assert "intruder" not in str(told.value)
    # A release before wrote no name.
    job.put(job.layout.claim("trainer", ""), json.dumps({"session": first.id}).encode())
    job.hosts.settle()
    with pytest.raises(NameTakenError, match=r"^a trainer works in "):
        take_as("intruder", "newcomer-2")


def test_a_dead_participants_name_is_taken_after_a_lease_and_not_before(
    job: SmallJob, clock: Clock, take: Take
) -> None:
    take("first")
    begun = clock.now
    take("second")
    assert LEASE_TIME <= clock.now - begun <= 2 * LEASE_TIME
    assert holder(job) == "second"
    assert not [path for path in job.layout.claims.iterdir() if "broken" in path.name]
    assert job.leftovers() == []


def test_the_name_of_a_process_of_this_host_that_was_killed_is_taken_at_once(
    job: SmallJob, clock: Clock, take: Take
) -> None:
    first = Heartbeat(job, "first")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        process = _process(other.pid)
        elsewhere = process.replace(boot_id(), "0" * 16)
        assert not has_ended(process)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process)  # though nobody has waited for it
    job.layout.claims.mkdir()
    begun = clock.now
    for at, seconds in ((elsewhere, LEASE_TIME), (process, 0.0)):
        claim = Claim(session=first.id, name="e", process=at)
        job.put_record(job.layout.claim("explorer", "x"), claim)
        job.hosts.settle()
        take(Heartbeat(job, "second"))
        assert seconds <= clock.now - begun <= 2 * seconds
        begun = clock.now


@pytest.mark.parametrize(("hidden", "known"), [("hidepid=2", 4), ("subset=pid", 0)])
def test_a_host_has_an_id_where_proc_hides_much(hidden: str, known: int) -> None:
    program = (
        "from syncd.storage.sessions import boot_id, has_ended, this_process;"
        "print(boot_id(), len(this_process().split()), has_ended(this_process()))"
    )
    mounted = f'mount -t proc -o {hidden} proc /proc && exec "$@"'
    done = completed(
        ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "sh", "-c", mounted, "sh",
         sys.executable, "-c", program]
    )  # fmt: skip
    assert re.fullmatch(rf"[0-9a-f]+ {known} False\n", done.stdout), done.stderr


@pytest.mark.parametrize("process", ["", "1", "x y ../1 2", "a b 1 2 3", "ours"])
def test_a_process_that_may_run_has_not_ended(process: str) -> None:
    assert not has_ended(this_process() if process == "ours" else process)


def test_a_wait_for_a_name_is_logged_once(
    job: SmallJob, take: Take, caplog: pytest.LogCaptureFixture
) -> None:
    take("node-7-4711-0a1b2c3d")
    assert caplog.text == ""
    take("second")
    found = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert found == [
        f"explorer 'x' works in {job.root} already (process 4711 on host node-7, session "
        f"node-7-4711-0a1b2c3d), or has died. Waiting about {LEASE_TIME:g} s to find out"
    ]


def test_a_name_whose_session_is_gone_is_taken_soon(
    job: SmallJob, clock: Clock, take: Take
) -> None:
    first = Heartbeat(job, "first")
    take(first)
    first.path.unlink()
    job.hosts.settle()
    begun = clock.now
    take("second")
    assert clock.now - begun < LEASE_TIME
    assert holder(job) == "second"


def test_a_name_that_was_given_up_is_free_at_once(clock: Clock, take: Take) -> None:
    take("first").release()
    begun = clock.now
    take("second")
    assert clock.now == begun


def test_a_marker_that_says_nothing_is_broken_after_a_lease(job: SmallJob, take: Take) -> None:
    job.layout.claims.mkdir()
    job.layout.claim("explorer", "x").write_bytes(b"{")
    take("second")
    assert holder(job) == "second"


def test_what_can_be_no_marker_is_refused_and_named(job: SmallJob, take: Take) -> None:
    job.layout.claim("explorer", "x").mkdir(parents=True)
    with pytest.raises(NameTakenError, match=r"remove .*claims/explorer\.x"):
        take("second")


def test_a_job_has_one_trainer_whatever_its_name_is(job: SmallJob, take: Take) -> None:
    assert job.layout.claim("trainer", "a") == job.layout.claim("trainer", "b")
    assert job.layout.claim("explorer", "trainer") != job.layout.claim("trainer", "trainer")
    take("explorer", name="trainer")


def test_who_lost_the_name_is_told(job: SmallJob, take: Take) -> None:
    first = take("first")
    first.check()
    take("second")
    job.hosts.settle()
    with pytest.raises(NameTakenError, match="session second now holds"):
        first.check()
    first.release()
    assert holder(job) == "second"


def test_a_name_that_nobody_took_meanwhile_is_taken_again(job: SmallJob, take: Take) -> None:
    first = take("first")
    job.layout.claim("explorer", "x").unlink()
    job.hosts.settle()
    first.check()
    assert holder(job) == "first"


def test_a_claim_that_another_broke_and_took_at_the_last_moment_is_not_broken(
    job: SmallJob, take: Take, tmp_path: Path
) -> None:
    take("first")
    path = job.layout.claim("explorer", "x")
    third = Heartbeat(job, "third")

    def take_it(*_: object) -> None:
        path.rename(tmp_path / "broken by the third")
        taken(job, Clock(), third)

    storage = RuledStorage(once("rename", take_it, where="claims/explorer.x"))
    with pytest.raises(NameTakenError, match="session third"):
        take("second", storage=storage, beating=[third])
    assert holder(job) == "third"


def test_a_claim_whose_answer_was_lost_is_ours(take: Take) -> None:
    class LinkAnswerLost(AnswerLost):
        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            raise FileExistsError(str(target))

    take("first", storage=LinkAnswerLost()).check()


@pytest.mark.local_only("threads would share the clock of the lagging hosts")
def test_of_many_that_want_a_name_one_has_it(job: SmallJob) -> None:
    got: list[str] = []
    sessions = [Heartbeat(job, f"s{number}") for number in range(8)]
    start = threading.Barrier(len(sessions))

    def want(session: Heartbeat) -> None:
        start.wait(60)
        with suppress(NameTakenError):
            taken(job, Clock(), session, beating=sessions)
            got.append(session.id)

    threads = [threading.Thread(target=want, args=[session]) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [holder(job)]


def test_the_claim_of_a_newer_protocol_is_refused_while_it_lives_and_taken_when_it_is_dead(
    job: SmallJob, take: Take
) -> None:
    newer = Heartbeat(job, "newer")
    take(newer)
    told = {"protocol": 2, "session": "newer", "shape": [1]}
    job.put(job.layout.claim("explorer", "x"), json.dumps(told).encode())
    with pytest.raises(NameTakenError, match=r"session newer"):
        take("second", beating=[newer])
    take("third")
    assert holder(job) == "third"


@pytest.mark.local_only("each call fails once, whatever its client believes")
@pytest.mark.parametrize("method", [*CHANGES, "open_read", "status"])
def test_whatever_call_fails_a_name_can_be_taken_afterwards_by_one_alone(
    job: SmallJob, take: Take, method: str
) -> None:
    first, second = Heartbeat(job, "first"), Heartbeat(job, "second")
    for nth in range(4):
        with suppress(OSError):
            take(first, storage=RuledStorage(once(method, fail, nth=nth)))
        held = take(first)
        with pytest.raises(NameTakenError):
            take(second, beating=[first])
        held.check()
        held.release()
        assert holder(job) is None
        assert job.leftovers() == [] or method == "unlink"
