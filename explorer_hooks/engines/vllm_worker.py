"""Methods that syncd adds to vLLM's workers: broadcasts, and reloads that are correct on a CPU.

:class:`~.vllm_engine.VLLMWorkers` calls these methods by ``collective_rpc``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from explorer_hooks.broadcast import WeightReceiver
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.engines.vllm_transfer import reload_whole
from explorer_hooks.server_fit import Fits
from syncd.coordination.broadcast.group import KeptGroup
from syncd.coordination.broadcast.weight_meta import WeightMeta
from syncd.protocol.errors import EngineMismatchError, SyncdError
from syncd.protocol.records import parse
from syncd.protocol.reports import Rendezvous

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SyncdWorker"]

log = logging.getLogger(__name__)

Answer = dict[str, object]


class SyncdWorker:
    """The methods that syncd adds to vLLM's worker.

    Received weights stay in host memory until a separate call loads them, so no worker changes its
    model before all workers have the weights. Each worker needs host memory for the whole model.

    No method raises an error. Otherwise vLLM would not read the answers of the other workers, and
    would take them for answers to the next call. Instead, the answer holds the error as ``failed``.
    If the transfer does not fit the model, ``misfits`` is True.
    """

    _syncd_membership: Membership | None = None

    if TYPE_CHECKING:  # attributes of vLLM's worker; an extension must not define them
        device: torch.device
        rank: int
        model_config: Any
        model_runner: Any
        vllm_config: Any
        reload_weights: Callable[..., None]

    def syncd_receive(self, rendezvous: str, rank_offset: int, deadline: float) -> Answer:
        """Join the weight group, and receive a transfer, without changing the model.

        The arguments are those of :meth:`~explorer_hooks.engines.base.WeightTaker.receive`:
        ``rendezvous`` (as JSON), ``rank_offset`` and ``deadline``.
        """
        member = self._syncd_membership = self._syncd_membership or Membership()
        return _answer(
            lambda: member.receive(
                self,
                parse(Rendezvous, rendezvous.encode(), "the rendezvous"),
                rank_offset + self.rank,
                deadline,
            )
        )

    def syncd_load(self) -> Answer:
        """Load the received weights. After a failure the model may have parts of two versions."""
        member = self._syncd_membership or Membership()
        return _answer(lambda: _reload(self, weights_iterator=member.take()))

    def syncd_load_folder(self, folder: str) -> Answer:
        """Load a model folder. After a failure the model may have parts of two versions."""
        return _answer(lambda: _reload(self, weights_path=folder))

    def syncd_leave(self) -> Answer:
        """Leave the weight group, and release the received weights."""
        member, self._syncd_membership = self._syncd_membership, None
        return _answer(member.close if member is not None else lambda: None)


class Membership:
    """A worker's place in the weight group, and its received weights."""

    def __init__(self) -> None:
        self._kept = KeptGroup()
        self._known: WeightMeta | None = None
        self._received: Iterator[tuple[str, Tensor]] | None = None
        self._fits = Fits(casts=True, whose="this vLLM")

    def receive(
        self, worker: SyncdWorker, rendezvous: Rendezvous, rank: int, deadline: float
    ) -> None:
        """Receive a whole transfer, which must fit the model that the worker was started with.

        Without that folder on this host, nothing is compared. With gloo the transfer uses host
        memory, not the worker's device.

        Raises:
            BroadcastError: the transfer failed, and this worker has left the group.
        """
        self._received = None
        if not self._fits.is_known:
            self._fits.read_if_here(str(worker.model_config.model))
        where = torch.device("cpu") if rendezvous.backend == "gloo" else worker.device
        group = self._kept.open(rendezvous, rank, deadline=deadline, device=where)
        try:
            receiver = WeightReceiver(group, self._known)
            arriving = receiver.receive(self._check)
            first = next(arriving)  # all weights have arrived when the first one is returned
        except BaseException:
            self._kept.close()
            raise
        self._known = receiver.meta
        self._received = chain((first,), arriving)

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """Return the received weights, and forget them."""
        received, self._received = self._received, None
        if received is None:
            raise RuntimeError(
                "this worker has no received weights to load. It did not receive the broadcast, or "
                "has left the weight group since"
            )
        return received

    def close(self) -> None:
        """Leave the group, and release the received weights."""
        self._received = None
        self._kept.close()

    def _check(self, meta: WeightMeta) -> None:
        given = {one.name: TensorSpec(one.dtype, one.shape) for one in meta.tensors}
        self._fits.check_tensors(given, "the broadcast")


def _reload(worker: SyncdWorker, **source: object) -> None:
    reload_whole(
        lambda: worker.reload_weights(**source),
        model=worker.model_runner.get_model(),
        vllm_config=worker.vllm_config,
        on_cpu=worker.device.type == "cpu",
    )


def _answer(call: Callable[[], None]) -> Answer:
    try:
        call()
    except SyncdError as error:
        misfits = isinstance(error.__cause__, EngineMismatchError)
        return {"failed": str(error), "misfits": misfits}
    except Exception as error:
        log.exception("a call of syncd's worker extension has failed")
        return {"failed": repr(error)}
    return {"failed": None}
