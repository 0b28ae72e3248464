"""``Trained``: what is trained, and the part of a save that a rank makes of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from syncd.checkpoint.merging.plan import Ties
from syncd.checkpoint.save import ADAPTER
from syncd.checkpoint.tensor_rules import Casting, general
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import ACTOR, CRITIC, FULL_STATE_DICT, master_name
from syncd.protocol.policy import SyncMethod, SyncSettings
from trainer_hooks.ranks import Due, Ranks
from trainer_hooks.resuming.promise import Promise, Saved
from trainer_hooks.settings import SaveLayout, SaveLora, SyncDtype
from trainer_hooks.state.casting import casting_of
from trainer_hooks.state.full_checkpoint import (
    AVERAGES,
    BASE_MODEL,
    STATE,
    Replaceable,
    each_of,
    extra_state,
    loadable,
    names_updated,
    optimizer_state,
)
from trainer_hooks.state.full_file import gather_full
from trainer_hooks.state.gather import Derived
from trainer_hooks.state.host_buffers import HostBuffers, host_copy
from trainer_hooks.state.hub_names import HubNames
from trainer_hooks.state.lora import PeftState, base_name
from trainer_hooks.state.pieces import why_no_pieces
from trainer_hooks.state.plain_model import on_meta
from trainer_hooks.state.small_files import Files, SmallFiles, Writer, files_by
from trainer_hooks.state.state_dict import (
    changes,
    described,
    fsdp_version,
    refuse_quantized,
    sharded_state_dict,
    tensors_of,
)
from trainer_hooks.state.ties import KnownTies
from trainer_hooks.state.weights_in_memory import WeightsInMemory
from trainer_hooks.state.wrappers import adapters_of, part_described, unwrapped
from trainer_hooks.writing.rank_files import RankContents
from trainer_hooks.writing.writer import RankWriter

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Trained:
    """The trained objects that a save contains, and the choices how to save them.

    For the fields see ``TrainerHook``, ``SaveSettings`` (``lora``, ``sync_dtype``) and
    ``PeftState`` (``base_vocabulary``). ``model_files`` makes the writer of a save's small files.
    ``averages`` are the buffers of averages around the model, which only resuming needs.
    """

    model: nn.Module
    rank: int
    objects: Replaceable
    model_files: Callable[[], Writer]
    averages: Mapping[str, Tensor] | None
    lora: SaveLora
    sync_dtype: SyncDtype | None
    base_vocabulary: int | None

    def __post_init__(self) -> None:
        self._said_merged = False
        self._small_files = SmallFiles()
        #: Of each optimizer: the step of the last full checkpoint, its id and its step counts then.
        self._counted: dict[tuple[str, int], tuple[int, tuple[int, list[str]]]] = {}
        self._hub_names = HubNames(self.model)
        self._tied: Ties = False
        self._ties = KnownTies()
        self.cast = casting_of(self.model, self.sync_dtype)
        # Reused like the other buffers, because allocating takes longer than copying.
        self._masters: deque[HostBuffers] = deque(maxlen=1)
        self._wholes: deque[WeightsInMemory] = deque(maxlen=2)

    def prove(self, ranks: Ranks) -> None:
        """Write the small files once, for their errors, and find names under which the model loads.

        Names are found before the first save if possible. Collective.

        Raises:
            InvalidSettingsError: the config or the tokenizer cannot be written.
        """
        ranks.together(lambda: self.rank or self._small_files.files(self.model_files()))
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
            self._hub_names.files(own)
            self._small_files.tensors = self._hub_names.key

    def close(self) -> None:
        """End a proof that is under way. Safe to call twice."""
        self._hub_names.close()

    def part(
        self,
        writer: RankWriter,
        plan: Due,
        step: int,
        buffers: HostBuffers | None,
        at_end: ExitStack,
        *,
        is_delta: bool = False,
    ) -> RankContents:
        """Copy this rank's part of the save of a step, in the buffers if there are any.

        ``is_delta`` is True if the weights for explorers are written as nothing but a delta.

        Collective if ranks gather. ``at_end`` must be closed at the end of the save.

        Raises:
            SaveFailedError: the ranks could not gather the weights.
            InvalidSettingsError: a value in the state, or the optimizer's state, could not be
                loaded again.
            CheckpointError: the model is quantized, so ``sync_dtype`` cannot cast it.
        """
        completes, is_full = bool(plan & Due.COMPLETE), bool(plan & Due.FULL)
        is_peft = bool(adapters_of(self.model))
        sharded = not (writer.is_gathered or is_peft)
        hugging_face = bool(plan & Due.HUGGING_FACE) and is_full
        state: dict[str, Any] = {}
        cast = self.cast
        if (
            not completes
            or (hugging_face and sharded)
            or (is_full and (is_peft or cast or is_delta))
        ):
            state = sharded_state_dict(self.model)
            if sharded or is_full:  # a gathered file has only tensors
                state = loadable(state)
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
            rest = self._rest(step)
            if peft is not None:
                rest["trained"] = host_copy(peft.for_resuming())
                name = base_name(unwrapped(self.model)) if peft.frozen_base else None
                rest["extra"] |= {} if name is None else {BASE_MODEL: name}
            elif cast is not None:
                masters = self._masters.pop() if self._masters else HostBuffers()
                at_end.callback(self._masters.append, masters)
                rest |= {"trained": masters.copy(state), "trained_name": master_name}
            elif is_delta and buffers is not None:
                trained = buffers.copy(state) if model is None else model
                rest |= {"trained": trained, "trained_name": master_name}
        names: Files = {}
        if self.rank == 0 and not (completes or is_adapter):
            named = (state,) if peft is None else (peft.merged()[0], peft.base_model)
            names = self._hub_names.files(*named)
        tensors = self._hub_names.key if peft is None else described(state)
        return RankContents(
            model=model,
            model_files=partial(self._small_files.files, self.model_files(), tensors, names),
            fsdp_version=fsdp_version(self.model),
            is_full=is_full,
            whole=whole,
            whole_name=whole_name,
            adapter_files=partial(files_by, peft.config_writer())
            if peft and is_adapter and self.rank == 0
            else dict,
            hugging_face=in_hugging_face,
            links_hugging_face=hugging_face and is_shared and self.rank == 0,
            sync_dtype=None if cast is None else self.sync_dtype,
            fp32=_kept_by(cast, state) if is_delta else (),
            completes=completes,
            tied=self._tied,
            **rest,
        )

    def why_no_deltas(self, settings: SyncSettings, layout: SaveLayout) -> str | None:
        """The reason why this rank cannot save deltas, as a clause; None if it can."""
        if not settings.deltas:
            return "a rank has deltas=False"
        if settings.method is not SyncMethod.CHECKPOINT or layout is SaveLayout.FULL:
            return "only method checkpoint with layout sharded has deltas"
        if adapters_of(self.model) or fsdp_version(self.model) == 1:
            return "a model under PEFT or FSDP1 has no deltas"
        try:
            return why_no_pieces(sharded_state_dict(self.model))
        except InvalidSettingsError as error:
            return str(error)

    @without_modes()
    def promise(self) -> Promise | None:
        """On rank 0, plan how the next full checkpoint will be loaded.

        Collective, as any model's ``state_dict`` may be.
        """
        saved: list[Saved] = [(ACTOR, self.model, self.objects.optimizer)]
        critic = self.objects.critic
        if critic.model is not None:
            saved.append((CRITIC, critic.model, critic.optimizer))
        promise = Promise(saved)
        return promise if self.rank == 0 else None

    def full_weights(self, at_end: ExitStack) -> WeightsInMemory | None:
        """Gather the full weights for a complete full checkpoint. Collective.

        Raises:
            SaveFailedError: the ranks could not gather the weights.
        """
        state = sharded_state_dict(self.model)
        return self._gathered(state, self._peft(state) if adapters_of(self.model) else None, at_end)

    def _peft(self, state: Mapping[str, Any]) -> PeftState:
        # A parameter that was trained earlier and is frozen now is in the checkpoint, too.
        updated = self.objects._ever_updated()  # noqa: SLF001 - not for the users of the hook
        return PeftState(self.model, state, base_vocabulary=self.base_vocabulary, updated=updated)

    def _publishes_adapter(self, peft: PeftState) -> bool:
        published = peft.published_as(self.lora)
        if published is not self.lora and published is SaveLora.MERGED:
            if self.rank == 0 and not self._said_merged:
                log.warning("merging adapters into the weights, because %s", peft.not_an_adapter)
            self._said_merged = True
        return published is SaveLora.ADAPTER

    def _rest(self, step: int) -> dict[str, Any]:
        objects, rest = self.objects, dict[str, Any]()
        critic = objects.critic
        if critic.model is not None:
            rest["critic"] = host_copy(loadable(sharded_state_dict(critic.model)))
        for name, model, optimizer in (
            ("optimizer", self.model, objects.optimizer),
            ("critic_optimizer", critic.model, critic.optimizer),
        ):
            if model is None or optimizer is None:
                continue
            rest[name] = host_copy(optimizer_state(model, optimizer))
            for number, one in enumerate(each_of(optimizer) if self.rank == 0 else ()):
                # A 0-dimensional tensor formats as its value.
                keys = {f"{STATE}.{parameter}.step" for parameter in names_updated(model, one)}
                now = id(one), [f"{v}" for key, v in rest[name].items() if key in keys]
                last, before = self._counted.get((name, number), (step, now))
                self._counted[name, number] = step, now
                if now[1] and step != last and now == before:
                    log.warning(
                        "the full checkpoint of step %d has the same step counts of the %s %s as "
                        "that of step %d. If another object trains the model now, set hook.%s to "
                        "it on all ranks",
                        step,
                        name,
                        type(one).__name__,
                        last,
                        name.replace("_", "."),
                    )
        # Last, because user_state() may fail on only one rank, and FSDP1's gathering needs all.
        user_state = None if objects.user_state is None else objects.user_state()
        extra = extra_state(scheduler=objects.scheduler, user_state=user_state)
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
    ) -> WeightsInMemory | None:
        """Gather weights into rank 0's memory, which is free again after ``at_end``. Collective."""
        part = None
        if self.rank == 0 and has_room:
            part = self._wholes.pop() if self._wholes else WeightsInMemory()
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
