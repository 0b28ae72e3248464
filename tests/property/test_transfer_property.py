"""All who take part in a transfer come to one decision, however their steps interleave."""

import os
import random
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.coordination.broadcast.offer import ExplorerSide, Offers, TrainerSide
from syncd.coordination.participant import Participant
from syncd.coordination.roster import Roster
from syncd.coordination.waiting import Wait
from syncd.protocol.layout import JobLayout
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.job import Job
from tests.storages import FastStorage, RuledStorage

#: Where an actor may be held up: before what others see, or what it sees of them.
TURNS = {"link", "rename", "open_read", "names"}
LEASE_TIME = 3600.0


class Turns:
    """Lets one actor at a time do one step."""

    def __init__(self, seed: int, stays: float) -> None:
        self._random = random.Random(seed)
        self._stays = stays
        self._stepped = threading.Semaphore(0)
        self._mine: dict[int, threading.Semaphore] = {}
        self._alive: list[threading.Semaphore] = []

    def step(self, *_: object) -> None:
        mine = self._mine.get(threading.get_ident())
        if mine is not None:
            self._stepped.release()
            assert mine.acquire(timeout=60)

    def run(self, *actors: Callable[[], Any]) -> list[Any]:
        results = [None] * len(actors)

        def act(number: int, turn: threading.Semaphore) -> None:
            assert turn.acquire(timeout=60)
            self._mine[threading.get_ident()] = turn
            try:
                results[number] = actors[number]()
            finally:
                self._alive.remove(turn)
                self._stepped.release()

        threads = []
        for number in range(len(actors)):
            mine = threading.Semaphore(0)
            self._alive.append(mine)
            threads.append(threading.Thread(target=act, args=[number, mine]))
            threads[-1].start()
        turn = self._alive[0]
        while self._alive:
            # In bursts: some are far ahead of others that stand still.
            if turn not in self._alive or self._random.random() >= self._stays:
                turn = self._random.choice(self._alive)
            turn.release()
            assert self._stepped.acquire(timeout=60)
        for thread in threads:
            thread.join(60)
        return results


class Patience(Wait):
    """A wait whose time is up after so many looks."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def more(self) -> bool:
        self._looks -= 1
        return self._looks > 0


def storage(turns: Turns) -> RuledStorage:
    def rule(called: str, _: tuple[Any, ...]) -> None:
        if called in TURNS:
            turns.step()

    return RuledStorage(rule)


@given(
    seed=st.integers(0, 2**32),
    stays=st.sampled_from([0.0, 0.7, 0.9, 0.97]),
    looks=st.lists(st.integers(1, 12), min_size=3, max_size=3),
)
@settings(max_examples=300 if "SYNCD_DEEP" in os.environ else 120)
def test_all_transfer_the_step_or_none_does(seed: int, stays: float, looks: list[int]) -> None:
    turns = Turns(seed, stays)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        layout = JobLayout(Path(folder))
        Job(FastStorage(), layout).open(lease_time=LEASE_TIME)

        def actor(role: str, number: int) -> tuple[Offers, Roster, Participant[Any]]:
            mine = storage(turns)
            first = (
                (lambda session: TrainerReport(
                    run_id="r", world_size=1, status="running", session=session, time=0.0))
                if role == "trainer"
                else (lambda session: ExplorerReport(
                    name=f"e{number}", session=session, status="running", workers=1, time=0.0))
            )  # fmt: skip
            path = layout.trainer_report if role == "trainer" else layout.explorer(f"e{number}")
            me = Participant(
                Job(mine, layout), role, f"e{number}", LEASE_TIME, path=path, first=first,
                clock=lambda: 0.0, wall=lambda: 0.0,
            )  # fmt: skip
            stack.callback(me.close)
            return (
                Offers(Job(mine, layout)),
                Roster(Job(mine, layout), LEASE_TIME, background=False),
                me,
            )

        trainer = TrainerSide(*actor("trainer", 0))
        sides = [ExplorerSide(*actor("explorer", number)) for number in range(2)]
        found = turns.run(
            lambda: trainer.agree(7, Patience(looks[0])),
            lambda: sides[0].agree(Patience(looks[1])),
            lambda: sides[1].agree(Patience(looks[2])),
        )
        assert found in ([7, 7, 7], [None, None, None])
