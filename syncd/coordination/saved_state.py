"""A participant's saved state, to resume from: the latest iteration and the user's data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from syncd.protocol.errors import InvalidSettingsError, RecordError
from syncd.protocol.records import encode, parse
from syncd.protocol.reports import SavedState
from syncd.storage.errnos import is_no_record
from syncd.storage.fsio import LONG_RECORD_LIMIT
from syncd.storage.job import Job, ReadPolicy

log = logging.getLogger(__name__)

_POLICY: Final = ReadPolicy(
    damaged=is_no_record, newer=False, say=lambda _, error: log.warning("%s", error)
)
#: Stands for a file that exists but holds no state.
_TORN: Final = SavedState(iteration=0)


@dataclass
class StateFile:
    """The file of one participant's saved state, and a second file with the previous state.

    An interrupted save leaves the previous state. If the first file is torn nevertheless,
    :meth:`load` reads the second.
    """

    job: Job
    path: Path

    def __post_init__(self) -> None:
        self._previous = self.path.with_name(f"{self.path.name}.previous")

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save a state durably; raise InvalidSettingsError if it could not be loaded again."""
        try:
            content = _readable(iteration, state)
        except (TypeError, ValueError, RecursionError, RecordError) as error:
            raise InvalidSettingsError(
                f"the state to be saved in {self.path} is not plain JSON, or cannot be read back: "
                f"{error}"
            ) from None
        self.job.storage.make_folder(self.path.parent, below=self.job.layout.state)
        whole = self._read(self.path)
        if whole is not None and whole is not _TORN:
            self._replace(self._previous, encode(whole))
        self._replace(self.path, content)

    def load(self) -> SavedState | None:
        """The newest saved state; see :meth:`.Member.load_state`."""
        found = self._read(self.path)
        if found is not None and found is not _TORN:
            return found
        previous = self._read(self._previous)
        if previous is not None and previous is not _TORN:
            log.warning(
                "%s is damaged or missing: loading the previous state, from %s",
                self.path,
                self._previous,
            )
            return previous
        if found is previous is None:
            return None
        raise RecordError(
            f"no saved state can be read: {self.path} and {self._previous} are damaged or "
            "missing. Remove both files to begin without a saved state"
        )

    def _replace(self, path: Path, content: bytes) -> None:
        # Written in drafts/, because the daemon deletes a killed process's leftovers there.
        self.job.storage.replace(path, content, room=self.job.layout.drafts)

    def _read(self, path: Path) -> SavedState | None:
        return self.job.read(SavedState, path, _POLICY, limit=LONG_RECORD_LIMIT, unreadable=_TORN)


def _readable(iteration: int, state: Mapping[str, Any]) -> bytes:
    # Refuse NaN and Inf here, because pydantic would write them as null.
    json.dumps(state, allow_nan=False)
    content = encode(SavedState(iteration=iteration, state=dict(state)))
    if len(content) > LONG_RECORD_LIMIT:
        raise ValueError(f"it is longer than {LONG_RECORD_LIMIT} bytes")
    parse(SavedState, content, "it")  # the parser accepts fewer nested levels than the encoder
    return content
