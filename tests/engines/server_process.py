"""A real inference server on the CPU, for tests: tiny models, prompts and answers as token ids."""

import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2

from explorer_hooks.engines.server_engine import ServerEngine
from explorer_hooks.reader import LeasedVersion
from tests.ports import free_port

#: A server that begins imports for half a minute, on a machine that does nothing else.
_START_SECONDS = 450.0

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What was generated.

    Attributes:
        tokens: their ids.
        logprobs: of the most probable tokens at each place, by id.
        spans: of weights that generated them, in order: the label, the first and past the last.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    spans: list[tuple[str, int, int]]

    @property
    def labels(self) -> list[str]:
        """Of the weights, in order."""
        return [label for label, _, _ in self.spans]


class ServerProcess(ABC):
    """A server process.

    Args:
        model: its folder.
        log: what it says goes to its end.
    """

    def __init__(self, model: Path, log: Path) -> None:
        self._port = str(free_port())
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = log
        self._process = self._start(model)

    @abstractmethod
    def _command(self, model: Path) -> tuple[list[str], dict[str, str]]:
        """Its command for a model, and its environment."""

    def _start(self, model: Path) -> subprocess.Popen[bytes]:
        words, environment = self._command(model)
        with self.log.open("ab") as out:
            return subprocess.Popen(
                words, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def restart(self, model: Path) -> None:
        """Kill it, and let another one begin at the same address."""
        self.kill()
        self._process = self._start(model)

    def wait_until_up(self) -> None:
        """Wait until it answers.

        Raises:
            AssertionError: it has ended, or is not up in time; says what it said last.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                if httpx2.get(f"{self.url}/health", trust_env=False).is_success:
                    return
            except httpx2.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"it does not come up: {self.log.read_text()[-6000:]}")
            time.sleep(0.2)

    @contextmanager
    def up(self) -> Iterator[Self]:
        """Wait until it answers, and kill it at the end of the block."""
        try:
            self.wait_until_up()
            yield self
        finally:
            self.kill()

    def ask(self, path: str, body: object = None, *, method: str = "POST", **params: str) -> Any:
        """Send a request, and wait for its answer."""
        limits = httpx2.Limits(max_keepalive_connections=0)
        with httpx2.Client(trust_env=False, timeout=120, limits=limits) as client:
            answer = client.request(method, f"{self.url}{path}", json=body, params=params)
        answer.raise_for_status()
        return answer.json()

    def pids(self) -> list[int]:
        """Its processes."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(fields[2]) == self._process.pid:
                found.append(int(path.parent.name))
        return found

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill it, and all that it has started. Safe to call twice."""
        try:
            self.send(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


@contextmanager
def asked(ask: Callable[[], T], *, threads: int) -> Iterator[list[T]]:
    """The answers to what several clients ask all the time; the block fails if one request does."""
    answers: list[T] = []
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            answers.append(ask())

    with ThreadPoolExecutor(threads) as pool:
        clients = [pool.submit(go_on) for _ in range(threads)]
        try:
            yield answers
        finally:
            stop.set()
        for client in clients:
            client.result()


def load(engine: ServerEngine, version: LeasedVersion) -> None:
    """As a hook does."""
    engine.check(version)
    engine.prepare(version)
    try:
        engine.pause()
        engine.load(version)
        engine.reset_cache()
    finally:
        engine.resume()
