"""``syncd web``: its server, on real sockets; what a browser makes of it is in ``tests/web``."""

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import syncd.web
from syncd.daemon.config import DaemonConfig
from syncd.operate.job_state import look_at_all
from syncd.operate.liveness import Watch
from syncd.operate.models import JobState, UnseenJob
from syncd.protocol.errors import JobUnavailableError
from syncd.web import jobs as web_jobs
from syncd.web.jobs import Jobs, SharedLook
from syncd.web.server import Server
from tests.commands import invoke
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, wait_until
from tests.refusals import invalid
from tests.web.served import explorer, served

PAGE = Path(syncd.web.__file__).parent


@pytest.fixture
def shown(job: SmallJob) -> SmallJob:
    with job.daemon(DaemonConfig(keep=9)) as loop:
        loop.publish(1)
        explorer(job, "node-1", 1)
        loop.run_once()
    return job


@pytest.fixture
def server(shown: SmallJob) -> Iterator[Server]:
    with served(shown.root) as server:
        yield server


def asked(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    return ask(server.server_address[1], path, method, **headers)


def ask(
    port: int, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def jobs_of(server: Server, query: str = "") -> list[dict[str, Any]]:
    return json.loads(asked(server, f"/jobs.json{query}")[1])["jobs"]


def printed(*arguments: object) -> Any:
    return json.loads(invoke(*arguments, "--json").output)


def test_it_holds_what_status_and_history_print_and_when_that_was_read(
    shown: SmallJob, server: Server
) -> None:
    answer = json.loads(asked(server, "/jobs.json?history=0&had=0")[1])
    (job,) = answer["jobs"]
    status = printed("status", shown.root)
    job["status"]["free"] = status["free"] = None  # which changes all the time
    assert (job["job"], job["status"]) == (str(shown.root), status)
    assert job["history"] == printed("history", shown.root)
    assert job["history"]["versions"][0]["live"][0]["explorer"] == "node-1"
    assert 0 < job["read"] <= job["since"] <= answer["now"]
    assert job["silent_since"] is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/page.css?x", "text/css"), ("/page.js", "text/javascript"),
     ("/icon.svg", "image/svg+xml"), ("/jobs.json", "application/json")],
)  # fmt: skip
def test_a_browser_is_told_what_it_may_do_with_an_answer(
    server: Server, path: str, kind: str
) -> None:
    answer, content = asked(server, path)
    assert (answer.status, answer.headers.get_content_type()) == (200, kind)
    head, nothing = asked(server, path, "HEAD")
    assert (head.status, nothing) == (200, b"")
    assert int(answer.headers["Content-Length"]) == len(content)
    for headers in (answer.headers, head.headers, asked(server, "/none")[0].headers):
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Server"] == "syncd"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "MADE"])
def test_nothing_can_be_asked_for_but_reading(server: Server, method: str) -> None:
    assert asked(server, "/jobs.json", method)[0].status == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:{port}", 200), ("localhost:{port}", 200), ("[::1]:{port}", 200),
     ("localhost:9999", 200), ("LOCALHOST", 200), ("evil.example:{port}", 403), ("", 403),
     ("127.0.0.1.evil.example", 403), ("localhost@evil.example", 403), ("10.0.0.1:{port}", 403)],
)  # fmt: skip
def test_another_sites_name_for_this_host_is_refused(
    server: Server, host: str, status: int
) -> None:
    named = host.format(port=server.server_address[1])
    assert asked(server, "/jobs.json", Host=named)[0].status == status


@pytest.mark.parametrize(
    "path",
    ["/jobs.json?history=-1&had=0", "/jobs.json?history=%D9%A3&had=0", "/jobs.json?history=0",
     "/jobs.json?history=999999999&had=0", "/jobs.json?history=0&had=../etc", "/../../etc/passwd",
     "/%2e%2e/setup.cfg", "//etc/passwd", "/server.py", "/jobs", "/page.html"],
)  # fmt: skip
def test_a_path_leads_to_what_is_listed_and_to_no_file(server: Server, path: str) -> None:
    jobs_of(server)
    answer, content = asked(server, path)
    assert (answer.status, content) == (404, b"404 Not Found\n")


def test_a_job_whose_storage_hangs_keeps_nobody_waiting_twice(
    shown: SmallJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = SmallJob(tmp_path / "hung").layout.root
    begun: list[float] = []
    answers = threading.Event()

    def look(folders: list[Path], watch: Watch, *, waits: bool) -> list[JobState | UnseenJob]:
        if folders == [hung] and not answers.is_set():
            begun.append(0.0)
            answers.wait(DEADLINE)
        return look_at_all(folders, watch, waits=waits)

    monkeypatch.setattr(web_jobs, "look_at_all", look)
    try:
        # The patience of one look is that of all of them: once it is over nobody waits any more.
        with served(shown.root, hung, patience=0.5) as server:
            for _ in range(3):
                silent = wait_until(lambda: _silent_and_seen(server), "the other job's status")
                assert silent["status"] is None
            assert len(begun) == 1
            answers.set()
            wait_until(lambda: jobs_of(server)[1]["status"], "an answer")
            assert jobs_of(server)[1]["silent_since"] is None
    finally:
        answers.set()


def _silent_and_seen(server: Server) -> dict[str, Any] | None:
    well, silent = jobs_of(server)
    return silent if well["status"] and silent["silent_since"] else None


def test_storage_that_hung_for_hours_is_read_again_soon_after_it_is_back() -> None:
    now = [0.0]
    begun: list[float] = []

    def look() -> None:
        begun.append(now[0])
        now[0] += 3 * 3600.0 if len(begun) == 1 else 0.0

    shared = SharedLook(look, every=1.0, patience=0.0, clock=lambda: now[0])
    shared.begin()
    wait_until(lambda: not shared.is_reading, "the end of the first reading")
    now[0] += 60.0
    shared.begin()
    wait_until(lambda: len(begun) == 2, "the second one")


def test_all_who_ask_share_one_look() -> None:
    begun: list[float] = []
    may_end = threading.Event()

    def look() -> int:
        begun.append(0.0)
        assert may_end.wait(DEADLINE)
        return len(begun)

    shared = SharedLook(look, every=3600.0, patience=DEADLINE)
    found: list[int | None] = []

    def ask() -> None:
        shared.begin()
        found.append(shared.answer().found)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join()
    ask()  # much later it would be read again
    assert found == [1] * 9


def test_a_look_costs_a_part_of_the_time_however_long_it_takes() -> None:
    begun: list[float] = []
    looked = threading.Event()

    def look() -> None:
        begun.append(0.0)
        looked.wait(0.05)

    shared = SharedLook(look, every=0.0, patience=DEADLINE)
    for _ in range(50):  # at once one after the other: each is due 0.2 s after the one before
        shared.begin()
        shared.answer()
    assert len(begun) < 50


def test_jobs_come_and_go_and_those_that_are_all_away_say_so(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    first, second = root / "a", root / "b"
    SmallJob(first)
    with served(root) as server:

        def listed(*wanted: tuple[int, Path]) -> bool:
            return [(job["id"], Path(job["job"])) for job in jobs_of(server)] == list(wanted)

        wait_until(lambda: listed((0, first)), "the first job")
        SmallJob(second)
        wait_until(lambda: listed((0, first), (1, second)), "a second job")
        shutil.rmtree(first)
        wait_until(lambda: listed((1, second)), "the second job alone")
        SmallJob(first)
        wait_until(lambda: listed((2, first), (1, second)), "one made anew is another")
        root.rename(tmp_path / "unmounted")
        root.mkdir()
        away = "no such folder"
        wait_until(lambda: away in jobs_of(server)[0]["status"].get("unseen", ""), "it is away")
        assert listed((2, first), (1, second))


def test_a_history_that_the_page_has_already_is_not_sent_again(shown: SmallJob) -> None:
    with served(shown.root) as server:

        def history(had: object) -> tuple[Any, float]:
            (job,) = jobs_of(server, f"?history=0&had={had}")
            return job["history"], job["since"]

        assert jobs_of(server)[0]["history"] is None  # nobody has asked for it
        first, since = history(0)
        assert first["versions"]
        assert history(since) == (None, since)
        assert history(1.5) == (first, since)
        with shown.daemon(DaemonConfig(keep=9)) as loop:
            loop.publish(2)
        wait_until(lambda: history(since)[0] is not None, "the page has read the job again")
        assert history(since)[0]["versions"][-1]["version"] == 2


def test_a_port_that_is_taken_is_an_error_with_advice(server: Server, tmp_path: Path) -> None:
    with invalid("cannot be used: Address already in use"):
        Server(Jobs([tmp_path], 1), server.server_address[1])


@pytest.mark.slow
def test_the_command_says_where_the_page_is_and_ends_when_it_is_told(shown: SmallJob) -> None:
    for number, *form in ((signal.SIGTERM,), (signal.SIGINT, "--json")):
        argv = [sys.executable, "-m", "syncd", "web", str(shown.root), "--port", "0", *form]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                said = f"{json.loads(line)['address']} (Ctrl-C ends it)\n" if form else line
                found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", said)
                assert found is not None
                answer, _ = ask(int(found[1]), "/")
                assert answer.status == 200
                process.send_signal(number)
                assert process.wait(DEADLINE) == 0
            finally:
                process.kill()


def test_a_path_that_does_not_exist_is_refused_at_the_start(
    shown: SmallJob, tmp_path: Path
) -> None:
    for missing in (tmp_path / "typo", shown.layout.latest / "inside"):
        argv = [sys.executable, "-m", "syncd", "web", str(shown.root), str(missing)]
        done = subprocess.run(
            [*argv, "--port", "0"], capture_output=True, text=True, check=False, timeout=DEADLINE
        )
        assert (done.returncode, done.stdout) == (JobUnavailableError.exit_code, "")
        assert f"no such folder: {missing}. Create the folder, or" in done.stderr


def test_all_of_the_page_is_served_and_nothing_of_it_reads_markup() -> None:
    files = {path.name for path in PAGE.iterdir() if path.suffix not in {".py", ""}}
    with Server(Jobs([], 1), 0) as server:
        assert {path.strip("/") or "page.html" for path in server.files} == files
    scripts = "".join(path.read_text() for path in PAGE.glob("*.js"))
    dangerous = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    )
    assert not re.search(dangerous, scripts)
    everything = scripts + "".join((PAGE / name).read_text() for name in ("page.html", "page.css"))
    assert set(re.findall(r"https?://[^\s\"']+", everything)) == {"http://www.w3.org/2000/svg"}
