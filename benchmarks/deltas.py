"""Deltas beside slime's encoding, and with trainer, daemon and hosts beside full saves.

Repeat with ``python -m benchmarks.deltas`` (some minutes).

An update is a model's bf16 elements before and after a step. For 1, 3.3, 8 and 20 % of changed
elements, random normal numbers are added to random normal fp32 weights (sigma 0.02). The last
update is a step of a small language model, trained here with AdamW (lr 1e-6, fp32 weights).

slime's encoding is written from its description: the exclusive or of both tensors, as one zstd
frame of level 1 for each tensor. syncd's is a trainer's link. Both run in memory, in one thread, in
turns. Times are CPU seconds.

``--steps`` are those of the AdamW run.

The part ``hosts`` (:mod:`benchmarks.delta_hosts`) takes half an hour, and is not run by default.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from benchmarks.delta_hosts import print_hosts
from benchmarks.machine import Report, median_ratio, parser, prepared, turns
from syncd.checkpoint.boxes import whole
from syncd.deltas.encoding import Decoder
from syncd.deltas.limits import BLOCK
from syncd.deltas.link_file import write_link
from syncd.deltas.link_index import Content, LinkIndex, SavedPiece
from syncd.protocol.records import parse

_DENSITIES: Final = (0.01, 0.033, 0.08, 0.2)
_ELEMENTS: Final = 2**24
_TENSORS: Final = 8
_SIGMA: Final = 0.02
_PARTS: Final = ("codecs", "hosts")

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Update:
    """The elements of tensors before and after a step."""

    name: str
    old: Mapping[str, Bits]
    new: Mapping[str, Bits]

    @property
    def bytes(self) -> int:
        """The bytes of a version."""
        return sum(tensor.nbytes for tensor in self.old.values())

    @property
    def density(self) -> float:
        """The fraction of the elements that differ."""
        changed = sum(int(np.count_nonzero(self.old[n] != self.new[n])) for n in self.old)
        return 2 * changed / self.bytes


def _bits(tensor: torch.Tensor) -> Bits:
    return tensor.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _calibrated(density: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Random weights and steps; and the factor of the steps that changes this fraction in bf16."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(_TENSORS, _ELEMENTS // _TENSORS, generator=generator) * _SIGMA
    step = torch.randn(weights.shape, generator=generator)
    low, high = 1e-9, 1e-2
    few, few_steps = weights[0], step[0]
    for _ in range(30):
        size = (low * high) ** 0.5
        found = (few.bfloat16() != (few + size * few_steps).bfloat16()).float().mean().item()
        low, high = (size, high) if found < density else (low, size)
    return weights, step, low


def _adam_like(density: float) -> Update:
    weights, step, size = _calibrated(density)
    old, new = _bits(weights), _bits(weights + size * step)
    names = [f"layers.{number}" for number in range(_TENSORS)]
    return Update(
        "Adam-like", dict(zip(names, old, strict=True)), dict(zip(names, new, strict=True))
    )


class _Model(torch.nn.Module):
    def __init__(self, vocabulary: int = 4096, width: int = 1024, layers: int = 2) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=_SIGMA)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def _adamw_run(steps: int) -> Update:
    torch.manual_seed(1)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    snapshots: list[dict[str, Bits]] = []
    for step in range(steps):
        if step == steps - 1:
            snapshots.append({name: _bits(p).copy() for name, p in model.named_parameters()})
        # Some tokens are more frequent, as in text, so that the rows of the embedding differ.
        tokens = (torch.rand(4, 65).pow(4) * 4096).long()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    snapshots.append({name: _bits(p) for name, p in model.named_parameters()})
    flat = [{name: value.reshape(-1) for name, value in one.items()} for one in snapshots]
    return Update("AdamW run", flat[0], flat[1])


# -- in memory ---------------------------------------------------------------------------------


class _Slime:
    def __init__(self) -> None:
        self._pack = zstandard.ZstdCompressor(level=1)
        self._unpack = zstandard.ZstdDecompressor()

    def encode(self, update: Update) -> list[bytes]:
        return [
            self._pack.compress(np.bitwise_xor(old, update.new[name]))
            for name, old in update.old.items()
        ]

    def decode(self, encoded: list[bytes], tensors: Mapping[str, Bits]) -> None:
        for frame, tensor in zip(encoded, tensors.values(), strict=True):
            xor = np.frombuffer(self._unpack.decompress(frame), np.uint16)
            np.bitwise_xor(tensor, xor, out=tensor)


class _Syncd:
    """Writes a rank's link: also its index, and the digests of all new bytes."""

    def __init__(self) -> None:
        self._decoder = Decoder()

    def encode(self, update: Update) -> list[bytes]:
        def content(tensor: Bits) -> Content:
            return lambda begin, end: tensor.data.cast("B")[begin:end]

        found: list[bytes] = []
        write_link(
            found.append,
            (
                SavedPiece(name, "BF16", whole(old.shape), content(update.new[name]), content(old))
                for name, old in update.old.items()
            ),
        )
        return found

    def decode(self, encoded: list[bytes], tensors: Mapping[str, Bits]) -> None:
        *blocks, index, _ = encoded
        rest = iter(blocks)
        for piece in parse(LinkIndex, index, Path()).pieces:
            for number, _, count, _ in piece.blocks:
                part = tensors[piece.name][number * BLOCK : (number + 1) * BLOCK]
                self._decoder.apply(memoryview(next(rest)), count, part)


def _cpu(work: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    begun = time.process_time()
    result = work(*given)
    return time.process_time() - begun, result


def _measure(update: Update, rounds: int) -> dict[str, Any]:
    codecs: dict[str, _Slime | _Syncd] = {"syncd": _Syncd(), "slime": _Slime()}
    found: dict[str, Any] = {name: {"encode": [], "decode": [], "bytes": 0} for name in codecs}
    for number in range(rounds + 1):
        for name in turns(list(codecs), number):
            codec, row = codecs[name], found[name]
            encoding, encoded = _cpu(codec.encode, update)
            tensors = {key: value.copy() for key, value in update.old.items()}
            decoding, _ = _cpu(codec.decode, encoded, tensors)
            if any((tensors[key] != new).any() for key, new in update.new.items()):
                raise RuntimeError(f"{name} does not decode what it encoded")
            row["bytes"] = sum(map(len, encoded))
            if number:  # the first round warms up
                row["encode"].append(encoding)
                row["decode"].append(decoding)
    return found


def _print_codecs(report: Report, given: argparse.Namespace) -> None:
    heads = ("update", "changed", "syncd", "slime", "ratio")
    heads += ("encode GB/s", "slime", "ratio", "decode GB/s", "slime", "ratio")
    table = report.table(
        f"Bytes (of the model's bytes), and GB of model bytes a CPU second; medians of "
        f"{given.rounds} rounds",
        heads,
        [("Adam-like",)],
    )
    for update in _updates(given.steps):
        found = _measure(update, given.rounds)
        syncd, slime = found["syncd"], found["slime"]
        cells = [update.name, f"{update.density:.2%}"]
        cells += [f"{one['bytes'] / update.bytes:.3%}" for one in (syncd, slime)]
        cells.append(f"{syncd['bytes'] / slime['bytes']:.3f}")
        for way in ("encode", "decode"):
            cells += [f"{update.bytes / 1e9 / median(one[way]):.2f}" for one in (syncd, slime)]
            cells.append(f"{median_ratio(slime[way], syncd[way]):.2f}")
        table.row(*cells)


def _updates(steps: int) -> Iterator[Update]:
    for density in _DENSITIES:
        yield _adam_like(density)
    yield _adamw_run(steps)


def _parser() -> argparse.ArgumentParser:
    options = parser(
        __doc__,
        rounds=7,
        steps=12,
        megabytes=400,
        density=0.033,
        job_dir=Path(tempfile.gettempdir()),
        syncs=30,
        runs=2,
        pause=0.0,
        shared_megabytes=0,
    )
    options.set_defaults(dir=Path("/dev/shm"))  # noqa: S108 - memory, so that no disk is measured
    options.add_argument("--parts", nargs="+", choices=_PARTS, default=["codecs"])
    options.add_argument("--hosts", type=int, nargs="+", default=[1, 8])
    options.add_argument("--before", type=Path, help="a checkout of syncd 0.2")
    return options


def main() -> None:
    given = _parser().parse_args()
    torch.set_num_threads(1)
    with prepared(given) as (work, report):
        if "codecs" in given.parts:
            _print_codecs(report, given)
        if "hosts" in given.parts:
            given.update = _calibrated(given.density)[2]
            with tempfile.TemporaryDirectory(prefix="syncd-benchmark-", dir=given.job_dir) as job:
                print_hosts(report, Path(job), work, given)


if __name__ == "__main__":
    main()
