"""What an engine must be able to do."""

from __future__ import annotations

from typing import Protocol

from explorer_hooks.reader import LeasedVersion


class Engine(Protocol):
    """Something that serves a model and can take new weights.

    ``load`` is called only with a version that is leased, verified, and was accepted by ``check``.
    """

    def check(self, version: LeasedVersion) -> None:
        """Say whether the version's tensors fit, and change nothing.

        Raises:
            EngineMismatchError: a name, a shape or a dtype does not.
        """

    def load(self, version: LeasedVersion) -> None:
        """Take the weights: all of them, or on an error none."""
