"""A job whose daemon is measured, and what its explorers and its trainer say of themselves."""

import time
from functools import partial

from syncd.daemon.telling.metrics import Metrics, _JobMeter
from syncd.protocol.records import NonFinite
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.judge import Clock as Time
from tests.jobs import SmallJob, receipt_of
from tests.storages import Clock


class Measured:
    """The metrics of one job, and what they say."""

    def __init__(self, job: SmallJob, clock: Clock, wall: Time = lambda: 1234.5) -> None:
        self.metrics = Metrics()
        self.job = str(job.root)
        self.meter = _JobMeter(self.metrics, job, clock=clock, wall=wall)
        self.daemon = partial(job.daemon, clock=clock, meter=self.meter)

    def __call__(self, name: str, **labels: str) -> float | None:
        labels = {"job_dir": self.job, **labels}
        return self.metrics.registry.get_sample_value(f"syncd_{name}", labels)

    def names(self, metric: str, label: str = "explorer") -> set[str]:
        """The explorers that a metric has, or the values of another label."""
        return {
            sample.labels[label]
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"syncd_{metric}"
        }


def report(job: SmallJob, name: str, sequence: int | None, **more: object) -> None:
    """What an explorer says of itself."""
    record = ExplorerReport.model_validate(
        {"name": name, "session": f"s-{name}", "status": "running", "time": 0.0, **more,
         "sequence": sequence, "step": sequence}
    )  # fmt: skip
    job.put_record(job.layout.explorers / f"{name}.json", record)


def announce(job: SmallJob, status: str) -> None:
    """What a trainer says of itself."""
    told = {"run_id": "r", "world_size": 1, "session": "t", "step": 7, "time": time.time()}
    record = TrainerReport.model_validate({**told, "status": status})
    job.put_record(job.layout.trainer_report, record)


def put(job: SmallJob, step: int, nonfinite: NonFinite | None, config: str | None = None) -> None:
    """A save with a receipt that tells of NaN and Inf, as another host's hook may write it."""
    save_id = job.save(step, point=False)
    actor = job.actor(step)
    told = receipt_of((actor / "model.safetensors").read_bytes())
    job.receipt(step, save_id, 0, 1, told.model_copy(update={"nonfinite": nonfinite}))
    if config is not None:
        job.put(actor / "huggingface" / "config.json", config.encode())
    job.point(step)
