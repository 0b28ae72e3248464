"""What any user of the host does on a port of ours holds neither the daemon nor the page."""

import http.client
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import Gauge

from syncd.daemon.loopback import HOST, LoopbackRequest, LoopbackServer
from syncd.daemon.telling.metrics import Exporter, Metrics
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE, Daemon, wait_for_step, wait_until
from tests.ports import free_port, listening
from tests.storages import open_files
from tests.web.served import served

#: No server of ours has more connections at a time.
MOST = 64


@pytest.fixture(params=["metrics", "web"])
def port(request: pytest.FixtureRequest, job: SmallJob) -> Iterator[int]:
    """A server in this process."""
    with ExitStack() as stack:
        if request.param == "web":
            found = stack.enter_context(served(job.root)).server_address[1]
        else:
            found = free_port()
            stack.enter_context(Exporter(Metrics(), port=found, textfile=None))
        yield found


def asked(port: int) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=DEADLINE)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connected(port: int, stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection((HOST, port), timeout=DEADLINE))


def drip(connections: list[socket.socket], stack: ExitStack) -> None:
    """Send a byte of a header now and then, on each one, until the stack closes."""
    enough = threading.Event()

    def send() -> None:
        while not enough.wait(0.01):
            for one in connections:
                try:
                    one.send(b"x")
                except OSError:
                    pass  # the server has closed this one

    for one in connections:
        one.send(b"GET / HTTP/1.0\r\nX: ")
    thread = threading.Thread(target=send)
    thread.start()
    stack.callback(thread.join)
    stack.callback(enough.set)


def test_idle_connections_in_number_take_few_threads_and_keep_nobody_from_an_answer(
    port: int,
) -> None:
    threads, files = threading.active_count(), open_files()
    with ExitStack() as stack:
        for _ in range(300):
            connected(port, stack)
        for _ in range(3):
            assert asked(port)[0] == 200
        assert threading.active_count() - threads <= MOST
        assert open_files() - files - 300 <= MOST + 1
    wait_until(lambda: threading.active_count() <= threads, "all of them are gone")


def test_as_many_that_drip_as_there_may_be_keep_nobody_from_an_answer(port: int) -> None:
    with ExitStack() as stack:
        drip([connected(port, stack) for _ in range(MOST)], stack)
        for _ in range(3):
            assert asked(port)[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("what", ["says nothing", "drips its header", "drips a body"])
def test_a_connection_ends_after_its_time_whatever_its_client_does(
    port: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, ExitStack() as stack:
        patched.setattr(LoopbackServer, "longest", 0.2)
        connection = connected(port, stack)
        if what == "drips a body":
            connection.send(b"POST / HTTP/1.0\r\nContent-Length: 1000000\r\n\r\n")
        if what != "says nothing":
            drip([connection], stack)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass  # closed with bytes on the way
    assert asked(port)[0] == 200


def test_a_client_that_does_not_read_its_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LoopbackServer, "longest", 1)  # not before the answer begins
    metrics, port = Metrics(), free_port()
    Gauge("long", "x" * 20_000_000, registry=metrics.registry)  # more than sockets buffer
    with Exporter(metrics, port=port, textfile=None), ExitStack() as stack:
        threads = threading.active_count()
        connection = connected(port, stack)
        connection.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert connection.recv(1) == b"H"
        wait_until(lambda: threading.active_count() <= threads, "its thread has ended")


class Slow(LoopbackRequest):
    """Answers when it is told to."""

    begun, may_end = threading.Event(), threading.Event()

    def answer(self) -> None:
        self.begun.set()
        self.may_end.wait(DEADLINE)
        self.send(b"an answer", "text/plain")


def test_an_answer_that_takes_long_is_not_given_up_for_connections_that_ask_for_nothing() -> None:
    with listening(LoopbackServer(0, Slow, 4)) as server, ExitStack() as stack:
        stack.callback(Slow.may_end.set)
        port = server.server_address[1]
        asking = connected(port, stack)
        asking.send(b"GET / HTTP/1.0\r\n\r\n")
        assert Slow.begun.wait(DEADLINE)
        for one in [connected(port, stack) for _ in range(20)][:-3]:
            assert one.recv(1) == b""  # closed for one that came later
        Slow.may_end.set()
        with asking.makefile("rb") as answer:
            assert answer.read().endswith(b"an answer")


def test_of_an_endless_header_no_more_is_read_than_a_real_one_has(port: int) -> None:
    with ExitStack() as stack:
        connection = connected(port, stack)
        connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nX: ".ljust(16 * 1024, b"x"))
        assert connection.recv(12).startswith(b"HTTP/1.0 ")


@pytest.mark.slow
def test_a_daemon_with_few_descriptors_publishes_whoever_connects_to_its_metrics(
    tmp_path: Path,
) -> None:
    job, port = SmallJob(tmp_path / "job"), free_port()
    with Daemon(job.root, "--metrics-port", str(port)) as daemon, ExitStack() as stack:
        daemon.wait_for_log("serving")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (256, 256))
        for _ in range(400):
            connected(port, stack)
        job.save(1)
        wait_for_step(job.root, 1)
        status, content = asked(port)
        assert status == 200
        assert b"syncd_latest_version{" in content
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 100
        assert len(os.listdir(f"/proc/{daemon.pid}/task")) < 100
