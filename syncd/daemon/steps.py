"""Looking into step folders: what each holds, and which saves the pointer has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.checkpoint.save import Save
from syncd.checkpoint.step_save import look_into_step
from syncd.daemon.observation import Pointer, StepSeen
from syncd.daemon.steering import QuietPaths
from syncd.protocol.names import (
    ACTOR,
    CRITIC,
    FULL,
    FULL_STATE_DICT,
    HUGGINGFACE,
    LORA_ADAPTER,
    PINNED,
    RECEIPTS,
    REMOTE_PATH,
    RETIRED,
    SAVING,
    TEMPORARY,
    is_dcp_file,
    is_resumable_state,
)
from syncd.protocol.records import SaveOutcome
from syncd.storage.errnos import UNREADABLE
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, step_folders
from syncd.storage.judge import Clock

#: How many step folders one look reads; the rest wait for the next look.
_AT_A_TIME: Final = 64
#: Seconds after which an unchanged folder is read again.
LOOK_AGAIN: Final = 60.0


@dataclass
class Steps:
    """Looks into step folders in turn."""

    job: Job
    clock: Clock

    def __post_init__(self) -> None:
        self._key: object = None
        self._at = 0.0
        self._due: deque[int] = deque()
        self._again = False
        self._pointed: int | None = None
        self._passed: frozenset[int] = frozenset()
        #: Step and save → the pointer when this later save was first seen below it.
        self._saved_again: dict[tuple[int, str | None], int] = {}
        self._quiet_paths = QuietPaths(clock=self.clock)

    @property
    def has_more(self) -> bool:
        """True if step folders remain for the next look."""
        return bool(self._due) or self._again

    def look_again(self) -> None:
        """Make all step folders due again."""
        self._key = None

    def look(
        self, pointer: Pointer, key: object, outcomes: Mapping[int, SaveOutcome]
    ) -> tuple[tuple[StepSeen, ...], tuple[Save, ...], tuple[int, ...]]:
        """Look into some of the step folders that are due; a changed ``key`` makes all folders due.

        Returns the folders with a recorded outcome, the skipped saves that are not recorded yet,
        and the steps with a recorded outcome but without a folder.
        """
        self._refill(pointer, key, outcomes)
        seen: list[StepSeen] = []
        unrecorded: list[Save] = []
        vanished: list[int] = []
        for _ in range(min(_AT_A_TIME, len(self._due))):
            step = self._due.popleft()
            outcome = outcomes.get(step)
            folder = self.job.layout.step(step)
            with self._quiet_paths.ignoring(folder, UNREADABLE):
                if outcome is not None:
                    look = look_at_step(self.job.storage, folder, step, outcome)
                    if look is None:
                        vanished.append(step)
                        continue
                    seen.append(look)
                    if look.found in {None, outcome.identity}:
                        continue
                    # else the step was saved again, and the pointer may have passed that save too
                if pointer.step is not None and step < pointer.step:
                    save = self._skipped_save(folder, step)
                    # Without receipts, a trainer may be writing there in place at this moment,
                    # unless the pointer has moved up since the save looked the same.
                    if save is not None and (
                        outcome is None
                        or save.receipts
                        or self._saved_again.setdefault((step, save.identity), pointer.step)
                        < pointer.step
                    ):
                        unrecorded.append(save)
        return tuple(seen), tuple(unrecorded), tuple(vanished)

    def _refill(self, pointer: Pointer, key: object, outcomes: Mapping[int, SaveOutcome]) -> None:
        """Make step folders due if ``key`` has changed, and about once a minute.

        The newest folders come first. Then an unfinished cycle continues, so that old folders get
        their turn even if the pointers move often.
        """
        now = self.clock()
        moved = key != self._key
        is_time = not self._due and now - self._at >= LOOK_AGAIN
        if not (moved or is_time or (self._again and not self._due)):
            return
        steps = set(step_folders(self.job))
        self._note_passed(pointer, steps, is_time=is_time)
        ordered = sorted(steps | outcomes.keys(), reverse=True)
        if self._due:
            newest = ordered[: _AT_A_TIME // 2]
            self._due = deque(dict.fromkeys([*newest, *self._due]))
        else:
            self._due = deque(ordered)
        # This cycle may have read some folders before the move, so one more cycle must follow.
        self._again = len(self._due) != len(ordered)
        self._key, self._at = key, now

    def _note_passed(self, pointer: Pointer, steps: set[int], *, is_time: bool) -> None:
        """Remember the folders that existed when the daemon saw the pointer move up.

        If a trainer without syncd's hook resumes at a lower step, it writes saves below the pointer
        before it moves the pointer back. Such saves must not count as skipped.
        """
        if pointer.step is None:
            return  # the pointer is being written; keep its last step
        before, self._pointed = self._pointed, pointer.step
        if before is not None and before < pointer.step:
            self._passed = frozenset(steps)
        elif before != pointer.step or is_time:
            self._passed = frozenset()

    def _skipped_save(self, folder: Path, step: int) -> Save | None:
        """The save of a step below the pointer, if the save counts as skipped."""
        if any(self.job.storage.exists(folder / mark) for mark in (FULL, SAVING)):
            return None
        save = look_into_step(self.job.storage, folder, step)
        passed = bool(save.receipts) or step in self._passed
        return save if save.identity is not None and passed else None


def look_at_step(
    storage: Storage, folder: Path, step: int, outcome: SaveOutcome
) -> StepSeen | None:
    """The content and the recorded outcome of a step folder; None if there is no folder."""
    # Without the folder that a killed 'syncd convert' leaves.
    names = {name for name in storage.names(folder) if not name.startswith(TEMPORARY)}
    if not names and not storage.exists(folder):
        return None
    actor_names = storage.names(folder / ACTOR)
    retired, full = RETIRED in names, FULL in names
    is_dcp = any(map(is_dcp_file, actor_names))
    beside = any(is_resumable_state(name) and not is_dcp_file(name) for name in actor_names) or (
        # Trainers that save so may need other files to resume.
        (is_dcp or REMOTE_PATH in names)
        and not names <= {REMOTE_PATH, RETIRED, PINNED, ACTOR, CRITIC, FULL, SAVING}
    )
    if is_dcp:  # resuming may need other names, such as an optimizer's folder
        told = {HUGGINGFACE, LORA_ADAPTER, FULL_STATE_DICT, RECEIPTS}
        beside = beside or any(not is_dcp_file(name) and name not in told for name in actor_names)
    # Only a pickle shows whether a DCP save holds only a model. If unread, it counts as resumable.
    unread = is_dcp and not beside and outcome.model_only is None
    resumable = beside or (is_dcp and not outcome.model_only)
    # A failed save leaves an empty critic folder.
    critic = CRITIC in names and bool(storage.names(folder / CRITIC))
    kept = full or SAVING in names or PINNED in names
    protected = kept or (((resumable and not unread) or critic) and not retired)
    # A protected folder is never pruned, so its files need no look.
    save = None if protected else look_into_step(storage, folder, step, actor_names)
    # A model for people can be the only copy, with an optimizer anywhere beside it.
    resumable = resumable or (save is not None and save.is_for_people)
    return StepSeen(
        step=step,
        outcome=outcome,
        found=None if save is None else save.identity,
        has_receipts=RECEIPTS in actor_names,
        full=full,
        retired=retired,
        saving=SAVING in names,
        resumable=resumable,
        critic=critic,
        pinned=PINNED in names,
        unread=unread,
    )
