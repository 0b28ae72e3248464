"""What participants write besides their reports (:mod:`.records`). One writer a file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.layout import checked_name
from syncd.protocol.records import Record, Step


class Claim(Record):
    """``.syncd/claims/…``: which session has a name."""

    session: str


class _Owned(BaseModel):
    session: str


def session_of(content: bytes) -> str | None:
    """The session that a participant's report or claim names, of whatever protocol it is.

    That is what lets an older syncd tell whether a newer participant lives.

    Returns:
        None where it names none, or none that can be part of a file name.
    """
    try:
        return checked_name(_Owned.model_validate_json(content).session, "the session")
    except (ValidationError, InvalidSettingsError):
        return None


class Member(BaseModel):
    """An explorer that an offer is made to."""

    model_config = ConfigDict(frozen=True)

    name: str
    session: str


class Offer(Record):
    """``.syncd/broadcast/offer.json``: the trainer is ready to transfer the weights of a step.

    Attributes:
        offer: its own name, never used before.
        session: the trainer's.
        members: all who must join before it is decided.
        decided: how, for those who wait to read; the verdict itself is a file of its own.
    """

    offer: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    session: str
    step: Step
    members: tuple[Member, ...]
    decided: Literal["go", "off"] | None = None


class Verdict(Record):
    """``.syncd/broadcast/OFFER.verdict``: what became of an offer; the first one counts."""

    verdict: Literal["go", "off"]
    session: str


class SavedState(Record):
    """``.syncd/meta/…``: what a trainer or an explorer needs to resume.

    Attributes:
        iteration: the last one that is finished.
        state: the user's own.
    """

    iteration: Step
    state: dict[str, JsonValue] = Field(default_factory=dict)
