"""SGLangServer with a fake server; and what all server engines promise."""

import json
import logging
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from explorer_hooks import pipeline
from explorer_hooks.engines import http_server, sglang_server
from explorer_hooks.engines.conformance import (
    CHECKS,
    Check,
    Subject,
    make_version,
    name_of,
    random_tensors,
)
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.engines.http_server import HttpServer
from explorer_hooks.engines.server_engine import LOADING
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.follow import command
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import LeasedVersion
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    EngineBrokenError,
    ServerBusyError,
    ServerRefusedError,
    ServerUnreachableError,
)
from tests.engines.sglang_fake import FakeSGLang
from tests.engines.sglang_fake_process import sglang_process
from tests.engines.test_vllm_caches import SOUND, TEXT, VISION
from tests.engines.waiting import wait_for
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.ports import free_port
from tests.refusals import engine_broken, invalid, unfit

LONG = 60.0
TENSORS = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("BF16", (4,))}
ADAPTER = {"adapter_config.json": b"{}"}


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


@pytest.fixture
def hook(job: SmallJob, fake: FakeSGLang) -> Iterator[ExplorerHook]:
    """Of a server that has taken its first version unseen."""
    fake.model_path = "elsewhere"
    publish(job, 1)
    with ExplorerHook(job.root, "server", engine_of(fake), poll=0.02) as made:
        made.pull(LONG)
        yield made


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two tries to flush a server serves for no time."""
    monkeypatch.setattr(sglang_server, "_BETWEEN_FLUSHES", (0.0,) * 7)


def version(folder: Path, sequence: int, **options: Any) -> LeasedVersion:
    tensors = random_tensors(TENSORS, sequence)
    return make_version(folder / f"v{sequence}", tensors, sequence=sequence, **options)


def engine_of(fake: FakeSGLang, **options: Any) -> SGLangServer:
    settings = {"start_timeout": 0.0, "transport": fake.transport}
    return SGLangServer("http://127.0.0.1:1", **{**settings, **options})


def attached(fake: FakeSGLang, **options: Any) -> SGLangServer:
    engine = engine_of(fake, **options)
    engine.attach()
    return engine


def load(engine: SGLangServer, version: LeasedVersion) -> None:
    """As a hook does."""
    engine.check(version)
    engine.prepare(version)
    try:
        engine.pause()
        engine.load(version)
        engine.reset_cache()
    finally:
        engine.resume()


#: What needs that the weights are read through the version's own storage.
_READS = {"a_read_error_at_any_tensor_changes_nothing", "a_file_that_is_cut_short_changes_nothing"}


@pytest.mark.parametrize("check", [c for c in CHECKS if name_of(c) not in _READS], ids=name_of)
def test_it_does_what_every_engine_does(check: Check, tmp_path: Path) -> None:
    base = make_version(tmp_path / "base", random_tensors(TENSORS, 9), sequence=9).folder

    def make() -> SGLangServer:
        return attached(FakeSGLang(str(base)), is_local=True)

    check(
        Subject(
            make=make,
            served=SGLangServer._named_folder,
            expected=lambda version: str(version.folder),
            tensors=TENSORS,
        ),
        tmp_path,
    )


def test_requests_wait_while_it_loads_and_it_is_flushed_apart(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    fake.asked.clear()
    load(engine, version(tmp_path, 1))
    assert [path for path in fake.asked if path != "/update_weight_version"] == [
        "/pause_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/flush_cache",
        "/continue_generation",
        "/generate",
    ]
    assert fake.weight_version == "step-1-version-1"
    assert fake.served_model_name == str(tmp_path / "v1")  # no route lets it be another one


def test_what_takes_nothing_at_all_stays_paused_and_is_broken(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    fake.faults["/update_weights_from_disk"] = "out of memory"
    with engine_broken("stays paused"):
        load(engine, version(tmp_path, 1))
    assert fake.is_paused
    assert not engine.still_serves(version(tmp_path, 9))
    fake.faults.clear()
    load(engine, version(tmp_path, 2))
    assert not fake.is_paused


def test_what_generates_nothing_is_broken(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    fake.is_dead = True
    with engine_broken("scheduler is gone"):
        load(engine, version(tmp_path, 1))


def test_what_a_killed_hook_left_half_loaded_waits_for_a_version(
    fake: FakeSGLang, tmp_path: Path
) -> None:
    fake.is_paused = True
    fake.weight_version = f"{LOADING}-step-3-version-3"
    engine = attached(fake)
    assert fake.is_paused
    with engine_broken("stopped in the middle"):
        engine.resume()
    load(engine, version(tmp_path, 4))
    assert not fake.is_paused


def test_a_full_model_after_an_adapter_ends_it_and_nothing_is_held_meanwhile(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    for sequence in (1, 2):
        fake.running = 2
        load(engine, version(tmp_path, sequence, kind="adapter", files=ADAPTER))
        assert fake.adapters == {"syncd": str(tmp_path / f"v{sequence}")}
    fake.running = 2
    load(engine, version(tmp_path, 3))
    assert fake.adapters == {}


def test_an_adapter_that_it_does_not_take_leaves_it_with_the_one_before(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    load(engine, version(tmp_path, 1, kind="adapter", files=ADAPTER))
    with pytest.raises(ServerRefusedError):
        load(engine, version(tmp_path, 2, kind="adapter"))
    assert fake.adapters == {"syncd": str(tmp_path / "v1")}
    assert fake.weight_version == "step-1-version-1"


def test_a_server_without_the_routes_is_said_so(base: Path) -> None:
    fake = FakeSGLang(str(base), without=frozenset({"/pause_generation"}))
    with invalid("has no route POST /pause_generation"):
        engine_of(fake).attach()
    fake = FakeSGLang(str(base), without=frozenset({"/load_lora_adapter"}))
    assert attached(fake).kinds == {"full"}


@pytest.mark.parametrize("url", ["nowhere", "ftp://host", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with invalid("is not an address"):
        SGLangServer(url)


def test_staging_is_for_servers_of_this_host() -> None:
    assert SGLangServer("http://127.0.0.1:30000").is_local
    assert SGLangServer("http://[::1]:30000").is_local
    assert not SGLangServer("http://10.0.0.7:30000").is_local
    assert not SGLangServer("http://localhost:30000", is_local=False).is_local
    with invalid("retract, abort"):
        SGLangServer("http://localhost:1", mode="keep")


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


@pytest.mark.parametrize(("config", "warns"), [(VISION, 1), (SOUND, 1), (TEXT, 0)])
def test_a_server_of_a_model_that_sees_or_hears_is_warned_of_once(
    engine: SGLangServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: object,
    warns: int,
) -> None:
    files = {"config.json": json.dumps(config).encode()}
    for sequence in (1, 2):
        load(engine, version(tmp_path, sequence, files=files))
    assert caplog.text.count("SGLANG_VLM_CACHE_SIZE_MB=0") == warns


def test_an_engine_does_not_log_each_request(
    fake: FakeSGLang, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine_of(fake).attach()
    assert not [record for record in caplog.records if record.name == "httpx2"]


def test_a_server_that_restarts_counts_as_broken_until_it_has_its_version_again(
    job: SmallJob, fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_STILL", 0.0)
    # No folder of this host: the first version is taken unseen.
    fake.model_path = fake._started_with = "elsewhere"
    publish(job, 1)
    with ExplorerHook(job.root, "server", engine_of(fake), poll=0.02) as hook:
        hook.start()
        first = hook.wait_until_served(LONG)
        wait_for(hook.may_produce)
        fake.is_up = False
        wait_for(lambda: hook.fault is not None)
        assert not hook.may_produce()
        fake.restart()
        fake.is_up = True
        wait_for(lambda: hook.fault is None)
        assert fake.weight_version == "step-1-version-1"
        fake.is_up = False
        wait_for(lambda: hook.fault is not None)
        hook.stop()  # else it may find the server down for version 2, and up for version 1
        publish(job, 2)
        fake.restart()
        fake.loaded.clear()
        fake.is_up = True
        hook.start()
        assert hook.wait_until_served(LONG, newer_than=first).step == 2
        wait_for(lambda: hook.fault is None)
    assert fake.weight_version == "step-2-version-2"
    assert len(fake.loaded) == 1  # what it had before was not served in between


def test_a_server_that_restarts_with_another_model_gets_no_version_that_does_not_fit(
    tmp_path: Path, fake: FakeSGLang
) -> None:
    fake.model_path = "elsewhere"
    engine = attached(fake)
    other = make_version(tmp_path / "v1", random_tensors({"c": TENSORS["a"]}, 1))
    load(engine, other)
    fake.restart()  # from a folder with the tensors a and b
    fake.loaded.clear()
    with unfit("a is not in the version"):
        load(engine, other)
    assert not fake.loaded
    assert not fake.is_paused  # it serves its own model


@pytest.mark.parametrize("faults", [None, ("/pause_generation",)], ids=["away", "faulty"])
def test_a_server_that_answers_again_is_loaded_within_5_s_however_long_it_did_not(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...] | None
) -> None:
    """Time passes by the pauses of what follows; the server is another process each time."""
    monkeypatch.setattr(pipeline, "_STILL", 0.0)
    plain, port = Cancellation.pause, free_port()
    passed, failing, answers_since = 0.0, ExitStack(), None
    url = f"http://127.0.0.1:{port}"
    publish(job, 1)
    with ExitStack() as stack:
        server = stack.enter_context(sglang_process(port, "elsewhere"))

        def pause(cancel: Cancellation, seconds: float) -> bool:
            nonlocal passed, answers_since
            if passed > 300 and answers_since is None:
                answers_since = passed  # if it answers again right after the pause has begun
                failing.close()
                stack.enter_context(sglang_process(port, "elsewhere"))
            passed += seconds
            return plain(cancel, 0.001)

        hook = stack.enter_context(ExplorerHook(job.root, "server", SGLangServer(url), poll=0.1))
        hook.start()
        hook.wait_until_served(LONG)
        hook.stop()
        server.kill()
        server.wait()
        if faults is not None:
            stack.enter_context(failing)
            failing.enter_context(sglang_process(port, "elsewhere", *faults))
        monkeypatch.setattr(Cancellation, "pause", pause)
        hook.start()
        wait_for(lambda: answers_since is not None and hook.fault is None)
        assert HttpServer(url).ask("GET /model_info")["weight_version"] == "step-1-version-1"
        hook.stop()
    assert answers_since is not None
    assert passed - answers_since <= 5


def test_a_host_that_does_not_even_refuse_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_CONNECT", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as other:
        other.connect(full.getsockname())  # from now on the kernel answers nobody
        host, port = full.getsockname()
        server = HttpServer(f"http://{host}:{port}", timeout=6 * LONG)
        begun = time.monotonic()
        with pytest.raises(ServerUnreachableError):
            server.ask("POST /pause", timeout=6 * LONG)
        assert time.monotonic() - begun < LONG


def test_a_model_that_is_half_loaded_is_never_served_under_an_adapter(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path
) -> None:
    """The hook gives back what it had, an adapter, after a full model that was not taken."""
    adapter = version(tmp_path, 1, kind="adapter", files=ADAPTER)
    load(engine, adapter)
    engine.pause()
    fake.faults["/update_weights_from_disk"] = "out of memory"
    with pytest.raises(ServerRefusedError):
        engine.load(version(tmp_path, 2))
    with engine_broken("Load a full model first"):
        engine.load(adapter)
    with engine_broken("stays paused"):
        engine.resume()
    assert fake.is_paused
    fake.restart()  # it has its model again
    load(engine, adapter)
    assert fake.adapters == {"syncd": str(tmp_path / "v1")}


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
    job: SmallJob, fake: FakeSGLang, hook: ExplorerHook
) -> None:
    publish(job, 2)
    fake.faults["/flush_cache"] = "something runs"
    with pytest.raises(ServerBusyError, match="refuses to flush its caches"):
        hook.pull(LONG)
    assert hook.fault is None
    assert (fake.is_paused, fake.weight_version) == (False, "step-1-version-1")
    fake.faults.clear()
    assert hook.pull(LONG).step == 2


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


@pytest.mark.parametrize(
    ("started_with", "given"),
    [
        ({"api_key": "k"}, {"api_key": "k"}),
        ({"admin_api_key": "a"}, {"api_key": "a"}),
        ({"admin_api_key": "a"}, {"admin_api_key": "a"}),
        ({"api_key": "k", "admin_api_key": "a"}, {"api_key": "k", "admin_api_key": "a"}),
    ],
)
def test_each_route_is_given_the_key_that_it_wants(
    base: Path, tmp_path: Path, started_with: dict[str, str], given: dict[str, str]
) -> None:
    fake = FakeSGLang(
        str(base),
        api_key=started_with.get("api_key"),
        admin_api_key=started_with.get("admin_api_key"),
    )
    engine = attached(fake, **given)
    load(engine, version(tmp_path, 1, kind="adapter", files=ADAPTER))
    load(engine, version(tmp_path, 2))
    assert fake.weight_version == "step-2-version-2"


@pytest.mark.parametrize("given", [{}, {"api_key": "a"}, {"api_key": "k"}])
def test_a_key_that_is_missing_is_asked_for_by_name(base: Path, given: dict[str, str]) -> None:
    fake = FakeSGLang(str(base), api_key="k", admin_api_key="a")
    with pytest.raises(ServerRefusedError, match=r"401 .* SYNCD_API_KEY.* SYNCD_ADMIN_API_KEY"):
        engine_of(fake, **given).attach()


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


def test_an_address_with_a_secret_is_refused_and_not_shown() -> None:
    for url in (
        "http://me:hidden@localhost:1",
        "http://localhost:1/?key=hidden",
        "http://me:hidden@localhost:port",
        "http://me:hid/hidden@localhost",
        "ftp://me:hidden@localhost",
    ):
        with invalid("http://HOST:PORT") as raised:
            SGLangServer(url)
        assert "hidden" not in "".join(traceback.format_exception_only(raised.value))
        assert raised.value.__context__ is None


def test_what_is_answered_by_a_redirection_was_not_done() -> None:
    moved = httpx2.MockTransport(lambda _: httpx2.Response(307, headers={"Location": "/there"}))
    server = HttpServer("http://localhost:1", transport=moved)
    with pytest.raises(ServerRefusedError, match="307"):
        server.ask("POST /pause")


def test_a_newer_version_heals_what_cannot_be_given_back(
    job: SmallJob, fake: FakeSGLang, hook: ExplorerHook
) -> None:
    served = hook.folder
    assert served is not None
    publish(job, 2)
    fake.faults["/update_weights_from_disk"] = "out of memory"
    with pytest.raises(EngineBrokenError):
        hook.pull(LONG)
    with pytest.raises(EngineBrokenError):
        hook.pull(0)
    fake.faults.clear()
    fake.refuses = frozenset({str(served)})
    publish(job, 3)
    assert hook.pull(LONG).step == 3
    assert hook.fault is None


def test_a_second_hook_of_one_server_is_noticed_and_does_not_resume_it_in_a_load(
    engine: SGLangServer, fake: FakeSGLang, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = version(tmp_path, 1), version(tmp_path, 2)
    other = attached(fake)
    load(engine, first)
    other.prepare(second)  # by then nobody is at a load
    other.pause()
    other.load(second)
    with engine_broken("in the middle of a load by another hook"):
        engine.prepare(version(tmp_path, 3))
    assert fake.is_paused
    assert not engine.still_serves(first)
    other.reset_cache()
    other.resume()
    assert not engine.still_serves(first)
    assert "has step-2-version-2, but this hook loaded step-1-version-1" in caplog.text
    fake.restart()
    caplog.clear()
    assert not engine.still_serves(first)
    assert "another hook" not in caplog.text


def test_a_load_of_another_hook_that_was_killed_in_it_is_not_waited_for_for_ever(
    job: SmallJob, fake: FakeSGLang
) -> None:
    """Where a newer version is there already, nothing else would heal the server."""
    fake.model_path = "elsewhere"
    engine = engine_of(fake, load_timeout=0.05)
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
