"""``Engine``: the protocol of all engines that load versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from explorer_hooks.reader import LeasedVersion
from syncd.protocol.participants import Rendezvous

__all__ = [
    "Engine",
    "InProcessEngine",
    "MayBeAway",
    "MayStartLater",
    "TakesHubNames",
    "WeightTaker",
]


class Engine(Protocol):
    """Something that serves a model and can take new weights.

    The hook calls it from one thread at a time. It leases and verifies a new version, and then
    calls::

        check -> prepare -> pause -> load -> reset_cache -> resume

    After ``pause`` the hook always calls ``resume``. If ``load`` fails, it first loads the previous
    version again, which is still leased.
    """

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of versions that it can load: of ``full``, ``adapter``, ``remote``."""

    @property
    def is_local(self) -> bool:
        """Whether the engine reads a version's folder only on this host; if not, staging is off."""

    def attach(self) -> None:
        """Repair the state that a killed hook left, e.g. resume a server that it paused.

        Called once, before the first version.
        """

    def check(self, version: LeasedVersion) -> None:
        """Compare the version's names, shapes and dtypes with the served model; change nothing.

        Raises:
            EngineMismatchError: they do not fit, or the version is of a kind that it cannot load.
        """

    def prepare(self, version: LeasedVersion) -> None:
        """Prepare the load while the engine still serves, e.g. read ahead.

        The served weights must not change. The prepared state may be thrown away, because the
        version may not be loaded after all. ``load`` must work without it.

        Raises:
            OSError: storage failed.
            VerificationError: the version has changed since it was verified.
        """

    def pause(self) -> None:
        """Stop serving: running requests are finished, or held until :meth:`resume`."""

    def load(self, version: LeasedVersion) -> None:
        """Load the weights of the version.

        All of them, or none if an error is raised. An engine that cannot promise that must say so;
        it serves again only after the previous version was loaded again.
        """

    def reset_cache(self) -> None:
        """Drop results computed with the old weights, e.g. cached prefixes of prompts."""

    def resume(self) -> None:
        """Serve again. Safe to call when it is not paused."""

    def still_serves(self, version: LeasedVersion) -> bool:
        """Whether the engine has the version that it was given last; a restarted server has not.

        Called now and then while there is nothing newer. Must be quick, and raise nothing.
        """

    def close(self) -> None:
        """Release its resources; the model itself stays. Safe to call twice."""


@runtime_checkable
class WeightTaker(Protocol):
    """The additional methods of an :class:`Engine` that can take broadcasts (method ``nccl``).

    The hook calls them like ``load``: between ``pause`` and ``reset_cache``, in one thread. An
    engine without them only loads versions from files.
    """

    @property
    def workers(self) -> int:
        """How many ranks of the weight group the engine has: one for each of its workers."""

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Join the weight group with all workers, and take the weights of one transfer.

        All of them, or none if an error is raised. An engine that is already in this generation of
        the group stays in it, and leaves an earlier one.

        Args:
            rendezvous: the record with the group's address.
            rank_offset: the group rank of the first worker; the others follow.
            deadline: the limit in seconds of joining, and of the transfer.

        Raises:
            BroadcastError: the transfer failed. The engine has its old weights, and takes no more
                part in this generation. The cause is an EngineMismatchError if they do not fit.
            EngineBrokenError: the engine's weights are unknown.
        """

    def leave(self) -> None:
        """Leave the weight group, without waiting for others. Safe to call without one."""


@runtime_checkable
class MayBeAway(Protocol):
    """The additional method of an :class:`Engine` in another process, which may not be running.

    A hook that follows in the background loads nothing while the engine is away.
    """

    def is_away(self) -> bool:
        """Whether the engine does not answer at all. Must be quick, and raise nothing."""


@runtime_checkable
class MayStartLater(Protocol):
    """The additional method of an :class:`Engine` whose ``attach`` may wait for minutes."""

    def on_waiting(self, told: Callable[[str], object]) -> None:
        """Pass ``told`` the reason why ``attach`` waits: at once, and then now and then."""


@runtime_checkable
class TakesHubNames(Protocol):
    """An :class:`Engine` that also finds tensors by the hub's names.

    In a new job versions get the hub's names if all explorers take them (``syncd run --names``). An
    engine that does not say so is given the names of the trainer's model there.
    """

    @property
    def hub_names(self) -> bool:
        """Whether it takes versions in which tensors have the hub's names."""


class InProcessEngine:
    """Base of engines in the calling process: nothing to pause, and no cache."""

    kinds: frozenset[str] = frozenset({"full"})
    is_local: bool = True
    hub_names: bool = False

    def attach(self) -> None:
        """Do nothing: no state outlives the process."""

    def prepare(self, version: LeasedVersion) -> None:
        """Do nothing: nothing is read ahead."""

    def pause(self) -> None:
        """Do nothing: the caller serves requests itself, so it is idle during a pull."""

    def reset_cache(self) -> None:
        """Do nothing: there is no cache."""

    def resume(self) -> None:
        """Do nothing: it was not paused."""

    def still_serves(self, version: LeasedVersion) -> bool:  # noqa: ARG002 # the protocol's
        """True: only the hook changes the weights in this process."""
        return True

    def close(self) -> None:
        """Do nothing: no resources are held."""
