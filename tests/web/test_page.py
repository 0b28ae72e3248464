"""The page of ``syncd web`` in a real browser, with real jobs and a real server behind it."""

import os
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("selenium", reason="pip install 'syncd[test]' brings it")

from syncd.daemon.config import DaemonConfig
from syncd.daemon.telling.journal import Journal
from syncd.operate.job_state import look_at_all
from syncd.operate.liveness import Watch
from syncd.operate.models import JobState, UnseenJob
from syncd.protocol.records import Format
from syncd.protocol.reports import MergeProgress, Reload, TrainerReport
from syncd.protocol.requests import Pause
from syncd.storage.job import Job
from syncd.web import jobs
from syncd.web.server import Server
from tests.jobs import SmallJob
from tests.makers import work
from tests.multiprocess.processes import DEADLINE
from tests.ports import free_port
from tests.saved_deltas import save_delta, save_full
from tests.storages import FastStorage
from tests.web.chromium import ENTER, RIGHT, SPACE, TAB, Browser, browser
from tests.web.screenshots import without_room
from tests.web.served import daemon, explorer, served

pytestmark = pytest.mark.browser

HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>\u202e\x1b[31m'


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all of them."""
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@contextmanager
def shown(page: Browser, *folders: Path, **more: Any) -> Iterator[Server]:
    """A server for the browser, which asks nobody else, and finds nothing to complain of."""
    page.driver.get("about:blank")
    page.requests()
    page.complaints()
    with served(*folders, **more) as server:
        yield server
        assert page.complaints() == []
        asked = [urlsplit(one) for one in page.requests()]
        others = {one.netloc for one in asked if one.scheme not in {"about", "chrome", "data"}}
        assert others == {urlsplit(server.address).netloc}
        page.driver.get("about:blank")  # the page would go on asking


def a_job(folder: Path, steps: int = 3, *explorers: str) -> SmallJob:
    """Versions that a daemon has published, and explorers that serve the newest one."""
    job = SmallJob(folder)
    with job.daemon(DaemonConfig(keep=40)) as loop:
        loop.publish(*range(1, steps + 1))
        for name in explorers:
            reload = Reload(sequence=steps, step=steps, pause=0.25, staged=True)
            explorer(job, name, steps, reload=reload, time=time.time())
        loop.run_once()
    daemon(job, time.time())
    return job


@pytest.fixture(scope="module")
def many_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every state that there is."""
    root = tmp_path_factory.mktemp("jobs")
    a_job(root / "well", 3, "node-1", "node-2")
    SmallJob(root / "empty")
    daemon(a_job(root / f"dead-{'long-' * 12}", 2, "node-1"), time.time() - 3 * 3600)
    busy = a_job(root / "busy", 30, *(f"node-{number}-{'x' * 40}" for number in range(30)))
    for number in range(7):
        name = f"node-{number}-{'x' * 40}"
        explorer(busy, name, 3, refused="v30: no such tensor " * 9, time=time.time())
    merge = MergeProgress(step=31, done=10**9, total=4 * 10**9, seconds=1.0)
    daemon(busy, time.time(), state="merging", merge=merge, detail="step 31")
    trainer = TrainerReport(run_id="r", world_size=64, status="running", step=31, time=time.time())
    busy.put_record(busy.layout.trainer_report, trainer)
    busy.put_record(busy.layout.paused, Pause(id="i", by="me@login", time=1.0))
    return root


def test_what_happens_is_seen_without_a_reload_and_moves_nothing_that_the_viewer_chose(
    page: Browser, tmp_path: Path
) -> None:
    job = a_job(tmp_path / "job", 3, "node-1")
    with shown(page, job.root) as server, job.daemon(DaemonConfig(keep=40)) as loop:
        page.open(server.address)
        page.sees("v3", ".tiles")
        page.sees("node-1", ".timeline tbody tr")
        page.run(
            "window.unmoved = document.querySelector('.timeline summary');"
            "unmoved.click(); unmoved.focus(); document.querySelector('[value=since]').click();"
        )
        page.sees("paused 250 ms", ".timeline tbody tr")
        page.run("window.scrollTo(0, 150)")
        assert page.text("#news") == ""
        loop.publish(4)
        reload = Reload(sequence=4, step=4, pause=0.5, staged=False)
        explorer(job, "node-2", 4, reload=reload, time=time.time())
        loop.run_once()
        page.sees("v4", ".timeline tbody tr")
        page.sees("node-2", ".timeline tbody tr")
        page.sees("500 ms, not staged", ".stack")
        page.sees("v4 is live on node-2", ".events")
        page.wait("return document.title.startsWith('v4 · job')", "the title")
        assert "v4 is the latest" in page.run("return news.textContent")
        assert page.run("return [document.activeElement === unmoved, unmoved.isConnected]") == [
            True, True,
        ]  # fmt: skip
        assert page.run("return unmoved.parentElement.open")
        assert page.run("return document.querySelector('[value=since]').checked")
        assert page.run("return window.scrollY") == 150
        # What the charts draw is of numbers that are read beside them.
        page.sees("An engine did not serve: median 250 ms, longest 500 ms", ".charts")
        assert page.run("return document.querySelectorAll('.chart circle').length") == 2


def test_an_explorer_that_read_deltas_is_seen(page: Browser, tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    with shown(page, job.root) as server, job.daemon() as loop:
        loop.publish(1, 2)
        reload = Reload(sequence=2, step=2, pause=0.25, staged=True, delta_bytes=9_000_000)
        explorer(job, "node-1", 2, reload=reload, time=time.time())
        loop.run_once()
        page.open(server.address)
        page.sees("250 ms, staged by delta", ".stack")


def test_the_tip_its_deltas_and_why_saves_are_full_are_seen(page: Browser, tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    save_full(job, 1)
    trainer = TrainerReport(run_id="r", world_size=1, status="running", deltas=True, time=0.0)
    job.put_record(job.layout.trainer_report, trainer)
    with shown(page, job.root) as server, job.daemon(deltas=work()) as loop:
        loop.run_once()
        save_delta(job, 2, 1)
        loop.rounds(2, 1)
        page.open(server.address)
        page.sees("ahead: step 2 (", ".tiles")
        page.sees("ahead", ".timeline")
        page.sees("no live explorer follows", ".facts")
        page.sees("served step 2 ahead of v2: ", ".events")
        fold = MergeProgress(step=2, done=10**9, total=4 * 10**9, seconds=1.0)
        daemon(job, time.time(), fold=fold)
        page.sees("Folding step 2: 1.0 GB of 4.0 GB", ".doing")


def test_what_others_wrote_is_text_and_nothing_else(page: Browser, tmp_path: Path) -> None:
    job = a_job(tmp_path / f"\u202e{HOSTILE.partition('/')[0]}")
    explorer(job, HOSTILE, 3, file="hostile", time=time.time(), refused=HOSTILE, fault=None)
    daemon(job, time.time(), host=HOSTILE, detail=HOSTILE, state="watching")
    journal = Journal(Job(FastStorage(), job.layout))
    journal.note("live", version=3, explorer=HOSTILE, seconds=1.0)
    journal.note("quarantined", step=9, why=HOSTILE)
    journal.note("refused", of=1, by=HOSTILE, why=HOSTILE)
    journal.note("published", version=4, step=4, bytes=1, seconds=1e300, latency=1e300)
    journal.write()
    with shown(page, job.root) as server:
        page.open(server.address)
        page.sees("quarantined step 9", ".events")
        page.run("document.querySelectorAll('summary').forEach((one) => one.click())")
        page.sees("at", "ul.live")
        told = page.text()
        assert told.count('<img src=x onerror="window.hit=1">') >= 8
        assert "\\u202e\\u001b[31m" in told
        assert "\u202e" not in told + page.run("return document.title")
        assert page.run("return [window.hit, document.images.length]") == [None, 0]
        assert page.run("return document.querySelectorAll('main script').length") == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_state_fits_the_page_and_can_be_read(
    page: Browser, many_jobs: Path, width: int, dark: bool
) -> None:
    # What can be checked on one job at a time is; two states for each width and each scheme.
    with shown(page, many_jobs) as server:
        for job in ("busy", "empty") if dark else (f"dead-{'long-' * 12}", "well"):
            page.open(f"{server.address}#{many_jobs / job}", width=width, dark=dark)
            page.sees(job, "main h1")
            page.wait("return !document.body.innerText.includes('for the first time')", "history")
            page.run(
                "document.getElementById('all-explorers')?.click();"
                "document.querySelectorAll('summary').forEach((one) => one.click())"
            )
            fits = "const page = document.scrollingElement; return page.scrollWidth <= innerWidth"
            assert page.run(fits)
            assert page.run(FAINT) == []
            ground = page.run("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
            said = {"busy": "paused by me@login", "empty": "syncd run ", "well": "v3",
                    f"dead-{'long-' * 12}": "daemon lost"}[job]  # fmt: skip
            page.sees(said, "main")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_moves_when_a_merge_begins_goes_on_and_ends(
    page: Browser, tmp_path: Path, width: int
) -> None:
    job = a_job(tmp_path / "job", 3, "node-1")
    places = "return [...document.querySelectorAll('main > *, .tile')].map((one) => one.offsetTop)"
    wait = "global_step_4/actor: rank 3 of 64 has not written its receipt of save 17c0-4-0 yet"
    merge = MergeProgress(step=4, done=10**9, total=4 * 10**9, seconds=1.0)
    states = {
        "Nothing is being merged": {"state": "watching"},
        "Waiting: global_step_4": {"state": "watching", "detail": wait},
        "Merging step 4": {"state": "merging", "detail": "step 4"},
        "1.0 GB of 4.0 GB": {"state": "merging", "detail": "step 4", "merge": merge},
    }
    with shown(page, job.root) as server:
        found = []
        for words, state in states.items():
            daemon(job, time.time(), **state)
            if not found:
                page.open(server.address, width=width)
                page.sees("node-1", ".timeline tbody tr")
            page.sees(words, ".doing")
            found.append(page.run(places))
        assert found[1:] == [found[0]] * 3
        assert page.run("return document.querySelector('progress').position") == 0.25


def test_jobs_of_one_name_are_told_apart_by_as_much_of_their_paths_as_it_takes(
    page: Browser, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("a/run/job", "b/run/job", "b/other", "run/job")]
    for folder in folders:
        folder.parent.mkdir(parents=True, exist_ok=True)
        SmallJob(folder)
    with shown(page, *folders) as server:
        page.open(f"{server.address}#{folders[1]}")
        page.sees("b/run/job", "main h1")
        names = "return [...document.querySelectorAll('nav tbody th')].map((one) => one.innerText)"
        inside = f"{tmp_path.name}/run/job"
        assert page.run(names) == ["a/run/job", "b/run/job", "other", inside]
        page.wait("return document.title === 'degraded · b/run/job · syncd'", "the title")


def test_no_two_ticks_of_an_axis_have_the_same_label(page: Browser, tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    try:
        with shown(page, job.root) as server:
            # Where clocks change by an hour, and on an island by half of one.
            for zone in ("Europe/Berlin", "Australia/Lord_Howe"):
                page.tell("Emulation.setTimezoneOverride", timezoneId=zone)
                page.open(server.address)
                assert page.driver.execute_async_script(ALIKE) == []
    finally:
        page.tell("Emulation.setTimezoneOverride", timezoneId="")


#: Labels of axes from 0.3 s to ten years, if there is none, or one twice. In the hour that clocks
#: repeat a short axis may have none.
ALIKE = """
const done = arguments[0];
import('/charts.js').then(({ Axis, chart }) => {
  const found = [];
  for (let length = 0.3; length < 3e8; length *= 1.2) {
    const axes = [3, 4, 7].flatMap((wanted) => [Axis.ofSpan(length, wanted),
      ...[1.7e9, 1729900000.3, 1711800000, 1711845000, 1729988000, 1759500000]
        .map((from) => Axis.ofClock(from, from + length, wanted))]);
    const drawn = chart([{ at: 0, values: [length / 100] }], axes[0], '').querySelector('svg');
    const texts = [...drawn.querySelectorAll('.tick')].map((one) => one.textContent);
    for (const labels of [texts, ...axes.map(({ ticks }) => ticks.map(({ label }) => label))]) {
      const differ = new Set(labels).size === labels.length;
      if (!differ || (!labels.length && length > 1e4)) found.push(labels);
    }
  }
  done(found);
});
"""


#: Texts that differ too little from what is behind them (WCAG 2, AA), with their ratios.
FAINT = """
const parse = (color) => color.match(/[\\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], under) => [r, g, b].map((one, i) => one * a + under[i] * (1 - a));
const light = (rgb) => rgb.map((one) => one / 255)
  .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
  .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (element) => {
  const found = parse(getComputedStyle(element).backgroundColor);
  const under = (found[3] ?? 1) === 1 ? found.slice(0, 3)
    : element.parentElement ? ground(element.parentElement) : [255, 255, 255];
  return over(found, under);
};
const faint = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || element.closest('noscript, script')) continue;
  const style = getComputedStyle(element);
  const ink = parse(element.closest('svg') ? style.fill : style.color);
  const behind = ground(element.closest('svg')?.parentElement ?? element);
  const [one, other] = [light(over(ink, behind)), light(behind)];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < 4.5) faint.push(`${element.className || element.tagName}: ${ratio.toFixed(2)}`);
}
return [...new Set(faint)];
"""


def test_all_of_it_can_be_used_by_keyboard(page: Browser, many_jobs: Path) -> None:
    with shown(page, many_jobs) as server:
        page.open(f"{server.address}#{many_jobs / 'busy'}")
        page.sees("30 explorers", ".timeline")
        wanted = page.run(
            "return [...document.querySelectorAll('a, button, select, summary, [tabindex=\"0\"]')]"
            ".length"
        )
        reached: list[str] = []
        while True:
            page.press(TAB)
            name, outline = page.run(FOCUSED)
            if not name or name in reached:
                break
            assert outline, f"{name} has the focus, and does not show it"
            reached.append(name)
        assert reached[0] == "A:Skip to the job"
        assert len(reached) == wanted + 1  # of the two radio buttons one
        focus = "document.querySelector(arguments[0]).focus()"
        opened = page.run("return location.hash")
        page.run(focus, ".skip")
        page.press(ENTER)
        assert page.run("return document.activeElement.id") == "main"
        assert page.run("return location.hash") == opened  # which says what job is shown
        page.sees("busy", "main h1")
        page.run(focus, ".timeline summary")
        page.press(SPACE)
        page.sees("paused 250 ms", "ul.live")
        page.run(focus, "input[value=clock]")
        page.press(RIGHT)
        assert page.run("return document.activeElement.value") == "since"
        page.wait(
            "return [...document.querySelectorAll('.timeline .tick')]"
            ".every((one) => /^(0|[+].*)$/.test(one.textContent))",
            "an axis of durations",
        )
        page.run(focus, "#all-explorers")
        page.press(ENTER)
        page.sees("Show the 20 furthest behind", "#all-explorers")
        page.run("document.querySelectorAll('nav a')[3].focus()")
        page.press(ENTER)
        page.sees("well", "main h1")
        # Landmarks, one first heading, and tables that say what their columns are.
        assert page.run("return document.querySelectorAll('main, nav, h1').length") == 3
        assert page.run(
            "return [...document.querySelectorAll('table')].every((one) => one.caption"
            " && [...one.querySelectorAll('thead th')].every((head) => head.scope === 'col'))"
        )


FOCUSED = """
const one = document.activeElement;
if (one === document.body) return [null, true];
const all = [...document.querySelectorAll('*')];
const style = getComputedStyle(one);
const place = one.classList.contains('skip') ? one.textContent : all.indexOf(one);
const name = `${one.tagName}:${place}`;
return [name, style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2];
"""


def test_a_job_whose_storage_hangs_is_said_beside_those_that_are_well(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, hung = a_job(tmp_path / "well"), SmallJob(tmp_path / "hung")
    ended = threading.Event()

    def look(folders: list[Path], watch: Watch, *, waits: bool) -> list[JobState | UnseenJob]:
        if folders == [hung.root]:
            ended.wait(DEADLINE)
        return look_at_all(folders, watch, waits=waits)

    monkeypatch.setattr(jobs, "look_at_all", look)
    # As if it had been waited for since long.
    past = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() - 100)
    monkeypatch.setattr(jobs, "time", past)
    try:
        with shown(page, well.root, hung.root, patience=0.2) as server:
            page.open(f"{server.address}#{hung.root}")
            page.sees("The job's storage has not answered since", "main")
            page.sees("no answer", "nav tbody tr:nth-child(2)")
            page.sees("v3 · step 3", "nav tbody tr:nth-child(1)")
            ended.set()
            page.sees("No daemon has served this job yet", "main")
    finally:
        ended.set()


def test_what_nobody_foresaw_hides_nothing_and_stops_nothing(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the jobs have relative names
    a_job(tmp_path / "jobs" / "a")
    job = a_job(tmp_path / "jobs" / os.fsdecode(b"no-utf-\xff"), 3, "node-1")
    # A name that two have, a pause that no axis has room for, a number that JSON does not know.
    explorer(job, "node-1", 1, file="another", time=time.time())
    explorer(job, "node-0", None, status="stopped", time=time.time())
    explorer(job, "node-2", 3, time=time.time())
    journal = Journal(Job(FastStorage(), job.layout))
    journal.note("live", version=3, explorer="node-2", pause=1.7e308)
    journal.write()
    with shown(page, Path("jobs")) as server:
        page.open(server.address)
        page.sees("no-utf-\\udcff", "nav")
        page.run("document.querySelectorAll('nav a')[1].click()")
        page.sees("An engine did not serve: median 250 ms, longest 99999 d", ".charts")
        assert (
            page.run("return document.querySelectorAll('figure:nth-child(2) circle').length") == 1
        )
        explorer(job, "node-1", 2, file="another", time=time.time())
        page.sees("v2", "[data-key=explorers] tbody")
        names = page.run("return [...document.querySelectorAll('[data-key=explorers] tbody th')]"
                         ".map((one) => one.textContent)")  # fmt: skip
        assert names == ["node-1", "node-1", "node-2", "node-0"]  # which has stopped
        page.sees("1 of 3 explorers still on an older version", ".charts-note")


def test_a_server_that_is_gone_is_said_and_one_that_is_back_is_seen(
    page: Browser, tmp_path: Path
) -> None:
    job = a_job(tmp_path / "job")
    port = free_port()  # no connection of another test is given it in between
    with served(job.root, port=port) as server:
        page.open(server.address)
        page.sees("live", "#fresh")
    page.sees("Not updated since", "#fresh")
    assert page.text("#news") == "This page is not updated any more."
    page.sees("v3", ".tiles")
    with served(job.root, port=port):
        page.run("document.getElementById('again').click()")
        page.sees("live", "#fresh")
        page.sees("v3 is the latest", "#news")
        assert all("net::ERR_" in one for one in page.complaints())


def test_ages_are_by_the_servers_clock_and_times_in_the_viewers_zone(
    page: Browser, tmp_path: Path
) -> None:
    job = a_job(tmp_path / "job")
    Journal(Job(FastStorage(), job.layout), wall=lambda: 1.7e9).note("active")
    wrong = "const D = Date; window.Date = class extends D { constructor(...a) {"
    wrong += " super(...(a.length ? a : [0])); } static now() { return 0; } };"
    script = page.tell("Page.addScriptToEvaluateOnNewDocument", source=wrong)["identifier"]
    page.tell("Emulation.setTimezoneOverride", timezoneId="Asia/Kolkata")
    try:
        with shown(page, job.root) as server:
            daemon(job, time.time() - 30)
            page.open(server.address)
            told = page.run("return document.querySelector('.tile:nth-child(5) time').textContent")
            assert told in {f"{seconds} s ago" for seconds in range(30, 99)} | {"2 min ago"}
            moment, clock = page.run(
                "const one = document.querySelector('.timeline time');"
                "return [one.dateTime, one.textContent]"
            )
            hour, minute = int(moment[11:13]), int(moment[14:16])
            local = (60 * hour + minute + 330) % 1440
            assert clock[-8:-3] == f"{local // 60:02}:{local % 60:02}"
    finally:
        page.tell("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        page.tell("Emulation.setTimezoneOverride", timezoneId="")


def test_a_daemon_is_judged_by_its_heartbeat_and_not_by_its_own_clock(
    page: Browser, tmp_path: Path
) -> None:
    late, dead = a_job(tmp_path / "late"), a_job(tmp_path / "dead")
    rare = a_job(tmp_path / "rare")  # whose daemon's heart beats every 100 s
    rare.put_record(rare.layout.format, Format(lease_time=300.0))
    with shown(page, late.layout.root, dead.root, rare.layout.root) as server:
        daemon(rare, time.time() - 100)
        daemon(late, time.time() - 600, heartbeat=time.time())
        daemon(dead, time.time() + 600, heartbeat=time.time() - 100)
        page.open(f"{server.address}#{dead.root}")
        page.sees("watching", "nav tbody tr:nth-child(1)")
        page.sees("lost", "nav tbody tr:nth-child(2)")
        page.sees("watching", "nav tbody tr:nth-child(3)")


def test_who_is_lost_or_refuses_the_newest_version_is_said_on_top_and_in_the_title(
    page: Browser, tmp_path: Path
) -> None:
    job = a_job(tmp_path / "job", 3, "node-1", "node-2", "node-3")
    with shown(page, job.root) as server:
        page.open(server.address)
        page.sees("healthy", ".note.good")
        page.wait("return document.title === 'v3 · job · syncd'", "the title")
        trainer = TrainerReport(
            run_id="r", world_size=1, status="running", session="t", step=3, time=time.time() - 81
        )
        job.put_record(job.layout.trainer_report, trainer)
        explorer(job, "node-1", 3, time=1.0, refused="v107: no such tensor")
        job.session("s-node-2").unlink()
        page.sees("trainer lost. Restart it", ".note.bad")
        page.sees("node-1 refuses v107", "main")
        page.sees("node-2 lost", "main")
        page.wait("return document.title === 'degraded · v3 · job · syncd'", "the title")
        page.sees("lost (no heartbeat for", ".tiles")
        page.sees("lost (no heartbeat", "[data-key=explorers]")
        page.sees("refuses v107", "[data-key=explorers]")
        order = "return [...document.querySelectorAll('main > section')].map((x) => x.dataset.key)"
        assert page.run(order)[:2] == ["explorers", "versions"]


def test_a_full_disk_is_red_with_the_command_that_shows_it(page: Browser, tmp_path: Path) -> None:
    with without_room(tmp_path / "disk", 1) as job, shown(page, job.root) as server:
        page.open(server.address)
        page.sees("nothing is published: step 2 needs 1.0 MB, but only", ".note.bad b")
        assert page.text(".note.bad code") == f"df -h {job.root}"
        page.sees("blocked", ".badge.bad")
        page.wait("return document.title.startsWith('degraded · v1 · ')", "the title")
        assert page.run(FAINT) == []


def test_a_command_on_the_page_works_in_every_folder(
    page: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, empty = tmp_path / "it's new", SmallJob(tmp_path / "an empty one").root
    new.mkdir()
    monkeypatch.chdir(tmp_path)
    with shown(page, *(Path(folder.name) for folder in (new, empty))) as server:
        page.open(f"{server.address}#{new}")
        page.sees(f"syncd run {shlex.quote(str(new))}", ".note.bad code")
        page.open(f"{server.address}#{empty}")
        page.sees(f"syncd run {shlex.quote(str(empty))}", ".note.warn code")
        page.sees(f"syncd follow {shlex.quote(str(empty))} --name", ".empty code")


def test_a_version_on_disk_has_a_row_however_old_it_is(page: Browser, tmp_path: Path) -> None:
    job = SmallJob(tmp_path / "job")
    with job.daemon(DaemonConfig(keep=1)) as loop:
        for step in range(1, 31):
            loop.publish(step)
            if step == 2:
                explorer(job, "evaluation", 2, time=time.time())
        loop.run_once()
    daemon(job, time.time())
    with shown(page, job.root) as server:
        page.open(server.address)
        page.sees("leased by evaluation", ".timeline tbody tr[data-key='2']")
        assert page.run("return document.querySelectorAll('.timeline tbody tr').length") == 21


def test_a_page_that_nobody_sees_asks_for_nothing(page: Browser, tmp_path: Path) -> None:
    job = a_job(tmp_path / "job")
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'));"
    count = "const done = arguments[0]; let asked = 0; const before = window.fetch;"
    count += "window.fetch = (...all) => { asked += 1; return before(...all); };"
    count += "setTimeout(() => { window.fetch = before; done(asked); }, 2500);"
    with shown(page, job.root) as server:
        page.open(server.address, still=False)
        assert page.run("return document.getAnimations().length") == 1
        page.open(server.address)
        page.sees("live", "#fresh")
        assert page.run("return document.getAnimations().length") == 0
        page.run(hide, True)
        assert page.driver.execute_async_script(count) == 0
        daemon(job, time.time(), host="trainer-8")
        page.run(hide, False)
        page.sees("trainer-8", ".tiles")
