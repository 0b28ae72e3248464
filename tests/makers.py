"""Versions made without a child process."""

from syncd.checkpoint.merging.options import Work
from syncd.daemon import maker
from syncd.daemon.maker import MakerProcess
from syncd.daemon.makes import MakeWork
from syncd.daemon.orders import Order
from syncd.protocol.records import Manifest
from syncd.storage.job import Job


def end_idle_makers() -> None:
    """The next order starts a process."""
    while maker._idle:
        maker._idle.pop().close()


class MakerHere(MakerProcess):
    """Makes a version at the first poll."""

    order: Order | None = None

    def __init__(self, job: Job) -> None:
        super().__init__(job)

    def prepare(self) -> None:
        pass

    def begin(self, order: Order, work: Work) -> None:
        self.order, self._work = order, work

    def poll(self) -> Manifest | None:
        order, self.order = self.order, None
        return order and order.make(self._job, self._work)

    def listen(self) -> None:
        pass

    def stop(self) -> None:
        self.order = None


def make_here() -> None:
    """Let all daemons of this process make versions without another one."""
    for name in ("order", "prepare", "begin", "poll", "listen", "stop"):
        setattr(MakerProcess, name, vars(MakerHere)[name])


def work(maker: type[MakerHere] = MakerHere) -> MakeWork:
    """How a test's daemon makes versions."""
    return MakeWork(maker, lambda: None)
