"""``syncd follow --url A --url B``: several servers, of which none waits for another."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import httpx2
import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.engines.http_server import HttpServer, place
from explorer_hooks.followers import Followers
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    NameTakenError,
    ServerUnreachableError,
    SyncdError,
)
from syncd.protocol.names import MANIFEST
from syncd.protocol.policy import Version
from tests.deltas import contents
from tests.engines.sglang_fake_process import sglang_process
from tests.engines.waiting import wait_for
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE, explorer_report, read_by
from tests.ports import free_port
from tests.programs import completed
from tests.rank_programs import ENVIRONMENT
from tests.staged_deltas import DeltaChain


def test_each_server_is_loaded_with_the_tip_and_one_that_is_down_is_waited_for_alone(
    job: SmallJob, tmp_path: Path, memory: Path
) -> None:
    chain = DeltaChain(job, tmp_path, saves=1)
    base = str(job.version(1))
    up, down = free_port(), free_port()
    urls = [word for port in (up, down) for word in ("--url", f"http://127.0.0.1:{port}")]
    arguments = [job.root, "--name", "server", "--engine", "sglang", "--json", *urls]
    arguments += ["--stage", memory, "--ready-file", tmp_path / "ready", "--max-behind", "0"]
    ready = [tmp_path / "ready-0", tmp_path / "ready-1"]
    ready[1].touch()  # of a process that was killed
    with (
        sglang_process(up, base),
        subprocess.Popen(
            [sys.executable, "-m", "syncd", "follow", *map(str, arguments)],
            stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            lines = map(json.loads, iter(process.stdout.readline, ""))
            assert next(lines) == {"explorer": "server-0", "version": 1, "step": 1}
            wait_for(job.explorer("server-1").exists)
            wait_for(lambda: explorer_report(job.root, "server-1").starting)
            wait_for(ready[0].exists)
            assert not ready[1].exists()
            with sglang_process(down, base):
                assert next(lines) == {"explorer": "server-1", "version": 1, "step": 1}
                report = explorer_report(job.root, "server-1")
                assert (report.status, report.starting) == ("running", None)
                chain.add_delta()
                assert {next(lines)["explorer"] for _ in ready} == {"server-0", "server-1"}
                assert job.latest.sequence == 1
                whole = contents(chain.whole[1].folder)
                del whole[MANIFEST]
                wait_for(lambda: all(file.exists() for file in ready))
                for port in (up, down):
                    told = httpx2.get(f"http://127.0.0.1:{port}/model_info", trust_env=False)
                    served = contents(Path(told.json()["model_path"]))
                    assert served | whole == served
                size = sum(file.size for file in chain.deltas[0].record.files)
                assert read_by(job.root, 2, "server-0", "server-1") == [(0, 0), (0, size)]
                process.terminate()
                assert process.wait(DEADLINE) == 0
                assert not any(file.exists() for file in ready)
        finally:
            process.kill()
    for name in ("server-0", "server-1"):
        assert explorer_report(job.root, name).status == "stopped"


@contextmanager
def running(followers: Followers) -> Iterator[None]:
    thread = threading.Thread(target=followers.run)
    thread.start()
    try:
        yield
    finally:
        followers.end()
        thread.join(DEADLINE)
    assert not thread.is_alive()


def test_an_end_is_heard_while_a_server_is_waited_for() -> None:
    waits = threading.Event()

    def opens(cancel: Callable[[], None]) -> ExplorerHook:
        while True:
            cancel()
            waits.set()

    with running(Followers({"a": opens, "b": opens}, lambda *_: None)):
        assert waits.wait(DEADLINE)


@pytest.mark.parametrize(
    "error",
    [ServerUnreachableError, NameTakenError, JobUnavailableError, InvalidSettingsError],
)
def test_one_that_cannot_be_opened_is_tried_again_and_does_not_end_the_other(
    job: SmallJob, error: type[SyncdError]
) -> None:
    publish(job, 3)
    refused, mended = threading.Event(), threading.Event()
    served = queue.SimpleQueue()

    def late(cancel: Callable[[], None]) -> ExplorerHook:
        if mended.is_set():
            return opens(job, "late")(cancel)
        refused.set()
        raise error("it cannot be opened")

    followers = Followers(
        {"early": opens(job, "early"), "late": late}, lambda *told: served.put(told), again=0.05
    )
    with running(followers):
        assert served.get(timeout=DEADLINE) == ("early", Version(1, 3))
        refused.clear()
        assert refused.wait(DEADLINE)
        publish(job, 4)
        assert served.get(timeout=DEADLINE) == ("early", Version(2, 4))
        mended.set()
        assert served.get(timeout=DEADLINE) == ("late", Version(2, 4))


def opens(job: SmallJob, name: str) -> Callable[[Callable[[], None]], ExplorerHook]:
    return lambda _: ExplorerHook(job.root, name, FakeEngine(), poll=0.01)


@pytest.mark.parametrize("error", [NameTakenError, JobUnavailableError])
def test_they_end_if_none_can_be_opened(error: type[SyncdError]) -> None:
    def refused(_: Callable[[], None]) -> ExplorerHook:
        raise error("it cannot be opened")

    with pytest.raises(error, match="it cannot be opened"):
        Followers({"a": refused, "b": refused}, lambda *_: None, again=0.01).run()


def test_a_version_that_cannot_be_reported_ends_all(job: SmallJob) -> None:
    publish(job, 3)

    def told(*_: object) -> None:
        raise BrokenPipeError("nobody reads")

    opened: list[str] = []

    def once(name: str, cancel: Callable[[], None]) -> ExplorerHook:
        opened.append(name)
        return opens(job, name)(cancel)

    followers = Followers({name: partial(once, name) for name in "ab"}, told, again=0.01)
    with pytest.raises(BrokenPipeError):
        followers.run()
    assert len(opened) == len(set(opened))


def test_a_closed_stdout_ends_the_command_as_with_one_server(job: SmallJob) -> None:
    publish(job, 3)
    base = str(job.version(1))
    ports = (free_port(), free_port())
    with sglang_process(ports[0], base), sglang_process(ports[1], base):
        statuses = []
        for some in (ports[:1], ports):
            urls = [word for port in some for word in ("--url", f"http://127.0.0.1:{port}")]
            arguments = [str(job.root), "--name", f"of-{len(some)}", "--engine", "sglang"]
            read, write = os.pipe()
            os.close(read)
            with subprocess.Popen(
                [sys.executable, "-m", "syncd", "follow", *arguments, "--json", *urls],
                stdout=write, stderr=subprocess.DEVNULL, env=ENVIRONMENT,
            ) as process:  # fmt: skip
                os.close(write)
                try:
                    statuses.append(process.wait(DEADLINE))
                finally:
                    process.kill()
    assert statuses[0] == statuses[1] != 0


def follow(job: SmallJob, *arguments: str) -> subprocess.CompletedProcess[str]:
    return completed(
        [sys.executable, "-m", "syncd", "follow", job.root, "--name", "s", *arguments],
        env=ENVIRONMENT,
        timeout=DEADLINE,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        ("--in-flight", "kep"),
        ("--base", "/nowhere/at/all"),
        ("--cacert", "/nowhere/ca.pem"),
        ("--url", "127.0.0.1:8000"),
    ],
    ids=lambda wrong: wrong[0],
)
def test_a_wrong_setting_ends_the_command_as_with_one_server(
    job: SmallJob, wrong: tuple[str, str]
) -> None:
    first = ["--engine", "vllm", *wrong]
    if wrong[0] != "--url":
        first += ["--url", "http://127.0.0.1:1"]
    one = follow(job, *first)
    two = follow(job, *first, "--url", "http://127.0.0.1:2")
    assert one.returncode == two.returncode == 2
    assert one.stderr == two.stderr != ""


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/"),
        ("http://127.0.0.1:8000", "HTTP://LocalHost:8000"),
        ("http://localhost:8000", "http://[::1]:8000"),
        ("http://[::1]:8000", "http://[0:0:0:0:0:0:0:1]:8000"),
        ("http://node", "http://NODE:80"),
        ("https://node/", "https://node:443"),
        ("http://node:8000/a", "http://node:8000/a/"),
        ("http://node:8000", "http://node:8000/v1"),
        ("http://node:8000/a", "http://node:8000/a/v1/"),
    ],
)
def test_two_spellings_of_one_server_are_one_place(url: str, other: str) -> None:
    assert place(url) == place(other)
    with closing(HttpServer(other)) as server:
        assert str(server.url).rstrip("/").endswith(place(url)[2]), "there it sends its requests"
        assert "v1" not in str(server.url)


@pytest.mark.parametrize(
    "other",
    [
        "http://127.0.0.1:8001",
        "http://node:8000",
        "http://127.0.0.2:8000",
        "http://127.0.0.1:8000/a",
    ],
)
def test_two_servers_are_two_places(other: str) -> None:
    assert place("http://127.0.0.1:8000") != place(other)


def test_a_server_that_is_given_in_two_spellings_is_refused(job: SmallJob) -> None:
    urls = ("--url", "http://127.0.0.1:1", "--url", "http://localhost:1/")
    refused = follow(job, "--engine", "sglang", *urls)
    assert refused.returncode == 2
    assert "the same address" in refused.stderr
