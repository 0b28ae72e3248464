"""The judge of what a version's small files say about its weights. Pure."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from syncd.checkpoint.name_map import kept_by_type
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import (
    DTYPES,
    ITEMSIZE,
    is_floating,
    is_input_embedding,
    is_output_embedding,
    shown,
)
from syncd.protocol.names import MODEL_CONFIG
from syncd.protocol.records import TensorEntry

_QUANTIZATION: Final = "quantization_config"
#: safetensors' dtype name -> torch's.
_NAMES: Final = {short: name for name, (short, _) in DTYPES.items()}
#: Packed weights, if they have rows. A model's own integers have 64 bits, or are counters.
_PACKED: Final = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})
#: A module and its class in ``auto_map``; those of another repository have its name before them.
_CODE: Final = re.compile(r"'(\w+)\.\w+'")
#: The list of layers, the number of one, and a tensor in it.
_LAYER: Final = re.compile(r"((?:.*?\.)?(?:layers?|h|blocks?))\.(\d{1,6})\.(.+)")

#: The tensors of a version.
Tensors = Sequence[TensorEntry]


def flaws(
    configs: Mapping[str, object], files: Collection[str], tensors: Tensors
) -> Iterator[tuple[str, str]]:
    """What the small files of a full version do not say, or wrongly say: a kind and the reason.

    ``configs`` has the content of ``config.json`` and of other configs, None for no readable one.
    """
    config = configs[MODEL_CONFIG]
    if not isinstance(config, dict):
        yield (
            "no_config",
            "the version has no config.json that is a JSON object of at most 4 MiB, so no engine "
            "can load it by itself. Let the trainer save it, or copy the base model's files except "
            "weights into actor/huggingface/",
        )
    else:
        if not config.get("architectures"):
            yield (
                "class",
                "config.json names no class in architectures, so servers cannot choose one: set "
                "architectures in the model's config",
            )
        if fault := contradiction(config, {tensor.name: tensor.shape for tensor in tensors}):
            yield "other_model", f"{fault}. Save the model's own config beside the weights"
        quantized = is_quantized((tensor.dtype, tensor.shape) for tensor in tensors)
        if quantized != (config.get(_QUANTIZATION) is not None):
            yield (
                "quantization",
                f"the version has {'' if quantized else 'no '}quantized weights, but config.json "
                f"says otherwise: add or remove its {_QUANTIZATION}",
            )
        wrong = wrong_dtypes(config, tensors)
        for part, key, true in wrong:
            yield (
                "dtype",
                f"config.json says {key} {shown(part[key])}, but most weights are {true}: correct "
                "it, as engines believe the config",
            )
        size = DTYPES.get(str(config.get("dtype")), ("", sys.maxsize))[1]
        keeps = kept_by_type(config, "bf16")
        for tensor in () if wrong or quantized else tensors:
            is_wider = is_floating(tensor.dtype) and ITEMSIZE[tensor.dtype] > size
            if is_wider and not keeps(tensor.name):
                yield (
                    "rounded",
                    f"config.json says {config['dtype']}, so from_pretrained rounds "
                    f"{shown(tensor.name)}, which is {tensor.dtype}: train it in one dtype, or "
                    "load the version with dtype='float32'",
                )
                break
    for name, content in configs.items():
        for file in sorted(code_files(content) - set(files)):
            yield (
                "code",
                f"{name} names {shown(file)} in auto_map, but the version has no such file, so it "
                "loads only where that code is. Save the code beside the config",
            )


def contradiction(config: object, shapes: Mapping[str, Shape]) -> str:
    """Why a config is certainly of another model than tensors of these shapes; else empty.

    Only the text model is compared, and only if its input embedding is there, because a save may
    be a part of a model. More rows than ``vocab_size`` can be padding or several codebooks, a few
    less a resized vocabulary. A layer more can predict further tokens: its tensors are others.
    """
    part = config
    while isinstance(part, dict) and "text_config" in part:
        part = part["text_config"]
    inputs = {shapes[name] for name in filter(is_input_embedding, shapes) if len(shapes[name]) == 2}
    if not (inputs and isinstance(part, dict) and "vocab_size" in part):
        return ""
    # Norms have the model's width too, also where an embedding is packed or narrower.
    widths = {shape[-1] for shape in shapes.values() if len(shape) == 1 or shape in inputs}
    numbers: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(_LAYER.fullmatch, shapes)):
        numbers[match[1], match[3]].add(int(match[2]))
    layers = set().union(*numbers.values())
    for key, value in part.items():
        match key:
            case _ if not isinstance(value, int):
                continue
            case "hidden_size" | "d_model" | "n_embd" if value not in widths:
                pass
            case "vocab_size" if value > 2 * max(inputs)[0]:
                pass
            # A part of a model has its other layers elsewhere; lists may share a count, and an
            # encoder may have another.
            case "num_hidden_layers" if (
                len(dict(numbers.keys())) == 1
                and "decoder_layers" not in part
                and any(map(is_output_embedding, shapes))
                and max(layers) < len(layers) != value
                and max(map(min, numbers.values())) < value
            ):
                pass
            case _:
                continue
        return (
            f"config.json is of another model: its {key} is {value}, but the weights have "
            f"{len(layers)} layers, and an input embedding of shape {max(inputs)}"
        )
    return ""


def wrong_dtypes(
    config: object, tensors: Tensors, *, is_cast: bool = False
) -> list[tuple[dict[str, object], str, str]]:
    """The parts of a config with another dtype than most weights, the keys, and that dtype.

    Weights that were not cast may also have a wider dtype. A quantized model's are never wrong.
    """
    dtypes = floating_dtypes(tensors)
    if not dtypes or is_quantized((tensor.dtype, tensor.shape) for tensor in tensors):
        return []
    right = {
        _NAMES[dtype]
        for dtype in dtypes
        if dtype == dtypes[0] or not (is_cast or ITEMSIZE[dtype] < ITEMSIZE[dtypes[0]])
    }
    parts = [config] if isinstance(config, dict) else []
    for part in parts:  # which grows
        parts += [
            value
            for key, value in part.items()
            if key.endswith("config") and isinstance(value, dict)
        ]
    return [
        (part, key, _NAMES[dtypes[0]])
        for part in parts
        for key in ("dtype", "torch_dtype")
        if isinstance(named := part.get(key), str) and named.removeprefix("torch.") not in right
    ]


def floating_dtypes(tensors: Tensors) -> list[str]:
    """The floating dtypes, most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if is_floating(tensor.dtype):
            sizes[tensor.dtype] += math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]
    return [dtype for dtype, _ in sizes.most_common()]


def is_quantized(tensors: Iterable[tuple[str, Sequence[int]]]) -> bool:
    """True if engines must scale or unpack some tensor; each has a dtype and a shape."""
    return any(
        ITEMSIZE[dtype] == 1 if is_floating(dtype) else dtype in _PACKED and len(shape) > 1
        for dtype, shape in tensors
    )


def code_files(config: object) -> set[str]:
    """The files with code that ``auto_map`` names, except those of another repository."""
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    with suppress(RecursionError):  # lists in lists without end name no file
        return {f"{module}.py" for module in _CODE.findall(str(auto_map))}
    return set()
