"""Rank 0 of a weight group that sends tiny models: ``python -m tests.engines.broadcast_trainer``.

It reads a JSON line for each transfer, says where it meets the workers, and then how it went.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from syncd.protocol.records import encode, parse
from syncd.protocol.reports import GroupMember, Rendezvous
from tests.places import ROOT

#: Seconds of everything in a group, where all goes well: a guard alone.
DEADLINE = 120.0
_ADDRESS = "127.0.0.1"


class Trainer:
    """The process, as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def begin(
        self, step: int, seed: int, *, workers: int = 1, deadline: float = DEADLINE, **more: object
    ) -> Rendezvous:
        """Have it send the model of a seed, in the group that it has or in a new one.

        Args:
            step: what the weights are said to be of.
            seed: of the model.
            workers: of the only explorer.
            deadline: of the group, where it is a new one.
            more: ``signal``, by which it ends or stops itself between two buckets; ``cut``, for a
                model that lacks a tensor; ``tied`` or ``sees``, for another kind of model.
        """
        self._tell({"step": step, "seed": seed, "workers": workers, "deadline": deadline, **more})
        return parse(Rendezvous, self._line().encode(), "what the trainer said")

    def leave(self) -> None:
        """Have it leave the group that it has: the next transfer is in a new one."""
        self._tell({})

    def failure(self) -> str | None:
        """Why the transfer that was begun has failed; None where it has not. Waits for its end."""
        return json.loads(self._line())["failed"]

    def _tell(self, told: dict[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the trainer has ended"
        return line


@contextmanager
def trainer() -> Iterator[Trainer]:
    """A trainer, which is killed at the end of the block."""
    process = subprocess.Popen(
        (sys.executable, "-m", "tests.engines.broadcast_trainer"),
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Trainer(process)
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Send what is asked for, until stdin ends."""
    import torch  # noqa: PLC0415 # seconds, for the process alone

    from syncd.coordination.broadcast.addresses import listen  # noqa: PLC0415 # as above
    from syncd.coordination.broadcast.group import KeptGroup, WeightGroup  # noqa: PLC0415 # as above
    from syncd.protocol.errors import BroadcastError  # noqa: PLC0415 # as above
    from tests.engines import tiny_vision  # noqa: PLC0415 # as above
    from tests.engines.tiny_models import CONFIG, TIED, model  # noqa: PLC0415 # as above
    from trainer_hooks.fast_path import WeightSender  # noqa: PLC0415 # as above

    def end_between_buckets(group: WeightGroup, number: int) -> None:
        plain = group.broadcast
        left = 5  # the header, the meta, and buckets

        def broadcast(tensor: torch.Tensor) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), number)
            return plain(tensor)

        group.broadcast = broadcast  # type: ignore[method-assign]

    kept, meeting = KeptGroup(), None
    for counter, line in enumerate(sys.stdin):
        told = json.loads(line)
        if not told:
            kept.close()
            meeting = None
            continue
        listening = None
        if meeting is None:
            listening = listen(_ADDRESS, 0)
            name = secrets.token_hex(6)
            meeting = Rendezvous(
                offer=name,
                generation=1,
                group_name=f"tests-{name}",
                address=_ADDRESS,
                port=listening.getsockname()[1],
                world_size=1 + told["workers"],
                backend="gloo",
                members=(
                    GroupMember(name="e", session="s", workers=told["workers"], rank_offset=1),
                ),
                save_id="-",
            )
        meeting = meeting.model_copy(update={"save_id": f"run-{told['step']}-{counter}"})
        print(encode(meeting).decode().strip(), flush=True)
        if told.get("sees"):
            sent = tiny_vision.model(told["seed"])
        else:
            sent = model(told["seed"], TIED if told.get("tied") else CONFIG)
        if told.get("cut"):
            del sent.model.norm
        failed = None
        try:
            group = kept.open(
                meeting,
                0,
                deadline=told["deadline"],
                device=torch.device("cpu"),
                listening=listening,
            )
            if number := told.get("signal"):
                end_between_buckets(group, signal.Signals(number))
            WeightSender(sent, bucket_bytes=64 * 1024).send(group)
        except BroadcastError as error:
            kept.close()
            meeting, failed = None, str(error)
        print(json.dumps({"failed": failed}), flush=True)


if __name__ == "__main__":
    main()
