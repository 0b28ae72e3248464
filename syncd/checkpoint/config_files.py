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
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.save import SavedWeights
from syncd.checkpoint.save_contents import SaveContents
from syncd.checkpoint.tensor_rules import shown
from syncd.checkpoint.verl_lora import alpha_in, make_config
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
from syncd.storage.errnos import NO_RECORD, Ignoring, is_no_record
from syncd.storage.fsio import Storage


def copy_small_files(
    storage: Storage,
    actor: Path,
    save: SavedWeights,
    folder: Path,
    kind: Kind,
    cancel: Check,
) -> tuple[VersionFile, ...]:
    """Copy config and tokenizer; check the files that a receipt lists."""
    copied: dict[str, tuple[VersionFile, ...]] = {}
    vouched = save.vouched()
    leave_out = {ADAPTER_CONFIG}  # beside a full model, loaders would look for its base model
    if kind == "adapter":
        # PEFT's files come before the base model's. Skip folders, which hold other adapters.
        leave_out = {MODEL_CONFIG, NAME_MAP}
        copied[LORA_ADAPTER] = copy_model_files(
            storage,
            actor / LORA_ADAPTER,
            folder,
            cancel=cancel,
            leave_out=leave_out,
            listed=vouched,
            recursive=False,
        )
        leave_out.update(file.name for file in copied[LORA_ADAPTER])
    if save.receipts and f"{HUGGINGFACE}/{NAME_MAP}" not in vouched:
        leave_out.add(NAME_MAP)  # left by another save, perhaps of another model
    copied[save.model_folder] = copy_model_files(
        storage,
        actor / save.model_folder,
        folder,
        cancel=cancel,
        leave_out=leave_out,
        listed=vouched,
    )
    found = {
        f"{source}/{file.name}": (file.size, file.digest)
        for source, files in copied.items()
        for file in files
    }
    for name, file in vouched.items():
        if name.partition("/")[0] not in copied:
            continue
        if name not in found and not storage.exists(actor / name):
            raise SaveNotReadyError(
                f"{actor / name} is gone, but the receipt of save {save.identity} lists it"
            )
        if found.get(name, (file.size, file.digest)) != (file.size, file.digest):
            raise save.differs(actor / name)
    return tuple(file for files in copied.values() for file in files)


def adapter_config(
    storage: Storage,
    actor: Path,
    folder: Path,
    copied: tuple[VersionFile, ...],
    contents: SaveContents,
) -> tuple[AdapterConfig, tuple[VersionFile, ...]]:
    """The adapter's config, and the copied files with it: it is made if verl has written none."""
    adapter, meta = contents.adapter, actor / LORA_TRAIN_META
    shapes = {
        name if adapter is None else adapter.saved_name(name): shape
        for name, shape in contents.shapes().items()
    }
    content = told = b""  # a file that is too long: read_config and make_config refuse it
    is_verl = adapter is not None and storage.exists(meta)
    if is_verl:
        with Ignoring(NO_RECORD):
            told = storage.read(meta)
    if any(file.name == ADAPTER_CONFIG for file in copied):
        with Ignoring(NO_RECORD):
            content = storage.read(folder / ADAPTER_CONFIG)
    elif is_verl:
        content = make_config(told, meta, shapes)
        copied = (*copied, write_file(storage, folder, ADAPTER_CONFIG, content))
    else:
        raise CheckpointError(
            f"{actor} holds a LoRA adapter without its {ADAPTER_CONFIG}, the only file with the "
            f"scaling of the adapter's weights. Write this file into {actor / LORA_ADAPTER} with "
            "PeftConfig.save_pretrained"
        )
    where = f"the {ADAPTER_CONFIG} of {actor}"
    config = read_config(content, where)
    if adapter is not None and adapter.is_lora and config.peft_type != "LORA":
        raise CheckpointError(
            f"{where} is for an adapter of type {shown(config.peft_type)}, but the shards hold a "
            "LoRA adapter. Save the config and the shards from the same model"
        )
    wrong = config.peft_type == "LORA" and config.wrong_rank({n: s for n, s in shapes.items() if n})
    if wrong:
        raise CheckpointError(
            f"{where} has another rank than {shown(wrong)}: one of them is of an older save. Save "
            "the config and the weights from the same model"
        )
    if told and config.lora_alpha != (alpha_in(told) or config.lora_alpha):
        raise CheckpointError(
            f"{where} has another lora_alpha than {meta}: one of them is of an older save. Remove "
            "that file"
        )
    return config, copied


def described(
    storage: Storage,
    folder: Path,
    models: tuple[VersionFile, ...],
    contents: SaveContents,
    options: MergeOptions,
    opened: OpenSave,
) -> tuple[object, NameMap | None, tuple[VersionFile, ...]]:
    """The config, the name map (None of an adapter), and the files without another model's.

    With such a config go the files beside it, except those that receipts list: the tokenizer is
    most likely of that model too, and unlike a missing one it would be wrong without a word.
    """
    config = read_model_config(storage, folder, models)
    actor, shapes = opened.actor, contents.shapes()
    listed = {f"{HUGGINGFACE}/{NAME_MAP}", *opened.save.vouched()}
    reason = contradiction(config, shapes)
    if reason and f"{HUGGINGFACE}/{MODEL_CONFIG}" not in listed:
        others = [file for file in models if f"{HUGGINGFACE}/{file.name}" not in listed]
        for file in others:
            storage.unlink(folder / file.name)
        models = tuple(file for file in models if file not in others)
        warn_once(
            actor,
            "other_model",
            f"{reason}, so the version gets no file of its folder. Save the model's own there",
            "no_config",
        )
        config = None
    found = map_by_type(config, shapes)
    if any(file.name == NAME_MAP for file in models):
        where = actor / opened.save.model_folder / NAME_MAP
        try:
            content = storage.read(folder / NAME_MAP, NAME_MAP_LIMIT)
            fields = opened.parser.read_name_map(content, str(where))
            given = NameMap.read(fields, where)
        except RecordError as error:
            raise CheckpointError(f"{error}. Remove the file, and save the step again") from error
        except OSError as error:
            if not is_no_record(error):
                raise
            raise CheckpointError(
                f"{where} is longer than {NAME_MAP_LIMIT} bytes, the limit for a name map. Remove "
                "the file"
            ) from error
        fits = given.tensors().items() <= shapes.items() and (given or found is None)
        if fits or opened.save.receipts:
            found = given
        else:
            storage.unlink(folder / NAME_MAP)
            models = tuple(file for file in models if file.name != NAME_MAP)
            warn_once(actor, "name_map", f"{where} is of another model: syncd's tables count")
    wanted = options.names == "hub" and not options.may_keep
    if found is not None and found.refused is not None and wanted:
        raise CheckpointError(
            f"the tensors in {actor} cannot get the hub's names: {found.refused}. Keep the "
            "trainer's names with --names trainer"
        )
    return config, found, models
