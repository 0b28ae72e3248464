"""``SyncdCheckpointEngine``: verl's weights as versions of a job, on both of verl's sides."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import xxhash
from torch import Tensor

from explorer_hooks.reader import LeasedVersion, Reader
from explorer_hooks.staging import NotStagedError, Staging
from explorer_hooks.weights import WeightsReader
from syncd.closing import Closing
from syncd.coordination.leased_version import read_latest
from syncd.protocol.errors import InvalidSettingsError, SaveFailedError, VersionGoneError
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.storage.job import Job
from trainer_hooks.stream import WeightStream

log = logging.getLogger(__name__)

#: The version that was sent: the key of its sequence in what :meth:`send_weights` returns.
VERSION: Final = "sync/version"


class SyncdCheckpointEngine(Closing):
    """Sends weights on a rank of verl's trainer, or receives them in a worker of a rollout.

    It has the methods of verl's ``CheckpointEngine``, and imports nothing of verl. verl passes
    ``bucket_size`` and ``is_master``, which files do not need; users give the rest as
    ``engine_kwargs.syncd``.

    Args:
        job_dir: the job directory, an existing folder that all hosts share.
        stage: a folder of each rollout's host, for example in ``/dev/shm``; workers of a host share
            one copy of each version there. None reads the versions themselves.
        stage_bytes: the most bytes of all copies in this folder.
        model_files: see :class:`.WeightStream`; None publishes only weights.
        timeout: seconds; the limit of a save, of its publication, and of a wait for its version.

    Raises:
        InvalidSettingsError: an argument cannot be used.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        job_dir: str | Path,
        *,
        bucket_size: int = 0,  # noqa: ARG002
        is_master: bool = False,  # noqa: ARG002
        stage: str | Path | None = None,
        stage_bytes: int | None = None,
        model_files: str | Path | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._job_dir = Path(job_dir)
        self._settings = SyncSettings(save_timeout=timeout, sync_timeout=timeout)
        self._model_files = model_files
        self._stream: WeightStream | None = None
        self._step = -1
        self._staging = Staging(stage, stage_bytes) if stage is not None else None
        self._reader: Reader | None = None
        self._floor = 0
        self._next: LeasedVersion | None = None
        self._loaded: list[LeasedVersion] = []  # the last one is served

    def prepare(self) -> dict[str, Any]:
        """Note the newest version: :meth:`receive_weights` waits for a newer one."""
        latest = read_latest(Job.at(self._job_dir.absolute()))
        self._floor = latest.sequence if latest is not None else 0
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,  # noqa: ARG003
        rollout_world_size: int,  # noqa: ARG003
        metadata: list[dict[str, Any]],  # noqa: ARG003
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no arguments: trainer and rollouts meet only in the job's folder."""
        return {}, {}

    def init_process_group(self) -> None:
        """Do nothing."""

    # -- on each rank of the trainer ---------------------------------------------------------------

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Save this rank's part of the weights; return when they are a version. Collective.

        All ranks get the same whole tensors in the same order, as verl's engines yield them, and
        each copies some of them. On rank 0 the result has the version's sequence.

        Raises:
            SaveFailedError: a rank failed, or the daemon refuses the save.
            WaitTimeoutError: the version did not come in time.
        """
        ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._stream is None:
            self._stream = WeightStream(
                self._job_dir,
                rank=ranks[0],
                world_size=ranks[1],
                model_files=self._model_files,
                settings=self._settings,
            )
        self._step = self._step + 1 if global_steps is None else global_steps
        try:
            metrics = self._stream.save(self._step, stripe(weights, *ranks, _compare))
        except BaseException:
            with suppress(SaveFailedError):  # else the next send would raise it
                self._stream.wait()
            raise
        self._stream.wait()
        if ranks[0] == 0:
            metrics[VERSION] = float(self._stream.wait_published().sequence)
        return metrics

    # -- in each worker of a rollout ---------------------------------------------------------------

    def stage(self, sequence: int) -> None:
        """Hold the newest version for the next load, and copy it to this host if there is a stage.

        Waits until this host sees the version ``sequence``, or a newer one. The old weights are
        still served. After it a load reads nothing from shared storage.

        Raises:
            WaitTimeoutError: no such version came in time.
            VerificationError: a file of the version is not what its manifest says.
        """
        if self._reader is None:
            # A name of its own, so that a worker that starts again waits for nobody's lease.
            host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
            self._reader = Reader(self._job_dir, f"verl-{host}-{os.getpid()}")
        leased = self._reader.next_version(sequence - 1, self._settings.sync_timeout)
        ready = leased
        try:
            if self._staging is not None:
                try:
                    ready = self._staging.stage(leased)
                except NotStagedError as error:
                    log.warning("loading version %d from the job: %s", leased.sequence, error)
            if ready is leased:
                leased.verify()
        except BaseException:
            leased.release()
            raise
        if ready is not leased:
            leased.release()
        if self._next is not None:
            self._next.release()
        self._next = ready

    async def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the version that :meth:`stage` holds, or else one that is newer than prepared."""
        if self._next is None:
            await asyncio.to_thread(self.stage, self._floor + 1)
        version = self._next
        if version is None:
            raise VersionGoneError("the staged version was released meanwhile")
        with WeightsReader(version, mmap=version.folder != version.source) as weights:
            for pair in weights.state_dict_iterator():
                yield pair
        self._loaded.append(version)
        self._next = None

    def finalize(self) -> None:
        """Release the versions before the one that is served now, and report this one."""
        if self._reader is None or not self._loaded:
            return
        *olds, served = self._loaded
        self._loaded = [served]
        for old in olds:
            old.release()
        if self._staging is not None:
            self._staging.tidy()
        try:
            self._reader.report(RunningStatus.RUNNING, sequence=served.sequence, step=served.step)
        except OSError as error:
            log.warning("%s cannot report its version: %s", self._reader.name, error)

    def close(self) -> None:
        """Release and close everything. verl does not call this; its processes just end."""
        for version in (*self._loaded, self._next):
            if version is not None:
                version.release()
        for one in (self._stream, self._reader):
            if one is not None:
                one.close()


def stripe(
    weights: Iterable[tuple[str, Tensor]],
    rank: int,
    world_size: int,
    compare: Callable[[str], object],
) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors: each goes to the rank with the fewest bytes so far.

    ``compare`` gets a digest of all names and sizes at the end.
    """
    taken = [0] * world_size
    seen = xxhash.xxh3_64()
    for name, tensor in weights:
        owner = taken.index(min(taken))
        taken[owner] += tensor.nbytes
        seen.update(f"{name}\0{tensor.nbytes}\0".encode())
        if owner == rank:
            yield name, tensor
    compare(seen.hexdigest())


def _compare(seen: str) -> None:
    """Raise InvalidSettingsError on all ranks if the ranks have seen different tensors."""
    if not dist.is_initialized():
        return
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, seen)
    if len(set(everywhere)) > 1:
        raise InvalidSettingsError(
            "the ranks were given different tensors, so their parts make no version. Each rank "
            "must yield all tensors, in one order"
        )
