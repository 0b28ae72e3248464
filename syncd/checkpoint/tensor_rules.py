"""The rules for a tensor's name, dtype and shape, in any file. Pure, and quick to import.

Text that passes the rules is safe in any header, record or message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeGuard

from syncd.checkpoint.placement import Shape
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import has_control

#: The most parts in a name map, three times as many as the largest models have. A limit is needed,
#: because a map of few bytes can ask for many parts.
PART_LIMIT: Final = 250_000
#: safetensors' name of a dtype whose elements in torch are bytes of two values each. Its last
#: dimension counts values in a file, and bytes here, as in torch.
PACKED: Final = "F4"
#: torch's dtype name -> (safetensors' name, bytes per element). No others are merged or read.
DTYPES: Final = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float4_e2m1fn_x2": (PACKED, 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
#: safetensors' dtype name -> bytes per element.
ITEMSIZE: Final = dict(DTYPES.values())
#: The dtypes that floating tensors can be cast to, by the name that users give.
Cast = Literal["bf16", "fp16", "fp32"]
_CASTS: Final = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
#: The dtypes that are cast.
_FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
#: A number in a name, such as that of a layer.
NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
#: The key under which safetensors keeps text about a file.
METADATA: Final = "__metadata__"
#: The most tensors in one file: ten times as many as the largest models have.
TENSOR_LIMIT: Final = 1_000_000
#: The most characters of a name.
NAME_LIMIT: Final = 1000
#: The most dimensions of a tensor or of a device mesh.
DIMENSION_LIMIT: Final = 64
#: Sizes and offsets must be below this: records, headers and system calls hold 63 bits.
NUMBER_LIMIT: Final = 2**63

#: Hugging Face models' names for their output and input embeddings.
_HEADS: Final = frozenset({"lm_head", "embed_out"})
_EMBEDDINGS: Final = frozenset(
    {"embed_tokens", "shared", "wte", "word_embeddings", "embed_in", "tok_embeddings"}
)


def general(name: str) -> str:
    """A tensor's name with ``#`` in place of each number, such as that of a layer."""
    return NUMBER.sub("#", name)


class Casting(NamedTuple):
    """A cast of a model's floating tensors; those that ``keeps`` names are or become fp32."""

    dtype: Cast
    keeps: Callable[[str], object] = frozenset[str]().__contains__

    def dtype_of(self, name: str, dtype: str) -> str:
        """A tensor's dtype after the cast, by safetensors' names; the same if not floating."""
        if dtype not in _FLOATING:
            return dtype
        return _CASTS["fp32" if self.keeps(name) else self.dtype]


def refuse_cast(name: str, dtype: str) -> None:
    """Raise CheckpointError if a tensor is quantized, because a cast would round its scales.

    MXFP4 models on the hub have their packed weights in uint8, under names that end with _blocks.
    """
    is_quantized = is_floating(dtype) and dtype not in _FLOATING
    if is_quantized or (dtype == "U8" and name.endswith("_blocks")):
        raise CheckpointError(
            f"{shown(name)} is quantized ({dtype}), so this model cannot be cast: remove the cast "
            "(sync_dtype of the trainer, cast or --dtype of the daemon)"
        )


def is_extra_state(name: object) -> bool:
    """True for a module's extra state; torch loads no parameter or buffer of this name."""
    return isinstance(name, str) and name.rpartition(".")[2] == "_extra_state"


def short_dtype(value: object) -> object:
    """``bf16`` for ``BF16``, ``bfloat16`` and ``torch.bfloat16``; other values unchanged."""
    name = str(value).lower().removeprefix("torch.")
    name = _SHORT.get(name, name)
    return name if name in _CASTS else value


def is_floating(dtype: str) -> bool:
    """True if this is safetensors' name of a floating-point dtype."""
    return dtype.startswith(("F", "BF"))


def shape_of(value: object) -> Shape | None:
    """A sequence of sizes as a tuple; None if it is not a possible shape."""
    if not isinstance(value, tuple | list) or len(value) > DIMENSION_LIMIT:
        return None
    for size in value:  # all() would be slower, and this runs six times per tensor
        if type(size) is not int or not 0 <= size < NUMBER_LIMIT:
            return None
    return tuple(value)


def is_offset(value: object) -> TypeGuard[int]:
    """True if a value is a possible number of bytes or elements in a file."""
    return type(value) is int and 0 <= value < NUMBER_LIMIT


def name_fault(name: object) -> str | None:
    """The fault of a tensor's name, as a verb phrase for a message; None if it is valid."""
    if not isinstance(name, str):
        return "is a key that is not text"
    if name.isascii() and name.isprintable() and len(name) <= NAME_LIMIT and name != METADATA:
        return None
    if name == METADATA:
        fault = "has the name of safetensors' own metadata"
    elif len(name) > NAME_LIMIT:
        fault = f"is a name of {len(name)} characters, over the limit of {NAME_LIMIT}"
    elif any("\ud800" <= letter <= "\udfff" for letter in name):
        fault = "is a key that is not text"  # a pickle, and JSON, can hold half a surrogate pair
    elif has_control(name):
        fault = "is a name with control characters"
    else:
        return None
    return fault


def shown(value: object, limit: int = 200) -> str:
    """Text from a file, made safe for a message; the type's name if it is not text."""
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    cut = value[:limit] + ("…" if len(value) > limit else "")
    if cut.isprintable():
        return cut
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in cut)


def is_output_embedding(name: str) -> bool:
    """True if this is the name of an output embedding."""
    return _module(name) in _HEADS


def is_input_embedding(name: str) -> bool:
    """True if this is the name of an input embedding."""
    return _module(name) in _EMBEDDINGS


def _module(name: str) -> str:
    """The last part of the module's name, if ``name`` is a module's ``weight``; else empty."""
    module, _, parameter = name.rpartition(".")
    return module.rpartition(".")[2] if parameter == "weight" else ""
