"""``ExplorerHook``: what a rollout worker calls between its batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from explorer_hooks.background import Follower
from explorer_hooks.engines.base import Engine, WeightTaker
from explorer_hooks.fast_path import FastPath
from explorer_hooks.pipeline import Pipeline
from explorer_hooks.pulling import Puller
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.reload import OnRemote, RefusedError
from explorer_hooks.staging import Staging
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.member import POLL, Seams
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError, WaitTimeoutError
from syncd.protocol.policy import (
    RunningStatus,
    SyncMethod,
    SyncSettings,
    SyncStyle,
    Version,
    explorer_sync_is_due,
    explorer_syncs,
)
from syncd.protocol.reports import Reload
from syncd.storage.fsio import Storage

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class ExplorerHook:
    """Keeps an engine on the newest weights of a job.

    Promised: the engine is touched only by versions that were verified and fit; its version never
    goes back; the version that it serves stays on disk until the next one is applied, so that an
    engine may restart from that folder. A version that cannot be used is refused and reported. The
    name is no other live explorer's. Not promised: that every version is served; only ever the
    newest is.

    Args:
        job_dir: the job directory.
        name: this explorer's, unique in the job.
        engine: what to load into.
        settings: who syncs when. With method ``nccl`` an engine that can takes broadcasts, and
            versions where these fail; any other follows the versions.
        staging: copies versions to this host first, while the engine still serves.
        memory_dir: the second job directory, where versions are (method ``memory``).
        before_load: is given the version that is about to be loaded, to finish work in flight;
            before a broadcast, whose weights have no version yet, the newest one that is held.
        on_remote: is given the path of each version of kind ``remote``, and the version; without,
            such versions are refused, unless the engine takes them.
        poll: seconds between two looks where the filesystem sends no events, at most.
        storage: the seam for tests.

    Raises:
        NameTakenError: a live explorer has the name; to know may take a lease time.
        JobUnavailableError: the job directory is missing or cannot be written.
        InvalidSettingsError: the name cannot be part of a file name.
    """

    def __init__(
        self,
        job_dir: str | Path,
        name: str,
        engine: Engine,
        *,
        settings: SyncSettings | None = None,
        staging: Staging | None = None,
        memory_dir: str | Path | None = None,
        before_load: Callable[[LeasedVersion], object] | None = None,
        on_remote: OnRemote | None = None,
        poll: float = POLL,
        storage: Storage | None = None,
    ) -> None:
        self._settings, why = (settings or SyncSettings()).normalised(
            lora="full" not in engine.kinds, tinker=on_remote is not None
        )
        settings = self._settings
        if why is not None:
            log.warning("%s", why)
        self._engine = engine
        self._cancel = Cancellation()
        self._closed = False
        self._sync = ExplorerSynchronizer(
            job_dir,
            name,
            settings=settings,
            memory_dir=memory_dir,
            workers=0,  # until there is something to go back to
            seams=Seams(storage=storage, poll=poll),
        )
        self._fast_path: FastPath | None = None
        try:
            if settings.method is SyncMethod.NCCL:
                if isinstance(engine, WeightTaker):
                    self._fast_path = FastPath(self._sync, engine)
                else:
                    log.warning("%s: its engine takes no broadcasts, but versions alone", name)
            self._pipeline = Pipeline(
                self._sync,
                engine,
                staging=staging,
                before_load=before_load,
                on_remote=on_remote,
                fast_path=self._fast_path,
            )
            self._puller = Puller(self._sync, self._pipeline, self._fast_path, self._cancel, poll)
            self._follower = Follower(name, self._pipeline, poll)
            engine.attach()
            self._sync.set_explorer_status(RunningStatus.RUNNING)
        except BaseException:
            self._sync.close()
            raise

    # -- what it serves --------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """What the engine serves; None before the first pull."""
        return self._pipeline.version

    @property
    def folder(self) -> Path | None:
        """The folder that the engine's version was read from; it stays until the next is applied.

        With a stage folder, that of the copy. After a broadcast, that of the newest version that
        was published by then, or of the broadcast's own weights.
        """
        held = self._pipeline.held
        return held.folder if held else None

    @property
    def last(self) -> Reload | None:
        """How long the last reload took, and its pause; None before the first."""
        return self._pipeline.last

    @property
    def fault(self) -> str | None:
        """Why this explorer cannot be relied on; None while all is well."""
        return self._pipeline.fault

    @property
    def synchronizer(self) -> ExplorerSynchronizer:
        """What this hook is registered by: who else there is, and what is needed to resume."""
        return self._sync

    def may_produce(self) -> bool:
        """Whether what the engine serves is known, and fresh enough (``max_staleness``).

        Raises:
            NotFollowingError: what followed in the background has ended.
            OSError: LATEST cannot be read.
        """
        self._follower.check()
        return self.fault is None and self._sync.may_produce()

    def get_weight(self, name: str) -> Tensor:
        """One tensor of the version that is served, from its folder, in host memory.

        Raises:
            InvalidSettingsError: nothing is served yet, or there is no such tensor.
        """
        # Torch is imported by those alone who want tensors.
        from explorer_hooks.weights import WeightsReader  # noqa: PLC0415

        with self._pipeline.hold_again() as version, WeightsReader(version) as reader:
            return reader.get_weight(name)

    def state_dict_iterator(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the version that is served now, one at a time, in host memory.

        The version is held from the first one to the last, whatever is served meanwhile.

        Raises:
            InvalidSettingsError: nothing is served yet.
        """
        from explorer_hooks.weights import WeightsReader  # noqa: PLC0415 # as above

        with self._pipeline.hold_again() as version, WeightsReader(version) as reader:
            yield from reader.state_dict_iterator()

    # -- taking what is newer --------------------------------------------------------------------

    def pull(self, timeout: float | None = None) -> Version:
        """Wait for a newer version than the engine has, and load it.

        A sync is required meanwhile, and again whenever the trainer says that it has nothing newer.

        Args:
            timeout: seconds to wait for one; 0 to take what is there now, and require nothing; None
                for as long as it takes.

        Returns:
            The version that the engine serves now.

        Raises:
            WaitTimeoutError: nothing newer came in time, or another thread pulled all the time; the
                engine is as it was.
            VerificationError, EngineMismatchError, or what the engine raises: the version was
                refused; the engine is as it was. The next pull waits for one above it.
            OSError: storage failed; the engine is as it was, and the next pull tries again.
            EngineBrokenError: what the engine serves is not known; the next pull gives it what is
                newer, or else tries to give it back what it had.
            CancelledError: the hook was closed by another thread.
            NotFollowingError: what followed in the background has ended.
            InvalidSettingsError: something follows in the background.
        """
        self._follower.check_off()
        try:
            return self._puller.newest(timeout, asks=True, cancel=self._cancel)
        except RefusedError as refused:
            raise refused.error from refused.error.__cause__

    def pull_step(self, step: int, timeout: float | None = None) -> Version:
        """Have a step that is on disk published, and load it: to evaluate it. No trainer may work.

        Args:
            step: the step.
            timeout: seconds until it must be published; the settings' ``sync_timeout`` by default.

        Raises:
            SaveFailedError: the daemon has refused the save.
            InvalidSettingsError: a trainer works, or something follows in the background.
            WaitTimeoutError, or as :meth:`pull`.
        """
        self._follower.check_off()
        seconds = self._settings.sync_timeout if timeout is None else timeout
        try:
            return self._puller.step(step, seconds)
        except RefusedError as refused:
            raise refused.error from refused.error.__cause__

    def sync_is_due(self, step: int) -> bool:
        """Whether :meth:`after_step` will sync: what is in flight should be finished by then."""
        return explorer_sync_is_due(self._settings, step)

    def after_step(self, step: int) -> Version | None:
        """Sync after a step of rollouts, if it is due by the settings.

        It waits until the trainer has something newer, or says that it has not, or stops. What is
        refused, or cannot be read now, is in the log and the report, and the engine goes on with
        what it has; one that has lost that (a server that was restarted) is given it again first.
        Under ``fully_async`` :meth:`start` does all of it.

        Args:
            step: the last step that was begun, counted from 1.

        Returns:
            The version that the engine serves now; None before the first.

        Raises:
            WaitTimeoutError: none of that within ``sync_timeout``.
            EngineBrokenError, CancelledError, NotFollowingError: as :meth:`pull`.
            InvalidSettingsError: ``fully_async``, and nothing follows.
        """
        self._follower.check()
        if self._settings.style is SyncStyle.FULLY_ASYNC and not self._follower.is_on:
            raise InvalidSettingsError("style fully_async: call start() before the first step")
        if self._follower.is_on or not self.sync_is_due(step):
            return self.version
        waits = True
        try:
            if waits := self._waits(step):
                self._puller.sync(self._settings.sync_timeout)
            else:  # what it has missed may be there as files
                self._puller.what_is_there()
        except RefusedError:
            pass  # it is in the log and in the report
        except WaitTimeoutError:
            if waits:
                raise
        except OSError as error:
            log.warning("%s goes on with what it has: %s", self._sync.name, error)
        return self.version

    # -- in the background -------------------------------------------------------------------------

    def start(self) -> None:
        """Follow the job in a thread of its own: take each newest version as it comes.

        A sync is required only under ``explorer_driven``. What it meets is said at
        :func:`~explorer_hooks.background.follow`; its death is raised by the next call of
        :meth:`pull`, :meth:`after_step`, :meth:`may_produce` or :meth:`wait_until_served`, once.
        Does nothing where it follows already.
        """
        self._cancel.check()
        asks = self._settings.style is SyncStyle.EXPLORER_DRIVEN
        self._follower.start(lambda cancel: self._puller.newest(None, asks=asks, cancel=cancel))

    def stop(self) -> None:
        """End the thread; a load that it is in is waited for. Safe to call without one."""
        self._follower.stop()

    def wait_until_served(
        self, timeout: float | None = None, *, newer_than: Version | None = None
    ) -> Version:
        """Wait until the engine serves a version, while something follows.

        Args:
            timeout: seconds; None for as long as it takes.
            newer_than: a version that is not enough.

        Raises:
            WaitTimeoutError: it does not in time.
            NotFollowingError: what followed has ended.
            CancelledError: the hook was cancelled, or closed.
        """
        return self._follower.wait_until_served(timeout, newer_than, self._cancel)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End all pulls, now and from now on; from any thread, or a signal handler."""
        self._cancel.cancel()
        self._follower.cancel()

    def close(self) -> None:
        """End pulls in other threads, let the version go, and say that this explorer has stopped.

        Safe to call twice, and in a fork, where it does nothing. Whoever reads the version's folder
        must have stopped.

        Raises:
            Exception: what the engine raises; all else is closed all the same.
        """
        if self._closed or not self._sync.is_ours:
            return
        self.cancel()
        self.stop()
        with self._puller.lock, ExitStack() as stack:
            self._closed = True
            stack.callback(self._sync.close)
            stack.callback(self._pipeline.close)
            stack.callback(self._engine.close)
            if self._fast_path is not None:
                stack.callback(self._fast_path.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _waits(self, step: int) -> bool:
        """Whether a sync that is due is waited for: of broadcasts the trainer may decide."""
        if self._fast_path is None:
            return True
        try:
            requires = self._sync.trainer_requires_weight_sync()
        except JobUnavailableError:
            return True  # and so is the job
        return explorer_syncs(self._settings, step, trainer_requires_sync=requires)
