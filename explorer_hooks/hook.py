"""``ExplorerHook``: a rollout worker calls this hook between two batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, overload

from explorer_hooks.engines.base import Engine, MayBeAway, MayStartLater, TakesHubNames, WeightTaker
from explorer_hooks.pipeline import Pipeline
from explorer_hooks.puller import Follower, Puller
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.reload import (
    ExplorerBroadcasts,
    OnRemote,
    OnRemoteError,
    RefusedError,
    Reloader,
)
from explorer_hooks.staging import Staging
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.member import POLL, Doubles
from syncd.coordination.waiting import Cancellation
from syncd.protocol.errors import (
    CancelledError,
    InvalidSettingsError,
    JobUnavailableError,
    WaitTimeoutError,
)
from syncd.protocol.policy import (
    RunningStatus,
    SyncMethod,
    SyncSettings,
    SyncStyle,
    Version,
    check_step,
    check_timeout,
    explorer_sync_is_due,
    explorer_syncs,
    given_or_default,
)
from syncd.protocol.reports import Reload
from syncd.storage.fsio import Storage
from syncd.torch_extra import require_torch

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class ExplorerHook:
    """Keeps an engine on the newest weights of a job.

    Promised:

    - The engine loads only versions that were verified and that fit the engine.
    - The engine's version never goes back, except by :meth:`load_step`.
    - The version that the engine serves stays on disk until the next version is loaded.
    - A version that cannot be used is refused and reported.

    Not promised: that every version is served. The hook always loads the newest version.

    Args:
        job_dir: the job directory.
        name: this explorer's name, which must be unique in the job.
        engine: the engine to load versions into.
        settings: decide when to sync. With method ``nccl`` the engine receives broadcasts. If a
            broadcast fails, or the engine does not support broadcasts, the engine loads versions
            from files.
        staging: copies each version to this host before the load, while the engine still serves.
        memory_dir: the memory directory, which holds the versions (method ``memory``).
        before_load: called with each version before the load, to finish running requests. Before a
            broadcast it is called with the version that this explorer has leased, because the new
            weights have no version yet.
        on_remote: called with the path of each version of kind ``remote``, and with the version.
            Without it, the engine must support this kind, or these versions are refused. If
            ``on_remote`` raises EngineMismatchError, the version is refused. After any other error,
            the next pull tries the version again.
        poll: the most seconds between two checks, if the filesystem sends no events.
        storage: replaces the filesystem calls in tests.

    Raises:
        NameTakenError: a live explorer has the same name. The check can take one lease time.
        JobUnavailableError: the job directory is missing or cannot be written.
        NoRoomError: the disk of the job directory is full.
        InvalidSettingsError: the name cannot be part of a file name, or an argument has a wrong
            type.
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
        _check_arguments(engine, staging)
        self._settings, why = given_or_default("settings", SyncSettings, settings).normalised(
            lora="full" not in engine.kinds, tinker=on_remote is not None
        )
        if why is not None:
            log.warning("%s", why)
        self._engine = engine
        self._cancel = Cancellation()
        self._closed = False
        self._sync = ExplorerSynchronizer(
            job_dir,
            name,
            settings=self._settings if settings is not None else None,  # else only pull() works
            memory_dir=memory_dir,
            workers=0,  # until there is a version to fall back to
            hub_names=isinstance(engine, TakesHubNames) and engine.hub_names,
            follows_tip=staging is not None
            and memory_dir is None
            and engine.is_local
            and "full" in engine.kinds
            and staging.follows(Path(job_dir)),
            doubles=Doubles(storage=storage, poll=poll),
        )
        fast_path = None
        try:
            if self._settings.method is SyncMethod.NCCL:
                if isinstance(engine, WeightTaker):
                    fast_path = ExplorerBroadcasts(self._sync, engine)
                else:
                    log.warning(
                        "%s: the engine cannot receive broadcasts; loading versions from files",
                        name,
                    )
            self._pipeline = Pipeline(
                self._sync,
                Reloader(engine, on_remote),
                staging,
                before_load or (lambda _: None),
                fast_path,
            )
            self._sync.on_other_job = self._pipeline.changes_job
            self._puller = Puller(self._sync, self._pipeline, self._cancel, poll)
            is_away = engine.is_away if isinstance(engine, MayBeAway) else lambda: False
            self._follower = Follower(name, self._pipeline, poll, is_away)
            if isinstance(engine, MayStartLater):
                engine.on_waiting(self._pipeline.report)
            engine.attach()
            self._sync.set_explorer_status(RunningStatus.RUNNING)
        except BaseException:
            self._sync.close()
            raise

    # -- the served version ------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The version that the engine serves; None before the first pull."""
        return self._pipeline.version

    @property
    def folder(self) -> Path | None:
        """The folder that the engine's version was read from; None before the first pull.

        With a stage folder, this is the folder of the copy. After a broadcast, it stays the old
        folder until a version with the broadcast's weights is published and leased.
        """
        held = self._pipeline.held
        return held.folder if held else None

    @property
    def last(self) -> Reload | None:
        """Durations of the last load or broadcast, in seconds; None before the first load."""
        return self._pipeline.last

    @property
    def fault(self) -> str | None:
        """The reason why this explorer is faulty, e.g. a broken engine; None without a fault."""
        return self._pipeline.fault

    @property
    def synchronizer(self) -> ExplorerSynchronizer:
        """The synchronizer that registers this explorer as a participant of the job.

        Use it to save and load states, and to see the registered and the waiting participants. Do
        not use it to wait for weights, report, or set the status: the hook does this.
        """
        return self._sync

    def may_produce(self) -> bool:
        """Return True if the engine's weights are known, and fresh enough (``max_staleness``).

        Raises:
            NotFollowingError: the background thread has died.
            OSError: LATEST cannot be read.
        """
        self._follower.check()
        return self.fault is None and self._sync.may_produce()

    def get_weight(self, name: str) -> Tensor:
        """Read one tensor of the served version from its folder into host memory.

        Raises:
            InvalidSettingsError: no version is served yet, or the version has no such tensor.
            CancelledError: the hook was closed.
        """
        self._check_open()
        require_torch("ExplorerHook.get_weight")
        # Import torch only if tensors are wanted.
        from explorer_hooks.weights import WeightsReader  # noqa: PLC0415

        with self._pipeline.hold_again() as version, WeightsReader(version) as reader:
            return reader.get_weight(name)

    def state_dict_iterator(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and content of each tensor of the served version, in host memory.

        The version stays leased until the last tensor is yielded, even if the engine loads another
        one.

        Raises:
            InvalidSettingsError: no version is served yet.
            CancelledError: the hook was closed.
        """
        self._check_open()
        require_torch("ExplorerHook.state_dict_iterator")
        from explorer_hooks.weights import WeightsReader  # noqa: PLC0415 # as in get_weight

        with self._pipeline.hold_again() as version, WeightsReader(version) as reader:
            yield from reader.state_dict_iterator()

    # -- taking newer versions --------------------------------------------------------------------

    @overload
    def pull(self, timeout: Literal[0]) -> Version | None: ...

    @overload
    def pull(self, timeout: float | None = None) -> Version: ...

    def pull(self, timeout: float | None = None) -> Version | None:
        """Wait for a version that is newer than the engine's version, and load it.

        During the wait, the hook requests a sync. It repeats the request each time the trainer
        reports that it has no newer weights. ``timeout`` is in seconds; None waits without a limit.
        With 0, the hook requests no sync, and loads only a version that is published already. It
        returns None if there is no newer version, or if another thread is pulling.

        Raises:
            WaitTimeoutError: no newer version was published within a ``timeout`` above 0, or
                another thread was pulling.
            VerificationError, EngineMismatchError, or an error of the engine: the version was
                refused. The engine is unchanged, and the next pull waits for a later version.
            OSError, or an error of ``on_remote``: the engine is unchanged, and the next pull tries
                the version again.
            EngineBrokenError: the weights that the engine serves are unknown. The next pull loads a
                newer version, or else the previous version again.
            CancelledError: the hook was cancelled or closed.
            NotFollowingError: the background thread has died.
            InvalidSettingsError: a background thread follows the job (:meth:`start`).
        """
        with self._pulling(timeout):
            try:
                return self._puller.newest(math.inf if timeout is None else timeout, asks=True)
            except WaitTimeoutError:
                if timeout != 0:
                    raise
                return None

    def pull_step(self, step: int, timeout: float | None = None) -> Version:
        """Let the daemon publish a saved step as the newest version, and load that version.

        All explorers load the newest version. So call this only while no trainer and no other
        explorer runs, or if the step is the newest version already. ``timeout`` is in seconds; None
        means the settings' ``sync_timeout``.

        Raises:
            SaveNotReadyError: the step has no folder.
            SaveFailedError: the daemon has refused the save.
            InvalidSettingsError: a background thread runs; or a trainer or another explorer runs,
                and the step is not the newest version.
            WaitTimeoutError: the step was not published in time.
            Exception: for the other errors see :meth:`pull`.
        """
        with self._pulling(timeout) as seconds:
            return self._puller.step(step, seconds)

    def load_step(self, step: int, timeout: float | None = None) -> Version:
        """Load a saved step into this engine only, to evaluate it, even while a trainer runs.

        LATEST and the other explorers do not change. If the step is not published, the hook builds
        it, with sequence 0, and deletes the build after the next load, or in :meth:`close`. The
        next :meth:`pull` loads the newest version again. ``timeout`` is in seconds; None means the
        settings' ``sync_timeout``.

        Raises:
            SaveNotReadyError: the step is not on disk.
            SaveFailedError: the step cannot be built.
            NoRoomError: the disk has no room for the build.
            JobUnavailableError: no daemon has served the job.
            InvalidSettingsError: a background thread follows the job.
            WaitTimeoutError: the save was not complete in time.
            Exception: for the other errors see :meth:`pull`.
        """
        with self._pulling(timeout) as seconds:
            return self._puller.step_alone(step, seconds)

    def sync_is_due(self, step: int) -> bool:
        """Return True if :meth:`after_step` will sync. Then first let running requests finish."""
        return explorer_sync_is_due(self._settings, step)

    def after_step(self, step: int) -> Version | None:
        """Sync after a step of rollouts, if a sync is due. Return the version that is served then.

        ``step`` is the number of the last step that was begun; the first step is 1. If a background
        thread follows the job, the call returns at once.

        The hook waits until newer weights are available, the trainer reports that there are none,
        or the trainer stops. If the trainer stops while a daemon runs, the hook waits until the
        last save is published or refused. An explorer without weights waits for its first version,
        unless the trainer stops without one.

        If a version is refused or cannot be read, the hook logs and reports the error, and the
        engine keeps its weights. If the engine has lost its weights, the hook first loads them
        again.

        Raises:
            WaitTimeoutError: no event that ends the wait happened within ``sync_timeout``.
            EngineBrokenError, CancelledError, NotFollowingError: see :meth:`pull`.
            InvalidSettingsError: ``step`` is not a whole number, or :meth:`start` was not called
                with style ``fully_async``.
        """
        check_step(step)
        self._check_open()
        self._follower.check()
        if self._settings.style is SyncStyle.FULLY_ASYNC and not self._follower.is_on:
            raise InvalidSettingsError("with style fully_async, call start() before the first step")
        if self._follower.is_on or not self.sync_is_due(step):
            return self.version
        try:
            if self._waits(step):
                self._puller.after_step(self._settings.sync_timeout)
            else:  # the engine may lack versions that were published as files
                self._puller.newest_now()
        except RefusedError:
            pass  # it is in the log and in the report
        except (OSError, OnRemoteError) as error:
            log.warning("%s keeps its present weights: %s", self._sync.name, error)
        return self.version

    # -- in the background -------------------------------------------------------------------------

    def start(self) -> None:
        """Start a background thread, which loads the newest version after each publication.

        The thread requests syncs only with style ``explorer_driven``.
        :class:`~explorer_hooks.puller.Follower` lists the errors that it survives. If it dies,
        the next :meth:`pull`, :meth:`after_step`, :meth:`may_produce` or :meth:`wait_until_served`
        raises NotFollowingError, once. If the thread already runs, the call does nothing.

        Raises:
            CancelledError: the hook was cancelled or closed.
        """
        self._check_open()
        self._cancel.check()
        asks = self._settings.style is SyncStyle.EXPLORER_DRIVEN
        self._follower.start(
            lambda cancel: replace(self._puller, cancel=cancel).newest(math.inf, asks=asks)
        )
        if self._cancel.is_done:  # since the check
            self._follower.cancel()

    def stop(self) -> None:
        """End the background thread, if there is one, and wait for a load in progress."""
        self._follower.stop()

    def wait_until_served(
        self, timeout: float | None = None, *, newer_than: Version | None = None
    ) -> Version:
        """Wait until the engine serves a version, while the background thread follows the job.

        ``timeout`` is in seconds; None waits without a limit. The version must be newer than
        ``newer_than``; None accepts any version.

        Raises:
            InvalidSettingsError: :meth:`start` was not called, and the version is not served yet.
            WaitTimeoutError: the engine did not serve such a version in time.
            NotFollowingError: the background thread has died.
            CancelledError: the hook was cancelled or closed.
        """
        check_timeout(timeout)
        self._check_open()
        return self._follower.wait_until_served(timeout, newer_than, self._cancel)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End all present and future pulls. Any thread or signal handler may call this."""
        self._cancel.cancel()
        self._follower.cancel()

    def close(self) -> None:
        """End pulls in other threads, release the version, and report that this explorer stopped.

        First stop every reader of the version's folder. You can call this method twice. In a forked
        process it does nothing.

        Raises:
            Exception: the engine could not be closed. Everything else is closed nevertheless.
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
            if self._pipeline.fast_path is not None:
                stack.callback(self._pipeline.fast_path.engine.leave)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError(
                f"the ExplorerHook {self._sync.name} is closed, and loads no more versions. "
                "Make a new ExplorerHook"
            )

    @contextmanager
    def _pulling(self, timeout: float | None) -> Iterator[float]:
        """Check that this thread can pull; yield the timeout of a step, in seconds."""
        check_timeout(timeout)
        self._check_open()
        self._follower.check_off()
        try:
            yield self._settings.sync_timeout if timeout is None else timeout
        except (RefusedError, OnRemoteError) as refused:
            raise refused.error from refused.error.__cause__

    def _waits(self, step: int) -> bool:
        if self._pipeline.fast_path is None:
            return True
        try:
            # Without a trainer the policy does not wait, not even for the first weights.
            self._sync.wait_for_trainer(self._pipeline.floor, cancel=self._cancel)
            requires = self._sync.trainer_requires_weight_sync()
        except JobUnavailableError:
            return True  # the sync itself waits until the job is available again
        return explorer_syncs(self._settings, step, trainer_requires_sync=requires)


def _check_arguments(engine: object, staging: object) -> None:
    missing = [name for name in vars(Engine) if name[0] != "_" and not hasattr(engine, name)]
    is_class = isinstance(engine, type)
    if is_class or missing:
        why = "it is a class" if is_class else f"it has no {missing[0]}"
        kind = getattr(engine, "__name__", type(engine).__name__)
        raise InvalidSettingsError(
            f"engine is {kind}, which is not an engine, because {why}. Pass TorchModule(model) "
            "for a model in this process, or another engine of docs/engines.md"
        )
    if staging is not None and not isinstance(staging, Staging):
        raise InvalidSettingsError(
            f"staging is {staging!r}: it must be a Staging, such as Staging('/dev/shm')"
        )
