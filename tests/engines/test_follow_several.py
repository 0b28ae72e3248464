"""``syncd follow --url A --url B``: several servers, of which none waits for another."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.followers import Followers
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import NameTakenError, ServerUnreachableError
from syncd.protocol.policy import Version
from tests.engines.sglang_process import sglang_process
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE, explorer_report
from tests.ports import free_port
from tests.rank_programs import ENVIRONMENT


def test_each_server_is_loaded_and_one_that_is_down_is_waited_for_alone(
    job: SmallJob, tmp_path: Path
) -> None:
    publish(job, 3)
    base = str(job.layout.version(1))
    up, down = free_port(), free_port()
    urls = [word for port in (up, down) for word in ("--url", f"http://127.0.0.1:{port}")]
    arguments = [job.layout.root, "--name", "server", "--engine", "sglang", "--json", *urls]
    arguments += ["--stage", tmp_path / "stage"]
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
            assert explorer_report(job.layout.root, "server-1").starting is not None
            with sglang_process(down, base):
                assert next(lines) == {"explorer": "server-1", "version": 1, "step": 3}
                publish(job, 4)
                both = {next(lines)["explorer"], next(lines)["explorer"]}
                assert both == {"server-0", "server-1"}
                process.terminate()
                assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
    for name in ("server-0", "server-1"):
        assert explorer_report(job.layout.root, name).status == "stopped"


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
            raise ServerUnreachableError("no server came up")
        return ExplorerHook(job.layout.root, "late", FakeEngine(), poll=0.01)

    served: list[tuple[str, Version]] = []
    all_serve = threading.Event()

    def told(name: str, version: Version) -> None:
        served.append((name, version))
        if {name for name, _ in served} == {"early", "late"}:
            all_serve.set()

    followers = Followers(
        {
            "early": lambda _: ExplorerHook(job.layout.root, "early", FakeEngine(), poll=0.01),
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


def test_a_name_that_is_taken_ends_all(job: SmallJob) -> None:
    publish(job, 3)

    def taken(_: Callable[[], None]) -> ExplorerHook:
        raise NameTakenError("a live explorer has the name")

    followers = Followers(
        {"a": lambda _: ExplorerHook(job.layout.root, "a", FakeEngine(), poll=0.01), "b": taken},
        lambda *_: None,
    )
    with pytest.raises(NameTakenError):
        followers.run()
