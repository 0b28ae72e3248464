"""Four real vLLM servers of one job take turns to load, while clients go on asking all of them."""

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.hook import ExplorerHook
from tests.engines.server_process import asked
from tests.engines.tiny_models import CONFIG, save_model, save_step, state
from tests.engines.vllm_process import VLLMProcess, require
from tests.engines.waiting import LONG
from tests.jobs import SmallJob
from tests.multiprocess.processes import Daemon, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.deep, pytest.mark.timeout(1800)]

SERVERS, STEPS, MOST = 4, 3, 1


class Noted(VLLMServer):
    """Notes which servers stand still."""

    still: set[int]
    counts: list[int]
    lock = threading.Lock()

    def pause(self) -> None:
        with self.lock:
            self.still.add(id(self))
            self.counts.append(len(self.still))
        super().pause()

    def resume(self) -> None:
        super().resume()
        with self.lock:
            self.still.discard(id(self))


def test_no_more_servers_stand_still_than_may_and_all_serve_the_last_step(
    job: SmallJob, tmp_path: Path
) -> None:
    require()
    base = save_model(tmp_path / "base", 0)
    logs = [tmp_path / f"{number}.txt" for number in range(SERVERS)]
    started = [VLLMProcess(base, log, takes_adapters=False) for log in logs]
    still: set[int] = set()
    counts: list[int] = []
    with ExitStack() as stack:
        for process in started:
            stack.callback(process.kill)
        for process in started:
            process.wait_until_up()
        stack.enter_context(Daemon(job.root, "--max-loading", str(MOST)))
        wait_until(job.layout.daemon_report.exists, "the explorers can know the limit")
        hooks = []
        for number, process in enumerate(started):
            engine = Noted(process.url)
            engine.still, engine.counts = still, counts
            hooks.append(ExplorerHook(job.root, f"server-{number}", engine, poll=0.05))
            stack.enter_context(hooks[-1]).start()
            stack.enter_context(asked(lambda it=process: it.generate([1, 2, 3], 8), threads=1))
        config = {"huggingface/config.json": CONFIG.to_json_string().encode()}
        for step in range(1, STEPS + 1):
            save_step(job, step, "model.safetensors", state(step), config)
            job.point(step)
            for hook in hooks:
                wait_until(
                    lambda it=hook: it.version and it.version.step == step,  # noqa: B023 # at once
                    f"step {step} is served",
                    LONG,
                )
        labels = {process.label for process in started}
    assert labels == {f"step-{STEPS}-version-{STEPS}"}
    assert len(counts) >= SERVERS * STEPS
    assert max(counts) <= MOST
