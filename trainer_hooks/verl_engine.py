"""``SyncdCheckpointEngine``: verl's weights as versions of a job, on both of verl's sides."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from explorer_hooks.reader import LeasedVersion, Reader
from explorer_hooks.staging import NotStagedError, Staging
from explorer_hooks.weights import WeightsReader
from syncd.checkpoint.adapter import is_peft_model
from syncd.checkpoint.tensor_rules import shown
from syncd.closing import Closing
from syncd.coordination.leased_version import read_latest
from syncd.protocol.errors import (
    InvalidSettingsError,
    SaveFailedError,
    SyncdError,
)
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.storage.job import Job
from trainer_hooks.stream import WeightStream

log = logging.getLogger(__name__)

#: The version that was sent: the key of its sequence in what :meth:`send_weights` returns.
VERSION: Final = "sync/version"
#: Seconds, if users give none.
TIMEOUT: Final = 600.0


class SyncdCheckpointEngine(Closing):
    """Sends weights on a rank of verl's trainer, or receives them in a worker of a rollout.

    It has the methods of verl's ``CheckpointEngine``, and imports nothing of verl. verl passes
    ``bucket_size`` (in bytes) and ``is_master``; users give the rest as ``engine_kwargs.syncd``.

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
        bucket_size: int,
        is_master: bool = False,  # noqa: ARG002 # verl passes it
        stage: str | Path | None = None,
        stage_bytes: int | None = None,
        model_files: str | Path | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._job_dir = Path(job_dir)
        self._bucket_size = bucket_size
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
        self._replace_next(None)  # of a load that has failed
        latest = read_latest(Job.at(self._job_dir.absolute()))
        self._floor = latest.sequence if latest is not None else 0
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,  # noqa: ARG003 # verl passes these
        rollout_world_size: int,  # noqa: ARG003 # likewise
        metadata: list[dict[str, Any]],  # noqa: ARG003 # likewise
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
        stream = self._stream or self._open(*ranks)
        self._step = self._step + 1 if global_steps is None else global_steps
        try:
            metrics = stream.save(self._step, stripe(weights, *ranks, _compare))
        except BaseException:
            with suppress(SaveFailedError):  # else the next send would raise it
                stream.wait()
            raise
        stream.wait()
        if ranks[0] == 0:
            metrics[VERSION] = float(stream.wait_published().sequence)
        return metrics

    def _open(self, rank: int, world_size: int) -> WeightStream:
        """Open the stream on all ranks, or raise an error on all: verl gathers on all of them."""
        stream, failure = None, None
        try:
            stream = WeightStream(
                self._job_dir,
                rank=rank,
                world_size=world_size,
                model_files=self._model_files,
                settings=self._settings,
            )
        except (SyncdError, OSError) as error:
            failure = error
        reasons = [one for one in _of_all_ranks(str(failure) if failure else "") if one]
        if stream is not None and not reasons:
            self._stream = stream
            return stream
        if stream is not None:
            stream.close()
        raise failure or SaveFailedError(f"another rank cannot save: {reasons[0]}")

    # -- in each worker of a rollout ---------------------------------------------------------------

    def stage(self, sequence: int) -> tuple[int, int]:
        """Hold the newest version for the next load, and copy it to this host if there is a stage.

        Waits until this host sees the version ``sequence``, or a newer one; returns the version's
        sequence and step. The old weights are still served. After a copy, the load reads nothing
        from shared storage.

        Raises:
            WaitTimeoutError: no such version came in time.
            VerificationError: a file of the version is not what its manifest says.
        """
        version = self._hold_newest(sequence)
        return version.sequence, version.step

    def _hold_newest(self, sequence: int) -> LeasedVersion:
        if self._reader is None:
            # A name of its own, so that a worker that starts again waits for nobody's lease.
            host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[-40:]
            self._reader = Reader(self._job_dir, f"verl-{host}-{secrets.token_hex(4)}")
        self._release_old()  # of loads that other workers of the replica have not ended
        leased = self._reader.next_version(sequence - 1, self._settings.sync_timeout)
        ready = leased
        try:
            if self._staging is not None:
                try:
                    ready = self._staging.stage(leased)
                except NotStagedError as error:
                    log.warning("loading v%d from the job: %s", leased.sequence, error)
            if ready is leased:
                leased.verify()
        except BaseException:
            leased.release()
            raise
        if ready is not leased:
            leased.release()
        self._replace_next(ready)
        return ready

    async def receive_weights(
        self,
        global_steps: int | None = None,  # noqa: ARG002 # verl passes it
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the version that :meth:`stage` holds, or else one that is newer than prepared."""
        version = self._next
        if version is None:
            version = await asyncio.to_thread(self._hold_newest, self._floor + 1)
        with WeightsReader(version, mmap=version.folder != version.source) as weights:
            for name, tensor in weights.state_dict_iterator():
                # verl hands a larger one over as it is, which works between devices only.
                if tensor.nbytes > self._bucket_size and torch.accelerator.is_available():
                    yield name, tensor.to(torch.accelerator.current_accelerator())
                else:
                    yield name, tensor
        self._loaded.append(version)
        self._next = None

    def finalize(self) -> None:
        """Release the versions before the one that is served now, and report this one."""
        if self._reader is None or not self._loaded:
            return
        self._release_old()
        served = self._loaded[-1]
        if self._staging is not None:
            self._staging.tidy()
        try:
            self._reader.report(RunningStatus.RUNNING, sequence=served.sequence, step=served.step)
        except OSError as error:
            log.warning("%s cannot report its version: %s", self._reader.name, error)

    def _replace_next(self, version: LeasedVersion | None) -> None:
        if self._next is not None:
            self._next.release()
        self._next = version

    def _release_old(self) -> None:
        for old in self._loaded[:-1]:
            old.release()
        del self._loaded[:-1]

    def close(self) -> None:
        """Release and close everything. verl does not call this; its processes just end."""
        self._replace_next(None)
        for version in self._loaded:
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

    Raises:
        InvalidSettingsError: PEFT wraps a tensor's module, so the adapter is not in the weights.
    """
    taken = [0] * world_size
    seen = xxhash.xxh3_64()
    for name, tensor in weights:
        if is_peft_model([name]):
            raise InvalidSettingsError(
                f"verl sends '{shown(name)}', a frozen weight of a LoRA model, without the "
                "adapter. Set actor_rollout_ref.model.lora.merge=True"
            )
        owner = taken.index(min(taken))
        taken[owner] += tensor.nbytes
        seen.update(f"{name}\0{tensor.nbytes}\0".encode())
        if owner == rank:
            yield name, tensor
    compare(seen.hexdigest())


def _compare(seen: str) -> None:
    """Raise InvalidSettingsError on all ranks if the ranks have seen different tensors."""
    if len(set(_of_all_ranks(seen))) > 1:
        raise InvalidSettingsError(
            "the ranks were given different tensors, so their parts make no version. Each rank "
            "must yield all tensors, in one order"
        )


def _of_all_ranks(mine: str) -> list[str]:
    if not dist.is_initialized():
        return [mine]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told
