"""Agreeing on a transfer of weights (``nccl``): all live explorers take part, or no explorer does.

The trainer makes an offer that names every live explorer. Each explorer joins by naming the offer
in its own report. When all explorers have joined, the trainer decides that the transfer takes
place. An explorer that gives up decides the contrary. The decision is a file that only one
participant can create, so all participants see the same decision.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from syncd.coordination.participant import Participant, back_to_running, require_sync
from syncd.coordination.roster import Roster
from syncd.coordination.waiting import Wait
from syncd.protocol.errors import BroadcastError
from syncd.protocol.names import TEMPORARY
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import encode, parse
from syncd.protocol.reports import (
    ExplorerReport,
    Offer,
    OfferedMember,
    OfferVerdict,
    Rendezvous,
    TrainerReport,
)
from syncd.storage.errnos import GONE, Ignoring
from syncd.storage.job import Job

log = logging.getLogger(__name__)

T = TypeVar("T")
Decision = Literal["go", "off"]
_VERDICT = ".verdict"


class Takers(NamedTuple):
    """The number of all running explorers, and of those that take part in broadcasts."""

    working: int
    by_broadcast: int


class Agreed(NamedTuple):
    """An offer whose transfer takes place.

    Attributes:
        group: the name of the weight group that all members have open; None without such a group.
    """

    offer: Offer
    group: str | None


@dataclass
class Offers:
    """The offers of a job, their outcomes, and the meeting places of their members."""

    job: Job

    def current(self) -> Offer | None:
        """The newest offer; None if there is none, or it is unreadable."""
        return self.job.read(Offer, self.job.layout.offer)

    def make(
        self,
        session: str,
        step: int,
        members: tuple[OfferedMember, ...],
        decided: Literal["files"] | None = None,
    ) -> Offer:
        """Make an offer, and delete the verdicts on earlier offers."""
        folder = self.job.layout.offer.parent
        self.job.storage.make_folder(folder, below=self.job.layout.state)
        for name in self.job.storage.names(folder):
            if name.endswith(_VERDICT):
                self.job.storage.unlink_if_there(folder / name)
        offer = Offer(
            offer=secrets.token_hex(6),
            session=session,
            step=step,
            members=members,
            decided=decided,
        )
        self.put(offer)
        return offer

    def put(self, offer: Offer) -> None:
        """Write the offer; only the trainer does this."""
        self.job.storage.replace(self.job.layout.offer, encode(offer), room=self.job.layout.drafts)

    def rendezvous(self) -> Rendezvous | None:
        """The newest meeting place, in ``group.json``; None if that is missing or unreadable."""
        return self.job.read(Rendezvous, self.job.layout.rendezvous)

    def put_rendezvous(self, rendezvous: Rendezvous) -> None:
        """Write a meeting place; only the trainer does this."""
        layout = self.job.layout
        self.job.storage.replace(layout.rendezvous, encode(rendezvous), room=layout.drafts)

    def decide(self, offer: str, wish: Decision, session: str) -> Decision:
        """Decide an offer; return the first decision, which counts."""
        path = self.job.layout.verdict(offer)
        draft = self.job.layout.drafts / f"{TEMPORARY}verdict-{secrets.token_hex(6)}"
        content = encode(OfferVerdict(verdict=wish, session=session))
        if self.job.storage.write_first(path, content, draft):
            return wish
        with Ignoring(GONE):
            return parse(OfferVerdict, self.job.storage.read(path), path).verdict
        return "off"  # the trainer has made another offer since


class _Side(Generic[T]):
    agreed: T | None = None

    def take_agreed(self) -> T:
        """Return ``agreed``, once.

        Raises:
            BroadcastError: no transfer was agreed.
        """
        agreed, self.agreed = self.agreed, None
        if agreed is None:
            raise BroadcastError(
                "no transfer was agreed, so no weight group is formed. Call ready_to_nccl_sync "
                "first, and continue only if it returns a step"
            )
        return agreed


@dataclass
class TrainerSide(_Side[Agreed]):
    """Makes an offer and decides it.

    Attributes:
        agreed: the latest offer's transfer, if it takes place; else None.
    """

    offers: Offers
    roster: Roster
    me: Participant[TrainerReport]
    _open: Offer | None = None

    def takers(self) -> Takers:
        """Count the running explorers."""
        working = self._working()
        return Takers(len(working), sum(one.workers > 0 for one in working))

    def by_files(self, step: int) -> None:
        """Tell waiting explorers to get the weights of a step from the published files."""
        self.offers.make(self.me.session.id, step, (), decided="files")

    def agree(self, step: int, wait: Wait) -> int | None:
        """Offer a transfer, and wait until all live explorers have joined the offer.

        Explorers that take no part in broadcasts do not count. The result is the step; None if not
        all explorers that take part join in time, or if no explorer takes part.
        """
        self.agreed = None
        require_sync(self.me)
        try:
            while True:
                working = [explorer for explorer in self._working() if explorer.workers > 0]
                if not working:
                    log.warning("no explorer is running: skipping the transfer at step %d", step)
                    return None
                if self._try(step, working):
                    return step
                if not wait.more():
                    late = [explorer.name for explorer in working if not self._has_joined(explorer)]
                    names = ", ".join(late) or "unknown"
                    log.error(
                        "skipping the transfer, because these explorers were not ready for it "
                        "in time: %s",
                        names,
                    )
                    return None
        finally:
            try:
                self._withdraw()
            finally:
                back_to_running(self.me)

    def _working(self) -> list[ExplorerReport]:
        self.roster.refresh()
        return self.roster.working()

    def _try(self, step: int, working: list[ExplorerReport]) -> bool:
        members = tuple(
            OfferedMember(name=explorer.name, session=explorer.session, workers=explorer.workers)
            for explorer in sorted(working, key=lambda explorer: explorer.name)
        )
        waiting = all(explorer.status == RunningStatus.REQUIRE_SYNC.value for explorer in working)
        if self._open is not None and (self._open.members != members or not waiting):
            self._withdraw()  # the explorers have changed: start again
        if not waiting:
            return False
        if self._open is None:
            self._open = self.offers.make(self.me.session.id, step, members)
        if not all(map(self._has_joined, working)):
            return False
        offer, groups = self._open, {explorer.group for explorer in working}
        if self._decide(offer, "go") != "go":
            return False
        self.agreed = Agreed(offer, groups.pop() if len(groups) == 1 else None)
        return True

    def _has_joined(self, explorer: ExplorerReport) -> bool:
        return self._open is not None and explorer.joined == self._open.offer

    def _withdraw(self) -> None:
        if self._open is not None:
            self._decide(self._open, "off")

    def _decide(self, offer: Offer, wish: Decision) -> Decision:
        """Decide the open offer; return the decision that counts, possibly an explorer's."""
        self._open = None
        decided = self.offers.decide(offer.offer, wish, self.me.session.id)
        try:
            # The verdict file decides. The offer repeats the verdict, because an explorer's client
            # can have cached that the verdict file does not exist.
            self.offers.put(offer.model_copy(update={"decided": decided}))
        except OSError as error:
            log.warning(
                "cannot write the outcome of a transfer, so explorers wait until their "
                "deadline: %s",
                error,
            )
        return decided


@dataclass
class ExplorerSide(_Side[Offer]):
    """Joins an offer, and leaves the offer if the transfer does not take place.

    Attributes:
        agreed: the latest offer, if its transfer takes place; else None.
    """

    offers: Offers
    roster: Roster
    me: Participant[ExplorerReport]

    def __post_init__(self) -> None:
        self._over: set[str] = set()
        self._joined: Offer | None = None
        self._called_off = 0
        with suppress(OSError):  # then an old offer counts as new
            past = self.offers.current()
            if past is not None and past.decided is not None:
                self._over.add(past.offer)  # made for earlier explorers

    def agree(self, wait: Wait) -> int | None:
        """Join an offer; return its step, or None if the transfer does not take place."""
        self.agreed = None
        require_sync(self.me, requests=self.me.record.requests + 1)
        called_off, joined = self._called_off, None
        try:
            while True:
                trainer = self.roster.trainer_status()
                if (joined := self.look()) is not None or self._goes_by_files():
                    break
                if trainer is RunningStatus.STOPPED:
                    log.warning("the trainer has stopped: skipping the transfer")
                    break
                given_up = self._called_off > called_off and not self.has_joined
                if given_up and trainer is RunningStatus.RUNNING:
                    break  # the trainer gave this offer up, and has made no new one
                if not wait.more():
                    log.error(
                        "skipping the transfer, because the trainer was not ready for it in time"
                    )
                    break
        finally:
            try:
                joined = self.leave() or joined
            finally:
                back_to_running(self.me, joined=None)
        return joined.step if joined is not None else None

    @property
    def has_joined(self) -> bool:
        """True if this explorer has joined an offer that is not decided yet."""
        return self._joined is not None

    def look(self) -> Offer | None:
        """Check the current offer once; return the joined offer if its transfer takes place.

        If the offer is open and names this explorer, the explorer joins it.
        """
        offer, joined = self.offers.current(), self._joined
        other = joined is not None and offer is not None and offer.offer != joined.offer
        # The trainer called the offer off, or another trainer has come.
        if other and (decided := self.leave()) is not None:
            return decided
        if self._joined is None and offer is not None and self._concerns_us(offer):
            self._joined = offer  # first, because a later update can still write a failed update
            self.me.update(joined=offer.offer)
        elif self._joined is not None and offer is not None and offer.decided is not None:
            joined, self._joined = self._joined, None
            self._over.add(joined.offer)
            if offer.decided == "go":
                self.agreed = joined
                return joined
            self._called_off += 1
        return None

    def leave(self) -> Offer | None:
        """Leave the joined offer; return None if this explorer has left.

        If the trainer decided first that the transfer takes place, return the offer: this explorer
        must take part.
        """
        joined, self._joined = self._joined, None
        if joined is None:
            return None
        self._over.add(joined.offer)
        if self.offers.decide(joined.offer, "off", self.me.session.id) != "go":
            return None
        self.agreed = joined
        return joined

    def _concerns_us(self, offer: Offer) -> bool:
        us = (self.me.record.name, self.me.session.id)
        ours = any((one.name, one.session) == us for one in offer.members)
        return ours and offer.decided is None and offer.offer not in self._over

    def _goes_by_files(self) -> bool:
        offer = self.offers.current()
        if self.has_joined or offer is None or offer.decided != "files":
            return False
        is_new = offer.offer not in self._over
        self._over.add(offer.offer)
        return is_new
