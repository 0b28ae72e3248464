"""The explorers of explorer.py, as processes that report on stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import turns
from benchmarks.meter import METERED
from syncd.protocol.errors import CancelledError, WaitTimeoutError
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage

if TYPE_CHECKING:
    from torch import nn

_TIMEOUT = 600.0


class _Counting(Storage):
    """Counts the bytes that the calls below read."""

    bytes_read = 0


def _counted(name: str) -> Callable[..., Any]:
    def call(storage: _Counting, *given: Any) -> Any:
        done = getattr(Storage, name)(storage, *given)
        storage.bytes_read += done if isinstance(done, int) else len(done)
        return done

    return call


for _name in ("pread", "pread_into", "read_part", "copy_file_range", "sendfile"):
    setattr(_Counting, _name, _counted(_name))


def _module(gigabytes: float) -> nn.Module:
    from benchmarks.shards import module_of, shapes, zeros  # noqa: PLC0415 - the process that starts all others stays small

    return module_of(zeros(shapes(gigabytes, "fsdp")))


def _transformers(gigabytes: float) -> nn.Module:
    """As :func:`_module`, in a model of the transformers library."""
    import torch  # noqa: PLC0415
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    from benchmarks.shards import shapes  # noqa: PLC0415

    vocabulary, hidden = shapes(gigabytes, "fsdp")["model.embed_tokens.weight"]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 35 // 6,
        num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def _engine(kind: str, gigabytes: float) -> Any:
    from explorer_hooks.engines.torch_module import TorchModule  # noqa: PLC0415
    from explorer_hooks.engines.transformers_model import TransformersModel  # noqa: PLC0415

    if kind == "transformers":
        return TransformersModel(_transformers(gigabytes))
    return TorchModule(_module(gigabytes), in_place=kind)  # type: ignore[arg-type] # one of the two


def _options(stage: Path | None) -> dict[str, Any]:
    if stage is None:
        return {}
    from explorer_hooks.staging import Staging  # noqa: PLC0415

    return {"staging": Staging(stage)}


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


def _follow(given: argparse.Namespace) -> None:
    """Load each new version, and report it, until stdin ends."""
    from explorer_hooks.hook import ExplorerHook  # noqa: PLC0415

    storage = _Counting()
    engine = _engine(given.engine, given.gigabytes)
    paused = [0.0]
    engine.pause = lambda: paused.append(time.monotonic())
    hook = ExplorerHook(given.job, given.name, engine, storage=storage, **_options(given.stage))
    # Give the name back, so that the next process can claim it at once.
    closing = threading.Thread(target=lambda: (sys.stdin.read(), hook.close()), daemon=True)
    closing.start()
    _say(ready=True)
    while True:
        before = storage.bytes_read
        try:
            version = hook.pull(_TIMEOUT)
        except CancelledError:
            closing.join()
            os._exit(0)  # nothing is left to do, and torch's threads need not be waited for
        live, read = time.monotonic(), storage.bytes_read - before
        last: Any = hook.last  # it has loaded
        times = {"live": live, "paused": paused[-1], "pause": last.pause, "load": last.load}
        _say(step=version.step, read=read, **times)


def _naive(given: argparse.Namespace) -> None:
    import logging  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import torch.distributed.tensor  # noqa: PLC0415 - allow-lists DTensor for weights_only

    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    layout, module = JobLayout(given.job), _module(given.gigabytes)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    held = 0
    _say(ready=True)
    while True:
        step = int(layout.state_pointer.read_text() or 0)
        if step == held:
            time.sleep(1.0)
            continue
        begun = time.monotonic()
        paths = sorted(layout.actor(step).glob("*.pt"))
        if METERED in os.environ:  # torch reads by other calls
            for path in paths:
                with path.open("rb") as file:
                    os.pread(file.fileno(), path.stat().st_size, 0)
        shards = [torch.load(path, weights_only=True) for path in paths]
        whole = {
            name: torch.cat([shard[name].to_local() for shard in shards]) for name in shards[0]
        }
        module.load_state_dict(whole)
        held, seconds = step, time.monotonic() - begun
        _say(live=time.monotonic(), step=step, pause=seconds, load=seconds, read=0)


def _copying(given: argparse.Namespace) -> None:
    import ctypes  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from explorer_hooks.reader import Reader  # noqa: PLC0415

    with Reader(given.job, "copying") as reader:
        version = reader.next_version(0, _TIMEOUT)
        version.verify()
        _say(ready=True)
        size = version.manifest.size
        one = torch.ones(size, dtype=torch.uint8)
        other = torch.zeros(size, dtype=torch.uint8)
        staged = _engine("staged", given.gigabytes)
        direct = _engine("direct", given.gigabytes)

        def prepared() -> None:
            staged.load(version)

        def whole() -> None:
            staged.prepare(version)
            staged.load(version)

        ways = {
            "memmove": lambda: ctypes.memmove(other.data_ptr(), one.data_ptr(), size),
            "Tensor.copy_": lambda: other.copy_(one),
            "staged: load, read ahead": prepared,
            "staged: read and load": whole,
            "direct: load": lambda: direct.load(version),
        }
        before = {"staged: load, read ahead": lambda: staged.prepare(version)}
        _measure(ways, before, size, given.rounds)
        version.release()


def _joining(given: argparse.Namespace) -> None:
    from explorer_hooks.hook import ExplorerHook  # noqa: PLC0415
    from explorer_hooks.reader import Reader  # noqa: PLC0415
    from explorer_hooks.staging import Staging  # noqa: PLC0415

    engine, late = _engine("staged", given.gigabytes), ExitStack()

    def join(stage: Path | None) -> None:
        options = _options(stage)
        late.enter_context(ExplorerHook(given.job, "late", engine, **options)).pull(_TIMEOUT)

    with Reader(given.job, "first") as reader, late:
        version = reader.next_version(0, _TIMEOUT)
        copy = Staging(given.stage).stage(version)
        _say(ready=True)
        ways: dict[str, Callable[[], object]] = {
            "no stage": lambda: join(None),
            "copy in the stage": lambda: join(given.stage),
            "  of this, comparing": copy.verify,
            "no copy in the stage": lambda: join(given.stage / "new"),
        }
        _measure(ways, dict.fromkeys(ways, late.close), version.manifest.size, given.rounds)


def _measure(
    ways: Mapping[str, Callable[[], object]],
    before: Mapping[str, Callable[[], object]],
    size: int,
    rounds: int,
) -> None:
    """Report the seconds of each way in each round but the first, without what is done before."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in turns(ways, number):
            if name in before:
                before[name]()
            begun = time.perf_counter()
            ways[name]()
            found[name].append(time.perf_counter() - begun)
    _say(size=size, seconds={name: times[1:] for name, times in found.items()})


_WAYS = {"follow": _follow, "naive": _naive, "copying": _copying, "joining": _joining}


def main() -> None:
    parser = argparse.ArgumentParser(description="an explorer of benchmarks/explorer.py")
    parser.add_argument("what", choices=_WAYS)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--name", help="of the explorer")
    parser.add_argument("--engine", help="of one that follows")
    parser.add_argument("--stage", type=Path, help="the stage folder")
    parser.add_argument("--rounds", type=int, help="of one that copies or joins")
    given = parser.parse_args()
    try:
        _WAYS[given.what](given)
    except WaitTimeoutError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
