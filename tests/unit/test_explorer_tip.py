"""An explorer with a stage serves a save before any full version of it exists."""

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from explorer_hooks.staging import Staging
from syncd.coordination.versions import Versions
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import SaveId, SaveOutcome, SaveOutcomes, encode
from tests.explorers import leased, pulls, report
from tests.jobs import SmallJob
from tests.rank_programs import ENVIRONMENT
from tests.staged_deltas import DeltaChain, copies
from tests.storages import Clock


@pytest.fixture
def chain(job: SmallJob, tmp_path: Path) -> DeltaChain:
    return DeltaChain(job, tmp_path)


@pytest.fixture
def hook(chain: DeltaChain, memory: Path, engine: FakeEngine) -> Iterator[ExplorerHook]:
    with ExplorerHook(
        chain.job.root, "explorer", engine,
        settings=SyncSettings(max_staleness=0), staging=Staging(memory), poll=0.02,
    ) as made:  # fmt: skip
        yield made


def test_the_tip_is_served_and_its_fold_is_no_news(
    chain: DeltaChain, hook: ExplorerHook, memory: Path
) -> None:
    assert report(chain.job).follows_tip
    pulls(hook, 3, 3)
    assert leased(chain.job) == []  # LATEST's version was only the base
    assert copies(memory) == ["v000003"]
    assert hook.folder is not None
    reload = report(chain.job).reload
    assert reload is not None
    assert (reload.sequence, reload.staged, reload.no_delta) == (3, True, None)
    assert reload.delta_bytes
    assert None not in (reload.fetch, reload.rebuild)
    assert reload.verify >= (reload.fetch or 0) + (reload.rebuild or 0)
    chain.add_delta()
    assert not hook.may_produce()
    pulls(hook, 4, 4)
    chain.publish(4)
    assert hook.pull(0) is None
    assert hook.may_produce()
    told = report(chain.job)
    assert (told.sequence, told.step) == (4, 4)
    assert [load.sequence for load in told.loads] == [3, 4]


@pytest.mark.parametrize("why", ["no stage", "near", "elsewhere"])
def test_who_cannot_make_copies_reads_versions(
    chain: DeltaChain, tmp_path: Path, memory: Path, why: str
) -> None:
    stage = {"no stage": None, "near": Staging(tmp_path / "stage"), "elsewhere": Staging(memory)}
    engine = FakeEngine(is_local=why != "elsewhere")
    with ExplorerHook(chain.job.root, "explorer", engine, staging=stage[why]) as hook:
        pulls(hook, 1, 1)
        assert not report(chain.job).follows_tip
        assert hook.pull(0) is None
    with Reader(chain.job.root, "reader") as reader:
        held = reader.next_version(0)
        assert held.sequence == 1
        held.release()


def test_a_damaged_delta_is_passed_over_and_the_fold_or_a_later_save_is_served(
    chain: DeltaChain, hook: ExplorerHook
) -> None:
    away = chain.job.root / "away"
    chain.deltas[0].folder.rename(away)
    pulls(hook, 1, 1)  # and nobody goes without weights
    assert hook.pull(0) is None
    told = report(chain.job)
    assert (told.refused, told.follows_tip) == (None, False)
    assert hook.may_produce()
    chain.publish(3)
    pulls(hook, 3, 3)
    told = report(chain.job)
    assert told.follows_tip
    assert told.reload is not None
    assert told.reload.delta_bytes is None
    assert told.reload.no_delta is not None
    away.rename(chain.deltas[0].folder)
    chain.add_delta()
    pulls(hook, 4, 4)


def test_what_is_served_never_goes_back_and_a_rollback_is_newer(
    chain: DeltaChain, hook: ExplorerHook
) -> None:
    hook.pull(0)
    chain.put(tip=None)  # as an older daemon writes LATEST
    assert hook.pull(0) is None
    folder = chain.job.version(7)
    chain.job.lease_folder(7).mkdir()
    shutil.copytree(chain.job.version(1), folder)
    manifest = chain.whole[0].manifest.model_copy(update={"sequence": 7})
    (folder / "manifest.json").write_bytes(encode(manifest))
    chain.put(sequence=7, folder=folder.name)
    pulls(hook, 7, 1)


@pytest.mark.parametrize(("passed", "coming"), [(0, None), (3, 3), (math.inf, 3)])
def test_only_who_cannot_make_it_waits_for_the_fold_of_the_last_save(
    chain: DeltaChain, passed: float, coming: int | None
) -> None:
    job = chain.job
    saved = SaveOutcome(identity=str(SaveId("run", 3, 3)), outcome="published", sequence=3)
    job.put_record(job.layout.saves, SaveOutcomes(steps={3: saved}))
    job.step(3).mkdir()
    job.point(3)
    versions = Versions(job, "explorer", None, clock=Clock())
    versions.passed = passed
    assert versions.on_its_way() == coming
    versions.close()


@pytest.mark.slow
def test_follow_opens_more_deltas_than_its_soft_limit_of_files(
    job: SmallJob, tmp_path: Path, memory: Path
) -> None:
    DeltaChain(job, tmp_path, saves=2, world_size=100)
    with subprocess.Popen(
        ["sh", "-c", 'ulimit -Sn 100 && exec "$@"', "sh", sys.executable, "-m", "syncd", "follow",
         job.root, "--name", "e", "--stage", memory, "--link", tmp_path / "link", "--json"],
        stdout=subprocess.PIPE, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert b'"version": 2,' in process.stdout.readline()
        finally:
            process.terminate()


def test_the_tip_in_another_job_is_served_whatever_its_number(
    chain: DeltaChain, hook: ExplorerHook, tmp_path: Path
) -> None:
    chain.add_delta()
    pulls(hook, 4, 4)
    hook.synchronizer.passes(4)
    shutil.rmtree(chain.job.root)
    (tmp_path / "folds").rename(tmp_path / "folds of the other")
    DeltaChain(SmallJob(chain.job.root), tmp_path)
    pulls(hook, 3, 3)
