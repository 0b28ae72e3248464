"""A bit flips in a copy after it was made: an engine never gets it, and the copy is made again."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.fake import FakeEngine, content_of
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.follow import LinkEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staged_copies import copy_name
from explorer_hooks.staging import Staging
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.coordination.leased_version import LeasedVersion
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import EngineBrokenError, EngineMismatchError
from tests.deltas import STORAGE
from tests.engines.sglang_fake import FakeSGLang
from tests.explorers import held, publish, pulls
from tests.jobs import SmallJob, flip
from tests.refusals import engine_broken, unverified
from tests.staged_links import LinkedJob, Unheld

Load = Callable[[ExplorerHook], object]


class Place:
    """Where copies of the newest weights of a job come from.

    Attributes:
        root: the job.
        digest: of the newest weights.
        load: loads them.
        options: of a hook.
    """

    def __init__(self, root: Path, digest: str, load: Load, **options: Any) -> None:
        self.root, self.digest, self.load, self.options = root, digest, load, options


def pull(hook: ExplorerHook) -> object:
    return hook.pull(0)


def digest_of(version: WholeVersion) -> str:
    return content_of(LeasedVersion(STORAGE, version.folder, version.manifest, Unheld()))


def published(job: SmallJob, _: Path) -> Place:
    publish(job, 1)
    with held(job) as version:
        return Place(job.root, content_of(version), pull)


def benched(job: SmallJob, tmp_path: Path) -> Place:
    """A step that another version has followed."""
    place = published(job, tmp_path)
    publish(job, 2)
    place.load = lambda hook: hook.load_step(1, 0)
    return place


def built(job: SmallJob, tmp_path: Path) -> Place:
    """A step that a bench builds anew each time."""
    place = published(job, tmp_path)
    job.save(4, point=False)
    place.load = lambda hook: hook.load_step(4, 60)
    publish(other := SmallJob(tmp_path / "other"), 4)
    with held(other) as version:
        place.digest = content_of(version)
    return place


def in_memory(job: SmallJob, tmp_path: Path) -> Place:
    publish(memory := SmallJob(tmp_path / "memory"), 1)
    with held(memory) as version:
        return Place(job.root, content_of(version), pull, memory_dir=memory.root)


def ahead(job: SmallJob, tmp_path: Path) -> Place:
    """A save of which there is no version yet."""
    linked = LinkedJob(job, tmp_path)
    return Place(job.root, digest_of(linked.whole[2]), pull)


@pytest.fixture(params=[published, benched, built, in_memory, ahead], ids=lambda one: one.__name__)
def place(job: SmallJob, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    made: Place = request.param(job, tmp_path)
    return made


def hook_of(place: Place, name: str, engine: Engine, stage: Path) -> ExplorerHook:
    staging = Staging(stage, keep_last=True)  # as after a kill, the copy stays
    return ExplorerHook(place.root, name, engine, staging=staging, poll=0.02, **place.options)


def damage(hook: ExplorerHook) -> Path:
    assert hook.folder is not None
    weights = max(hook.folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(weights)
    return hook.folder


@pytest.mark.parametrize("restarted", [False, True])
def test_the_next_hook_of_the_host_serves_sound_bytes(
    place: Place, memory: Path, restarted: bool, stack: ExitStack
) -> None:
    first = stack.enter_context(hook_of(place, "first", FakeEngine(), memory))
    place.load(first)
    folder = damage(first)
    if restarted:
        first.close()
        assert folder.exists()
    next_engine = FakeEngine()
    second = stack.enter_context(hook_of(place, "second", next_engine, memory))
    place.load(second)
    assert next_engine.answer().digest == place.digest
    assert next_engine.answer().folder.is_relative_to(memory)


@pytest.fixture
def serving(place: Place, engine: FakeEngine, memory: Path) -> Iterator[ExplorerHook]:
    with hook_of(place, "serving", engine, memory) as hook:
        place.load(hook)
        yield hook


def look(place: Place, hook: ExplorerHook) -> None:
    """Load again, as the next look of a hook does."""
    hook._pipeline._looked = 0.0  # otherwise every two seconds
    place.load(hook)


def test_an_engine_that_lost_its_weights_gets_sound_bytes_again(
    place: Place, serving: ExplorerHook, engine: FakeEngine
) -> None:
    damage(serving)
    engine.restart()
    with suppress(EngineBrokenError):  # a pull that finds nothing new only says so
        look(place, serving)
    look(place, serving)
    assert serving.fault is None
    assert engine.answer().digest == place.digest
    assert engine.answer().folder == serving.folder


def test_an_engine_whose_load_fails_does_not_go_back_to_a_damaged_copy(
    job: SmallJob, tmp_path: Path, memory: Path, engine: FakeEngine
) -> None:
    place = published(job, tmp_path)
    with hook_of(place, "serving", engine, memory) as hook:
        place.load(hook)
        damage(hook)
        publish(job, 2)
        engine.fail("load", EngineMismatchError("no"), torn=True)
        with engine_broken("could not load its previous version 1 again .*its digest|the digest"):
            hook.pull(0)
        assert engine.served is None
        assert hook.pull(0) is None
        assert engine.answer().digest == place.digest
        assert hook.fault is None


def test_a_server_that_refuses_a_load_is_not_given_a_damaged_copy_back(
    job: SmallJob, memory: Path
) -> None:
    publish(job, 1)
    fake = FakeSGLang("elsewhere")
    server = SGLangServer("http://127.0.0.1:1", start_timeout=0.0, transport=fake.transport)
    with ExplorerHook(job.root, "server", server, staging=Staging(memory), poll=0.02) as hook:
        hook.pull(0)
        damaged = damage(hook)
        before = (damaged / "model.safetensors").read_bytes()
        publish(job, 2)
        next_copy = copy_name(job.version(2), 2, "run-2-0", "F32")
        fake.refuses = frozenset({str(damaged.with_name(next_copy))})
        with engine_broken("stays paused"):
            hook.pull(0)
        assert fake.is_paused
        assert fake.loaded == [str(damaged)]
        assert hook.pull(0) is None
        assert not fake.is_paused
        assert fake.loaded == [str(damaged)] * 2
        assert hook.folder == damaged
        assert hook.pull(0) is None, "the newer version stays refused"
        assert (damaged / "model.safetensors").read_bytes() != before


def test_a_version_that_was_damaged_in_memory_is_neither_loaded_nor_loaded_again(
    job: SmallJob, tmp_path: Path, engine: FakeEngine
) -> None:
    """Its only file is the trainer's, so nothing can make it again."""
    place = in_memory(job, tmp_path)
    memory = SmallJob(place.options["memory_dir"])
    with ExplorerHook(job.root, "serving", engine, poll=0.02, **place.options) as hook:
        hook.pull(0)
        flip(memory.version(1) / "model.safetensors")
        engine.restart()
        for why in ("lost version 1", "lost version 1.*cannot be loaded again: .*model.safetens"):
            with engine_broken(why):
                look(place, hook)
        assert engine.served is None
        with (
            ExplorerHook(job.root, "late", FakeEngine(), **place.options) as late,
            unverified("model.safetensors"),
        ):
            late.pull(0)
        publish(memory, 2)
        pulls(hook, 2, 2)
        assert engine.answer().sequence == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_a_link_leads_to_sound_bytes_after_each_load(
    job: SmallJob, tmp_path: Path, memory: Path, restarted: bool, stack: ExitStack
) -> None:
    place, link = published(job, tmp_path), tmp_path / "model"
    first = stack.enter_context(hook_of(place, "first", LinkEngine(link), memory))
    first.pull(0)
    damage(first)
    if restarted:
        first.close()
    engine = LinkEngine(link if restarted else tmp_path / "other")
    with hook_of(place, "second", engine, memory) as second:
        second.pull(0)
        assert engine.target == second.folder
        for path in (link, engine.path):
            weights = (path / "model.safetensors").read_bytes()
            assert weights == (job.version(1) / "model.safetensors").read_bytes()


def tensors_of(linked: LinkedJob) -> list[tuple[str, int]]:
    """A byte of the header, and the first and the last of each tensor, of each file."""
    places = [("config.json", 0)]
    for path in sorted(linked.whole[0].folder.glob("*.safetensors")):
        with SafetensorsFile.open(STORAGE, path) as file:
            places += [(path.name, 9), *((path.name, e.begin) for e in file.entries)]
            places += [(path.name, entry.end - 1) for entry in file.entries]
    return places


def test_no_flipped_bit_of_a_base_gets_into_the_next_copy(job: SmallJob, tmp_path: Path) -> None:
    """Also of a tensor that no link changes."""
    linked = LinkedJob(job, tmp_path)
    untouched = linked.tensors[0].keys()
    places = tensors_of(linked)
    assert len(places) == 1 + 2 + 2 * len(untouched)
    for name, at in places:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as stage:
            staging = Staging(stage)
            base = staging.stage(linked.version(1))
            flip(base.folder / name, at)
            holds = linked.holds
            linked.follow(staging).release()
            assert linked.holds == holds + 1, "it made another base of LATEST's version"
            base.release()
