"""The small files of a model's folder, as ``save_pretrained`` writes them beside the weights."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from syncd.checkpoint.description import code_files
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import MANIFEST, MODEL_CONFIG, is_weights_name
from trainer_hooks.state.plain_model import own_class
from trainer_hooks.state.wrappers import is_pretrained, part_described, unwrapped

log = logging.getLogger(__name__)

#: Functions that write small files into a given folder.
FileWriters = tuple[Callable[[Path], object], ...]
GENERATION_CONFIG: Final = "generation_config.json"
#: Integers of these dtypes are packed weights beside a ``quantization_config``; others count.
_PACKED: Final = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32})


class Pretrained(Protocol):
    """A tokenizer, processor or config of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def model_files(model: nn.Module, tokenizer: Pretrained | None) -> FileWriters:
    """Functions that write the model's configs and the tokenizer, with their code, into a folder.

    Call this for each save in the training's thread, after the state dict was taken: during a
    forward pass FSDP shows other dtypes. The functions may run in any thread.
    """
    owner, config = config_owner(model), published_config(model)
    generation = config and copy.deepcopy(getattr(owner, "generation_config", None))
    # transformers 5 refuses a config.json with these.
    for name, value in getattr(config, "_get_generation_parameters", dict)().items():
        delattr(config, name)
        if generation is not None and getattr(generation, name, None) is None:
            setattr(generation, name, value)
    parts = [part for part in (config, generation, tokenizer) if hasattr(part, "save_pretrained")]
    return (*(partial(_write, part) for part in parts), partial(_add_code, (owner, *parts)))


def files_of(source: str | Path | Pretrained) -> FileWriters:
    """Functions that write the small files of a folder, a config or a tokenizer into a folder.

    Raises:
        InvalidSettingsError: the folder does not exist, or has a link that leads nowhere.
    """
    if not isinstance(source, str | Path):
        return partial(_write, source), partial(_add_code, (source,))
    if not Path(source).is_dir():
        raise InvalidSettingsError(f"model_files: {source} is not a folder")
    _copy_small_files(Path(source), None)
    return (partial(_copy_small_files, Path(source)),)


def published_config(model: nn.Module) -> Any | None:
    """A copy of the model's config as a version has it; None if no config describes the model.

    Like ``save_pretrained``, it names the model's own class, the dtype of the first parameter, and
    the code of classes that are not of transformers. A ``quantization_config`` stays only if a
    tensor is quantized.
    """
    owner = config_owner(model)
    config: Any = getattr(owner, "config", None)
    if part_described(model) is not None or not hasattr(config, "save_pretrained"):
        return None
    if not hasattr(config, "to_diff_dict"):
        return config  # not of transformers
    config = copy.deepcopy(config)
    if is_pretrained(owner):
        config.architectures = [own_class(owner).__name__]
    dtypes = [value.dtype for value in owner.parameters()]
    floating = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
    if floating is not None:
        name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
        setattr(config, name, str(floating).removeprefix("torch."))
    dtypes += [value.dtype for value in owner.buffers()]
    if not any(one in _PACKED or (one.is_floating_point and one.itemsize == 1) for one in dtypes):
        vars(config).pop("quantization_config", None)
    # JSON cannot hold the key None, which some models on the hub have.
    auto_map = dict(getattr(config, "auto_map", None) or {})
    auto_map.pop(None, None)
    for kind in (own_class(owner), type(config)):
        known_as = getattr(kind, "_auto_class", None)
        if known_as is not None and kind.__module__ != "__main__":
            auto_map[known_as] = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    if auto_map:
        config.auto_map = auto_map
    config._auto_class = None  # noqa: SLF001 - so that it leaves copying its code to _add_code
    return config


def config_owner(model: nn.Module) -> nn.Module:
    """The module under wrappers, also PEFT's, to which the config belongs."""
    outer = unwrapped(model)
    config = getattr(outer, "config", None)
    owners = (one for one in outer.modules() if is_pretrained(one) and one.config is config)
    return next(owners, outer)


def _copy_small_files(source: Path, folder: Path | None, *above: Path) -> None:
    """Copy all files but weights, following links, into a folder; None only checks them."""
    if folder is not None:
        folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        name = path.name
        if is_weights_name(name) or name == MANIFEST or name.startswith("."):
            continue
        target = None if folder is None else folder / name
        if path.is_dir() and path.resolve() not in (*above, source.resolve()):
            _copy_small_files(path, target, *above, source.resolve())
        elif not path.is_file():
            raise InvalidSettingsError(
                f"model_files: {path} is not a file or folder, or leads nowhere. Remove it, or put "
                "the file there"
            )
        elif target is not None:
            shutil.copyfile(path, target)


def _write(part: Any, folder: Path) -> None:
    """Call ``save_pretrained``; what it refuses to write is written as it is."""
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
        if not hasattr(part, "to_diff_dict"):
            raise
        name = GENERATION_CONFIG if hasattr(part, "do_sample") else MODEL_CONFIG
        part.to_json_file(folder / name)
        _warn(f"each version has a {name} that transformers itself would not save: {error}")


def _add_code(parts: Iterable[Any], folder: Path) -> None:
    """Copy the files with code that the configs in a folder name, and what these files import."""
    homes = [getattr(part, "name_or_path", None) for part in parts]
    for part in parts:
        module = sys.modules.get(own_class(part).__module__)
        if module is not None and not module.__name__.startswith("transformers."):
            homes.insert(0, str(Path(getattr(module, "__file__", None) or "").parent))
    for config in folder.glob("*config.json"):
        for name in code_files(json.loads(config.read_bytes())):
            if (folder / name).exists():
                continue
            places = [Path(home, name) for home in homes if home]
            source = next((place for place in places if place.is_file()), Path(name))
            try:
                for needed in (source, *_imported(source)):
                    shutil.copyfile(needed, folder / needed.name)
            except FileNotFoundError as error:
                _warn(
                    f"each version lacks {error.filename}, which its {config.name} names in "
                    "auto_map, so it loads only where this file is. Keep the model's code beside "
                    "the model, and load both from there"
                )


def _imported(source: Path) -> Iterator[Path]:
    from transformers.dynamic_module_utils import get_relative_import_files  # noqa: PLC0415 - slow

    return map(Path, get_relative_import_files(source))


@cache
def _warn(text: str) -> None:
    """Log a warning once, because the files are written at each save."""
    log.warning("%s", text)
