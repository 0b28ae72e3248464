"""What VLLMServer asks for by the routes that there are: a server that says so, without a vLLM."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch

from explorer_hooks.engines.conformance import TensorBytes, make_version
from explorer_hooks.engines.server_engine import LOADING
from explorer_hooks.engines.vllm_engine import EXTENSION, VLLMEngine, workers_of
from explorer_hooks.engines.vllm_server import VLLMServer
from syncd.protocol.errors import (
    BroadcastError,
    EngineBrokenError,
    EngineMismatchError,
    ServerRefusedError,
    SyncdError,
)
from syncd.protocol.reports import GroupMember, Rendezvous
from tests.refusals import engine_broken, unfit

ROUTES = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/v1/completions")
LABELS = ("/weight_info", "/update_weight_version")
OPTIONS = ("/server_info",)
TRANSFER = (
    *OPTIONS,
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
#: The name of a worker's transfer, and the state of one that syncd does not know.
STATE = "weight_transfer_engine"
DIFFERS = {"is_open": False, "holds": None, "differences": "load_model: 'model' instead of ''"}
WEIGHT = TensorBytes("F32", (1,), b"1234")
MEETING = Rendezvous(
    offer="0123456789ab",
    generation=1,
    group_name="group",
    address="127.0.0.1",
    port=1,
    world_size=3,
    backend="gloo",
    members=(GroupMember(name="e", session="s", workers=2, rank_offset=1),),
    save_id="run-7-3",
)


def states(*opened: bool, holds: str | None = None) -> list[dict[str, object]]:
    """Of a transfer in each worker."""
    return [{"is_open": one, "holds": holds} for one in opened]


class Routes:
    """Answers as vLLM's routes do, and writes down what changes it."""

    def __init__(
        self,
        *more: str,
        labels: Sequence[str] = LABELS,
        label: str = "default",
        paused: bool = False,
        extension: str = "",
        replicas: int = 1,
        device: str | None = None,
        answers: Mapping[str, object] | None = None,
    ) -> None:
        self.asked: list[str] = []
        self.answers = dict(answers or {})
        self.refuses: bool | str = False  # all folders, or one
        self.paths = {*ROUTES, *labels, *more}
        self.told: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "policy", "root": "elsewhere"}]},
            "/weight_info": {"weight_version": label},
            "/is_paused": {"is_paused": paused},
            "/server_info": {
                "vllm_config": {
                    "parallel_config": {
                        "worker_extension_cls": extension,
                        "data_parallel_size": replicas,
                        "world_size": 2,
                    },
                    "device_config": {"device": device} if device else None,
                    "weight_transfer_config": {"backend": "syncd"}
                    if "/update_weights" in more
                    else None,
                }
            },
        }

    def extend(self, extension: str) -> None:
        """As if it was restarted with an extension."""
        config = self.told["/server_info"]["vllm_config"]
        config["parallel_config"]["worker_extension_cls"] = extension

    def engine(self, **options: Any) -> VLLMServer:
        transport = httpx2.MockTransport(self._answer)
        return VLLMServer("http://127.0.0.1:1/v", transport=transport, **options)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.removeprefix("/v")
        if path == "/openapi.json":
            paths = {one: {"get": {}, "post": {}} for one in self.paths}
            return httpx2.Response(200, json={"paths": paths})
        if path == "/collective_rpc":
            method = json.loads(request.content)["method"]
            self.asked.append(method)
            answer = self.answers.get(method, [{"failed": None}] * 2)
            if answer is None:
                return httpx2.Response(500, text="it has failed")
            return httpx2.Response(200, json={"results": answer})
        if path == "/update_weight_version":
            self.label = json.loads(request.content)["new_version"]
            self.asked.append(f"label {self.label}")
        elif path == "/v1/completions":
            return httpx2.Response(200, json={"choices": [{"text": "a"}]})
        elif path == "/update_weights":
            self.asked.append(path)
            told = json.loads(request.content)["update_info"]
            if self.refuses in {True, told["folder"]}:
                return httpx2.Response(500, text="a file is missing")
            self.answers[STATE] = states(True, True, holds=told["label"])
        elif path not in self.told:
            self.asked.append(f"{path} {request.url.params.get('mode', '')}".strip())
        return httpx2.Response(200, json=self.told.get(path, {}))


def stays_paused(engine: VLLMServer) -> None:
    with engine_broken("stays paused"):
        engine.resume()


@pytest.mark.parametrize(
    ("opened", "begins"),
    [
        ((False, False), ["/start_weight_update"]),
        ((True, True), []),  # a hook was killed before it finished
        ((True, False), ["/finish_weight_update", "/start_weight_update"]),  # the load failed
    ],
)
def test_a_folder_is_loaded_by_the_transfer_of_a_server_that_has_it(
    tmp_path: Path, opened: tuple[bool, ...], begins: list[str]
) -> None:
    """Also a tied model on a CPU, without the extension."""
    routes = Routes(*TRANSFER, "/reset_encoder_cache", device="cpu", label="step-1")
    routes.answers[STATE] = states(*opened)
    version = make_version(tmp_path / "v1", {"model.embed_tokens.weight": WEIGHT})
    engine = routes.engine()
    engine.check(version)
    engine.pause()
    engine.load(version)
    engine.reset_cache()
    engine.resume()
    assert routes.asked == [
        STATE,
        "/pause keep",
        f"label {LOADING}-full-step-1-version-1",
        "/init_weight_transfer_engine",
        STATE,
        *begins,
        "/update_weights",
        STATE,
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/reset_encoder_cache",
        "label step-1-version-1",
        "/resume",
    ]


def test_a_folder_that_the_transfer_refuses_is_taken_back(tmp_path: Path) -> None:
    routes = Routes(*TRANSFER, label="step-1")
    routes.answers[STATE] = states(False, False)
    engine = routes.engine()
    engine.load(make_version(tmp_path / "v1", {}))
    routes.refuses = True
    with pytest.raises(ServerRefusedError, match="a file is missing"):
        engine.load(make_version(tmp_path / "v2", {}, sequence=2))
    stays_paused(engine)


@pytest.mark.parametrize(
    ("routes", "options", "why"),
    [
        (TRANSFER, {"answers": {STATE: [DIFFERS, DIFFERS]}}, "another interface .*load_model"),
        (TRANSFER, {"answers": {STATE: None}}, "does not report .*it has failed"),
        (TRANSFER, {"answers": {STATE: []}}, "does not report .*unexpected"),
        (TRANSFER, {"replicas": 2}, "--data-parallel-size"),
        ((*OPTIONS, "/update_weights"), {}, "/init_weight_transfer_engine"),
    ],
)
def test_a_transfer_that_is_not_known_is_left_alone_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, routes: Any, options: Any, why: str
) -> None:
    server = Routes(*routes, **options)
    engine = server.engine()
    version = make_version(tmp_path / "v1", {})
    for _ in range(2):
        engine.attach()  # the server was started anew
        engine.check(version)
        engine.load(version)
    assert server.asked.count("reload_weights") == 2
    (line,) = [one.getMessage() for one in caplog.records if "by reload_weights" in one.message]
    assert re.search(why, line)


def test_a_server_that_is_started_anew_with_the_transfer_is_given_versions_by_it(
    tmp_path: Path,
) -> None:
    routes = Routes(*TRANSFER)
    routes.answers[STATE] = states(False)
    config = routes.told["/server_info"]["vllm_config"]
    transfer, config["weight_transfer_config"] = config["weight_transfer_config"], None
    engine = routes.engine()
    engine.attach()
    version = make_version(tmp_path / "v1", {})
    engine.load(version)
    assert "reload_weights" in routes.asked
    config["weight_transfer_config"] = transfer
    routes.asked.clear()
    engine.load(version)
    assert "/update_weights" in routes.asked
    assert "reload_weights" not in routes.asked


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_what_is_held_by_a_half_loaded_server_is_not_finished_by_it(mode: str) -> None:
    """``wait`` would let vLLM go on with it until it is done."""
    routes = Routes(label=f"{LOADING}-full-step-3-version-3")
    routes.engine(mode=mode).attach()
    assert routes.asked == ["/pause keep"]


@pytest.mark.parametrize("paused", [False, True])
def test_a_paused_server_that_cannot_be_labelled_stays_paused(paused: bool) -> None:
    """A release without labels: was a hook killed in the middle of a load, nothing says so."""
    routes = Routes("/is_paused", labels=(), paused=paused)
    engine = routes.engine()
    engine.attach()
    assert routes.asked == ([] if paused else ["/resume"])
    if paused:
        stays_paused(engine)


def test_a_label_that_nobody_can_change_is_none() -> None:
    """Else what was given would count as lost, and be loaded again and again."""
    engine = Routes("/is_paused", labels=LABELS[:1]).engine()
    engine.attach()
    assert not engine._said_label()


@pytest.mark.parametrize("shape", [5, "text", [5], {"a": 5}, [{"version": [5]}]])
@pytest.mark.parametrize(
    "answer", ["data", "vllm_config", "weight_version", "results", "choices", "weight_versions"]
)
def test_an_answer_of_another_shape_is_a_refusal(
    tmp_path: Path, answer: str, shape: object
) -> None:
    routes = Routes(*TRANSFER, "/inference/v1/generate", label="step-1")
    routes.answers[STATE] = shape if answer == "results" else states(False)
    told = {answer: shape}
    routes.told |= {
        "/v1/models": {"data": [{"id": "policy"}]} | told,
        "/weight_info": {"weight_version": "step-1"} | told,
        "/inference/v1/generate": {"choices": [told]} | told,
    }
    routes.told["/server_info"] |= told
    engine = routes.engine()
    version = make_version(tmp_path / "v1", {})
    with suppress(SyncdError):
        engine.attach()
        engine.prepare(version)
        engine.check(version)
        engine.pause()
        engine.load(version)
        engine.reset_cache()
        engine.resume()
    engine.still_serves(version)


def test_an_llm_of_a_folder_without_weights_takes_its_first_version_unseen(tmp_path: Path) -> None:
    """As with ``load_format="dummy"``."""
    llm = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    assert not VLLMEngine(llm)._fits.is_known


@pytest.mark.parametrize(
    ("routes", "extension", "replicas", "found"),
    [
        ((), EXTENSION, 1, 0),
        (OPTIONS, "", 1, 0),
        (OPTIONS, "another.Extension", 1, 0),
        (OPTIONS, EXTENSION, 2, 0),
        (OPTIONS, EXTENSION, 1, 2),
    ],
)
def test_who_takes_broadcasts_is_looked_for_and_no_method_that_is_not_there_is_called(
    routes: tuple[str, ...], extension: str, replicas: int, found: int
) -> None:
    """An error in a worker would leave the answers of the others unread, for the next call."""
    server = Routes(*routes, extension=extension, replicas=replicas)
    engine = server.engine()
    assert engine.workers == 0
    assert server.asked == []  # nobody is there yet
    engine.attach()
    assert engine.workers == engine.workers == found
    assert server.asked == ["/resume", *(["syncd_leave"] if found else [])]


def test_a_broadcast_is_held_by_all_workers_before_the_first_one_changes() -> None:
    routes = Routes(*OPTIONS, "/reset_encoder_cache", extension=EXTENSION)
    engine = routes.engine()
    engine.pause()
    engine.receive(MEETING, 1, 5.0)
    engine.reset_cache()
    engine.resume()
    assert routes.asked == [
        "/pause keep",
        "syncd_receive",
        f"label {LOADING}-full-step-7-broadcast-run-7-3",
        "syncd_load",
        "/reset_prefix_cache",
        "/reset_encoder_cache",
        "label step-7-broadcast-run-7-3",
        "/resume",
    ]


@pytest.mark.parametrize(
    ("answer", "misfits"),
    [
        (None, False),
        ([], False),
        ([None, None], False),
        ([{"failed": None}, {"failed": "gone", "misfits": False}], False),
        ([{"failed": None}, {"failed": "a shape", "misfits": True}], True),
    ],
)
def test_what_not_all_workers_have_is_loaded_by_none(answer: object, misfits: bool) -> None:
    routes = Routes(answers={"syncd_receive": answer})
    engine = routes.engine()
    engine.pause()
    with pytest.raises(BroadcastError) as failed:
        engine.receive(MEETING, 1, 5.0)
    assert isinstance(failed.value.__cause__, EngineMismatchError) == misfits
    engine.resume()
    assert routes.asked == ["/pause keep", "syncd_receive", "syncd_leave", "/resume"]


each_answer = pytest.mark.parametrize("answer", [None, [{"failed": None}, {"failed": "no memory"}]])


@each_answer
def test_what_not_all_workers_have_loaded_is_not_served(answer: object) -> None:
    routes = Routes(answers={"syncd_load": answer})
    engine = routes.engine()
    engine.pause()
    with pytest.raises(EngineBrokenError):
        engine.receive(MEETING, 1, 5.0)
    stays_paused(engine)
    assert routes.label.startswith(LOADING)
    assert "/resume" not in routes.asked


def test_an_llm_is_asked_how_it_was_made() -> None:
    told = SimpleNamespace(worker_extension_cls=EXTENSION, data_parallel_size=1, world_size=4)
    assert workers_of(told) == 4
    told.worker_extension_cls = ""
    assert workers_of(told) == 0


def test_what_is_loaded_after_a_load_that_failed_is_loaded_twice(tmp_path: Path) -> None:
    """Of the first time vLLM may leave out parts of layers that the failed one had begun."""
    routes = Routes(label=f"{LOADING}-full-step-3-version-3")
    engine = routes.engine()
    engine.attach()
    version = make_version(tmp_path / "v1", {})
    for loads in (2, 1):
        routes.asked.clear()
        engine.load(version)
        assert routes.asked.count("reload_weights") == loads


TIED = '{"tie_word_embeddings": true}'
UNTIED = '{"tie_word_embeddings": false}'
HEAD = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("tensors", "config", "why"),
    [
        (("model.embed_tokens.weight",), UNTIED, "is tied"),
        (HEAD, TIED, "perhaps"),
        (HEAD, "{}", "perhaps"),
        (HEAD, f'{{"tie_word_embeddings": false, "text_config": {TIED}}}', "perhaps"),
        ((*HEAD, "model.layers.0.mlp.experts.3.up_proj.weight"), UNTIED, "experts"),
        (HEAD, '{"tie_word_embeddings": false, "num_local_experts": 8}', "experts"),
        (HEAD, UNTIED, None),
    ],
)
def test_on_a_cpu_a_model_that_vllm_reloads_in_part_is_refused_before_the_pause(
    tmp_path: Path, tensors: Iterable[str], config: str, why: str | None
) -> None:
    version = make_version(
        tmp_path / "v1", dict.fromkeys(tensors, WEIGHT), files={"config.json": config.encode()}
    )
    routes = Routes(*OPTIONS, device="cpu")
    engine = routes.engine()
    if why is not None:
        with unfit(rf"(?s){why}.*--weight-transfer-config"):
            engine.check(version)
        assert routes.asked == []
        routes.extend(EXTENSION)  # it was restarted, as the message says
        engine.check(version)
    for device, extension, call in (
        ("cpu", EXTENSION, "syncd_load_folder"),
        ("cuda", "", "reload_weights"),
        *([("cpu", "", "reload_weights")] if why is None else []),
    ):
        routes = Routes(*OPTIONS, device=device, extension=extension)
        engine = routes.engine()
        engine.check(version)
        engine.load(version)
        assert call in routes.asked


def test_a_server_that_does_not_say_where_it_runs_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = make_version(tmp_path / "v1", {"model.embed_tokens.weight": WEIGHT})
    for routes in (Routes(), Routes(*OPTIONS)):
        caplog.clear()
        engine = routes.engine()
        for _ in range(2):
            engine.check(version)
            engine.load(version)
        assert routes.asked.count("reload_weights") == 2
        assert caplog.text.count("does not report whether it runs on a CPU") == 1


def test_an_llm_on_a_cpu_refuses_what_it_reloads_in_part(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v1", {"model.embed_tokens.weight": WEIGHT})
    made = SimpleNamespace(
        device_config=SimpleNamespace(device=torch.device("cpu")),
        parallel_config=SimpleNamespace(worker_extension_cls=""),
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=made))
    with unfit("tied"):
        VLLMEngine(llm).check(version)
    made.parallel_config.worker_extension_cls = EXTENSION
    VLLMEngine(llm).check(version)


@each_answer
def test_what_not_all_workers_load_of_a_folder_is_taken_back(
    tmp_path: Path, answer: object
) -> None:
    version = make_version(tmp_path / "v1", {})
    routes = Routes(*OPTIONS, device="cpu", extension=EXTENSION)
    engine = routes.engine()
    engine.check(version)
    engine.load(version)
    routes.answers = {"syncd_load_folder": answer}
    with pytest.raises(ServerRefusedError):
        engine.load(make_version(tmp_path / "v2", {}, sequence=2))
    stays_paused(engine)


def test_a_version_that_is_given_again_must_have_the_digests_that_it_had_first(
    tmp_path: Path,
) -> None:
    """However often: a server that has it wrong twice in the same way has it wrong."""
    routes = Routes("/weight_checker")
    engine = routes.engine(checksums=True)
    engine.attach()
    first, second = (make_version(tmp_path / f"v{n}", {}, sequence=n) for n in (1, 2))
    for version, checksums in ((first, "one"), (second, "two"), (second, "two"), (first, "one")):
        routes.told["/weight_checker"] = {"checksums": checksums}
        engine.load(version)
    routes.told["/weight_checker"] = {"checksums": "another"}
    for _ in range(2):
        with pytest.raises(ServerRefusedError, match="differ from the digests after"):
            engine.load(first)


def test_a_server_whose_workers_do_not_answer_does_not_serve(tmp_path: Path) -> None:
    routes = Routes(label="step-1-version-1")
    engine = routes.engine()
    version = make_version(tmp_path / "v1", {})
    assert engine.still_serves(version)
    routes.answers["check_health"] = None
    assert not engine.still_serves(version)
