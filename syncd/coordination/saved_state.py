"""What a trainer or an explorer needs to resume: its latest iteration, and what the user adds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pydantic

from syncd.protocol.errors import InvalidSettingsError, ProtocolMismatchError, RecordError
from syncd.protocol.layout import JobLayout
from syncd.protocol.participants import SavedState
from syncd.protocol.records import encode, parse
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage

log = logging.getLogger(__name__)

_PREVIOUS: Final = ".previous"


class StateFile:
    """One participant's saved state, and the one before it.

    Promised: a save that was cut off at any point leaves the state before it; a file that is torn
    all the same falls back to the previous one.

    Args:
        storage: the shared storage.
        layout: the job.
        path: where it is.
    """

    def __init__(self, storage: Storage, layout: JobLayout, path: Path) -> None:
        self._storage = storage
        self._layout = layout
        self._path = path
        self._previous = path.with_name(f"{path.name}{_PREVIOUS}")

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save a state, durably.

        Raises:
            InvalidSettingsError: the state is not JSON.
        """
        try:
            # Strictly: pydantic would write what is not a number as nothing.
            json.dumps(state, allow_nan=False)
            record = SavedState(iteration=iteration, state=dict(state))
        except (TypeError, ValueError, pydantic.ValidationError) as error:
            raise InvalidSettingsError(
                f"the state to be saved in {self._path} is not plain JSON: {error}"
            ) from None
        self._storage.make_folder(self._path.parent, below=self._layout.state)
        whole = self._read(self._path)
        if whole is not None:
            self._replace(self._previous, whole)
        self._replace(self._path, record)

    def load(self) -> SavedState | None:
        """What was saved last; None before the first.

        Raises:
            RecordError: neither the state nor the previous one can be read.
            ProtocolMismatchError: it is of a newer protocol.
        """
        found = self._read(self._path)
        if found is not None:
            return found
        previous = self._read(self._previous)
        if previous is None and any(map(self._storage.exists, (self._path, self._previous))):
            raise RecordError(
                f"{self._path} is torn, and so is the one before it: remove both to begin anew"
            )
        if previous is not None:
            log.warning("%s is torn or gone: resuming from the one before it", self._path)
        return previous

    def _replace(self, path: Path, record: SavedState) -> None:
        # Out of the drafts: what a killed process leaves there is collected.
        self._storage.replace(path, encode(record), room=self._layout.drafts)

    def _read(self, path: Path) -> SavedState | None:
        try:
            return parse(SavedState, self._storage.read(path, LONG_RECORD_LIMIT), path)
        except ProtocolMismatchError:
            raise
        except RecordError as error:
            log.warning("%s", error)
            return None
        except OSError as error:
            if is_gone(error) or is_no_record(error):
                return None
            raise
