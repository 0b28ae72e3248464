"""The part of trainer_stall.py that compares where an fp32 model is cast for explorers.

Functions import torch, because the process that starts the ranks must stay small.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.machine import Report, median_ratio
from syncd.protocol.layout import JobLayout

OWN: Final = "cast by the trainer"
MERGED: Final = "cast by the daemon"
_TIMEOUT: Final = 600.0


@dataclass(frozen=True)
class Checkpoints:
    """Makes full checkpoints with AdamW; rank 0 merges each into a version, as a daemon does."""

    work: Path
    rank: int
    model: Any
    sync_dtype: Any
    wait_for_all: Callable[[], None]

    def measure(self, rounds: int) -> dict[str, list[dict[str, float]]]:
        """Seconds and bytes, by caster, of ``rounds + 1`` rounds; the first one warms up."""
        import torch  # noqa: PLC0415

        from trainer_hooks import SaveSettings, SyncSettings, TrainerHook  # noqa: PLC0415

        optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        found: dict[str, list[dict[str, float]]] = {OWN: [], MERGED: []}
        with ExitStack() as stack:
            hooks: dict[str, tuple[JobLayout, TrainerHook]] = {}
            for name, sync_dtype in ((OWN, self.sync_dtype), (MERGED, None)):
                job = self.work / ("cast" if sync_dtype else "job")
                hook = TrainerHook(
                    job,
                    self.model,
                    optimizer=optimizer,
                    settings=SyncSettings(sync_interval=1_000_000),
                    saving=SaveSettings(sync_dtype=sync_dtype, final=False),
                )
                hooks[name] = JobLayout(job), stack.enter_context(hook)
            for step in range(1, rounds + 2):
                for name in (OWN, MERGED) if step % 2 else (MERGED, OWN):
                    layout, hook = hooks[name]
                    found[name].append(self._one(layout, hook, step, cast=name == MERGED))
                    if self.rank == 0:
                        told = f"{step - 1} of {rounds}: {name}: {found[name][-1]}"
                        print(told, file=sys.stderr, flush=True)
        return found

    def _one(self, layout: JobLayout, hook: Any, step: int, *, cast: bool) -> dict[str, float]:
        if self.rank == 0:
            os.sync()
        self.wait_for_all()
        begun = time.perf_counter()
        hook.save_checkpoint(step)
        told = {"stall": time.perf_counter() - begun}
        if self.rank == 0:
            wait_for_pointer(layout, step, whole=False)
            told |= self._version(layout, step, cast=cast)
            told["version"] = time.perf_counter() - begun
            wait_for_pointer(layout, step)
            told["written"] = size_of(layout.actor(step))
        self.wait_for_all()
        if self.rank == 0:
            shutil.rmtree(layout.step(step))
        self.wait_for_all()
        return told

    def _version(self, layout: JobLayout, step: int, *, cast: bool) -> dict[str, float]:
        """Merge the weights while the trainer writes the rest of the checkpoint."""
        from syncd.checkpoint.build import build_model_folder  # noqa: PLC0415
        from syncd.checkpoint.merging.options import MergeOptions, Work  # noqa: PLC0415
        from syncd.checkpoint.save import look_at_save  # noqa: PLC0415
        from syncd.storage.fsio import Storage  # noqa: PLC0415

        folder = layout.root / "version"
        folder.mkdir()
        storage, actor = Storage(), layout.actor(step)
        options = MergeOptions(cast=self.sync_dtype if cast else None)
        begun = time.perf_counter()
        save = look_at_save(storage, actor, step)
        read = sum((actor / name).stat().st_size for name in save.weights)
        build_model_folder(storage, actor, save, folder, options=options, work=Work(lambda: None))
        seconds = time.perf_counter() - begun
        shutil.rmtree(folder)
        return {"merge": seconds, "read": read}


def print_table(report: Report, world_size: int, told: list[dict[str, Any]]) -> None:
    """Print the medians of all rounds except the first; the slowest rank's stall counts."""
    table = report.table(
        f"Full checkpoints with AdamW, {world_size} rank(s), and a version of each",
        ("the weights are", "stall ms", "x", "written GB", "merge reads", "merge s", "version s"),
    )
    stalls = {
        name: [
            max(one["stall"] for one in ranks)
            for ranks in zip(*(rank["full"][name][1:] for rank in told), strict=True)
        ]
        for name in (OWN, MERGED)
    }
    for name, rounds in told[0]["full"].items():
        middle = {key: median(one[key] for one in rounds[1:]) for key in rounds[0]}
        table.row(
            name,
            f"{1000 * median(stalls[name]):.0f}",
            f"{median_ratio(stalls[name], stalls[MERGED]):.2f}",
            f"{middle['written'] / 1e9:.3f}",
            f"{middle['read'] / 1e9:.3f}",
            f"{middle['merge']:.2f}",
            f"{middle['version']:.2f}",
        )


def wait_for_pointer(layout: JobLayout, step: int, *, whole: bool = True) -> None:
    """Wait until the weights are announced; if ``whole``, until the save has ended."""
    end = time.monotonic() + _TIMEOUT
    saving = layout.step(step) / ".saving"
    while time.monotonic() < end:
        if _pointer(layout) == step and not (whole and saving.exists()):
            return
        time.sleep(0.01)
    raise RuntimeError(f"the save of step {step} was not announced")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _pointer(layout: JobLayout) -> int | None:
    try:
        return int(layout.state_pointer.read_text())
    except (FileNotFoundError, ValueError):
        return None
