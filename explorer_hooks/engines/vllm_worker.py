"""What each worker of vLLM is given besides, so that weights can be broadcast to it.

Start vLLM with ``--worker-extension-cls explorer_hooks.engines.vllm_worker.SyncdWorker``: it mixes
the class into its own worker's. :mod:`.vllm_workers` calls it, by ``collective_rpc``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from explorer_hooks.broadcast import WeightReceiver
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.fitting import Fits, fits_if_here
from syncd.coordination.broadcast import KeptGroup
from syncd.coordination.weight_meta import WeightMeta
from syncd.protocol.errors import EngineMismatchError, SyncdError
from syncd.protocol.participants import Rendezvous
from syncd.protocol.records import parse

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SyncdWorker"]

log = logging.getLogger(__name__)

Answer = dict[str, object]


class SyncdWorker:
    """The methods that vLLM's worker gets.

    What arrives is held in host memory, as much as the whole model has on each worker, until it is
    loaded by a call of its own: so that all workers have it before the first one changes.

    No method raises: vLLM leaves the answers of other workers unread behind an error, and takes
    them for those of the next call. What went wrong is in the answer, as ``failed``; and, as
    ``misfits``, whether that is what was to be sent.
    """

    _syncd_membership: Membership | None = None

    if TYPE_CHECKING:  # vLLM's: it takes no extension that has one of its worker's names
        device: torch.device
        rank: int
        model_config: Any
        reload_weights: Callable[..., None]

    def syncd_receive(self, rendezvous: str, rank_offset: int, deadline: float) -> Answer:
        """Join the weight group, and receive a transfer; the model is not touched.

        Args:
            rendezvous: the record, as JSON.
            rank_offset: the group rank of the engine's first worker.
            deadline: seconds that joining, and then the transfer, may take each.
        """
        member = self._syncd_membership
        if member is None:
            member = self._syncd_membership = Membership()
        return _answer(
            lambda: member.receive(
                parse(Rendezvous, rendezvous.encode(), "the rendezvous"),
                rank_offset + self.rank,
                deadline=deadline,
                device=self.device,
                model=str(self.model_config.model),
            )
        )

    def syncd_load(self) -> Answer:
        """Load what was received; where that fails, the model is torn."""
        member = self._syncd_membership or Membership()
        return _answer(lambda: self.reload_weights(weights_iterator=member.take()))

    def syncd_leave(self) -> Answer:
        """Leave the weight group, and let go of what was received."""
        member, self._syncd_membership = self._syncd_membership, None
        return _answer(member.close if member is not None else lambda: None)


class Membership:
    """A worker's place in the weight group, and what it has received there."""

    def __init__(self) -> None:
        self._kept = KeptGroup()
        self._known: WeightMeta | None = None
        self._received: Iterator[tuple[str, Tensor]] | None = None
        self._fits: Fits | None = None

    def receive(
        self,
        rendezvous: Rendezvous,
        rank: int,
        *,
        deadline: float,
        device: torch.device,
        model: str,
    ) -> None:
        """Receive a transfer whole.

        Args:
            rendezvous: of its group.
            rank: this worker's.
            deadline: seconds for joining, and again for the transfer.
            device: the worker's; gloo moves host memory alone.
            model: the folder that the worker has loaded: what is sent must fit it. Anything else
                than a folder of this host fits unseen.

        Raises:
            BroadcastError: it did not arrive everywhere, or does not fit, which is its cause then;
                the group is left.
        """
        self._received = None
        if self._fits is None:
            self._fits = fits_if_here(model, "this vLLM")
        where = torch.device("cpu") if rendezvous.backend == "gloo" else device
        group = self._kept.open(rendezvous, rank, deadline=deadline, device=where)
        try:
            receiver = WeightReceiver(group, known=self._known)
            arriving = receiver.receive(self._check)
            first = next(arriving)  # once all have arrived; there is one
        except BaseException:
            self._kept.close()
            raise
        self._known = receiver.meta
        self._received = chain((first,), arriving)

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """What was received, once."""
        received, self._received = self._received, None
        if received is None:
            raise RuntimeError("nothing was received: this worker is another one than was asked")
        return received

    def close(self) -> None:
        """Leave the group, and let go of what was received."""
        self._received = None
        self._kept.close()

    def _check(self, meta: WeightMeta) -> None:
        if self._fits is not None:
            given = {one.name: TensorSpec(one.dtype, one.shape) for one in meta.tensors}
            self._fits.check_tensors(given, "what is broadcast")


def _answer(call: Callable[[], None]) -> Answer:
    try:
        call()
    except SyncdError as error:
        misfits = isinstance(error.__cause__, EngineMismatchError)
        return {"failed": str(error), "misfits": misfits}
    except Exception as error:
        log.exception("a call of syncd's has failed")
        return {"failed": repr(error)}
    return {"failed": None}
