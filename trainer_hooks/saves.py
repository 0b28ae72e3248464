"""Copies a rank's part of a save while training waits; another thread writes the copy."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from syncd.checkpoint.save import ADAPTER
from syncd.protocol.names import HUGGINGFACE, master_name
from syncd.protocol.records import SaveId
from trainer_hooks.decisions import Plan
from trainer_hooks.progress import Progress
from trainer_hooks.save_queue import SaveQueue
from trainer_hooks.settings import SaveLayout, SaveLora, SyncDtype
from trainer_hooks.state.full_checkpoint import BASE_MODEL, Stateful, extra_state, optimizer_state
from trainer_hooks.state.full_file import FullStateStream, ties_embeddings
from trainer_hooks.state.host_buffers import HostBuffers, host_copy
from trainer_hooks.state.hub_names import HubNames
from trainer_hooks.state.lora import PeftState, base_name
from trainer_hooks.state.state_dict import fsdp_version, sharded_state_dict
from trainer_hooks.state.sync_dtype import changes, refuse_quantized
from trainer_hooks.trainer_job import SaveFolder
from trainer_hooks.writing.contents import RankContents
from trainer_hooks.writing.model_files import adapters_of, unwrapped
from trainer_hooks.writing.parts import full_bytes
from trainer_hooks.writing.spool import Spool

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The trained objects that a save contains, and the choices how to save them.

    For the fields see ``TrainerHook``, ``SaveSettings`` (``lora``, ``sync_dtype``), ``PeftState``
    (``base_vocabulary``) and ``RankContents`` (``model_files``).
    """

    model: nn.Module
    optimizer: Stateful | None = None
    scheduler: Stateful | None = None
    critic: nn.Module | None = None
    critic_optimizer: Stateful | None = None
    user_state: Callable[[], Mapping[str, Any]] | None = None
    model_files: tuple[Callable[[Path], object], ...] = ()
    lora: SaveLora = SaveLora.AUTO
    sync_dtype: SyncDtype | None = None
    base_vocabulary: int | None = None


@dataclass
class Saver:
    """Copies the contents of saves, and queues them for the writing thread.

    At most two copies of this rank's part of the model exist.
    """

    trained: Trained
    rank: int
    queue: SaveQueue
    progress: Progress

    def __post_init__(self) -> None:
        self._said_merged = False
        self._hub_names = HubNames(self.trained.model)
        # Reused like the other buffers, because allocating takes longer than copying.
        self._masters: deque[HostBuffers] = deque(maxlen=1)

    def begin(self, place: SaveFolder, save_id: SaveId, plan: Plan) -> None:
        """Copy this rank's part of a save, and queue the copy. Collective if ranks gather.

        Raises:
            SaveFailedError: the ranks could not gather the weights.
            InvalidSettingsError: a value in the state could not be loaded again.
            CheckpointError: the model is quantized, so ``sync_dtype`` cannot cast it.
        """
        queue, writer = self.queue, place.writer
        if writer is None:  # only rank 0 writes there, but all ranks gather
            self._contents(place, save_id.step, plan, None).close()
            return
        buffers = queue.buffers() if queue.has_room() else None
        try:
            # Needed even if there is no room, because the other ranks gather.
            contents = self._contents(place, save_id.step, plan, buffers)
        except BaseException:
            queue.leave_out(writer, save_id, buffers)
            raise
        if buffers is None:
            contents.close()
            queue.refuse(f"step {save_id.step}")
            queue.leave_out(writer, save_id)
        else:
            queue.submit(writer, save_id, contents, buffers)

    def add_hugging_face(self, place: SaveFolder, save_id: SaveId) -> None:
        """Add the full weights to an existing full checkpoint. Collective.

        Raises:
            SaveFailedError: the ranks could not gather the weights.
        """
        folder = place.job.layout.actor(save_id.step) / HUGGINGFACE
        self.progress.without_hugging_face.discard(save_id)
        try:
            with ExitStack() as stack:
                state = sharded_state_dict(self.trained.model)
                peft = self._peft(state) if adapters_of(self.trained.model) else None
                spool = self._gathered(place, folder, self._full(state, peft), stack)
                stack.pop_all()
        except BaseException:
            self.progress.without_hugging_face.add(save_id)
            raise
        writer = place.writer
        if spool is None or writer is None:
            return

        def work() -> None:
            try:
                writer.add_hugging_face(save_id, spool)
            except BaseException:
                self.progress.without_hugging_face.add(save_id)
                raise
            finally:
                spool.close()

        self.queue.thread.submit(save_id.step, work)

    def _contents(
        self, place: SaveFolder, step: int, plan: Plan, buffers: HostBuffers | None
    ) -> RankContents:
        trained, actor = self.trained, place.job.layout.actor(step)
        completes, is_full = bool(plan & Plan.COMPLETE), bool(plan & Plan.FULL)
        is_peft = bool(adapters_of(trained.model))
        sharded = place.weights is SaveLayout.SHARDED and not is_peft
        hugging_face = bool(plan & Plan.HUGGING_FACE) and is_full
        state: dict[str, Any] = {}
        cast = trained.sync_dtype
        if not completes or (hugging_face and sharded) or (is_full and (is_peft or cast)):
            state = sharded_state_dict(trained.model)
        if cast is not None and not is_peft:
            refuse_quantized(state)
        if not changes(state, cast):
            cast = None
        peft = self._peft(state) if is_peft and state else None
        is_adapter = peft is not None and self._publishes_adapter(peft)
        is_linked = not (sharded or is_adapter or cast)
        model = None
        if sharded and not completes and buffers is not None:
            model = buffers.copy(state, cast)
        full_model = in_hugging_face = None
        rest: dict[str, Any] = {}
        with ExitStack() as stack:
            if not (completes or sharded):
                if peft is not None and is_adapter:
                    weights = FullStateStream(peft.adapter(), self.rank, name=ADAPTER, cast=cast)
                else:
                    weights = self._full(state, peft, cast)
                full_model = self._gathered(place, actor, weights, stack)
            if hugging_face and not is_linked:
                in_hugging_face = self._gathered(
                    place, actor / HUGGINGFACE, self._full(state, peft), stack
                )
            if is_full:
                rest = self._rest()
                if peft is None and cast is not None:
                    masters = self._masters.pop() if self._masters else HostBuffers()
                    rest["trained"] = masters.copy(state)
                    rest["trained_name"] = master_name
                    rest["release"] = lambda: self._masters.append(masters)
                elif peft is not None:
                    rest["trained"] = host_copy(peft.for_resuming())
                    name = base_name(unwrapped(trained.model)) if peft.frozen_base else None
                    rest["extra"] |= {} if name is None else {BASE_MODEL: name}
            stack.pop_all()
        model_files = trained.model_files
        if self.rank == 0 and not (completes or is_adapter):
            names = (state,) if peft is None else (peft.merged()[0], peft.base_model)
            model_files += self._hub_names.writers(*names)
        writes_config = peft is not None and is_adapter and self.rank == 0
        return RankContents(
            model=model,
            model_files=model_files,
            fsdp_version=fsdp_version(trained.model),
            is_full=is_full,
            full_model=full_model,
            adapter_files=(peft.config_writer(),) if peft and writes_config else (),
            hugging_face=in_hugging_face,
            links_hugging_face=hugging_face and is_linked and self.rank == 0,
            sync_dtype=cast,
            completes=completes,
            **rest,
        )

    def _peft(self, state: Mapping[str, Any]) -> PeftState:
        trained = self.trained
        # A parameter that was trained earlier and is frozen now still has a state.
        states = trained.optimizer.state if isinstance(trained.optimizer, Optimizer) else {}
        return PeftState(
            trained.model,
            state,
            base_vocabulary=trained.base_vocabulary,
            updated=[one for one, state in states.items() if state],
        )

    def _publishes_adapter(self, peft: PeftState) -> bool:
        published = peft.published_as(self.trained.lora)
        if published is not self.trained.lora and published is SaveLora.MERGED:
            if self.rank == 0 and not self._said_merged:
                log.warning("merging adapters into the weights, because %s", peft.not_an_adapter)
            self._said_merged = True
        return published is SaveLora.ADAPTER

    def _full(
        self, state: Mapping[str, Any], peft: PeftState | None, cast: SyncDtype | None = None
    ) -> FullStateStream:
        tied = ties_embeddings(unwrapped(self.trained.model))
        if peft is None:
            return FullStateStream(state, self.rank, tied=tied, cast=cast)
        merged, derived = peft.merged()
        return FullStateStream(merged, self.rank, derived=derived, tied=tied, cast=cast)

    def _rest(self) -> dict[str, Any]:
        trained = self.trained
        rest: dict[str, Any] = {}
        if trained.optimizer is not None:
            rest["optimizer"] = host_copy(optimizer_state(trained.model, trained.optimizer))
        if trained.critic is not None:
            rest["critic"] = host_copy(sharded_state_dict(trained.critic))
            if trained.critic_optimizer is not None:
                own = optimizer_state(trained.critic, trained.critic_optimizer)
                rest["critic_optimizer"] = host_copy(own)
        # Last, because user_state() may fail on only one rank, and FSDP1's gathering needs all.
        user_state = None if trained.user_state is None else trained.user_state()
        extra = extra_state(scheduler=trained.scheduler, user_state=user_state)
        return rest | {"extra": host_copy(extra)}

    def _gathered(
        self, place: SaveFolder, folder: Path, stream: FullStateStream, stack: ExitStack
    ) -> Spool | None:
        """Gather weights into a file on rank 0, which ``stack`` closes. Collective."""
        spool = None
        if self.rank == 0 and place.writer is not None:
            size = full_bytes(stream.state, stream.cast)
            spool = Spool(place.job, folder / stream.name, stream, size=size)
            stack.callback(spool.close)
        stream.gather()
        return spool
