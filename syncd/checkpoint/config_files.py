"""Config, tokenizer, adapter config and name map of a version: those of the save, and no others."""

from __future__ import annotations

from pathlib import Path

from syncd.checkpoint.adapter import AdapterConfig, read_config
from syncd.checkpoint.description import contradiction
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.model_folder import (
    copy_model_files,
    read_model_config,
    warn_once,
    write_file,
)
from syncd.checkpoint.name_map import NAME_MAP_LIMIT, NameMap, map_by_type
from syncd.checkpoint.open_save import OpenSave
from syncd.checkpoint.save_contents import SaveContents
from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.verl_lora import make_config, read_trained
from syncd.protocol.errors import CheckpointError, RecordError, SaveNotReadyError
from syncd.protocol.names import (
    ADAPTER_CONFIG,
    HUGGINGFACE,
    LORA_ADAPTER,
    LORA_TRAIN_META,
    MODEL_CONFIG,
    NAME_MAP,
)
from syncd.protocol.records import Kind, VersionFile
from syncd.storage.errnos import NO_RECORD, Ignoring


def copy_small_files(opened: OpenSave, folder: Path, kind: Kind) -> dict[str, VersionFile]:
    """Copy config and tokenizer; check the files that a receipt lists."""
    actor, save = opened.actor, opened.save
    sources = [save.model_folder]
    leave_out = {ADAPTER_CONFIG}  # beside a full model, loaders would look for its base model
    if kind == "adapter":
        # PEFT's files come before the base model's. Skip folders, which hold other adapters.
        sources.insert(0, LORA_ADAPTER)
        leave_out = {MODEL_CONFIG, NAME_MAP}
    elif save.receipts and f"{HUGGINGFACE}/{NAME_MAP}" not in opened.vouched:
        leave_out.add(NAME_MAP)  # left by another save, perhaps of another model
    copied: dict[str, VersionFile] = {}
    for source in sources:
        found = copy_model_files(
            opened.storage,
            actor / source,
            folder,
            cancel=opened.cancel,
            leave_out=leave_out,
            listed=opened.vouched,
            recursive=source != LORA_ADAPTER,
        )
        leave_out.update(found)
        copied |= found
        for name, file in found.items():
            opened.check(f"{source}/{name}", file.size, file.digest)
    for path in opened.vouched:
        source, _, name = path.partition("/")
        if source in sources and name not in copied and not opened.storage.exists(actor / path):
            raise SaveNotReadyError(
                f"{actor / path} is gone, but the receipt of save {save.identity} lists it"
            )
    return copied


def adapter_config(
    opened: OpenSave, folder: Path, copied: dict[str, VersionFile], contents: SaveContents
) -> AdapterConfig:
    """The adapter's config; it is made, as one of the copied files, if verl has written none."""
    storage, actor, adapter = opened.storage, opened.actor, contents.adapter
    shapes = {
        saved: shape
        for name, shape in contents.shapes().items()
        if (saved := contents.saved_name(name)) is not None
    }
    meta, trained, content = actor / LORA_TRAIN_META, None, b""
    is_verl = adapter is not None and storage.exists(meta)
    # Files that are too long are refused like others that cannot be read.
    if is_verl:
        with Ignoring(NO_RECORD):
            trained = read_trained(storage.read(meta))
    if ADAPTER_CONFIG in copied:
        with Ignoring(NO_RECORD):
            content = storage.read(folder / ADAPTER_CONFIG)
    elif is_verl:
        content = make_config(trained, meta, shapes)
        copied[ADAPTER_CONFIG] = write_file(storage, folder, ADAPTER_CONFIG, content)
    else:
        raise CheckpointError(
            f"{actor} holds a LoRA adapter without its {ADAPTER_CONFIG}, the only file with the "
            f"scaling of the adapter's weights. Write this file into {actor / LORA_ADAPTER} with "
            "PeftConfig.save_pretrained"
        )
    where = f"the {ADAPTER_CONFIG} of {actor}"
    config = read_config(content, where)
    # Only its file shows an adapter of another method.
    is_lora = adapter is not None and (adapter.modules or adapter.filed is None)
    if is_lora and config.peft_type != "LORA":
        raise CheckpointError(
            f"{where} is for an adapter of type {shown(config.peft_type)}, but the shards hold a "
            "LoRA adapter. Save the config and the shards from the same model"
        )
    if wrong := config.wrong_rank(shapes):
        raise CheckpointError(
            f"{where} has another rank than {shown(wrong)}: one of them is of an older save. Save "
            "the config and the weights from the same model"
        )
    if trained is not None and config.lora_alpha != trained.lora_alpha:
        raise CheckpointError(
            f"{where} has another lora_alpha than {meta}: one of them is of an older save. Remove "
            "that file"
        )
    return config


def described(
    opened: OpenSave,
    folder: Path,
    copied: dict[str, VersionFile],
    contents: SaveContents,
    options: MergeOptions,
) -> tuple[object, NameMap | None]:
    """The config and the name map (None of an adapter). Another model's are removed.

    With such a config go the files beside it, except those that receipts list: the tokenizer is
    most likely of that model too, and unlike a missing one it would be wrong without a word.
    """
    storage, actor, save = opened.storage, opened.actor, opened.save
    config = read_model_config(storage, folder, copied.values())
    shapes = contents.shapes()
    listed = {f"{HUGGINGFACE}/{NAME_MAP}", *opened.vouched}
    reason = contradiction(config, shapes)
    if reason and f"{HUGGINGFACE}/{MODEL_CONFIG}" not in listed:
        for name in [name for name in copied if f"{HUGGINGFACE}/{name}" not in listed]:
            storage.unlink(folder / name)
            del copied[name]
        warn_once(
            actor,
            "other_model",
            f"{reason}, so the version gets no file of its folder. Save the model's own there",
            "no_config",
        )
        config = None
    name_map = map_by_type(config, shapes)
    if NAME_MAP in copied:
        where = actor / save.model_folder / NAME_MAP
        if copied[NAME_MAP].size > NAME_MAP_LIMIT:
            raise CheckpointError(
                f"{where} is longer than {NAME_MAP_LIMIT} bytes, the limit for a name map. Remove "
                "the file"
            )
        try:
            content = storage.read(folder / NAME_MAP, NAME_MAP_LIMIT)
            given = NameMap.read(opened.parser.read_name_map(content, str(where)), where)
        except RecordError as error:
            raise CheckpointError(f"{error}. Remove the file, and save the step again") from error
        fits = given.tensors().items() <= shapes.items() and (given or name_map is None)
        if fits or save.receipts:
            name_map = given
        else:
            storage.unlink(folder / NAME_MAP)
            del copied[NAME_MAP]
            warn_once(actor, "name_map", f"{where} is of another model: syncd's tables count")
    wanted = options.names == "hub" and not options.may_keep
    if name_map is not None and name_map.refused is not None and wanted:
        raise CheckpointError(
            f"the tensors in {actor} cannot get the hub's names: {name_map.refused}. Keep the "
            "trainer's names with --names trainer"
        )
    return config, name_map
