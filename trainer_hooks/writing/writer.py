"""``RankWriter``: writes one rank's saves; on rank 0 it also announces them.

``RankWriter._save`` follows ``docs/protocol.md``, "When a save is complete" ("With receipts").
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, TypeVar

from syncd.protocol.errors import SaveFailedError
from syncd.protocol.names import (
    CRITIC,
    FULL_STATE_DICT,
    SAVING,
    delta_name,
    full_receipt_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import ReceiptFile, SaveId
from syncd.storage.errnos import GONE, NO_ROOM, PASSING, is_gone
from syncd.storage.job import Job, point
from trainer_hooks.state.small_files import Files
from trainer_hooks.writing.parts import WholePart
from trainer_hooks.writing.rank_files import RankContents, RankFiles

__all__ = ["RankContents", "RankWriter"]

log = logging.getLogger(__name__)

#: Seconds between two looks for another host's files: shared storage sends no events.
_POLL: Final = 0.05

T = TypeVar("T")


@dataclass
class RankWriter:
    """Writes the saves of one rank, one after the other.

    Promised:

    - A pointer names a step only when every rank's files of one save are complete and durable.
    - A save that is cut off before it is announced is never announced later.
    - If a save fails, its unannounced files are deleted, except if the process is killed. If
      another rank failed, ranks other than 0 learn of it, and delete their files, only at the
      beginning of their next save.

    Not promised: that a save is announced if a newer save of the same step overtakes it.

    Args:
        save_timeout: seconds that rank 0 waits for the other ranks' receipts.
        is_gathered: whether rank 0 writes the weights of all ranks, so that ``save`` gets them.
        stopped: if it is set, unfinished saves fail instead of waiting for other ranks.
        pauses: seconds before each retry of an operation that storage refused for a moment.
    """

    job: Job
    rank: int
    world_size: int
    _: KW_ONLY
    save_timeout: float
    pauses: tuple[float, ...] = (0.2, 2.0)
    is_gathered: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._last: RankFiles | None = None
        #: The last save's id, its small files, and their entries in its receipt.
        self._small: tuple[str, Files, list[ReceiptFile]] = "", {}, []

    def save(
        self,
        save_id: SaveId,
        contents: RankContents,
        announced: Callable[[bool], object] = lambda _: None,
    ) -> int:
        """Write this rank's files, and return their size; rank 0 also waits and moves the pointers.

        On rank 0, ``announced`` is called when a pointer has moved: with False after the weights,
        with True after the full checkpoint.

        Raises:
            SaveFailedError: the save failed, perhaps after its weights were announced.
        """
        files = self._files(save_id)
        files.weights_stay, files.rest_stays = contents.completes, not contents.is_full
        files.contents = RankContents(  # no tensors: a failed save must not keep them
            sync_dtype=contents.sync_dtype,
            fp32=contents.fp32,
            base=contents.base,
            tied=contents.tied,
        )
        if contents.trained is not None:
            files.trained = files.name(contents.trained_name)
        try:
            self._remove_given_up(files)
            return self._save(files, contents, announced)
        except BaseException as error:
            self._after_failure(files)
            if isinstance(error, OSError | SaveFailedError):
                raise self.failure(save_id, error, files.weights_stay) from error
            raise  # e.g. a tokenizer cannot be saved

    def failure(
        self, save_id: SaveId, error: OSError | SaveFailedError, weights_stay: bool = False
    ) -> SaveFailedError:
        """The error of a failed save; ``weights_stay`` as in ``RankFiles``."""
        text = (
            "Its weights are saved: explorers get them once rank 0 has announced them"
            if weights_stay
            else "Explorers keep the version that they have"
        )
        if isinstance(error, SaveFailedError):
            return SaveFailedError(f"{error}. {text}")
        hint = f"; {self.job.daemon_hint()}" if error.errno in NO_ROOM | GONE else ""
        return SaveFailedError(
            f"rank {self.rank} could not write the save of step {save_id.step}: {error}. "
            f"{text}{hint}"
        )

    def add_hugging_face(self, save_id: SaveId, weights: WholePart) -> None:
        """On rank 0, add the full weights to a complete full checkpoint.

        Raises:
            SaveFailedError: the weights could not be written; the checkpoint is still complete.
        """
        files = self._files(save_id)
        try:
            self.again(save_id, lambda: files.add_hugging_face(weights))
        except BaseException as error:
            files.unprotect()
            if not isinstance(error, OSError):
                raise
            raise SaveFailedError(
                f"the weights of step {save_id.step} could not be written as a Hugging Face "
                f"model: {error}. The full checkpoint of this step is complete nevertheless"
            ) from error

    def say_failed(self, save_id: SaveId) -> None:
        """Record that this rank failed, so that no other rank waits for it.

        If storage refuses the record, the other ranks wait until their timeout.
        """
        files = self._files(save_id)
        try:
            self.again(save_id, files.say_failed)
        except OSError as error:
            log.warning(
                "rank %d has failed to save step %d, and cannot record this failure in storage: "
                "%s. The other ranks may wait for rank %d until the save_timeout",
                self.rank,
                save_id.step,
                error,
                self.rank,
            )
        if self.rank == 0:
            files.unprotect()

    def are_weights_there(self, save_id: SaveId) -> bool:
        """True if an announced save still has the weights of all ranks; False if in doubt."""
        try:
            return self._files(save_id).are_weights_there()
        except OSError as error:
            log.warning(
                "step %d: cannot check whether its weights are complete: %s", save_id.step, error
            )
            return False

    def again(self, save_id: SaveId, work: Callable[[], T]) -> T:
        """Call ``work``, and call it again a few times if storage fails for a moment.

        ``work`` must write a file again under a new temporary name, because a second fsync after a
        failed one would wrongly succeed. It must also recreate folders that the pruner deleted.
        """
        for pause in self.pauses:
            try:
                return work()
            except OSError as error:
                if error.errno not in PASSING or self.stopped.wait(0 if is_gone(error) else pause):
                    raise
                log.warning("step %d: storage failed, trying again: %s", save_id.step, error)
        return work()

    def _save(
        self, files: RankFiles, contents: RankContents, announced: Callable[[bool], object]
    ) -> int:
        """Write a save in the order of the protocol: files are durable before their receipt."""
        rank, layout = self.rank, self.job.layout
        save_id, step = files.save_id, files.save_id.step
        again = partial(self.again, save_id)

        def write_weights() -> list[ReceiptFile]:
            files.add_saving()
            files.remove_full_mark()
            files.remove_receipts()
            files.remove_temporaries(files.actor, files.folder / CRITIC)
            written = files.write_weights(contents)
            if rank == 0:
                written += self._write_configs(files, contents)
            self._write_receipt(files, receipt_name, written)
            return written

        def write_rest() -> list[ReceiptFile]:
            if contents.completes:
                files.remove_full_receipt()
                files.remove_temporaries(files.actor)
            written = files.write_rest(contents)
            if rank == 0 and contents.completes and any(file.over == "index" for file in weights):
                written += self._write_configs(files, contents)
            kept = weights
            if contents.trained is not None:  # training must not resume from published weights
                published = {files.name(shard_name), files.name(delta_name), FULL_STATE_DICT}
                kept = [file for file in weights if file.name not in published]
            self._write_receipt(files, full_receipt_name, [*kept, *written])
            return written

        def announce_checkpoint() -> None:
            files.add_full_mark()
            point(self.job, layout.checkpoint_pointer, step)

        if contents.completes:  # the first half is done, but .saving is gone
            weights, size = again(files.begin_rest), 0
        else:
            with contents.needs_base:
                weights = again(write_weights)
            size = sum(file.size for file in weights)
            if rank == 0 and not again(lambda: self._wait_for_weights(files, contents)):
                return size
            files.weights_stay = True
            if rank == 0:
                again(lambda: point(self.job, layout.state_pointer, step))
                announced(False)

        if contents.is_full:
            rest = again(write_rest)
            size += sum(file.size for file in rest)
            if rank == 0:
                if not again(lambda: self._wait_for_all(files, full_receipt_name)):
                    return size
                files.rest_stays = True
                again(announce_checkpoint)
                announced(True)

        if rank == 0:
            self._remove_saving(files)
        return size

    def _write_configs(self, files: RankFiles, contents: RankContents) -> list[ReceiptFile]:
        """Write config, tokenizer and so on; but a link only if its base has others."""
        save_id, (of, before, listed) = str(files.save_id), self._small
        small = before if of == save_id else contents.model_files()
        has_base = of == contents.base and small == before and not contents.is_full
        files.of_base = tuple(listed) if has_base else ()
        written = [] if has_base else files.write_configs(contents, small)
        self._small = save_id, small, listed if has_base else written
        return written

    def _write_receipt(
        self,
        files: RankFiles,
        name_of: Callable[[int], str],
        written: list[ReceiptFile],
    ) -> None:
        """Write the receipt: these files are complete and durable.

        On ranks other than 0, an OSError means that no other rank has seen the receipt. A
        SaveFailedError means that other ranks can see it, although it may not be durable. Then rank
        0 may have announced the files, so they must not be deleted or rewritten.
        """
        save_id = files.save_id
        name = name_of(self.rank)
        try:
            files.vouch(name, written)
        except OSError as error:
            if self.rank == 0 or not files.is_vouched(name):
                raise
            log.warning("step %d: storage failed, trying again: %s", save_id.step, error)
            try:
                self.again(save_id, lambda: files.vouch(name, written))
            except OSError as again:
                log.warning("step %d: %s", save_id.step, again)
                if name_of is full_receipt_name:
                    files.rest_stays = True
                else:
                    files.weights_stay = True
                raise SaveFailedError(
                    f"rank {self.rank} has written its part of the save of step {save_id.step}, "
                    "but its receipt could not be made durable. See the storage error in the log"
                ) from None

    def _wait_for_weights(self, files: RankFiles, contents: RankContents) -> bool:
        are_there = self._wait_for_all(files, receipt_name)
        if are_there:
            contents.confirm()
        return are_there

    def _wait_for_all(self, files: RankFiles, name_of: Callable[[int], str]) -> bool:
        """Return False if a rank has written a newer save of this step."""
        save_id = files.save_id
        until = time.monotonic() + self.save_timeout
        for rank in range(self.world_size):
            while (found := files.written(name_of(rank))) != save_id:
                if found is not None and found.is_newer_than(save_id):
                    log.info(
                        "save %s is not announced, because the newer save %s overtook it",
                        save_id,
                        found,
                    )
                    return False
                missing = f"rank {rank} of {self.world_size} has not written its part of the save"
                if files.failed(rank) == save_id:
                    raise SaveFailedError(
                        f"{missing} of step {save_id.step}, because that rank failed"
                    )
                if time.monotonic() >= until:
                    raise SaveFailedError(
                        f"{missing} of step {save_id.step} within {self.save_timeout:g} s. See the "
                        f"log of rank {rank}. If it has no error, check that all ranks make the "
                        "same calls, with the same steps and the same job directory"
                    )
                if self.stopped.wait(_POLL):
                    raise SaveFailedError(f"{missing} of step {save_id.step} before training ended")
        return True

    def _remove_saving(self, files: RankFiles) -> None:
        saving = files.folder / SAVING
        try:
            self.again(files.save_id, lambda: files.storage.unlink_if_there(saving))
        except OSError as error:
            # The save is complete and announced: an error would make the caller write it again.
            log.warning("cannot remove %s, so the step is not pruned: %s", saving, error)

    def _after_failure(self, files: RankFiles) -> None:
        if self.rank == 0 and files.weights_stay and files.rest_stays:
            # All files are complete, and pointers may name them; only a later operation failed.
            files.unprotect()
        else:
            files.discard()
            self.say_failed(files.save_id)

    def _remove_given_up(self, files: RankFiles) -> None:
        """Delete this rank's previous save, if rank 0 gave that save up."""
        last, self._last = self._last, files
        save_id = files.save_id
        if last is None or last.save_id == save_id or self.rank == 0:
            return
        failed = last.save_id
        try:
            if last.failed(0) != failed:
                return
            # Without an announcement, rank 0 deletes its receipt before it records the failure.
            last.weights_stay = last.written(receipt_name(0)) == failed
        except OSError as error:
            log.warning(
                "cannot check whether the save of step %d has failed, so rank %d does not delete "
                "its files of that save: %s",
                failed.step,
                self.rank,
                error,
            )
            return
        last.discard()
        if failed.step != save_id.step:
            last.unprotect()

    def _files(self, save_id: SaveId) -> RankFiles:
        return RankFiles(self.job, self.rank, self.world_size, save_id)
