"""The requests that each kind of server must support, through its own routes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from explorer_hooks.reader import LeasedVersion


class ServerCalls(ABC):
    """The calls that differ between kinds of servers.

    All raise ServerUnreachableError where it does not answer, and ServerRefusedError where it says
    that it has not done it.
    """

    @abstractmethod
    def _takes_names_of(self, version: LeasedVersion) -> bool:
        """Whether it finds tensors by the trainer's names, if the version has these."""

    @abstractmethod
    def _find_kinds(self) -> frozenset[str]:
        """What it can load, by its routes.

        Raises:
            InvalidSettingsError: routes are missing.
        """

    @abstractmethod
    def _named_folder(self) -> str | None:
        """The model that it names: of the same names and shapes as what it serves."""

    @abstractmethod
    def _serves_what_it_names(self, said: str | None) -> bool:
        """Whether what it serves is the model that it names, by its label."""

    @abstractmethod
    def _said_label(self) -> str | None:
        """The label of its weights; None where it has none."""

    @abstractmethod
    def _set_label(self, text: str) -> None:
        """Label its weights, where it can."""

    @abstractmethod
    def _can_label(self) -> bool:
        """Whether it says, and is told, the label of its weights, whatever kind they are."""

    @abstractmethod
    def _may_be_paused(self) -> bool:
        """Whether requests wait, or may: asked of one that cannot be labelled."""

    @abstractmethod
    def _serves_adapter(self) -> bool:
        """Whether there is an adapter of ours that requests may hold."""

    @abstractmethod
    def _pause(self) -> None:
        """Hold, finish or abort what is in flight, by the mode; what comes then waits."""

    @abstractmethod
    def _resume(self) -> None:
        """Serve again; also one that is not paused."""

    @abstractmethod
    def _reset_cache(self) -> None:
        """Forget all prefixes."""

    @abstractmethod
    def _load_folder(self, kind: str, folder: str, name: str) -> None:
        """Load a full model, which ends what adapters there are, or an adapter.

        Args:
            kind: ``full`` or ``adapter``.
            folder: as the server sees it.
            name: the label, for servers that take it with the weights.

        Raises:
            ServerRefusedError: it says that it has not.
        """

    def _loaded_well(self, version: LeasedVersion) -> None:  # noqa: B027 # not each can look
        """Look at what was loaded, while it is still paused.

        Raises:
            ServerRefusedError: it is not what it should be.
        """

    @abstractmethod
    def _prove(self, kind: str, name: str) -> None:
        """Generate one token.

        Args:
            kind: with a ``full`` model, or an ``adapter``.
            name: the label of what it must generate with.

        Raises:
            ServerRefusedError: it does not.
        """
