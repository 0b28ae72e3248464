"""Contents of a save's open files: a model or an adapter, and by which names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from syncd.checkpoint.adapter import Adapter, find_adapter, is_peft_model
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.merging.plan import MergePlan, ShardIndex, Ties, plan_merge
from syncd.checkpoint.merging.source_reader import Source, SourceFile
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.open_save import OpenSave
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.placement import Chunks, Local, Position, Shape, agreed
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.save import LoraAdapter
from syncd.checkpoint.tensor_rules import TENSOR_LIMIT, Casting, shown
from syncd.checkpoint.wrapper_names import without_wrappers
from syncd.protocol.errors import CheckpointError, CoverageError
from syncd.protocol.names import ADAPTER_WEIGHTS, LORA_ADAPTER
from syncd.protocol.records import Kind
from syncd.protocol.version_events import AdapterIgnored

log = logging.getLogger(__name__)


class SaveContents(NamedTuple):
    """The content of a save.

    Attributes:
        kind: the kind of version that the save becomes.
        indexes: the index of each shard, or of the single file.
        adapter: chooses and names the tensors to publish; None to publish all.
        beside: the index of an adapter's file with the same tensors.
    """

    kind: Kind
    indexes: Sequence[ShardIndex]
    adapter: Adapter | None = None
    beside: ShardIndex | None = None

    def shapes(self) -> dict[str, Shape]:
        """The shape of each whole tensor."""
        return {
            name: agreed(value)[1]
            for index in self.indexes
            for name, value in index.tensors.items()
        }

    def saved_name(self, name: str) -> str | None:
        """The name in the version of a tensor of the save; None if it is left out."""
        return name if self.adapter is None else self.adapter.saved_name(name)

    def with_bias(self, bias: str) -> Self:
        """These contents with the biases that an adapter's config names."""
        return self._replace(adapter=self.adapter and self.adapter._replace(bias=bias))

    def plan(
        self,
        options: MergeOptions,
        *,
        cast: Casting | None,
        tied: Ties,
        hub: NameMap | None = None,
        cancel: Check,
    ) -> MergePlan:
        """Plan the merge of the shards. An adapter becomes one file, because PEFT reads only one.

        ``hub`` is None to keep the trainer's names.

        Raises:
            CoverageError: the parts do not make whole tensors.
        """
        is_full = self.kind == "full"
        return plan_merge(
            self.indexes,
            max_file_size=options.max_file_size if is_full else sys.maxsize,
            rename=self.saved_name,
            stem="model" if is_full else Path(ADAPTER_WEIGHTS).stem,
            tied=is_full and tied,
            hub=hub,
            same=self.beside,
            cast=cast,
            cancel=cancel,
        )

    def sources(self, opened: OpenSave) -> Sequence[Source]:
        """The open files for the plan. For an adapter, only its own tensors are in them."""
        sources = opened.sources
        if self.adapter is not None:
            sources = [
                SourceFile(
                    source.path,
                    source.fd,
                    source.has_crc,
                    {
                        name: source.records[name]
                        for name in self._records(index)
                        if name in source.records  # safetensors files have none
                    },
                )
                for source, index in zip(sources, self.indexes, strict=True)
            ]
        return [*sources, *opened.beside]

    def _records(self, index: ShardIndex) -> set[str]:
        return {
            local.record
            for name, value in index.tensors.items()
            if self.saved_name(name) is not None
            for local in value.locals
        }


def look_inside(opened: OpenSave, cancel: Check) -> SaveContents:
    """Index the tensors of a save, and find out its kind.

    Raises:
        CheckpointError: the save has too many tensors, or an adapter that no engine can load.
    """
    actor, adapters = opened.actor, opened.save.adapters
    if opened.files:
        indexes = list(map(_index, opened.files))
        _check_names(indexes, actor)
    else:
        indexes = list(opened.indexes)
        for shard in opened.shards:
            cancel()
            indexes.append(ShardIndex(shard.path.name, opened.tensors(shard)))
        indexes = list(without_wrappers(indexes, ddp=not opened.save.receipts))
    names = dict.fromkeys(name for index in indexes for name in index.tensors)
    if len(names) > TENSOR_LIMIT:
        raise CheckpointError(
            f"{actor} has {len(names)} tensors in all, over the limit of {TENSOR_LIMIT}: save the "
            "model's own state dict"
        )
    adapter = find_adapter(names)
    if isinstance(opened.save, LoraAdapter):
        if adapter is not None and adapter.name is not None:
            raise _unloadable(actor, "an adapter with the tensor names of a PEFT model")
        return SaveContents("adapter", indexes)
    if adapter is None and not is_peft_model(names):
        if adapters:
            AdapterIgnored(actor).tell(log)
        return SaveContents("full", indexes)
    if adapters:
        opened.beside.append(opened.open_whole(adapters[0]))
        beside = _index(opened.beside[0])._replace(label=adapters[0])
        adapter = (adapter or Adapter(None)).with_names_of(beside.tensors, names, actor)
        return SaveContents("adapter", indexes, adapter, beside)
    if adapter is None:
        raise CheckpointError(
            f"{actor} holds the frozen base of a LoRA model without its adapter, or a PEFT model "
            "of another method than LoRA, and no engine loads either. Save the model that "
            "merge_and_unload() returns (in verl actor_rollout_ref.model.lora.merge=True), or "
            f"save the adapter into {LORA_ADAPTER}/ with PeftModel.save_pretrained"
        )
    if opened.files:
        raise _unloadable(actor, "a PEFT model")
    return SaveContents("adapter", indexes, adapter)


def _index(file: SafetensorsFile) -> ShardIndex:
    tensors = {}
    for name, dtype, shape, begin, end in file.entries:
        local = Local(dtype, shape, begin, end - begin, "", Position(shape, (0,) * len(shape)))
        tensors[name] = Chunks(dtype, shape, (local,) if end > begin else ())
    return ShardIndex(file.path.name, tensors)


def _check_names(indexes: Sequence[ShardIndex], actor: Path) -> None:
    seen: dict[str, str] = {}
    for label, tensors in indexes:
        for name in tensors:
            if seen.setdefault(name, label) != label:
                both = f"both {seen[name]} and {label}"
                raise CoverageError(f"{actor} holds {shown(name)} in {both}: give it to one rank")
    if not seen:
        raise CoverageError(
            f"{actor} holds no tensors. Perhaps gathering failed: save the step again"
        )


def _unloadable(actor: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{actor} holds {what}, which no engine loads. Save the adapter into "
        f"{LORA_ADAPTER}/ with PeftModel.save_pretrained"
    )
