"""VLLMServer, with a real vLLM: what it generates is what was published, whatever happens."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

from explorer_hooks.engines import vllm_server
from explorer_hooks.engines.http_server import ServerTimeouts
from explorer_hooks.engines.vllm_engine import EXTENSION
from explorer_hooks.engines.vllm_server import TransferSession, VLLMServer
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import (
    EngineMismatchError,
    ServerRefusedError,
    VerificationError,
)
from syncd.protocol.names import MANIFEST
from syncd.protocol.records import encode
from tests.engines.broadcast_trainer import DEADLINE, trainer
from tests.engines.pages import IN_PROCESS
from tests.engines.server_process import asked
from tests.engines.tiny_models import (
    CONFIG,
    adapter,
    model,
    publish_adapter,
    publish_model,
    save_model,
    state,
)
from tests.engines.vllm_process import (
    MODEL,
    PYTHON,
    WAYS,
    Reloading,
    VLLMProcess,
    environment,
)
from tests.engines.waiting import LONG, wait_for
from tests.examples import FOLDER
from tests.jobs import SmallJob
from tests.rank_programs import ENVIRONMENT, ROOT
from tests.refusals import engine_broken

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = ([1, 2, 3], [200, 7], [5, 5, 5, 5, 9])


@pytest.fixture
def hook(job: SmallJob, vllm: VLLMProcess) -> Iterator[ExplorerHook]:
    with hook_of(job, vllm) as made:
        yield made


def hook_of(
    job: SmallJob, vllm: VLLMProcess, kind: type[VLLMServer] = VLLMServer, **options: Any
) -> ExplorerHook:
    return ExplorerHook(job.root, "explorer", kind(vllm.url, **options), poll=0.05)


def at_update(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Act once, right before the next load by the transfer."""
    ask = TransferSession._ask
    acts = [act]

    def ask_then(session: TransferSession, route: str, body: object = None) -> Any:
        if route == "POST /update_weights" and acts:
            acts.pop()()
        return ask(session, route, body)

    monkeypatch.setattr(TransferSession, "_ask", ask_then)


def said(vllm: VLLMProcess) -> list[list[int]]:
    return [vllm.generate(prompt).tokens for prompt in PROMPTS]


def test_requests_go_on_over_twenty_versions_and_none_mixes_two(
    job: SmallJob, hook: ExplorerHook, vllm: VLLMProcess
) -> None:
    publish_model(job, 1)
    hook.pull(LONG)
    truth = {vllm.label: vllm.generate(PROMPTS[0], 24).tokens}
    with asked(lambda: vllm.generate(PROMPTS[0], 24), threads=2) as answers:
        for step in range(2, 22):
            publish_model(job, step)
            assert hook.pull(LONG).step == step
            truth[vllm.label] = vllm.generate(PROMPTS[0], 24).tokens
            assert hook.last is not None
            assert hook.last.pause is not None
            assert not vllm.is_paused
    assert len({tuple(tokens) for tokens in truth.values()}) == 21
    whole = [answer for answer in answers if len(answer.labels) == 1]
    assert len(whole) > 20
    assert all(answer.tokens == truth[answer.labels[0]] for answer in whole)
    # What was in flight goes on, and what it says then is what the new weights say to all of it.
    order = list(truth)
    across = [answer for answer in answers if len(answer.labels) > 1]
    assert across
    for answer in answers:
        assert len(answer.tokens) == 24
        assert answer.labels == sorted(answer.labels, key=order.index)
    for answer in across[:10]:
        words = torch.tensor([[*PROMPTS[0], *answer.tokens]])
        for label, begin, end in answer.spans:
            with torch.no_grad():
                logits = (
                    model(order.index(label) + 1).float()(words).logits[0, len(PROMPTS[0]) - 1 :]
                )
            lost = (
                logits[begin:end].max(-1).values
                - logits[range(begin, end), answer.tokens[begin:end]]
            )
            # Two kernels may choose another of two that are almost alike. With what was computed of
            # the old weights this is above 5.
            assert lost.mean() < 1


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_need_not_go_on_over_two_versions(
    job: SmallJob, vllm: VLLMProcess, mode: str
) -> None:
    def is_cut() -> bool:
        return any(len(answer.tokens) < 100 for answer in answers)

    engine = Reloading(vllm.url, mode=mode)
    with (
        ExplorerHook(job.root, "explorer", engine, poll=0.05) as hook,
        asked(lambda: vllm.generate(PROMPTS[0], 100), threads=4) as answers,
    ):
        # The server may be idle when a version comes, so an abort gets more than one chance.
        for step in range(1, 5 if mode == "wait" else 60):
            publish_model(job, step)
            hook.pull(LONG)
            wait_for(lambda: answers and answers[-1].labels == [vllm.label])
            if mode == "abort" and step >= 4 and is_cut():
                break
    assert all(len(answer.labels) <= 1 for answer in answers)
    assert is_cut() == (mode == "abort")


def test_what_is_damaged_or_does_not_fit_never_reaches_it(
    job: SmallJob, hook: ExplorerHook, vllm: VLLMProcess
) -> None:
    publish_model(job, 1)
    hook.pull(LONG)
    before = said(vllm), vllm.label
    assert hook.last is not None

    def refused(error: type[Exception]) -> None:
        with pytest.raises(error):
            hook.pull(LONG)
        assert (said(vllm), vllm.label) == before
        assert not vllm.is_paused

    good = state(2)
    (first, *_, last) = good
    for step, tensors in (
        (2, {name: value for name, value in good.items() if name != last}),
        (3, good | {first: torch.zeros(256, 64, dtype=torch.bfloat16)}),
    ):
        publish_model(job, step, tensors)
        refused(EngineMismatchError)
    for step in (4, 5):
        publish_model(job, step)
        (path,) = job.version(step).glob("*.safetensors")
        content = bytearray(path.read_bytes())
        if step == 4:
            content[-1000] ^= 1
        else:
            del content[len(content) // 2 :]
        path.chmod(0o644)
        path.write_bytes(content)
        refused(VerificationError)
    publish_model(job, 6)
    assert hook.pull(LONG).step == 6
    assert said(vllm) != before[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_load_that_fails_in_the_server_is_taken_back(
    job: SmallJob, vllm: VLLMProcess, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Half of a layer is there, and then a file that is damaged since the last look at it."""
    # As of a server without --enable-scale-out.
    monkeypatch.setattr(vllm_server, "_GENERATE", "POST /nothing")
    publish_model(job, 1)
    with hook_of(job, vllm, WAYS[way], checksums=True) as hook:
        hook.pull(LONG)
        before = said(vllm)
        publish_model(job, 2)
        pause = VLLMServer.pause

        def pause_and_lose(engine: VLLMServer) -> None:
            pause(engine)
            for path in job.version(2).glob("*.safetensors"):
                path.rename(path.with_name("elsewhere"))
                some = {name: value for name, value in state(2).items() if "q_proj" in name}
                save_file(some, path)
                path.with_name("z.safetensors").write_bytes(b"no weights")
            # With it the transfer would refuse the folder before it touches the model.
            (job.version(2) / MANIFEST).unlink()

        monkeypatch.setattr(VLLMServer, "pause", pause_and_lose)
        with pytest.raises(ServerRefusedError, match="did not load"):
            hook.pull(LONG)
        assert hook.fault is None
        assert vllm.label == "step-1-version-1"
        assert said(vllm) == before


def test_an_adapter_is_served_under_its_name_until_a_full_model_comes(
    job: SmallJob, vllm: VLLMProcess
) -> None:
    base = adapter(1)
    publish_model(job, 1, state(0))
    with hook_of(job, vllm) as hook:
        hook.pull(LONG)
        plain = said(vllm)
        publish_adapter(job, 2, base)
        assert hook.pull(LONG).step == 2
        (prompt, *_) = PROMPTS
        answer = vllm.generate(prompt, 1, model="syncd", logprobs=3)
        with torch.no_grad():
            truth = base(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        assert answer.labels == ["step-2-version-2"]
        assert len(answer.logprobs[0]) >= 3
        for token, logprob in answer.logprobs[0].items():
            assert logprob == pytest.approx(float(truth[token]), abs=0.15)
        assert said(vllm) == plain  # the model itself is as it was
        publish_model(job, 3)
        assert hook.pull(LONG).step == 3
        assert [one["id"] for one in vllm.ask("/v1/models", method="GET")["data"]] == [MODEL]


#: As the page has it, of a model without a tokenizer, and what it says then.
INSIDE = """
import sys
if __name__ == "__main__":
    job_dir, base = sys.argv[1:]
    from syncd.protocol.reports import Rendezvous
    from syncd.protocol.records import parse
    from vllm import SamplingParams
{block}
        params = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)
        def say():
            (answer,) = llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], params, use_tqdm=False)
            print("said", version.step, *answer.outputs[0].token_ids, flush=True)
        say()
        hook._engine.receive(parse(Rendezvous, sys.stdin.readline().encode(), "stdin"), 1, {limit})
        say()
"""
OPTIONS = (
    "base, skip_tokenizer_init=True, enforce_eager=True, dtype='bfloat16', max_model_len=128, "
    f"worker_extension_cls={EXTENSION!r}"
)


def test_an_llm_in_the_process_says_what_the_server_says(
    job: SmallJob, vllm: VLLMProcess, tmp_path: Path
) -> None:
    """The server by the program of vllm.md, too."""
    publish_model(job, 4)
    example = (sys.executable, FOLDER / "vllm_explorer.py", job.root, vllm.url, "4")
    printed = subprocess.check_output(example, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    truth = said(vllm)[0]
    assert printed.decode() == f"step 4: {truth}\n"
    program = tmp_path / "inside.py"
    block = IN_PROCESS.replace("LLM(base)", f"LLM({OPTIONS})")
    assert block != IN_PROCESS
    program.write_text(INSIDE.format(block=textwrap.indent(block, "    "), limit=DEADLINE))
    base = save_model(tmp_path / "base", 0)
    with trainer() as sender, (tmp_path / "log").open("wb") as log:
        inside = subprocess.Popen(
            (os.environ[PYTHON], program, job.root, base),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert inside.stdout is not None
            line = f"said 4 {' '.join(map(str, truth))}\n"
            assert line in inside.stdout, (tmp_path / "log").read_text()[-6000:]
            # And what is broadcast to it, as the server says it of files.
            publish_model(job, 5)
            with hook_of(job, vllm) as hook:
                hook.pull(LONG)
            out, _ = inside.communicate(encode(sender.begin(5, 5)).decode(), timeout=LONG)
            assert sender.failure() is None
        finally:
            inside.kill()
            inside.wait()
    assert inside.returncode == 0, (tmp_path / "log").read_text()[-6000:]
    assert f"said 4 {' '.join(map(str, said(vllm)[0]))}\n" in out


ENDS = """
import os, signal, sys
from explorer_hooks.engines.http_server import HttpServer
from explorer_hooks.hook import ExplorerHook
from tests.engines.vllm_process import WAYS

job, url, way, route, when, number = sys.argv[1:]
ask = HttpServer.ask

def ask_and_end(server, asked, *told, **options):
    if asked == route and when == "before":
        os.kill(os.getpid(), int(number))
    answer = ask(server, asked, *told, **options)
    if asked == route:
        os.kill(os.getpid(), int(number))
    return answer

HttpServer.ask = ask_and_end
ExplorerHook(job, "killed", WAYS[way](url)).pull(60)
"""


@pytest.mark.parametrize(
    ("way", "route", "when", "number"),
    [
        ("transfer", "POST /start_weight_update", "after", signal.SIGKILL),
        ("transfer", "POST /update_weights", "after", signal.SIGSTOP),
        ("transfer", "POST /reset_prefix_cache", "before", signal.SIGKILL),
        ("reload", "POST /collective_rpc", "before", signal.SIGKILL),
        ("reload", "POST /collective_rpc", "after", signal.SIGKILL),
        ("reload", "POST /reset_prefix_cache", "before", signal.SIGKILL),
    ],
)
def test_a_server_that_a_lost_hook_left_paused_is_resumed_with_the_newest(
    job: SmallJob, vllm: VLLMProcess, way: str, route: str, when: str, number: int
) -> None:
    publish_model(job, 1)
    given = (str(job.root), vllm.url, way, route, when, str(int(number)))
    lost = subprocess.Popen(
        (sys.executable, "-c", ENDS, *given), env=os.environ | {"PYTHONPATH": "."}
    )
    try:
        _, status = os.waitpid(lost.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) or os.waitstatus_to_exitcode(status) == -number
        assert vllm.is_paused
        with hook_of(job, vllm) as hook:
            # Nobody knows what it has by now: it waits until it has something that is known.
            assert vllm.is_paused
            hook.pull(LONG)
            assert not vllm.is_paused
            assert vllm.label == "step-1-version-1"
            vllm.ask("/pause", mode="keep")
    finally:
        lost.kill()
    with hook_of(job, vllm) as hook:
        assert not vllm.is_paused  # paused between two loads: it goes on with what it has
        # Also a hook that comes later knows what fits: what the server was started with.
        publish_model(job, 2, {"another": torch.zeros(2)})
        with pytest.raises(EngineMismatchError):
            hook.pull(LONG)


def test_a_server_that_stops_in_a_load_is_given_the_newest_once_it_goes_on(
    job: SmallJob, vllm: VLLMProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_model(job, 1)
    with hook_of(job, vllm) as hook:
        hook.pull(LONG)
    publish_model(job, 2)
    with hook_of(job, vllm, timeouts=ServerTimeouts(load=10.0)) as hook:
        at_update(monkeypatch, lambda: vllm.send(signal.SIGSTOP))
        try:
            with engine_broken("POST /update_weights: timed out"):
                hook.pull(LONG)
        finally:
            vllm.send(signal.SIGCONT)
        assert hook.fault is not None
        assert hook.pull(LONG).step == 2
        assert vllm.label == "step-2-version-2"
        assert not vllm.is_paused
        fresh = said(vllm)
    with hook_of(job, vllm, Reloading) as hook:
        hook.pull(LONG)
    assert said(vllm) == fresh


def test_a_server_that_is_killed_in_a_load_says_what_a_fresh_one_says_and_is_brought_back(
    job: SmallJob, vllm: VLLMProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_model(job, 1)
    with hook_of(job, vllm) as hook:
        first = hook.pull(LONG)
        reloaded = said(vllm)
        hook.start()
        assert hook.may_produce()
        at_update(monkeypatch, vllm.kill)
        publish_model(job, 2)
        wait_for(lambda: hook.fault is not None)
        assert not hook.may_produce()
        hook.stop()
        vllm.restart(save_model(tmp_path / "fresh", 1))
        vllm.wait_until_up()
        assert said(vllm) == reloaded  # a server that was never reloaded, on the same weights
        hook.start()
        assert hook.wait_until_served(LONG, newer_than=first).step == 2
        wait_for(lambda: hook.fault is None)
        assert vllm.label == "step-2-version-2"
        assert hook.may_produce()
        assert said(vllm) != reloaded


@pytest.fixture
def deeper(vllm: VLLMProcess, tmp_path: Path) -> Iterator[Path]:
    """A model folder of another size to restart with; later tests get the server's own again."""
    layers = {"num_hidden_layers": 3, "layer_types": None}
    yield save_model(tmp_path / "three", 0, Qwen2Config(**CONFIG.to_diff_dict() | layers))
    vllm.restart(save_model(tmp_path / "two", 0))
    vllm.wait_until_up()


def test_a_server_that_restarts_with_a_deeper_model_serves_no_version_of_another(
    job: SmallJob, vllm: VLLMProcess, deeper: Path
) -> None:
    publish_model(job, 1)
    with hook_of(job, vllm) as hook:
        hook.pull(LONG)
        vllm.restart(deeper)
        vllm.wait_until_up()
        own = said(vllm)
        hook.start()
        wait_for(lambda: "v1 (step 1) does not fit" in str(hook.fault))
        assert vllm.label == "default"
        assert said(vllm) == own
    deeper.rename(deeper.with_name("unseen"))  # so that only the workers see what is missing
    with hook_of(job, vllm) as hook, engine_broken("lacks weights of"):
        hook.pull(LONG)
    assert vllm.is_paused
