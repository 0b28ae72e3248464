"""The process group of ranks that a program forks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

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


def fork(work: Callable[[int, int, Path], None], *world_sizes: int) -> None:
    """Be a program: fork the ranks of one world size after the other.

    Torch, and whatever the program imports, is imported once for all.

    Args:
        work: called in each rank with the rank, the world size, and the command line's folder.
        world_sizes: how many ranks there are.
    """
    for world_size in world_sizes:
        given = (work, world_size, Path(sys.argv[1]))
        mp.start_processes(_work, given, nprocs=world_size, start_method="fork")


def _work(rank: int, work: Callable[[int, int, Path], None], world_size: int, root: Path) -> None:
    with joined(rank, world_size, root / f"store-{world_size}"):
        work(rank, world_size, root)
