"""The readiness probe of docs/kubernetes.md, ten times a second: a pod is ready in time, or not."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from tests.doc_blocks import blocks
from tests.engines.sglang_fake_process import sglang_process
from tests.engines.tiny_models import publish_model, save_model
from tests.engines.vllm_process import VLLMProcess
from tests.engines.waiting import wait_for
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE
from tests.ports import free_port
from tests.rank_programs import ENVIRONMENT

(PROBE,) = (block for block in blocks("kubernetes.md", "sh") if "weight_info" in block)
PROMPT = (1, 2, 3)
_CLIENT = httpx2.Client(
    trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0)
)  # made once, because that takes longer than a request


@dataclass(frozen=True)
class Probe:
    """What was seen at one moment.

    Attributes:
        begun: when, on the monotonic clock.
        labels: what the server said right before and right after, None where nobody answered.
        is_there: whether the file was there.
        is_ready: what the probe said.
        tokens: what the server generated right after it was ready.
    """

    begun: float
    labels: tuple[str | None, str | None]
    is_there: bool
    is_ready: bool
    tokens: list[int] | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the server had a version of the job for a part of the time."""
        return any(label is not None and label.startswith("step-") for label in self.labels)


@dataclass
class Probes:
    """Probes a server until the end of the block."""

    file: Path
    url: str
    info: str = "/weight_info"
    generate: Callable[[], list[int]] = list
    seen: list[Probe] = field(default_factory=list)

    def is_ready(self) -> bool:
        return self.seen[-1].is_ready

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        line = PROBE.replace("/stage/ready", str(self.file))
        line = line.replace("127.0.0.1:8000/weight_info", f"{self.url}{self.info}")
        assert line.count(str(self.file)) == line.count(self.url + self.info) == 1

        def go_on() -> None:
            due = time.monotonic()
            while not ended.wait(max(0.0, due - time.monotonic())):
                due = max(due, time.monotonic() - 0.1) + 0.1  # ten a second, if the machine can
                begun, before, is_there = time.monotonic(), self.label(), self.file.exists()
                done = subprocess.run(
                    ["sh", "-c", line], check=False, stderr=subprocess.DEVNULL, timeout=DEADLINE
                )
                ready, tokens = done.returncode == 0, None
                labels = before, self.label()
                if ready:
                    try:
                        tokens = self.generate()
                    except httpx2.TransportError:
                        pass  # it was killed since
                self.seen.append(Probe(begun, labels, is_there, ready, tokens))

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            wait_for(lambda: self.seen)
            yield
        finally:
            ended.set()
            thread.join()

    def label(self) -> str | None:
        try:
            told = _CLIENT.get(f"{self.url}{self.info}").json()
        except httpx2.TransportError:
            return None
        return str(told["weight_version"])


@contextmanager
def following(
    job: SmallJob, *options: object, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    words = (sys.executable, "-m", "syncd", "follow", job.root, "--name", "server", *options)
    with subprocess.Popen([str(word) for word in words], env=ENVIRONMENT | variables) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_not_ready_in_time(follow: subprocess.Popen[bytes], probes: Probes) -> None:
    """Kill what touches the file: it stays, but only for ten seconds is it new enough."""
    assert probes.is_ready()
    follow.kill()
    follow.wait()
    killed = time.monotonic()
    wait_for(lambda: probes.seen[-1].begun > killed + 10)
    wait_for(lambda: not probes.is_ready())
    assert probes.seen[-1].is_there
    assert max(probe.begun for probe in probes.seen if probe.is_ready) < killed + 10


@contextmanager
def following_sglang(
    job: SmallJob, file: Path
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes], Probes]]:
    """A server that is ready, and what follows a job for it."""
    publish(job, 3)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    probes = Probes(file, url, "/model_info")
    options = ("--engine", "sglang", "--url", url, "--ready-file", file)
    with (
        sglang_process(port, str(job.version(1))) as server,
        following(job, *options) as follow,
        probes.running(),
    ):
        wait_for(probes.is_ready)
        yield server, follow, probes


def test_a_server_that_is_back_at_once_is_not_ready_before_its_reload(
    job: SmallJob, tmp_path: Path
) -> None:
    with following_sglang(job, tmp_path / "ready") as (server, follow, probes):
        follow.send_signal(signal.SIGSTOP)  # it is too slow to notice
        server.send_signal(signal.SIGHUP)
        wait_for(lambda: probes.label() == "default")
        restarted = len(probes.seen) + 1
        wait_for(lambda: len(probes.seen) >= restarted + 3)
        assert all(probe.is_there and not probe.is_ready for probe in probes.seen[restarted:])
        follow.send_signal(signal.SIGCONT)
        wait_for(probes.is_ready)
        follow.terminate()
        assert follow.wait(DEADLINE) == 0
        assert not (tmp_path / "ready").exists()
    assert [probe for probe in probes.seen if probe.is_ready and not probe.is_loaded] == []


def test_a_server_without_a_live_follower_is_not_ready_after_10_s(
    job: SmallJob, tmp_path: Path
) -> None:
    with following_sglang(job, tmp_path / "ready") as (_, follow, probes):
        assert_not_ready_in_time(follow, probes)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_vllm_that_is_killed_is_not_ready_before_its_reload(
    job: SmallJob, vllm: VLLMProcess, tmp_path: Path
) -> None:
    publish_model(job, 1)
    file = tmp_path / "ready"
    probes = Probes(file, vllm.url, generate=lambda: vllm.generate(PROMPT).tokens)
    options = ("--engine", "vllm", "--url", vllm.url, "--ready-file", file)
    with following(job, *options) as follow, probes.running():
        wait_for(probes.is_ready)
        loaded = vllm.generate(PROMPT).tokens
        base = save_model(tmp_path / "base", 0)
        vllm.kill()
        killed = time.monotonic()
        vllm.restart(base)
        vllm.wait_until_up()
        wait_for(lambda: probes.is_ready() and probes.seen[-1].begun > killed)
        back = [probe for probe in probes.seen if probe.begun > killed]
        assert_not_ready_in_time(follow, probes)
    vllm.restart(base)
    vllm.wait_until_up()
    assert vllm.generate(PROMPT).tokens != loaded
    assert {tuple(p.tokens or ()) for p in back if p.is_ready} == {tuple(loaded)}
    assert [probe for probe in back if probe.is_ready and not probe.is_loaded] == []
    # The file alone tells them apart, too: this server takes longer to start than the next check.
    of_its_start = [probe for probe in back if probe.labels == ("default", "default")]
    assert [probe for probe in of_its_start if probe.is_there] == []
    assert any(probe.labels[0] and not probe.labels[0].startswith("step-") for probe in back)
