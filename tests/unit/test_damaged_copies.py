"""A bit flips in a copy after it was made: no engine gets it, and the copy is made again."""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staged_copies import copy_name
from explorer_hooks.staging import Staging
from syncd.protocol.errors import EngineBrokenError, EngineMismatchError
from tests.engines.sglang_fake import FakeSGLang
from tests.explorers import publish, pulls
from tests.jobs import SmallJob, flip
from tests.refusals import engine_broken
from tests.staged_deltas import DeltaChain


class Host:
    """Hooks of one host, which load the same weights of a job into this stage folder.

    A copy stays when its hook is closed, as after a kill.
    """

    def __init__(self, job: SmallJob, stage: Path, stack: ExitStack) -> None:
        self.job, self._stage, self._stack = job, stage, stack
        self.load: Callable[[ExplorerHook], object] = lambda hook: hook.pull(0)
        self.options: dict[str, Any] = {}

    def hook(self, engine: Engine, name: str = "first") -> ExplorerHook:
        staging = Staging(self._stage, keep_last=True)
        given = {"staging": staging, "poll": 0.02, **self.options}
        hook = self._stack.enter_context(ExplorerHook(self.job.root, name, engine, **given))
        self.load(hook)
        return hook


@pytest.fixture
def host(job: SmallJob, memory: Path, stack: ExitStack) -> Host:
    return Host(job, memory, stack)


def published(host: Host, _: Path) -> None:
    publish(host.job, 1)


def benched(host: Host, _: Path) -> None:
    """A published step, with a later version."""
    publish(host.job, 1, 2)
    host.load = lambda hook: hook.load_step(1, 0)


def built(host: Host, _: Path) -> None:
    """A step that each bench builds."""
    publish(host.job, 1)
    host.job.save(4, point=False)
    host.load = lambda hook: hook.load_step(4, 60)


def in_memory(host: Host, tmp_path: Path) -> None:
    memory = SmallJob(tmp_path / "memory")
    publish(memory, 1)
    host.options = {"memory_dir": memory.root}


def tip(host: Host, tmp_path: Path) -> None:
    """A save of which there is no version yet."""
    DeltaChain(host.job, tmp_path)


each_place = pytest.mark.parametrize(
    "place", [published, benched, built, in_memory, tip], ids=lambda place: place.__name__
)


def damage(hook: ExplorerHook, how: Callable[[Path], None] = flip) -> Path:
    assert hook.folder is not None
    weights = sorted(hook.folder.glob("*.safetensors"))
    how(weights[0])
    return hook.folder


def look(host: Host, hook: ExplorerHook) -> None:
    """Load again, as the next look of a hook does."""
    hook._pipeline._looked = 0.0  # otherwise every two seconds
    host.load(hook)


@each_place
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("how", [flip, lambda path: os.truncate(path, 9), Path.unlink])
def test_the_next_hook_of_the_host_serves_sound_bytes(
    host: Host, engine: FakeEngine, tmp_path: Path, place: Any, restarted: bool, how: Any
) -> None:
    place(host, tmp_path)
    hook = host.hook(engine)
    folder = damage(hook, how)
    if restarted:
        hook.close()
        assert folder.exists()
    late = FakeEngine()
    host.hook(late, "late")
    assert late.answer().digest == engine.answer().digest


@each_place
def test_an_engine_that_lost_its_weights_gets_sound_bytes_again(
    host: Host, engine: FakeEngine, tmp_path: Path, place: Any
) -> None:
    place(host, tmp_path)
    hook = host.hook(engine)
    damage(hook)
    before = engine.answer()
    engine.restart()
    with suppress(EngineBrokenError):  # a pull that finds nothing new first says so
        look(host, hook)
    look(host, hook)
    assert hook.fault is None
    assert engine.answer() == (*before[:2], hook.folder, before.digest)


def test_an_engine_whose_load_fails_does_not_go_back_to_a_damaged_copy(
    host: Host, engine: FakeEngine
) -> None:
    publish(host.job, 1)
    hook = host.hook(engine)
    damage(hook)
    before = engine.answer()
    publish(host.job, 2)
    engine.fail("load", EngineMismatchError("no"), torn=True)
    with engine_broken("could not go back to v1 .*the digest of weight"):
        hook.pull(0)
    assert engine.served is None
    assert hook.pull(0) is None
    assert engine.answer() == before


def test_a_server_that_refuses_a_load_is_not_given_a_damaged_copy_back(host: Host) -> None:
    publish(host.job, 1)
    fake = FakeSGLang("elsewhere")
    server = SGLangServer("http://127.0.0.1:1", transport=fake.transport)
    hook = host.hook(server)
    folder = damage(hook)
    publish(host.job, 2)
    name = copy_name(host.job.version(2), 2, "run-2-0", "F32")
    fake.refuses = frozenset({str(folder.with_name(name))})
    with engine_broken("stays paused"):
        hook.pull(0)
    assert (fake.is_paused, fake.loaded) == (True, [str(folder)])
    for _ in range(2):  # the newer version stays refused
        assert hook.pull(0) is None
        assert (fake.is_paused, fake.loaded) == (False, [str(folder)] * 2)
    with hook._pipeline.hold_again() as copy:
        copy.verify()


def test_a_version_that_was_damaged_in_memory_is_not_loaded_again(
    host: Host, engine: FakeEngine, tmp_path: Path
) -> None:
    """Its only file is the trainer's, so nothing can make it again."""
    in_memory(host, tmp_path)
    host.options["staging"] = None
    hook = host.hook(engine)
    damage(hook)
    engine.restart()
    for why in ("lost v1", "lost v1.* cannot be loaded again: .*the digest"):
        with engine_broken(why):
            look(host, hook)
    assert engine.served is None
    publish(SmallJob(host.options["memory_dir"]), 2)
    pulls(hook, 2, 2)
