"""``syncd pin``, ``unpin``, ``rollback``, ``pause`` and ``resume``: steer a job."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from syncd.checkpoint.save import Delta, look_at_save
from syncd.cli import options
from syncd.cli.bars import at_work
from syncd.operate.control import Control
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import ACTOR, FULL
from syncd.storage.job import Job
from syncd.storage.leases import pin_step, pin_version, unpin_step, unpin_version

_TRAIN_ON: Final = (
    "To go on from an older step instead: run 'syncd pause', stop the trainer, roll back, resume "
    "the trainer by load_checkpoint(step=…), and after its first save run 'syncd resume'"
)


@options.as_command("pin /shared/jobs/qwen-grpo v17")
def pin(job: Path, target: options.Target) -> options.Answer:
    """Keep a version (v17) or a step folder (17) of JOB from being pruned, until it is unpinned.

    The pin takes effect as soon as this command has succeeded, even if no daemon is running. Only
    syncd obeys a pin; the trainer can still delete a pinned step folder.
    """
    pinned = _existing(job)
    if target.is_step:
        folder = pinned.layout.step(target.number)
        save = look_at_save(pinned.storage, folder / ACTOR, target.number)
        if isinstance(save, Delta) and not pinned.storage.exists(folder / FULL):
            raise InvalidSettingsError(save.refusal(folder))
    (pin_step if target.is_step else pin_version)(pinned, target.number)
    answer = {"job": str(job), "folder": target.folder, "pinned": True}
    return answer, f"{target} is pinned"


@options.as_command("unpin /shared/jobs/qwen-grpo v17")
def unpin(job: Path, target: options.Target) -> options.Answer:
    """Unpin a version (v17) or step folder (17) of JOB, so that the usual pruning rules apply."""
    was = (unpin_step if target.is_step else unpin_version)(_existing(job), target.number)
    answer = {"job": str(job), "folder": target.folder, "pinned": False, "was_pinned": was}
    return answer, f"{target} {'is no longer' if was else 'was not'} pinned"


@options.as_command("rollback /shared/jobs/qwen-grpo v12")
def rollback(
    job: Path, version: options.Version, *, timeout: options.Timeout = 60.0
) -> options.Answer:
    """Publish an old version of JOB again, under a new sequence, so that explorers load it.

    The trainer's next save is published as usual, and replaces the old version. To keep the old
    version in use, run 'syncd pause' first. If no daemon is running, the next daemon handles the
    request.
    """
    control = Control(Job.at(job), timeout=timeout)
    with at_work("waiting for the daemon"):
        made = control.roll_back(version)
    trains = control.trains()
    line = f"rollback to v{version} requested; {made}"
    answer: dict[str, object] = {"of": version, "version": None, "waits_for": made}
    answer["trainer_runs"] = trains
    if isinstance(made, int):
        line = f"v{version} is served again, as v{made}"
        answer |= {"version": made, "waits_for": None}
    if trains:
        line += f". But a trainer runs, and its next published save replaces it. {_TRAIN_ON}"
    return answer, line


@options.as_command("pause /shared/jobs/qwen-grpo")
def pause(job: Path, *, timeout: options.Timeout = 60.0) -> options.Answer:
    """Stop publishing and pruning in JOB until 'syncd resume'.

    During a pause the daemon keeps its heartbeat, explorers keep their versions, and 'syncd
    rollback' still works. A merge that has begun is finished first; this command waits for the end
    of the merge. During a pause the number of step folders grows.
    """
    with at_work("waiting for the daemon"):
        unanswered = Control(Job.at(job), timeout=timeout).pause()
    line = "paused" if not unanswered else f"pause requested; {unanswered} obey the request"
    answer = {"job": str(job), "paused": True, "waits_for": unanswered or None}
    return answer, line


@options.as_command("resume /shared/jobs/qwen-grpo")
def resume(job: Path) -> options.Answer:
    """End a pause of JOB ('syncd pause'): publish the newest save, and prune again."""
    control = Control(Job.at(job), timeout=0)
    was, works = control.resume(), control.working()
    line = "resumed" if works else "resumed; takes effect when a daemon runs"
    answer = {"job": str(job), "paused": False, "was_paused": was, "daemon_works": works}
    return answer, line if was else "was not paused"


def _existing(folder: Path) -> Job:
    job = Job.at(folder)
    job.lease_time()  # an error, if this is no job
    return job
