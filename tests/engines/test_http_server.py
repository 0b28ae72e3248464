"""The client of a server's API: addresses, keys, redirections, and servers that are away."""

import logging
import socket
import time
import traceback

import httpx2
import pytest

from explorer_hooks import pipeline
from explorer_hooks.engines import http_server
from explorer_hooks.engines.http_server import HttpServer, ServerAccess, ServerTimeouts
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.hook import ExplorerHook
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import ServerRefusedError, ServerUnreachableError
from tests.engines.sglang_fake import FakeSGLang
from tests.engines.waiting import LONG, wait_for
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.refusals import invalid


def test_staging_is_for_servers_of_this_host() -> None:
    assert SGLangServer("http://127.0.0.1:30000").is_local
    assert SGLangServer("http://[::1]:30000").is_local
    assert not SGLangServer("http://10.0.0.7:30000").is_local
    assert not SGLangServer("http://localhost:30000", is_local=False).is_local
    with invalid("retract, abort"):
        SGLangServer("http://localhost:1", mode="keep")


@pytest.mark.parametrize(
    "url",
    [
        "nowhere",
        "ftp://host",
        "http://",
        "http://me:hidden@localhost:1",
        "http://localhost:1/?key=hidden",
        "http://me:hidden@localhost:port",
        "http://me:hid/hidden@localhost",
        "ftp://me:hidden@localhost",
    ],
)
def test_a_wrong_address_is_refused_and_its_secret_is_not_shown(url: str) -> None:
    with invalid("http://HOST:PORT") as raised:
        SGLangServer(url)
    assert "hidden" not in "".join(traceback.format_exception_only(raised.value))
    assert raised.value.__context__ is None


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (ServerAccess("k"), ["Bearer k", "Bearer k"]),
        (ServerAccess(admin_api_key="a"), [None, "Bearer a"]),
        (ServerAccess("k", "a"), ["Bearer k", "Bearer a"]),
    ],
)
def test_each_route_is_sent_its_key_and_no_request_is_logged(
    caplog: pytest.LogCaptureFixture, given: ServerAccess, sent: list[str | None]
) -> None:
    keys = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        keys.append(request.headers.get("Authorization"))
        return httpx2.Response(200, json={})

    caplog.set_level(logging.INFO)
    transport = httpx2.MockTransport(answer)
    engine = SGLangServer("http://localhost:1", transport=transport, access=given)
    engine._said_label()
    engine._resume()
    assert keys == sent
    assert not caplog.records
    assert "'" not in repr(given)


def test_what_is_answered_by_a_redirection_was_not_done() -> None:
    moved = httpx2.MockTransport(lambda _: httpx2.Response(307, headers={"Location": "/there"}))
    server = HttpServer("http://localhost:1", transport=moved)
    with pytest.raises(ServerRefusedError, match="307"):
        server.ask("POST /pause")


def test_a_host_that_does_not_even_refuse_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_CONNECT", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as other:
        other.connect(full.getsockname())  # from now on the kernel answers nobody
        host, port = full.getsockname()
        server = HttpServer(f"http://{host}:{port}", None, ServerTimeouts(6 * LONG))
        begun = time.monotonic()
        with pytest.raises(ServerUnreachableError):
            server.ask("POST /pause", timeout=6 * LONG)
        assert time.monotonic() - begun < LONG


@pytest.mark.parametrize("faults", [None, {"/pause_generation": "a fault"}], ids=["away", "faulty"])
def test_a_server_that_answers_again_is_loaded_within_5_s_however_long_it_did_not(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, faults: dict[str, str] | None
) -> None:
    """Time passes by the pauses of what follows."""
    monkeypatch.setattr(pipeline, "_STILL", 0.0)
    plain, fake = Cancellation.pause, FakeSGLang("elsewhere")
    passed, answers_since = 0.0, None

    def pause(cancel: Cancellation, seconds: float) -> bool:
        nonlocal passed, answers_since
        if passed > 300 and answers_since is None:
            answers_since = passed  # if it answers again right after the pause has begun
            fake.is_up = True
            fake.faults.clear()
        passed += seconds
        return plain(cancel, 0.001)

    publish(job, 1)
    engine = SGLangServer("http://localhost:1", transport=fake.transport)
    with ExplorerHook(job.root, "server", engine, poll=0.1) as hook:
        hook.pull(LONG)
        fake.restart()
        fake.is_up, fake.faults = faults is not None, faults or {}
        monkeypatch.setattr(Cancellation, "pause", pause)
        hook.start()
        wait_for(lambda: answers_since is not None and hook.fault is None)
        assert fake.weight_version == "step-1-version-1"
        hook.stop()
    assert answers_since is not None
    assert passed - answers_since <= 5
