"""The check that deltas make the tensors of a version; large indexes are parsed in a child process.

The child is confined as that of :mod:`syncd.checkpoint.sandbox`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Final

from syncd.checkpoint.parallel import Check
from syncd.checkpoint.sandbox import wire
from syncd.checkpoint.sandbox.isolated import IsolatedParser
from syncd.checkpoint.tensor_rules import shown
from syncd.deltas.delta_index import RawIndex, parse_index
from syncd.deltas.delta_plan import PlanBase, plan_delta
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import CheckpointError

#: The most bytes of indexes that are parsed here: in 0.2 s, which a child takes to start.
SMALL: Final = 1024 * 1024
#: Held while a child checks, so that one at a time needs its memory, whatever the number of jobs.
CHECKING: Final = Lock()
_CHECK: Final = b"D"
_SHOWN: Final = 2000


class BusyError(Exception):
    """Raised if this process checks other large indexes now."""


def check_delta(indexes: Sequence[RawIndex], base: PlanBase, *, cancel: Check) -> None:
    """Check the indexes of all ranks, and that their pieces make the tensors of the base.

    Raises:
        DeltaError: they do not, or it takes too much memory or time to find out.
        BusyError: try again later.
        OSError: the child process cannot be started, or does not answer.
    """
    if sum(len(index.content) for index in indexes) <= SMALL:
        plan_delta(map(parse_index, indexes), base, cancel=cancel)
        return
    if not CHECKING.acquire(blocking=False):
        raise BusyError
    try:
        with DeltaChecker(cancel) as checker:
            checker.check(indexes, base)
    finally:
        CHECKING.release()


class DeltaChecker(IsolatedParser):
    """Checks deltas in a child process."""

    module = "deltas.delta_check"
    remedy = "The trainer saves whole weights instead"

    def check(self, indexes: Sequence[RawIndex], base: PlanBase) -> None:
        """Raises the errors of :func:`check_delta`."""
        request, where = pickle.dumps((indexes, base)), str(indexes[0].path.parent)
        try:
            self._ask(_CHECK, request, where, "index", _raise)
        except CheckpointError as error:
            raise DeltaError(str(error)) from None


def _raise(rows: Iterator[wire.Row]) -> None:
    for row in rows:
        raise DeltaError(shown(row, _SHOWN))


def run() -> None:
    """Answer requests of :class:`DeltaChecker`: with the text of a DeltaError, or nothing."""
    wire.run({_CHECK: _faults})


def _faults(request: bytes) -> Iterator[wire.Row]:
    indexes, base = pickle.loads(request)  # noqa: S301 - only the parent's own, around bytes
    try:
        plan_delta(map(parse_index, indexes), base, cancel=lambda: None)
    except DeltaError as error:
        yield shown(str(error), _SHOWN)
