"""The requests that each kind of server must support, through its own routes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from explorer_hooks.reader import LeasedVersion


class ServerCalls(ABC):
    """The calls that differ between kinds of servers.

    Each call raises ServerUnreachableError if the server does not answer, and ServerRefusedError if
    the server reports a failure.
    """

    @abstractmethod
    def _takes_names_of(self, version: LeasedVersion) -> bool:
        """True if the server finds tensors by their names in the version."""

    @abstractmethod
    def _find_kinds(self) -> frozenset[str]:
        """The kinds of versions that the server can load, by its routes."""

    @abstractmethod
    def _named_folder(self) -> str | None:
        """The model folder that the server reports. It has the served tensors' names and shapes."""

    @abstractmethod
    def _serves_what_it_names(self, said: str | None) -> bool:
        """True if the label ``said`` shows that the server serves :meth:`_named_folder`."""

    @abstractmethod
    def _said_label(self) -> str | None:
        """The label of the server's weights; None if they have none."""

    def _ask_workers(self) -> None:  # noqa: B027 # not every server can ask them
        """Wait for an answer of the server's workers."""

    @abstractmethod
    def _set_label(self, text: str) -> None:
        """Set the label, if the server supports labels."""

    @abstractmethod
    def _can_label(self) -> bool:
        """True if the server supports labels."""

    @abstractmethod
    def _may_be_paused(self) -> bool:
        """True if the server is perhaps paused. Only called for a server without labels."""

    @abstractmethod
    def _serves_adapter(self) -> bool:
        """True if running requests can use an adapter from syncd."""

    @abstractmethod
    def _pause(self) -> None:
        """Hold, finish or abort running requests, by the mode, and let new requests wait."""

    @abstractmethod
    def _resume(self) -> None:
        """Serve again. Must work if the server is not paused."""

    @abstractmethod
    def _reset_cache(self) -> None:
        """Empty the prefix cache."""

    @abstractmethod
    def _load_folder(self, kind: str, folder: str, name: str) -> None:
        """Load an adapter or a full model. The load of a full model unloads the adapter.

        ``name`` is the label, for servers that set it together with the weights.
        """

    def _loaded_well(self, version: LeasedVersion) -> None:  # noqa: B027 # not every server can check
        """Check the loaded weights during the pause."""

    @abstractmethod
    def _prove(self, kind: str, name: str) -> None:
        """Generate one token. If the server reports the label of its weights, check the label."""
