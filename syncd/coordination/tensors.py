"""Read a version's tensors as torch tensors.

This module imports torch: import it inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.tensor_rules import DTYPES as _NAMES
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import EngineMismatchError, VerificationError
from syncd.protocol.records import TensorEntry

#: safetensors' name of a dtype → torch's dtype, if this torch has it.
DTYPES: Final = {
    name: getattr(torch, torch_name)
    for torch_name, (name, _) in _NAMES.items()
    if hasattr(torch, torch_name)
}


def stream(version: LeasedVersion) -> Iterator[tuple[str, Tensor]]:
    """Yield a version's tensors one at a time, in host memory, checked against the manifest."""
    told = {entry.name: entry for entry in version.manifest.tensors}
    for file in version.open_weights():
        check_header(version, file, told)
        for entry in file.entries:
            tensor = new_tensor(entry.shape, entry.dtype)
            buffer = bytes_of(tensor)
            fill(file, buffer, entry.begin)
            expected, digest = told[entry.name].digest, xxhash.xxh3_128_hexdigest(buffer)
            if expected is not None and digest != expected:
                raise VerificationError(
                    f"{file.path}: the digest of {shown(entry.name)} is not what the manifest says",
                    sequence=version.sequence,
                )
            yield entry.name, tensor


@without_modes()
def new_tensor(shape: Sequence[int], dtype: str) -> Tensor:
    """Host memory for a tensor; ``dtype`` is safetensors' name."""
    return torch.empty(shape, dtype=torch_dtype(dtype))


def check_header(
    version: LeasedVersion, file: SafetensorsFile, told: Mapping[str, TensorEntry]
) -> None:
    """Raise VerificationError if a file's tensors, dtypes or shapes differ from the manifest."""
    for entry in file.entries:
        expected = told.get(entry.name)
        if expected is None or (expected.dtype, expected.shape) != (entry.dtype, entry.shape):
            raise VerificationError(
                f"{file.path}: the name, dtype or shape of {shown(entry.name)} is not what the "
                "manifest says",
                sequence=version.sequence,
            )


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a safetensors name; raise EngineMismatchError if this torch has none."""
    dtype: torch.dtype | None = DTYPES.get(name)
    if dtype is None:
        raise EngineMismatchError(
            f"torch {torch.__version__} has no dtype for the safetensors dtype {shown(name)}: "
            "install a newer torch"
        )
    return dtype


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, to read or write. The tensor must be contiguous, on the CPU."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()  # NumPy lacks some dtypes
    return memoryview(array)


def fill(file: SafetensorsFile, view: memoryview, offset: int) -> None:
    """Fill ``view`` with a file's bytes; raise VerificationError if the file ends too early.

    If the file server loses the file, pread raises an error. A memory map would kill the process.
    """
    if file.storage.pread_fully(file.fd, view, offset) < len(view):
        raise VerificationError(f"{file.path} is shorter than its header says")
