"""The claims of participants' names: who has a name, in any protocol version."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ValidationError

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import checked_name
from syncd.protocol.records import Record, Seconds, Text


class Claim(Record):
    """The session that holds a participant's name, or a turn to load, and its process.

    ``name`` is for people. ``patience`` is that of others with a turn: seconds above a lease time.
    """

    session: str
    name: Text
    process: Text
    patience: Seconds = 0.0


class _Owned(BaseModel):
    session: str


def session_of(content: bytes) -> str | None:
    """The session in a report or claim; None if it names no session that can be a file name.

    Any protocol version is accepted, so that an older syncd can tell if a newer participant lives.
    """
    try:
        return checked_name(_Owned.model_validate_json(content).session, "the session")
    except (ValidationError, InvalidSettingsError):
        return None


class Holder(BaseModel):
    """What a claim of any protocol version says about its holder, if anything."""

    name: str | None = None
    process: str = ""
    patience: float = 0.0

    @classmethod
    def of(cls, content: bytes) -> Self:
        """The holder in a participant's claim."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return cls()
