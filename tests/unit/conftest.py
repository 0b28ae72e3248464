"""Saves of real ranks, written once for all tests; open shards; a job on a storage with rules."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from explorer_hooks.engines.fake import FakeEngine
from syncd.checkpoint.sandbox.isolated import IsolatedParser
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.storage.fsio import Storage
from tests.fsdp_fixtures import shard_paths
from tests.jobs import SmallJob, nothing
from tests.lagging import Hosts
from tests.rank_programs import written_by
from tests.storages import RuledStorage


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


@pytest.fixture(scope="module")
def child() -> Iterator[IsolatedParser]:
    with IsolatedParser(cancel=nothing) as parser:
        yield parser


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def storage(hosts: Hosts) -> RuledStorage:
    return hosts.ruled()


@pytest.fixture
def ruled(tmp_path: Path, storage: RuledStorage, hosts: Hosts) -> SmallJob:
    return SmallJob(tmp_path / "job", storage, hosts=hosts)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
