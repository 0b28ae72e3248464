"""Waiting for what a trainer's hook does behind the training."""

import logging
import threading
from typing import Any

from torch import nn

from tests.jobs import SmallJob
from tests.storages import RuledStorage, once
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook

#: A guard against hanging, for what takes a second or two.
DEADLINE = 60.0


def _unbroken(record: logging.LogRecord) -> bool:
    raise AssertionError(record.getMessage())


#: The first full checkpoint of every test's run can be resumed, or its save fails.
PROMISE = logging.getLogger("trainer_hooks.resuming.promise")
PROMISE.addFilter(_unbroken)


def over(hook: TrainerHook) -> None:
    """Wait until what is under way has ended, well or not."""
    assert hook._saver.has_ended(timeout=DEADLINE)


def written(hook: TrainerHook) -> None:
    """Wait until what is under way has ended; raises what failed."""
    over(hook)
    hook._saver.raise_failure()


def checkpoint(hook: TrainerHook, step: int) -> None:
    """Save a full checkpoint, and wait for it."""
    hook.save_checkpoint(step, block_until_saved=True)


def saved(job: SmallJob, model: nn.Module, *, full: bool = False, **saving: Any) -> None:
    """A hook syncs step 1, and makes it a full checkpoint if asked."""
    settings = SyncSettings(sync_interval=1, save_interval=1 if full else 0)
    with TrainerHook(job.root, model, settings=settings, saving=SaveSettings(**saving)) as hook:
        hook.after_step(1)


class Gate:
    """Holds a storage call until it is opened."""

    def __init__(self, storage: RuledStorage, method: str, where: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        storage.rules.append(once(method, self._hold, where=where))

    def _hold(self, *_: object) -> None:
        self.reached.set()
        assert self.opened.wait(DEADLINE)
