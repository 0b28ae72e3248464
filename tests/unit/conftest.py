"""Saves of real ranks, written once for all tests, and open shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from syncd.checkpoint.shard_file import ShardFile
from syncd.storage.fsio import Storage
from tests.fsdp_fixtures import shard_paths, write_saves


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp")
    write_saves(root)
    return root


@pytest.fixture
def opened() -> Iterator[Callable[[Path], list[ShardFile]]]:
    with ExitStack() as stack:
        yield lambda folder: [
            stack.enter_context(ShardFile.open(Storage(durable=False), path))
            for path in shard_paths(folder)
        ]
