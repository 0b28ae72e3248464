"""One rank's files of a save, and rank 0's announcements.

The order is the protocol's (``docs/protocol.md``, "When a save is complete"): ``.saving``, the old
receipt away, the weights under a temporary name, fsync, rename, receipt; on rank 0 the receipts of
all ranks, and the state pointer. Then, of a full checkpoint: optimizer, extra state, critic and
Hugging Face weights, the full receipt; on rank 0 the full receipts of all ranks,
``.full_checkpoint`` and the checkpoint pointer. Last, ``.saving`` away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from syncd.protocol.errors import SaveFailedError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import SAVING, full_receipt_name, receipt_name
from syncd.protocol.records import ReceiptFile, SaveId
from syncd.storage.errnos import PASSING, is_gone
from syncd.storage.fsio import Storage
from syncd.storage.steps import make_step_folder
from trainer_hooks.settings import WriteConcurrency
from trainer_hooks.writing.announce import Announcer
from trainer_hooks.writing.contents import Contents
from trainer_hooks.writing.notes import Notes
from trainer_hooks.writing.pace import Pace
from trainer_hooks.writing.rank_files import RankFiles
from trainer_hooks.writing.remains import Attempt, Remains
from trainer_hooks.writing.spool import Spool

__all__ = ["Contents", "RankWriter"]

log = logging.getLogger(__name__)

T = TypeVar("T")


def _nothing(_: SaveId) -> None:
    """Nobody is told."""


class RankWriter:
    """Writes the saves of one rank, one after the other.

    Promised: a pointer names a step only when every rank's files of one save are whole and durable;
    a save that is cut off at any point is never announced; of one that fails nothing of this rank's
    stays that was not announced, except where the process is killed. Not promised: that a save
    which was overtaken by a newer one of the same step is announced; nor, on other ranks than 0,
    that what they wrote is removed before they begin the next save: until then they do not know.

    Args:
        storage: the shared storage.
        layout: the job.
        rank: this rank.
        world_size: how many there are.
        save_timeout: seconds that rank 0 waits for the other ranks' receipts.
        concurrency: how many ranks write at a time.
        weights_announced: on rank 0, called once the state pointer has moved.
        checkpoint_announced: on rank 0, once the checkpoint pointer has.
        pauses: seconds before each further attempt at what storage refused for the moment.
        stopped: set by :meth:`stop_waiting`; for tests.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        rank: int,
        world_size: int,
        *,
        save_timeout: float,
        concurrency: WriteConcurrency = WriteConcurrency.UNRESTRICTED,
        weights_announced: Callable[[SaveId], None] = _nothing,
        checkpoint_announced: Callable[[SaveId], None] = _nothing,
        pauses: tuple[float, ...] = (0.2, 2.0),
        stopped: threading.Event | None = None,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._rank = rank
        self._pauses = pauses
        self._stopped = stopped or threading.Event()
        self._weights_announced = weights_announced
        self._checkpoint_announced = checkpoint_announced
        self._pace = Pace(
            concurrency, storage, layout, rank, world_size,
            timeout=save_timeout, stopped=self._stopped,
        )  # fmt: skip
        self._announcer = Announcer(
            storage,
            layout,
            world_size,
            timeout=save_timeout,
            in_turns=self._pace.in_turns,
            stopped=self._stopped,
        )
        self._remains = Remains(storage, layout, rank, world_size)
        self._files = RankFiles(
            storage, layout, rank, world_size, pace=self._pace, remains=self._remains
        )
        self._last: Attempt | None = None

    def save(self, save_id: SaveId, contents: Contents) -> int:
        """Write this rank's files; on rank 0 also wait for the others and move the pointers.

        Returns:
            The bytes that this rank has written.

        Raises:
            SaveFailedError: the save did not become whole. A pointer that was moved names what is.
        """
        attempt = Attempt(
            save_id,
            weights_stay=contents.completes,
            rest_stays=not contents.is_full,
            rest_has_shard=contents.trained is not None,
        )
        try:
            self._remove_given_up(attempt)
            return self._save(attempt, contents)
        except OSError as error:
            self._after_failure(attempt)
            raise SaveFailedError(
                f"rank {self._rank} could not write the save of step {save_id.step}: {error}; "
                "what of it was not announced is never served, and the version before it stays"
            ) from error
        except BaseException:
            self._after_failure(attempt)  # a tokenizer that cannot be saved, say
            raise

    def add_hugging_face(self, save_id: SaveId, weights: Spool) -> None:
        """Put the full weights beside the config of a full checkpoint that is whole; on rank 0.

        Raises:
            SaveFailedError: they could not be written; the checkpoint is as whole as before.
        """
        try:
            self.again(save_id, lambda: self._files.add_hugging_face(save_id, weights))
        except BaseException as error:
            self._remains.unprotect(save_id.step)
            if not isinstance(error, OSError):
                raise
            raise SaveFailedError(
                f"the weights of step {save_id.step} could not be written as a Hugging Face model: "
                f"{error}; its full checkpoint is whole all the same"
            ) from error

    def say_failed(self, save_id: SaveId) -> None:
        """Let nobody wait for this rank's part of a save that it could not even begin."""
        try:
            # No rank may have begun to write it yet.
            make_step_folder(self._storage, self._layout, save_id.step)
        except OSError as error:
            log.warning("the folder of step %d cannot be made: %s", save_id.step, error)
        self._give_up(Attempt(save_id, weights_stay=True, rest_stays=True))

    def are_weights_there(self, save_id: SaveId) -> bool:
        """Whether all ranks' weights of a save that was announced are there, by their names.

        Raises:
            OSError: storage failed.
        """
        return self._files.are_weights_there(save_id)

    def stop_waiting(self) -> None:
        """Give up the saves that other ranks have not finished."""
        self._stopped.set()

    def again(self, save_id: SaveId, work: Callable[[], T]) -> T:
        """Do something that storage may refuse for a moment, from its start, a few times.

        A folder that the pruner took away under us is made again. What an fsync has refused is
        written again, under a new name: a second fsync of the same file would say that all is well.
        """
        for pause in self._pauses:
            try:
                return work()
            except OSError as error:
                if error.errno not in PASSING or self._stopped.wait(0 if is_gone(error) else pause):
                    raise
                log.warning("step %d: trying again: %s", save_id.step, error)
        return work()

    # -- the order of a save ---------------------------------------------------------------------

    def _save(self, attempt: Attempt, contents: Contents) -> int:
        save_id = attempt.save_id
        if contents.completes:
            files = self.again(save_id, lambda: self._files.begin_rest(save_id))
            written = 0
        else:
            files = self.again(save_id, lambda: self._write_weights(attempt, contents))
            written = sum(file.size for file in files)
            if self._rank > 0:
                attempt.weights_stay = True
            elif not self._announce_weights(attempt):
                return written
        if contents.is_full:
            rest = self.again(save_id, lambda: self._write_rest(attempt, contents, files))
            written += sum(file.size for file in rest)
        if self._rank == 0:
            if contents.is_full and not self._announce_checkpoint(attempt):
                return written
            saving = self._layout.step(save_id.step) / SAVING
            try:
                self.again(save_id, lambda: self._storage.unlink_if_there(saving))
            except OSError as error:
                # All is whole and pointed to: who took that for a failure would write it again.
                log.warning("%s stays, and keeps the pruner away: %s", saving, error)
        return written

    def _write_weights(self, attempt: Attempt, contents: Contents) -> list[ReceiptFile]:
        files = self._files.write_weights(attempt.save_id, contents)
        if not self._vouch(attempt, receipt_name(self._rank), files):
            attempt.weights_stay = True
            raise self._not_durable(attempt)
        return files

    def _write_rest(
        self, attempt: Attempt, contents: Contents, files: list[ReceiptFile]
    ) -> list[ReceiptFile]:
        rest = self._files.write_rest(attempt.save_id, contents)
        if not self._vouch(attempt, full_receipt_name(self._rank), [*files, *rest]):
            attempt.rest_stays = True
            raise self._not_durable(attempt)
        return rest

    def _vouch(self, attempt: Attempt, name: str, files: list[ReceiptFile]) -> bool:
        """Write a receipt.

        Returns:
            False where storage refused to make it durable once others could see it: rank 0 may have
            announced what it vouches for, of which nothing may be taken back, or written again.

        Raises:
            OSError: storage refused; nobody has seen it.
        """
        save_id = attempt.save_id
        try:
            self._files.vouch(save_id, name, files)
        except OSError as error:
            if self._rank == 0 or not self._files.is_vouched(save_id, name):
                raise
            log.warning("step %d: trying again: %s", save_id.step, error)
            try:
                self.again(save_id, lambda: self._files.vouch(save_id, name, files))
            except OSError as again:
                log.warning("step %d: %s", save_id.step, again)
                return False
        return True

    def _not_durable(self, attempt: Attempt) -> SaveFailedError:
        return SaveFailedError(
            f"rank {self._rank} has written its part of the save of step {attempt.save_id.step}, "
            "and storage does not make its receipt durable: see the log"
        )

    def _announce_weights(self, attempt: Attempt) -> bool:
        save_id = attempt.save_id
        if not self.again(save_id, lambda: self._announcer.wait_for_weights(save_id)):
            return False
        attempt.weights_stay = True
        self.again(save_id, lambda: self._announcer.announce_weights(save_id))
        self._weights_announced(save_id)
        return True

    def _announce_checkpoint(self, attempt: Attempt) -> bool:
        save_id = attempt.save_id
        if not self.again(save_id, lambda: self._announcer.wait_for_rest(save_id)):
            return False
        attempt.rest_stays = True
        self.again(save_id, lambda: self._announcer.announce_checkpoint(save_id))
        self._checkpoint_announced(save_id)
        return True

    # -- what fails ------------------------------------------------------------------------------

    def _after_failure(self, attempt: Attempt) -> None:
        if self._rank == 0 and attempt.weights_stay and attempt.rest_stays:
            # All that can be whole is, and may be pointed to; only what comes after was refused.
            self._remains.unprotect(attempt.save_id.step)
        else:
            self._give_up(attempt)

    def _give_up(self, attempt: Attempt) -> None:
        """Remove what this rank wrote and is not announced, and let nobody wait for it."""
        step = attempt.save_id.step
        self._remains.discard(attempt)
        notes = Notes(self._storage, self._layout.actor(step))
        notes.say_failed(self._rank, attempt.save_id)
        if self._rank == 0:
            self._remains.unprotect(step)

    def _remove_given_up(self, attempt: Attempt) -> None:
        """Remove this rank's part of its last save, where rank 0 has given that up."""
        last, self._last = self._last, attempt
        if last is None or last.save_id == attempt.save_id or self._rank == 0:
            return
        notes = Notes(self._storage, self._layout.actor(last.save_id.step))
        try:
            if notes.failed(0) != last.save_id:
                return
            # Rank 0's receipt goes before it says so, where the weights were not announced.
            last.weights_stay = notes.written(receipt_name(0)) == last.save_id
        except OSError as error:
            log.warning("what became of the save of step %d: %s", last.save_id.step, error)
            return
        self._remains.discard(last)
        if last.save_id.step != attempt.save_id.step:
            self._remains.unprotect(last.save_id.step)
