"""Weights on their way from a trainer into an engine, by broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from syncd.coordination.weight_meta import WeightMeta

if TYPE_CHECKING:
    from torch import Tensor

    from explorer_hooks.engines.in_place import HostStage
    from explorer_hooks.engines.targets import Fit, Target
    from syncd.coordination.broadcast import WeightGroup


class WeightReceiver:
    """Receives one transfer after the other; one call of a method below is one transfer.

    Args:
        group: of this process's rank in it.
        known: the meta of a transfer before, which is not sent again where it is the same.

    Attributes:
        meta: of the transfer that was begun last.
    """

    def __init__(self, group: WeightGroup, *, known: WeightMeta | None = None) -> None:
        raise NotImplementedError

    meta: WeightMeta | None

    def receive(self, fits: Callable[[WeightMeta], object]) -> Iterator[tuple[str, Tensor]]:
        """All tensors, in host memory, once every receiver has the last byte and has said so.

        The first ``next()`` takes as long as the transfer; after it nothing can fail here. As much
        host memory as the model has is held for as long as the iterator is.

        Args:
            fits: is given the names, dtypes and shapes before any byte of a tensor is sent, and
                raises what :meth:`receive` is to raise where they cannot be loaded.

        Yields:
            Name and whole tensor, contiguous, on the CPU.

        Raises:
            BroadcastError: this or another receiver did not get it, or refused; nothing was yielded.
        """
        raise NotImplementedError

    def stream(self, fits: Callable[[WeightMeta], object]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as they arrive: of a model that is too big to be held twice.

        In memory are two buckets, and a tensor that is larger than a bucket. What was yielded may
        be of a transfer that comes to nothing: only when the iterator has ended without an error
        has every receiver all of it.

        Yields:
            Name and whole tensor, contiguous, on the group's device; valid until the next one.

        Raises:
            BroadcastError: as above, at any moment.
        """
        raise NotImplementedError

    def receive_into(self, stage: HostStage, fit: Callable[[WeightMeta], Fit]) -> list[Target]:
        """All that targets are to have, into host memory that is kept; they are not changed.

        Returns:
            The targets, for ``stage.copy``, once every receiver has the last byte.

        Raises:
            EngineMismatchError: as ``fit`` raises it, or two tied tensors are not the same.
            BroadcastError: as above.
        """
        raise NotImplementedError

    def fill(self, fit: Callable[[WeightMeta], Fit]) -> None:
        """Fill targets themselves, tensor by tensor as they arrive.

        Raises:
            EngineMismatchError: as ``fit`` raises it; nothing was changed.
            BroadcastError: likewise.
            EngineBrokenError: it ended in the middle: the targets are of two versions.
        """
        raise NotImplementedError
