"""What each key of the configuration may be, in words, read off its type."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Final, Literal, get_args, get_origin

import annotated_types

from syncd.daemon.config import RunConfig
from syncd.daemon.quantities import Quantity, Suffix

_FIELDS: Final = RunConfig.model_fields
#: How alike a name must be to one that is meant.
_ALIKE: Final = 0.7


def allowed(key: str) -> str:
    """What a key may be: ``one of "bf16", "fp16", "fp32"``, ``a whole number, 1 or more``."""
    kind = _kind(key)
    if get_origin(kind) is Literal:
        said = "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    elif kind is bool:
        said = "true or false"
    elif kind in {int, float}:
        said = _number(key, whole=kind is int)
    elif kind is Path:
        said = "an absolute path"
        said += "".join(f" that ends with {suffix}" for suffix in _suffixes(key))
    else:
        said = "text"
    return f'{said}, or "" for none' if may_be_none(key) else said


def may_be_none(key: str) -> bool:
    """Whether a key may stand for nothing, which an empty text says."""
    return key in _FIELDS and type(None) in get_args(_FIELDS[key].annotation)


def is_path(key: str) -> bool:
    """Whether a key names a file or folder."""
    return key in _FIELDS and _kind(key) is Path


def nearest(key: str) -> str | None:
    """The key that was probably meant."""
    found = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=_ALIKE)
    return found[0] if found else None


def no_such_key(key: str) -> str:
    """What to say of a key that is none."""
    meant = nearest(key)
    if meant is not None:
        return f"there is no such key; did you mean {meant}?"
    return "there is no such key: 'syncd config show' lists all of them"


def _kind(key: str) -> object:
    """A key's type, without None."""
    annotation = _FIELDS[key].annotation
    if not may_be_none(key):
        return annotation
    kind = next(kind for kind in get_args(annotation) if kind is not type(None))
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _number(key: str, *, whole: bool) -> str:
    metadata = _FIELDS[key].metadata
    unit = next((one for one in metadata if isinstance(one, Quantity) and one.unit), None)
    said = "a whole number" if whole else "a number"
    if unit is not None:
        said = f"{said} of {unit.unit}, or text such as {unit.examples}"
    for one in metadata:
        match one:
            case annotated_types.Gt():
                said += f", above {one.gt}"
            case annotated_types.Ge():
                said += f", {one.ge} or more"
            case annotated_types.Le():
                said += f", {one.le} at most"
            case _:
                pass  # says nothing about the size
    return said


def _suffixes(key: str) -> list[str]:
    marked = [get_args(kind) for kind in get_args(_FIELDS[key].annotation)]
    return [one.suffix for marks in marked for one in marks if isinstance(one, Suffix)]
