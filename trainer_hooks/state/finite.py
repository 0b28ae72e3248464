"""Finds the tensors that hold NaN or Inf, by their smallest and largest values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Final

import torch
from torch import Tensor

from syncd.coordination.host_memory import HostMemory
from syncd.coordination.torch_modes import without_modes

#: The dtypes that torch.aminmax can check: if any value is NaN, both its results are NaN.
_BY_VALUE: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
#: torch has no aminmax for fp8, so bits are compared: without the sign, NaN and Inf are largest.
_BY_BITS: Final = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.6 lacks it
    _BY_BITS[torch.float8_e8m0fnu] = 0xFF  # it has no sign
#: In these NaN has the bits of minus zero, and there is no Inf.
_BY_SIGN: Final = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
#: Elements of fp8 whose bits are copied at a time.
_BLOCK: Final = 4 * 1024 * 1024


@without_modes()
def is_finite(tensor: Tensor) -> bool:
    """True if a CPU tensor has no NaN or Inf; checks only fp64, fp32, fp16, bf16 and fp8."""
    looked = Looked()
    looked.add(None, tensor)
    looked.fetch()
    return not looked.nonfinite()


class Looked:
    """Checks tensors for NaN and Inf on their own devices. No method waits for a device.

    A check reads each element once, and keeps a few scalars. A check of fp8 needs 4 MiB more.
    """

    def __init__(self) -> None:
        self._scalars: defaultdict[
            tuple[torch.device, torch.dtype], list[tuple[Hashable, Tensor]]
        ] = defaultdict(list)
        self._fetched: list[tuple[list[Hashable], HostMemory, torch.dtype]] = []

    def add(self, key: Hashable, tensor: Tensor) -> None:
        """Check a strided tensor, in the device's current stream."""
        dtype = tensor.dtype
        if not tensor.numel() or dtype not in _BY_VALUE | _BY_SIGN | _BY_BITS.keys():
            return
        scalars = self._scalars[tensor.device, dtype]
        if dtype in _BY_VALUE:
            scalars += [(key, scalar) for scalar in torch.aminmax(tensor)]
        else:
            for block in torch.split(tensor.reshape(-1).view(torch.uint8), _BLOCK):
                is_by_sign = dtype in _BY_SIGN
                worst = (
                    (block ^ 0x80).amin() ^ 0x80 if is_by_sign else (block & _BY_BITS[dtype]).amax()
                )
                scalars.append((key, worst))

    def fetch(self) -> set[torch.device]:
        """Copy the results to the host; return the devices whose streams run the copies."""
        for (device, dtype), found in self._scalars.items():
            keys, scalars = zip(*found, strict=True)
            stacked = torch.stack(scalars)
            memory = HostMemory(stacked.nbytes, device)
            memory.content.copy_(stacked.view(torch.uint8), non_blocking=True)
            self._fetched.append((list(keys), memory, dtype))
        devices = {device for device, _ in self._scalars}
        self._scalars.clear()
        return devices

    def nonfinite(self) -> set[Hashable]:
        """The keys of the tensors with NaN or Inf; call it after the copies have arrived."""
        return {
            key
            for keys, memory, dtype in self._fetched
            for key, is_good in zip(
                keys, memory.content.view(dtype).double().isfinite().tolist(), strict=True
            )
            if not is_good
        }


class LookedAtBytes:
    """Checks one tensor for NaN and Inf, from its bytes in parts of any size."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.is_finite = True
        self._dtype = dtype
        self._begun = b""

    def add(self, part: memoryview) -> None:
        """Check the next bytes. Their memory must be writable, and may change afterwards."""
        size = self._dtype.itemsize
        if self._begun:  # a part has ended inside an element
            missing = size - len(self._begun)
            self._begun, part = self._begun + bytes(part[:missing]), part[missing:]
            if len(self._begun) == size:
                self._look(memoryview(bytearray(self._begun)))
                self._begun = b""
        whole = len(part) // size * size
        self._look(part[:whole])
        self._begun += bytes(part[whole:])

    def _look(self, part: memoryview) -> None:
        if part and self.is_finite:
            self.is_finite = is_finite(torch.frombuffer(part, dtype=torch.uint8).view(self._dtype))
