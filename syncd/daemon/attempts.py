"""Attempts to publish a save. After a failure the daemon tries again or quarantines the save."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.save import Delta, Save, SavedWeights, WholeSave
from syncd.checkpoint.tip_folder import NoTipError
from syncd.daemon.blocks import Obstacle
from syncd.daemon.collect import Tidying
from syncd.daemon.decide import Fold
from syncd.daemon.delta_making import make_delta
from syncd.daemon.makes import Makes
from syncd.daemon.orders import FoldOrder, MakeOrder, MergeOrder, Order, PrepareOrder
from syncd.daemon.publish import Publisher
from syncd.daemon.report import Reporter
from syncd.daemon.steering import Steering
from syncd.daemon.telling.journal import lasting
from syncd.daemon.telling.publication import publication
from syncd.daemon.tenure import Tenure
from syncd.daemon.turns import LateError
from syncd.deltas.delta_check import BusyError
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import (
    CheckpointError,
    NoRoomError,
    RecordError,
    SaveNotReadyError,
    SyncdError,
    VerificationError,
    VersionGoneError,
)
from syncd.protocol.names import delta_folder, printable, version_folder
from syncd.protocol.records import Latest, Manifest, Tip
from syncd.protocol.requests import RollbackRequest
from syncd.protocol.version_events import (
    DeltaMade,
    DeltasStopped,
    FoldDelayed,
    MergeEnded,
    RollbackRefused,
    SaveFault,
    SaveNamed,
    SaveQuarantined,
    VersionFolded,
    VersionPublished,
    VersionRolledBack,
)
from syncd.storage.errnos import GONE, REFUSED_HERE, Ignoring, is_gone, is_no_record

log = logging.getLogger(__name__)

#: The most seconds between two attempts at a merge that storage refuses.
_LONGEST_WAIT: Final = 30.0
#: A version of a whole save that is served is made after so many seconds at the latest.
_SOON: Final = 60.0
#: How many rounds try a rollback that storage refuses.
_ROLLBACK_ATTEMPTS: Final = 6


@dataclass
class Attempts:
    """Publishes saves and carries out rollbacks; tries again after some failures.

    Attributes:
        may_overtake: True if the last attempt ended, or missed only room.
        untaken: the identity, or the run, of the last save that must be merged to be served.
        obstacle: of the last attempt, until one succeeds.
        late: LATEST's ``no_deltas``, although the daemon still tries to make deltas.
    """

    tenure: Tenure
    publisher: Publisher
    reporter: Reporter
    tidying: Tidying
    makes: Makes
    prepares: Makes

    def __post_init__(self) -> None:
        self._job, self._clock = self.tenure.job, self.tenure.clock
        self._journal = self.tenure.journal
        self._tell = self._journal.tell
        self._steering = Steering(self._job)
        self.may_overtake = False
        self.untaken = ""
        self.obstacle: Obstacle | None = None
        self._tried: str | None = None
        self._again_at = 0.0
        self._wait = 0.0
        self._asked: str | None = None
        self._refusals = 0
        self.late = ""
        self._missed: dict[str, object] = {}  # the work whose file was missing
        self._named_at: dict[int, float] = {}  # the whole saves that were named, by their numbers

    def publish(self, save: WholeSave, whole_since: float, work: Work) -> str:
        """Begin to merge a save, and publish it once it is merged, or quarantine it.

        Returns the reason if the save has to wait, else "". ``whole_since`` is the ``clock`` time
        when the save was first seen in its present state. After the first failure the save waits a
        tick. Each further failure doubles the wait, up to 30 s.

        Raises:
            SyncdError: another daemon took over, a stop was requested, or the job is unavailable.
        """
        return self._try(save, self.makes, lambda: self._merge(save, whole_since, work))

    def prepare(self, save: WholeSave, whole_since: float, work: Work) -> str:
        """Begin to prepare a save, and let LATEST name it once it is prepared.

        For the rest see :meth:`publish`. A save that can be no tip becomes ``untaken``.
        """
        return self._try(save, self.prepares, lambda: self._prepare(save, whole_since, work))

    def _try(  # noqa: PLR0911 - one return for each way it ends
        self, save: WholeSave, makes: Makes, attempt: Callable[[], None]
    ) -> str:
        if not makes.is_of(save) and (reason := self._not_now(save)):
            return reason
        try:
            attempt()
        except (SaveNotReadyError, NoRoomError) as error:
            return self._try_later(save, str(error), error)
        except CheckpointError as error:
            self.give_up(save, error)
            return ""
        except OSError as error:
            self._job.check_is_there()
            return self._try_later(save, f"step {save.step} could not be merged: {error}", error)
        except SyncdError:
            raise
        except LateError as error:
            self.tidying.after(error)
            self._tell(MergeEnded(save.step, str(error)))
            return f"step {save.step}: {error}"
        except MemoryError as error:
            why = f"step {save.step}: not enough memory to merge it now"
            return self._try_later(save, why, error)
        except Exception as error:  # noqa: BLE001 - a bug in syncd is logged with its traceback
            path = self.publisher.outcomes.quarantine(save.step, save.known_as, error)
            why = f"a bug in syncd: {type(error).__name__}: {error}"
            self._tell(SaveFault(save.step, path, why, error))
            self._ended()
        return ""

    def _merge(self, save: WholeSave, whole_since: float, work: Work) -> None:
        """Begin to merge a save, or go on; publish the version once it is made."""
        publisher, makes, before = self.publisher, self.makes, self.publisher.latest
        ended = True
        try:
            if not makes.is_of(save):
                makes.end()
                self.may_overtake = False
                publisher.check_finite(save)
                self._check_room(save)
                self.reporter.report("merging", f"step {save.step}")
                self._begin(makes, MergeOrder, save, publisher.next_sequence(), whole_since, work)
            manifest = makes.poll()
            if manifest is None:
                ended = False
                return
            publisher.publish(save, manifest)
        finally:
            if ended:
                makes.end()
        self._say_served(makes)
        self._say_published(manifest, before, makes.begun, makes.whole_since)
        self._journal.write()  # pruning, which comes next, may take long

    def _prepare(self, save: WholeSave, whole_since: float, work: Work) -> None:
        """Begin to prepare a save, or go on; name it once it is prepared."""
        publisher, prepares, outcomes = self.publisher, self.prepares, self.publisher.outcomes
        ended = True
        try:
            if not prepares.is_of(save):
                prepares.end()
                self.may_overtake = False
                publisher.check_finite(save)
                sequence = publisher.reserve(self.makes.save)
                self._begin(prepares, PrepareOrder, save, sequence, whole_since, work)
            manifest = prepares.poll()
            if manifest is None:
                ended = False
                return
            sequence = manifest.sequence
            if not publisher.is_newest(sequence):
                raise SaveNotReadyError(f"{delta_folder(sequence)} is another save now")
            outcomes.published(save.step, save.identity, sequence)  # as for a delta
            if outcomes.unwritten:
                raise outcomes.unwritten
            self.tenure.epoch.commit_delta(delta_folder(sequence))
            self._name(Tip(sequence=sequence, step=save.step, save_id=save.identity, root=sequence))
        except NoTipError as error:
            log.debug("step %d is merged before it is served: %s", save.step, error)
            self.untaken, *_ = save.identity.partition("-")  # nor the later ones of this run
            return
        finally:
            if ended:
                prepares.end()
        self._say_served(prepares)
        seconds = round(self._clock() - prepares.begun, 3)
        self._tell(SaveNamed(sequence, save.step, manifest.size, seconds))

    def _begin(
        self,
        makes: Makes,
        order: type[MergeOrder | PrepareOrder],
        save: WholeSave,
        sequence: int,
        whole_since: float,
        work: Work,
    ) -> None:
        options = self.publisher.merge_options()
        makes.save, makes.whole_since = save, whole_since
        name = (version_folder if order is MergeOrder else delta_folder)(sequence)
        room = makes.room(name)
        makes.begin(order(room, save.step, save.identity, sequence, options), save.step, work)

    def _name(self, tip: Tip) -> None:
        if tip.root:
            self._named_at[tip.root] = self._clock()
        self.publisher.advance(tip)
        if self.makes.save is not None:
            self.makes.end()  # its version would be older than what is served
        self.prepares.end()  # an older save, too

    def _say_served(self, makes: Makes) -> None:
        self._ended()
        self.reporter.arrival.pace = self._clock() - makes.whole_since

    def _not_now(self, save: WholeSave) -> str:
        if save.identity != self._tried:
            self._tried, self._wait, self._again_at = save.identity, 0.0, 0.0
        if self._clock() < self._again_at:
            return self._journal.waiting_for
        return "paused" if self._steering.is_paused() else ""

    def is_due(self, tip: Tip | None) -> bool:
        """True if a version of the whole save that the tip rests on must be made now."""
        latest = self.publisher.latest
        version, now = latest.sequence if latest else 0, self._clock()
        named = {number: at for number, at in self._named_at.items() if number > version}
        if tip and tip.root:
            named.setdefault(tip.root, now)  # perhaps by an earlier daemon
        self._named_at = named
        return bool(named) and now - min(named.values()) >= max(_SOON, self.makes.took)

    def make_deltas(self, saves: Sequence[SavedWeights], sequence: int, root: int | None) -> str:
        """Make deltas of saves, the oldest first, unless the delta of the last one is ``sequence``.

        ``root`` is as in :class:`~.decide.MakeDeltas`. Then LATEST names the last one as its tip,
        unless it has NaN and the daemon refuses it. For the result and errors see :meth:`publish`.
        """
        for save in () if sequence else saves:
            latest = self.publisher.latest
            if latest is None or (reason := self._not_now(save)):
                return reason
            begun = self._clock()
            try:
                at = self._job.layout
                whole = at.delta(root) if root else at.version(latest.sequence)
                sequence = make_delta(self.tenure, self.publisher, save, whole)
            except (DeltaError, RecordError, MemoryError) as error:
                why = str(error) or "the daemon has no memory left"
                self._stop(save.step, save.identity, why)
                return ""
            except BusyError:
                return f"step {save.step}: the large delta of another job is checked first"
            except (SaveNotReadyError, OSError) as error:
                self._job.check_is_there()
                return self._try_later(
                    save, f"step {save.step} could not be taken as a delta: {error}", error
                )
            self._ended()
            size = sum(file.size for file in save.vouched().values() if file.over == "index")
            seconds = round(self._clock() - begun, 3)
            self._tell(DeltaMade(sequence, save.step, size, seconds))
        save = saves[-1]
        try:
            self.publisher.check_finite(save)
        except CheckpointError as error:
            self.give_up(save, error)
            return ""
        self.publisher.outcomes.published(save.step, save.identity, sequence)
        self._name(Tip(sequence=sequence, step=save.step, save_id=save.identity, root=root))
        return ""

    def stop_deltas(self, save: WholeSave) -> None:
        """Record that a save cannot be taken as a delta, once the server has been asked."""
        why = "its base has neither a delta nor a version"
        self._lose_patience(save, why, OSError(errno.ENOENT, why))

    def _lose_patience(self, save: WholeSave, why: str, error: Exception) -> None:
        """Stop the deltas if later saves would wait for one that fails."""
        is_delta, layout = isinstance(save, Delta), self._job.layout
        if not (is_delta or self.reporter.no_deltas is None):
            return
        if self._is_over("save", save.identity, error):
            late = not (is_delta and _cannot_heal(error))
            self._stop(save.step, save.identity, why, late=late)
            return
        for folder in (layout.root, layout.step(save.step), layout.actor(save.step)):
            with Ignoring(GONE | REFUSED_HERE):
                self._job.storage.refresh(folder)

    def _is_over(self, work: str, of: object, error: Exception) -> bool:
        """True if nothing later should wait for this work: it fails for long, or after damage."""
        if not _cannot_heal(error):
            return self.tenure.blocks.lasts(work)  # without room: whole weights would need more
        # A missing file is looked for once more, because this client's cache can be outdated.
        missed, self._missed[work] = self._missed.get(work), of
        return missed == of or not isinstance(error, OSError)

    def _stop(self, step: int, save_id: str, reason: str, *, late: bool = False) -> None:
        """Let the trainer save whole weights; unless it is only late, never try this save again."""
        latest, reason = self.publisher.latest, printable(reason)
        outcome = self.publisher.outcomes.of_step.get(step)
        is_told = latest.no_deltas if latest else outcome and outcome.identity == save_id
        if not is_told:
            self.publisher.advance(latest.tip if latest else None, reason)
            self._tell(DeltasStopped(step, reason))
        if not (is_told and late):
            self.late = reason if late else ""
        if latest is None or not late:
            self.publisher.outcomes.skip(step, save_id)

    def fold(self, fold: Fold, work: Work) -> None:
        """Begin or continue a fold, and publish it once it is ready."""
        latest, makes = self.publisher.latest, self.makes
        if latest is None:
            return
        fold = makes.fold or fold
        tip = fold.tip
        if makes.obstacle is not None:
            self.tenure.blocks.meet("fold", makes.obstacle, is_told=True)
        try:
            manifest = makes.poll_fold(fold, self._order_of(fold, latest), work)
            if manifest is None or self._steering.is_paused():
                return
            self.publisher.publish_fold(manifest, of_deltas=not tip.root)
        except LateError as error:
            makes.end()
            self._tell(MergeEnded(tip.step, str(error)))
        except (
            *(DeltaError, NoTipError, CheckpointError, RecordError, SaveNotReadyError),
            *(NoRoomError, OSError, MemoryError, RuntimeError),
        ) as error:
            is_over = self._is_over("fold", latest.sequence, error)
            damaged, event = is_over and _cannot_heal(error), FoldDelayed(tip.step, error)
            makes.end(None if damaged else Obstacle.of(str(event), error))
            self._job.check_is_there()
            if damaged and tip.root:
                self._distrust(tip, error)
            elif is_over:
                self._stop(tip.step, tip.save_id, str(error), late=not damaged)
            if damaged:
                makes.damaged = None if tip.root else tip.sequence
            else:
                self.tidying.after(error)
                self._tell(event)
        else:
            makes.end()
            before, kind = (latest, VersionPublished) if tip.root else (None, VersionFolded)
            self._say_published(manifest, before, makes.begun, makes.begun, kind)

    def _order_of(self, fold: Fold, latest: Latest) -> Order:
        tip, room = fold.tip, self.makes.room(version_folder(fold.tip.sequence))
        if not tip.root:
            named = latest.model_copy(update={"tip": tip})
            return FoldOrder(room, named, [delta.sequence for delta in fold.chain])
        if tip.save_id != self.untaken:
            return MakeOrder(room, tip.sequence)
        options = self.publisher.merge_options()
        return MergeOrder(room, tip.step, tip.save_id, tip.sequence, options)

    def _distrust(self, tip: Tip, error: Exception) -> None:
        """Merge a whole save from its step, if only its tip is damaged; else quarantine it."""
        if tip.save_id != self.untaken and not isinstance(error, CheckpointError):
            self.untaken = tip.save_id
            self._tell(FoldDelayed(tip.step, error))
            return
        latest = self.publisher.latest
        if latest and latest.tip and latest.tip.root == tip.root:
            self.publisher.advance(None, str(error))
        self._refuse(tip.step, tip.save_id, error)

    def give_up(self, save: Save, error: CheckpointError) -> None:
        """Quarantine a save."""
        self._refuse(save.step, save.known_as or "", error)
        self._ended()

    def _refuse(self, step: int, identity: str, error: Exception) -> None:
        path = self.publisher.outcomes.quarantine(step, identity, error)
        self._tell(SaveQuarantined(step, error, path))

    def roll_back(self, request: RollbackRequest) -> None:
        """Make an old version LATEST again, and answer the request.

        Raises:
            OSError: storage refused the rollback, so call this again. At the sixth refusal the
                request is answered as refused, and no error is raised.
            SyncdError: see :meth:`publish`.
        """
        if request.id != self._asked:
            self._asked, self._refusals = request.id, 0
        by = printable(request.by)
        try:
            making = self.prepares.save or self.makes.save
            manifest = self.publisher.republish(request, making)
        except (VersionGoneError, VerificationError, RecordError, OSError) as error:
            self._job.check_is_there()
            self._refusals += 1
            if isinstance(error, OSError) and self._refusals < _ROLLBACK_ATTEMPTS:
                raise
            self._tell(RollbackRefused(request.sequence, error, by))
            self.publisher.answer(request, made=None, why=str(error))
            return
        self.makes.end()
        self.prepares.end()
        self._tell(
            VersionRolledBack(
                of=request.sequence,
                version=manifest.sequence,
                step=manifest.step,
                by=by,
                kind_=manifest.kind,
            )
        )
        self._say_names()
        self.publisher.answer(request, made=manifest.sequence, why="")

    def _say_published(
        self,
        manifest: Manifest,
        before: Latest | None,
        begun: float,
        whole_since: float,
        kind: type[VersionPublished] = VersionPublished,
    ) -> None:
        now = self._clock()
        for event in publication(
            self._job, manifest, before, seconds=now - begun, latency=now - whole_since, kind=kind
        ):
            self._tell(event)
        self._say_names()

    def _say_names(self) -> None:
        if (change := self.publisher.naming.change) is not None:
            self._tell(change)

    def _ended(self) -> None:
        self.may_overtake, self.obstacle, self._wait = True, None, 0.0

    def _check_room(self, save: WholeSave) -> None:
        try:
            self.publisher.check_room(save)
        except NoRoomError as error:
            if not self.tidying.gave_up_deltas(error):
                raise
            self.publisher.check_room(save)

    def _try_later(self, save: WholeSave, why: str, error: Exception) -> str:
        self._journal.meter.failed(error)
        self.tidying.after(error)
        self.may_overtake, self.obstacle = False, None
        if not isinstance(error, SaveNotReadyError):  # its trainer goes on with it
            self.obstacle = Obstacle.of(f"nothing is published: {lasting(why)}", error)
            self.may_overtake = self.obstacle.reason == "room"
            self.tenure.blocks.meet("save", self.obstacle)
        self._wait = min(_LONGEST_WAIT, 2 * self._wait or self.publisher.config.tick)
        self._again_at = self._clock() + self._wait
        self._lose_patience(save, why, error)
        return f"{why}; trying again in {self._wait:g} s"


def _cannot_heal(error: Exception) -> bool:
    """True if a file is damaged, missing, or no regular file, so that waiting does not help."""
    if isinstance(error, OSError):
        return is_gone(error) or is_no_record(error)
    return isinstance(error, DeltaError | NoTipError | CheckpointError | RecordError)
