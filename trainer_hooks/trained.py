"""``Trained``: what is trained, and the part of a save that a rank makes of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash
from torch.optim import Optimizer

from syncd.checkpoint.merging.plan import Ties
from syncd.checkpoint.save import ADAPTER
from syncd.checkpoint.tensor_rules import Casting, general
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import FULL_STATE_DICT, master_name
from syncd.protocol.policy import SyncMethod, SyncSettings
from trainer_hooks.ranks import Plan, Ranks
from trainer_hooks.settings import SaveLayout, SaveLora, SyncDtype
from trainer_hooks.state.casting import casting_of
from trainer_hooks.state.full_checkpoint import (
    AVERAGES,
    BASE_MODEL,
    Stateful,
    extra_state,
    loadable,
    optimizer_state,
)
from trainer_hooks.state.full_file import gather_full
from trainer_hooks.state.gather import Derived
from trainer_hooks.state.host_buffers import HostBuffers, host_copy
from trainer_hooks.state.host_part import HostPart
from trainer_hooks.state.hub_names import HubNames
from trainer_hooks.state.lora import PeftState, base_name
from trainer_hooks.state.model_files import FileWriters
from trainer_hooks.state.pieces import why_no_pieces
from trainer_hooks.state.plain_model import on_meta
from trainer_hooks.state.state_dict import (
    changes,
    fsdp_version,
    refuse_quantized,
    sharded_state_dict,
    tensors_of,
)
from trainer_hooks.state.ties import KnownTies
from trainer_hooks.state.wrappers import adapters_of, part_described, unwrapped
from trainer_hooks.writing.rank_files import RankContents
from trainer_hooks.writing.writer import RankWriter

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Trained:
    """The trained objects that a save contains, and the choices how to save them.

    For the fields see ``TrainerHook``, ``SaveSettings`` (``lora``, ``sync_dtype``), ``PeftState``
    (``base_vocabulary``) and ``RankContents`` (``model_files``). ``averages`` are the buffers of
    averages around the model, which only resuming needs.
    """

    model: nn.Module
    rank: int
    optimizer: Stateful | None = None
    scheduler: Stateful | None = None
    critic: nn.Module | None = None
    critic_optimizer: Stateful | None = None
    user_state: Callable[[], Mapping[str, Any]] | None = None
    averages: Mapping[str, Tensor] | None = None
    model_files: Callable[[], FileWriters] = tuple
    lora: SaveLora = SaveLora.AUTO
    sync_dtype: SyncDtype | None = None
    base_vocabulary: int | None = None

    def __post_init__(self) -> None:
        self._said_merged = False
        self._hub_names = HubNames(self.model)
        self._tied: Ties = False
        self._ties = KnownTies()
        self.cast = casting_of(self.model, self.sync_dtype)
        # Reused like the other buffers, because allocating takes longer than copying.
        self._masters: deque[HostBuffers] = deque(maxlen=1)
        self._wholes: deque[HostPart] = deque(maxlen=2)

    def prove(self, ranks: Ranks) -> None:
        """Find names under which the model loads, before the first save if possible. Collective."""
        own: dict[str, Tensor] = {}
        if fsdp_version(self.model) != 1 and not adapters_of(self.model):
            # On meta or lazy, it is filled before the first save; and any model's code may run.
            with suppress(Exception):
                own = on_meta(sharded_state_dict(self.model))
        names = xxhash.xxh3_128_hexdigest(repr([*own]).encode())
        self._ties.is_staged = len(set(ranks.gathered(names))) > 1
        stages = ranks.gathered(own) if self._ties.is_staged else []
        if self.rank != 0:
            return
        if part := part_described(self.model):
            log.warning(
                "no config.json is published, because the model is of class %s, and its part %s is "
                "the model of transformers. Give the hook that part if explorers load nothing else",
                type(unwrapped(self.model)).__name__,
                part,
            )
        for stage in stages[1:]:
            self._hub_names.of_stages |= {name: stage[name] for name in stage.keys() - own.keys()}
        if own:
            self._hub_names.writers(own)

    def close(self) -> None:
        """End a proof that is under way. Safe to call twice."""
        self._hub_names.close()

    def part(
        self,
        writer: RankWriter,
        plan: Plan,
        buffers: HostBuffers | None,
        at_end: ExitStack,
        *,
        is_link: bool = False,
    ) -> RankContents:
        """Copy this rank's part of a save, in the buffers if there are any.

        ``is_link`` is True if the weights for explorers are written as nothing but a link.

        Collective if ranks gather. ``at_end`` must be closed at the end of the save.

        Raises:
            SaveFailedError: the ranks could not gather the weights.
            InvalidSettingsError: a value in the state, or the optimizer's state, could not be
                loaded again.
            CheckpointError: the model is quantized, so ``sync_dtype`` cannot cast it.
        """
        completes, is_full = bool(plan & Plan.COMPLETE), bool(plan & Plan.FULL)
        is_peft = bool(adapters_of(self.model))
        sharded = not (writer.is_gathered or is_peft)
        hugging_face = bool(plan & Plan.HUGGING_FACE) and is_full
        state: dict[str, Any] = {}
        cast = self.cast
        if (
            not completes
            or (hugging_face and sharded)
            or (is_full and (is_peft or cast or is_link))
        ):
            state = loadable(sharded_state_dict(self.model))
        if cast is not None and not is_peft:
            refuse_quantized(state)
        if not changes(state, cast):
            cast = None
        peft = self._peft(state) if is_peft and state else None
        is_adapter = peft is not None and self._publishes_adapter(peft)
        is_shared = not (sharded or is_adapter or cast)  # its file is also the one for users
        model = whole = in_hugging_face = None
        whole_name = ADAPTER if is_adapter else FULL_STATE_DICT
        rest: dict[str, Any] = {}
        if sharded and not completes and buffers is not None:
            model = buffers.copy(state, cast)
            self._tied = self._ties.of(self.model, state)
        if not (completes or sharded):
            has_room = buffers is not None
            whole = self._gathered(state, peft, at_end, has_room, cast, is_adapter=is_adapter)
        if hugging_face and not is_shared:
            in_hugging_face = self._gathered(state, peft, at_end, buffers is not None)
        if is_full:
            rest = self._rest()
            if peft is not None:
                rest["trained"] = host_copy(peft.for_resuming())
                name = base_name(unwrapped(self.model)) if peft.frozen_base else None
                rest["extra"] |= {} if name is None else {BASE_MODEL: name}
            elif cast is not None:
                masters = self._masters.pop() if self._masters else HostBuffers()
                at_end.callback(self._masters.append, masters)
                rest |= {"trained": masters.copy(state), "trained_name": master_name}
            elif is_link and buffers is not None:
                trained = buffers.copy(state) if model is None else model
                rest |= {"trained": trained, "trained_name": master_name}
        model_files = self.model_files() if self.rank == 0 else ()
        if self.rank == 0 and not (completes or is_adapter):
            names = (state,) if peft is None else (peft.merged()[0], peft.base_model)
            model_files += self._hub_names.writers(*names)
        writes_config = is_adapter and self.rank == 0
        return RankContents(
            model=model,
            model_files=model_files,
            fsdp_version=fsdp_version(self.model),
            is_full=is_full,
            whole=whole,
            whole_name=whole_name,
            adapter_files=(peft.config_writer(),) if peft and writes_config else (),
            hugging_face=in_hugging_face,
            links_hugging_face=hugging_face and is_shared and self.rank == 0,
            sync_dtype=None if cast is None else self.sync_dtype,
            fp32=_kept_by(cast, state) if is_link else (),
            completes=completes,
            tied=self._tied,
            **rest,
        )

    def why_no_links(self, settings: SyncSettings, layout: SaveLayout) -> str | None:
        """The reason why this rank cannot save links, as a clause; None if it can."""
        if not settings.deltas:
            return "a rank has deltas=False"
        if settings.method is not SyncMethod.CHECKPOINT or layout is SaveLayout.FULL:
            return "only method checkpoint with layout sharded has links"
        if adapters_of(self.model) or fsdp_version(self.model) == 1:
            return "a model under PEFT or FSDP1 has no links"
        try:
            return why_no_pieces(sharded_state_dict(self.model))
        except InvalidSettingsError as error:
            return str(error)

    def full_weights(self, at_end: ExitStack) -> HostPart | None:
        """Gather the full weights for a complete full checkpoint. Collective.

        Raises:
            SaveFailedError: the ranks could not gather the weights.
        """
        state = sharded_state_dict(self.model)
        return self._gathered(state, self._peft(state) if adapters_of(self.model) else None, at_end)

    def _peft(self, state: Mapping[str, Any]) -> PeftState:
        # A parameter that was trained earlier and is frozen now still has a state.
        states = self.optimizer.state if isinstance(self.optimizer, Optimizer) else {}
        return PeftState(
            self.model,
            state,
            base_vocabulary=self.base_vocabulary,
            updated=[one for one, state in states.items() if state],
        )

    def _publishes_adapter(self, peft: PeftState) -> bool:
        published = peft.published_as(self.lora)
        if published is not self.lora and published is SaveLora.MERGED:
            if self.rank == 0 and not self._said_merged:
                log.warning("merging adapters into the weights, because %s", peft.not_an_adapter)
            self._said_merged = True
        return published is SaveLora.ADAPTER

    def _rest(self) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        if self.optimizer is not None:
            rest["optimizer"] = host_copy(optimizer_state(self.model, self.optimizer))
        if self.critic is not None:
            rest["critic"] = host_copy(loadable(sharded_state_dict(self.critic)))
            if self.critic_optimizer is not None:
                own = optimizer_state(self.critic, self.critic_optimizer)
                rest["critic_optimizer"] = host_copy(own)
        # Last, because user_state() may fail on only one rank, and FSDP1's gathering needs all.
        user_state = None if self.user_state is None else self.user_state()
        extra = extra_state(scheduler=self.scheduler, user_state=user_state)
        extra |= {AVERAGES: dict(self.averages)} if self.averages else {}
        return rest | {"extra": host_copy(extra)}

    def _gathered(
        self,
        state: Mapping[str, Any],
        peft: PeftState | None,
        at_end: ExitStack,
        has_room: bool = True,
        cast: Casting | None = None,
        *,
        is_adapter: bool = False,
    ) -> HostPart | None:
        """Gather weights into rank 0's memory, which is free again after ``at_end``. Collective."""
        part = None
        if self.rank == 0 and has_room:
            part = self._wholes.pop() if self._wholes else HostPart()
            at_end.callback(self._wholes.append, part)
        model, derived = self.model, dict[str, Derived]()
        if peft is not None and is_adapter:
            state = peft.adapter()
            cast = cast and Casting(cast.dtype)  # an adapter has no tensors of the model
        elif peft is not None:
            (state, derived), model = peft.merged(), peft.base_model
        self._tied = not is_adapter and self._ties.of(model, state)
        gather_full(state, self.rank, part, tied=self._tied, derived=derived, cast=cast)
        return part


def _kept_by(cast: Casting | None, state: Mapping[str, Any]) -> tuple[str, ...]:
    kept = () if cast is None else filter(cast.keeps, tensors_of(state))
    return tuple(sorted(set(map(general, kept))))
