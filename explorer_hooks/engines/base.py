"""``Engine``: the protocol of all engines, with optional protocols for additional methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from explorer_hooks.reader import LeasedVersion
from syncd.protocol.reports import Rendezvous

__all__ = [
    "Engine",
    "InProcessEngine",
    "MayBeAway",
    "MayStartLater",
    "TakesHubNames",
    "WeightTaker",
]


class Engine(Protocol):
    """Serves a model, and can load new weights.

    The hook calls an engine from one thread at a time. The hook leases and verifies a new version,
    and then calls::

        check -> prepare -> pause -> load -> reset_cache -> resume

    The hook calls ``resume`` after every ``pause``, even after an error. If ``load`` fails, the
    hook first loads the previous version again. The previous version stays leased until then.
    """

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of versions the engine can load: some of ``full``, ``adapter``, ``remote``."""

    @property
    def is_local(self) -> bool:
        """True if the engine reads versions only on this host. Staging needs True."""

    def attach(self) -> None:
        """Repair the state that a killed hook left, for example resume a paused server.

        Called once, before the first version.
        """

    def check(self, version: LeasedVersion) -> None:
        """Compare the version's tensors with the served model, without changing the model.

        Raises:
            EngineMismatchError: the version's kind, or a tensor's name, dtype or shape, does not
                fit.
        """

    def prepare(self, version: LeasedVersion) -> None:
        """Prepare the load while the engine still serves. The served weights must not change.

        ``load`` must also accept a version other than the one that was prepared last.

        Raises:
            OSError: storage failed.
            VerificationError: the version has changed since it was verified.
        """

    def pause(self) -> None:
        """Stop serving. Finish running requests, or hold them until :meth:`resume`."""

    def load(self, version: LeasedVersion) -> None:
        """Load the weights of the version.

        After an error the old weights must be unchanged. If your engine cannot ensure this, its
        documentation must say that the weights are unknown until a load succeeds.
        """

    def reset_cache(self) -> None:
        """Drop results of the old weights: cached prefixes of prompts, encoded images."""

    def resume(self) -> None:
        """Serve again. Must also work when the engine is not paused."""

    def still_serves(self, version: LeasedVersion) -> bool:
        """True if the engine still has ``version``, which it loaded last; False after a restart.

        The hook calls this every few seconds while there is no newer version. Must be quick, and
        must not raise an error.
        """

    def close(self) -> None:
        """Release the engine's resources, but keep the model. Must work when called twice."""


@runtime_checkable
class WeightTaker(Protocol):
    """The additional methods of an :class:`Engine` that can take broadcasts (method ``nccl``).

    The hook calls ``receive`` instead of ``load``, between ``pause`` and ``reset_cache``.
    """

    @property
    def workers(self) -> int:
        """The number of the engine's workers. Each worker is one rank of the weight group."""

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Join the weight group with all workers, and take the weights of one transfer.

        An engine that is already in the group of ``rendezvous`` stays in it. An engine in an
        earlier group leaves that group first.

        Args:
            rendezvous: the record with the group's address.
            rank_offset: the group rank of the first worker. The next workers have the next ranks.
            deadline: seconds to join the group. The transfer gets the same number of seconds.

        Raises:
            BroadcastError: the engine has its old weights, and has left the group. If the new
                weights do not fit the model, ``__cause__`` is an EngineMismatchError.
            EngineBrokenError: the engine's weights are unknown.
        """

    def leave(self) -> None:
        """Leave the weight group, if there is one, without waiting for the other members."""


@runtime_checkable
class MayBeAway(Protocol):
    """The additional method of an :class:`Engine` that needs another process, such as a server.

    While the engine is away, the hook's background thread loads nothing.
    """

    def is_away(self) -> bool:
        """True if the process does not answer. Must be quick, and must not raise an error."""


@runtime_checkable
class MayStartLater(Protocol):
    """The additional method of an :class:`Engine` whose ``attach`` can wait for minutes."""

    def on_waiting(self, told: Callable[[str], object]) -> None:
        """Make ``attach`` call ``told`` with the reason when a wait begins, and then repeatedly."""


@runtime_checkable
class TakesHubNames(Protocol):
    """An :class:`Engine` that also finds tensors by the hub's names.

    In a new job, versions get the hub's names if all explorers take them (``syncd run --names``).
    An engine without this property takes only the trainer's names.
    """

    @property
    def hub_names(self) -> bool:
        """True if the engine takes versions whose tensors have the hub's names."""


class InProcessEngine:
    """Base class for engines in the calling process, which need no pause and have no cache."""

    kinds: frozenset[str] = frozenset({"full"})
    is_local: bool = True
    hub_names: bool = False

    def attach(self) -> None:
        """Do nothing."""

    def prepare(self, version: LeasedVersion) -> None:
        """Do nothing. A subclass can read ahead here."""

    def pause(self) -> None:
        """Do nothing, because the caller serves no requests while it pulls."""

    def reset_cache(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def still_serves(self, version: LeasedVersion) -> bool:  # noqa: ARG002 # the protocol's
        """Return True, because only the hook changes the weights."""
        return True

    def close(self) -> None:
        """Do nothing."""
