"""``Pipeline``: the version that an engine serves, and its way to the next one.

The way is: lease, verify, stage, apply, report.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.fitting import named
from explorer_hooks.fast_path import ExplorerBroadcasts, Transfer
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.reload import OnRemote, RefusedError, Reloader, refuses
from explorer_hooks.staging import NotStagedError, Staging
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import EngineBrokenError, InvalidSettingsError, VerificationError
from syncd.protocol.policy import Version
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Reload

log = logging.getLogger(__name__)

#: Seconds between two looks of a thread that waits for a version to be served, at most.
_LOOK: Final = 0.1
#: Seconds between two looks whether the engine still has its version.
_STILL: Final = 2.0


class Pipeline:
    """The version that an engine serves, and its way to the next one.

    Any thread may look at what is served; one thread at a time brings the next version.

    Args:
        sync: this explorer, registered: it holds versions, and reports.
        engine: what is loaded into.
        staging: copies versions to this host first; off where the engine reads elsewhere too.
        before_load: is given the version that is about to be loaded.
        on_remote: takes versions of kind ``remote`` in place of the engine.
        fast_path: how the engine takes broadcasts; None where it takes none.

    Attributes:
        held: the version that the engine serves, held; None before the first. Where the engine has
            newer weights by a broadcast, the newest version before them, or of them.
        last: how it came to what it serves.
    """

    def __init__(
        self,
        sync: ExplorerSynchronizer,
        engine: Engine,
        *,
        staging: Staging | None,
        before_load: Callable[[LeasedVersion], object] | None,
        on_remote: OnRemote | None,
        fast_path: ExplorerBroadcasts | None = None,
    ) -> None:
        if staging is not None and not engine.is_local:
            log.warning("the engine also reads on other hosts: staging is off")
            staging = None
        self._sync = sync
        self._staging = staging
        self._fast_path = fast_path
        self.held: LeasedVersion | None = None
        self.last: Reload | None = None
        self._received: SaveId | None = None
        self._benches = False
        self._broken: str | None = None
        self._abandoned: str | None = None
        self._refused: tuple[Version, str] | None = None
        self._leaving: list[LeasedVersion] = []
        self._changed = threading.Condition()
        #: Had while versions are let go. Not the other one: storage may take for ever.
        self._letting_go = threading.RLock()
        self._reloader = Reloader(engine, on_remote)
        self._before_load = before_load
        self._looked = -math.inf
        self._is_verified = True

    # -- what the engine serves: any thread may look ---------------------------------------------

    @property
    def version(self) -> Version | None:
        """The version that the engine serves."""
        with self._changed:
            held, received = self.held, self._received
        if held is None:
            return None
        return Version(held.sequence, received.step if received else held.step)

    @property
    def fault(self) -> str | None:
        """The reason why the explorer is faulty; None while all is well."""
        return self._broken or self._abandoned

    @property
    def is_broken(self) -> bool:
        """Whether the engine's weights are unknown."""
        return self._broken is not None

    @property
    def serves_of_files(self) -> LeasedVersion | None:
        """The held version, if the engine is known to serve just that, and no broadcast."""
        with self._changed:
            return None if self._received or self._broken is not None else self.held

    @property
    def floor(self) -> Version | None:
        """What is served, or the newer one that was refused: what comes next is above it."""
        served = self.version
        if self._refused is None or (served and served.sequence > self._refused[0].sequence):
            return served
        return self._refused[0]

    @property
    def joins(self) -> bool:
        """Whether it takes part in broadcasts now.

        Not before the first version: where a broadcast leaves an engine broken, that is what it is
        given back. Nor while a step is evaluated.
        """
        fast_path = self._fast_path
        if fast_path is None or not fast_path.fits or self._benches:
            return False
        return bool(self.held) and not self.is_broken

    @contextmanager
    def hold_again(self) -> Iterator[LeasedVersion]:
        """A second lease on the version served now, independent of later versions.

        Raises:
            InvalidSettingsError: nothing is served yet.
        """
        with self._changed:  # while it cannot be let go
            held = self.held
            if held is None:
                raise InvalidSettingsError(f"{self._sync.name} serves nothing yet: pull() first")
            if self._staging is not None and held.source != held.folder:
                again = self._staging.hold_again(held)
            else:
                again = self._sync.hold(held)
        try:
            yield again
        finally:
            self._let_go(again)

    def wait(
        self, until: Callable[[Version | None], bool], timeout: float | None
    ) -> Version | None:
        """Wait until what is served is enough, or the time is up; returns what is served then.

        What ``until`` looks at besides is looked at ten times a second: a signal handler may change
        it between a look and a wait of the same thread, and must take no lock to say so.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not until(self.version) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK))
            return self.version

    def ends_bench(self) -> None:
        """What is served is a version of the job again, if it is one, and no step to evaluate."""
        held = self.held
        if self._benches and held is not None and held.sequence:
            self._benches = False
            self.report()

    def follows(self) -> None:
        """Note that a thread follows the job in the background from now on."""
        if self._abandoned is not None:
            self._abandoned = None
            self.report()

    def follows_no_more(self, why: str) -> None:
        """Note that the following thread has died."""
        with self._changed:
            self._abandoned = why
            self._changed.notify_all()
        self.report()

    def report(self) -> None:
        """Write this explorer's report; if that fails, the engine goes on serving.

        Raises:
            NameTakenError: another explorer took the name while this one counted as dead.
        """
        version = self.version
        benches = self._benches and version is not None
        try:
            self._sync.report(
                None if benches else version,
                refused=self._refused[1] if self._refused else None,
                reload=None if benches else self.last,
                bench=version.step if benches and version else None,
                fault=self.fault,
                received=str(self._received) if self._received else None,
                delta_base=self._staging.base if self._staging and not benches else None,
                workers=self._fast_path.workers if self._fast_path and self.joins else 0,
                group=self._fast_path.group if self._fast_path else None,
            )
        except OSError as error:
            log.warning("%s cannot report: %s", self._sync.name, error)

    # -- the next version: one thread at a time --------------------------------------------------

    def receive(self, transfer: Transfer) -> None:
        """Have the engine take the weights of a transfer, and report them.

        Raises:
            BroadcastError: it came to nothing; the engine is as it was.
            EngineBrokenError: what the engine serves is not known.
            Exception: what a callback raised.
        """
        held = self.held
        assert held is not None  # noqa: S101 - else it would not have joined
        try:
            begun = time.monotonic()
            if self._before_load is not None:
                self._before_load(held)
            told = Reload(
                sequence=held.sequence,
                step=transfer.save_id.step,
                prepare=time.monotonic() - begun,
            )
            told = self._reloader.receive(transfer.take, told)
        except EngineBrokenError as error:
            self._broken = str(error)
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                self._broken = f"a broadcast was interrupted by {type(error).__name__}"
            raise
        else:
            with self._changed:
                self.last, self._received = told, transfer.save_id
                self._changed.notify_all()
            log.info(
                "%s serves step %d, by broadcast, in %.3f s, with a pause of %.3f s",
                self._sync.name,
                told.step,
                told.seconds,
                told.pause,
            )
        finally:
            self.report()

    def take(self, version: Version, cancel: Cancellation, *, exactly: bool = False) -> bool:
        """Lease, verify, stage, apply and report a version.

        Args:
            version: which one.
            cancel: ends it before the engine is touched.
            exactly: whether it is loaded also where the engine has later weights.

        Returns:
            False where the engine has had its weights, or later ones of the same run, by a
            broadcast: then it is held and reported, and nothing is loaded.

        Raises:
            VersionGoneError: it was retired, or is not visible yet.
            RefusedError: it cannot be used; the engine is as it was.
            EngineBrokenError: what the engine serves is not known.
            Exception: what storage, the engine or a callback refused for this time.
        """
        try:
            leased = self._sync.hold(version)
        except VerificationError as error:
            raise self._refusal(version, error) from error
        try:
            has_received = not exactly and self._has_received(leased)
        except BaseException:
            self._let_go(leased)
            raise
        if has_received:
            self._adopt(leased)
            return False
        self._take(leased, cancel)
        return True

    def take_step(self, leased: LeasedVersion, cancel: Cancellation) -> None:
        """Verify, stage, apply and report a step that is held, to evaluate it.

        Raises:
            RefusedError, EngineBrokenError, Exception: as :meth:`take`; it is held no more.
        """
        self._take(leased, cancel, benches=True)

    def _take(self, leased: LeasedVersion, cancel: Cancellation, *, benches: bool = False) -> None:
        """Let the engine serve what is leased; if it comes to nothing, that is let go.

        With :meth:`take`, this is the order of a pull on disk. Of LATEST the version was read, and
        the lease is ``leases/VERSION/EXPLORER.SESSION``, an empty file that was created before
        ``manifest.json`` was read.
        """
        using = [leased]  # what is to be let go if it comes to nothing
        blames = True
        try:
            self._reloader.check_kind(leased)
            begun = time.monotonic()
            ready, staged, why = leased, None, None
            # Each byte is read once, and compared with the manifest; with a stage, while it is
            # copied into a draft there, which is renamed at the end.
            if self._staging is not None and leased.kind != "remote":
                try:
                    ready, staged = self._staging.stage(leased, cancel=cancel.check), True
                    using.append(ready)
                except NotStagedError as error:
                    staged, why = False, str(error)
                    log.warning(
                        "loading version %d directly from the job, without staging: %s",
                        leased.sequence,
                        why,
                    )
            if ready is leased:
                leased.verify(cancel=cancel.check)
            self._reloader.check(ready)
            verified = time.monotonic()
            blames = False  # for what work in flight ends with, no version is to blame
            if self._before_load is not None:
                self._before_load(ready)
            blames = True
            self._reloader.prepare(ready)
            cancel.check()
            told = Reload(
                sequence=leased.sequence,
                step=leased.step,
                verify=verified - begun,
                prepare=time.monotonic() - verified,
                staged=staged,
                not_staged=why,
                **(asdict(self._staging.fetched) if self._staging and staged else {}),
            )
            # From here on nothing ends it: the engine reads the files.
            told = self._reload(ready, told)
        except BaseException as error:
            self._let_go(*using)
            if blames and refuses(error):
                refusal = self._refusal(Version(leased.sequence, leased.step), error)
                if not isinstance(error, EngineBrokenError):
                    raise refusal from error
            elif self._broken is not None and isinstance(error, Exception):
                self.report()
            raise
        with self._changed:
            before, self.held, self._benches = self.held, ready, benches
            self.last, self._refused, self._broken = told, None, None
            self._received, self._is_verified = None, True
            self._changed.notify_all()
        if self._fast_path is not None:
            self._fast_path.fits = True
        if self._staging is not None:
            self._staging.serves(ready.folder)
        # Only now the leases go, by unlink: that of the version before, and that of this one if
        # the engine has a copy on this host.
        self._let_go(*([leased] if ready is not leased else []), *([before] if before else []))
        if self._staging is not None:
            self._staging.tidy()
        # explorers/EXPLORER.json: written under a temporary name, renamed.
        self.report()
        log.info(
            "%s serves %s, loaded in %.3f s, with a pause of %.3f s",
            self._sync.name,
            named(ready),
            told.seconds,
            told.pause,
        )

    def restore(self) -> None:
        """Where the engine is broken, let it serve again what it should.

        Raises:
            EngineBrokenError: it is still broken.
        """
        held = self.held
        if self._broken is None or held is None:
            return
        if not self._is_verified:
            try:
                held.verify()
                self._is_verified = True
            except (VerificationError, OSError) as error:
                raise EngineBrokenError(
                    f"{self._broken}; nor can it be given version {held.sequence}: {error}"
                ) from error
        self._reloader.restore(held)
        log.info("the engine serves version %d again", held.sequence)
        with self._changed:
            self._broken, self._received, self._is_verified = None, None, True
        self.report()

    def look(self) -> None:
        """Now and then, see whether the engine still has what it was given.

        Raises:
            EngineBrokenError: it has not; :meth:`restore` gives it that.
        """
        now = time.monotonic()
        held = self.held
        if held is None or now < self._looked + _STILL:
            return
        self._looked = now
        if not self._reloader.still_serves(held):
            self._broken = (
                f"the engine has lost version {held.sequence}: it was restarted, or cannot be "
                "reached"
            )
            self.report()
            raise EngineBrokenError(self._broken)

    def close(self) -> None:
        """Let go of what is held."""
        with self._changed:
            held, self.held = self.held, None
        if held is not None:
            self._let_go(held)
        if self._staging is not None:
            self._staging.tidy()

    def _reload(self, ready: LeasedVersion, told: Reload) -> Reload:
        try:
            return self._reloader.reload(ready, self.held, told)
        except EngineBrokenError as error:
            self._broken = str(error)
            raise
        except Exception as error:
            if self.held is None:  # nothing that it could have been given back
                self._broken = f"the engine did not take its first version: {error}"
            raise
        except BaseException as error:
            self._broken = f"a load was interrupted by {type(error).__name__}"
            raise

    def _has_received(self, version: LeasedVersion) -> bool:
        """Whether the engine has a version's weights, or later ones, by a broadcast.

        Later are those of the trainer that works now than any of trainers before it. Not those of
        one that was rolled back to: someone wants the engine to go back.
        """
        saved = SaveId.parse(version.manifest.save_id)
        received = self._received
        if received is None or saved is None or version.manifest.rolled_back is not None:
            return False
        if saved.run != received.run:
            return self._sync.current_run() == received.run
        return not saved.is_newer_than(received)

    def _adopt(self, version: LeasedVersion) -> None:
        """Hold a version that need not be loaded: what is served stays, whatever it is called."""
        with self._changed:
            before, self.held = self.held, version
            self._is_verified = False
            if self._refused is not None and self._refused[0].sequence < version.sequence:
                self._refused = None
            self._changed.notify_all()
        if before is not None:
            self._let_go(before)
        if self._staging is not None:
            self._staging.tidy()
        self.report()
        log.info("%s already has the weights of version %d", self._sync.name, version.sequence)

    def _refusal(self, version: Version, error: BaseException) -> RefusedError:
        if version.sequence:
            log.error("refusing version %d: %s", version.sequence, error)
            self._refused = version, f"version {version.sequence}: {error}"
        else:
            log.error("refusing step %d: %s", version.step, error)
            self._refused = version, f"step {version.step}: {error}"
        self.report()
        return RefusedError(error)

    def _let_go(self, *versions: LeasedVersion) -> None:
        """Release versions, and those that storage did not let go of before."""
        with self._letting_go:
            self._leaving.extend(versions)
            try:
                while self._leaving:
                    self._leaving[-1].release()
                    self._leaving.pop()
            except OSError as error:
                log.warning(
                    "keeping a lease until the next pull, because it cannot be released: %s", error
                )
