"""What blocks the daemon, how long an announced save waits, and what is told of both."""

import errno
import json
import logging
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from syncd.daemon.blocks import Blocks, Obstacle
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER
from syncd.storage.errnos import unwritable_storage
from syncd.storage.job import step_folders
from syncd.web.jobs import Jobs
from tests.commands import invoke
from tests.jobs import LEASE_TIME, SmallJob
from tests.measured import Measured
from tests.storages import Clock, refuse

REASONS = {
    errno.ENOSPC: ("room", "df -h"),
    errno.EDQUOT: ("room", "quota"),
    errno.EACCES: ("rights", "shared_group"),
    errno.EXDEV: ("filesystem", "findmnt"),
    errno.EFBIG: ("storage", "ulimit -f"),
    errno.EROFS: ("storage", "rw"),
    errno.EAGAIN: ("storage", "ulimit -u"),
    errno.EMFILE: ("storage", "ulimit -n"),
    errno.EINVAL: ("storage", "Restore this file"),
    errno.EIO: ("storage", "dmesg"),
}


def seen_by_all(job: SmallJob) -> dict[str, tuple[int, str]]:
    """The level and the words of each view, on one line."""
    text, told = invoke("status", job.root, "--check"), invoke("status", job.root, "--json")
    (page,) = Jobs((job.root,), 1).overview()["jobs"]
    states = {"JSON": json.loads(told.output), "page": page["status"]}
    healths = {view: state["health"] for view, state in states.items()}
    words = {view: json.dumps(health["problems"]) for view, health in healths.items()}
    plain = re.sub(r"\s+", " ", text.output)
    return {
        "text": (text.exit_code, plain),
        **{view: (health["level"], words[view]) for view, health in healths.items()},
    }


@pytest.mark.parametrize("code", REASONS, ids=errno.errorcode.get)
def test_a_failure_is_told_everywhere_with_file_and_remedy_no_longer_than_it_lasts(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    reason, remedy = REASONS[code]
    metric = Measured(job, clock)
    job.storage = storage = job.hosts.ruled(refuse("create", code, where="building/v"))
    job.save(4)
    levels = []
    with metric.daemon() as loop:
        for _ in range(int(1.2 * LEASE_TIME)):
            loop.run_once()
            (blocked,) = job.daemon_says.blocked
            assert (blocked.reason, remedy in blocked.remedy) == (reason, True)
            assert "building/v000001" in blocked.what
            assert metric("blocked", reason=reason) == (blocked.level > 0)
            if blocked.level not in levels:
                for view, (level, words) in seen_by_all(job).items():
                    assert (view, level) == (view, blocked.level)
                    assert "building/v000001" in words
                    assert remedy in words
            levels.append(blocked.level)
            clock.advance(1)
        assert levels[0] == 0  # the first failure
        assert levels == sorted(levels)
        assert {1, 2} <= set(levels)
        (line,) = (one for one in caplog.records if getattr(one, "event", "") == "work_blocked")
        assert line.levelno == logging.WARNING
        assert (blocked.what in line.message, blocked.remedy in line.message) == (True, True)
        assert metric("unpublished_seconds") == 30
        storage.rules.clear()
        clock.advance(30)
        loop.run_once()
        assert job.latest.step == 4
        assert not job.daemon_says.blocked
        assert {level for level, _ in seen_by_all(job).values()} == {0}
        assert not any(remedy in words for _, words in seen_by_all(job).values())
        assert (metric("blocked", reason=reason), metric("unpublished_seconds")) == (0, 0)


@pytest.mark.parametrize("receipts", [True, False])
@pytest.mark.parametrize("code", REASONS, ids=errno.errorcode.get)
def test_while_more_than_room_is_missing_no_unserved_save_is_deleted(
    job: SmallJob, clock: Clock, code: int, *, receipts: bool
) -> None:
    job.storage = storage = job.hosts.ruled()
    with job.daemon(clock=clock) as loop:
        loop.publish(3)
        storage.rules.append(refuse("create", code, where="building/v"))
        for step in (4, 5, 6):
            (job.root / STATE_POINTER).write_bytes(b"")  # some trainers write it in place
            loop.rounds(1, 1)
            job.save(step, receipts=receipts)
            loop.rounds(4, 1)
    with job.daemon(clock=clock) as loop:  # it knows of no failure yet
        loop.run_once()
        job.save(7, receipts=receipts)
        loop.rounds(4, 1)
        assert step_folders(job) == ([7] if REASONS[code][0] == "room" else [4, 5, 6, 7])
        storage.rules.clear()
        loop.rounds(40, 3)
        assert job.latest.step == 7
        assert step_folders(job) == [7]
        overtaken = b"overtaken by step 7, and not a full checkpoint"
        assert overtaken in job.layout.audit.read_bytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EXDEV])
def test_what_is_blocked_is_told_even_if_no_file_of_the_daemon_can_be_replaced(
    job: SmallJob, clock: Clock, code: int
) -> None:
    job.storage = storage = job.hosts.ruled()
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        storage.rules.append(refuse("create", code, where="daemon.json"))
        storage.rules.append(refuse("create", code, where="building/v"))
        job.save(4)
        for level in (0, 1, 2):
            loop.run_once()
            blocked = job.daemon_says.blocked  # first read here, so the digest is right
            assert max(one.level for one in blocked) == level
            assert any("building/v000001" in one.what for one in blocked)
            clock.advance(LEASE_TIME / 2)
        storage.rules.clear()
        clock.advance(30)
        loop.rounds(2, 0)
        assert (job.latest.step, job.daemon_says.blocked) == (4, ())


def test_a_step_that_cannot_be_pruned_is_told_once_until_it_can(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    job.storage = storage = job.hosts.ruled(refuse("rename", errno.EBUSY, where="global_step_1"))
    levels = []
    with job.daemon(clock=clock) as loop:
        loop.publish(1, 2)
        for _ in range(50):
            loop.rounds(1, 1)
            levels += [(one.reason, one.level) for one in job.daemon_says.blocked]
        assert len(levels) == 50
        assert levels == sorted(levels)
        assert set(levels) == {("prune", 1), ("prune", 2)}
        (line,) = (one for one in caplog.messages if "Device or resource busy" in one)
        assert "must be on one mount" in line
        storage.rules.clear()
        loop.rounds(70, 1)
        assert step_folders(job) == [2]
        assert not job.daemon_says.blocked


def test_a_mask_of_an_acl_that_forbids_writing_is_named(tmp_path: Path) -> None:
    def acl(mask: int) -> bytes:
        """Its owner, a group, the mask, and others: a tag, the rights, and an id of each."""
        entries = ((1, 7, -1), (4, 7, -1), (8, 7, 1234), (16, mask, -1), (32, 0, -1))
        return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)

    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "new"))
    assert "setfacl" not in Obstacle.of("", error).remedy
    for mask in (5, 7):
        try:
            os.setxattr(tmp_path, "system.posix_acl_access", acl(mask))
        except OSError as refused:
            pytest.skip(f"no ACLs here: {refused}")
        named = f"The mask of the ACL of {tmp_path} lacks group write: run `setfacl"
        said = Obstacle.of("", error).remedy, str(unwritable_storage(error, tmp_path))
        assert [named in text for text in said] == [mask == 5] * 2


def test_a_pointer_that_the_daemon_does_not_read_is_told_until_it_is_right(
    job: SmallJob, clock: Clock
) -> None:
    with job.daemon(clock=clock) as loop:
        (job.root / CHECKPOINT_POINTER).write_text("4")
        for level in (0, 1, 2):
            loop.run_once()
            (blocked,) = job.daemon_says.blocked
            assert (blocked.reason, blocked.level) == ("pointer", level)
            assert f"give --pointer {CHECKPOINT_POINTER}" in blocked.what
            for view, words in seen_by_all(job).items():
                assert (view, words[0], "give --pointer" in words[1]) == (view, level, True)
            clock.advance(LEASE_TIME / 2)
        job.save(4)
        loop.run_once()
        assert not job.daemon_says.blocked


def test_a_save_that_is_neither_served_nor_overtaken_is_told_when_it_should_have_come(
    job: SmallJob, clock: Clock
) -> None:
    with job.daemon(clock=clock) as loop:
        loop.publish(1)
        assert job.daemon_says.unpublished is None
        job.layout.state_pointer.write_text("2")  # and no such step
        seen = []
        for _ in range(20):
            loop.run_once()
            assert job.daemon_says.unpublished is not None
            seen.append(job.daemon_says.unpublished)
            clock.advance(10)
        assert [one.seconds for one in seen] == [10.0 * count for count in range(20)]
        assert [one.level for one in seen] == [0] * 9 + [1] * 3 + [2] * 8
        loop.publish(3)
        assert job.daemon_says.unpublished is None


@dataclass
class _Met:
    since: float
    causes: list[object] = field(default_factory=list)


class Rounds(RuleBasedStateMachine):
    """Rounds that meet obstacles, against what a person would write down."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.blocks = Blocks(LEASE_TIME, self.clock)
        self.noted: dict[str, _Met] = {}

    @rule(works=st.dictionaries(st.sampled_from("abc"), st.booleans()), pause=st.integers(0, 20))
    def a_round(self, works: dict[str, bool], pause: int) -> None:
        self.clock.advance(pause)
        for work, is_new in works.items():
            met = self.noted.setdefault(work, _Met(self.clock()))
            if is_new or not met.causes:
                met.causes.append(object())
            self.blocks.meet(work, Obstacle("storage", work, "", met.causes[-1]))
        self.noted = {work: self.noted[work] for work in works}
        self.blocks.end_round()

    @invariant()
    def levels_follow_failures_and_time(self) -> None:
        found = {one.what: one.level for one in self.blocks.current}
        assert found.keys() == self.noted.keys()
        for work, met in self.noted.items():
            lasted = self.clock() - met.since
            if lasted >= LEASE_TIME:
                assert found[work] == 2
            else:
                assert found[work] == int(len(met.causes) > 1 or lasted >= 10)


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=50)
