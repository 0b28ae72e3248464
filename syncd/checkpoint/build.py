"""From a whole save to a complete folder with its manifest: a Hugging Face model, or an adapter."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from syncd.checkpoint.adapter import AdapterConfig, read_config
from syncd.checkpoint.cast import Caster
from syncd.checkpoint.contents import Contents, look_inside
from syncd.checkpoint.merge import Merged, Progress, digest_safetensors, run_plan, unheard
from syncd.checkpoint.model_folder import copy_model_files, ties_embeddings, write_index
from syncd.checkpoint.open_save import open_save
from syncd.checkpoint.safetensors_file import SafetensorsFile, content_digest
from syncd.checkpoint.safetensors_header import broken
from syncd.checkpoint.save import Save, confirm_unchanged
from syncd.checkpoint.tensor_rules import Cast, cast_dtype, shown
from syncd.protocol.errors import CheckpointError, SaveNotReadyError
from syncd.protocol.events import Event
from syncd.protocol.names import ADAPTER_CONFIG, HUGGINGFACE, LORA_ADAPTER, MANIFEST, MODEL_CONFIG
from syncd.protocol.records import Kind, Manifest, VersionFile, encode
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage, signature

log = logging.getLogger(__name__)


def build_model_folder(
    storage: Storage,
    actor: Path,
    save: Save,
    folder: Path,
    *,
    sequence: int,
    digests: bool,
    max_file_size: int,
    cast: Cast | None = None,
    prefix: str | None = None,
    threads: int = 1,
    cancel: Callable[[], None],
    progress: Progress = unheard,
    clock: Callable[[], float] = time.monotonic,
) -> Manifest:
    """Merge a save into an empty folder, durably, the manifest last.

    A save of a full model becomes a Hugging Face model folder. One with a LoRA adapter, in
    ``lora_adapter/`` or among the shards' tensors, becomes a folder that PEFT and vLLM load: the
    adapter in one file, its config, the tokenizer; not the base model's config, without whose
    weights the folder must not look like a model.

    Args:
        storage: the shared storage.
        actor: the ``actor/`` folder of the save.
        save: as it was looked at last.
        folder: an empty folder that nobody else looks at; its own entry is the caller's to sync.
        sequence: for the manifest; 0 for a folder that is not published.
        digests: whether the manifest carries digests.
        max_file_size: the most bytes of tensors in one file.
        cast: what floating tensors are to become; None for what they are.
        prefix: what the model's names begin with, in a save of ``torch.distributed.checkpoint``;
            None to find out.
        threads: how many files are written at a time, and no more than there are processors.
        cancel: called between chunks; raises to stop.
        progress: called with the bytes of tensors that are done, and those of all.
        clock: seconds, monotonic, for the timings in the manifest.

    Returns:
        The manifest, as written to ``manifest.json``.

    Raises:
        SaveNotReadyError: the save is not whole, or changed meanwhile.
        CheckpointError: it can never be merged as it is.
    """
    if save.identity is None:
        raise SaveNotReadyError(save.reason)
    begun = clock()
    try:
        with (
            _judged_at_rest(storage, actor, save),
            open_save(storage, actor, save, prefix=prefix, cancel=cancel) as opened,
            ExitStack() as stack,
        ):
            confirm_unchanged(storage, actor, save)
            checked = opened.checked
            contents = look_inside(opened, cancel)
            caster = None
            if _has_to_cast(contents, cast):
                # It imports torch, for seconds, while the small files are copied.
                caster = stack.enter_context(Caster(str(actor)))
            # The small files first: where one is not what was vouched for, no weights are copied.
            models = _copy_small_files(storage, actor, save, folder, contents.kind, cancel)
            bias, base_model = "none", None
            if contents.kind == "adapter":
                config = _adapter_config(storage, actor, folder, models, contents)
                bias, base_model = config.bias, config.base_model
                if base_model is None:
                    log.warning(
                        "%s: %s names no base_model_name_or_path, so that the version does not say "
                        "which model the adapter is for: whoever loads it has to know",
                        actor,
                        ADAPTER_CONFIG,
                        extra=Event.ADAPTER_WITHOUT_BASE(path=actor),
                    )
            copied = clock()
            plan = contents.plan(
                bias=bias,
                tied=ties_embeddings(storage, folder, models),
                max_file_size=max_file_size,
                cast=cast,
                cancel=cancel,
            )
            if opened.full is not None and not plan.casts:
                merged = _one_file(
                    storage,
                    opened.full,
                    actor,
                    save,
                    folder,
                    digests=digests,
                    cancel=cancel,
                    progress=progress,
                )
            else:
                sources = contents.sources(opened, bias=bias)
                merged = run_plan(
                    storage,
                    plan,
                    sources,
                    folder,
                    digests=digests,
                    # Where one rank has none, the others' are checked all the same.
                    check_crc=not save.receipts and any(source.has_crc for source in sources),
                    shares=checked == "receipt",
                    cancel=cancel,
                    progress=progress,
                    threads=threads,
                    caster=caster,
                )
            merge_seconds = clock() - copied
    except OSError as error:
        if is_gone(error) and storage.exists(folder):
            raise SaveNotReadyError(f"{error.filename or actor} went while it was read") from error
        raise
    files = [*merged.files, *models, *write_index(storage, folder, merged)]
    if not save.receipts:
        confirm_unchanged(storage, actor, save)
    if not digests:
        files = [file.model_copy(update={"digest": None}) for file in files]
    manifest = Manifest(
        sequence=sequence,
        step=save.step,
        save_id=save.identity,
        kind=contents.kind,
        checked=checked,
        digests="xxh3-128" if digests else "off",
        files=tuple(files),
        tensors=merged.tensors,
        base_model=base_model,
        timings={"merge": round(merge_seconds, 6), "build": round(clock() - begun, 6)},
    )
    storage.write_new(folder / MANIFEST, encode(manifest))
    storage.sync_folder(folder)
    return manifest


def _has_to_cast(contents: Contents, cast: Cast | None) -> bool:
    """Whether any tensor of the save has another dtype than it is to have."""
    return any(
        cast_dtype(tensor.dtype, cast) != tensor.dtype
        for index in contents.indexes
        for tensor in index.tensors.values()
    )


def weights_size(
    storage: Storage,
    actor: Path,
    save: Save,
    *,
    cast: Cast | None = None,
    prefix: str | None = None,
    cancel: Callable[[], None] = lambda: None,
) -> int:
    """How many bytes of weights are written for the version of a whole save.

    Of a PEFT model they are the adapter's; what is linked is not written.

    Raises:
        SaveNotReadyError, CheckpointError, OSError: as :func:`build_model_folder`.
    """
    with (
        _judged_at_rest(storage, actor, save),
        open_save(storage, actor, save, prefix=prefix, cancel=cancel) as opened,
    ):
        contents = look_inside(opened, cancel)
        plan = contents.plan(
            bias="all", tied=False, max_file_size=sys.maxsize, cast=cast, cancel=cancel
        )
        linked = opened.full is not None and save.receipts and not plan.casts
        return 0 if linked else plan.data_size


@contextmanager
def _judged_at_rest(storage: Storage, actor: Path, save: Save) -> Iterator[None]:
    """What cannot be read may be what is being written: only a save at rest is judged."""
    try:
        yield
    except CheckpointError:
        confirm_unchanged(storage, actor, save)
        raise


def _one_file(
    storage: Storage,
    file: SafetensorsFile,
    actor: Path,
    save: Save,
    folder: Path,
    *,
    digests: bool,
    cancel: Callable[[], None],
    progress: Progress,
) -> Merged:
    """The trainer's own file: linked where our hook wrote it, else copied."""
    (name,) = save.weights
    target = folder / file.path.name
    # Our hook never writes in place, so that what is linked stays as it is.
    linked = bool(save.receipts) and storage.link_if_possible(actor / name, target)
    if linked:
        # The name may have been replaced since the file was opened and checked.
        status = storage.status(target)
        if status is None or signature(status)[:2] != file.signature[:2]:
            raise SaveNotReadyError(f"{actor / name} was replaced while it was linked")
    merged = digest_safetensors(
        storage,
        file,
        copy_to=None if linked else target,
        digests=digests,
        cancel=cancel,
        progress=progress,
    )
    if save.receipts and digests and (told := file.told_content) is not None:
        found = content_digest(bytes.fromhex(tensor.digest or "") for tensor in merged.tensors)
        if found.hex() != told:
            raise broken(str(actor / name), "its tensors are not those that its trainer wrote")
    return merged


def _copy_small_files(
    storage: Storage,
    actor: Path,
    save: Save,
    folder: Path,
    kind: Kind,
    cancel: Callable[[], None],
) -> tuple[VersionFile, ...]:
    """Config and tokenizer, durably, each one as its receipt says where it has one."""
    copied: dict[str, tuple[VersionFile, ...]] = {}
    leave_out: set[str] = set()
    try:
        if kind == "adapter":
            # PEFT's own files before the base model's. Folders inside are other adapters.
            leave_out = {MODEL_CONFIG}
            copied[LORA_ADAPTER] = copy_model_files(
                storage,
                actor / LORA_ADAPTER,
                folder,
                cancel=cancel,
                leave_out=leave_out,
                recursive=False,
            )
            leave_out.update(file.name for file in copied[LORA_ADAPTER])
        copied[HUGGINGFACE] = copy_model_files(
            storage, actor / HUGGINGFACE, folder, cancel=cancel, leave_out=leave_out
        )
    except RecursionError:
        raise CheckpointError(
            f"{actor / HUGGINGFACE} has folders inside folders, hundreds deep: remove them"
        ) from None
    for source, files in copied.items():
        _check_small_files(storage, actor, save, f"{source}/", files)
    return tuple(file for files in copied.values() for file in files)


def _adapter_config(
    storage: Storage,
    actor: Path,
    folder: Path,
    copied: Sequence[VersionFile],
    contents: Contents,
) -> AdapterConfig:
    """The config of the adapter, as it was copied.

    Raises:
        CheckpointError: there is none, or none of this adapter.
    """
    if all(file.name != ADAPTER_CONFIG for file in copied):
        raise CheckpointError(
            f"{actor} holds a LoRA adapter without its {ADAPTER_CONFIG}, which alone says how its "
            f"weights are scaled: write it into {actor / LORA_ADAPTER} with "
            "PeftConfig.save_pretrained"
        )
    try:
        content = storage.read(folder / ADAPTER_CONFIG)
    except OSError as error:
        if not is_no_record(error):
            raise
        content = b""  # far too long
    config = read_config(content, f"the {ADAPTER_CONFIG} of {actor}")
    if contents.adapter is not None and config.peft_type != "LORA":
        raise CheckpointError(
            f"the {ADAPTER_CONFIG} of {actor} is of a {shown(config.peft_type)} adapter, and the "
            "shards hold a LORA one: save both of one model"
        )
    return config


def _check_small_files(
    storage: Storage, actor: Path, save: Save, prefix: str, copied: tuple[VersionFile, ...]
) -> None:
    """The files of a folder must be those that rank 0 vouched for; all of them must be there."""
    found = {prefix + file.name: (file.size, file.digest) for file in copied}
    for name, file in save.vouched().items():
        if not name.startswith(prefix):
            continue
        if name not in found and not storage.exists(actor / name):
            raise SaveNotReadyError(
                f"{actor / name} is gone, and the receipt of save {save.identity} vouches for it"
            )
        if found.get(name, (file.size, file.digest)) != (file.size, file.digest):
            raise SaveNotReadyError(
                f"{actor / name} is not the file that the receipt of save {save.identity} vouches "
                "for: it is being replaced, or was damaged"
            )
