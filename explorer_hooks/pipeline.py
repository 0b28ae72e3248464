"""``Pipeline``: leases, verifies, stages, applies and reports the next version of an engine."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Final

from explorer_hooks.engines.fitting import check_kind, named
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.reload import ExplorerBroadcasts, RefusedError, Reloader, Take, refuses
from explorer_hooks.staging import NotStagedError, Staging
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.versions import Lead
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    EngineBrokenError,
    InvalidSettingsError,
    VerificationError,
    VersionGoneError,
)
from syncd.protocol.policy import Version
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Reload

log = logging.getLogger(__name__)

#: The longest time in seconds between two looks while waiting for a version to be served.
_LOOK: Final = 0.1
#: Seconds between two checks whether the engine still has its version.
_STILL: Final = 2.0


@dataclass
class Pipeline:
    """Knows the version that an engine serves, and loads the next version.

    Any thread may read the served version, but only one thread at a time may load a version.

    Attributes:
        held: the leased version that the engine serves; None before the first load. After a
            broadcast, a version that is not newer than the received weights.
        last: the measurements of the last load or broadcast.
    """

    sync: ExplorerSynchronizer
    reloader: Reloader
    staging: Staging | None
    before_load: Callable[[LeasedVersion], object]
    fast_path: ExplorerBroadcasts | None

    def __post_init__(self) -> None:
        self.held: LeasedVersion | None = None
        self.last: Reload | None = None
        self._received: SaveId | None = None
        self._broken: str | None = None
        self._abandoned: str | None = None
        self._refused: tuple[Version, str] | None = None
        # Late: the job was replaced since the version was leased that is loaded now.
        self._benches = self._is_elsewhere = self._is_late = self._was_elsewhere = False
        self._looked = -math.inf
        self._said: set[str] = set()
        self._changed = threading.Condition()
        if self.staging is not None and not self.reloader.engine.is_local:
            log.warning("the engine also reads weights on other hosts, so staging is off")
            self.staging = None

    # -- the served version: for any thread ---------------------------------------------

    @property
    def version(self) -> Version | None:
        """The version that the engine serves."""
        with self._changed:
            held, received = self.held, self._received
        if held is None:
            return None
        if received is not None:
            return Version(held.sequence, received.step, str(received))
        return Version.of(held.manifest)

    @property
    def fault(self) -> str | None:
        """The reason why the explorer is faulty; None if it is not faulty."""
        return self._broken or self._abandoned

    @property
    def is_broken(self) -> bool:
        """True if the engine's weights are unknown."""
        return self._broken is not None

    @property
    def serves_of_files(self) -> LeasedVersion | None:
        """The held version; None if the engine is broken, or has the weights of a broadcast."""
        with self._changed:
            return None if self._received or self._broken is not None else self.held

    @property
    def floor(self) -> Version | None:
        """The served version of this job, or a newer refused one. The next must be newer."""
        served = None if self._is_elsewhere else self.version
        if self._refused is None or (served and served.sequence > self._refused[0].sequence):
            return served
        return self._refused[0]

    @property
    def refused(self) -> str | None:
        """The newest refused version and the reason; None if a newer version is served."""
        refused = self._refused
        return refused[1] if refused is not None and refused[0] == self.floor else None

    def joins(self) -> bool:
        """True if the engine takes part in broadcasts now.

        Before its first version it does not: after a failed broadcast, it needs a version to load.
        """
        if self.fast_path is None or not self.fast_path.fits or self._benches:
            return False
        return self.held is not None and not self.is_broken and not self._is_elsewhere

    @contextmanager
    def hold_again(self) -> Iterator[LeasedVersion]:
        """Yield a second lease on the served version. Later loads do not release this lease."""
        with self._changed:  # so that it is not released meanwhile
            held = self.held
            if held is None:
                raise InvalidSettingsError(
                    f"{self.sync.name} serves no version yet. Call pull() first"
                )
            if self.staging is not None and held.source != held.folder:
                again = self.staging.hold_again(held)
            else:
                again = self.sync.hold(held)
        try:
            yield again
        finally:
            again.release()

    def wait(
        self, until: Callable[[Version | None], bool], timeout: float | None
    ) -> Version | None:
        """Wait until ``until`` returns True or the time is up. Return the version now served.

        ``until`` is called ten times a second, because a signal handler can change its result but
        cannot notify this wait.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not until(self.version) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK))
            return self.version

    def ends_bench(self) -> None:
        """If the evaluated version is published, report it as served, not as an evaluation."""
        held = self.held
        if self._benches and held is not None and held.sequence:
            self._benches = False
            self.report()

    def changes_job(self) -> None:
        """Record that another job is at the job's path, whose numbers begin anew."""
        with self._changed:
            self._is_elsewhere = self._is_late = self._was_elsewhere = True
            self._refused = None
        self.report()

    def is_newer(self, version: Version | None, than: Version | None) -> bool:
        """True if ``version`` is newer. A broadcast changes only its step."""
        if version is None or than is None:
            return version is not None
        is_higher = self._was_elsewhere or version.sequence >= than.sequence
        return is_higher and not version.is_same(than)

    def follows(self) -> None:
        """Record that a background thread follows the job."""
        if self._abandoned is not None:
            self._abandoned = None
            self.report()

    def abandon(self, why: str) -> None:
        """Record that the background thread has died."""
        with self._changed:
            self._abandoned = why
            self._changed.notify_all()
        self.report()

    def report(self, starting: str | None = None) -> None:
        """Write this explorer's report. If storage fails, only log the error.

        ``starting`` is the reason why the engine is not running yet.

        Raises:
            NameTakenError: another explorer took the name while this explorer counted as dead.
        """
        version = None if self._is_elsewhere else self.version
        bench = version if self._benches else None
        try:
            self.sync.report(
                None if bench else version,
                refused=self._refused[1] if self._refused else None,
                reload=self.last if version and not bench else None,
                bench=bench.step if bench else None,
                fault=self.fault,
                received=str(self._received) if self._received else None,
                workers=self.fast_path.engine.workers if self.fast_path and self.joins() else 0,
                group=self.fast_path.group if self.fast_path else None,
                starting=starting,
            )
        except OSError as error:
            log.warning(
                "%s cannot report to the job, so 'syncd status' may show an older state: %s",
                self.sync.name,
                error,
            )

    # -- the next version: one thread at a time --------------------------------------------------

    def receive(self, save_id: SaveId, take: Take) -> None:
        """Let the engine receive the weights of a save by broadcast, and report them.

        Raises the errors of :meth:`~explorer_hooks.reload.Reloader.receive` and of ``before_load``.
        """
        held = self.held
        assert held is not None  # noqa: S101 - an engine without a version does not join
        try:
            begun = time.monotonic()
            self.before_load(held)
            told = Reload(
                sequence=held.sequence, step=save_id.step, prepare=time.monotonic() - begun
            ).model_copy(update=self.reloader.receive(take))
        except EngineBrokenError as error:
            self._broken = str(error)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                self._broken = f"a broadcast was interrupted by {type(error).__name__}"
            raise
        else:
            with self._changed:
                self.last, self._received = told, save_id
                self._changed.notify_all()
            log.info(
                "%s serves step %d, received by broadcast in %.3f s, with a pause of %.3f s",
                self.sync.name,
                told.step,
                told.seconds,
                told.pause,
            )
        finally:
            self.report()

    def take(self, version: Version, cancel: Cancellation, *, exactly: bool = False) -> bool:
        """Lease, verify, stage, apply and report a version.

        If a broadcast has given the engine these weights, or later weights of the same run, the
        version is only leased and reported, and the result is False. With ``exactly``, the version
        is always loaded. ``cancel`` has no effect once the engine loads.

        Raises:
            VersionGoneError: the version was retired, or is not visible yet.
            RefusedError: the version cannot be used. The engine is unchanged.
            EngineBrokenError: the weights that the engine serves are unknown.
            Exception: storage, the engine or a callback failed. The next try may succeed.
        """
        begun, self._is_late = time.monotonic(), False
        lead = self.sync.lead(version)
        if lead is not None and self.staging is not None:
            copy = self._follow(self.staging, lead, cancel)
            if copy is not None:
                self.load(copy, cancel, begun=begun)
            return copy is not None
        try:
            leased = self.sync.hold(version)
        except VerificationError as error:
            raise self._refusal(version, error) from error
        try:
            is_back = leased.manifest.rolled_back is not None
            has_received = not (exactly or is_back) and self._has_received(leased.manifest.save_id)
        except BaseException:
            leased.release()
            raise
        if has_received:
            self._adopt(leased)
            return False
        self.load(leased, cancel)
        return True

    def _follow(self, staging: Staging, lead: Lead, cancel: Cancellation) -> LeasedVersion | None:
        """A copy of the save that LATEST names as its tip; None if it is not to be loaded."""
        if not self._has_received(lead.tip.save_id):
            served = Version.of(lead.latest)
            try:
                return staging.follow(lead, lambda: self.sync.hold(served), cancel=cancel.check)
            except NotStagedError as error:
                self._say(
                    f"{self.sync.name} does not load step {lead.tip.step} before its full "
                    f"version: {error}"
                )
        self.sync.passes(lead.tip.sequence)
        self.report()
        return None

    def _say(self, text: str) -> None:
        """Log a warning once, whatever its numbers and random names: each step could repeat it."""
        words = re.sub(r"\w*\d\w*", "", text)
        log.log(logging.DEBUG if words in self._said else logging.WARNING, "%s", text)
        self._said.add(words)

    def load(
        self,
        leased: LeasedVersion,
        cancel: Cancellation,
        *,
        benches: bool = False,
        begun: float | None = None,
    ) -> None:
        """Load a leased version, or a step to evaluate it; release the version after an error.

        ``begun`` is when its copy was begun, if ``leased`` is a copy already. See :meth:`take` for
        the errors.
        """
        taker = self.reloader.taker(leased)
        using = [leased]  # to release if the load fails
        blames, self._is_late = True, self._is_late and not benches
        try:
            check_kind(leased, taker.kinds)
            ready, why, staged = leased, None, None if begun is None else True
            begun = time.monotonic() if begun is None else begun
            # Each byte is read once, also with a stage: the copy is verified while it is made.
            if self.staging is not None and leased.kind != "remote" and not staged:
                try:
                    ready, staged = self.staging.stage(leased, cancel=cancel.check), True
                    using.append(ready)
                except NotStagedError as error:
                    staged, why = False, str(error)
                    self._say(
                        f"loading v{leased.sequence} directly from the job, without staging: {why}"
                    )
            if not staged:
                leased.verify(cancel=cancel.check)
            taker.check(ready)
            verified = time.monotonic()
            blames = False  # an error of running requests is not the version's fault
            with self.sync.turns.one(cancel):
                self.before_load(ready)
                blames = True
                taker.prepare(ready)
                cancel.check()
                told = Reload(
                    sequence=leased.sequence,
                    step=leased.step,
                    verify=verified - begun,
                    prepare=time.monotonic() - verified,
                    staged=staged,
                    not_staged=why,
                    **(asdict(self.staging.fetched) if self.staging and staged else {}),
                    # Cannot be cancelled from here on: the engine reads the files.
                    **self._reload(ready),
                )
        except BaseException as error:
            for each in using:
                each.release()
            if blames and refuses(error):
                refusal = self._refusal(Version.of(leased.manifest), error)
                if not isinstance(error, EngineBrokenError):
                    raise refusal from error
            elif self._broken is not None and isinstance(error, Exception):
                self.report()
            raise
        with self._changed:
            before, self.held, self._benches = self.held, ready, benches
            self.last, self._refused, self._broken = told, None, None
            self._received, self._is_elsewhere = None, self._is_late
            self._changed.notify_all()
        if self.fast_path is not None:
            self.fast_path.fits = True
        if self.staging is not None:
            self.staging.serves(ready.folder)
        # Only now release, by unlink, the leases on the old version and on a version with a copy.
        self._let_go(leased if ready is not leased else None, before)
        self.report()
        log.info(
            "%s is live on %s, loaded in %.3f s, with a pause of %.3f s",
            named(ready),
            self.sync.name,
            told.seconds,
            told.pause,
        )

    def restore(self, cancel: Cancellation) -> None:
        """If the engine is broken, load its version again; EngineBrokenError if it stays broken."""
        held, broken = self.held, self._broken
        if broken is None or held is None:
            return
        try:
            try:
                held.verify(cancel=cancel.check)
            except VerificationError:
                again, refused = Version.of(held.manifest), self._refused
                if held.folder == held.source or not self.take(again, cancel, exactly=True):
                    raise
                self._refused = refused  # a newer version stays refused
                return
        except (OSError, VerificationError, VersionGoneError, RefusedError) as error:
            raise EngineBrokenError(
                f"{broken}. Version {held.sequence} cannot be loaded again: {error}"
            ) from error
        try:
            with self.sync.turns.one(cancel):
                self.reloader.restore(held)
        except EngineBrokenError as error:
            if self._broken != str(error):
                self._broken = str(error)
                self.report()
            raise
        log.info("the engine serves v%d again", held.sequence)
        with self._changed:
            self._broken, self._received = None, None
        self.report()

    def check_engine(self) -> None:
        """Raise EngineBrokenError if the engine has lost its version. Checks at most every 2 s."""
        now = time.monotonic()
        held = self.held
        if held is None or now < self._looked + _STILL:
            return
        self._looked = now
        if not self.reloader.taker(held).still_serves(held):
            self._broken = (
                f"the engine has lost v{held.sequence}: the engine was restarted, or cannot "
                "be reached"
            )
            self.report()
            raise EngineBrokenError(self._broken)

    def close(self) -> None:
        """Release the held versions."""
        with self._changed:
            held, self.held = self.held, None
        self._let_go(held)

    def _let_go(self, *versions: LeasedVersion | None) -> None:
        for version in versions:
            if version is not None:
                version.release()
        if self.staging is not None:
            self.staging.tidy()

    def _reload(self, ready: LeasedVersion) -> dict[str, float]:
        try:
            return self.reloader.reload(ready, self.held)
        except EngineBrokenError as error:
            self._broken = str(error)
            raise
        except Exception as error:
            if self.held is None:  # there was no version to fall back to
                self._broken = f"the engine did not load its first version: {error}"
            raise
        except BaseException as error:
            self._broken = f"a load was interrupted by {type(error).__name__}"
            raise

    def _has_received(self, save_id: str) -> bool:
        """True if a broadcast has given the engine a save's weights, or later weights.

        Weights of the current trainer run are later than those of other runs.
        """
        saved = SaveId.parse(save_id)
        received = self._received
        if received is None or saved is None:
            return False
        if saved.run != received.run:
            return self.sync.current_run() == received.run
        return not saved.is_newer_than(received)

    def _adopt(self, version: LeasedVersion) -> None:
        with self._changed:
            before, self.held, self._is_elsewhere = self.held, version, self._is_late
            if self._refused is not None and self._refused[0].sequence < version.sequence:
                self._refused = None
            self._changed.notify_all()
        self._let_go(before)
        self.report()
        log.info("%s already has the weights of v%d", self.sync.name, version.sequence)

    def _refusal(self, version: Version, error: BaseException) -> RefusedError:
        what = f"v{version.sequence}" if version.sequence else f"step {version.step}"
        log.error("refusing %s: %s", what, error)
        self._refused = replace(version, is_first=not self._is_late), f"{what}: {error}"
        self.report()
        return RefusedError(error)
