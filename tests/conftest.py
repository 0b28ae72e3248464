"""What most tests begin with."""

import gc
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from syncd.storage import watch
from tests.jobs import SmallJob
from tests.lagging import Hosts, LaggingHosts
from tests.sample import SAMPLE_FILES, left_out, sampled
from tests.shell_state import neutralize
from tests.storages import Clock

neutralize()
# Tests start hundreds of interpreters. Each would compile the product again, and each of pytest's
# processes would compile all tests.
sys.dont_write_bytecode = False


#: The folder with the tests that are quick, unless they are marked as slow one by one.
_QUICK = "tests/unit/"
#: Fixtures that start real ranks, with torch imported in each.
_RANKS = frozenset({"written"})


def pytest_addoption(parser: pytest.Parser) -> None:
    every = "run every test, not only the quick ones and a sample of each slow kind"
    parser.addoption("--all", action="store_true", dest="every", help=every)
    parser.addoption("--deep", action="store_true", help="run the tests marked as deep, too")
    once = "leave out the quick tests that this file lists, or write it of those that pass"
    parser.addoption("--once", type=Path, metavar="FILE", help=once)


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    every = option.every or option.deep or named or bool(option.markexpr or option.keyword)
    option.every = getattr(config, "workerinput", {}).get("every", every)
    with suppress(ImportError):  # the base is tested without hypothesis
        from hypothesis import settings  # noqa: PLC0415 - where it is installed

        # No deadline: it would measure the machine.
        settings.register_profile("tests", max_examples=60 if option.every else 20, deadline=None)
        settings.load_profile("tests")
    # A process group that an earlier test left in a cycle waits for ever if a forked child, which
    # has none of its threads, collects it.
    os.register_at_fork(after_in_child=gc.freeze)
    # Imports make hardly any garbage, and looking for it takes a fifth of the time they take.
    gc.disable()
    for line in (
        "browser: in a real Chromium; skipped where there is none",
        "deep: run only with --deep",
        "engine: with a real inference engine; skipped where there is none",
        "lagging: run once on a local disk, and once on a filesystem that lags",
        "mounts: also to be run on two mounts of a share, SYNCD_TEST_MOUNTS=A:B, without torch",
        "local_only(why): in a module that is marked lagging, not to be run on it",
        "slow: not run before a push; all tests outside tests/unit are",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(optionalhook=True)  # for an environment without xdist
def pytest_xdist_auto_num_workers() -> int | None:
    """Two workers for each core, because half of a test's time is waiting."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker, which may be given other arguments, whether all tests run."""
    node.workerinput["every"] = node.config.option.every


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "hosts" in metafunc.fixturenames and "lagging" in marks and "local_only" not in marks:
        metafunc.parametrize("hosts", ["local", "lagging"], indirect=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module of which no test is wanted."""
    if config.option.every or collection_path.is_dir():
        return None
    below = collection_path.relative_to(config.rootpath).as_posix()
    return None if below.startswith((_QUICK, *SAMPLE_FILES)) else True


def pytest_collection_finish() -> None:
    # What has been imported stays. Without this, each full collection looks through all of torch.
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        starts_ranks = not _RANKS.isdisjoint(getattr(item, "fixturenames", ()))
        if starts_ranks or not item.nodeid.startswith(_QUICK):
            item.add_marker("slow")
    wanted = list(items) if config.option.every else sampled(items)
    if not config.option.deep:
        wanted = [item for item in wanted if not item.get_closest_marker("deep")]
    if config.option.once and config.option.once.exists():
        passed = set(config.option.once.read_text().splitlines())
        wanted = [item for item in wanted if item.nodeid not in passed]
    config.hook.pytest_deselected(items=set(items).difference(wanted))
    items[:] = wanted


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    once, is_worker = config.option.once, hasattr(config, "workerinput")
    if once and not is_worker and not once.exists():
        passed = (report.nodeid for report in terminalreporter.stats.get("passed", ()))
        once.write_text("\n".join(one for one in passed if one.startswith(_QUICK)))
    if not config.option.every:
        terminalreporter.write_line(left_out(config.rootpath))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Workers tell of a test in UTF-8, which has no words for what some of them log."""
    report = yield
    report.sections = [
        (head, text.encode(errors="backslashreplace").decode()) for head, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def _watches_no_folder_any_more() -> Iterator[None]:
    """A test that leaves a watcher behind fails here, and not one that its worker runs later."""
    before = watch._Shared.of_this_process._handlers.copy()
    yield
    left = watch._Shared.of_this_process._handlers - before
    folders = ", ".join(watched.raw_path for watched in left)
    assert not left, f"this test does not close its watchers of {folders}"


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: for tests of which calls are made, in what order.

    A disk writes a file out when another is renamed over it, at many times the cost of the call.
    """
    memory = Path("/dev/shm")  # noqa: S108 - a folder of a random name in it
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="syncd-") as folder:
        yield Path(folder)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder on another filesystem than the job's."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("there is no second filesystem")
        yield Path(folder)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Hosts:
    return LaggingHosts(tmp_path) if getattr(request, "param", "local") == "lagging" else Hosts()


@pytest.fixture
def job(tmp_path: Path, hosts: Hosts) -> SmallJob:
    return SmallJob(tmp_path / "job", hosts=hosts)


@pytest.fixture
def clock() -> Clock:
    return Clock()
