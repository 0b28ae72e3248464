"""What is done to a service while systemd is PID 1: run as root in the lab's container.

Prints one line of JSON a step: its name, and what was found. Nothing is asserted here but that what
is waited for happens; the test outside reads the lines. Needs neither torch nor pytest.
"""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import STATE_POINTER
from syncd.protocol.records import Latest, parse

T = TypeVar("T")

JOB = JobLayout(Path("/srv/jobs/demo"))
CONFIG = Path("/etc/syncd/demo.toml")
UNIT = "syncd@demo"
DROP_INS = Path(f"/etc/systemd/system/{UNIT}.service.d")
TRAINER = 52001
#: What the service's user has in memory: a trainer's, of NCCL say, and what an explorer staged.
SHARED = Path("/dev/shm/trainer-segment")  # noqa: S108 - the container's own
STAGE = Path("/dev/shm/syncd/gpu0")  # noqa: S108 - the same
GROUP = 52010
DEADLINE = 60.0
#: Bytes of a save whose merge can be met half way.
LARGE = 400_000_000
DROP_IN = """
[Service]
Environment=PYTHONPATH={path}
WatchdogSec=4
RestartSec=100ms
"""


def tell(step: str, **found: object) -> None:
    print(json.dumps({"step": step, **found}), flush=True)


def output(*command: str) -> str:
    return subprocess.check_output(command, text=True)


def journal(*more: str, unit: str = UNIT) -> str:
    return output("journalctl", "-b", "--no-pager", "-o", "cat", "-u", unit, *more)


def wait_until(look: Callable[[], T], what: str, unit: str = UNIT) -> T:
    end = time.monotonic() + DEADLINE
    while not (found := look()):
        if time.monotonic() > end:
            log = journal("-n", "60", unit=unit)
            sys.exit(f"not within {DEADLINE:g} s: {what}\n{log}")
        time.sleep(0.005)
    return found


def systemctl(*words: str) -> int:
    return subprocess.run(["systemctl", *words, UNIT], check=False).returncode


def show(*names: str, unit: str = UNIT) -> dict[str, str]:
    said = output("systemctl", "show", unit, *(f"-p{name}" for name in names))
    return dict(line.split("=", 1) for line in said.splitlines())


def main_pid() -> int:
    return int(show("MainPID")["MainPID"])


def latest() -> int:
    """The step that LATEST names, or 0."""
    try:
        return parse(Latest, JOB.latest.read_bytes(), "LATEST").step
    except FileNotFoundError:
        return 0


def is_live(step: int) -> Callable[[], bool]:
    return lambda: latest() == step


def save(step: int, size: int = 4096) -> None:
    """A save without receipts, in place: it is copied and not linked."""
    actor = JOB.actor(step)
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    with open(actor / "model.safetensors", "wb") as file:
        file.write(header_bytes([HeaderEntry("weight", "U8", (size,), 0, size)]))
        block = os.urandom(min(size, 1 << 20))
        for at in range(0, size, len(block)):
            file.write(block[: size - at])
    for path in (JOB.step(step), *JOB.step(step).rglob("*")):
        os.chown(path, TRAINER, GROUP)
    draft = JOB.root / "pointer.new"
    draft.write_text(f"{step}\n")
    draft.rename(JOB.root / STATE_POINTER)


def building() -> list[str]:
    """The half-made files of versions."""
    return [str(path) for path in JOB.epochs.glob("*/building/v*/*.safetensors")]


def leftovers() -> list[str]:
    return [*building(), *map(str, JOB.root.rglob(".tmp-*"))]


def set_up() -> None:
    subprocess.run(["groupadd", "-g", str(GROUP), "rl"], check=False)
    subprocess.run(["useradd", "-M", "-u", str(TRAINER), "-g", str(GROUP), "trainer"], check=False)
    for left in (JOB.root.parent, DROP_INS):  # of the boot before: the container stays
        shutil.rmtree(left, ignore_errors=True)
    JOB.root.mkdir(parents=True)
    os.chown(JOB.root, TRAINER, GROUP)
    CONFIG.parent.mkdir(exist_ok=True)
    configure(keep=3)
    install_unit("demo")
    (DROP_INS / "test.conf").write_text(DROP_IN.format(path=os.environ["PYTHONPATH"]))
    subprocess.run(["systemctl", "daemon-reload"], check=True)


def install_unit(*words: str) -> None:
    script = subprocess.check_output([sys.executable, "-m", "syncd", "unit", "print", *words])
    subprocess.run(["sh", "-e"], input=script, check=True)


def configure(**more: object) -> None:
    settings = {"job": str(JOB.root), "tick": 0.1, "prune_foreign": True, **more}
    CONFIG.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))


def start_waits_for_ready() -> None:
    save(1)
    code = systemctl("start")
    tell(
        "start",
        code=code,
        has_taken_over=JOB.daemon_report.exists(),
        **show("ActiveState", "SubState", "Type"),
        user=pwd.getpwuid(os.stat(f"/proc/{main_pid()}").st_uid).pw_name,
    )
    wait_until(is_live(1), "the first save is published")
    wait_until(lambda: "v1 of step 1" in show("StatusText")["StatusText"], "STATUS says so")


def reload_changes_the_configuration() -> None:
    for step in (2, 3):
        save(step)
        wait_until(is_live(step), f"step {step} is published")
    before = len(list(JOB.published.iterdir()))
    configure(keep=1)
    pid = main_pid()
    code = systemctl("reload")
    wait_until(lambda: len(list(JOB.published.iterdir())) == 1, "the new keep holds")
    wait_until(lambda: show("ActiveState")["ActiveState"] == "active", "READY after the reload")
    CONFIG.write_text("keep = 'many'\n")
    refused = systemctl("reload")
    wait_until(lambda: show("ActiveState")["ActiveState"] == "active", "it goes on")
    save(4)
    wait_until(is_live(4), "what it knows still holds")
    configure(keep=1)
    tell("reload", code=code, before=before, refused=refused, same=pid == main_pid())


def an_explorer_beside_a_server() -> None:
    """What docs/systemd.md says of it: staged in the memory filesystem, and a link is moved."""
    unit = "syncd-follow@gpu0"
    link = Path("/srv/models/demo")
    link.parent.mkdir(exist_ok=True)
    os.chown(link.parent, TRAINER, GROUP)
    words = ["--follow", str(JOB.root), "--stage", str(STAGE), "--link", str(link)]
    install_unit("gpu0", *words)
    drop_ins = Path(f"/etc/systemd/system/{unit}.service.d")
    (drop_ins / "test.conf").write_text(
        f"[Service]\nEnvironment=PYTHONPATH={os.environ['PYTHONPATH']}\n"
    )
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    code = subprocess.run(["systemctl", "start", unit], check=False).returncode
    wait_until(link.is_symlink, "the link is there", unit)
    before = link.resolve()
    save(5)
    wait_until(lambda: link.resolve() != before, "the link follows the next version", unit)
    tell(
        "follow",
        code=code,
        staged=link.resolve().is_relative_to(STAGE),
        whole=sorted(path.name for path in link.resolve().glob("*.safetensors")),
        user=link.lstat().st_uid,
    )
    stopped = subprocess.run(["systemctl", "stop", unit], check=False).returncode
    state = show("Result", "ActiveState", unit=unit)
    tell("follow stopped", code=stopped, served=link.resolve().is_dir(), **state)


def sandbox() -> None:
    pid = main_pid()

    def try_to_write(folder: str) -> bool:
        # In the service's mount namespace, as its user.
        ids = f"--reuid={TRAINER}", f"--regid={GROUP}", "--clear-groups"
        inside = ["nsenter", "-t", str(pid), "-m", "setpriv", *ids, "touch", f"{folder}/written"]
        return subprocess.run(inside, check=False, capture_output=True).returncode == 0

    other = JOB.root.parent / "other"
    other.mkdir()
    for folder in (other, Path("/srv"), Path("/var/lib")):
        folder.chmod(0o777)  # by its mode anyone could
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in status)
    tell(
        "sandbox",
        job=try_to_write(str(JOB.root)),
        outside=[f for f in (str(other), "/srv", "/var/lib") if try_to_write(f)],
        **{name: fields[name] for name in ("NoNewPrivs", "Seccomp", "CapEff", "CapBnd")},
    )
    (JOB.root / "written").unlink()


def killed_in_mid_merge() -> None:
    pid = main_pid()
    save(10, LARGE)
    wait_until(building, "a merge has begun")
    os.kill(pid, signal.SIGKILL)
    half = latest() != 10
    wait_until(is_live(10), "the service is started again and converges")
    wait_until(lambda: not leftovers(), "nothing half made is left")
    tell("kill", half=half, other=main_pid() != pid, **show("NRestarts"))


def hang() -> None:
    pid = main_pid()
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: main_pid() not in {0, pid}, "the watchdog ends it")
    save(11)
    wait_until(is_live(11), "the next one works")
    said = journal()
    tell(
        "hang",
        watchdog="Watchdog timeout" in said,
        stacks="most recent call first" in said,
        **show("NRestarts"),
    )


def idle_is_no_hang() -> None:
    """A daemon with nothing to do is alive: longer than the watchdog waits."""
    pid = main_pid()
    time.sleep(5)
    tell("idle", same=pid == main_pid())


def stopped_in_mid_merge() -> None:
    pid = main_pid()
    save(12, LARGE)
    wait_until(building, "a merge has begun")
    os.kill(pid, signal.SIGSTOP)  # to be sure that it is half way
    half = latest() != 12
    SHARED.write_bytes(b"weights")
    os.chown(SHARED, TRAINER, GROUP)
    code = systemctl("stop")
    tell(
        "stop",
        code=code,
        shared_memory=SHARED.exists(),
        half=half,
        published=latest() == 12,
        leftovers=leftovers(),
        lock=JOB.daemon_lock.exists(),
        **show("Result", "ActiveState"),
    )


def the_page() -> None:
    """What docs/systemd.md says first, as it stands there."""
    _, _, rest = Path("docs/systemd.md").read_text().partition("```sh\n")
    block, _, _ = rest.partition("```")
    job = Path("/shared/jobs/qwen-grpo")
    job.mkdir(parents=True, exist_ok=True)
    os.chown(job, TRAINER, GROUP)
    # What pip would have installed.
    program = Path("/usr/local/bin/syncd")
    path = os.environ["PYTHONPATH"]
    program.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -m syncd "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-e", "-c", block], check=False, capture_output=True, text=True, env=env
    )
    unit = "syncd@qwen-grpo"
    state = output("systemctl", "show", unit, "-pActiveState", "-pUser", "-pUnitFileState")
    tell("page", code=done.returncode, said=done.stderr, state=sorted(state.split()))
    subprocess.run(["systemctl", "-q", "disable", "--now", unit], check=True)
    program.unlink()
    shutil.rmtree(f"/etc/systemd/system/{unit}.service.d", ignore_errors=True)


def impossible_settings() -> None:
    CONFIG.write_text(f'job = "{JOB.root}"\nkeep = "many"\n')
    code = systemctl("start")
    first = show("InvocationID")
    time.sleep(1)  # ten times RestartSec: it would have been started again
    again = show("InvocationID") != first
    tell("settings", code=code, again=again, **show("ActiveState", "ExecMainStatus"))


if __name__ == "__main__":
    set_up()
    for step in (
        start_waits_for_ready,
        reload_changes_the_configuration,
        an_explorer_beside_a_server,
        sandbox,
        killed_in_mid_merge,
        hang,
        idle_is_no_hang,
        stopped_in_mid_merge,
        impossible_settings,
        the_page,  # last: it writes the template anew, for another command
    ):
        step()
