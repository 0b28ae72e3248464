"""A torch module in this process, loaded in place."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.tensors import DTYPES, fill
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.records import TensorEntry

_MOST_NAMED: Final = 5


class TorchModule:
    """Copies a version into a live ``nn.Module``, in place and all or nothing.

    Data pointers stay, so CUDA graphs and optimizers that hold them stay valid. All tensors are
    read into host memory first (one more copy of the model there), so an error of the storage finds
    the module as it was.

    Args:
        module: its ``state_dict()`` must have exactly the names, shapes and dtypes of the versions.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def check(self, version: LeasedVersion) -> None:
        """Compare every name, shape and dtype.

        Raises:
            EngineMismatchError: says which ones differ, and how; or the version is no full model.
        """
        if version.remote_path is not None:
            raise EngineMismatchError(
                f"version {version.sequence} (step {version.step}) is remote, and this engine "
                f"loads from storage alone: hand {shown(version.remote_path)} to the service that "
                "has it (explorer_hooks.reader: LeasedVersion.remote_path)"
            )
        if version.kind != "full":
            raise EngineMismatchError(
                f"version {version.sequence} (step {version.step}) is a LoRA {version.kind}, which "
                f"this engine cannot load: load {version.folder} with PEFT or vLLM, or let the "
                "trainer save full models"
            )
        entries = {entry.name: entry for entry in version.manifest.tensors}
        targets = self._targets(entries)
        wrong = [
            *(f"{shown(name)} is not in the module" for name in entries.keys() - targets.keys()),
            *(f"{name} is not in the version" for name in targets.keys() - entries.keys()),
            *(
                difference
                for name in entries.keys() & targets.keys()
                if (difference := _difference(entries[name], targets[name]))
            ),
        ]
        if wrong:
            more = len(wrong) - _MOST_NAMED
            raise EngineMismatchError(
                f"version {version.sequence} (step {version.step}) does not fit the module, which "
                f"keeps its weights: {'; '.join(sorted(wrong)[:_MOST_NAMED])}"
                + (f"; and {more} more" if more > 0 else "")
            )

    def load(self, version: LeasedVersion) -> None:
        """Read all tensors, then copy them in."""
        staged = _staged(version)
        targets = self._targets(staged)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(staged[name])

    def _targets(self, given: Container[str]) -> dict[str, Tensor]:
        """The module's tensors by name, but for tied ones of which another name is given."""
        state = self._module.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        filled = {id(value) for name, value in tensors.items() if name in given}
        return {
            name: value
            for name, value in tensors.items()
            if name in given or id(value) not in filled
        }


def _difference(entry: TensorEntry, target: Tensor) -> str:
    """Why a tensor of the version cannot be copied into one of the module, or nothing."""
    expanded = zip(target.shape, target.stride(), strict=True)
    reasons = {
        "is a DTensor, which this engine cannot load into": isinstance(target, DTensor),
        "is on the meta device: the module has no weights to replace": target.is_meta,
        "is an inference tensor, which cannot be changed in place": target.is_inference(),
        "is an expanded tensor, whose elements share memory": any(
            size > 1 and step == 0 for size, step in expanded
        ),
        f"is {list(entry.shape)}, the module has {list(target.shape)}": entry.shape
        != tuple(target.shape),
        f"is {entry.dtype}, the module has {target.dtype}": DTYPES.get(entry.dtype) != target.dtype,
    }
    return next((f"{shown(entry.name)} {reason}" for reason, holds in reasons.items() if holds), "")


def _staged(version: LeasedVersion) -> dict[str, Tensor]:
    """All tensors of a version, in host memory.

    Read by pread: a memory map of a file that its server loses would kill the process.
    """
    staged: dict[str, Tensor] = {}
    for file in version.open_weights():
        begin = min((entry.begin for entry in file.entries), default=0)
        buffer = bytearray(max((entry.end for entry in file.entries), default=0) - begin)
        fill(file, memoryview(buffer), begin)
        for entry in file.entries:
            dtype = DTYPES[entry.dtype]
            if entry.end == entry.begin:
                staged[entry.name] = torch.empty(entry.shape, dtype=dtype)
                continue
            flat = torch.frombuffer(
                buffer,
                dtype=dtype,
                count=(entry.end - entry.begin) // dtype.itemsize,
                offset=entry.begin - begin,
            )
            staged[entry.name] = flat.view(entry.shape)
    return staged
