"""A trainer or an explorer as a process of its own.

Each says what it does over a connection. A rollout or a training step is a sleep; a save is
numbers that are all the step's, written without torch, which would take longer to import than all
else that is done here: as shards, or as a full state dict into the memory folder.
"""

import argparse
import json
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from explorer_hooks.reader import Reader
from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.coordination.member import Doubles
from syncd.protocol.policy import (
    RunningStatus,
    SyncMethod,
    SyncSettings,
    SyncStyle,
    Version,
    explorer_syncs,
    trainer_decision,
)
from tests.jobs import SmallJob
from tests.multiprocess.by_hand import TrainerByHand

BEGUN = time.monotonic()
#: Seconds between two looks of the watcher that pulls behind a ``fully_async`` explorer.
_POLL = 0.5
SAYING = threading.Lock()
_heard: list[Connection] = []


def say(event: str, **more: object) -> None:
    with SAYING:
        _heard[0].send({"event": event, "at": time.monotonic() - BEGUN, **more})


class Saver:
    """Writes whole saves and moves the pointer."""

    def __init__(self, given: argparse.Namespace, run: str) -> None:
        self._memory: Path | None = given.memory
        self._by_hand = TrainerByHand(given.job, run=run)
        self._count = int(run, 16)

    def __call__(self, _: Any, step: int) -> None:
        if self._memory is None:
            self._by_hand.save(step)
            return
        self._count += 1
        SmallJob(self._memory).save(step, *[float(step)] * 3, counter=self._count)


class Trainer:
    """Trains, waits for data, and syncs as the policy says."""

    def __init__(self, given: argparse.Namespace, settings: SyncSettings, doubles: Doubles) -> None:
        self._given, self._settings = given, settings
        run = f"{time.time_ns() % 2**32:x}"
        self._sync = TrainerSynchronizer(
            given.job, given.name, settings=settings, memory_dir=given.memory, run_id=run,
            writer=Saver(given, run), doubles=doubles,
        )  # fmt: skip
        self._last: int | None = None

    def run(self) -> None:
        with self._sync as sync:
            sync.set_trainer_status(RunningStatus.RUNNING)
            say("ready")
            first = self._given.first_step
            for step in range(first, first + self._given.steps):
                self._wait_for_data(step)
                self._maybe_sync(step)
                sync.wait_for_explorers()
            if self._last != step:
                self._save(step)  # as the original always does in the end
            say("finished", step=step)
        say("closed")

    def _wait_for_data(self, step: int) -> None:
        done = time.monotonic() + self._given.seconds
        data = self._given.job / f"data-{step}"
        while time.monotonic() < done or not (data.exists() or not self._given.pipeline):
            self._maybe_sync(step - 1, waiting=True)
            time.sleep(0.02)

    def _maybe_sync(self, step: int, *, waiting: bool = False) -> None:
        by_request = self._settings.style is SyncStyle.EXPLORER_DRIVEN
        due = trainer_decision(
            self._settings,
            step=step,
            last_sync_step=self._last,
            requested=by_request and self._sync.explorer_requires_sync(),
            on_its_way=by_request and self._sync.save_is_on_its_way(),
            waiting=waiting,
        )
        if due.sync:
            self._save(step)
        elif due.nothing_new:
            self._sync.notify_no_new_model_state_dict()
            say("nothing new", step=step)

    def _save(self, step: int) -> None:
        self._sync.set_model_state_dict({}, step)
        self._last = step
        say("saved", step=step)


class Explorer:
    """Rolls out, and pulls as the policy says, until it has the last step or its work is done."""

    def __init__(self, given: argparse.Namespace, settings: SyncSettings, doubles: Doubles) -> None:
        self._given, self._settings = given, settings
        self._sync = ExplorerSynchronizer(
            given.job, given.name, settings=settings, memory_dir=given.memory, doubles=doubles
        )
        self._reader = Reader(given.memory or given.job, given.name)
        self._version: Version | None = None
        self._over = threading.Event()

    def run(self) -> None:
        with self._reader, self._sync as sync:
            sync.set_explorer_status(RunningStatus.RUNNING)
            say("ready")
            behind = threading.Thread(target=self._follow)
            if self._settings.style is SyncStyle.FULLY_ASYNC:
                behind.start()
            step = 0
            try:
                while not self._is_done(step):
                    step += 1
                    label = self._version.step if self._version else None
                    time.sleep(self._given.seconds)
                    say("rolled out", step=step, with_step=label)
                    if self._given.pipeline:
                        (self._given.job / f"data-{step}").touch()
                    requires = sync.trainer_requires_weight_sync()
                    if explorer_syncs(self._settings, step, trainer_requires_sync=requires):
                        self._pull(sync.wait_new_model_state_dict(self._version))
            finally:
                self._over.set()
                if behind.is_alive():
                    behind.join()
            say("finished", step=step)

    def _is_done(self, step: int) -> bool:
        if self._given.steps:
            return step >= self._given.steps
        return self._version is not None and self._version.step >= self._given.last_step

    def _follow(self) -> None:
        while not self._over.wait(_POLL):
            self._pull(self._sync.wait_new_model_state_dict(self._version, no_wait=True))

    def _pull(self, newest: Version | None) -> None:
        before = self._version.sequence if self._version else 0
        if newest is None or newest == self._version:
            say("nothing")
            return
        leased = self._reader.next_version(before, 60)
        leased.verify()
        self._version = Version(leased.sequence, leased.step)
        self._sync.set_explorer_version(self._version)
        leased.release()
        say("pulled", sequence=leased.sequence, step=leased.step)


def main(arguments: list[str], heard: Connection) -> None:
    _heard.append(heard)
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["trainer", "explorer"])
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--name", default="trainer")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--first-step", type=int, default=1)
    parser.add_argument("--last-step", type=int, default=2**31)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--clock-offset", type=float, default=0.0)
    given = parser.parse_args(arguments)
    doubles = Doubles(
        clock=lambda: time.monotonic() + given.clock_offset,
        wall=lambda: time.time() + given.clock_offset,
    )
    settings = SyncSettings(**given.settings)
    if given.memory is not None:
        assert settings.method is SyncMethod.MEMORY
    role = Trainer if given.role == "trainer" else Explorer
    role(given, settings, doubles).run()
