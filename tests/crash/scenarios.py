"""What syncd does, as pieces that may be cut off at any call."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import torch

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from syncd.checkpoint.adapter import PREFIX
from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import ADAPTER, look_at_save
from syncd.checkpoint.tip_folder import NoTipError, make_from_tip
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.coordination.benching import Bench
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.member import Doubles
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Wait
from syncd.deltas.delta_index import SavedPiece
from syncd.protocol.errors import SaveNotReadyError
from syncd.protocol.names import DELTA, master_name, part_name, shard_name
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import Format, SaveId, encode
from syncd.protocol.reports import ExplorerReport, ResumedFrom, TrainerReport
from syncd.protocol.requests import RollbackRequest
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.sessions import Session
from tests.crash.invariants import (
    CONFIG,
    LIVING,
    Seen,
    check,
    check_converged,
    pass_time,
    restart,
)
from tests.jobs import LEASE_TIME, SmallJob, edit, nothing
from tests.makers import work
from tests.saved_deltas import save_delta, save_full
from tests.storages import Clock, FastStorage
from tests.tips import made, prepared
from trainer_hooks.state.pieces import pieces_of
from trainer_hooks.state.weights_in_memory import WeightsInMemory
from trainer_hooks.writing.writer import RankContents, RankWriter


@dataclass(frozen=True)
class Scenario:
    """A piece of work on a job.

    Attributes:
        prepare: makes the job as it is before.
        act: the work; all of it goes through ``job.storage``.
        again: what whoever runs the job starts again by itself, the daemon aside.
        rewritten: the steps that the work saves again.
    """

    name: str
    prepare: Callable[[SmallJob], None]
    act: Callable[[SmallJob, Clock], None]
    again: Callable[[SmallJob, Clock], None] = lambda *_: None
    rewritten: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return self.name

    def recover(self, job: SmallJob, before: Seen, clock: Clock, *, again: bool = True) -> None:
        """What was cut off is started again, and must come to rest where it should."""
        check(job, before)
        job.storage = FastStorage()
        if again:
            self.again(job, clock)
        restart(job, clock)
        check_converged(job, before)


def published(job: SmallJob, *steps: int) -> None:
    """Save and publish; nothing is pruned."""
    config = CONFIG.model_copy(update={"keep": 100, "prune_steps": False})
    for step in steps:
        job.save(step)
        job.run(config)


def ranks_save(
    job: SmallJob,
    run: str,
    step: int,
    *,
    full: bool = False,
    completes: bool = False,
    adapter: bool = False,
    cast: bool = False,
    named: bool = False,
    delta: bool = False,
) -> None:
    """Two ranks' parts of one save, the one after the other; rank 0 announces it."""
    report = TrainerReport(run_id=run, world_size=2, status="running", step=step, time=0.0)
    job.storage.replace(job.layout.trainer_report, encode(report), room=job.layout.drafts)
    trained = {"weight": torch.full((3,), float(step))}  # plain: the same on every rank
    model = {"weight": trained["weight"].bfloat16()} if cast else trained
    for rank in (1, 0):
        part = WeightsInMemory()
        part.fill(_adapter(step) if adapter else [(f"{rank}", trained["weight"])])
        contents = RankContents(
            model=None if adapter or named else model,
            whole=part if named or (adapter and rank == 0) else None,
            whole_name=ADAPTER if adapter else part_name(2, rank),
            trained=trained if (adapter or cast or delta) and full else None,
            trained_name=master_name if cast or delta else shard_name,
            base=f"{run}-{step - 1}-0" if delta else None,
            pieces=partial(_pieces, model, rank) if delta else None,
            sync_dtype="bf16" if cast else None,
            adapter_files=_adapter_config if adapter and rank == 0 else dict,
            optimizer={"state": torch.zeros(2)} if full else None,
            extra={"rng": torch.zeros(2)} if full else None,
            model_files=lambda: {"config.json": b"{}"},
            fsdp_version=2,
            is_full=full,
            completes=completes,
        )
        writer = RankWriter(job, rank, 2, save_timeout=5.0, pauses=(0.0, 0.0))
        if delta:
            writer._small = f"{contents.base}", contents.model_files(), []
        writer.save(SaveId(run, step, 0), contents)


def _pieces(model: dict[str, torch.Tensor], rank: int, _: list[str]) -> Iterator[SavedPiece]:
    old = {name: value - 1 for name, value in model.items()}
    return pieces_of(model, old, rank, {}, tied=False)


def _adapter(step: int) -> list[tuple[str, torch.Tensor]]:
    half = f"{PREFIX}q_proj.lora_{{}}.weight".format
    return [(half(name), torch.full((2, 2), float(step))) for name in "AB"]


def _adapter_config() -> dict[str, bytes]:
    return {"adapter_config.json": b'{"peft_type": "LORA"}'}


@cache
def _shard() -> bytes:
    content = io.BytesIO()
    torch.save({"a": torch.arange(600.0), "b": torch.ones(40, dtype=torch.bfloat16)}, content)
    return content.getvalue()


def shards(job: SmallJob, step: int) -> None:
    """A foreign trainer's save of two ranks."""
    actor = job.actor(step)
    (actor / "huggingface").mkdir(parents=True, exist_ok=True)
    job.put(actor / "huggingface" / "config.json", b"{}")
    for rank in range(2):
        job.put(actor / shard_name(2, rank), _shard())
    job.point(step)


def rounds(count: int) -> Callable[[SmallJob, Clock], None]:
    """A daemon that takes over, works for a while and ends."""

    def act(job: SmallJob, clock: Clock) -> None:
        with job.daemon(CONFIG, clock=clock, deltas=work()) as loop:
            for _ in range(count):
                loop.run_once()
                pass_time(job, clock)

    return act


def _first_save(job: SmallJob) -> None:
    published(job, 1)


def _full_before(job: SmallJob) -> None:
    _synced(job, run="before", full=True)


def _saves(run: str = "run", **how: bool) -> Callable[[SmallJob, Clock], None]:
    return lambda job, _: ranks_save(job, run, 2, **how)


def _saves_delta(job: SmallJob, _: Clock, *, completes: bool = False) -> None:
    """A delta, and then a save that needs no base."""
    ranks_save(job, "run", 2, full=True, delta=True, completes=completes)
    ranks_save(job, "run", 3)


def _synced(job: SmallJob, *, run: str = "run", **how: bool) -> None:
    published(job, 1)
    ranks_save(job, run, 2, **how)
    job.run(CONFIG)


def _shards_to_merge(job: SmallJob) -> None:
    published(job, 1)
    ranks_save(job, "run", 2)


def _to_publish(job: SmallJob) -> None:
    published(job, 1)
    job.save(2)


def _named_to_publish(job: SmallJob) -> None:
    published(job, 1)
    ranks_save(job, "run", 2, named=True)


def _to_merge(job: SmallJob) -> None:
    published(job, 1)
    shards(job, 2)


def to_prune(job: SmallJob) -> None:
    published(job, 1, 2, 3)
    (job.actor(2) / "optim_world_size_1_rank_0.pt").write_bytes(b"optimizer")
    (job.step(2) / ".full_checkpoint").touch()
    job.save(4)
    job.lease(2, LIVING)
    job.session(LIVING).write_text("of another host")
    job.lease(1, "dead")


def _to_roll_back(job: SmallJob) -> None:
    """The same step saved twice: what is served again is still what the pointer names."""
    published(job, 1)
    job.save(1, 7.0, counter=1)
    job.run(CONFIG.model_copy(update={"keep": 100}))
    job.layout.requests.mkdir(exist_ok=True)
    request = RollbackRequest(id="ask", sequence=1, by="someone", time=0.0)
    job.put_record(job.layout.request("ask"), request)


def _to_bench(job: SmallJob) -> None:
    """A live explorer holds a build; a dead one left half a build and other things."""
    published(job, 3)
    for step in (1, 2):
        job.save(step, point=False)
    job.session(LIVING).write_text("of another host")
    job.session("dead").write_text("of another host")
    _hold(Job(FastStorage(), job.layout), LIVING, 1, Clock())
    half = job.layout.bench / "dead" / "global_step_2-0"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    (job.layout.bench / ("n" * 251)).mkdir()


def _hold(job: Job, session: str, step: int, clock: Clock) -> LeasedVersion:
    wait = cast("Wait", SimpleNamespace(check=nothing, more=lambda: False))
    with Session(job.layout, LEASE_TIME) as own:
        versions = Versions(job, "explorer", own, clock=clock)
        return Bench(job, versions, session, hub_names=True, clock=clock).hold(step, wait)


def _evaluate(job: SmallJob, clock: Clock) -> None:
    """An explorer builds a step, leases the version of another, and releases both."""
    for step in (2, 3):
        held = _hold(job, "evaluates", step, clock)
        held.verify()
        held.release()


def to_make_deltas(job: SmallJob) -> None:
    """Two deltas are to be made, one of them of a save that the pointer has passed."""
    save_full(job, 1)
    job.run(CONFIG)
    save_delta(job, 2, 1, world_size=2)
    save_delta(job, 3, 2, world_size=2)


def with_deltas(job: SmallJob) -> None:
    """Two deltas lead to the tip."""
    to_make_deltas(job)
    job.run(CONFIG)


def _tip_to_roll_back(job: SmallJob) -> None:
    with_deltas(job)
    job.layout.requests.mkdir(exist_ok=True)
    job.ask_rollback(1)


def _followed(job: SmallJob, *, serves: int = 1) -> None:
    """An explorer lives that follows tips."""
    job.session(LIVING).write_text("of another host")
    report = ExplorerReport(
        name="follows", session=LIVING, status="running", sequence=serves, time=0.0,
        follows_deltas=True, follows_tip=True,
    )  # fmt: skip
    job.put_record(job.layout.explorer("follows"), report)


def _unannounced(job: SmallJob, step: int, **how: bool) -> None:
    before = job.pointed
    ranks_save(job, "run", step, **how)
    job.point(before.strip())


def _announces(*steps: int, rest: int = 3) -> Callable[[SmallJob, Clock], None]:
    """A daemon that knows its explorers sees saves, and works for a while."""

    def act(job: SmallJob, clock: Clock) -> None:
        with job.daemon(CONFIG, clock=clock, deltas=work()) as loop:
            for step in (0, 0, *steps, *[0] * rest):
                if step:
                    _announce(job, step)
                loop.run_once()
                pass_time(job, clock)

    return act


def _announce(job: SmallJob, step: int) -> None:
    job.storage.replace(job.state_pointer, b"%d\n" % step, room=job.layout.drafts)


def _to_prepare(job: SmallJob) -> None:
    published(job, 1)
    _followed(job)
    _unannounced(job, 2)


def with_tip(job: SmallJob, *, serves: int = 1) -> None:
    """A whole save is the tip of version 1."""
    _to_prepare(job)
    _announces(2, rest=0)(job, Clock())
    _followed(job, serves=serves)


def delta_on_tip(job: SmallJob) -> None:
    """A delta on a whole save is the tip of version 1."""
    _to_prepare(job)
    _unannounced(job, 3, delta=True)
    _announces(2, 3, rest=0)(job, Clock())


def _tip_to_overtake(job: SmallJob, *, serves: int = 1, **how: bool) -> None:
    with_tip(job, serves=serves)
    _unannounced(job, 3, **how)


def _whole_tip_to_roll_back(job: SmallJob) -> None:
    with_tip(job)
    job.layout.requests.mkdir(exist_ok=True)
    job.ask_rollback(1)


def _strays(job: SmallJob) -> None:
    """A delta that leads from no save, and a fold that LATEST does not name."""
    with_deltas(job)
    before = job.layout.latest.read_bytes()
    clock, config = Clock(), CONFIG.model_copy(update={"keep": 100, "keep_deltas": 100})
    with job.daemon(config, clock=clock, deltas=work()) as loop:
        for _ in range(8):
            loop.run_once()
            pass_time(job, clock)
    assert job.latest.sequence == 3
    job.put(job.layout.latest, before)
    save_delta(job, 4, 3, world_size=2)
    stray = job.delta(9)
    shutil.copytree(job.delta(3), stray)
    edit(stray / DELTA, "run-2-2", "run-7-7")


def dirty(job: SmallJob) -> None:
    """What three daemons of 0.3.0 left that were killed at unlucky moments."""
    published(job, 1, 2)
    job.layout.format.write_bytes(encode(Format(lease_time=LEASE_TIME)))
    rooms = job.layout.epochs
    for name in ("7-00000000", "9-00000000"):
        for home in ("building", "trash", "doomed"):
            (rooms / name / home).mkdir(parents=True)
    (rooms / "7-00000000" / "building" / "v000003").mkdir()
    (rooms / "7-00000000" / "building" / "v000003" / "model.safetensors").write_bytes(b"half")
    (rooms / "7-00000000" / "building" / "leases-v000003").mkdir()
    (rooms / "9-00000000" / ".tmp-LATEST-abc").write_bytes(b"half")
    os.rename(job.step(1), rooms / "9-00000000" / "trash" / "global_step_1-abc")
    doomed = rooms / "9-00000000" / "doomed" / "v000000-abc"
    doomed.mkdir()
    (doomed / "file").touch()
    unfinished = job.version(5)
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    job.layout.publish_lock.write_bytes(b"{}")


def _merge_by_hand(job: SmallJob, _: Clock) -> None:
    room = job.root.parent / "by-hand"
    storage = job.storage
    storage.mkdir(room)
    actor = job.actor(2)
    build_model_folder(
        storage, actor, look_at_save(storage, actor, 2), room,
        options=MergeOptions(max_file_size=1000), work=Work(nothing),
    )  # fmt: skip
    storage.remove_tree(room)


def _tip_by_hand(job: SmallJob, _: Clock) -> None:
    """Prepare a whole tip of step 2, and make its version; each is committed by a rename."""
    storage, room, tip = job.storage, job.layout.bench / "by-hand", job.root / "tip"

    def commit(make: Callable[[Path], object], to: Path) -> None:
        storage.make_folder(room, below=job.root)
        try:
            make(room)
        except NoTipError as error:
            raise SaveNotReadyError(str(error)) from error
        storage.rename(room, to)
        storage.sync_folder(job.root)

    commit(lambda folder: prepared(job.actor(2), folder, step=2, storage=storage), tip)
    commit(
        lambda folder: make_from_tip(storage, tip, folder, to=storage, work=Work(nothing)),
        job.root / "made",
    )


def _tip_again(job: SmallJob, clock: Clock) -> None:
    """What was committed is whole, wherever the work was cut off; and it can be done anew."""
    tip, version = job.root / "tip", job.root / "made"
    if tip.exists():
        with TemporaryDirectory() as elsewhere:
            made(tip, Path(elsewhere) / "made")
    if version.exists():
        verify_version(job.storage, version, read_manifest(job.storage, version))
    for folder in (tip, version, job.layout.bench / "by-hand"):
        job.storage.remove_tree(folder)
    _tip_by_hand(job, clock)


def explore(job: SmallJob, _: Clock) -> None:
    with Reader(job.root, "explorer", poll=0.01, storage=job.storage) as reader:
        first = reader.next_version(0, 0.3)
        first.verify()
        reader.report(RunningStatus.RUNNING, sequence=first.sequence, step=first.step)
        first.release()


def _to_load(job: SmallJob) -> None:
    job.save(1)
    job.run(CONFIG.model_copy(update={"max_loading": 1}))


def _load(job: SmallJob, _: Clock) -> None:
    """An explorer loads in its turn, also if it was killed in the turn before."""
    with ExplorerHook(job.root, "explorer", FakeEngine(), storage=job.storage) as hook:
        assert hook.pull(LEASE_TIME / 2) is not None
    assert not list(job.layout.claims.iterdir())


def _full_and_lost(job: SmallJob) -> None:
    _full_before(job)
    published(job, 3)


def _resume(job: SmallJob, run: str) -> None:
    """A trainer that loaded step 2 serves it again, and saves step 3."""
    resumed, doubles = ResumedFrom(step=2, save_id="before-2-0"), Doubles(storage=job.storage)
    with TrainerSynchronizer(
        job.root, run_id=run, resumed_from=resumed, doubles=doubles
    ) as trainer:
        trainer.set_trainer_status(RunningStatus.RUNNING)
        trainer.serve_resumed(lambda _: True)
        ranks_save(job, run, 3)
        trainer.set_model_state_dict(None, 3)


def _open(job: SmallJob, _: Clock) -> None:
    Job.at(job.root, job.storage).open()


def _emptied(job: SmallJob) -> None:
    Storage(durable=False).remove_tree(job.layout.state)
    job.layout.published.rmdir()


_SECOND = frozenset({2})
SCENARIOS = (
    Scenario("save", _first_save, _saves(), _saves("again"), _SECOND),
    Scenario("save that is never begun again", _first_save, _saves(), rewritten=_SECOND),
    Scenario("save of named tensors", _first_save, _saves(named=True),
             _saves("again", named=True), _SECOND),
    Scenario("full save", _first_save, _saves(full=True), _saves("again", full=True), _SECOND),
    Scenario("full save again", _full_before, _saves(full=True), _saves("again", full=True),
             _SECOND),
    Scenario("full save of a synced step", _synced, _saves(full=True, completes=True),
             _saves("again", full=True), _SECOND),
    Scenario("full save in another dtype than the last one", _full_before,
             _saves(full=True, cast=True), _saves("again", full=True, cast=True), _SECOND),
    Scenario("full save of a step that was synced in another dtype", partial(_synced, cast=True),
             _saves(full=True, completes=True, cast=True), _saves("again", full=True, cast=True),
             _SECOND),
    Scenario("full save whose weights are a delta", _first_save, _saves_delta,
             _saves("again", full=True), _SECOND),
    Scenario("full save of a step that was synced as a delta", partial(_synced, delta=True),
             partial(_saves_delta, completes=True), _saves("again", full=True), _SECOND),
    Scenario("full save of an adapter", _first_save, _saves(full=True, adapter=True),
             _saves("again", full=True, adapter=True), _SECOND),
    Scenario("publish", _to_publish, rounds(1)),
    Scenario("publish named tensors", _named_to_publish, rounds(1)),
    Scenario("delta", to_make_deltas, rounds(2)),
    Scenario("fold", with_deltas, rounds(8)),
    Scenario("roll back from the tip", _tip_to_roll_back, rounds(2)),
    Scenario("take-over of deltas", _strays, rounds(2)),
    Scenario("tip", _to_prepare, _announces(2), lambda job, _: _announce(job, 2)),
    Scenario("version of a tip", partial(with_tip, serves=2), rounds(4)),
    Scenario("tip that is overtaken", _tip_to_overtake, _announces(3),
             lambda job, _: _announce(job, 3)),
    Scenario("delta on a tip", partial(_tip_to_overtake, serves=2, delta=True),
             _announces(3, rest=6), lambda job, _: _announce(job, 3)),
    Scenario("roll back from a whole tip", _whole_tip_to_roll_back, rounds(3)),
    Scenario("merge and publish", _to_merge, rounds(2)),
    Scenario("prune", to_prune, rounds(14)),
    Scenario("roll back", _to_roll_back, rounds(2)),
    Scenario("bench", _to_bench, rounds(5)),
    Scenario("take-over", dirty, rounds(1)),
    Scenario("merge alone", _to_merge, _merge_by_hand),
    Scenario("tip alone", _shards_to_merge, _tip_by_hand, _tip_again),
    Scenario("explorer", _first_save, explore),
    Scenario("explorer that evaluates steps", _to_bench, _evaluate),
    Scenario("open", _emptied, _open, _open),
)  # fmt: skip
#: A trainer has a claim and a heartbeat, which only the end of its process frees at once.
RESUME = Scenario("resume", _full_and_lost, lambda job, _: _resume(job, "run"),
                  lambda job, _: _resume(job, "again"), frozenset({3}))  # fmt: skip
#: So has an explorer, and also a turn to load.
LOAD = Scenario("load in turn", _to_load, _load, _load)
