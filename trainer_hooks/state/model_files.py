"""The small files of a model's folder, as ``save_pretrained`` writes them beside the weights."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from syncd.checkpoint.description import code_files, is_quantized
from syncd.protocol.names import MANIFEST, is_weights_name
from trainer_hooks.state.plain_model import own_class
from trainer_hooks.state.small_files import Writer
from trainer_hooks.state.state_dict import dtype_name
from trainer_hooks.state.wrappers import is_pretrained, part_described, unwrapped

log = logging.getLogger(__name__)

#: The dtype of the first floating parameter, and True if tensors are quantized.
_Held = tuple[torch.dtype | None, bool]
GENERATION_CONFIG: Final = "generation_config.json"


class Pretrained(Protocol):
    """A tokenizer, processor or config of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def model_files(model: nn.Module, tokenizer: Pretrained | None) -> Callable[[], Writer]:
    """Makes the writer of a save's configs and tokenizer, with their code.

    Call the result for each save in the training's thread, after the state dict was taken: during
    a forward pass FSDP shows other dtypes. The writer may run in any thread.
    """
    owner = config_owner(model)
    return lambda: partial(_write_all, owner, _held(owner), tokenizer)


def files_of(source: str | Path | Pretrained | None) -> Writer:
    """The writer of the small files of a folder, a config or a tokenizer."""
    if isinstance(source, str | Path):
        return partial(_copy_small_files, Path(source))
    return partial(_write_parts, {"model_files": source}, ())


def published_config(model: nn.Module) -> Any | None:
    """A copy of the model's config as a version has it; None if no config describes the model.

    Like ``save_pretrained``, it names the model's own class, the dtype of the first parameter, and
    the code of classes that are not of transformers. A ``quantization_config`` stays only if a
    tensor is quantized.
    """
    owner = config_owner(model)
    return _published(owner, _held(owner))


def _held(owner: nn.Module) -> _Held:
    """The dtype of the first floating parameter, and if a config for quantization is true."""
    dtypes = (value.dtype for value in owner.parameters() if value.is_floating_point())
    told = getattr(getattr(owner, "config", None), "quantization_config", None)
    tensors = () if told is None else (*owner.parameters(), *owner.buffers())
    quantized = is_quantized((dtype_name(value.dtype), value.shape) for value in tensors)
    return next(dtypes, None), quantized


def _published(owner: nn.Module, held: _Held) -> Any | None:
    dtype, quantized = held
    config: Any = getattr(owner, "config", None)
    if not hasattr(config, "to_diff_dict"):  # not of transformers
        return config if hasattr(config, "save_pretrained") else None
    config = copy.deepcopy(config)
    if is_pretrained(owner):
        config.architectures = [own_class(owner).__name__]
    if dtype is not None:
        name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
        setattr(config, name, str(dtype).removeprefix("torch."))
    if not quantized:
        vars(config).pop("quantization_config", None)
    auto_map = dict(getattr(config, "auto_map", None) or {})
    auto_map.pop(None, None)  # some models on the hub have this key, which JSON cannot hold
    for kind in (own_class(owner), type(config)):
        known_as = getattr(kind, "_auto_class", None)
        if known_as is not None and kind.__module__ != "__main__":
            auto_map[known_as] = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    if auto_map:
        config.auto_map = auto_map
    config._auto_class = None  # noqa: SLF001 - so that it leaves copying its code to _add_code
    return config


def config_owner(model: nn.Module) -> nn.Module:
    """The module under wrappers, also PEFT's, which the config describes; an empty one if none."""
    if part_described(model) is not None:
        return nn.Module()
    outer = unwrapped(model)
    config = getattr(outer, "config", None)
    alike = (one for one in outer.modules() if getattr(one, "config", None) is config)
    return next(filter(is_pretrained, alike), outer)


def _copy_small_files(source: Path, folder: Path) -> Iterator[object]:
    yield source
    for path in _small_files(source):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _small_files(folder: Path, *above: Path) -> Iterator[Path]:
    """All files but weights; links are followed."""
    for path in folder.iterdir():
        name = path.name
        if is_weights_name(name) or name == MANIFEST or name.startswith("."):
            continue
        if path.is_dir() and path.resolve() not in (*above, folder.resolve()):
            yield from _small_files(path, *above, folder.resolve())
        elif path.is_file():
            yield path
        else:
            raise FileNotFoundError(
                f"{path} is not a file or folder, or leads nowhere. Remove it, or put the file "
                "there"
            )


def _write_all(
    owner: nn.Module, held: _Held, tokenizer: Pretrained | None, folder: Path
) -> Iterator[str]:
    yield "model.config"
    config = _published(owner, held)
    yield "model.generation_config"
    generation = copy.deepcopy(getattr(owner, "generation_config", None))
    # transformers 5 refuses a config.json with these.
    for name, value in getattr(config, "_get_generation_parameters", dict)().items():
        delattr(config, name)
        if generation is not None and getattr(generation, name, None) is None:
            setattr(generation, name, value)
    parts = {
        "model.config": config,
        "model.generation_config": generation,
        "tokenizer": tokenizer,
    }
    yield from _write_parts(parts, (owner,), folder)


def _write_parts(parts: Mapping[str, Any], homes: Iterable[Any], folder: Path) -> Iterator[str]:
    for name, part in parts.items():
        yield name
        if hasattr(part, "save_pretrained"):
            _write(part, folder)
    yield "the model's code"
    _add_code((*homes, *parts.values()), folder)


def _write(part: Any, folder: Path) -> None:
    """Call ``save_pretrained``; write the generation config also if it refuses that."""
    try:
        part.save_pretrained(str(folder))
    except FileNotFoundError:
        if getattr(part, "_auto_class", None) is None:
            raise
        part._auto_class = None  # noqa: SLF001 - its code is gone, so it cannot be copied
        try:
            part.save_pretrained(str(folder))
        finally:
            del part._auto_class  # noqa: SLF001 - likewise
    except ValueError as error:
        if not hasattr(part, "do_sample"):
            raise
        part.to_json_file(folder / GENERATION_CONFIG)
        _warn(f"{GENERATION_CONFIG} is published as it is, but loading may fail: {error}")


def _add_code(parts: Iterable[Any], folder: Path) -> None:
    """Copy the files with code that the configs in a folder name, and what these files import."""
    homes = [getattr(part, "name_or_path", None) for part in parts]
    for module in (sys.modules.get(own_class(part).__module__) for part in parts):
        if module is not None and not module.__name__.startswith("transformers."):
            homes.insert(0, os.path.dirname(getattr(module, "__file__", None) or ""))
    for config in folder.glob("*config.json"):
        named = set()
        with suppress(ValueError):
            named = code_files(json.loads(config.read_bytes()))
        for name in named:
            if (folder / name).exists():
                continue
            places = [Path(home, name) for home in homes if home]
            source = next((place for place in places if place.is_file()), Path(name))
            try:
                for needed in (source, *_imported(source)):
                    shutil.copyfile(needed, folder / needed.name)
            except FileNotFoundError as error:
                _warn(
                    f"{error.filename} is missing, which {config.name} names in auto_map. A "
                    "version without it loads only where this file is: keep the model's code "
                    "beside the model, and load both from there"
                )


def _imported(source: Path) -> Iterable[Path]:
    from transformers.dynamic_module_utils import get_relative_import_files  # noqa: PLC0415 - slow

    return map(Path, get_relative_import_files(source))


@cache
def _warn(text: str) -> None:
    """Log a warning once, because the files are written at each save."""
    log.warning("%s", text)
