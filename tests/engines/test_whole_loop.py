"""What docs/vllm.md tells people to start, as real processes: FSDP ranks to a vLLM server."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import Latest
from syncd.protocol.reports import DaemonReport
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.engines.pages import ROOT, TRAIN
from tests.engines.tiny_models import CONFIG, save_model
from tests.engines.vllm_process import VLLMProcess
from tests.engines.waiting import LONG, wait_for
from tests.jobs import read
from tests.multiprocess.processes import ENVIRONMENT, explorer_report, read_by
from tests.ports import free_port

STEPS = 4
RANKS = 2


@contextmanager
def process(*command: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended by SIGTERM, and well, at the end of the block."""
    started = subprocess.Popen(
        [str(word) for word in command],
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        started.communicate(timeout=LONG)
        assert started.returncode in {0, -signal.SIGTERM}
    finally:
        started.kill()
        started.wait()


#: What a rank says of its model at each step.
SAYS = """\
        with torch.no_grad():
            logits = model(input_ids=tokens[:1]).logits[0, -1]
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "logprobs": logits.log_softmax(-1).tolist()}))
"""
#: The first step goes by the files; the next ones do too while nobody has anything to go back to.
WAITS = """\
        while not goes_on(job, step):
            time.sleep(0.02)
"""
IMPORTS = "import json\nimport time\nfrom tests.engines.test_whole_loop import TEST as goes_on\n"
TRAINED = ".model.layers[0].self_attn.v_proj.requires_grad_(True)"
HEAD, SYNCS, TAIL = TRAIN.partition("        metrics = hook")
CALL, END, REST = TAIL.partition("\n")
BY_FILES = "import json\n" + HEAD + SAYS + SYNCS + TAIL
WAITING = IMPORTS + HEAD + SAYS + SYNCS + CALL + END + WAITS + REST
BY_BROADCAST = WAITING.replace("TEST", "takes_part").replace(
    "SyncSettings(", "SyncSettings(method='nccl', master_address='127.0.0.1', "
)
#: Each step changes 3 % of the weights, so much that the model says something else.
BY_DELTAS = (
    WAITING.replace("TEST", "follows")
    .replace("SyncSettings(", "SyncSettings(deltas=True, ")
    .replace("settings=settings", "settings=settings, saving=SaveSettings(sync_dtype='bf16')")
    .replace("import SyncSettings", "import SaveSettings, SyncSettings")
    .replace("lr=1e-2", "lr=0.1")
    .replace("for layer in", f"model.requires_grad_(False){TRAINED}\nfor layer in", 1)
)


def takes_part(job: str, _: int) -> bool:
    """Whether the server is one of those that take broadcasts."""
    return explorer_report(Path(job), "server-0").workers > 0


def follows(job: str, step: int) -> bool:
    """Whether the server has the step, and the next save can be a delta."""
    has_it = explorer_report(Path(job), "server-0").step == step
    return has_it and read(DaemonReport, JobLayout(Path(job)).daemon_report).takes_deltas


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "options", "label"),
    [
        (BY_FILES, (), "version-"),
        (BY_BROADCAST, ("--broadcast",), "broadcast-"),
        (BY_DELTAS, (), "version-"),
    ],
    ids=["files", "broadcast", "deltas"],
)
def test_what_the_server_says_is_what_the_trainer_says_at_the_step_that_it_reports(
    vllm: VLLMProcess,
    tmp_path: Path,
    memory: Path,
    program: str,
    options: tuple[str, ...],
    label: str,
) -> None:
    job, base = tmp_path / "job", save_model(tmp_path / "base", 0)
    job.mkdir()
    Job.at(job, Storage()).open()
    (tmp_path / "train.py").write_text(program)
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
    }
    syncd = (sys.executable, "-m", "syncd")
    follow = (*syncd, "follow", job, "--name", "server-0", "--stage", memory)
    server = ("--engine", "vllm", "--url", vllm.url, *options)
    with process(*syncd, "run", job):
        with process(*follow, *server):
            wait_for(lambda: any(JobLayout(job).explorers.glob("*.json")))
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(tmp_path / "train.py"), str(job), str(base), str(STEPS)],
                    env=ENVIRONMENT | rendezvous | {"RANK": str(rank), "PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(RANKS)
            ]
            try:
                lines = [rank.communicate(timeout=LONG)[0] for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            assert [rank.returncode for rank in ranks] == [0] * RANKS
            said = [json.loads(line) for line in lines[0].splitlines() if line.startswith("{")]
            truth = {one["step"]: torch.tensor(one["logprobs"]) for one in said}
            wait_for(lambda: vllm.label.startswith(f"step-{STEPS}-{label}"))
            tokens = torch.randint(0, CONFIG.vocab_size, (4, 16), generator=torch.manual_seed(0))
            prompt = tokens[0].tolist()
            answer = vllm.generate(prompt, 1, logprobs=20)
            if program is BY_DELTAS:
                ((of_version, of_deltas),) = read_by(job, STEPS, "server-0")
                assert (read(Latest, JobLayout(job).latest).sequence, of_version) == (1, 0)
                assert of_deltas > 0
        if program is BY_DELTAS:
            with ExplorerHook(job, "server-0", VLLMServer(vllm.url)) as hook:
                while hook.pull(LONG).step < STEPS:
                    assert vllm.generate(prompt, 1, logprobs=20).logprobs != answer.logprobs
            assert vllm.generate(prompt, 1, logprobs=20) == answer  # of the full version
    (served,) = answer.labels
    step = int(served.split("-")[1])
    (logprobs,) = answer.logprobs
    assert step == STEPS
    assert len(logprobs) >= 20
    for token, logprob in logprobs.items():
        # The server computes in bfloat16, the trainer in float32.
        assert abs(torch.tensor(logprob).exp() - truth[step][token].exp()) < 0.03
    # And not what it said at another step.
    found = torch.tensor([logprobs[token] for token in logprobs]).exp()
    gaps = {
        at: float((values[list(logprobs)].exp() - found).abs().max())
        for at, values in truth.items()
    }
    assert min(gaps, key=lambda at: gaps[at]) == STEPS
