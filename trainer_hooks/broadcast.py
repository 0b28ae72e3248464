"""Weights on their way from all ranks of a trainer to its explorers, by broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncd.coordination.weight_meta import BUCKET, WeightMeta

if TYPE_CHECKING:
    from torch import nn

    from syncd.coordination.broadcast import WeightGroup


class Sent(NamedTuple):
    """What one transfer was.

    Attributes:
        nbytes: of all tensors.
        buckets: how many broadcasts it took.
        seconds: from the first gathering until all have said that they have it.
    """

    nbytes: int
    buckets: int
    seconds: float


class WeightSender:
    """Sends a model to the weight group.

    Args:
        model: as the trainer's hook has it.
        bucket_bytes: the most that one broadcast moves.
        digests: whether receivers check each bucket; by default where the group is on the CPU.
    """

    def __init__(
        self, model: nn.Module, *, bucket_bytes: int = BUCKET, digests: bool | None = None
    ) -> None:
        raise NotImplementedError

    def meta(self) -> WeightMeta:
        """What a transfer would hold. Collective for FSDP1 alone.

        Raises:
            SaveFailedError: the model has something that cannot be sent.
        """
        raise NotImplementedError

    def send(self, group: WeightGroup | None) -> Sent:
        """Send the model as it is now. Collective: on all ranks of the trainer, at the same moment.

        Args:
            group: on rank 0 the weight group; None on all other ranks.

        Raises:
            BroadcastError: on rank 0 alone: not all receivers have it.
            SaveFailedError: on all ranks: they do not have the same tensors, or some that cannot be
                sent; or a collective of the trainer's failed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let the buckets go. Safe to call twice."""
