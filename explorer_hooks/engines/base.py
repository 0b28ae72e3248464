"""``Engine``: the protocol of everything that loads versions."""

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

    The hook calls it from one thread at a time. For a new version, which is leased and verified by
    then::

        check -> prepare -> pause -> load -> reset_cache -> resume

    ``resume`` comes in any case once ``pause`` was called. Where ``load`` fails the hook loads the
    version before again, which is still leased, and only then resumes.
    """

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of versions that it can load: of ``full``, ``adapter``, ``remote``."""

    @property
    def is_local(self) -> bool:
        """Whether it reads a version's folder only on this host; if not, staging is off."""

    def attach(self) -> None:
        """Repair the state that a killed hook left, e.g. resume a server that it paused.

        Called once, before the first version.
        """

    def check(self, version: LeasedVersion) -> None:
        """Compare the version's names, shapes and dtypes with what it serves; change nothing.

        Raises:
            EngineMismatchError: they do not fit, or the version is of a kind that it cannot load.
        """

    def prepare(self, version: LeasedVersion) -> None:
        """Prepare the load while the engine still serves, e.g. read ahead.

        Nothing that it serves may change, and what is kept may be of no use: the version need not
        be loaded after all. ``load`` must work without it.

        Raises:
            OSError: storage failed.
            VerificationError: the version is not what it was when it was verified.
        """

    def pause(self) -> None:
        """Stop serving: running requests are finished, or held until :meth:`resume`."""

    def load(self, version: LeasedVersion) -> None:
        """Take the weights.

        All of them, or on an error none; an engine that cannot promise that says so, and serves
        again only when the version before was loaded again.
        """

    def reset_cache(self) -> None:
        """Drop results computed with the old weights, e.g. cached prefixes of prompts."""

    def resume(self) -> None:
        """Serve again. Safe to call when it is not paused."""

    def still_serves(self, version: LeasedVersion) -> bool:
        """Whether it has what it was given last: a server that was restarted has not.

        Asked now and then while there is nothing newer. Must be quick, and raise nothing.
        """

    def close(self) -> None:
        """Release its resources; the model itself stays. Safe to call twice."""


@runtime_checkable
class WeightTaker(Protocol):
    """What an :class:`Engine` has besides that can take weights by broadcast (method ``nccl``).

    The hook calls it as it does ``load``: between ``pause`` and ``reset_cache``, in one thread. An
    engine without it is served by the files alone.
    """

    @property
    def workers(self) -> int:
        """How many ranks of the weight group the engine has: one for each of its workers."""

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Join the weight group with all workers, and take the weights of one transfer.

        All of them, or on an error none. Where the engine is in the group of this generation
        already, it stays in it; one of an earlier generation is left.

        Args:
            rendezvous: where the group meets.
            rank_offset: the group rank of the first worker; the others follow.
            deadline: seconds that joining, and then the transfer, may take each.

        Raises:
            BroadcastError: it came to nothing; the engine has the weights that it had, and the
                generation is dead to it. Its cause is an EngineMismatchError where they do not fit.
            EngineBrokenError: what weights it has is not known.
        """

    def leave(self) -> None:
        """Leave the weight group, without waiting for anyone. Safe to call without one."""


@runtime_checkable
class MayBeAway(Protocol):
    """The method that an :class:`Engine` in another process has besides: it may not be running.

    A hook that follows in the background loads nothing while the engine is away.
    """

    def is_away(self) -> bool:
        """Whether it does not answer at all. Must be quick, and raise nothing."""


@runtime_checkable
class MayStartLater(Protocol):
    """The method that an :class:`Engine` has besides whose ``attach`` may wait for minutes."""

    def on_waiting(self, told: Callable[[str], object]) -> None:
        """Let ``told`` be given why ``attach`` waits: at once, and then now and then."""


@runtime_checkable
class TakesHubNames(Protocol):
    """What an :class:`Engine` says besides that finds tensors by the hub's names, too.

    In a new job versions get the hub's names if all explorers take them (``syncd run --names``). An
    engine that does not say so is given the names of the trainer's model there.
    """

    @property
    def hub_names(self) -> bool:
        """Whether it takes versions in which tensors have the hub's names."""


class InProcessEngine:
    """Base of engines in the calling process: there is nothing to pause, and no cache."""

    kinds: frozenset[str] = frozenset({"full"})
    is_local: bool = True
    hub_names: bool = False

    def attach(self) -> None:
        """Do nothing: no state outlives the process."""

    def prepare(self, version: LeasedVersion) -> None:
        """Nothing is read ahead."""

    def pause(self) -> None:
        """Do nothing: the caller serves requests itself, so it is idle during a pull."""

    def reset_cache(self) -> None:
        """Do nothing: there is no cache."""

    def resume(self) -> None:
        """It was not paused."""

    def still_serves(self, version: LeasedVersion) -> bool:  # noqa: ARG002 # the protocol's
        """True: nobody else changes the weights in this process."""
        return True

    def close(self) -> None:
        """Do nothing: no resources are held."""
