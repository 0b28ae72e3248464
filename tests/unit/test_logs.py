import ast
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest

from syncd.cli.log_lines import Flood, HumanLines, JsonLines
from syncd.protocol.events import JobFault, LeftAlone
from syncd.protocol.journal_lines import JournalLine
from syncd.protocol.reports import DaemonCounters
from syncd.storage.repeats import Repeats
from tests.doc_lists import DOCS, KINDS, page
from tests.jobs import SmallJob
from tests.multiprocess.processes import Daemon
from tests.programs import completed
from tests.storages import Clock

#: Of these packages every line has a name: they are what a daemon runs.
NAMED = ("daemon", "storage", "checkpoint", "cli")
#: Written by JsonLines itself; no event may have a field of these names.
ALWAYS = {"time", "level", "event", "message", "logger", "held_back", "traceback"}
NODES = {
    path.relative_to(DOCS.parent / "syncd"): list(ast.walk(ast.parse(path.read_text())))
    for path in sorted((DOCS.parent / "syncd").rglob("*.py"))
    if path.name not in {"events.py", "version_events.py"}
}


# -- names and documentation -----------------------------------------------------------------------


def test_every_line_of_a_daemon_has_a_name() -> None:
    for path, nodes in NODES.items():
        for call in nodes if path.parts[0] in NAMED else ():
            if isinstance(call, ast.Call) and re.match(r"log\.(?!debug)", ast.unparse(call.func)):
                assert "extra" in {keyword.arg for keyword in call.keywords}, (
                    f"{path}:{call.lineno}"
                )


def test_every_event_is_on_its_page_and_is_told() -> None:
    assert (DOCS / "logging.md").read_text() == page("logging.md")
    used = {node.id for nodes in NODES.values() for node in nodes if isinstance(node, ast.Name)}
    assert {kind.__name__ for kind in KINDS} <= used


def test_an_event_has_the_fields_of_its_text() -> None:
    for kind, fields in KINDS.items():
        named = {name for _, name, _, _ in Formatter().parse(getattr(kind, "text", ""))}
        assert named - {None} <= set(fields), kind
        assert not ALWAYS & set(fields), kind


def test_lines_and_counters_of_events_are_those_of_their_records() -> None:
    lines = get_args(JournalLine.model_fields["event"].annotation)
    assert {kind.line for kind in KINDS} == {"", *lines}
    assert {kind.counter for kind in KINDS} <= {"", *DaemonCounters.model_fields}


# -- a line ----------------------------------------------------------------------------------------


LOG = logging.getLogger("syncd.test")
Records = list[logging.LogRecord]


@pytest.fixture
def records() -> Iterator[Records]:
    """What LOG is told."""
    records: Records = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    LOG.addHandler(handler)
    LOG.setLevel("DEBUG")
    yield records
    LOG.removeHandler(handler)


def test_a_json_line_is_one_object_whatever_is_said(
    records: Records,
) -> None:
    extra = LeftAlone(Path("/a\nb"), OSError("no\udcff")).extra
    LOG.error("a %s", "line\nand\u2028more\x7f 😀 \udcff", extra=extra)
    LOG.info("nameless")
    try:
        int("oh")
    except ValueError:
        LOG.exception("a fault", extra=JobFault(Path("/jobs/a")).extra)
    lines = [JsonLines().format(record) for record in records]
    assert all(line.isascii() and line.isprintable() for line in lines)
    first, second, third = map(json.loads, lines)
    assert first["event"] == "left_alone"
    assert (first["path"], first["reason"]) == ("/a\nb", "no\\udcff")
    assert first["message"] == "a line\nand\u2028more\x7f 😀 \\udcff"
    assert first["level"] == "error"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert second["event"] == "note"
    assert set(second) == {"time", "level", "event", "message", "logger"}
    assert "ValueError: invalid literal" in third["traceback"]
    assert third["job"] == "/jobs/a"


#: Ends of lines, commands of terminals, and what turns the text around: each as it is escaped.
HOSTILE = {
    "\n": r"\n", "\r": r"\r", "\x0b": r"\x0b", "\x1b[2J": r"\x1b[2J", "\x7f": r"\x7f",
    "\x85": r"\x85", "\x9b31m": r"\x9b31m", "\u2028": r"\u2028", "\u2029": r"\u2029",
    "\u202e": r"\u202e", "\u2066": r"\u2066", "\u200f": r"\u200f", "\udcff": r"\udcff",
}  # fmt: skip
FORGED = "\n2026-01-31 12:00:00,123 INFO published step 9 as version 9"


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
def test_a_line_for_people_is_one_line_that_no_terminal_obeys(
    records: Records, hostile: str
) -> None:
    LOG.warning("%s stays: %s", Path(f"/a{hostile}b"), OSError(f"no {hostile} here"))
    line = HumanLines().format(records[0])
    assert line.endswith(f"WARNING /a{HOSTILE[hostile]}b stays: no {HOSTILE[hostile]} here")


@pytest.mark.parametrize(
    "readable",
    [
        "caf\xe9 模型 🤖 👩\u200d🔬",
        "می\u200cخواهم",  # noqa: RUF001
        "עברית",
        "12\xa0000",
        "全角\u3000空白",
        r"C:\n",
    ],
)
def test_a_line_for_people_has_any_readable_text_as_it_is(records: Records, readable: str) -> None:
    LOG.info("published %s", readable)
    assert HumanLines().format(records[0]).endswith(f"INFO published {readable}")


def test_a_traceback_cannot_be_taken_for_lines_of_the_log(
    records: Records,
) -> None:

    def fail() -> None:
        raise ValueError(f"odd{FORGED}\x1b[2J\u202e")

    try:
        fail()
    except ValueError:
        LOG.exception("a fault", extra=JobFault(Path(f"/jobs/a{FORGED}")).extra)
    first, *trace = HumanLines().format(records[0]).split("\n")
    assert first.endswith(" ERROR a fault")
    assert trace[0] == "  Traceback (most recent call last):"
    assert trace[-1] == "  " + FORGED.strip() + r"\x1b[2J\u202e"
    assert all(line.startswith("  ") for line in trace)


def test_a_name_in_the_job_forges_no_line_of_a_daemon(job: SmallJob) -> None:
    (job.layout.sessions / f"q.broken-{FORGED}\x1b[2J").mkdir()
    with Daemon(job.root) as daemon:
        line = daemon.wait_for_log("q.broken-")
        daemon.terminate()
    assert rf"{FORGED.strip()}\x1b[2J: " in line
    assert not [one for one in daemon.log if one.startswith(FORGED.strip())]


# -- repeats ---------------------------------------------------------------------------------------


def test_what_goes_on_is_said_ever_more_seldom_up_to_once_an_hour(clock: Clock) -> None:
    repeats = Repeats(clock=clock)
    said = []
    for second in range(0, 6 * 3600, 5):
        if repeats.due("full"):
            said.append(second // 60)
        clock.advance(5)
    assert said == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243, 303]


def test_what_is_over_is_said_at_once_when_it_comes_again(clock: Clock) -> None:
    repeats = Repeats(clock=clock)
    assert repeats.due("full")
    assert not repeats.due("full")
    assert repeats.due("other")
    repeats.forget("full")
    repeats.forget("never said")
    assert repeats.due("full")


def test_what_was_quiet_for_long_begins_anew(clock: Clock) -> None:
    repeats = Repeats(clock=clock)
    said = []
    for second in (0, 5, 70, 75, 10_000, 10_005, 10_061):
        clock.now = 1000.0 + second
        if repeats.due("full"):
            said.append(second)
    assert said == [0, 70, 10_000, 10_061]


def test_very_many_things_take_no_more_room_than_a_thousand(clock: Clock) -> None:
    repeats = Repeats(clock=clock)
    assert all(repeats.due(number) for number in range(5000))
    assert len(repeats._messages) == 1000


def test_a_flood_of_the_same_line_is_held_back_and_counted(clock: Clock, records: Records) -> None:
    flood = Flood(Repeats(burst=10, clock=clock))
    LOG.addFilter(flood)
    try:
        for _ in range(25):
            LOG.warning("the disk is full")
        LOG.warning("the disk is %s", "fuller")
        assert len(records) == 11
        clock.advance(60)
        LOG.warning("the disk is full")
    finally:
        LOG.removeFilter(flood)
    assert json.loads(JsonLines().format(records[-1]))["held_back"] == 15
    first, last = (HumanLines().format(records[at]) for at in (0, -1))
    assert first.endswith("WARNING the disk is full")
    assert last.endswith("the disk is full (15 earlier repeats were not logged)")


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_command_that_fails_says_so_in_the_form_that_was_asked_for(tmp_path: Path) -> None:
    for form in (["--log-format", "human"], ["--log-format", "json"], ["--json"]):
        none = tmp_path / f"none{FORGED}\x1b[2J"
        done = completed([sys.executable, "-m", "syncd", "run", none, *form])
        assert done.returncode == 11
        (line,) = done.stderr.splitlines()
        if form[-1] == "human":
            assert line.startswith("syncd: ")
            assert rf"{FORGED.strip()}\x1b[2J" in line
        else:
            told = json.loads(line)
            assert (told["event"], told["error"]) == ("command_failed", "JobUnavailableError")
            assert told["exit_code"] == 11


_FAULTS = """
import threading
from syncd.cli import log_lines
log_lines.set_up("json")
log_lines.name_faults()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("odd")
"""


def test_what_nobody_caught_is_a_line_too() -> None:
    done = completed([sys.executable, "-c", _FAULTS])
    assert done.returncode == 1
    thread, process = map(json.loads, done.stderr.splitlines())
    assert thread["event"] == process["event"] == "fault"
    assert "ZeroDivisionError" in thread["traceback"]
    assert "ValueError: odd" in process["traceback"]
