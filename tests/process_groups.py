"""The process group of ranks that a program forks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

#: Seconds: a rank that fails leaves the others waiting for it.
_PATIENCE = timedelta(seconds=120)


@contextmanager
def joined(rank: int, world_size: int, store: Path) -> Iterator[None]:
    """Be a rank in the block; all of them leave it together."""
    met = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=met, rank=rank, world_size=world_size, timeout=_PATIENCE)
    yield
    dist.barrier()
    dist.destroy_process_group()
