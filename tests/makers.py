"""Versions made without a child process."""

from syncd.checkpoint.merging.options import Work
from syncd.daemon.maker import MakerProcess
from syncd.daemon.makes import MakeWork
from syncd.daemon.orders import Order
from syncd.protocol.records import Manifest
from syncd.storage.job import Job


class MakerHere(MakerProcess):
    """Makes a version at the first poll."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.order: Order | None = None

    def prepare(self) -> None:
        pass

    def begin(self, order: Order, work: Work) -> None:
        self.order, self._work = order, work

    def poll(self) -> Manifest | None:
        order, self.order = self.order, None
        return order and order.make(self._job, self._work)

    def stop(self) -> None:
        self.order = None

    def close(self) -> None:
        self.order = None


def work() -> MakeWork:
    """How a test's daemon makes versions."""
    return MakeWork(MakerHere, lambda: None)
