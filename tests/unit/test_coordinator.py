"""``CheckpointCoordinator`` of one rank, where its saves fail."""

import logging
import threading
from pathlib import Path

import pytest

from syncd.protocol.errors import SaveFailedError
from tests.hooks import DEADLINE
from tests.refusals import save_fails
from trainer_hooks.trinity import CheckpointCoordinator


def test_of_two_saves_that_failed_the_end_raises_one_and_logs_the_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = CheckpointCoordinator(tmp_path)
    last_call = threading.Event()

    def fails(step: int) -> None:
        assert last_call.wait(DEADLINE)
        raise SaveFailedError(f"no shard of step {step}")

    coordinator.save_async("one", lambda: fails(1), 1)
    coordinator.save_async("two", lambda: fails(2), 2)
    last_call.set()
    with (
        caplog.at_level(logging.ERROR, "trainer_hooks.saver"),
        save_fails("step 1"),
    ):
        coordinator.close()
    assert [record.getMessage() for record in caplog.records] == ["no shard of step 2"]
