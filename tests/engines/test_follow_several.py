"""``syncd follow --url A --url B``: several servers, of which none waits for another."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.engines.http_server import place
from explorer_hooks.followers import Followers
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    NameTakenError,
    ServerUnreachableError,
    SyncdError,
)
from syncd.protocol.policy import Version
from tests.engines.sglang_process import sglang_process
from tests.engines.waiting import wait_for
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE, explorer_report
from tests.ports import free_port
from tests.rank_programs import ENVIRONMENT


def test_each_server_is_loaded_and_one_that_is_down_is_waited_for_alone(
    job: SmallJob, tmp_path: Path
) -> None:
    publish(job, 3)
    base = str(job.version(1))
    up, down = free_port(), free_port()
    urls = [word for port in (up, down) for word in ("--url", f"http://127.0.0.1:{port}")]
    arguments = [job.root, "--name", "server", "--engine", "sglang", "--json", *urls]
    arguments += ["--stage", tmp_path / "stage", "--ready-file", tmp_path / "ready"]
    arguments += ["--max-behind", "0"]
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
            assert next(lines) == {"explorer": "server-0", "version": 1, "step": 3}
            wait_for(job.layout.explorer("server-1").exists)
            assert explorer_report(job.root, "server-1").starting is not None
            wait_for(ready[0].exists)
            assert not ready[1].exists()
            with sglang_process(down, base):
                assert next(lines) == {"explorer": "server-1", "version": 1, "step": 3}
                publish(job, 4)
                assert {next(lines)["explorer"] for _ in ready} == {"server-0", "server-1"}
                wait_for(lambda: all(file.exists() for file in ready))
                process.terminate()
                assert process.wait(DEADLINE) == 0
                assert not any(file.exists() for file in ready)
        finally:
            process.kill()
    for name in ("server-0", "server-1"):
        assert explorer_report(job.root, name).status == "stopped"


def run(followers: Followers) -> threading.Thread:
    thread = threading.Thread(target=followers.run)
    thread.start()
    return thread


def test_one_that_fails_is_opened_again_and_the_other_goes_on(job: SmallJob) -> None:
    publish(job, 3)
    attempts = 0

    def opens(_: Callable[[], None]) -> ExplorerHook:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise ServerUnreachableError("the server did not start to answer")
        return ExplorerHook(job.root, "late", FakeEngine(), poll=0.01)

    served: list[tuple[str, Version]] = []
    all_serve = threading.Event()

    def told(name: str, version: Version) -> None:
        served.append((name, version))
        if {name for name, _ in served} == {"early", "late"}:
            all_serve.set()

    followers = Followers(
        {
            "early": lambda _: ExplorerHook(job.root, "early", FakeEngine(), poll=0.01),
            "late": opens,
        },
        told,
        again=0.01,
    )
    thread = run(followers)
    assert all_serve.wait(DEADLINE)
    followers.end()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert sorted(served) == [("early", Version(1, 3)), ("late", Version(1, 3))]


def test_an_end_is_heard_while_a_server_is_waited_for() -> None:
    waits = threading.Event()

    def opens(cancel: Callable[[], None]) -> ExplorerHook:
        while True:
            cancel()
            waits.set()

    followers = Followers({"a": opens, "b": opens}, lambda *_: None)
    thread = run(followers)
    assert waits.wait(DEADLINE)
    followers.end()
    thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [NameTakenError, JobUnavailableError, InvalidSettingsError])
def test_one_that_cannot_be_opened_does_not_end_the_other(
    job: SmallJob, error: type[SyncdError]
) -> None:
    publish(job, 3)
    first, later, refused_later = threading.Event(), threading.Event(), threading.Event()
    served: list[tuple[str, Version]] = []

    def refused(_: Callable[[], None]) -> ExplorerHook:
        if first.is_set():
            refused_later.set()
        raise error("it cannot be opened")

    def told(name: str, version: Version) -> None:
        served.append((name, version))
        (first if version == Version(1, 3) else later).set()

    followers = Followers({"a": opens(job, "a"), "b": refused}, told, again=0.05)
    thread = run(followers)
    try:
        assert first.wait(DEADLINE)
        assert refused_later.wait(DEADLINE)
        publish(job, 4)
        assert later.wait(DEADLINE)
    finally:
        followers.end()
        thread.join(DEADLINE)
    assert not thread.is_alive()
    assert served == [("a", Version(1, 3)), ("a", Version(2, 4))]


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
    return subprocess.run(
        [sys.executable, "-m", "syncd", "follow", str(job.root), "--name", "s", *arguments],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=DEADLINE, check=False,
    )  # fmt: skip


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
    ],
)
def test_two_spellings_of_one_server_are_one_place(url: str, other: str) -> None:
    assert place(url) == place(other)


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
