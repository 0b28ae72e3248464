"""The outcomes of saves."""

from __future__ import annotations

import threading

from syncd.protocol.records import SaveId


class Progress:
    """The outcomes of saves; the writing thread records them, the training thread reads them.

    Only rank 0 knows which saves are announced. Each rank knows only its own failures.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._announced: SaveId | None = None
        self._checkpoint: SaveId | None = None
        self._failed: set[SaveId] = set()
        self._without_hugging_face: set[SaveId] = set()

    def announced(self, save_id: SaveId) -> None:
        """Note that explorers can get a save's weights."""
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
        """Note that a full checkpoint will get the full weights."""
        with self._lock:
            self._without_hugging_face.discard(save_id)

    def hugging_face_failed(self, save_id: SaveId) -> None:
        """Note that adding the full weights failed."""
        with self._lock:
            self._without_hugging_face.add(save_id)

    def lacks_hugging_face(self, save_id: SaveId) -> bool:
        """True if the full weights could not be added."""
        with self._lock:
            return save_id in self._without_hugging_face

    def has_failed(self, save_id: SaveId) -> bool:
        """True if a save failed."""
        with self._lock:
            return save_id in self._failed

    def is_announced(self, save_id: SaveId) -> bool:
        """True if this save was announced last."""
        with self._lock:
            return self._announced == save_id

    def is_checkpoint(self, save_id: SaveId) -> bool:
        """True if this save is the newest announced full checkpoint."""
        with self._lock:
            return self._checkpoint == save_id

    @property
    def announced_step(self) -> int | None:
        """The step of the most recently announced save."""
        with self._lock:
            return None if self._announced is None else self._announced.step
