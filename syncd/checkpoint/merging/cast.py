"""Casting tensors with torch, which is imported once something is cast. The daemon never does."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final

from syncd.checkpoint.tensor_rules import DTYPES, ITEMSIZE

#: The most bytes that are read at a time.
TILE: Final = 1024 * 1024
#: torch copies at most so many elements in the calling thread alone. Threads that share a tile
#: often wait for each other, and how many there are is up to the program.
_ALONE: Final = 32768
_TORCH: Final = {name: torch_name for torch_name, (name, _) in DTYPES.items()}


def cast_reader(
    read: Callable[[memoryview], object], count: int, given: str, wanted: str
) -> Callable[[memoryview], None]:
    """A function that fills buffers with what ``read`` reads, cast to another dtype.

    ``read`` must have ``count`` elements. Each buffer takes whole elements.

    Raises:
        OSError: torch cannot be imported.
    """
    try:
        import torch  # noqa: PLC0415 - takes seconds, and may be missing
    except Exception as error:
        raise OSError(
            errno.EAGAIN,
            f"torch, which casts the weights, cannot be imported ({error}): check that "
            "'python -c \"import torch\"' works, and that memory is free",
        ) from error
    before, after = ITEMSIZE[given], ITEMSIZE[wanted]
    source = memoryview(bytearray(min(TILE, count * before)))

    def parts(view: memoryview, name: str) -> tuple[torch.Tensor, ...]:
        return torch.split(torch.frombuffer(view, dtype=getattr(torch, _TORCH[name])), _ALONE)

    def read_into(view: memoryview) -> None:
        while view:
            tile = min(len(view) // after, len(source) // before)
            read(source[: tile * before])
            targets = parts(view[: tile * after], wanted)
            for target, part in zip(targets, parts(source[: tile * before], given), strict=True):
                target.copy_(part)
            view = view[tile * after :]

    return read_into
