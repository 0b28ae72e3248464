"""The requests that each kind of server must support, through its own routes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from explorer_hooks.reader import LeasedVersion


class ServerCalls(ABC):
    """The calls that differ between kinds of servers.

    All raise ServerUnreachableError if the server does not answer, and ServerRefusedError if it
    says that it failed.
    """

    @abstractmethod
    def _takes_names_of(self, version: LeasedVersion) -> bool:
        """Whether the server finds tensors by the names that the version has."""

    @abstractmethod
    def _find_kinds(self) -> frozenset[str]:
        """The kinds that the server can load, by its routes.

        Raises:
            InvalidSettingsError: routes are missing.
        """

    @abstractmethod
    def _named_folder(self) -> str | None:
        """The folder that the server names: its tensors have the names and shapes of the model."""

    @abstractmethod
    def _serves_what_it_names(self, said: str | None) -> bool:
        """Whether the label shows that the server serves the folder that it names."""

    @abstractmethod
    def _said_label(self) -> str | None:
        """The label of the server's weights; None if it has none."""

    @abstractmethod
    def _set_label(self, text: str) -> None:
        """Label the server's weights, if it can."""

    @abstractmethod
    def _can_label(self) -> bool:
        """Whether the label can be read and set for weights of any kind."""

    @abstractmethod
    def _may_be_paused(self) -> bool:
        """Whether requests may be waiting; only for a server that cannot be labelled."""

    @abstractmethod
    def _serves_adapter(self) -> bool:
        """Whether running requests may use an adapter that syncd loaded."""

    @abstractmethod
    def _pause(self) -> None:
        """Hold, finish or abort running requests, by the mode; new requests wait."""

    @abstractmethod
    def _resume(self) -> None:
        """Serve again; safe if it is not paused."""

    @abstractmethod
    def _reset_cache(self) -> None:
        """Forget all prefixes."""

    @abstractmethod
    def _load_folder(self, kind: str, folder: str, name: str) -> None:
        """Load an adapter, or a full model, which unloads the adapters.

        Args:
            kind: ``full`` or ``adapter``.
            folder: as the server sees it.
            name: the label, for servers that take it with the weights.

        Raises:
            ServerRefusedError: the server reports that it failed.
        """

    def _loaded_well(self, version: LeasedVersion) -> None:  # noqa: B027 # not every server can check
        """Check the loaded weights while the server is still paused.

        Raises:
            ServerRefusedError: they are wrong.
        """

    @abstractmethod
    def _prove(self, kind: str, name: str) -> None:
        """Generate one token.

        Args:
            kind: with a ``full`` model, or an ``adapter``.
            name: the label of the weights that it must generate with.

        Raises:
            ServerRefusedError: it generates nothing, or with other weights.
        """
