"""The time from the trainer's pointer to tokens of the new weights, with vLLM on the CPU.

Repeat with ``python -m benchmarks.engines`` (some minutes), after
``export SYNCD_VLLM_PYTHON=$(python -m tests.engines.environment)``.

To tokens: a round moves the trainer's pointer to a prepared save. Then it asks the server for one
token again and again, until the token comes from the new weights. A daemon publishes, and the hook
follows in a thread. 1 % of the elements change from save to save. The ways to load take turns of
five rounds. The pause lasts from the call of ``/pause`` to the first token after ``/resume``,
without requests in flight.

Lost: the tokens that clients under a steady load miss for each reload, compared with a load of
equal length without reloads. ``by hand`` calls the server's own ``reload_weights`` and
``/reset_prefix_cache``, without pause, verification or daemon.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.machine import Report, daemon, parser, prepared, turns, whole_rounds
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from tests.engines.tiny_models import save_step
from tests.engines.vllm_process import Reloading, VLLMProcess, why_not
from tests.jobs import SmallJob

_TIMEOUT = 300.0
_PROMPT = (1, 2, 3, 4)
_CLIENTS = 4
#: Rounds of one way before the next way's turn.
_TURN = 5


class _Trainer:
    """Prepares saves of two alternating sets of weights, and moves the pointer."""

    def __init__(self, work: Path, gigabytes: float) -> None:
        self.job = SmallJob(work / "job")
        width = 128 * max(1, round((gigabytes * 1e9 / 2 / (8 * 11)) ** 0.5 / 128))
        config = Qwen2Config(
            vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=8,
            num_attention_heads=width // 64, num_key_value_heads=width // 64,
            tie_word_embeddings=False,
        )  # fmt: skip
        self.base = work / "base"
        self._config = config.to_json_string().encode()
        self._states = []
        model = Qwen2ForCausalLM(config).bfloat16()
        model.save_pretrained(self.base)
        for part in (0.0, 0.01):
            self._states.append({n: _nudged(v, part) for n, v in model.state_dict().items()})
        self.bytes = sum(value.nbytes for value in self._states[0].values())
        self.step = 0
        self._ready = 0

    def prepare(self, rounds: int) -> None:
        """Write the saves for the next rounds, without moving the pointer."""
        while self._ready < self.step + rounds:
            self._ready += 1
            state = self._states[self._ready % 2]
            files = {"huggingface/config.json": self._config}
            save_step(self.job, self._ready, "model.safetensors", state, files)

    def move(self) -> str:
        """Move the pointer; return the beginning of the new weights' labels."""
        self.step += 1
        self.job.point(self.step)
        return f"step-{self.step}-"


def _nudged(value: Tensor, part: float) -> Tensor:
    return torch.where(torch.rand(value.shape) < part, value + 0.01, value)


class _Way(NamedTuple):
    kind: Callable[[str], VLLMServer]
    stage: Path | None


def _wait_for_tokens(server: VLLMProcess, beginning: str) -> float:
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        (label,) = server.generate(_PROMPT, 1).labels
        if label.startswith(beginning):
            return time.monotonic()
    raise TimeoutError(f"no tokens of {beginning} within {_TIMEOUT:g} s")


def _tokens(
    trainer: _Trainer,
    server: VLLMProcess,
    way: _Way,
    rounds: int,
    told: dict[str, list[float]],
) -> None:
    trainer.prepare(rounds + 1)
    os.sync()  # so that no round pays for writing the inputs
    staging = Staging(way.stage) if way.stage is not None else None
    engine = way.kind(server.url)
    with ExplorerHook(trainer.job.layout.root, "bench", engine, staging=staging) as hook:
        hook.start()
        _wait_for_tokens(server, trainer.move())
        for _ in range(rounds):
            begun = time.monotonic()
            live = _wait_for_tokens(server, trainer.move()) - begun
            print(f"tokens of step {trainer.step} after {live:.2f} s", file=sys.stderr)
            hook.wait_until_served(_TIMEOUT)
            while hook.last is None or hook.last.step != trainer.step:
                time.sleep(0.01)
            told["live"].append(live)
            told["pause"].append(hook.last.pause or 0.0)
            told["load"].append(hook.last.load or 0.0)


def _all_ways(
    trainer: _Trainer,
    server: VLLMProcess,
    ways: Mapping[str, _Way],
    rounds: int,
    told: dict[str, dict[str, list[float]]],
) -> None:
    """Add the seconds of each round, in all ways; the order is reversed after each turn."""
    turns = list(ways.items())
    for begun in range(0, rounds, _TURN):
        for name, way in turns:
            _tokens(trainer, server, way, min(_TURN, rounds - begun), told[name])
        turns.reverse()


def _load(server: VLLMProcess, seconds: float, reload: Callable[[], None] | None) -> float:
    """The tokens in these seconds of a steady load, with reloads after 1/4 and 3/4 of the time."""
    end = time.monotonic() + seconds
    counts = [0] * _CLIENTS

    def ask(client: int) -> None:
        while time.monotonic() < end:
            counts[client] += len(server.generate((*_PROMPT, client), 32).tokens)

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(_CLIENTS)]
    for client in clients:
        client.start()
    begun = end - seconds
    for moment in (0.25, 0.75) if reload else ():
        time.sleep(max(0.0, begun + moment * seconds - time.monotonic()))
        reload()  # type: ignore[misc] # not None here
    for client in clients:
        client.join()
    return sum(counts) * seconds / (time.monotonic() - begun)


def _lost(
    trainer: _Trainer,
    server: VLLMProcess,
    rounds: int,
    seconds: float,
    told: dict[str, list[float]],
) -> None:
    trainer.prepare(2 * rounds + 1)
    with ExplorerHook(trainer.job.layout.root, "bench", VLLMServer(server.url)) as hook:

        def by_hook() -> None:
            trainer.move()
            hook.pull(_TIMEOUT)

        def by_hand() -> None:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(trainer.base)}}
            server.ask("/collective_rpc", body)
            server.ask("/reset_prefix_cache", reset_running_requests="true")

        by_hook()
        ways = [("none", None), ("hook", by_hook), ("by hand", by_hand)]
        for at in range(rounds):
            for name, reload in turns(ways, at):
                told[name].append(_load(server, seconds, reload))
                print(f"{at + 1} of {rounds}: {name}: {told[name][-1]:.0f} tokens", file=sys.stderr)


def _print_tokens(report: Report, ways: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for name, told in ways.items():
        if told := whole_rounds(told):
            live = told["live"]
            slow = live[0]
            if len(live) > 1:
                slow = statistics.quantiles(live, n=100, method="inclusive")[98]
            times = (f"{1000 * median(told[what]):.0f} ms" for what in ("pause", "load"))
            rows.append((name, f"{median(live):.2f} s", f"{slow:.2f} s", *times))
    report.whole_table(
        "From the pointer to tokens",
        ("", "to tokens, median", "p99", "pause", "load"),
        rows,
    )


def _print_lost(report: Report, told: dict[str, list[float]], seconds: float) -> None:
    rows = []
    told = whole_rounds(told)
    for name, tokens in told.items():
        lost = "" if name == "none" else f"{(median(told['none']) - median(tokens)) / 2:.0f}"
        rows.append((name, f"{median(tokens) / seconds:.0f}", lost))
    report.whole_table(
        "Under a steady load", ("reloads", "tokens/s", "tokens lost per reload"), rows
    )


def main() -> None:
    options = parser(__doc__, gigabytes=0.5, rounds=20, seconds=16.0, load_rounds=6)
    given = options.parse_args()
    missing = why_not()
    if missing is not None:
        options.error(missing)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with (
        prepared(given) as (work, report),
        tempfile.TemporaryDirectory(dir="/dev/shm") as stage,
    ):
        trainer = _Trainer(work, given.gigabytes)
        report.say(f"model: {trainer.bytes / 1e9:.2f} GB in bfloat16")
        ways = {
            "transfer": _Way(VLLMServer, None),
            "transfer, staged": _Way(VLLMServer, Path(stage)),
            "reload_weights": _Way(Reloading, None),
        }
        seen: dict[str, dict[str, list[float]]] = {
            name: {"live": [], "pause": [], "load": []} for name in ways
        }
        tokens: dict[str, list[float]] = {name: [] for name in ("none", "hook", "by hand")}
        server = VLLMProcess(trainer.base, work / "log.txt", takes_adapters=False)
        try:
            server.wait_until_up()
            with daemon(trainer.job.layout.root, "--deltas", "off"):
                try:
                    _all_ways(trainer, server, ways, given.rounds, seen)
                finally:
                    _print_tokens(report, seen)
                try:
                    _lost(trainer, server, given.load_rounds, given.seconds, tokens)
                finally:
                    _print_lost(report, tokens, given.seconds)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
