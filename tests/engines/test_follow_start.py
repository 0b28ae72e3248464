"""``syncd follow`` at a server that does not answer: it says so, reports it, and can be ended."""

import gzip
import io
import json
import logging
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import httpx2
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from explorer_hooks.engines import http_server
from explorer_hooks.engines.http_server import HttpServer, ServerAccess, ServerTimeouts
from explorer_hooks.follow import command
from syncd.cli.status import page
from syncd.operate.job_state import look
from syncd.protocol.errors import (
    InvalidSettingsError,
    ServerError,
    ServerRefusedError,
    ServerUnreachableError,
)
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.engines.waiting import LONG
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE, explorer_report
from tests.ports import free_port, listening
from tests.rank_programs import ENVIRONMENT
from tests.refusals import invalid


@contextmanager
def nobody() -> Iterator[int]:
    """A port that refuses connections."""
    yield free_port()


@contextmanager
def silence() -> Iterator[int]:
    """A port that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def status_of(job: SmallJob) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(page(look(Job(Storage(job.root), job.layout)), 0.0, 200))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("server", "ends"),
    [(nobody, signal.SIGTERM), (silence, signal.SIGINT)],
    ids=["nobody-SIGTERM", "silence-SIGINT"],
)
def test_it_says_at_once_that_it_waits_and_a_signal_ends_it(
    job: SmallJob, server: Callable[[], AbstractContextManager[int]], ends: signal.Signals
) -> None:
    with server() as port:
        url = f"http://127.0.0.1:{port}"
        arguments = [job.root, "--name", "server-0", "--engine", "vllm", "--url", url]
        with subprocess.Popen(
            [sys.executable, "-m", "syncd", "follow", *map(str, arguments)],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stderr is not None
                lines = iter(process.stderr.readline, "")
                assert any(f"waiting up to 600 s for the server at {url}" in one for one in lines)
                if server is nobody:
                    assert "refused" in next(lines)
                told = explorer_report(job.root, "server-0")
                assert told.status == "stopped"  # nobody is to wait for it
                assert told.starting is not None
                assert url in told.starting
                shown = status_of(job)
                assert "starting" in shown
                assert f"server-0 starting. {told.starting}" in " ".join(shown.split())
                process.send_signal(ends)
                assert process.wait(DEADLINE) == 0
            finally:
                process.kill()
    assert explorer_report(job.root, "server-0").starting is None
    assert "starting" not in status_of(job)


def test_each_half_minute_it_says_how_long_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0

    class Clock:
        def monotonic(self) -> float:
            return passed

        def sleep(self, seconds: float) -> None:
            nonlocal passed
            passed += seconds

    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    monkeypatch.setattr(http_server, "time", Clock())
    transport = httpx2.MockTransport(refuse)
    server = HttpServer(
        "http://localhost:1", None, ServerTimeouts(start=100.0), transport=transport
    )
    told: list[str] = []
    with pytest.raises(ServerUnreachableError, match=r"within 100 s.*--start-timeout"):
        server.wait_until_up(told.append)
    assert [one.partition(":")[0] for one in told] == [
        f"waiting for {seconds} s of at most 100 s" for seconds in (0, 30, 60, 90)
    ]


@pytest.mark.parametrize("status", [200, 404])
def test_a_web_server_is_no_inference_server(status: int) -> None:
    page = httpx2.Response(status, html="<html>a page</html>")
    server = HttpServer("http://localhost:1", transport=httpx2.MockTransport(lambda _: page))
    with pytest.raises(ServerRefusedError, match="answers, but it is neither vLLM") as told:
        server.read_routes()
    assert "<html>" not in str(told.value)


KEY = "Top-secret+4711/x"
OK = b"HTTP/1.1 200 OK\r\n"
JSON = OK + b"Content-Type: application/json\r\n\r\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that answers one request with these bytes; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, suppress(OSError):  # the client may end the answer
                while b"\r\n\r\n" not in peer.recv(1 << 16, socket.MSG_PEEK):
                    pass
                peer.recv(1 << 16)
                peer.sendall(answer)
                peer.shutdown(socket.SHUT_WR)
                peer.recv(1)  # until the client closes

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


def chunks(*parts: str) -> bytes:
    """A body in chunks, whose end is missing."""
    return b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(
        f"{len(part):x}\r\n{part}\r\n".encode() for part in parts
    )


def base64_of(text: str) -> str:
    return b64encode(text.encode()).decode()


HTML = "Content-Type: text/html\r\n\r\n"
BROKEN = "HTTP/1.1 500 No\r\n"
HIDDEN = r"\*\*\*"
ANSWERS = {
    "reason": (f"HTTP/1.1 503 no way for Bearer {KEY}\r\n{HTML}<p>", HIDDEN),
    "page of a proxy": (f"HTTP/1.1 502 Bad Gateway\r\n{HTML}<p>{KEY}", "502 Bad Gateway$"),
    "long reason": (f"HTTP/1.1 500 {KEY * 4000}\r\n{HTML}", "500 (\\*\\*\\*){166}"),
    "control in reason": (f"HTTP/1.1 500 \x1b[31m{KEY}\r\n\r\n", HIDDEN),
    "header value": (f"{BROKEN}Content-Length: {KEY}\r\n\r\n", "Content-Length"),
    "header line": (f"{BROKEN}{KEY}\r\n\r\n", HIDDEN),
    "redirect": (f"HTTP/1.1 307 Moved\r\nLocation: http://{KEY}@[/\r\n\r\n", "307 Moved$"),
    "body": (f"{BROKEN}\r\nbad key {KEY}\r\n\x1b[31m\u202e", rf"{HIDDEN}\\r\\n\\x1b"),
    "percent": (f"{BROKEN}\r\n/?key={quote(KEY, safe='')}", f"key={HIDDEN}"),
    "base64": (f"{BROKEN}\r\n{base64_of(KEY)}", HIDDEN),
    "base64 of a header": (f"{BROKEN}\r\n{base64_of(f'Bearer {KEY}')}", HIDDEN),
    "base64 of a user": (f"{BROKEN}\r\n{base64_of(f'user:{KEY}')}", HIDDEN),
    "escapes": (f"{BROKEN}\r\n" + "".join(f"\\u{ord(c):04X}" for c in KEY), HIDDEN),
    "chunks": (BROKEN.encode() + chunks("the key ", KEY[:5], KEY[5:]) + b"0\r\n\r\n", HIDDEN),
    "no last chunk": (OK + chunks(KEY[:5], KEY[5:]), "peer closed"),
    "long body": (OK + b"\r\n" + bytes(17 << 20), "longer than 16 MiB"),
    "bomb": (
        OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(17 << 20)),
        "not a JSON object",
    ),
    "deep": (JSON + b"[" * 5_000_000, "not a JSON object: "),
    "NaN": (JSON + b'{"paths": NaN}', "not a JSON object: Out of range"),
    "infinite": (JSON + b'{"paths": 1e999}', "not a JSON object: Out of range"),
    "digits": (JSON + b'{"paths": %s}' % (b"1" * 5000), "not a JSON object: Exceeds"),
    "key twice": (JSON + b'{"paths": {}, "paths": {}}', "a key occurs twice"),
    "surrogate": (JSON + rb'{"paths": "\ud800"}', "surrogates not allowed"),
    "latin-1": (JSON + '{"paths": "\u00e9"}'.encode("latin-1"), "surrogates not allowed"),
    "utf-16": (JSON + '{"paths": {}}'.encode("utf-16"), "not a JSON object"),
    "list": (JSON + b"[]", "not a JSON object. Check"),
    "null": (JSON + b"null", "not a JSON object. Check"),
    "nothing": (JSON, "200 OK: this is not a JSON object"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_unusable_answer_is_shown_in_short_and_without_the_key(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, says = ANSWERS[case]
    caplog.set_level(logging.INFO)
    with (
        answering(answer if isinstance(answer, bytes) else answer.encode()) as url,
        closing(HttpServer(url, ServerAccess(KEY))) as server,
        pytest.raises(ServerError, match=says) as refused,
    ):
        server.ask("GET /here", timeout=LONG)
    assert str(refused.value).startswith(f"{url}: GET /here: ")
    assert len(str(refused.value)) < 4000
    assert str(refused.value).isprintable()
    told = caplog.text + "".join(traceback.format_exception(refused.value))
    for secret in (KEY, quote(KEY, safe=""), base64_of(KEY)[:12], KEY[5:]):
        assert secret not in told


def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "time", SimpleNamespace(monotonic=count().__next__))
    slow = httpx2.MockTransport(lambda _: httpx2.Response(200, content=repeat(b" ")))
    with pytest.raises(ServerUnreachableError, match="did not end within 9 s"):
        HttpServer("http://localhost:1", transport=slow).ask("GET /here", timeout=9)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (httpx2.Response(200, text="Cache flushed.\n"), {}),
        (httpx2.Response(200), {}),
        (httpx2.Response(200, headers={"content-type": "application/json"}), {}),
        (httpx2.Response(200, json=None), {}),
        (httpx2.Response(200, json={"a": KEY}), {"a": "***"}),
        (httpx2.Response(200, content=b"{", headers={"content-type": "application/json"}), None),
    ],
)
def test_an_answer_to_a_post_may_be_no_json(
    answer: httpx2.Response, given: dict[str, object] | None
) -> None:
    transport = httpx2.MockTransport(lambda _: answer)
    server = HttpServer("http://localhost:1", ServerAccess(KEY), transport=transport)
    if given is not None:
        assert server.ask("POST /flush") == given
    else:
        with pytest.raises(ServerRefusedError, match="not a JSON object: Expecting"):
            server.ask("POST /flush")


def follow(*arguments: object) -> Result:
    options = ["--name", "server-0", "--engine", "sglang", "--start-timeout", "0"]
    return CliRunner().invoke(command, [*map(str, arguments), *options])


def test_a_server_that_does_not_come_up_in_time_ends_it(job: SmallJob) -> None:
    ended = follow(job.root, "--url", f"http://127.0.0.1:{free_port()}")
    assert isinstance(ended.exception, ServerUnreachableError)
    assert "check that the server runs" in str(ended.exception)
    assert explorer_report(job.root, "server-0").starting is None


class Described(BaseHTTPRequestHandler):
    """A server with one route, which is not one of SGLang's."""

    def do_GET(self) -> None:
        content = json.dumps({"paths": {"/other": {"get": {}}}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_a_private_certificate_is_trusted_if_its_authority_is_given(
    job: SmallJob, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=private "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = HTTPServer(("127.0.0.1", 0), Described)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with listening(server):
        url = f"https://127.0.0.1:{server.server_port}"
        ended = follow(job.root, "--url", url)
        assert isinstance(ended.exception, ServerUnreachableError)
        assert "does not trust the server's certificate" in str(ended.exception)
        ended = follow(job.root, "--url", url, "--cacert", certificate)
        assert "has no route POST /pause_generation" in str(ended.exception)  # so it was read


def test_a_file_that_holds_no_certificate_is_said_so(job: SmallJob, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for path in (tmp_path / "empty.pem", tmp_path / "none.pem"):
        ended = follow(job.root, "--url", "https://127.0.0.1:1", "--cacert", path)
        assert isinstance(ended.exception, InvalidSettingsError)
        assert f"{path} contains no certificate" in str(ended.exception)


@pytest.mark.parametrize("key", ["top-secret-4711\n", 'top"secret-4711'])
def test_an_api_key_is_in_no_message(key: str) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        sent = request.headers["Authorization"].removeprefix("Bearer ")
        assert sent == key.strip()
        if request.url.path == "/away":
            raise httpx2.ConnectError(f"no way to {sent}")
        return httpx2.Response(401, json={"detail": f"wrong key: {sent}", "keys": [sent]})

    server = HttpServer("http://vllm", ServerAccess(key), transport=httpx2.MockTransport(answer))
    for route in ("GET /here", "GET /away"):
        with pytest.raises(ServerError) as refused:
            server.ask(route)
        told = str(refused.value)
        assert "secret" not in told
        assert "***" in told


@pytest.mark.parametrize("key", ["cl\u00e9", "two\nlines", "nul\0"])
def test_an_api_key_that_no_header_can_have_is_refused_without_showing_it(key: str) -> None:
    with invalid("printable ASCII") as refused:
        HttpServer("http://vllm", ServerAccess(admin_api_key=key))
    assert key not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine", "vllm"], "give both"),
        (["--link", "model", "--url", "http://127.0.0.1:1"], "give both"),
        (["--engine", "vllm", "--url", "http://h:1", "--command", "true"], "Give exactly one of"),
        (
            ["--engine", "vllm", "--url", "http://h:1", "--in-flight", "retract"],
            "keep, wait, abort",
        ),
    ],
)
def test_follow_says_what_is_wrong_with_its_options(options: list[str], says: str) -> None:
    ended = CliRunner().invoke(command, ["job", "--name", "server", *options])
    assert ended.exit_code != 0
    assert says in ended.output + str(ended.exception)
