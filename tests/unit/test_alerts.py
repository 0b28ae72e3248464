"""Alerts begin in time, last as long as their fault, and end after it.

A real daemon goes through each fault for more than three hours, by a clock of ours. Prometheus'
promtool is given what it exports each minute, and evaluates the rules.
"""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
import yaml

from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER
from syncd.protocol.records import NonFinite
from syncd.storage.calls import Free
from tests.jobs import Rounds, SmallJob
from tests.measured import Measured, announce, put, report
from tests.places import DOCS
from tests.storages import Clock, RuledStorage

PROMTOOL = shutil.which("promtool") or ""
RULES = DOCS / "monitoring" / "alerts.yml"
NAMED = frozenset(re.findall(r"\bsyncd_\w+", RULES.read_text()))
#: Minutes: all is well, all is well again, at least so long an alert fires, at most so early.
BEFORE, AFTER, LASTS, EARLY = 25, 25, 180, 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROMTOOL, reason="Debian's package prometheus has promtool"),
]


class Site:
    """A job, minute by minute, and what Prometheus scrapes of its daemon, and of one in standby.

    Attributes:
        serves, up: whether the daemon makes rounds, and whether both can be scraped.
        rounds: of the daemon, in each minute.
        every: minutes from one save to the next; 0 without saves.
        follows: whether the explorer loads new versions.
        beats: the sessions of living participants.
    """

    def __init__(self, job: SmallJob, clock: Clock, storage: RuledStorage, *, hook: bool) -> None:
        self.job, self.clock, self.storage, self.hook = job, clock, storage, hook
        self.started, self.instances = clock(), "ab"
        self.said, self.standby = (Measured(job, clock, self.time) for _ in "ab")
        self.said.meter.active(yes=True)
        self.standby.meter.active(yes=False)
        self.serves = self.up = self.follows = True
        self.rounds, self.every, self.step, self.pointer = 1, 10, 0, STATE_POINTER
        self.beats = {"s-a"}
        self.minutes = 0
        self.scraped: dict[str, list[str]] = {}
        self.load()
        self.train("running")

    def time(self) -> float:
        return self.clock() - self.started

    def train(self, status: str) -> None:
        if self.hook:
            announce(self.job, status)
            (self.beats.add if status == "running" else self.beats.discard)("t")

    def save(self) -> None:
        self.step += 1
        self.job.save(self.step, point=False)
        self.job.point(self.step, self.pointer)

    def load(self, **more: object) -> None:
        report(self.job, "a", int(self.said("latest_version") or 0) or None, **more)

    def run(self, loop: Rounds, minutes: int) -> None:
        """Look often at first, because only a daemon that looks often sees a death."""
        for minute in range(minutes):
            if self.every and self.minutes % self.every == 5:
                self.save()
            rounds = 6 if minute < 5 else self.rounds
            for _ in range(rounds):
                for session in self.beats:
                    self.job.session(session).touch()
                if self.serves:
                    loop.run_once()
                if self.follows:
                    self.load()
                self.clock.advance(60 / rounds)
                for path in (self.job.layout.format, self.job.layout.latest):
                    if path.exists() and path.stat().st_mtime > 1e9:  # by the disk's own clock
                        os.utime(path, (self.time(), self.time()))
            self.scrape()

    def scrape(self) -> None:
        seen = {f'up{{job="syncd",instance="{it}"}}': str(int(self.up)) for it in "ab"}
        both = zip(self.instances, (self.said, self.standby), strict=True)
        for instance, measured in both if self.up else ():
            for family in measured.metrics.registry.collect():
                for sample in family.samples:
                    if sample.name in NAMED:
                        labels = {**sample.labels, "job": "syncd", "instance": instance}
                        words = ",".join(f'{name}="{it}"' for name, it in labels.items())
                        seen[f"{sample.name}{{{words}}}"] = repr(float(sample.value))
        for series in self.scraped.keys() | seen.keys():
            values = self.scraped.setdefault(series, ["_"] * self.minutes)
            values.append(seen.get(series, "stale"))
        self.minutes += 1


#: It begins, lasts while the generator waits, for so many minutes if it says so, and ends.
Fault = Callable[[Site], Iterator[int | None]]


def a_full_disk(site: Site) -> Iterator[None]:
    site.storage.refuse("create", errno.ENOSPC, where="building/v")
    site.every, site.rounds = 10, 2
    yield
    site.storage.rules.clear()


def a_refused_save(site: Site) -> Iterator[None]:
    site.every = 0
    site.save()
    (site.job.actor(site.step) / "model.safetensors").write_bytes(b"nothing")
    yield
    site.save()


def the_other_pointer(site: Site) -> Iterator[None]:
    site.pointer, site.every = CHECKPOINT_POINTER, 10
    yield
    site.pointer = STATE_POINTER


def no_saves(site: Site) -> Iterator[None]:
    site.every = 0
    yield
    site.save()


def a_pause(site: Site) -> Iterator[None]:
    site.job.layout.paused.write_bytes(b"{}")
    yield
    site.job.layout.paused.unlink()


def a_short_pause_before_a_long_merge(site: Site) -> Iterator[int]:
    site.job.layout.paused.write_bytes(b"{}")
    yield 50
    site.job.layout.paused.unlink()
    site.storage.once("create", lambda *_: site.scrape(), where="building/v")
    yield 90


def nan(site: Site) -> Iterator[None]:
    site.every, site.step = 0, site.step + 1
    put(site.job, site.step, NonFinite(count=2, names=("head", "layers.0")))
    site.train("stopped")
    yield
    site.save()


def errors(site: Site) -> Iterator[None]:
    site.rounds = 2
    site.storage.refuse("names", errno.EIO, where="explorers")
    yield
    site.storage.rules.clear()


def little_room(site: Site) -> Iterator[None]:
    versions = site.said("version_bytes") or 0
    return only(site, Free(int(2.5 * versions), 10**6))


def few_inodes(site: Site) -> Iterator[None]:
    return only(site, Free(10**9, 999))


def only(site: Site, free: Free) -> Iterator[None]:
    """No more than this is free, and the trainer has ended."""
    site.every = 0
    site.train("stopped")
    site.storage.free = lambda _: free  # type: ignore[method-assign]
    yield
    del site.storage.free


def a_killed_trainer(site: Site) -> Iterator[None]:
    site.every = 0
    site.beats.discard("t")
    yield
    site.train("running")
    site.save()


def a_killed_explorer(site: Site) -> Iterator[None]:
    site.follows = False
    site.beats.discard("s-a")
    yield
    site.follows = True
    site.beats.add("s-a")


def an_ended_job_with_nan_on_a_small_disk(site: Site) -> Iterator[int]:
    next(nan(site))
    yield 5
    next(little_room(site))
    site.beats.clear()
    site.follows = False
    site.load(status="stopped")
    yield 27 * 60


def a_job_left_by_a_killed_trainer(site: Site) -> Iterator[int]:
    site.beats.discard("t")
    yield 27 * 60


def an_explorer_that_is_killed_and_at_last_ends(site: Site) -> Iterator[int]:
    site.beats.discard("s-a")
    yield 20
    site.instances = "ba"  # the other daemon takes over
    site.beats.add("s-a")
    yield 10
    site.follows = False
    site.load(status="stopped")
    yield 180


def an_explorer_that_stays(site: Site, **more: object) -> Iterator[None]:
    site.follows, site.every = False, 6
    site.load(**more)
    yield
    site.follows = True


def an_explorer_that_refuses(site: Site) -> Iterator[None]:
    return an_explorer_that_stays(site, refused="it does not fit")


def a_broken_explorer(site: Site) -> Iterator[None]:
    return an_explorer_that_stays(site, fault="its engine died")


def no_daemon_at_work(site: Site) -> Iterator[None]:
    site.said.meter.active(yes=False)
    yield from a_hung_daemon(site)
    site.said.meter.active(yes=True)


def a_hung_daemon(site: Site) -> Iterator[None]:
    site.serves = False
    yield
    site.serves = True


def no_process(site: Site) -> Iterator[None]:
    site.up = False
    yield
    site.up = True


def a_refused_configuration(site: Site) -> Iterator[None]:
    site.said.metrics.reloaded.set(False)
    yield
    site.said.metrics.reloaded.set(True)


#: Whether the trainer has our hook, and the job a version; and a fault; the alerts that fire as
#: long as it lasts → by which minute, and not long before. None: none fires in its last hours.
CASES: list[tuple[str, Fault, dict[str, int]]] = [
    ("hook", a_full_disk, {"Blocked": 15, "NotArriving": 30, "NothingPublished": 65}),
    ("hook", a_refused_save, {"Blocked": 5, "NotArriving": 20, "NothingPublished": 65}),
    ("hook", no_saves, {"NothingPublished": 65}),
    ("hook", a_pause, {"NotArriving": 75, "NothingPublished": 65}),
    ("hook", a_short_pause_before_a_long_merge, {}),
    ("hook", nan, {"NonFinite": 2}),
    ("hook", errors, {"Errors": 21}),
    ("hook", little_room, {"DiskAlmostFull": 7}),
    ("hook", few_inodes, {"OutOfInodes": 7}),
    ("hook", a_killed_trainer, {"TrainerLost": 3}),
    ("hook", a_killed_explorer, {"ExplorerLost": 3}),
    ("hook", an_explorer_that_is_killed_and_at_last_ends, {}),
    ("hook", an_explorer_that_stays, {"ExplorerLags": 40}),
    ("hook", an_explorer_that_refuses, {"ExplorerRefuses": 3, "ExplorerLags": 40}),
    ("hook", a_broken_explorer, {"ExplorerBroken": 3, "ExplorerLags": 40}),
    ("hook", no_daemon_at_work, {"NotServed": 3}),
    ("hook", a_hung_daemon, {"NotLooking": 16, "NothingPublished": 65}),
    ("hook", no_process, {"Down": 3}),
    ("hook", a_refused_configuration, {"ConfigurationNotInForce": 2}),
    ("hook", an_ended_job_with_nan_on_a_small_disk, {}),
    ("hook, no version", a_job_left_by_a_killed_trainer, {}),
    ("none", a_full_disk, {"Blocked": 15, "NotArriving": 30}),
    ("none", a_refused_save, {"Blocked": 5, "NotArriving": 20}),
    ("none", no_saves, {}),
    ("none", a_pause, {"NotArriving": 75}),
    ("none, no version", a_full_disk, {"Blocked": 15, "NotArriving": 30, "NothingPublished": 40}),
    ("none, no version", a_refused_save, {"Blocked": 5, "NotArriving": 20, "NothingPublished": 40}),
    ("none, no version", the_other_pointer, {"Blocked": 15, "NothingPublished": 40}),
    ("none, no version", no_saves, {"NothingPublished": 40}),
]


@pytest.mark.parametrize(("trainer", "fault", "alerts"), CASES)
def test_alerts_last_as_long_as_their_fault(
    ruled: SmallJob, storage: RuledStorage, clock: Clock,
    trainer: str, fault: Fault, alerts: dict[str, int],
) -> None:  # fmt: skip
    site = Site(ruled, clock, storage, hook="hook" in trainer)
    if "no version" in trainer:
        site.every = 0
    lasts = max(alerts.values(), default=0) + LASTS + 1
    with site.said.daemon() as loop:
        site.run(loop, BEFORE)
        for minutes in fault(site):
            site.run(loop, minutes or lasts)
        end = site.minutes - 1
        site.run(loop, AFTER)
    firing = 'ALERTS{alertstate="firing"}'
    expected = [
        (minute, f"group by (alertname) ({firing})", names)
        for minute, names in ((BEFORE - 1, []), (end, [*alerts]), (end + AFTER, []))
    ]
    if not alerts:
        expected.append((end, f"group by (alertname) (count_over_time({firing}[150m]))", []))
    for alert, within in alerts.items():
        minutes = end - BEFORE - within
        one = f'ALERTS{{alertname="Syncd{alert}",alertstate="firing"}}'
        lasted = f"sum by (alertname) (count_over_time({one}[{minutes}m])) >= bool {minutes}"
        expected.append((end, lasted, [alert]))
        expected.append((BEFORE - 1 + max(0, within - EARLY), one, []))
    made = ruled.root.with_name("rules.yml")
    made.write_text(yaml.safe_dump({
        "rule_files": [str(RULES)],
        "tests": [{
            "interval": "1m",
            "input_series": [
                {"series": series, "values": " ".join(values)}
                for series, values in site.scraped.items()
            ],
            "promql_expr_test": [
                {"expr": expression, "eval_time": f"{minute}m", "exp_samples": [
                    {"labels": f'{{alertname="Syncd{name}"}}', "value": 1} for name in names
                ]}
                for minute, expression, names in expected
            ],
        }],
    }))  # fmt: skip
    command = [PROMTOOL, "test", "rules", made]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
