"""Everything at once, for minutes or hours: ``python -m tests.multiprocess.soak --minutes 2``.

A trainer's ranks, two daemons on a mount each, explorers of five kinds and a pruner, on a small
disk of their own, in rounds: in each some of them are killed, or stopped for longer than a lease,
the disk is full, or the job is not mounted here or there, while training goes on; then all is put
right, and every explorer must come to serve what is trained from then on. ``soak_watch`` says what
must hold all the time. Ends with what happened, and exits with 1 where anything was not as it must
be; with 77 where no disk can be mounted.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from syncd.protocol.layout import JobLayout
from syncd.protocol.names import SAVING
from syncd.storage.job import Job, step_folders
from tests.multiprocess.mounts import Filler
from tests.multiprocess.processes import (
    DEADLINE,
    IMPATIENT,
    LEASE_TIME,
    Daemon,
    half_made,
    latest,
    published,
    syncd,
    temporaries,
    wait_until,
)
from tests.multiprocess.soak_actors import (
    EXPLORERS,
    Explorer,
    Mount,
    Trainer,
)
from tests.multiprocess.soak_programs import MEGABYTES
from tests.multiprocess.soak_watch import Findings, Vitals, Watch, used_by

_DISK = "192m"
#: Longer than all that an explorer is silent for: a pause, and a job that is away.
_GRACE = 30.0
_OPTIONS = ("--keep", "1", "--dead-reader-grace", str(_GRACE), "--log-level", "debug")
#: A namespace of its own: whatever becomes of this process, its mounts go with it.
_INSIDE = "SYNCD_SOAK_INSIDE"
_CANNOT = 77


class Soak:
    """The world, and what is done to it.

    Args:
        base: an empty folder.
        seed: of all that is drawn; what the processes make of it is not repeated.
        seconds: how long rounds are begun.
        stack: ends all that was started.
    """

    def __init__(self, base: Path, seed: int, seconds: float, stack: ExitStack) -> None:
        self._random = random.Random(seed)
        self._one_daemon_at_a_time = threading.Lock()
        self._seconds = seconds
        self.found = Findings()
        disk = base / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", disk], check=True)
        (disk / "job").mkdir()
        self._layout = JobLayout(disk / "job")
        self._job = Job.at(self._layout.root)
        self._job.open(lease_time=LEASE_TIME)
        self._filler = Filler(disk)
        self._mounts = [Mount(self._layout.root, base / name, self.found) for name in ("a", "b")]
        self._stages = [base / "stage-a", base / "stage-b"]
        #: The first is stopped, and never killed: it must not grow.
        self._daemons = [stack.enter_context(self._daemon(mount)) for mount in self._mounts]
        self._stack = stack
        self._explorers: list[Explorer] = []
        for number, (kind, stages) in enumerate(EXPLORERS):
            at = number % 2
            stage = self._stages[at] if stages else None
            explorer = Explorer(f"{kind}-{number}", kind, self._mounts[at], self.found, stage)
            self._explorers.append(stack.enter_context(explorer))
        self._lasting = self._explorers[:2]
        self._trainer = stack.enter_context(
            Trainer(self._mounts[1].path, self.found, self._random.random())
        )
        paths = {mount.path: mount.away for mount in self._mounts}
        self._watch = Watch(self._layout.root, paths, self._stages, self.found)
        stack.callback(self._watch.stop)
        self._all_come_to_serve(self._trainer.next_save())
        explorer, staging = self._lasting
        pids = {"daemon": self._daemons[0].pid, "explorer": explorer.pid, "staging": staging.pid}
        self._vitals = Vitals(pids, seconds)

    def run(self) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < self._seconds and not self.found.violations:
            self._round()
        if not self.found.violations:
            self._end()
        else:
            print(self._command("history", "--json"))
            for daemon in self._daemons:
                print(*daemon.log[-200:], sep="\n")

    # -- a round ---------------------------------------------------------------------------------

    def _round(self) -> None:
        troubles = [
            self._kill_a_daemon,
            self._stop_a_daemon,
            self._kill_an_explorer,
            self._stop_an_explorer,
            self._trainer.kill_a_rank,
            self._fill_the_disk,
            self._unmount,
            self._prune,
            self._roll_back,
        ]
        chosen = self._random.sample(troubles, self._random.randint(1, 3))
        self._none_starts = not {self._kill_a_daemon, self._kill_an_explorer, self._prune} & {
            *chosen
        }
        threads = [threading.Thread(target=self._do, args=[trouble]) for trouble in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)
                self._vitals.look()
        self._all_come_to_serve(self._trainer.next_save())

    def _do(self, trouble: Callable[[], None]) -> None:
        try:
            time.sleep(self._random.random())
            self.found.count(trouble.__name__.strip("_").replace("_", " "))
            trouble()
        except Exception:  # noqa: BLE001 - told of, and the end of the soak
            self.found.violated(traceback.format_exc())

    def _leases_pass(self, least: float, most: float) -> None:
        time.sleep(self._random.uniform(least, most) * LEASE_TIME)

    def _kill_a_daemon(self) -> None:
        with self._one_daemon_at_a_time:
            self._daemons[1].kill()
            self._check_log(self._daemons[1])
            self._leases_pass(0, 2)
            self._restart_daemon()

    def _stop_a_daemon(self) -> None:
        with self._one_daemon_at_a_time:
            daemon = self._random.choice(self._daemons)
            if daemon.running:
                daemon.pause()
                self._leases_pass(0.5, 3)
                daemon.resume()

    def _kill_an_explorer(self) -> None:
        explorer = self._random.choice([e for e in self._explorers if e not in self._lasting])
        explorer.kill()
        self._leases_pass(0, 2)
        explorer.restart()

    def _stop_an_explorer(self) -> None:
        self._random.choice(self._explorers).stop_for(self._random.uniform(1, 3) * LEASE_TIME)

    def _fill_the_disk(self) -> None:
        self._filler.fill("bytes", leave=self._random.choice([0, 0, 1 << 16, 1 << 20]))
        self._leases_pass(0.5, 2)
        self._filler.clear()

    def _unmount(self) -> None:
        mounts = self._random.choice([self._mounts[:1], self._mounts[1:], self._mounts])
        with self._trainer.begins:
            for mount in mounts:
                mount.leave(empty_folder=self._none_starts)
            self._leases_pass(0.5, 2)
            for mount in mounts:
                mount.come_back()

    def _prune(self) -> None:
        """By hand, while one daemon is dead and the other one stopped."""
        with self._one_daemon_at_a_time:
            self._daemons[1].kill()
            self._daemons[0].pause()
            self._command("prune", "--keep", "1")
            self._daemons[0].resume()
            self._restart_daemon()

    def _roll_back(self) -> None:
        """To whatever is there, and may be gone by then."""
        if there := published(self._layout.root):
            self._command("rollback", self._random.choice(there), "--timeout", "10")

    def _command(self, name: str, *arguments: str) -> str:
        done = syncd(name, self._mounts[0].path, *arguments)
        if "Traceback" in done.stderr:
            self.found.violated(done.stderr)
        self.found.count(f"syncd {name} {'refused' if done.returncode else 'done'}")
        return done.stdout

    # -- what a round must come to -----------------------------------------------------------------

    def _all_come_to_serve(self, number: float) -> None:
        for daemon in self._daemons:
            self._check_log(daemon)
        if not self._daemons[0].running:
            self.found.violated(f"a daemon ended by itself: {self._daemons[0].log[-20:]}")
        self._wait(self._both_are_open, lambda: "both daemons have opened the job")
        self._wait(
            lambda: all([explorer.serves(number) for explorer in self._explorers]),  # noqa: C419
            lambda: (
                f"all serve save {number}: {[explorer.number for explorer in self._explorers]}, "
                f"LATEST {latest(self._layout.root)}"
            ),
        )
        if refused := os.listdir(self._layout.quarantine):
            self.found.violated(f"quarantined: {refused}")

    def _wait(self, look: Callable[[], bool], what: Callable[[], str]) -> None:
        try:
            wait_until(look, "", 2 * DEADLINE)
        except AssertionError:
            self.found.violated(f"not within {2 * DEADLINE:g} s: {what()}")
            print(self._command("status", "--json"))
            for daemon in filter(lambda one: one.running, self._daemons):
                os.kill(daemon.pid, signal.SIGUSR1)
                daemon.wait_for_log('"<string>", line 1 in <module>')
                print(*daemon.log[-100:], sep="\n")

    def _check_log(self, daemon: Daemon) -> None:
        if any("Traceback" in line for line in daemon.log):
            self.found.violated("\n".join(daemon.log[-60:]))

    def _end(self) -> None:
        """All come to rest at the last save, and nothing is left of all others."""
        step = self._trainer.finish()
        self._all_come_to_serve(self._trainer.announced)
        self._watch.stop()
        layout = self._layout
        # A rank that is killed in a full checkpoint leaves this for people to delete.
        for mark in layout.root.glob(f"*/{SAVING}"):
            shutil.rmtree(mark.parent)
        self._wait(
            lambda: len(published(layout.root)) == 1 and step_folders(self._job) == [step],
            lambda: (
                f"one version and step {step}: {published(layout.root)}, "
                f"{step_folders(self._job)}, {[*map(str, layout.leases.rglob('*'))]}"
            ),
        )
        self._wait(
            lambda: not leftovers(layout),
            lambda: (
                f"nothing is left: {leftovers(layout)}, {[*map(os.stat, temporaries(layout.root))]}"
            ),
        )
        self._wait(
            lambda: used_by(layout.deltas) <= MEGABYTES * 1e6 / 2,
            lambda: f"deltas of half a version at most: {os.listdir(layout.deltas)}",
        )
        for explorer in self._explorers:
            explorer.terminate()
        linked = {link.readlink().name for link in layout.root.parent.parent.glob("*.link")}
        for stage in self._stages:
            (room,) = stage.iterdir()
            if copies := set(os.listdir(room)) - {".copier", *linked}:
                self.found.violated(f"{room} has {copies}, and nobody uses it")
        for daemon in self._daemons:
            if status := daemon.terminate(DEADLINE):
                self.found.violated(f"a daemon ended with {status}: {daemon.log[-20:]}")
            self._check_log(daemon)
        for what in ("copies made from deltas", "copies made from whole saves"):
            if not self.found.counts[what]:
                self.found.violated(f"there were no {what}")
        for folder in (layout.sessions, layout.lease_folder(max(self.found.numbers))):
            if left := os.listdir(folder):
                self.found.violated(f"{folder} is not empty: {left}")

    def tell(self) -> None:
        self._vitals.tell(self.found)
        last = latest(self._layout.root)
        print(f"versions published: {last.sequence if last else 0}, "
              f"of them read by the watchers: {len(self.found.numbers)}")  # fmt: skip
        print(*(f"{what}: {count}" for what, count in sorted(self.found.counts.items())), sep="\n")
        for why, count in self.found.no_delta.most_common():
            print(f"full reads, because {why}: {count}")
        print(f"the job's disk, at most: {self.found.most / 1e6:.1f} MB")
        print(f"violations: {len(self.found.violations)}")

    def _both_are_open(self) -> bool:
        daemon = self._daemons[1]
        if not daemon.running:  # it began while the job was not there, and said so
            self._restart_daemon()
        return any("in epoch" in line or "standing by" in line for line in list(daemon.log))

    def _restart_daemon(self) -> None:
        self.found.count("restarts")
        self._daemons[1] = self._stack.enter_context(self._daemon(self._mounts[1]))

    def _daemon(self, mount: Mount) -> Daemon:
        return Daemon(mount.path, *_OPTIONS, program=IMPATIENT)


def leftovers(layout: JobLayout) -> list[str]:
    """What nobody will ever use again."""
    found = [*temporaries(layout.root), *half_made(layout.root)]
    found += map(str, layout.root.glob(f"*/{SAVING}"))
    # The two daemons, and the explorers.
    sessions = os.listdir(layout.sessions)
    return found + (sessions if len(sessions) != 2 + len(EXPLORERS) else [])


def main() -> None:
    parser = argparse.ArgumentParser(description="everything at once, for a while")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    if _INSIDE not in os.environ:
        _enter(["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end what was started, all the same
    seed = given.seed if given.seed is not None else random.randrange(10**6)
    print(f"soak: {given.minutes:g} minutes, --seed {seed}", flush=True)
    base = Path(tempfile.mkdtemp(prefix="syncd-soak-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        for name in ("disk", "a", "b"):
            stack.callback(subprocess.run, ["umount", "-l", base / name], check=False)
        soak = Soak(base, seed, given.minutes * 60, stack)
        soak.run()
        soak.tell()
    sys.exit(1 if soak.found.violations else 0)


def _enter(how: list[str]) -> None:
    """Begin anew in a mount namespace of one's own."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", *how, "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()], check=False
        ).returncode
    ):
        print("the soak needs a mount namespace of its own, and none can be made here: not run")
        sys.exit(_CANNOT)
    again = ["unshare", *how, sys.executable, "-m", "tests.multiprocess.soak", *sys.argv[1:]]
    os.execvpe("unshare", again, {**os.environ, _INSIDE: "1"})  # noqa: S606 - no shell is needed


if __name__ == "__main__":
    main()
