"""Read the changed elements of a version, for a vLLM worker that has an older version."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.checkpoint.version import read_manifest
from syncd.coordination.tensors import torch_dtype
from syncd.deltas.ends import NoDeltaError
from syncd.deltas.making import why_not_here
from syncd.deltas.whole_version import WholeVersion, open_weights
from syncd.protocol.names import DELTA
from syncd.protocol.records import Delta, Manifest, parse
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage

if TYPE_CHECKING:
    from syncd.checkpoint.safetensors_file import SafetensorsFile
    from syncd.checkpoint.safetensors_header import HeaderEntry

#: The integers that elements are read as.
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Worker:
    """Decides if a vLLM worker can load only changed elements."""

    model: Any
    vllm_config: Any

    def why_full(self) -> str | None:
        """The reason why this worker must load all elements; None if changed elements suffice.

        vLLM 0.32 can load changed elements only into weights that are stored as in the checkpoint.
        Only their floating dtype may differ.
        """
        config = self.vllm_config
        for is_so, why in (
            (config.quant_config is not None, "the model's weights are quantized"),
            (config.lora_config is not None, "vLLM was started with --enable-lora"),
            (
                getattr(config.model_config, "enable_sleep_mode", False),
                "vLLM's sleep mode is enabled",
            ),
            (getattr(config.model_config, "is_moe", False), "the model has experts"),
            (
                any(_is_packed(module) for module in self.model.modules()),
                "vLLM keeps packed copies of the weights for the CPU",
            ),
        ):
            if is_so:
                return why
        return why_not_here()


def _is_packed(module: Any) -> bool:
    plain = torch.nn.functional.linear
    return getattr(module, "cpu_linear", plain) is not plain


def patches_of(base: Manifest | None, folder: Path, deltas: Sequence[Path]) -> list[Any]:
    """Read the elements in which the version in ``folder`` differs from an older version.

    The positions come from ``deltas``, which must lead from ``base`` to the version, in order. The
    values come from the version's own files, which must be verified. ``base`` is None if unknown.

    Returns:
        vLLM's ``CheckpointWeightPatch`` for each changed tensor, with the shape and dtype of the
        checkpoint, and positions as int64.

    Raises:
        NoDeltaError: the deltas do not lead to this version, or vLLM cannot patch the elements.
    """
    if base is None:
        raise NoDeltaError("the version that the worker has is unknown")
    # Imported here, because it needs NumPy, which deltas need anyway.
    from syncd.deltas.applying import Link, changed_positions  # noqa: PLC0415

    storage = Storage()
    target = read_manifest(storage, folder)
    chain = [Link(one, _record(storage, one)) for one in deltas]
    found: dict[str, list[torch.Tensor]] = {}
    for tensor, positions in changed_positions(storage, base, target, chain):
        found.setdefault(tensor.name, []).append(torch.from_numpy(positions))
    patch_type = importlib.import_module(
        "vllm.model_executor.model_loader.checkpoint_weight_patch"
    ).CheckpointWeightPatch
    patches = []
    with open_weights(storage, WholeVersion(folder, target)) as places:
        for name, parts in found.items():
            file, entry = places[name]
            dtype = torch_dtype(entry.dtype)
            if not dtype.is_floating_point:
                raise NoDeltaError(f"{shown(name)} is not a floating-point tensor")
            indices = torch.cat(parts)
            values = _values(file, entry, indices).view(dtype)
            if values.isnan().any():
                raise NoDeltaError(f"{shown(name)} has NaN, which vLLM would treat as unchanged")
            patches.append(patch_type(name, tuple(entry.shape), dtype, values, indices))
    return patches


def _record(storage: Storage, folder: Path) -> Delta:
    return parse(Delta, storage.read(folder / DELTA, LONG_RECORD_LIMIT), folder / DELTA)


def _values(file: SafetensorsFile, entry: HeaderEntry, indices: torch.Tensor) -> torch.Tensor:
    """Read elements by their positions, as integers, without reading the whole tensor."""
    width = ITEMSIZE[entry.dtype]
    with mmap.mmap(file.fd, file.size, access=mmap.ACCESS_COPY) as memory:
        count = (entry.end - entry.begin) // width
        whole = torch.frombuffer(memory, dtype=_WORDS[width], count=count, offset=entry.begin)
        values = whole[indices]
        del whole  # it keeps the file mapped
    return values
