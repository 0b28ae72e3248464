"""Weights on their way from all ranks of a trainer to its explorers, by broadcast."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from syncd.checkpoint.plan import PlannedTensor
from syncd.coordination.weight_meta import BUCKET
from trainer_hooks.agreement import Ranks
from trainer_hooks.outgoing import Buffers, Outgoing
from trainer_hooks.state.full_file import ties_embeddings
from trainer_hooks.state.full_plan import agree_on_plan
from trainer_hooks.state.gather import full_tensor
from trainer_hooks.state.state_dict import sharded_state_dict, tensors_of
from trainer_hooks.writing.model_files import unwrapped

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
    """Sends a model to the weight group: the tensors that its version would have, by their names.

    Tensor by tensor is gathered from all ranks, while those before it are sent. Large ones are sent
    from where they were gathered, or from the model itself; small ones are packed together.

    Promised: what is sent is the model as it is during :meth:`send`. Rank 0 has in memory, besides
    its part of the model, no more than two buckets and one whole tensor; the other ranks have one
    whole tensor for a moment, as torch gathers to all; all ranks of FSDP1 a copy of their part. No
    rank waits for another in a collective that this one has left: where the group fails in the
    middle, all is gathered all the same.

    Not promised: LoRA adapters, which go by the checkpoint path.

    Args:
        model: as the trainer's hook has it.
        bucket_bytes: the most that one broadcast moves.
        digests: whether receivers check each bucket; by default where the group is on the CPU.
    """

    def __init__(
        self, model: nn.Module, *, bucket_bytes: int = BUCKET, digests: bool | None = None
    ) -> None:
        self._model = model
        self._bucket_bytes = bucket_bytes
        self._digests = digests
        self._buffers = Buffers()

    @torch.no_grad()
    def send(self, group: WeightGroup | None) -> Sent:
        """Send the model as it is now. Collective: on all ranks of the trainer, at the same moment.

        Args:
            group: on rank 0 the weight group, in which a transfer begins; None on all other ranks.

        Returns:
            What was sent; on other ranks than 0 it took no broadcasts.

        Raises:
            BroadcastError: on rank 0 alone: not all receivers have it, as far as is known here. The
                group is of no use any more: leave it.
            SaveFailedError: on all ranks: they do not have the same tensors, or some that cannot be
                sent. Leave the group likewise.
            Exception: what a gathering raised, it may be on this rank alone, as where it has no
                memory: the other ranks may wait for it in that collective, and take its next one
                for it.
        """
        begun = time.monotonic()
        ranks = Ranks()
        state = tensors_of(sharded_state_dict(self._model))
        plan = agree_on_plan(state, ranks.rank, tied=ties_embeddings(unwrapped(self._model)))
        # Small ones are packed together: they come last, where nothing large is between them.
        tensors = sorted(plan.tensors, key=lambda tensor: -tensor.length)
        outgoing = None
        if group is not None:
            outgoing = self._outgoing(group, tensors)
            outgoing.greet()
        # Where nobody takes it, it need not be gathered.
        if ranks.gathered(outgoing is not None and outgoing.error is None)[0]:
            _gather(state, tensors, ranks.rank, outgoing)
        if outgoing is not None:
            try:
                outgoing.end()
            except BaseException:
                self._buffers.close()  # what is under way still reads them
                raise
        buckets = 0 if outgoing is None else len(outgoing.image.buckets)
        nbytes = sum(tensor.length for tensor in tensors)
        return Sent(nbytes, buckets, time.monotonic() - begun)

    def close(self) -> None:
        """Let the buckets go. Safe to call twice."""
        self._buffers.close()

    def _outgoing(self, group: WeightGroup, tensors: Sequence[PlannedTensor]) -> Outgoing:
        has_digests = self._digests
        if has_digests is None:
            has_digests = group.device.type == "cpu"
        return Outgoing(
            group, tensors, self._buffers, bucket_bytes=self._bucket_bytes, has_digests=has_digests
        )


def _gather(
    state: Mapping[str, Tensor],
    tensors: Sequence[PlannedTensor],
    rank: int,
    outgoing: Outgoing | None,
) -> None:
    """Gather the tensors in this order, and hand them over on rank 0. Collective."""
    for number, tensor in enumerate(tensors):
        whole = full_tensor(state[tensor.name], rank=rank)
        if whole is not None and outgoing is not None:
            outgoing.put(number, whole)
        del whole  # or it would be held while the next one is gathered
    for number, tensor in enumerate(tensors):
        for copy in tensor.copies:
            whole = full_tensor(state[str(copy.tied)], rank=rank)
            if whole is not None and outgoing is not None:
                outgoing.compare(number, str(copy.tied), whole)
            del whole
