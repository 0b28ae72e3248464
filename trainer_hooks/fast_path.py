"""The trainer's broadcasts (method ``nccl``)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from syncd.checkpoint.tensor_rules import Casting
from syncd.coordination.broadcast.group import WeightGroup
from syncd.coordination.broadcast.weight_meta import BUCKET
from syncd.coordination.tensors import DTYPES as TORCH_DTYPES
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import BroadcastError, OutOfStepError, SaveFailedError, SyncdError
from syncd.protocol.policy import SyncMethod, SyncSettings
from syncd.protocol.records import NonFinite, SaveId
from trainer_hooks.explorers import Explorers
from trainer_hooks.ranks import Due, Ranks
from trainer_hooks.state.full_file import agree_on_plan
from trainer_hooks.state.gather import full_tensor
from trainer_hooks.state.state_dict import sharded_state_dict, tensors_of
from trainer_hooks.state.ties import KnownTies
from trainer_hooks.transfer import Buffers, Outgoing

log = logging.getLogger(__name__)
#: The most syncs by files between two broadcasts that fail.
_LONGEST_BACK_OFF: Final = 15


@dataclass
class Cadence:
    """Decides which syncs to broadcast, and which to save as files.

    After n failed broadcasts in a row, the next 2**(n-1) - 1 syncs, at most 15, are saved as files.
    Of ``checkpoint_every`` successive syncs, at least one is saved, even if it was broadcast.
    """

    checkpoint_every: int
    _failures: int = 0
    _not_tried: int = 0
    _passed: int | None = None
    _step: int | None = None

    @property
    def is_save_due(self) -> bool:
        """True if this sync must be saved even if it was broadcast."""
        return self._passed is None or self._passed + 1 >= self.checkpoint_every

    def may_try(self) -> bool:
        """True if this sync may be broadcast; each False shortens the back-off."""
        if not self._not_tried:
            return True
        self._not_tried -= 1
        return False

    def failed(self) -> None:
        """Note that a broadcast failed."""
        self._failures += 1
        self._not_tried = min(2 ** (self._failures - 1) - 1, _LONGEST_BACK_OFF)

    def succeeded(self) -> None:
        """Note that a broadcast succeeded."""
        self._failures = 0

    def passed(self, step: int) -> None:
        """Note that a sync was not saved."""
        if self._passed is not None and step != self._step:
            self._passed += 1
        self._step = step

    def saved(self, step: int) -> None:
        """Note that weights were saved."""
        self._passed = 0
        self._step = step


@dataclass
class TrainerBroadcasts:
    """The broadcasts of a trainer: rank 0 opens them, all ranks send.

    They are on with method ``nccl``; otherwise all syncs go by files. If a broadcast fails, the
    step is saved as files. Training must end only if a collective of the trainer's own ranks fails.
    Only rank 0 has exact counts.
    """

    model: nn.Module
    settings: SyncSettings
    explorers: Explorers
    cast: Casting | None = None
    broadcasts: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        settings = self.settings
        self.is_on = settings.method is SyncMethod.NCCL
        self.cadence = Cadence(settings.checkpoint_every)
        self._sender = WeightSender(
            self.model,
            bucket_bytes=settings.broadcast_bucket,
            digests=settings.broadcast_digests,
            cast=self.cast,
        )
        self._group: WeightGroup | None = None

    def has_arrived(self, sent: SaveId, step: int) -> bool:
        """On rank 0: True if all receivers serve ``sent``, and it is of this step."""
        return self.is_on and sent.step == step and self.explorers.have_received(sent) is True

    def open(self, save_id: SaveId) -> Due | None:
        """On rank 0, decide whether to broadcast; wait until all receivers are ready.

        Returns:
            ``BROADCAST``; ``SYNC`` if that failed, so that files must come; ``NOTHING`` if nobody
                would get the weights. None for files, if the writer is free.
        """
        explorers, step = self.explorers, save_id.step
        takers = explorers.takers() if self.is_on else None
        if takers is None:
            return None
        if not takers.working and not self.cadence.is_save_due:
            self.cadence.passed(step)
            return Due.NOTHING
        if not takers.by_broadcast:
            return None
        if not self.cadence.may_try():
            explorers.goes_by_files(step)
            return None
        devices = (parameter.device for parameter in self.model.parameters())
        device = next((one for one in devices if one.type != "meta"), torch.device("cpu"))
        try:
            self._group = explorers.open_group(save_id, device, self.settings.broadcast_timeout)
        except Exception as error:  # noqa: BLE001 - after any error the step is saved as files
            self._failed(step, error)
            explorers.goes_by_files(step)
            return Due.SYNC
        return Due.BROADCAST

    def send(self, step: int) -> bool:
        """Send the weights. Collective. On rank 0, return True if all receivers have the weights.

        Raises:
            OutOfStepError: a gathering failed, perhaps only on this rank, so the ranks may be in
                different collectives. End the training.
        """
        group, self._group = self._group, None
        try:
            nonfinite = self._sender.send(group).nonfinite
        except Exception as error:
            self._failed(step, error)
            # All ranks raise these errors, or only rank 0 does, when no other rank waits for it.
            is_alike = isinstance(error, BroadcastError | SaveFailedError)
            if not is_alike and Ranks().world_size > 1:
                raise OutOfStepError(
                    f"the weights could not be gathered for a broadcast: {error}. The ranks may "
                    "be out of step with each other. End this training, and resume it"
                ) from error
            self.explorers.goes_by_files(step)
            return False
        if nonfinite.count:
            log.warning(
                "step %d was broadcast with %s, and explorers now serve these weights. The "
                "daemon's --refuse-nonfinite affects only saves, not broadcasts",
                step,
                nonfinite,
            )
        self.explorers.nccl_sync_succeeded()
        self.cadence.succeeded()
        self.broadcasts += 1
        return True

    def close(self) -> None:
        """Release the buckets. Safe to call twice."""
        self._sender.close()

    def _failed(self, step: int, error: Exception) -> None:
        log.warning(
            "step %d was not broadcast, so explorers load it from the files: %s",
            step,
            error,
            exc_info=not isinstance(error, SyncdError),
        )
        self.cadence.failed()
        self.failures += 1
        self.explorers.group_failed()


class Sent(NamedTuple):
    """The result of one transfer. Only rank 0 knows ``buckets`` (a number) and ``nonfinite``."""

    nbytes: int
    buckets: int
    nonfinite: NonFinite


@dataclass
class WeightSender:
    """Sends a model to the weight group, with the tensors and names of a published version.

    LoRA adapters are not supported. In addition to its part of the model, rank 0 has at most two
    buckets and one whole tensor in memory, and with ``cast`` a cast copy. The other ranks have one
    whole tensor for a moment, because torch gathers to all ranks. With FSDP1 every rank also has a
    copy of its part. By default, receivers check digests only if the group is on the CPU.
    """

    model: nn.Module
    bucket_bytes: int = BUCKET
    digests: bool | None = None
    cast: Casting | None = None

    def __post_init__(self) -> None:
        self._buffers = Buffers()
        self._ties = KnownTies()

    @without_modes()
    def send(self, group: WeightGroup | None) -> Sent:
        """Send the model. Collective; only rank 0 has the group. After any error, leave the group.

        Raises:
            BroadcastError: only on rank 0: some receivers may lack the weights.
            SaveFailedError: on all ranks: the ranks' tensors differ, or a tensor cannot be sent.
            Exception: a gathering failed, perhaps only on this rank. The other ranks may mistake
                this rank's next collective for it.
        """
        ranks = Ranks()
        state = tensors_of(sharded_state_dict(self.model))
        tied = self._ties.of(self.model, state)
        plan = agree_on_plan(state, ranks.rank, tied=tied, cast=self.cast)
        # Small tensors are packed together, so they come last, without large ones between them.
        tensors = sorted(plan, key=lambda tensor: -tensor.length)
        outgoing = None
        if group is not None:
            has_digests = self.digests
            if has_digests is None:
                has_digests = group.device.type == "cpu"
            outgoing = Outgoing(group, tensors, self._buffers, self.bucket_bytes, has_digests)
            outgoing.greet()

        def gathered(name: str, dtype: str) -> Tensor | None:
            return full_tensor(state[name], rank=ranks.rank, dtype=TORCH_DTYPES[dtype])

        # Tensors that no receiver takes need not be gathered.
        are_taken = ranks.gathered(outgoing is not None and outgoing.error is None)[0]
        for number, tensor in enumerate(tensors) if are_taken else ():
            whole = gathered(tensor.name, tensor.dtype)
            if whole is not None and outgoing is not None:
                outgoing.put(number, whole)
            del whole  # free it before the next one is gathered
        for number, tensor in enumerate(tensors) if are_taken else ():
            for copy in tensor.copies:
                whole = gathered(str(copy.tied), tensor.dtype)
                if whole is not None and outgoing is not None:
                    outgoing.compare(number, str(copy.tied), whole)
                del whole
        nbytes = sum(tensor.length for tensor in tensors)
        if outgoing is None:
            return Sent(nbytes, 0, NonFinite.of(()))
        try:
            outgoing.end()
        except BaseException:
            self._buffers.close()  # broadcasts may still read them, so they are not reused
            raise
        return Sent(nbytes, len(outgoing.image.buckets), outgoing.nonfinite())

    def close(self) -> None:
        """Release the buckets. Safe to call twice."""
        self._buffers.close()
