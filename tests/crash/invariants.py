"""What must hold whatever call was the last one, and what a restart must reach."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from safetensors import safe_open

from syncd.checkpoint.tip_folder import make_from_tip, read_tip
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon import collect
from syncd.daemon.config import DaemonConfig
from syncd.deltas.delta_index import DeltaRecord, read_index
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    DELTA,
    FULL,
    STATE_POINTER,
    TIP,
    is_resumable_state,
    parse_pointer,
    parse_step_folder,
    parse_version_folder,
)
from syncd.protocol.records import Format, Latest, Manifest
from syncd.storage.job import Job
from syncd.storage.judge import Judge
from syncd.storage.leases import Lease
from syncd.storage.sessions import DaemonLock
from tests.deltas import contents
from tests.jobs import LEASE_TIME, SmallJob, read
from tests.makers import work
from tests.storages import Clock, FastStorage
from tests.tips import STAGE, WORK
from trainer_hooks.resuming.resumable import find_checkpoint

#: Short graces, so that a restart comes to rest in few rounds.
CONFIG = DaemonConfig(keep=1, dead_reader_grace=10.0, exit_when_idle=True)
#: The session of an explorer that lives through everything.
LIVING = "living"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Seen:
    """A job as it was before something was cut off."""

    sequence: int
    versions: dict[str, Files]
    leased: frozenset[int]
    kept: dict[str, Files]
    asked: frozenset[str] = frozenset()
    builds: frozenset[Path] = frozenset()


def look(job: SmallJob, *, rewritten: Collection[int] = ()) -> Seen:
    """Look at a job. ``rewritten`` are the steps whose trainer is about to save them again."""
    layout = job.layout
    return Seen(
        sequence=latest_sequence(layout),
        versions={path.name: contents(path) for path in versions(layout)},
        leased=frozenset(
            parse_version_folder(path.parent.name) or 0
            for path in layout.leases.glob("*/*")  # none where there is no such folder
            if path.name.endswith(f".{LIVING}")
        ),
        kept={
            path.name: contents(path)
            for path in layout.root.iterdir()
            if (step := parse_step_folder(path.name)) is not None
            and step not in rewritten
            and (is_kept(path) or any(layout.bench.glob(f"{LIVING}/{path.name}-*")))
        },
        asked=frozenset(path.stem for path in layout.requests.glob("*.json")),
        builds=frozenset(layout.bench.glob(f"{LIVING}/*")),
    )


def is_kept(step: Path) -> bool:
    actor = step / "actor"
    resumable = actor.exists() and any(is_resumable_state(path.name) for path in actor.iterdir())
    return (step / FULL).exists() or resumable


def versions(layout: JobLayout) -> list[Path]:
    if not layout.published.exists():
        return []
    return [p for p in layout.published.iterdir() if parse_version_folder(p.name) is not None]


def latest_sequence(layout: JobLayout) -> int:
    if not layout.latest.exists():
        return 0
    return read(Latest, layout.latest).sequence


def check(job: SmallJob, before: Seen) -> None:
    """What must hold at every moment, also before anything is restarted."""
    layout = job.layout
    if layout.state.exists():
        assert read(Format, layout.format).lease_time == LEASE_TIME
    sequence = latest_sequence(layout)
    assert sequence >= before.sequence, "LATEST went back"
    if sequence:
        folder = layout.version(sequence)
        verify_version(FastStorage(), folder, read_manifest(FastStorage(), folder))
        assert layout.lease_folder(sequence).is_dir(), "LATEST cannot be leased"
        check_tip(layout)
    check_resumable(job)
    for path in layout.deltas.glob("d*"):  # none where there is no such folder
        check_delta(path)
    found = {path.name: path for path in versions(layout)}
    for name, content in before.versions.items():
        if name in found:
            assert contents(found[name]) == content, f"{name} is not what it was"
        else:
            assert parse_version_folder(name) not in before.leased, f"{name} went, and was leased"
    for name, content in before.kept.items():
        now = contents(layout.root / name)
        missing = {file for file in content if now.get(file) != content[file]}
        assert not missing, f"{name} lost {missing}"


def check_resumable(job: SmallJob) -> None:
    """What can be resumed from is what was trained, in its dtype, whatever is published of it."""
    if found := find_checkpoint(Job.at(job.root, FastStorage())).checkpoint:
        for name in found.weights:
            saved = torch.load(job.actor(found.step) / name, weights_only=True)["weight"]
            assert saved.dtype == torch.float32, f"{name} was cast for explorers"
            assert saved.tolist() == ([found.step] * 3 if found.save_id else [1, 2, 3])


def check_tip(layout: JobLayout) -> None:
    """Deltas lead to the tip from LATEST's version, or from the whole save that it rests on."""
    latest = read(Latest, layout.latest)
    if (tip := latest.tip) is None:
        return
    assert tip.sequence > max(latest.sequence, latest.rollback or 0), "the tip is not above LATEST"
    first = read_tip(FastStorage(), layout.delta(tip.root))[0].target if tip.root else None
    deltas = [path / DELTA for path in layout.deltas.glob("d*") if not (path / TIP).exists()]
    bases = {delta.target: delta.base for path in deltas for delta in [read(DeltaRecord, path)]}
    save_id = tip.save_id
    while save_id != (first or latest.save_id):
        assert save_id in bases, f"no delta leads to {save_id}"
        save_id = bases[save_id]


def check_delta(folder: Path, value: Callable[[Manifest], float] = attrgetter("step")) -> None:
    """It is a whole delta; or a whole tip, of a save whose weights have this value."""
    if (folder / TIP).exists():
        with TemporaryDirectory(dir=folder.parents[2]) as room:
            made = make_from_tip(FastStorage(), folder, Path(room), to=STAGE, work=WORK)
            verify_version(STAGE, Path(room), made)
            check_weights(Path(room), value(made))
        return
    for file in read(DeltaRecord, folder / DELTA).files:
        read_index(FastStorage(), folder / file.name, file.size, file.digest or "")


def check_weights(folder: Path, value: float) -> None:
    """They are those that the tests' trainers save."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.get_tensor("weight").tolist() == [value] * 3, f"{folder} is of another save"


@patch.object(collect, "_GRACE", 60.0)
def restart(job: SmallJob, clock: Clock, rounds: int = 16) -> None:
    """A daemon works until it comes to rest; time passes for all stopwatches."""
    job.storage = FastStorage()
    with job.daemon(CONFIG, clock=clock, deltas=work()) as loop:
        for _ in range(rounds):
            loop.run_once()
            pass_time(job, clock)


def stand_by(job: SmallJob, clock: Clock) -> None:
    """What a daemon does that finds the lock of one that is gone: it gets it by its silence."""
    storage = FastStorage()
    judge = Judge(storage, LEASE_TIME, clock=clock)
    lock = DaemonLock(Job(storage, job.layout), LEASE_TIME, judge)
    for _ in range(6):
        if lock.try_acquire():
            lock.release()
            return
        clock.advance(LEASE_TIME / 4)
    raise AssertionError(f"the lock stays: {job.layout.daemon_lock.read_bytes()!r}")


def pass_time(job: SmallJob, clock: Clock) -> None:
    """A third of a lease, in which who lives gives a sign of it."""
    clock.advance(LEASE_TIME / 3)
    heartbeat = job.session(LIVING)
    if heartbeat.exists():
        heartbeat.write_text(f"of another host, at {clock.now}")


def check_converged(job: SmallJob, before: Seen) -> None:
    """What a restart must have reached."""
    check(job, before)
    layout = job.layout
    pointer = layout.root / STATE_POINTER
    pointed = parse_pointer(pointer.read_bytes()) if pointer.exists() else None
    if pointed is not None:
        back = read_manifest(FastStorage(), layout.version(job.latest.sequence)).rolled_back
        assert back or job.latest.step == pointed, "what the pointer names is not served"
    assert leftovers(job) == []
    assert not list(layout.deltas.glob(f"*/{TIP}")), "a tip stays although its version is there"
    assert job.read_format().id
    if "ask" in before.asked:
        served = read_manifest(FastStorage(), layout.version(job.latest.sequence))
        assert served.rolled_back is not None, "a request was not carried out"
        assert served.settles != served.save_id
    for build in before.builds:
        verify_version(FastStorage(), build, read_manifest(FastStorage(), build))
    serve(job)


def leftovers(job: SmallJob) -> list[str]:
    """Whatever nobody will ever use again: temporaries, notices, rooms' contents, dead sessions."""
    layout = job.layout
    rooms = list(layout.epochs.iterdir())
    found = [path for room in rooms for home in room.iterdir() for path in home.iterdir()]
    found += [path for room in rooms for path in room.iterdir() if path.is_file()]
    found += rooms[1:]
    found += [path for path in layout.root.rglob("*") if path.name.startswith(".tmp-")]
    found += [path for path in layout.state.rglob("*") if ".broken-" in path.name]
    living = layout.session(LIVING)
    found += [path for path in layout.sessions.iterdir() if path != living]
    found += [path for path in layout.drafts.iterdir() if path.is_file()]
    found += [path for path in (layout.publish_lock, layout.daemon_lock) if path.exists()]
    found += list(layout.requests.glob("*"))  # not carried out, or answered and never collected
    found += [path for path in layout.bench.glob("*") if path.name != LIVING]
    return sorted(str(path.relative_to(layout.root)) for path in set(found))


def serve(job: SmallJob) -> None:
    """What an explorer does that was waiting all the time."""
    if not job.layout.latest.exists():
        return
    storage, sequence = FastStorage(), job.latest.sequence
    lease = Lease.take(Job(storage, job.layout), sequence, "waiting", "session")
    folder = job.version(sequence)
    verify_version(storage, folder, read_manifest(storage, folder))
    lease.release()
