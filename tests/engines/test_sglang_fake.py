"""SGLangServer with what a real SGLang cannot be made to do; test_sglang.py has the rest."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.engines import sglang_server
from explorer_hooks.engines.conformance import make_version, random_tensors
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.engines.http_server import ServerTimeouts
from explorer_hooks.engines.server_engine import LOADING
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion
from syncd.protocol.errors import ServerBusyError
from tests.engines.server_process import load
from tests.engines.sglang_fake import FakeSGLang
from tests.engines.test_vllm_caches import SOUND, TEXT, VISION
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.refusals import engine_broken, invalid, unfit

LONG = 60.0
TENSORS = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("BF16", (4,))}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_version(tmp_path / "base", random_tensors(TENSORS, 9), sequence=9).folder


@pytest.fixture
def fake(base: Path) -> FakeSGLang:
    return FakeSGLang(str(base))


@pytest.fixture
def engine(fake: FakeSGLang) -> Iterator[SGLangServer]:
    engine = attached(fake)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries to flush a server serves for no time."""
    monkeypatch.setattr(sglang_server, "_BETWEEN_FLUSHES", (0.0,) * 7)


def version(folder: Path, sequence: int, **options: Any) -> LeasedVersion:
    tensors = random_tensors(TENSORS, sequence)
    return make_version(folder / f"v{sequence}", tensors, sequence=sequence, **options)


def engine_of(fake: FakeSGLang, **options: Any) -> SGLangServer:
    settings = {"timeouts": ServerTimeouts(start=0.0), "transport": fake.transport}
    return SGLangServer("http://127.0.0.1:1", **{**settings, **options})


def attached(fake: FakeSGLang, **options: Any) -> SGLangServer:
    engine = engine_of(fake, **options)
    engine.attach()
    return engine


def test_what_generates_nothing_is_broken(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    fake.faults["/generate"] = "the scheduler is gone"
    with engine_broken("scheduler is gone"):
        load(engine, version(tmp_path, 1))


def test_a_server_without_the_routes_is_said_so(base: Path) -> None:
    fake = FakeSGLang(str(base), without=frozenset({"/pause_generation"}))
    with invalid("has no route POST /pause_generation"):
        engine_of(fake).attach()
    fake = FakeSGLang(str(base), without=frozenset({"/load_lora_adapter"}))
    assert attached(fake).kinds == {"full"}


def test_a_grammar_that_compiles_holds_up_no_load(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    """A paused server never compiles it, and refuses to flush its caches until it has."""
    fake.running, fake.compiling = 2, 1
    load(engine, version(tmp_path, 1))
    assert fake.weight_version == "step-1-version-1"
    assert (fake.is_paused, fake.running, fake.aborted) == (False, 3, 0)
    assert fake.loaded == [str(tmp_path / "v1")]


def test_a_grammar_that_comes_while_it_loads_leaves_it_serving_the_new_weights(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    """A request that is being tokenized at the pause comes to a paused scheduler."""
    engine.pause()
    engine.load(version(tmp_path, 1))
    fake.compiling = 1
    engine.reset_cache()
    engine.resume()
    assert fake.weight_version == "step-1-version-1"
    assert (fake.is_paused, fake.running, fake.aborted) == (False, 1, 0)


def test_what_a_killed_hook_left_with_a_grammar_to_compile_serves_again(
    fake: FakeSGLang, tmp_path: Path
) -> None:
    """Of caches that may be those of other weights nothing goes on: its requests are returned."""
    attached(fake).pause()
    fake.weight_version, fake.compiling = f"{LOADING}-step-3-version-3", 1
    engine = attached(fake)
    assert fake.is_paused
    load(engine, version(tmp_path, 4))
    assert (fake.is_paused, fake.running, fake.aborted) == (False, 0, 1)


def test_a_server_that_refuses_every_flush_goes_on_with_what_it_has(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    load(engine, version(tmp_path, 1))
    fake.faults["/flush_cache"] = "something runs"
    with pytest.raises(ServerBusyError, match="refuses to flush its caches"):
        load(engine, version(tmp_path, 2))
    assert (fake.is_paused, fake.weight_version) == (False, "step-1-version-1")
    fake.faults.clear()
    load(engine, version(tmp_path, 3))
    assert fake.weight_version == "step-3-version-3"


def test_with_caches_of_the_weights_before_it_stays_paused_also_for_the_next_hook(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    engine.pause()
    engine.load(version(tmp_path, 1))
    fake.faults["/flush_cache"] = "something runs"
    with pytest.raises(ServerBusyError):
        engine.reset_cache()
    with engine_broken("its caches hold results of the previous weights"):
        engine.resume()
    assert fake.is_paused
    assert fake.weight_version.startswith(LOADING)
    fake.faults.clear()
    second = attached(fake)
    assert fake.is_paused
    load(second, version(tmp_path, 2))
    assert not fake.is_paused
    assert fake.weight_version == "step-2-version-2"


def test_a_server_that_cannot_be_labelled_is_not_resumed_before_it_has_a_version(
    base: Path, tmp_path: Path
) -> None:
    fake = FakeSGLang(str(base), without=frozenset({"/update_weight_version"}))
    fake.is_paused = True  # by a hook that was killed in the middle of a load
    engine = attached(fake)
    assert fake.is_paused
    assert engine.kinds == {"full"}
    load(engine, version(tmp_path, 1))
    assert not fake.is_paused
    assert fake.weight_version == "step-1-version-1"


def test_a_load_of_another_hook_that_was_killed_in_it_is_not_waited_for_for_ever(
    job: SmallJob, fake: FakeSGLang
) -> None:
    """Where a newer version is there already, nothing else would heal the server."""
    fake.model_path = "elsewhere"
    engine = engine_of(fake, timeouts=ServerTimeouts(load=0.05))
    publish(job, 1)
    with ExplorerHook(job.root, "explorer", engine, poll=0.02) as hook:
        hook.pull(0)
        publish(job, 2)
        fake.weight_version, fake.is_paused = f"{LOADING}-full-step-2-version-2", True
        with engine_broken("in the middle of a load by another hook"):
            hook.pull(0)
        hook.start()
        assert hook.wait_until_served(LONG, newer_than=hook.version).step == 2
    assert (fake.weight_version, fake.is_paused) == ("step-2-version-2", False)


@pytest.mark.parametrize(
    ("config", "encodes", "env", "stays"),
    [
        (VISION, None, {}, True),
        (SOUND, True, {"SGLANG_VLM_CACHE_SIZE_MB": "100"}, True),
        (SOUND, True, {"SGLANG_VLM_CACHE_SIZE_MB": "0"}, False),
        (VISION, False, {}, False),
        (TEXT, True, {}, False),
    ],
)
def test_a_version_is_refused_if_encoded_images_of_the_old_weights_would_stay(
    engine: SGLangServer,
    fake: FakeSGLang,
    tmp_path: Path,
    config: object,
    encodes: bool | None,
    env: dict[str, str],
    stays: bool,
) -> None:
    fake.encodes, fake.env = encodes, env
    files = {"config.json": json.dumps(config).encode()}
    with unfit("SGLANG_VLM_CACHE_SIZE_MB=0") if stays else nullcontext():
        load(engine, version(tmp_path, 1, files=files))
    assert (fake.loaded == []) is stays
