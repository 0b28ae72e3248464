"""Tensors of a version as torch has them. Imports torch: imported where it is used alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import xxhash
from torch import Tensor

from syncd.checkpoint.safetensors_file import DTYPES as _NAMES
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.leased_version import LeasedVersion
from syncd.protocol.errors import VerificationError

#: safetensors' name of a dtype → torch's dtype, where this torch has it.
DTYPES: Final = {
    name: getattr(torch, torch_name)
    for torch_name, (name, _) in _NAMES.items()
    if hasattr(torch, torch_name)
}


def stream(version: LeasedVersion) -> Iterator[tuple[str, Tensor]]:
    """One tensor after the other, in host memory, each checked against the manifest.

    Raises:
        VerificationError: a tensor is not what the manifest says.
    """
    told = {entry.name: entry for entry in version.manifest.tensors}
    for file in version.open_weights():
        for entry in file.entries:
            expected = told.get(entry.name)
            if expected is None or (expected.dtype, expected.shape) != (entry.dtype, entry.shape):
                raise VerificationError(
                    f"{file.path}: {shown(entry.name)} is not what the manifest says",
                    sequence=version.sequence,
                )
            buffer = bytearray(entry.end - entry.begin)
            fill(file, memoryview(buffer), entry.begin)
            digest = xxhash.xxh3_128_hexdigest(buffer)
            if expected.digest is not None and digest != expected.digest:
                raise VerificationError(
                    f"{file.path}: the digest of {shown(entry.name)} is not what the manifest says",
                    sequence=version.sequence,
                )
            dtype = DTYPES[entry.dtype]
            flat = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
            yield entry.name, flat.view(entry.shape)


def fill(file: SafetensorsFile, view: memoryview, offset: int) -> None:
    """Read all of ``view`` from an offset of a file.

    By pread: a memory map of a file that its server loses would kill the process.

    Raises:
        VerificationError: the file is shorter.
    """
    if file.storage.pread_fully(file.fd, view, offset) < len(view):
        raise VerificationError(f"{file.path} is shorter than its header says")
