"""``syncd follow --ready-file``: when the file is there, by a server that is only a fake."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from explorer_hooks.engines.server_engine import LOADING
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.followers import ready_file
from explorer_hooks.hook import ExplorerHook
from syncd.coordination.participant import HeldName
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import EngineBrokenError
from tests.engines.sglang_fake import FakeSGLang
from tests.engines.waiting import wait_for
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.storages import RuledStorage

LONG = 60.0
EVERY = 0.01


class Watched:
    """A server, the hook that loads into it, and the file; ``look`` waits for a whole check."""

    def __init__(self, job: SmallJob, path: Path) -> None:
        self.path = path
        self.fake = FakeSGLang("elsewhere")
        self.storage = RuledStorage()
        self._job = job
        self._asked = threading.Semaphore(0)

    @contextmanager
    def followed(self, max_behind: int | None = None) -> Iterator[ExplorerHook]:
        asking = SGLangServer("http://host", transport=httpx2.MockTransport(self._answer))
        loading = SGLangServer("http://host", transport=self.fake.transport)
        root = self._job.layout.root

        def opens() -> ExplorerHook:
            return ExplorerHook(root, "explorer", loading, storage=self.storage)

        with ready_file(self.path, opens, asking, max_behind, EVERY) as hook:
            yield hook

    @contextmanager
    def serving(self, max_behind: int | None = None) -> Iterator[ExplorerHook]:
        publish(self._job, 1)
        with self.followed(max_behind) as hook:
            hook.pull(LONG)
            wait_for(self.path.exists)
            yield hook

    def look(self) -> None:
        """Until the server was asked for its label, and the file was touched or removed."""
        while self._asked.acquire(blocking=False):
            pass
        for _ in range(3):  # the first may have begun before, the third is after the second
            assert self._asked.acquire(timeout=LONG)

    def touched(self) -> bool:
        """Whether the file is touched again."""
        os.utime(self.path, (0, 0))
        self.look()
        return self.path.stat().st_mtime > 0

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        try:
            return self.fake.transport.handle_request(request)
        finally:
            if request.url.path == "/model_info" or not self.fake.is_up:
                self._asked.release()


@pytest.fixture
def watched(job: SmallJob, tmp_path: Path) -> Watched:
    return Watched(job, tmp_path / "ready")


def test_it_is_there_from_the_first_version_until_the_end(job: SmallJob, watched: Watched) -> None:
    publish(job, 1)
    watched.path.touch()  # of a process that was killed
    with watched.followed() as hook:
        assert not watched.path.exists()
        hook.pull(LONG)
        wait_for(watched.path.exists)
        assert watched.touched()
    assert not watched.path.exists()


def test_it_goes_with_the_server_and_comes_back_with_the_reload(watched: Watched) -> None:
    with watched.serving() as hook:
        watched.fake.is_up = False
        watched.look()
        assert not watched.path.exists()
        watched.fake.restart()
        watched.fake.is_up = True
        watched.look()
        assert not watched.path.exists()  # the server answers, with the weights of its start
        with pytest.raises(EngineBrokenError):
            hook.pull(0)
        assert hook.pull(0) is None  # no newer version, but the server has its own again
        assert watched.fake.weight_version == "step-1-version-1"
        wait_for(watched.path.exists)


def test_a_restart_between_two_checks_is_seen(watched: Watched) -> None:
    with watched.serving():
        watched.fake.restart()
        watched.look()
        assert not watched.path.exists()


def test_it_stays_during_a_load_but_not_while_the_engine_is_broken(watched: Watched) -> None:
    with watched.serving() as hook:
        watched.fake.weight_version = f"{LOADING}-full-step-2-version-2"
        assert watched.touched()
        with pytest.raises(EngineBrokenError):
            hook.pull(0)
        wait_for(lambda: not watched.path.exists())


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_server_that_is_too_far_behind_is_not_ready(
    job: SmallJob, watched: Watched, most: int
) -> None:
    with watched.serving(most) as hook:
        for behind in range(1, most + 1):
            publish(job, 1 + behind)
            assert watched.touched()
        publish(job, 2 + most)
        wait_for(lambda: not watched.path.exists())
        hook.pull(LONG)
        wait_for(watched.path.exists)


def test_any_number_of_versions_is_not_too_far_without_a_limit(
    job: SmallJob, watched: Watched
) -> None:
    with watched.serving():
        publish(job, 2, 3, 4)
        assert watched.touched()


def test_an_error_of_storage_lets_it_get_old(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with watched.serving(0):
        watched.storage.refuse("open_read", errno.EIO, where="LATEST")
        wait_for(lambda: "was neither touched nor removed" in caplog.text)
        os.utime(watched.path, (0, 0))
        caplog.clear()
        wait_for(lambda: caplog.text.count("was neither touched nor removed") >= 2)
        assert watched.path.stat().st_mtime == 0
        watched.storage.rules.clear()
        wait_for(lambda: watched.path.stat().st_mtime > 0)


def test_a_latest_of_a_newer_protocol_ends_no_checks(
    job: SmallJob, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with watched.serving(0):
        latest = job.layout.latest.read_bytes()
        job.layout.latest.write_bytes(b'{"protocol": 99}')
        wait_for(lambda: "was neither touched nor removed" in caplog.text)
        watched.path.unlink(missing_ok=True)
        job.layout.latest.write_bytes(latest)
        wait_for(watched.path.exists)


def test_a_folder_that_comes_later_is_used(
    job: SmallJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(job, 1)
    watched = Watched(job, tmp_path / "run" / "ready")
    with watched.followed() as hook:
        hook.pull(LONG)
        wait_for(lambda: f"{watched.path} was neither touched nor removed" in caplog.text)
        watched.path.parent.mkdir()
        wait_for(watched.path.exists)


@pytest.mark.parametrize("label", [None, "default", "given-back"])
def test_a_label_that_is_of_no_version_is_not_ready(tmp_path: Path, label: str | None) -> None:
    fake = FakeSGLang(str(tmp_path))
    engine = SGLangServer("http://host", transport=fake.transport)
    fake.weight_version = label  # type: ignore[assignment] # a release without labels says null
    assert engine.is_loaded() is (label is None)
    fake.weight_version = "step-1-version-1"
    assert engine.is_loaded()
    fake.is_up = False
    assert not engine.is_loaded()


def test_a_server_that_fails_or_lacks_a_route_is_not_ready(tmp_path: Path) -> None:
    fake = FakeSGLang(str(tmp_path))
    lacking = FakeSGLang(str(tmp_path), without=frozenset({"/pause_generation"}))
    fake.weight_version = lacking.weight_version = "step-1-version-1"
    engine = SGLangServer("http://host", transport=fake.transport)
    assert engine.is_loaded()
    fake.faults["/model_info"] = "out of memory"
    assert not engine.is_loaded()
    assert not SGLangServer("http://host", transport=lacking.transport).is_loaded()


def test_a_server_with_weights_of_another_job_is_not_ready(job: SmallJob, watched: Watched) -> None:
    publish(job, 1, 2)
    with watched.serving(9) as hook:
        shutil.rmtree(job.root)
        again = SmallJob(job.root)
        wait_for(lambda: not watched.path.exists())
        publish(again, 3)
        hook.pull(LONG)
        wait_for(watched.path.exists)


def test_one_that_waits_for_its_turn_is_ready(job: SmallJob, watched: Watched) -> None:
    with job.daemon(DaemonConfig(max_loading=1)) as loop:
        loop.publish(1)
        with watched.followed(max_behind=0) as hook:
            hook.pull(LONG)
            other = hook.synchronizer.session_id  # alive
            assert HeldName(job, job.layout.load_turn(0), other, "other").create()
            loop.publish(2)
            hook.start()
            wait_for(lambda: hook.synchronizer.turns.has_one)
            assert watched.touched()
