"""The judge of what a version's small files say about its weights. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from syncd.checkpoint.tensor_rules import DTYPES, ITEMSIZE, is_floating, shown
from syncd.protocol.names import MODEL_CONFIG
from syncd.protocol.records import TensorEntry

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_QUANTIZATION: Final = "quantization_config"
#: safetensors' dtype name -> torch's.
_NAMES: Final = {short: name for name, (short, _) in DTYPES.items()}
#: Packed weights, if they have rows. A model's own integers have 64 bits, or are counters.
_PACKED: Final = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})

#: The tensors of a version.
Tensors = Sequence[TensorEntry]


class Flaw(NamedTuple):
    """Something untrue or missing: its kind, and the reason with the remedy."""

    kind: str
    reason: str


def flaws(
    configs: Mapping[str, object], files: Collection[str], tensors: Tensors
) -> Iterator[Flaw]:
    """Compare the small files of a full version with its weights.

    ``configs`` has the content of ``config.json`` and of other configs, None if it is unreadable.
    """
    config = configs[MODEL_CONFIG]
    if MODEL_CONFIG not in files:
        yield Flaw(
            "no_config",
            "the version has no config.json, so no engine can load it by itself. Let the trainer "
            "save it, or copy the base model's files except weights into actor/huggingface/",
        )
    elif not isinstance(config, dict):
        yield Flaw("config", "config.json is not a JSON object of at most 4 MiB: save it again")
    else:
        yield from _of_config(config, tensors)
    for name, content in configs.items():
        for file in sorted(code_files(content) - set(files)):
            yield Flaw(
                "code",
                f"{name} names {shown(file)} in auto_map, but the version has no such file, so it "
                "loads only where that code is. Copy the code into actor/huggingface/",
            )


def _of_config(config: dict[str, object], tensors: Tensors) -> Iterator[Flaw]:
    classes = config.get("architectures")
    if not (isinstance(classes, list) and classes):
        yield Flaw(
            "class",
            "config.json names no class in architectures, so servers cannot choose one: set "
            "architectures in the model's config",
        )
    quantized = is_quantized(tensors)
    if quantized != (config.get(_QUANTIZATION) is not None):
        reason = "has quantized weights" if quantized else "has no quantized weights"
        yield Flaw(
            "quantization",
            f"the version {reason}, but config.json says otherwise: add or remove its "
            f"{_QUANTIZATION}",
        )
    for part, key in wrong_dtypes(config, tensors):
        yield Flaw(
            "dtype",
            f"config.json says {key} {shown(part[key])}, but the weights are "
            f"{', '.join(floating_dtypes(tensors))}, so engines may round them: correct the file",
        )


def wrong_dtypes(
    config: object, tensors: Tensors, *, is_cast: bool = False
) -> list[tuple[dict[str, object], str]]:
    """The parts of a config that say another dtype than the weights have, each with its key.

    Weights that were not cast may also have a wider dtype. A quantized model's are never wrong.
    """
    found = floating_dtypes(tensors)
    if not isinstance(config, dict) or not found or is_quantized(tensors):
        return []
    wider = () if is_cast else (one for one in found if ITEMSIZE[one] > ITEMSIZE[found[0]])
    right = {_NAMES[one] for one in (found[0], *wider)}
    wrong, parts = [], [config]
    while parts:
        part = parts.pop()
        if part.get(_QUANTIZATION) is not None:
            return []
        for key, value in part.items():
            if isinstance(value, dict) and key.endswith("config"):
                parts.append(value)
            is_dtype = key in {"dtype", "torch_dtype"} and isinstance(value, str)
            if is_dtype and value.removeprefix("torch.") not in right:
                wrong.append((part, key))
    return wrong


def true_dtype(tensors: Tensors) -> str:
    """The floating dtype with the most bytes, by torch's name."""
    return _NAMES[floating_dtypes(tensors)[0]]


def floating_dtypes(tensors: Tensors) -> list[str]:
    """The floating dtypes, most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if is_floating(tensor.dtype):
            sizes[tensor.dtype] += math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]
    return [dtype for dtype, _ in sizes.most_common()]


def is_quantized(tensors: Tensors) -> bool:
    """True if engines must scale or unpack some tensor."""
    return any(
        (is_floating(tensor.dtype) and ITEMSIZE[tensor.dtype] == 1)
        or (tensor.dtype in _PACKED and len(tensor.shape) > 1)
        for tensor in tensors
    )


def code_files(config: object) -> set[str]:
    """The files with code that ``auto_map`` names, except those of another repository."""
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    named = list(auto_map.values()) if isinstance(auto_map, dict) else []
    flat = [one for value in named for one in (value if isinstance(value, list) else [value])]
    modules = (one.rpartition(".")[0] for one in flat if isinstance(one, str) and "--" not in one)
    return {f"{module}.py" for module in modules if module}
