"""From a version that was published to one that is served: lease, verify, stage, apply, report."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

from explorer_hooks.engines.base import Engine
from explorer_hooks.fast_path import FastPath, Transfer
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.reload import OnRemote, RefusedError, Reloader, refuses
from explorer_hooks.serving import Serving
from explorer_hooks.staging import NotStagedError, Staging
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import EngineBrokenError, VerificationError
from syncd.protocol.policy import Version
from syncd.protocol.records import SaveId
from syncd.protocol.reports import Reload

log = logging.getLogger(__name__)

#: Seconds between two looks whether the engine still has its version.
_STILL: Final = 5.0


class Pipeline(Serving):
    """How an engine comes to the next version. One thread at a time brings it.

    Args:
        sync: this explorer, registered: it holds versions, and reports.
        engine: what is loaded into.
        staging: copies versions to this host first; off where the engine reads elsewhere too.
        before_load: is given the version that is about to be loaded.
        on_remote: takes versions of kind ``remote`` in place of the engine.
        fast_path: how the engine takes broadcasts; None where it takes none.
    """

    def __init__(
        self,
        sync: ExplorerSynchronizer,
        engine: Engine,
        *,
        staging: Staging | None,
        before_load: Callable[[LeasedVersion], object] | None,
        on_remote: OnRemote | None,
        fast_path: FastPath | None = None,
    ) -> None:
        if staging is not None and not engine.is_local:
            log.warning("the engine does not read on this host alone: nothing is staged")
            staging = None
        super().__init__(sync, staging, fast_path)
        self._reloader = Reloader(engine, on_remote)
        self._before_load = before_load
        self._looked = -math.inf
        self._is_verified = True

    def receive(self, transfer: Transfer) -> None:
        """Let the engine take the weights of a transfer, and report them.

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
                self._broken = f"a broadcast was cut off by {type(error).__name__}"
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
        using = [leased]  # what is to be let go where it comes to nothing
        blames = True
        try:
            ready, told = self._ready(leased, cancel)
            using = [leased, ready] if ready is not leased else using
            blames = False  # for what work in flight ends with, no version is to blame
            begun = time.monotonic()
            if self._before_load is not None:
                self._before_load(ready)
            blames = True
            self._reloader.prepare(ready)
            cancel.check()
            told = told.model_copy(update={"prepare": time.monotonic() - begun})
            told = self._reload(ready, told)
        except BaseException as error:
            self._let_go(*using)
            if blames and refuses(error):
                refusal = self._refusal(version, error)
                if not isinstance(error, EngineBrokenError):
                    raise refusal from error
            elif self._broken is not None and isinstance(error, Exception):
                self.report()
            raise
        self._served(leased, ready, told)
        return True

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
                f"the engine has lost version {held.sequence}: it was restarted, or is away"
            )
            self.report()
            raise EngineBrokenError(self._broken)

    def _ready(self, leased: LeasedVersion, cancel: Cancellation) -> tuple[LeasedVersion, Reload]:
        """Verify, stage and check: the version as it is to be loaded, and what that took."""
        self._reloader.check_kind(leased)
        begun = time.monotonic()
        ready, staged, why = leased, None, None
        if self._staging is not None and leased.kind != "remote":
            try:
                ready, staged = self._staging.stage(leased, cancel=cancel.check), True
            except NotStagedError as error:
                staged, why = False, str(error)
                log.warning("version %d is loaded from where it is: %s", leased.sequence, why)
        try:
            if ready is leased:
                leased.verify(cancel=cancel.check)
            self._reloader.check(ready)
        except BaseException:
            if ready is not leased:
                self._let_go(ready)
            raise
        return ready, Reload(
            sequence=leased.sequence,
            step=leased.step,
            verify=time.monotonic() - begun,
            staged=staged,
            not_staged=why,
        )

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
            self._broken = f"a load was cut off by {type(error).__name__}"
            raise

    def _served(self, leased: LeasedVersion, ready: LeasedVersion, told: Reload) -> None:
        with self._changed:
            before, self.held = self.held, ready
            self.last, self._refused, self._broken = told, None, None
            self._received, self._is_verified = None, True
            self._changed.notify_all()
        if self._fast_path is not None:
            self._fast_path.fits = True
        if self._staging is not None:
            self._staging.serves(ready.folder)
        # A copy on this host needs no lease.
        self._let_go(*([leased] if ready is not leased else []), *([before] if before else []))
        if self._staging is not None:
            self._staging.tidy()
        self.report()
        log.info(
            "%s serves version %d (step %d), loaded in %.3f s, with a pause of %.3f s",
            self._sync.name,
            told.sequence,
            told.step,
            told.seconds,
            told.pause,
        )

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
        log.info("%s has the weights of version %d already", self._sync.name, version.sequence)

    def _refusal(self, version: Version, error: BaseException) -> RefusedError:
        log.error("version %d is refused: %s", version.sequence, error)
        self._refused = version, f"version {version.sequence}: {error}"
        self.report()
        return RefusedError(error)
