"""Meeting in the weight group: the steps from the agreement on a transfer to its first byte."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from syncd.coordination.broadcast.addresses import listen, own_address
from syncd.coordination.broadcast.offer import Agreed, Offers
from syncd.coordination.waiting import Wait
from syncd.protocol.errors import BroadcastError
from syncd.protocol.reports import GroupMember, Offer, Rendezvous

if TYPE_CHECKING:
    import torch

    from syncd.coordination.broadcast.group import KeptGroup, WeightGroup

log = logging.getLogger(__name__)


class MeetingPlace(NamedTuple):
    """The address and port at which the other ranks connect to rank 0.

    Attributes:
        address: a host name or an IP address; None for :func:`.addresses.own_address`.
        port: 0 for any free port.
    """

    address: str | None
    port: int = 0


@dataclass
class TrainerGroup:
    """The weight group of the trainer's rank 0; one group can serve several transfers.

    A group is used again while its members stay the same, all members have the group open, and no
    transfer in the group has failed. Each new group has a higher generation.

    Attributes:
        rendezvous: the rendezvous of the open group; None if no group is open.
    """

    offers: Offers
    run: str
    place: MeetingPlace
    rendezvous: Rendezvous | None = None
    _group: WeightGroup | None = None

    def open(
        self, agreed: Agreed, save_id: str, *, deadline: float, device: torch.device
    ) -> WeightGroup:
        """Open the group of an offer's members, and begin a transfer in the group.

        For ``deadline`` see :meth:`.WeightGroup.join`.

        Raises:
            BroadcastError: the group cannot be formed, or not all members connected. No group is
                open then.
        """
        group, known = self._group, self.rendezvous
        members = _with_ranks(agreed.offer)
        try:
            if (
                group is not None
                and known is not None
                and not group.has_failed
                and agreed.group == group.name
                and known.members == members
                and group.device == device
            ):
                changes = {"offer": agreed.offer.offer, "save_id": save_id}
                self.rendezvous = known.model_copy(update=changes)
                self.offers.put_rendezvous(self.rendezvous)
                group.begin()
                return group
            self.close()
            self._group = self._form(agreed.offer, members, save_id, deadline, device)
        except OSError as error:
            self.close()
            raise BroadcastError(
                f"cannot write the file with the address of the weight group: {error}"
            ) from error
        except BaseException:
            self.close()
            raise
        return self._group

    def _form(
        self,
        offer: Offer,
        members: tuple[GroupMember, ...],
        save_id: str,
        deadline: float,
        device: torch.device,
    ) -> WeightGroup:
        from syncd.coordination.broadcast.group import WeightGroup  # noqa: PLC0415 # it needs torch
        from syncd.coordination.broadcast.group_backends import backend_for  # noqa: PLC0415 # likewise

        before = self.offers.rendezvous()
        generation = 1 if before is None else before.generation + 1
        address = self.place.address or own_address()
        with listen(address, self.place.port) as listening:
            address, port = listening.getsockname()[:2]
            self.rendezvous = rendezvous = Rendezvous(
                offer=offer.offer,
                generation=generation,
                group_name=f"{self.run}-{generation}-{secrets.token_hex(6)}",
                address=address,
                port=port,
                world_size=1 + sum(member.workers for member in members),
                backend=backend_for(device),
                members=members,
                save_id=save_id,
            )
            self.offers.put_rendezvous(rendezvous)
            return WeightGroup.join(
                rendezvous, 0, deadline=deadline, device=device, listening=listening
            )

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        group, self._group, self.rendezvous = self._group, None, None
        if group is not None:
            group.close()


@dataclass
class ExplorerGroup:
    """An explorer's meeting with the trainer, and the weight group of a worker in this process."""

    offers: Offers
    name: str
    session: str
    _kept: KeptGroup | None = None

    def rendezvous(self, offer: Offer, wait: Wait) -> tuple[Rendezvous, int]:
        """Wait for an offer's meeting place; see :meth:`.ExplorerSynchronizer.rendezvous`."""
        while True:
            meeting = self.offers.rendezvous()
            if meeting is not None and meeting.offer == offer.offer:
                break
            now = self.offers.current()
            if now is not None and now.offer != offer.offer:
                raise BroadcastError(
                    "the trainer has cancelled this broadcast and offered a new one"
                )
            if not wait.more():
                raise BroadcastError(
                    "the trainer did not announce the address of the weight group in time"
                )
        for member in meeting.members:
            if (member.name, member.session) == (self.name, self.session):
                return meeting, member.rank_offset
        raise BroadcastError(f"the weight group {meeting.group_name} does not include {self.name}")

    def open(
        self, rendezvous: Rendezvous, rank: int, *, deadline: float, device: torch.device
    ) -> WeightGroup:
        """Open the group for a worker in this process; see :meth:`.KeptGroup.open`."""
        from syncd.coordination.broadcast.group import KeptGroup  # noqa: PLC0415 # it needs torch

        self._kept = self._kept or KeptGroup()
        return self._kept.open(rendezvous, rank, deadline=deadline, device=device)

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        if self._kept is not None:
            self._kept.close()


def _with_ranks(offer: Offer) -> tuple[GroupMember, ...]:
    found: list[GroupMember] = []
    rank = 1
    for member in offer.members:
        found.append(GroupMember(**member.model_dump(), rank_offset=rank))
        rank += member.workers
    return tuple(found)
