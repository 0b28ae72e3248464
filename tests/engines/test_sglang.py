"""SGLangServer, with a real SGLang: what it generates is what was published, whatever happens."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from explorer_hooks.engines.conformance import (
    CHECKS,
    Check,
    Subject,
    make_version,
    name_of,
    random_tensors,
)
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.engines.http_server import ServerAccess
from explorer_hooks.engines.server_engine import LOADING
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import EngineBrokenError, ServerRefusedError
from tests.engines.pages import FOLLOW_SGLANG
from tests.engines.server_process import Answer, asked, load
from tests.engines.sglang_fake import FakeSGLang
from tests.engines.sglang_process import ADMIN_KEY, SGLangProcess
from tests.engines.test_ready import Probes, assert_not_ready_in_time, following
from tests.engines.tiny_models import (
    CONFIG,
    adapter,
    model,
    publish_adapter,
    publish_model,
    save_model,
    state,
)
from tests.engines.waiting import LONG, wait_for
from tests.jobs import SmallJob
from tests.rank_programs import ENVIRONMENT, ROOT
from tests.refusals import engine_broken

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = [200, 7, 5, 5, 9]
#: To the accuracy of float32; by other weights some are off by more than 1.
CLOSE = 0.002
SPECS = {name: TensorSpec("BF16", tuple(value.shape)) for name, value in state(0).items()}


def hook_of(job: SmallJob, sglang: SGLangProcess, **options: Any) -> ExplorerHook:
    return ExplorerHook(job.root, "explorer", sglang.engine(**options), poll=0.05)


@pytest.fixture
def hook(job: SmallJob, sglang: SGLangProcess) -> Iterator[ExplorerHook]:
    """Of a server that has version 1."""
    publish_model(job, 1)
    with hook_of(job, sglang) as made:
        made.pull(LONG)
        yield made


def attached(sglang: SGLangProcess) -> SGLangServer:
    engine = sglang.engine()
    engine.attach()
    return engine


@cache
def truth(step: int) -> nn.Module:
    return in_float32(model(step), CONFIG)


def in_float32(published: PreTrainedModel, config: PreTrainedConfig) -> nn.Module:
    """Not by ``float``: what it computes of positions was rounded, too."""
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    made.load_state_dict(published.state_dict())
    return made


def step_of(label: str) -> int:
    return int(label.split("-")[1])


def assert_said_by_its_labels(
    answer: Answer, prompt: list[int] = PROMPT, of_step: Callable[[int], nn.Module] = truth
) -> None:
    """Each token is as probable as the weights of its label say, given all tokens before it."""
    assert answer.tokens
    words = torch.tensor([[*prompt, *answer.tokens]])
    for label, begin, end in answer.spans:
        with torch.no_grad():
            logits = of_step(step_of(label))(words).logits
        expected = logits[0, len(prompt) - 1 :].log_softmax(-1)
        for place in range(begin, end):
            for token, logprob in answer.logprobs[place].items():
                assert abs(float(expected[place, token]) - logprob) < CLOSE, (label, place)


def test_requests_go_on_over_versions_and_each_token_is_of_the_weights_that_it_names(
    job: SmallJob, hook: ExplorerHook, sglang: SGLangProcess
) -> None:
    step = 1
    with asked(lambda: sglang.generated(PROMPT, 48), threads=2) as said:
        while step < 6 or not any(len(sglang.read(one).labels) > 1 for one in said):
            step += 1
            assert step < 40
            publish_model(job, step)
            assert hook.pull(LONG).step == step
            assert sglang.label == f"step-{step}-version-{step}"
    answers = [sglang.read(one) for one in said]
    assert {step_of(label) for answer in answers for label in answer.labels} >= {1, step}
    for answer in answers:
        assert len(answer.tokens) == 48
        assert answer.labels == sorted(answer.labels, key=step_of)
        assert_said_by_its_labels(answer)


def test_by_abort_no_answer_goes_on_over_two_versions(job: SmallJob, sglang: SGLangProcess) -> None:
    def ends(answer: dict[str, Any]) -> str:
        return str(answer["meta_info"]["finish_reason"]["type"])

    step = 0
    with (
        hook_of(job, sglang, mode="abort") as hook,
        asked(lambda: sglang.generated(PROMPT, 100), threads=2) as said,
    ):
        while step < 3 or "abort" not in map(ends, said):
            step += 1
            assert step < 40
            publish_model(job, step)
            assert hook.pull(LONG).step == step
            wait_for(lambda: said and sglang.read(said[-1]).labels == [sglang.label])
    for one in said:
        answer = sglang.read(one)
        assert len(answer.tokens) == 100 or ends(one) == "abort"
        assert len(answer.labels) <= 1
        assert_said_by_its_labels(answer)


@cache
def adapted(step: int) -> PeftModel:
    return adapter(step, in_float32(model(0), CONFIG), ["o_proj"])


def test_an_adapter_is_replaced_while_it_is_asked_and_unloaded_by_a_full_model(
    job: SmallJob, sglang: SGLangProcess
) -> None:
    named: dict[str, str] = {}

    def assert_served(step: int) -> None:
        answer = sglang.generate(PROMPT, **named)
        assert answer.labels == [f"step-{step}-version-{step}"]
        assert_said_by_its_labels(answer, of_step=adapted)
        assert_said_by_its_labels(sglang.generate(PROMPT), of_step=base)

    def base(_: int) -> nn.Module:
        return truth(0)

    def loaded() -> set[str]:
        return {one["id"] for one in sglang.ask("/v1/models", method="GET")["data"]}

    publish_model(job, 1, state(0))
    with hook_of(job, sglang) as hook:
        hook.pull(LONG)
        for step in (2, 3, 4):
            publish_adapter(job, step, adapted(step))
            with asked(lambda: sglang.generate(PROMPT, 48, **named), threads=2) as answers:
                wait_for(lambda: answers)
                assert hook.pull(LONG).step == step
            for answer in answers:
                if answer.tokens:  # it was not aborted at once
                    assert_said_by_its_labels(answer, of_step=adapted if named else base)
            named["lora_path"] = "syncd"
            assert_served(step)
        publish_adapter(job, 5, adapter(5, layers=["down_proj"]))
        with pytest.raises(ServerRefusedError, match="incompatible"):
            hook.pull(LONG)
        assert_served(4)
        assert "syncd" in loaded()
        publish_model(job, 6)
        assert hook.pull(LONG).step == 6
        assert "syncd" not in loaded()
    assert_said_by_its_labels(sglang.generate(PROMPT))


def test_no_prefix_of_the_weights_before_is_used(
    job: SmallJob, hook: ExplorerHook, sglang: SGLangProcess
) -> None:
    prompt = list(range(64))

    def cached() -> int:
        told = sglang.generated(prompt)
        assert_said_by_its_labels(sglang.read(told), prompt)
        return int(told["meta_info"]["cached_tokens"])

    assert (cached() == 0, cached() > 32) == (True, True)
    publish_model(job, 2)
    hook.pull(LONG)
    assert (cached() == 0, cached() > 32) == (True, True)


@pytest.mark.parametrize("lost", [(2,), (1, 2)], ids=["given back", "nothing to give back"])
def test_a_folder_that_it_does_not_take_is_never_served(
    job: SmallJob,
    hook: ExplorerHook,
    sglang: SGLangProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[int, ...],
) -> None:
    """It goes on with what it had, or waits for a newer version if that is gone too."""
    publish_model(job, 2)
    pause = SGLangServer.pause

    def pause_and_lose(engine: SGLangServer) -> None:
        pause(engine)
        for path in (path for step in lost for path in job.version(step).glob("*.safetensors")):
            path.rename(path.with_name("elsewhere"))

    monkeypatch.setattr(SGLangServer, "pause", pause_and_lose)
    with pytest.raises(EngineBrokenError if 1 in lost else ServerRefusedError):
        hook.pull(LONG)
    monkeypatch.undo()
    if 1 in lost:
        engine: Any = hook._engine
        adapters = make_version(tmp_path / "v", {}, kind="adapter")
        with engine_broken("stays paused"):
            engine.resume()
        with pytest.raises(EngineBrokenError):
            hook.pull(0)
        with engine_broken("Load a full model first"):
            engine.load(adapters)
        engine._set_label("default")  # as if it was restarted
        with pytest.raises(ServerRefusedError):  # it is asked
            engine.load(adapters)
        publish_model(job, 3)
        assert hook.pull(LONG).step == 3
    else:
        assert sglang.label == "step-1-version-1"
    assert hook.fault is None
    assert_said_by_its_labels(sglang.generate(PROMPT))


#: What needs that the weights are read through the version's own storage.
_READS = {"a_read_error_at_any_tensor_changes_nothing", "a_file_that_is_cut_short_changes_nothing"}


@pytest.mark.parametrize("check", [c for c in CHECKS if name_of(c) not in _READS], ids=name_of)
def test_it_does_what_every_engine_does(
    check: Check, sglang: SGLangProcess, tmp_path: Path
) -> None:
    def make() -> SGLangServer:
        engine = sglang.engine()
        engine._set_label("default")  # a check can end in the middle of a load
        engine.attach()
        return engine

    subject = Subject(
        make=make,
        served=SGLangServer._named_folder,
        expected=lambda version: str(version.folder),
        tensors=SPECS,
    )
    check(subject, tmp_path)


def test_a_second_hook_is_noticed_and_does_not_resume_it_in_a_load(
    sglang: SGLangProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (
        make_version(tmp_path / f"v{n}", random_tensors(SPECS, n), sequence=n) for n in (1, 2, 3)
    )
    engine, other = attached(sglang), attached(sglang)
    load(engine, first)
    other.prepare(second)  # by then nobody is at a load
    other.pause()
    other.load(second)
    with engine_broken("in the middle of a load by another hook"):
        engine.prepare(third)
    assert sglang.label.startswith(LOADING)
    assert not engine.still_serves(first)
    other.reset_cache()
    other.resume()
    assert not engine.still_serves(first)
    assert "has step-2-version-2, but this hook loaded step-1-version-1" in caplog.text
    other._set_label("default")  # as if it was restarted
    caplog.clear()
    assert not engine.still_serves(first)
    assert "another hook" not in caplog.text


def test_the_code_of_the_page_loads_the_newest_and_names_its_folder(
    job: SmallJob, sglang: SGLangProcess
) -> None:
    publish_model(job, 3)
    code = FOLLOW_SGLANG.replace("SGLangServer(url)", "SGLangServer(url, access=access)")
    assert code != FOLLOW_SGLANG
    access = ServerAccess(admin_api_key=ADMIN_KEY)
    exec(code, {"job_dir": job.root, "url": sglang.url, "access": access})  # noqa: S102 # what a user pastes
    assert sglang.label == "step-3-version-1"
    folder = str(job.version(1))
    assert [sglang.info[name] for name in ("model_path", "served_model_name")] == [folder] * 2
    assert [one["id"] for one in sglang.ask("/v1/models", method="GET")["data"]] == [folder]
    assert_said_by_its_labels(sglang.generate(PROMPT))


def test_a_key_that_is_missing_is_asked_for_by_name(sglang: SGLangProcess) -> None:
    for given in (None, ServerAccess(admin_api_key="another")):
        engine = SGLangServer(sglang.url, access=given)
        with pytest.raises(ServerRefusedError, match=r"401 .* SYNCD_ADMIN_API_KEY"):
            engine.attach()
        engine.close()


def test_it_has_the_routes_of_the_fake(sglang: SGLangProcess) -> None:
    paths = sglang.ask("/openapi.json", method="GET")["paths"]
    for path, methods in FakeSGLang("").paths().items():
        assert paths[path].keys() >= methods.keys()


ENDS = """
import os, signal, sys
from explorer_hooks import ExplorerHook, SGLangServer, ServerAccess
from explorer_hooks.engines.http_server import HttpServer

job, url, key, route, number = sys.argv[1:]
ask = HttpServer.ask

def ask_and_end(server, asked, *told, **options):
    answer = ask(server, asked, *told, **options)
    if asked == route:
        os.kill(os.getpid(), int(number))
    return answer

HttpServer.ask = ask_and_end
ExplorerHook(job, "killed", SGLangServer(url, access=ServerAccess(admin_api_key=key))).pull(60)
"""


@pytest.mark.parametrize(
    ("route", "is_torn"),
    [("POST /pause_generation", False), ("POST /update_weights_from_disk", True)],
)
def test_a_server_that_a_killed_hook_left_paused_is_resumed_with_the_newest(
    job: SmallJob, sglang: SGLangProcess, route: str, is_torn: bool
) -> None:
    publish_model(job, 1)
    with hook_of(job, sglang) as hook:
        hook.pull(LONG)
    given = (str(job.root), sglang.url, ADMIN_KEY, route, str(int(signal.SIGKILL)))
    lost = subprocess.run(
        (sys.executable, "-c", ENDS, *given),
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert lost.returncode == -signal.SIGKILL
    assert sglang.label.startswith(LOADING) == is_torn
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(sglang.generate, PROMPT)
        with hook_of(job, sglang) as hook:
            if not is_torn:  # it goes on with what it has
                waits.result(LONG)
            assert waits.done() != is_torn
            with engine_broken("stopped in the middle") if is_torn else nullcontext():
                hook._engine.resume()
            hook.pull(LONG)
            answer = waits.result(LONG)
    assert_said_by_its_labels(answer)
    assert not is_torn or answer.labels == ["step-1-version-1"]


def test_a_server_that_is_killed_is_not_ready_before_its_reload(
    job: SmallJob, sglang: SGLangProcess, tmp_path: Path
) -> None:
    publish_model(job, 1)
    file = tmp_path / "ready"
    probes = Probes(
        file, sglang.url, "/model_info", generate=lambda: sglang.generate(PROMPT).tokens
    )
    options = ("--engine", "sglang", "--url", sglang.url, "--ready-file", file)
    with following(job, *options, SYNCD_ADMIN_API_KEY=ADMIN_KEY) as follow, probes.running():
        wait_for(probes.is_ready)
        loaded = sglang.generate(PROMPT).tokens
        sglang.kill()
        killed = len(probes.seen) + 1
        sglang.restart(save_model(tmp_path / "base", 0))
        sglang.wait_until_up()
        wait_for(lambda: len(probes.seen) > killed and probes.is_ready())
        back = probes.seen[killed:]
        assert_not_ready_in_time(follow, probes)
    assert {tuple(probe.tokens or ()) for probe in back if probe.is_ready} == {tuple(loaded)}
    assert [probe for probe in back if probe.is_ready and not probe.is_loaded] == []
    assert any(probe.labels == ("default", "default") for probe in back)
    assert_said_by_its_labels(sglang.generate(PROMPT))
