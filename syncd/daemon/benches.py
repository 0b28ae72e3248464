"""Builds of old steps for benches. A build is for one explorer and is never published."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from syncd.checkpoint.save import Unfinished, WholeSave
from syncd.checkpoint.step_save import look_into_step
from syncd.daemon.attempts import Attempts
from syncd.daemon.collect import Tidying
from syncd.daemon.complaints import LetBe
from syncd.daemon.publish import Publisher
from syncd.daemon.telling.journal import Journal
from syncd.daemon.telling.report import Reporter
from syncd.daemon.turns import OTHERS_FIRST, LateError, Turn
from syncd.protocol.errors import (
    CheckpointError,
    NoRoomError,
    SaveNotReadyError,
    SyncdError,
)
from syncd.protocol.events import Event
from syncd.protocol.names import TEMPORARY, printable
from syncd.protocol.requests import BenchRequest
from syncd.storage.calls import Kind
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import NOT_EMPTY, is_gone, is_refused_here
from syncd.storage.job import Job
from syncd.storage.judge import Clock, Judge, Liveness, Lookout
from syncd.storage.record_files import OF_OTHERS

log = logging.getLogger(__name__)

_RECORD: Final = ".json"
#: The most attempts at a build that storage refuses, and the most seconds between two attempts.
_ATTEMPTS: Final = 6
_LONGEST_WAIT: Final = 30.0
_MOST_DOUBLINGS: Final = 16


@dataclass(slots=True)
class _Asked:
    """A request that has no build yet. ``since`` is when the save ``identity`` was first seen."""

    request: BenchRequest
    identity: str | None = None
    since: float = 0.0
    attempts: int = 0
    refusals: int = 0
    again_at: float = 0.0
    why: str = ""


class Benches:
    """Builds the steps that explorers request, and deletes builds that no explorer needs any more.

    A build does not change LATEST, versions or records of saves. A build is deleted after its
    request is removed or its explorer's session has died.

    Args:
        publishes: if False, builds are only deleted, never made.

    Attributes:
        awaits_turn: True if a build waits until merges of other jobs have ended.
    """

    def __init__(
        self,
        job: Job,
        epoch: Epoch,
        publisher: Publisher,
        attempts: Attempts,
        journal: Journal,
        reporter: Reporter,
        tidying: Tidying,
        turn: Turn,
        *,
        lease_time: float,
        publishes: bool,
        clock: Clock,
    ) -> None:
        self._job = job
        self._epoch = epoch
        self._publisher = publisher
        self._attempts = attempts
        self._journal = journal
        self._reporter = reporter
        self._tidying = tidying
        self._turn = turn
        self._publishes = publishes
        self._clock = clock
        # Merges may follow each other for hours without a look, so this judge counts pauses.
        judge = Judge(job.storage, lease_time, clock=clock, counts_pauses=True)
        self._longest_tick = lease_time / 4
        self._lookout = Lookout(judge, job.layout, tick=self._longest_tick, clock=clock)
        self._let_be = LetBe(clock=clock)
        self._asked: dict[str, _Asked] = {}
        self.awaits_turn = False
        self.building: int | None = None

    def run_once(self, tick: float) -> str:
        """Delete unneeded builds, then make at most one build; returns why a build waits, else "".

        ``tick`` is the approximate number of seconds between two calls. A step without receipts is
        built only after its files have not changed for ``tick`` seconds.

        Raises:
            OSError: storage refused some work; the next call tries it again.
            SyncdError: see :meth:`Attempts.publish`.
        """
        self.awaits_turn = False
        self._lookout.tick = min(tick, self._longest_tick)
        requests, sessions = self._found()
        held = self._of_the_living(requests)
        built: set[str] = set()
        refused: list[OSError] = []
        for session in sessions:
            built |= self._tidy(session, held, refused)
        asked = {
            id_: request
            for id_, request in held.items()
            if request.outcome == "asked" and id_ not in built
        }
        before = {id_: one for id_, one in self._asked.items() if id_ in asked}
        self._asked = before | {
            id_: _Asked(request) for id_, request in asked.items() if id_ not in before
        }
        waiting = self._build_next(tick) if self._publishes else ""
        if refused:  # raised last, so that one explorer's failure does not delay the others
            raise refused[0]
        return waiting

    def _found(self) -> tuple[dict[str, BenchRequest], list[str]]:
        """Request id → request, and the sessions that have a folder for builds."""
        folder = self._job.layout.bench
        try:
            kinds = self._job.storage.kinds(folder) if self._job.storage.names(folder) else {}
        except OSError as error:
            if not (is_gone(error) or is_refused_here(error)):
                raise
            if is_refused_here(error):
                self._let_be.say(folder, error)
            return {}, []
        requests: dict[str, BenchRequest] = {}
        for name, kind in kinds.items():
            if kind is not Kind.FILE or not name.endswith(_RECORD) or name.startswith(TEMPORARY):
                continue
            request = self._job.read(BenchRequest, folder / name, OF_OTHERS)
            # The request's id becomes a path, so the id must equal the file's name.
            if request is not None and self._job.layout.bench_request(request.id) == folder / name:
                requests[request.id] = request
        return requests, [name for name, kind in kinds.items() if kind is Kind.FOLDER]

    def _of_the_living(self, requests: Mapping[str, BenchRequest]) -> dict[str, BenchRequest]:
        seen = self._lookout.look({request.session for request in requests.values()})
        living = {}
        for id_, request in requests.items():
            if seen[request.session] is Liveness.ALIVE:
                living[id_] = request
            else:
                path = self._job.layout.bench_request(id_)
                self._job.storage.unlink_if_there(path)
                log.info(
                    "removed %s: its explorer, %s, is dead",
                    path,
                    printable(request.by),
                    extra=Event.LEFTOVER_REMOVED(path=path),
                )
        return living

    def _tidy(
        self, session: str, held: Mapping[str, BenchRequest], refused: list[OSError]
    ) -> set[str]:
        """Delete a session's builds that no request needs; returns the names of the others."""
        folder = self._job.layout.bench / session
        kept: set[str] = set()
        try:
            names = set(self._job.storage.kinds(folder))
            if names - held.keys():
                # A listing may be older than a request, so look up each request by its name.
                self._job.storage.refresh(self._job.layout.bench)
            for name in sorted(names):
                if name in held or self._job.storage.exists(self._job.layout.bench_request(name)):
                    kept.add(name)
                    continue
                doomed = self._epoch.condemn(folder / name)
                self._job.storage.remove_tree(doomed)
                log.debug("deleted %s: its explorer no longer needs it", folder / name)
            if not kept and all(request.session != session for request in held.values()):
                self._job.storage.rmdir(folder)
        except OSError as error:
            if is_refused_here(error):
                self._let_be.say(folder, error)
            elif not (is_gone(error) or error.errno in NOT_EMPTY):
                refused.append(error)
        return kept

    def _build_next(self, tick: float) -> str:
        waiting = ""
        for asked in self._asked.values():
            if self._clock() >= asked.again_at:
                save = self._ready(asked, tick)
                if save is not None:
                    if not self._turn.take(save.identity):
                        self.awaits_turn = True
                        return OTHERS_FIRST
                    self.building = save.step
                    try:
                        return self._build(asked, save, tick)
                    finally:
                        self.building = None
                        self._turn.leave()
            waiting = waiting or asked.why
        return waiting

    def _ready(self, asked: _Asked, tick: float) -> WholeSave | None:
        """The save to build now; None if there is none, or if it has to wait (``asked.why``)."""
        request, asked.why = asked.request, ""
        if self._is_built(request):
            return None
        step = self._job.layout.step(request.step)
        save = look_into_step(self._job.storage, step, request.step)
        if isinstance(save, Unfinished):
            asked.identity, asked.why = None, save.reason
            if not self._is_there(request.step):
                self._refuse(asked, SaveNotReadyError(f"{step} was deleted"))
            return None
        if save.identity != asked.identity:
            asked.identity, asked.since = save.identity, self._clock()
        if not save.receipts and self._clock() - asked.since < tick:
            asked.why = (
                f"step {save.step} has no receipts, so the daemon waits until the step's "
                f"files have not changed for {tick:g} s"
            )
            return None
        return save

    def _is_built(self, request: BenchRequest) -> bool:
        """True if the build exists; asks the server, because a listing can be outdated."""
        build = self._job.layout.bench_build(request.session, request.id)
        try:
            self._job.storage.refresh(build.parent)
        except OSError as error:
            if not (is_gone(error) or is_refused_here(error)):
                raise
        return self._job.storage.exists(build)

    def _is_there(self, step: int) -> bool:
        if self._job.storage.exists(self._job.layout.step(step)):
            return True
        self._job.storage.refresh(self._job.layout.root)
        return self._job.storage.exists(self._job.layout.step(step))

    def _build(self, asked: _Asked, save: WholeSave, tick: float) -> str:
        request, begun = asked.request, self._clock()
        asked.again_at = begun + min(_LONGEST_WAIT, tick * 2**asked.attempts)
        asked.attempts = min(asked.attempts + 1, _MOST_DOUBLINGS)
        try:
            self._publisher.check_room(save)
            detail = f"step {save.step}, for the bench of {printable(request.by)}"
            self._reporter.report("merging", detail)
            manifest = self._publisher.build_for_bench(
                request,
                save,
                progress=self._attempts.progress(save, begun, self._turn.progress),
            )
        except SaveNotReadyError as error:
            self._tidying.after(error)
            asked.why = str(error)
        except OSError as error:
            self._job.check_is_there()
            self._tidying.after(error)
            asked.why = f"step {save.step} could not be merged: {error}"
            asked.refusals += 1
            if asked.refusals >= _ATTEMPTS:
                self._refuse(asked, error)
        except (CheckpointError, NoRoomError) as error:
            self._refuse(asked, error)
        except LateError as error:
            self._tidying.after(error)
            self._journal.ended_late(save, error)
            asked.why = f"step {save.step}: {error}"
        except SyncdError:
            raise
        except Exception as error:  # noqa: BLE001 - a bug in syncd is logged with its traceback
            self._refuse(asked, error)
        else:
            self._journal.bench_built(request, manifest, seconds=self._clock() - begun)
        return asked.why

    def _refuse(self, asked: _Asked, error: Exception) -> None:
        asked.why = ""
        self._journal.bench_refused(asked.request, error)
        self._publisher.refuse_bench(asked.request, str(error) or type(error).__name__)
