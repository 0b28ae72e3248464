"""Saves of real ranks, written once for all tests, and open shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.storage.fsio import Storage
from tests.fsdp_fixtures import shard_paths
from tests.rank_programs import written_by


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory, "tests.fsdp_ranks")


@pytest.fixture
def opened() -> Iterator[Callable[[Path], list[ShardFile]]]:
    with ExitStack() as stack:
        yield lambda folder: [
            stack.enter_context(ShardFile.open(Storage(durable=False), path))
            for path in shard_paths(folder)
        ]
