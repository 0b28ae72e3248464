"""Named tensors through ``WeightStream``, and shards through ``TrainerHook``, in turns.

``python -m benchmarks.door`` runs two ranks over gloo, and a daemon for each of two jobs. In a
round both ranks save the same number of bytes in each way. The stall is rank 0's; the time to
publish is from the pointer to LATEST. The last column has the bytes that each daemon read and
wrote, of any file, for each byte of the model.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.machine import ROOT, daemon, median_ratio, parser, prepared, status, turns
from syncd.protocol.layout import JobLayout

NAMED, SHARDED = WAYS = ("named", "sharded")
_RANKS: Final = 2


def _be_rank(given: argparse.Namespace) -> None:
    import torch  # noqa: PLC0415 - the process that starts the ranks stays small

    from benchmarks.shards import shapes  # noqa: PLC0415
    from benchmarks.trainer_stall import _Rank  # noqa: PLC0415
    from trainer_hooks import TrainerHook, WeightStream  # noqa: PLC0415

    rank = _Rank(given)
    whole = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16)
        for number, (name, shape) in enumerate(shapes(given.gigabytes, "fsdp").items())
        if number % _RANKS == given.rank
    }
    stream = WeightStream(given.work / NAMED, rank=given.rank, world_size=_RANKS)
    with stream, TrainerHook(given.work / SHARDED, rank.model) as hook:
        for step in range(1, given.rounds + 2):
            for way in turns(WAYS, step):
                rank.wait_for_all()
                begun = time.perf_counter()
                if way == NAMED:
                    stream.save(step, whole)
                else:
                    hook.after_step(step)
                stall = time.perf_counter() - begun
                if given.rank == 0:
                    seconds = _publish_seconds(JobLayout(given.work / way), step)
                    print(json.dumps([way, stall, seconds]), flush=True)
                rank.wait_for_all()


def _publish_seconds(layout: JobLayout, step: int) -> float:
    times = []
    for path, end in ((layout.state_pointer, f"{step}"), (layout.latest, f'"step":{step},')):
        while not path.exists() or end not in path.read_text().replace(" ", ""):
            time.sleep(0.001)
        times.append(time.perf_counter())
    return times[1] - times[0]


def main() -> None:
    options = parser(__doc__, gigabytes=1.0, rounds=7)
    for name, kind in (("work", Path), ("rank", int), ("world-size", int)):
        options.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options.set_defaults(sync_dtype=None, device="cpu")
    given = options.parse_args()
    if given.work is not None:
        _be_rank(given)
        return
    with prepared(given) as (work, report):
        for way in WAYS:
            (work / way).mkdir()
        with daemon(work / NAMED) as first, daemon(work / SHARDED) as second:
            command = (sys.executable, "-m", "benchmarks.door", "--work", str(work), "--world-size",
                       str(_RANKS), "--gigabytes", str(given.gigabytes), "--rounds",
                       str(given.rounds))  # fmt: skip
            with subprocess.Popen((*command, "--rank", "1"), cwd=ROOT) as other:
                mine = (*command, "--rank", "0")
                done = subprocess.run(mine, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
                other.wait()
            io = [Path(f"/proc/{process.pid}/io") for process in (first, second)]
            moved = [status(path, "rchar") + status(path, "wchar") for path in io]
        found = [json.loads(line) for line in done.stdout.splitlines()][len(WAYS) :]
        heads = ("way", "stall ms", "x sharded", "publish ms", "x sharded", "daemon x model")
        table = report.table(f"{given.gigabytes:g} GB, {given.rounds} rounds", heads)
        for way, count in zip(WAYS, moved, strict=True):
            cells = []
            for column in (1, 2):
                times, others = (
                    [one[column] for one in found if one[0] == w] for w in (way, SHARDED)
                )
                cells += [f"{1000 * median(times):.0f}", f"{median_ratio(times, others):.3f}"]
            table.row(way, *cells, f"{count / given.gigabytes / 1e9 / (given.rounds + 1):.3f}")


if __name__ == "__main__":
    main()
