import errno
import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook, Version
from syncd.protocol.errors import (
    CancelledError,
    EngineMismatchError,
    JobUnavailableError,
    VerificationError,
    WaitTimeoutError,
)
from tests.explorers import leased, publish, pulls, report
from tests.jobs import SmallJob, flip
from tests.lagging import Hosts
from tests.refusals import unverified
from tests.storages import os_error, refuse

pytestmark = pytest.mark.lagging


@pytest.fixture
def hook(job: SmallJob, engine: FakeEngine) -> Iterator[ExplorerHook]:
    with ExplorerHook(job.root, "explorer", engine, poll=0.02, storage=job.explorers) as made:
        yield made


def one_behind(job: SmallJob, hook: ExplorerHook) -> None:
    publish(job, 1)
    hook.pull(0)
    publish(job, 2)


def test_a_pull_loads_the_newest_version_and_says_so(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    assert (hook.version, hook.folder) == (None, None)
    publish(job, 3)
    publish(job, 4)
    pulls(hook, 2, 4)
    assert engine.asked("load") == [2]
    assert hook.version == Version(2, 4)
    assert hook.folder == job.version(2)
    told = report(job)
    assert (told.status, told.sequence, told.step, told.refused) == ("running", 2, 4, None)


def test_the_version_that_is_served_stays_until_the_next_is_applied(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    one_behind(job, hook)
    assert leased(job) == [1]
    engine.fail("check", EngineMismatchError("other names"))
    with pytest.raises(EngineMismatchError):
        hook.pull(0)
    assert leased(job) == [1]
    publish(job, 3)
    hook.pull(0)
    assert leased(job) == [3]


def test_nothing_new_is_counted_and_leaves_the_engine_alone(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    publish(job, 1)
    hook.pull(0)
    assert [hook.pull(0), hook.pull(0.0)] == [None, None]
    with pytest.raises(WaitTimeoutError):
        hook.pull(0.001)
    assert engine.asked("load") == [1]
    assert (report(job).nothing_new, report(job).status) == (3, "running")


def test_a_damaged_version_never_reaches_the_engine_and_is_not_tried_again(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    publish(job, 1)
    flip(job.version(1) / "model.safetensors")
    with pytest.raises(VerificationError):
        hook.pull(0)
    assert engine.asked("load") == []
    assert leased(job) == []
    assert str(report(job).refused).startswith("v1: ")
    assert hook.pull(0) is None
    publish(job, 2)
    pulls(hook, 2, 2)
    assert report(job).refused is None


def test_a_truncated_version_has_a_remedy_for_its_readers(
    job: SmallJob, hook: ExplorerHook
) -> None:
    publish(job, 1)
    path = job.version(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    remedy = r"\. Wait for the next version, or publish an older version with 'syncd rollback'\. "
    with unverified(remedy) as told:
        hook.pull(0)
    assert "Save the file again" not in str(told.value)


def test_a_user_without_rights_is_told_whose_rights_to_use(
    job: SmallJob, engine: FakeEngine
) -> None:
    storage = job.hosts.ruled(refuse("link", errno.EACCES, where="/claims/"))
    said = rf"/.* cannot be used by user {os.geteuid()}: Permission.*\. Run as the trainers'"
    with pytest.raises(JobUnavailableError, match=said):
        ExplorerHook(job.root, "explorer", engine, storage=storage)


@pytest.mark.parametrize("damage", ["no digest", "unlisted weights"])
def test_a_version_that_nobody_vouches_for_never_reaches_the_engine(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine, damage: str
) -> None:
    publish(job, 1)
    folder = job.version(1)
    if damage == "no digest":
        manifest = json.loads((folder / "manifest.json").read_bytes())
        for file in manifest["files"]:
            file.pop("digest")
        (folder / "manifest.json").write_text(json.dumps(manifest))
    else:
        (folder / "z.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(VerificationError):
        hook.pull(0)
    assert engine.asked("load") == []
    assert str(report(job).refused).startswith("v1: ")


@pytest.mark.parametrize("fault", ["check", "load"])
def test_a_version_that_the_engine_refuses_leaves_it_on_the_one_before(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine, fault: str
) -> None:
    one_behind(job, hook)
    error = EngineMismatchError("other names") if fault == "check" else os_error(errno.EIO)
    engine.fail(fault, error, torn=fault == "load")
    with pytest.raises(type(error)):
        hook.pull(0)
    assert engine.answer().sequence == 1
    assert hook.version == Version(1, 1)
    assert report(job).sequence == 1
    if fault == "check":
        assert str(report(job).refused).startswith("v2: ")
    else:  # what storage refused may well work the next time
        assert report(job).refused is None
        pulls(hook, 2, 2)


def test_a_damaged_manifest_is_refused_once_and_the_next_version_taken(
    job: SmallJob, hook: ExplorerHook
) -> None:
    one_behind(job, hook)
    (job.version(2) / "manifest.json").write_bytes(b"{")
    with pytest.raises(VerificationError):
        hook.pull(0)
    assert str(report(job).refused).startswith("v2: ")
    assert leased(job) == [1]
    assert hook.pull(0) is None
    publish(job, 3)
    pulls(hook, 3, 3)


def test_a_report_that_cannot_be_written_ends_no_pull_and_pins_no_old_version(
    job: SmallJob, engine: FakeEngine, hosts: Hosts
) -> None:
    storage = hosts.ruled()
    hook = ExplorerHook(job.root, "explorer", engine, storage=storage)
    one_behind(job, hook)
    engine.check = lambda _: storage.rules.append(  # type: ignore[method-assign]
        refuse("rename", errno.ENOSPC, where="explorers")
    )
    pulls(hook, 2, 2)
    assert leased(job) == [2]
    assert report(job).sequence == 1
    storage.rules.clear()
    hook.close()


def test_closing_ends_a_pull_in_another_thread_and_lets_the_version_go(
    job: SmallJob, hook: ExplorerHook
) -> None:
    publish(job, 1)
    hook.pull(0)
    ended: list[type[BaseException]] = []

    def pull() -> None:
        try:
            hook.pull()
        except CancelledError as error:
            ended.append(type(error))

    thread = threading.Thread(target=pull)
    thread.start()
    hook.close()
    hook.close()
    thread.join()
    assert ended == [CancelledError]
    assert leased(job) == []
    assert report(job).status == "stopped"
    assert list(Path(job.layout.sessions).iterdir()) == []


def test_a_closed_hook_pulls_nothing_and_stays_stopped(job: SmallJob, engine: FakeEngine) -> None:
    hook = ExplorerHook(job.root, "explorer", engine, storage=job.explorers)
    publish(job, 1)
    hook.close()
    calls = [
        partial(hook.pull, 0), partial(hook.after_step, 1), partial(hook.load_step, 1, 0),
        partial(hook.wait_until_served, 0), partial(hook.get_weight, "a"),
        partial(list, hook.state_dict_iterator()),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CancelledError, match=r"is closed.* Make a new ExplorerHook"):
            call()
    assert report(job).status == "stopped"


def test_a_closed_hook_is_neither_entered_nor_started_again(
    job: SmallJob, engine: FakeEngine
) -> None:
    with ExplorerHook(job.root, "explorer", engine, storage=job.explorers) as hook:
        hook.start()
    with pytest.raises(CancelledError, match=r"is closed.* Make a new ExplorerHook"), hook:
        pass
    with pytest.raises(CancelledError, match=r"is closed.* Make a new ExplorerHook"):
        hook.start()
    publish(job, 1)
    with ExplorerHook(job.root, "explorer", engine, storage=job.explorers) as hook:
        pulls(hook, 1, 1)
