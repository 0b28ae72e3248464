"""``ExplorerHook``: a rollout worker calls it between its batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from explorer_hooks.background import Follower
from explorer_hooks.engines.base import Engine, MayBeAway, MayStartLater, TakesHubNames, WeightTaker
from explorer_hooks.fast_path import ExplorerBroadcasts
from explorer_hooks.pipeline import Pipeline
from explorer_hooks.puller import Puller
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.reload import OnRemote, OnRemoteError, RefusedError
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
    check_step,
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

    - The engine loads only versions that were verified and that fit it.
    - Its version never goes back, except by :meth:`load_step`.
    - The version that it serves stays on disk until the next one is applied, so the engine may
      restart from that folder.
    - A version that cannot be used is refused and reported.
    - No other live explorer has the name.

    Not promised: that every version is served, because the hook always takes the newest one.

    Args:
        job_dir: the job directory.
        name: this explorer's name, unique in the job.
        engine: the engine to load versions into.
        settings: who syncs when. With method ``nccl`` an engine that supports broadcasts takes
            them, and loads versions if they fail. Any other engine follows the versions.
        staging: copies versions to this host first, while the engine still serves.
        memory_dir: the second job directory, which holds the versions (method ``memory``).
        before_load: called with the version before it is loaded, so that you can finish running
            requests. Before a broadcast, whose weights have no version yet, it gets the newest
            version that is held.
        on_remote: called with the path of each version of kind ``remote``, and the version. Without
            it such versions are refused, unless the engine takes them. If it raises an
            EngineMismatchError the version is refused; after any other error it is tried again.
        poll: the most seconds between two looks, if the filesystem sends no events.
        storage: the seam for tests.

    Raises:
        NameTakenError: a live explorer has the name; finding out may take a lease time.
        JobUnavailableError: the job directory is missing or cannot be written.
        NoRoomError: its disk is full.
        InvalidSettingsError: the name cannot be part of a file name, or an argument has a wrong
            type, for example a model without an engine around it.
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
        given, settings = settings, self._settings
        if why is not None:
            log.warning("%s", why)
        self._engine = engine
        self._cancel = Cancellation()
        self._closed = False
        self._sync = ExplorerSynchronizer(
            job_dir,
            name,
            settings=settings if given is not None else None,  # without them only pull() works
            memory_dir=memory_dir,
            workers=0,  # until there is a version to fall back to
            hub_names=isinstance(engine, TakesHubNames) and engine.hub_names,
            seams=Seams(storage=storage, poll=poll),
        )
        self._fast_path: ExplorerBroadcasts | None = None
        try:
            if settings.method is SyncMethod.NCCL:
                if isinstance(engine, WeightTaker):
                    self._fast_path = ExplorerBroadcasts(self._sync, engine)
                else:
                    log.warning(
                        "%s: its engine takes no broadcasts; loading versions from the files", name
                    )
            self._pipeline = Pipeline(
                self._sync,
                engine,
                staging=staging,
                before_load=before_load,
                on_remote=on_remote,
                fast_path=self._fast_path,
            )
            self._puller = Puller(self._sync, self._pipeline, self._fast_path, self._cancel, poll)
            is_away = engine.is_away if isinstance(engine, MayBeAway) else lambda: False
            self._follower = Follower(name, self._pipeline, poll, is_away)
            if isinstance(engine, MayStartLater):
                engine.on_waiting(self._say_starting)
            engine.attach()
            self._sync.set_explorer_status(RunningStatus.RUNNING)
        except BaseException:
            self._sync.close()
            raise

    # -- the served version
    # --------------------------------------------------------------------------

    @property
    def version(self) -> Version | None:
        """The version that the engine serves; None before the first pull."""
        return self._pipeline.version

    @property
    def folder(self) -> Path | None:
        """The folder that the engine's version was read from; it stays until the next is applied.

        With a stage folder it is the copy's folder. After a broadcast it is the folder of the
        newest version that was published by then, or of the broadcast's own weights.
        """
        held = self._pipeline.held
        return held.folder if held else None

    @property
    def last(self) -> Reload | None:
        """Duration and pause of the last load, in seconds; None before the first."""
        return self._pipeline.last

    @property
    def fault(self) -> str | None:
        """The reason why this explorer is faulty; None while all is well."""
        return self._pipeline.fault

    @property
    def synchronizer(self) -> ExplorerSynchronizer:
        """The participant that this hook is registered as.

        Use it for saved states (``save_state``, ``load_state``), and to see which participants are
        there and which wait (``modules``, ``get_trainer_status``, ``trainer_requires_weight_sync``,
        ``get_explorer_status_counts``). The hook itself waits for weights, reports, and sets the
        status.
        """
        return self._sync

    def may_produce(self) -> bool:
        """Whether the engine's weights are known, and fresh enough (``max_staleness``).

        Raises:
            NotFollowingError: the background thread has died.
            OSError: LATEST cannot be read.
        """
        self._follower.check()
        return self.fault is None and self._sync.may_produce()

    def get_weight(self, name: str) -> Tensor:
        """One tensor of the version that is served, from its folder, in host memory.

        Raises:
            InvalidSettingsError: nothing is served yet, or there is no such tensor.
        """
        require_torch("ExplorerHook.get_weight")
        # Import torch only if tensors are wanted.
        from explorer_hooks.weights import WeightsReader  # noqa: PLC0415

        with self._pipeline.hold_again() as version, WeightsReader(version) as reader:
            return reader.get_weight(name)

    def state_dict_iterator(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the version that is served now, one at a time, in host memory.

        The version is held from the first tensor to the last, even if the engine changes meanwhile.

        Raises:
            InvalidSettingsError: nothing is served yet.
        """
        require_torch("ExplorerHook.state_dict_iterator")
        from explorer_hooks.weights import WeightsReader  # noqa: PLC0415 # as above

        with self._pipeline.hold_again() as version, WeightsReader(version) as reader:
            yield from reader.state_dict_iterator()

    # -- taking newer versions --------------------------------------------------------------------

    def pull(self, timeout: float | None = None) -> Version:
        """Wait for a newer version than the engine has, and load it.

        It asks for a sync meanwhile, and again each time the trainer says that it has nothing
        newer.

        Args:
            timeout: seconds to wait for one; 0 to take only a version that is there now, without
                asking for a sync; None to wait without a limit.

        Returns:
            The version that the engine serves now.

        Raises:
            WaitTimeoutError: no newer version came in time, or another thread was pulling all the
                time; the engine is as it was.
            VerificationError, EngineMismatchError, or an error of the engine: the version was
                refused; the engine is as it was. The next pull waits for a later one.
            OSError, or an error of ``on_remote``: storage or the callback failed; the engine is as
                it was, and the next pull tries again.
            EngineBrokenError: the weights that the engine serves are unknown. The next pull loads a
                newer version, or else tries to load the previous one again.
            CancelledError: the hook was closed by another thread.
            NotFollowingError: the background thread has died.
            InvalidSettingsError: a thread follows in the background.
        """
        self._follower.check_off()
        try:
            return self._puller.newest(timeout, asks=True, cancel=self._cancel)
        except (RefusedError, OnRemoteError) as refused:
            raise refused.error from refused.error.__cause__

    def pull_step(self, step: int, timeout: float | None = None) -> Version:
        """Have a saved step published as the newest version, and load it.

        Every explorer of the job then loads the step, so no trainer and no other explorer may work.
        Use :meth:`load_step` to change this explorer alone.

        Args:
            step: the step.
            timeout: seconds until it must be published; the settings' ``sync_timeout`` by default.

        Raises:
            SaveNotReadyError: the step has no folder; the message says which steps have.
            SaveFailedError: the daemon has refused the save.
            InvalidSettingsError: a trainer or another explorer works, or a thread follows in the
                background.
            WaitTimeoutError, or as :meth:`pull`.
        """
        return self._step(self._puller.step, step, timeout)

    def load_step(self, step: int, timeout: float | None = None) -> Version:
        """Load a saved step into this engine only, to evaluate it.

        LATEST and the other explorers stay as they are; a trainer may work. A step that is
        published already is leased. Otherwise the daemon builds it for this explorer, and deletes
        the build once the next step or version is loaded, or the hook is closed. The next
        :meth:`pull` takes the newest version again, if the engine does not serve it.

        Args:
            step: the step.
            timeout: seconds until it must be built; the settings' ``sync_timeout`` by default.

        Returns:
            The version that the engine serves now; its sequence is 0 if the step is no published
            version.

        Raises:
            SaveNotReadyError: the step is not on disk; the message lists those that are.
            SaveFailedError: the daemon cannot build it; the message has the reason.
            JobUnavailableError: the daemon is of a release that builds no steps.
            InvalidSettingsError: a thread follows in the background.
            WaitTimeoutError, or as :meth:`pull`.
        """
        return self._step(self._puller.step_alone, step, timeout)

    def sync_is_due(self, step: int) -> bool:
        """Whether :meth:`after_step` will sync: finish running requests before you call it."""
        return explorer_sync_is_due(self._settings, step)

    def after_step(self, step: int) -> Version | None:
        """Sync after a step of rollouts, if it is due by the settings.

        It waits until the trainer has something newer, says that it has nothing newer, or stops. If
        the trainer stops and a daemon works, it waits until the last save is published or refused.
        An explorer without weights first waits for a version, or for a trainer to come. A version
        that is refused, or cannot be read now, is in the log and the report, and the engine keeps
        its weights. An engine that lost its weights (a restarted server) first gets them back.
        Under ``fully_async`` :meth:`start` does all of it.

        Args:
            step: the last step that was begun, counted from 1.

        Returns:
            The version that the engine serves now; None before the first.

        Raises:
            WaitTimeoutError: none of these events came within ``sync_timeout``.
            EngineBrokenError, CancelledError, NotFollowingError: as :meth:`pull`.
            InvalidSettingsError: ``fully_async``, and :meth:`start` was not called; or the step is
                not a whole number.
        """
        check_step(step)
        self._follower.check()
        if self._settings.style is SyncStyle.FULLY_ASYNC and not self._follower.is_on:
            raise InvalidSettingsError("style fully_async: call start() before the first step")
        if self._follower.is_on or not self.sync_is_due(step):
            return self.version
        waits = True
        try:
            if waits := self._waits(step):
                self._puller.sync(self._settings.sync_timeout)
            else:  # it may have missed versions that were published as files
                self._puller.what_is_there()
        except RefusedError:
            pass  # it is in the log and in the report
        except WaitTimeoutError:
            if waits:
                raise
        except (OSError, OnRemoteError) as error:
            log.warning("%s keeps its present weights: %s", self._sync.name, error)
        return self.version

    # -- in the background -------------------------------------------------------------------------

    def start(self) -> None:
        """Follow the job in a background thread, which takes each newest version as it comes.

        Only ``explorer_driven`` asks for syncs. See :func:`~explorer_hooks.background.follow` for
        the errors that the thread survives. If it dies, the next call of :meth:`pull`,
        :meth:`after_step`, :meth:`may_produce` or :meth:`wait_until_served` raises, once.
        Does nothing if a thread follows already.
        """
        self._cancel.check()
        asks = self._settings.style is SyncStyle.EXPLORER_DRIVEN
        self._follower.start(lambda cancel: self._puller.newest(None, asks=asks, cancel=cancel))

    def stop(self) -> None:
        """End the thread, and wait for a load in progress. Safe to call without one."""
        self._follower.stop()

    def wait_until_served(
        self, timeout: float | None = None, *, newer_than: Version | None = None
    ) -> Version:
        """Wait until the engine serves a version, while a thread follows the job.

        Args:
            timeout: seconds; None to wait without a limit.
            newer_than: wait for a version newer than this one.

        Raises:
            InvalidSettingsError: the engine serves none, and :meth:`start` was not called.
            WaitTimeoutError: it serves none in time.
            NotFollowingError: the background thread has died.
            CancelledError: the hook was cancelled, or closed.
        """
        return self._follower.wait_until_served(timeout, newer_than, self._cancel)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End all pulls, present and future; from any thread, or a signal handler."""
        self._cancel.cancel()
        self._follower.cancel()

    def close(self) -> None:
        """End pulls in other threads, release the version, and report that this explorer stopped.

        Safe to call twice, and in a fork, where it does nothing. Stop every reader of the version's
        folder before.

        Raises:
            Exception: an error of the engine; everything else is closed nevertheless.
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

    def _say_starting(self, why: str) -> None:
        try:
            self._sync.report(None, starting=why)
        except OSError as error:
            log.warning("%s cannot report that it is starting: %s", self._sync.name, error)

    def _step(
        self, take: Callable[[int, float], Version], step: int, timeout: float | None
    ) -> Version:
        self._follower.check_off()
        seconds = self._settings.sync_timeout if timeout is None else timeout
        try:
            return take(step, seconds)
        except (RefusedError, OnRemoteError) as refused:
            raise refused.error from refused.error.__cause__

    def _waits(self, step: int) -> bool:
        """Whether to wait for a sync that is due: for broadcasts the trainer may decide."""
        if self._fast_path is None:
            return True
        try:
            # Without a trainer the policy does not wait, not even for the first weights.
            self._sync.wait_for_trainer(self._pipeline.floor, cancel=self._cancel)
            requires = self._sync.trainer_requires_weight_sync()
        except JobUnavailableError:
            return True  # and so is the job
        return explorer_syncs(self._settings, step, trainer_requires_sync=requires)


def _check_arguments(engine: object, staging: object) -> None:
    """Check the arguments before the name is claimed.

    Raises:
        InvalidSettingsError: one is wrong; the message says what to give.
    """
    missing = [name for name in vars(Engine) if name[0] != "_" and not hasattr(engine, name)]
    is_class = isinstance(engine, type)
    if is_class or missing:
        why = "it is a class" if is_class else f"it has no {missing[0]}"
        kind = getattr(engine, "__name__", type(engine).__name__)
        raise InvalidSettingsError(
            f"engine is {kind}, which is not an engine ({why}): give TorchModule(model) for a "
            "model of this process, or another engine of docs/engines.md"
        )
    if staging is not None and not isinstance(staging, Staging):
        raise InvalidSettingsError(
            f"staging is {staging!r}: it must be a Staging, such as Staging('/dev/shm')"
        )
