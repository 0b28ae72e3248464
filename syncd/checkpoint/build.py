"""Building a complete folder with a manifest from a save: a Hugging Face model, or an adapter."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from syncd.checkpoint.casting import casting_of
from syncd.checkpoint.config_files import adapter_config, copy_small_files, described
from syncd.checkpoint.description import floating_dtypes
from syncd.checkpoint.masters import in_models_dtype
from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.model_folder import (
    correct_dtype,
    says_tied,
    write_index,
    write_name_map,
)
from syncd.checkpoint.open_save import open_save
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.save import (
    Delta,
    Remote,
    Save,
    SavedWeights,
    Unfinished,
    WholeSave,
    confirm_unchanged,
)
from syncd.checkpoint.save_contents import look_inside
from syncd.checkpoint.step_save import look_into_step
from syncd.checkpoint.tensor_rules import Cast
from syncd.checkpoint.version import write_manifest
from syncd.checkpoint.whole_files import Merged, publish_files
from syncd.protocol.amounts import size
from syncd.protocol.errors import CheckpointError, NoRoomError, SaveNotReadyError
from syncd.protocol.names import (
    ACTOR,
    FULL,
    HUGGINGFACE,
    NAME_MAP,
    REMOTE_PATH,
    SAVING,
)
from syncd.protocol.records import Manifest, Names
from syncd.protocol.tensor_names import EMPTY_MAP
from syncd.protocol.version_events import AdapterWithoutBase
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

#: Bytes to allow for config, tokenizer and manifest, and inodes to allow for a version.
_SMALL_FILES: Final = 1024 * 1024
_FEW_INODES: Final = 32


def build_model_folder(
    storage: Storage,
    actor: Path,
    save: Unfinished | SavedWeights,
    folder: Path,
    *,
    options: MergeOptions,
    work: Work,
    sequence: int | None = None,
    write: Callable[..., Merged] = run_plan,
) -> Manifest:
    """Merge a save into an empty folder. All files are synced, and the manifest is written last.

    The result is a Hugging Face model folder, or an adapter's folder for PEFT and vLLM. An
    adapter's folder lacks the base model's config, so that it does not look like a model.

    ``save`` must be the latest result of ``look_at_save``; a delta must be a full checkpoint. No
    other process may read ``folder``, and the caller must sync its parent. ``sequence`` is 0 for a
    step that is built only for evaluation, and None if no explorer loads the folder. ``write`` is
    called in place of ``run_plan``.

    Raises:
        SaveNotReadyError: the save is not whole, or changed during the merge.
        CheckpointError: this save can never be merged.
    """
    if isinstance(save, Unfinished):
        raise SaveNotReadyError(save.reason)
    given = save
    save, options = _mergeable(storage, actor, save, options)
    cancel, begun = work.cancel, work.clock()
    try:
        with (
            _judged_at_rest(storage, actor, save),
            open_save(storage, actor, save, prefix=options.prefix, cancel=cancel) as opened,
        ):
            confirm_unchanged(storage, actor, save)
            checked = opened.checked
            contents = look_inside(opened, cancel)
            kind = contents.kind
            # Copy the small files first: if one differs from its receipt, no weights are copied.
            copies = copy_small_files(opened, folder, kind)
            base_model = None
            if kind == "adapter":
                config = adapter_config(opened, folder, copies, contents)
                contents, base_model = contents.with_bias(config.bias), config.base_model
                if base_model is None:
                    AdapterWithoutBase(actor).tell(log)
            copied = work.clock()
            model_config, hub = described(opened, folder, copies, contents, options)
            names: Names = options.names if hub else "trainer"
            plan = None
            is_whole = bool(opened.files) and contents.adapter is None
            if not is_whole or options.cast is not None or names == "hub":
                plan = contents.plan(
                    options,
                    cast=casting_of(actor, given, options.cast, model_config),
                    tied=says_tied(model_config) if save.tied is None else save.tied,
                    hub=hub if names == "hub" else None,
                    cancel=cancel,
                )
            if plan is None or (is_whole and not plan.casts and names != "hub"):
                merged = publish_files(
                    storage,
                    opened.files,
                    folder,
                    vouched=bool(save.receipts),
                    digests=options.digests,
                    cancel=cancel,
                    progress=work.progress,
                )
            else:
                sources = contents.sources(opened)
                # The plan has the needed part of these indexes, which take much memory.
                contents = contents._replace(indexes=())
                opened.forget_tensors()
                merged = write(
                    storage,
                    plan,
                    sources,
                    folder,
                    options=options,
                    checked=(
                        "crc32"
                        if checked == "stillness" and any(source.has_crc for source in sources)
                        else checked
                    ),
                    work=work,
                )
                del sources
            merge_seconds = work.clock() - copied
    except OSError as error:
        if is_gone(error) and storage.exists(folder):
            raise SaveNotReadyError(
                f"{error.filename or actor} disappeared while it was read"
            ) from error
        raise
    del opened, contents, plan  # the manifest takes much memory too
    correct_dtype(
        storage,
        folder,
        copies,
        None if options.keeps_config else model_config,
        merged.tensors,
        is_cast=options.cast is not None or save.sync_dtype is not None,
    )
    files = [*merged.files, *copies.values(), *write_index(storage, folder, merged)]
    files += write_name_map(storage, folder, None if sequence is None else hub)
    if not save.receipts:
        confirm_unchanged(storage, actor, save)
    if not options.digests:
        files = [file.model_copy(update={"digest": None}) for file in files]
    manifest = Manifest(
        sequence=sequence or 0,
        step=save.step,
        save_id=save.identity,
        kind=kind,
        checked=checked,
        digests="xxh3-128" if options.digests else "off",
        files=tuple(files),
        tensors=merged.tensors,
        base_model=base_model,
        dtype=", ".join(floating_dtypes(merged.tensors)) or None,
        nonfinite=save.nonfinite,
        names=names,
        timings={"merge": round(merge_seconds, 6), "build": round(work.clock() - begun, 6)},
    )
    write_manifest(storage, actor, folder, manifest)
    return manifest


def build_step(
    storage: Storage,
    step: Path,
    save: WholeSave,
    folder: Path,
    *,
    options: MergeOptions,
    work: Work,
    sequence: int,
) -> Manifest:
    """Build the folder of a version from the save in a step's folder.

    For the other arguments and the errors see :func:`build_model_folder`.
    """
    if not isinstance(save, Remote):
        return build_model_folder(
            storage, step / ACTOR, save, folder, options=options, work=work, sequence=sequence
        )
    if look_into_step(storage, step, save.step) != save:
        raise SaveNotReadyError(
            f"{step / REMOTE_PATH} changed while syncd published it. Perhaps the trainer saved "
            "the step again"
        )
    manifest = Manifest(
        sequence=sequence,
        step=save.step,
        save_id=save.identity,
        kind="remote",
        checked="stillness",
        digests="off",
        files=(),
        tensors=(),
        remote=save.path,
    )
    write_manifest(storage, step, folder, manifest)
    return manifest


def _mergeable(
    storage: Storage, actor: Path, save: SavedWeights, options: MergeOptions
) -> tuple[SavedWeights, MergeOptions]:
    """In place of a delta the weights to resume from, with the cast for explorers."""
    if not isinstance(save, Delta):
        return save, options
    if storage.exists(actor.parent / SAVING):
        raise SaveNotReadyError(f"{actor.parent} is still being saved")
    is_full = storage.exists(actor.parent / FULL)
    found = in_models_dtype(storage, actor, save) if is_full else save
    if isinstance(found, Delta):
        raise CheckpointError(save.refusal(actor))
    cast = next((one for one in get_args(Cast) if one == save.sync_dtype), None)
    return found, options._replace(cast=options.cast or cast)


@contextmanager
def _judged_at_rest(storage: Storage, actor: Path, save: SavedWeights) -> Iterator[None]:
    """Raise SaveNotReadyError instead of CheckpointError if the save has changed."""
    try:
        yield
    except CheckpointError:
        confirm_unchanged(storage, actor, save)
        raise


@dataclass
class FreeSpace:
    """Checks that the filesystem of a job has enough space for a version.

    It caches the last computed size, because each computation parses the whole save, and the daemon
    checks repeatedly while the disk is full.
    """

    storage: Storage
    folder: Path
    root: Path
    advice: str = ""

    def __post_init__(self) -> None:
        self._sized: dict[object, int] = {}

    def check(
        self,
        actor: Path,
        save: Save,
        options: MergeOptions,
        cancel: Check,
    ) -> None:
        """Refuse a merge if its result does not fit on the disk.

        A filesystem that does not report a quota can still refuse the files later.

        Raises:
            NoRoomError: there is not enough space for this save's version.
            SaveNotReadyError: the save changed, or is not whole.
            CheckpointError: this save can never be merged.
        """
        if isinstance(save, Delta):
            save, options = _mergeable(self.storage, actor, save, options)
        needed = 0
        for name in save.weights:
            status = self.storage.status(actor / name)
            needed += status.st_size if status else 0
        needed = _SMALL_FILES + (2 if options.cast == "fp32" else 1) * needed
        free = self.storage.free(self.folder)
        if (
            free.bytes is not None
            and free.bytes < needed
            and not isinstance(save, Unfinished | Remote)
        ):
            # A merge may need less: it writes no linked files, and only a PEFT model's adapter.
            asked = (save.identity, options.cast, options.prefix, options.names)
            if asked not in self._sized:
                self._sized = {asked: self._weights_size(actor, save, options, cancel)}
            needed = _SMALL_FILES + self._sized[asked]
        if free.bytes is not None and free.bytes < needed:
            raise NoRoomError(
                f"step {save.step} needs {size(needed)}, but only {size(free.bytes)} are free in "
                f"{self.root}{self.advice}"
            )
        if free.inodes is not None and free.inodes < _FEW_INODES:
            raise NoRoomError(
                f"only {free.inodes} more files can be created in {self.root}, because its "
                "filesystem is almost out of inodes. Remove some files"
            )

    def _weights_size(
        self, actor: Path, save: SavedWeights, options: MergeOptions, cancel: Check
    ) -> int:
        """The bytes of weights that a merge would write; 0 if it would link the file."""
        with (
            _judged_at_rest(self.storage, actor, save),
            open_save(self.storage, actor, save, prefix=options.prefix, cancel=cancel) as opened,
        ):
            contents = look_inside(opened, cancel).with_bias("all")
            one_file = options._replace(max_file_size=sys.maxsize)
            cast = casting_of(actor, save, options.cast)
            plan = contents.plan(one_file, cast=cast, tied=False, cancel=cancel)
            names = opened.vouched.get(f"{HUGGINGFACE}/{NAME_MAP}")
            renamed = options.names == "hub" and names and names.size > EMPTY_MAP
            ours = all(self.storage.fstat(file.fd).st_uid == os.geteuid() for file in opened.files)
            linked = opened.files and save.receipts and ours and not (plan.casts or renamed)
            return 0 if linked else plan.data_size
