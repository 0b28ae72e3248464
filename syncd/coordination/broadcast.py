"""The weight group: the trainer's rank 0 and all explorers' workers, beside any other group.

One process group of its own over a TCPStore of its own; every wait in it has a deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from syncd.protocol.participants import Rendezvous

if TYPE_CHECKING:
    from torch import Tensor


class Broadcasting:
    """A broadcast under way."""

    def wait(self) -> None:
        """Wait until the tensor may be used again (rank 0), or has arrived (the others).

        Raises:
            BroadcastError: not within the transfer's deadline, or a peer or the store is gone.
        """
        raise NotImplementedError


class WeightGroup:
    """One generation of a weight group, as one of its ranks.

    Attributes:
        rank, world_size, generation: its own.
        name: the group's.
        device: where tensors must be: that of the constructor's, for both backends.
    """

    rank: int
    world_size: int
    generation: int
    name: str
    device: torch.device

    @classmethod
    def join(
        cls, rendezvous: Rendezvous, rank: int, *, deadline: float, device: torch.device
    ) -> WeightGroup:
        """Form the group together with all its other ranks.

        Args:
            rendezvous: where they meet.
            rank: ours; rank 0 joins through :class:`~syncd.coordination.weight_sync.TrainerGroup`.
            deadline: seconds, for this, and again for each transfer.
            device: where the tensors that are broadcast are.

        Raises:
            BroadcastError: they did not all come in time, or it cannot be formed here.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Begin a transfer: its deadline is that of the constructor from now."""
        raise NotImplementedError

    def broadcast(self, tensor: Tensor) -> Broadcasting:
        """Begin to broadcast a tensor from rank 0; all ranks do so in the same order.

        Args:
            tensor: contiguous, on the group's device, of the same size on all ranks; uint8.

        Raises:
            BroadcastError: the group has failed.
        """
        raise NotImplementedError

    def agree(self, ok: bool) -> bool:  # noqa: FBT001 # a vote
        """Say whether all is well here, and learn whether it is everywhere.

        Promised: no two ranks that come back with an answer have different ones.

        Raises:
            BroadcastError: not all have said so within the transfer's deadline, or the store is
                gone: what was agreed is not known here.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group, without waiting for anybody. Safe to call twice."""
        raise NotImplementedError


class KeptGroup:
    """A worker's weight group from one transfer to the next: formed anew where it has to be."""

    def open(
        self, rendezvous: Rendezvous, rank: int, *, deadline: float, device: torch.device
    ) -> WeightGroup:
        """The group of a rendezvous, and a new transfer in it.

        Args and errors are those of :meth:`WeightGroup.join`.
        """
        raise NotImplementedError

    def failed(self) -> None:
        """Leave the group: a transfer did not come to its end. The next one forms another."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        raise NotImplementedError
