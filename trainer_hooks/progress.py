"""The outcome of the saves that were begun."""

from __future__ import annotations

import threading

from syncd.protocol.records import SaveId


class Progress:
    """The outcomes of saves: the writing thread records them, the training thread reads them.

    Only rank 0 knows which saves are announced. Each rank knows its own failures.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._announced: SaveId | None = None
        self._checkpoint: SaveId | None = None
        self._failed: set[SaveId] = set()
        self._without_hugging_face: set[SaveId] = set()

    def announced(self, save_id: SaveId) -> None:
        """Note that a save's weights are announced to explorers."""
        with self._lock:
            self._announced = save_id

    def checkpointed(self, save_id: SaveId) -> None:
        """Note that a save was announced as a full checkpoint."""
        with self._lock:
            self._checkpoint = save_id

    def failed(self, save_id: SaveId) -> None:
        """Note that a save failed."""
        with self._lock:
            self._failed.add(save_id)

    def adds_hugging_face(self, save_id: SaveId) -> None:
        """Note that the full weights are about to be added to a complete full checkpoint."""
        with self._lock:
            self._without_hugging_face.discard(save_id)

    def hugging_face_failed(self, save_id: SaveId) -> None:
        """Note that the full weights could not be added to a full checkpoint."""
        with self._lock:
            self._without_hugging_face.add(save_id)

    def lacks_hugging_face(self, save_id: SaveId) -> bool:
        """Whether a full checkpoint lacks the full weights because they could not be added."""
        with self._lock:
            return save_id in self._without_hugging_face

    def has_failed(self, save_id: SaveId) -> bool:
        """Whether a save failed."""
        with self._lock:
            return save_id in self._failed

    def is_announced(self, save_id: SaveId) -> bool:
        """Whether this save is the most recently announced save."""
        with self._lock:
            return self._announced == save_id

    def is_checkpoint(self, save_id: SaveId) -> bool:
        """Whether this save is the most recently announced full checkpoint."""
        with self._lock:
            return self._checkpoint == save_id

    @property
    def announced_step(self) -> int | None:
        """The step of the most recently announced save; None if no save was announced."""
        with self._lock:
            return None if self._announced is None else self._announced.step
