"""The records that participants write besides their :mod:`.reports`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import checked_name
from syncd.protocol.records import Part, Record, Step, Text


class Claim(Record):
    """The session that holds a participant's name, and its process. ``name`` is for people."""

    session: str
    name: Text | None = None
    process: Text = ""


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
    """What a claim of any protocol version says about the holder of a name, if anything."""

    name: str | None = None
    process: str = ""

    @classmethod
    def of(cls, content: bytes) -> Self:
        """The holder in a participant's claim."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return cls()


class OfferedMember(Part):
    """An explorer that receives an offer; ``workers`` is the number of its ranks."""

    name: str
    session: str
    workers: Annotated[int, Field(ge=1)] = 1


OfferId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]


class Offer(Record):
    """``.syncd/broadcast/offer.json``: the trainer is ready to transfer the weights of a step.

    Attributes:
        members: all explorers that must join before the transfer.
        decided: a copy of the verdict, for waiting explorers; None while the offer is open.
            ``files``: the offer was never open, because the weights travel by the checkpoint path.
    """

    offer: OfferId
    session: str
    step: Step
    members: tuple[OfferedMember, ...]
    decided: Literal["go", "off", "files"] | None = None


class OfferVerdict(Record):
    """``.syncd/broadcast/OFFER.verdict``: the outcome of an offer; the first verdict counts."""

    verdict: Literal["go", "off"]
    session: str


class GroupMember(OfferedMember):
    """An explorer in a weight group: its workers have consecutive ranks from ``rank_offset`` on."""

    rank_offset: Annotated[int, Field(ge=1)]


class Rendezvous(Record):
    """``.syncd/broadcast/group.json``: the address at which the members of a decided offer meet.

    Rank 0 of the group is the trainer's rank 0. The workers of the explorers have the next ranks,
    in the order of the offer. Each new group has a higher ``generation``. ``save_id`` names the
    transferred weights.
    """

    offer: OfferId
    generation: Annotated[int, Field(ge=1, lt=2**63)]
    group_name: Annotated[str, Field(min_length=1, max_length=200)]
    address: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=1)]
    backend: Literal["nccl", "gloo"]
    members: tuple[GroupMember, ...]
    save_id: Annotated[str, Field(min_length=1, max_length=200)]

    @model_validator(mode="after")
    def _ranks_are_contiguous(self) -> Self:
        rank = 1
        for member in self.members:
            if member.rank_offset != rank:
                raise ValueError(
                    f"the first rank of {member.name} is {member.rank_offset}, but should be {rank}"
                )
            rank += member.workers
        if rank != self.world_size:
            raise ValueError(f"the group has {rank} ranks, but world_size is {self.world_size}")
        return self


class SavedState(Record):
    """``.syncd/meta/…``: the last finished iteration and the user's own state, for resuming."""

    iteration: Step
    state: dict[str, JsonValue] = Field(default_factory=dict)
