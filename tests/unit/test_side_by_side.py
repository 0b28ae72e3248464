import threading
from collections.abc import Callable

import pytest

from syncd.checkpoint.parallel import Check, run_side_by_side
from tests.jobs import nothing

_GUARD = 60.0


def waiting(started: threading.Event, ended: list[str]) -> Callable[[Check], None]:
    """A task that goes on until it is stopped."""

    def task(check: Check) -> None:
        started.set()
        pause = threading.Event()
        try:
            while not pause.wait(0.001):
                check()
        finally:
            ended.append(threading.current_thread().name)

    return task


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_results_come_in_the_order_of_the_tasks(threads: int) -> None:
    met = threading.Barrier(2)

    def together(number: int) -> int:
        if threads > 1:
            met.wait(_GUARD)  # so that both do run at once
        return number

    tasks = [lambda _: together(0), lambda _: together(1)]
    assert run_side_by_side(tasks, threads=threads, look=nothing) == [0, 1]
    assert run_side_by_side([], threads=threads, look=nothing) == []


def test_one_at_a_time_they_run_in_the_thread_that_asks() -> None:
    looks: list[int] = []

    def task(check: Check) -> threading.Thread:
        check()
        return threading.current_thread()

    found = run_side_by_side([task, task], threads=1, look=lambda: looks.append(1))
    assert found == [threading.current_thread()] * 2
    assert looks == [1, 1]


def test_a_failure_stops_the_others_and_is_what_is_raised() -> None:
    started, ended = threading.Event(), list[str]()

    def failing(_: Check) -> None:
        assert started.wait(_GUARD)
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        run_side_by_side([waiting(started, ended), failing], threads=2, look=nothing)
    assert len(ended) == 1


def test_what_look_raises_stops_all_and_keeps_those_that_wait_from_starting() -> None:
    started, ended = threading.Event(), list[str]()
    begun: list[int] = []

    def look() -> None:
        if started.is_set():
            raise KeyboardInterrupt

    tasks = [waiting(started, ended), waiting(started, ended), lambda _: begun.append(1)]
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(tasks, threads=2, look=look)
    assert len(ended) >= 1
    assert not begun
    assert not [thread for thread in threading.enumerate() if thread.name in ended]


def test_only_the_thread_that_asks_looks() -> None:
    looked: set[threading.Thread] = set()
    second = threading.Event()

    def look() -> None:
        if looked:
            second.set()
        looked.add(threading.current_thread())

    def task(_: Check) -> bool:
        return second.wait(_GUARD)

    assert run_side_by_side([task, task], threads=2, look=look) == [True, True]
    assert looked == {threading.current_thread()}


def test_a_thread_that_cannot_be_started_is_an_error_of_the_host() -> None:
    before = threading.stack_size(2**46)
    try:
        with pytest.raises(BlockingIOError, match="thread"):
            run_side_by_side([lambda _: 0] * 2, threads=2, look=nothing)
    finally:
        threading.stack_size(before)
