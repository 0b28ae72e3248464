"""One real server of each kind for all tests that want one: each takes long to come up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.engines import sglang_process
from tests.engines.sglang_process import SGLangProcess
from tests.engines.vllm_process import VLLMProcess, require
from tests.jobs import SmallJob

Server = TypeVar("Server", VLLMProcess, SGLangProcess)


def _served(kind: type[Server], folder: Path, **options: Any) -> Iterator[Server]:
    """A server that was started with the tiny model 0; what it has by now is the test's to see."""
    from tests.engines.tiny_models import save_model  # noqa: PLC0415 # torch, for those alone

    with kind(save_model(folder / "base", 0), folder / "log.txt", **options).up() as server:
        yield server


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    require()
    yield from _served(VLLMProcess, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    sglang_process.require()
    folder = tmp_path_factory.mktemp("sglang")
    yield from _served(SGLangProcess, folder, more=sglang_process.ADAPTERS)


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    return SmallJob(tmp_path / "job")
