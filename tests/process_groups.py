"""The process group of ranks, and programs that fork them."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

#: A rank that fails leaves the others waiting for it.
_PATIENCE = timedelta(seconds=120)


def join(
    rank: int,
    world_size: int,
    store: Path,
    *,
    backend: str = "gloo",
    timeout: timedelta | None = None,
) -> None:
    """Be a rank; all of them name the same file."""
    met = dist.FileStore(str(store), world_size)
    dist.init_process_group(backend, store=met, rank=rank, world_size=world_size, timeout=timeout)


@contextmanager
def joined(rank: int, world_size: int, store: Path) -> Iterator[None]:
    """Be a rank in the block; all of them leave it together."""
    join(rank, world_size, store, timeout=_PATIENCE)
    yield
    dist.barrier()
    dist.destroy_process_group()


def fork(work: Callable[[int, int, Path], object], *world_sizes: int) -> None:
    """Be a program: fork the ranks of one world size after the other.

    Torch, and whatever the program imports, is imported once for all.

    Args:
        work: called in each rank with the rank, the world size, and the command line's folder. What
            it returns is for :func:`answers`.
        world_sizes: how many ranks there are.
    """
    for world_size in world_sizes:
        given = (work, world_size, Path(sys.argv[1]))
        mp.start_processes(_work, given, nprocs=world_size, start_method="fork")


def _work(rank: int, work: Callable[[int, int, Path], object], world_size: int, root: Path) -> None:
    # It warns of every gathering that could be faster.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with joined(rank, world_size, root / f"{work.__name__}-{world_size}"):
        answer = work(rank, world_size, root)
    if answer is not None:
        _answer(root, rank, world_size).write_text(json.dumps(answer))


def answers(root: Path, world_size: int) -> list[Any]:
    """What each rank of a program has returned."""
    return [json.loads(_answer(root, rank, world_size).read_text()) for rank in range(world_size)]


def _answer(root: Path, rank: int, world_size: int) -> Path:
    return root / f"rank_{rank}_of_{world_size}.json"
