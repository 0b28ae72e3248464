"""The contents of a save: a full model, a LoRA adapter, or an adapter with its base model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from syncd.checkpoint.adapter import Adapter, find_adapter, is_peft_model
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.merging.plan import MergePlan, ShardIndex, plan_merge
from syncd.checkpoint.merging.source_reader import Source, SourceFile
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.open_save import OpenSave
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.placement import Chunks, Local, Position, Shape
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.save import LoraAdapter
from syncd.checkpoint.tensor_rules import TENSOR_LIMIT, shown
from syncd.protocol.errors import CheckpointError, CoverageError
from syncd.protocol.names import ADAPTER_WEIGHTS, LORA_ADAPTER
from syncd.protocol.records import Kind


class SaveContents(NamedTuple):
    """The content of a save.

    Attributes:
        kind: the kind of version that the save becomes.
        indexes: the index of each file.
        adapter: chooses and names the tensors to publish; None to publish all.
    """

    kind: Kind
    indexes: Sequence[ShardIndex]
    adapter: Adapter | None = None

    def shapes(self) -> dict[str, Shape]:
        """The shape of each whole tensor."""
        found: dict[str, Shape] = {}
        for index in self.indexes:
            for name, value in index.tensors.items():
                if isinstance(value, Chunks):
                    found[name] = value.global_shape
                elif value.position is not None:
                    found[name] = value.position.global_shape
                else:
                    found[name] = value.local_shape
        return found

    def plan(
        self,
        options: MergeOptions,
        *,
        bias: str,
        tied: bool,
        hub: NameMap | None = None,
        cancel: Check,
    ) -> MergePlan:
        """Plan the merge of the shards. An adapter becomes one file, because PEFT reads only one.

        ``bias`` is the value in ``adapter_config.json``, and ``tied`` the value of
        ``tie_word_embeddings``. ``hub`` is None to keep the trainer's names.

        Raises:
            CoverageError: the parts do not make whole tensors.
        """
        adapter = self.adapter
        if self.kind == "full":
            return plan_merge(
                self.indexes,
                max_file_size=options.max_file_size,
                tied=tied,
                hub=hub,
                cast=options.cast,
                cancel=cancel,
            )
        return plan_merge(
            self.indexes,
            max_file_size=sys.maxsize,
            rename=str if adapter is None else lambda name: adapter.saved_name(name, bias),
            stem=Path(ADAPTER_WEIGHTS).stem,
            cast=options.cast,
            cancel=cancel,
        )

    def sources(self, opened: OpenSave, *, bias: str) -> Sequence[Source]:
        """The open files for the plan. For an adapter, only its own tensors are in them."""
        if opened.files:
            return [SourceFile(file.path, file.fd) for file in opened.files]
        if self.adapter is None:
            return opened.sources
        return [
            SourceFile(
                source.path,
                source.fd,
                source.has_crc,
                {
                    name: source.records[name]
                    for name in _records(index, self.adapter, bias)
                    if name in source.records  # safetensors files have none
                },
            )
            for source, index in zip(opened.sources, self.indexes, strict=True)
        ]


def _records(index: ShardIndex, adapter: Adapter, bias: str) -> set[str]:
    return {
        local.record
        for name, value in index.tensors.items()
        if adapter.saved_name(name, bias) is not None
        for local in (value.locals if isinstance(value, Chunks) else (value,))
    }


def look_inside(opened: OpenSave, cancel: Check) -> SaveContents:
    """Index the tensors of a save, and find out its kind.

    Raises:
        CheckpointError: the save has too many tensors, or an adapter that no engine can load.
    """
    if opened.files:
        is_adapter = isinstance(opened.save, LoraAdapter)
        indexes = [_index(file, is_adapter=is_adapter) for file in opened.files]
        _check_names(indexes, opened.files[0].path.parent)
        return SaveContents("adapter" if is_adapter else "full", indexes)
    indexes = list(opened.chunked.indexes) if opened.chunked is not None else []
    for shard in opened.shards:
        cancel()
        indexes.append(ShardIndex(shard.path.name, opened.tensors(shard)))
    names = dict.fromkeys(name for index in indexes for name in index.tensors)
    if len(names) > TENSOR_LIMIT:
        raise CheckpointError(
            f"{opened.sources[0].path.parent} has {len(names)} tensors in all, over the limit of "
            f"{TENSOR_LIMIT}: save the model's own state dict"
        )
    adapter = find_adapter(names)
    if adapter is None and is_peft_model(names):
        raise _of_another_method(opened.sources[0].path.parent)
    return SaveContents("full" if adapter is None else "adapter", indexes, adapter)


def _index(file: SafetensorsFile, *, is_adapter: bool) -> ShardIndex:
    _check_one_file(file, is_adapter=is_adapter)
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
                raise CoverageError(
                    f"{actor} holds {shown(name)} in both {seen[name]} and {label}. Give each "
                    "tensor to only one rank"
                )
    if not seen:
        raise CoverageError(
            f"{actor} holds no tensors. Perhaps the trainer failed to gather the tensors. Save the "
            "step again"
        )


def _check_one_file(file: SafetensorsFile, *, is_adapter: bool) -> None:
    found = find_adapter(entry.name for entry in file.entries)
    if found is None and not is_adapter and is_peft_model(entry.name for entry in file.entries):
        raise _of_another_method(file.path)
    if found is None or (is_adapter and found.name is None):
        return
    what = "an adapter with the tensor names of a PEFT model" if is_adapter else "a PEFT model"
    raise CheckpointError(
        f"{file.path} holds {what}, and no engine loads such a file. Save the adapter into "
        f"{LORA_ADAPTER}/ with PeftModel.save_pretrained"
    )


def _of_another_method(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds a PEFT model of another method than LoRA, and no engine loads such a file. "
        "Save the model that merge_and_unload() returns, or save the adapter into "
        f"{LORA_ADAPTER}/ with PeftModel.save_pretrained"
    )
