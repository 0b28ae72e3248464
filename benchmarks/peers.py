"""syncd beside its peers: bytes, processor time, time to live weights, memory, and what breaks.

Repeat with ``python -m benchmarks.peers`` (over an hour; ``--megabytes 250 --changed 3.3 --steps 3
--parts stream`` takes minutes). The wheels of the peers are installed into ``~/.cache/syncd``.

The trainer, syncd's daemon and the receiver are processes. In ``--dir`` they share storage; the
receiver's own folder is in ``--local``. A model in bf16 trains one step, with random updates that
change a fraction of its elements; its first tensor never changes. A peer's receiver is asked once
its trainer has published, syncd's waits by itself. Times begin when the new weights are in the
trainer's memory; its digest of them, for the comparison of bits, counts for nobody.

Bytes are ``rchar`` and ``wchar`` of ``/proc/PID/io``, with children; a mapped file counts nothing
there, but in the memory of who maps it. The memory of syncd's daemon is not measured.

The faults use the smallest size, and 3.3 % of changes. The digest of all tensors decides: ``right``
is the step itself, ``after 2`` the second step after it, ``restart`` a new receiver, ``stuck`` none
of these, and ``wrong`` other bits without an error. After ``stuck`` or ``wrong`` the kills go on
with an empty folder.
"""

import argparse
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.delta_processes import PARAMETER_BYTES
from benchmarks.deltas import update_of, wait_for
from benchmarks.machine import ROOT, Report, cpu_seconds, daemon, parser, prepared, status
from benchmarks.peer_ways import WAYS, serve
from benchmarks.verl_environment import made
from syncd.protocol.layout import JobLayout
from tests.engines.environment import cache

_WHEELS = {"skyrl": "0.4.0", "modelexpress": "0.7.0"}
#: What the wheels' modules import here; most of what they require is for GPUs.
_IMPORTED = ("torch", "numpy", "safetensors", "transformers", "zstandard", "grpcio",
                     "protobuf<7", "boto3", "s3transfer", "google-crc32c")  # fmt: skip
_CHECK = (
    "from importlib.metadata import version as v; import modelexpress_rl.inference.receiver; "
    "print(*(f'{n} {v(n)}' for n in "
    f"{(*_WHEELS, *_IMPORTED[:5])}), sep=', '); assert all(v(n) == w for n, w in {_WHEELS}.items())"
)
_NOT_RUN = {
    "NCCL in verl, TRL, OpenRLHF; checkpoint-engine; ModelExpress over NIXL": "need GPUs",
    "Miles; slime's and prime-rl's own programs": "no wheels; need Ray, SGLang or vLLM on GPUs",
    "NeMo-RL, stitch, TRL's bucket": "need Ray, Modal or the Hub",
}
_FORK = multiprocessing.get_context("fork")
#: The base, and those until syncd's daemon offers deltas.
_FIRST = 4
#: The most steps after a fault.
_MORE = 20
_FAULTS = ("flip", "torn", "missing", "twice")
_STREAM = ("way", "trainer wrote", "read", "daemon wrote", "read", "receiver wrote", "read",
                  "shared", "CPU s/GB", "stall s", "announced", "live", "worst", "memory trainer",
                  "receiver", "room", "late read", "late s")  # fmt: skip


class _Process:
    """One side of a way, forked from this process, because that has imported torch."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.pipe, other = _FORK.Pipe()
        self.process = _FORK.Process(target=serve, args=(other, *given), kwargs=more, daemon=True)
        self.process.start()
        other.close()
        self.frozen: bytes = self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class _Run:
    """The processes of one way, and what the trainer has published."""

    def __init__(self, stack: ExitStack, given: argparse.Namespace, way: str, size: int) -> None:
        self.kind, self._stack, self._local = WAYS[way], stack, given.stages
        self._patience = given.patience
        self.kind.wheel()
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=given.work))
        self.shared = self.room = Path(folder)
        count = size * 10**6 // PARAMETER_BYTES
        self.size = count * PARAMETER_BYTES
        self._start = partial(
            _Process, way=way, count=count, update=given.update, patience=given.patience
        )
        self.digests: list[bytes] = []
        self.read = 0
        self.daemon = stack.enter_context(daemon(self.shared)) if "syncd" in way else None
        self.trainer = self.start("trainer")
        self.new_receiver()

    def start(self, role: str) -> _Process:
        made = self._start(role=role, shared=self.shared, local=self.room)
        self._stack.callback(made.kill)
        return made

    def new_receiver(self, *, emptied: bool = True) -> None:
        """Start a receiver, by default with an empty folder of its own."""
        if emptied:
            folder = tempfile.TemporaryDirectory(dir=self._local)
            self.room = Path(self._stack.enter_context(folder))
        self.receiver = self.start("receiver")

    def publish(self) -> dict[str, Any]:
        """Train a step, and return when receivers can know of it."""
        step = len(self.digests)
        self.trainer.pipe.send(step)
        told: dict[str, Any] = self.trainer.pipe.recv()
        if told["error"]:
            raise RuntimeError(told["error"])
        self.digests.append(told["digest"])
        if self.daemon:
            latest = JobLayout(self.shared).latest
            with suppress(RuntimeError):  # a delta whose base is missing is never named
                wait_for(latest, step + 1, "ahead", self._patience)
        return told

    def receive(self, step: int) -> dict[str, Any]:
        self.receiver.pipe.send(step)
        told: dict[str, Any] = self.receiver.pipe.recv()
        return told

    def newest(self) -> Path:
        """The folder that the last step has added to shared storage."""
        step = len(self.digests)
        return (self.shared / self.kind.added.format(step - 1, step)).resolve(strict=True)

    def outcome(self, step: int) -> str:
        """Receive a step, or what comes after it, and compare all bits."""
        for more in range(_MORE + 2):
            if more > _MORE:
                self.receiver.kill()
                self.new_receiver(emptied=False)
            elif more:
                self.publish()
            got = self.receive(len(self.digests) - 1 if more else step)
            self.read = got["shared"]
            if not got["error"] and got["digest"] != self.digests[got["step"]]:
                return "wrong"
            if not got["error"]:
                return f"after {more}" if 0 < more <= _MORE else "restart" if more else "right"
        return "stuck"


def _flip(files: Iterator[Path], frozen: bytes) -> None:
    """Flip a byte of the tensor that never changes; keep the times."""
    for path in files:
        data = bytearray(path.read_bytes()) if path.is_file() else b""
        if (at := data.find(frozen)) >= 0:
            times = path.stat()
            with path.open("r+b") as file:
                file.seek(at + 9)
                file.write(bytes([data[at + 9] ^ 64]))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _used(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _stream(run: _Run, steps: int) -> list[float]:
    """The figures of one row: bytes and memory in models, bytes and CPU a step."""
    for step in range(_FIRST):
        first = run.publish(), run.receive(step)
    io = Path(f"/proc/{run.daemon.pid}/io") if run.daemon else Path("/proc/self/io")

    def of_daemon() -> list[float]:
        if not run.daemon:
            return [0, 0, 0]
        return [status(io, "wchar"), status(io, "rchar"), cpu_seconds(run.daemon.pid)]

    before, room, stalls, announced, live = of_daemon(), 0, [], [], []
    for step in range(_FIRST, _FIRST + steps):
        pipe = run.receiver.pipe
        if run.daemon:  # the receiver waits by itself
            pipe.send(step)
        sent = run.publish()
        if not run.daemon:
            pipe.send(step)
        while not pipe.poll(0.005):
            room = max(room, _used(run.room))
        got = pipe.recv()
        if got["error"] or got["digest"] != run.digests[step]:
            raise RuntimeError(got["error"] or "other bits")
        stalls.append(sent["stall"])
        announced.append(sent["live"] - sent["there"])
        live.append(announced[-1] + got["live"] - max(sent["live"], got["there"]))
    if run.daemon:
        time.sleep(2)  # until the child that has folded is reaped, and counts
    moved = [end - at for end, at in zip(of_daemon(), before, strict=True)]
    cpu = moved.pop() + sum(
        end["cpu"] - at["cpu"] for end, at in zip((sent, got), first, strict=True)
    )
    keys = ("written", "read")
    bytes_ = [sent[key] - first[0][key] for key in keys] + moved
    bytes_ += [got[key] - first[1][key] for key in (*keys, "shared")]
    run.new_receiver()
    late = run.receive(step)
    if late["digest"] != run.digests[step]:
        raise RuntimeError("a late receiver has other bits")
    memory = [told["peak"] * 1024 / run.size for told in (sent, got)]
    return [
        *(count / run.size / steps for count in bytes_),
        cpu / steps / run.size * 1e9,
        *(median(times) for times in (stalls, announced, live)), max(live),
        *memory, room / run.size, late["shared"] / run.size, late["live"] - late["there"],
    ]  # fmt: skip


def _kills(run: _Run, kills: int) -> list[str]:
    for step in range(_FIRST + 1):
        run.publish()
        got = run.receive(step)
    seconds = got["live"] - got["there"]
    outcomes: Counter[str] = Counter()
    reads = []
    for number in range(1, kills + 1):
        run.publish()
        step = len(run.digests) - 1
        run.receiver.pipe.send(step)
        time.sleep(seconds * number / (kills + 1))
        run.receiver.kill()
        run.new_receiver(emptied=False)
        outcome = run.outcome(step)
        outcomes[outcome] += 1
        reads.append(run.read / run.size)
        if outcome in {"stuck", "wrong"}:
            run.receiver.kill()
            run.new_receiver()
            run.receive(len(run.digests) - 1)
    return [", ".join(f"{outcomes[o]} {o}" for o in outcomes), f"{max(reads):.2f}"]


def _fault(run: _Run, fault: str) -> str:
    for step in range(_FIRST):
        run.publish()
        run.receive(step)
    if fault == "flip" and run.kind.copy:
        _flip(run.room.glob(run.kind.copy), run.trainer.frozen)
    run.publish()
    folder = run.newest()
    if fault == "flip" and not run.kind.copy:
        _flip(folder.rglob("*"), run.trainer.frozen)
    elif fault == "torn":
        largest = max(folder.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    elif fault == "missing":
        shutil.rmtree(folder)
    elif fault == "twice":
        run.receive(_FIRST)
        run.receiver.kill()
        run.new_receiver(emptied=False)
    return run.outcome(_FIRST)


@contextmanager
def _runs(given: argparse.Namespace, way: str, size: int) -> Iterator[_Run]:
    os.sync()  # nobody writes what the way before has left in memory
    with ExitStack() as stack:
        yield _Run(stack, given, way, size)


def _attempt(call: Any) -> list[str]:
    """The cells of a row, or why there are none, because a later row can still be measured."""
    try:
        return list(call())
    except (ImportError, RuntimeError, OSError, EOFError) as error:
        return [f"failed: {' '.join(str(error).split())[:90]}"]


def _print_stream(report: Report, given: argparse.Namespace, size: int, changed: float) -> None:
    given.update, given.patience = update_of(changed / 100), 100.0
    table = report.table(
        f"{size} MB, {changed:g} % changed, {given.steps} steps; bytes, memory and room in models, "
        "seconds as medians",
        _STREAM,
        [(way,) for way in WAYS],
    )
    for way in given.ways:

        def row(way: str = way) -> list[str]:
            with _runs(given, way, size) as run:
                return [f"{figure:.3f}" for figure in _stream(run, given.steps)]

        cells = _attempt(row)
        table.row(way, *cells, *[""] * (len(_STREAM) - 1 - len(cells)))


def _print_faults(report: Report, given: argparse.Namespace) -> None:
    given.update, given.patience, size = update_of(0.033), 5.0, min(given.megabytes)
    heads = ("way", *_FAULTS, f"{given.kills} kills", "models read after one, max")
    table = report.table(f"faults, {size} MB", heads, [(way, *["missing"] * 4) for way in WAYS])
    for way in given.ways:
        cells = []
        for fault in (*_FAULTS, "kills"):

            def outcome(way: str = way, fault: str = fault) -> list[str]:
                with _runs(given, way, size) as run:
                    return _kills(run, given.kills) if fault == "kills" else [_fault(run, fault)]

            cells += _attempt(outcome)
        table.row(way, *cells, *[""] * (len(heads) - 1 - len(cells)))


def main() -> None:
    options = parser(__doc__, steps=10, kills=20, local=Path("/dev/shm"))  # noqa: S108 - memory
    options.add_argument("--megabytes", type=int, nargs="+", default=[250, 1000])
    options.add_argument("--changed", type=float, nargs="+", default=[1, 3.3, 10, 30], help="%%")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.add_argument("--parts", nargs="+", default=["stream", "faults"])
    given = options.parse_args()
    wheels = [f"{name}=={version}" for name, version in _WHEELS.items()]
    try:
        python = made(cache() / "peers", _CHECK, _IMPORTED, "--ignore-requires-python", *wheels)
        if Path(sys.prefix) != python.parents[1]:
            os.environ["PYTHONPATH"] = str(ROOT)
            os.execv(python, (python, "-m", "benchmarks.peers", *sys.argv[1:]))  # noqa: S606
    except subprocess.CalledProcessError as error:
        print(f"{wheels} cannot be installed: {error}")
    torch.set_num_threads(1)  # so that forked processes can use it
    with prepared(given) as (work, report), tempfile.TemporaryDirectory(dir=given.local) as stages:
        given.work, given.stages = work, Path(stages)
        report.say(f"python -m benchmarks.peers {shlex.join(sys.argv[1:])}")
        for what, reason in _NOT_RUN.items():
            report.say(f"not run: {what}: {reason}")
        if "stream" in given.parts:
            for size in given.megabytes:
                for changed in given.changed:
                    _print_stream(report, given, size, changed)
        if "faults" in given.parts:
            _print_faults(report, given)


if __name__ == "__main__":
    main()
