"""Weight groups whose ranks are threads of one process: real stores, sockets and gloo."""

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from syncd.coordination.broadcast.addresses import listen
from syncd.coordination.broadcast.group import WeightGroup
from syncd.protocol.reports import GroupMember, Rendezvous

#: Seconds: a guard, never what a test waits for.
DEADLINE = 60.0
CPU = torch.device("cpu")


def rendezvous(port: int, *names: str, generation: int = 1, name: str = "group") -> Rendezvous:
    """Of a trainer on this host and explorers of one worker each."""
    return Rendezvous(
        offer="0123456789ab",
        generation=generation,
        group_name=f"{name}-{generation}",
        address="127.0.0.1",
        port=port,
        world_size=1 + len(names),
        backend="gloo",
        members=tuple(
            GroupMember(name=one, session=one, rank_offset=rank)
            for rank, one in enumerate(names, 1)
        ),
        save_id="run-1-1",
    )


def meeting(receivers: int, generation: int = 1) -> tuple[Rendezvous, socket.socket]:
    """Where a trainer and explorers of one worker each meet, on a free port."""
    listening = listen("127.0.0.1", 0)
    names = (f"e{number}" for number in range(1, receivers + 1))
    return rendezvous(listening.getsockname()[1], *names, generation=generation), listening


def transfer(
    send: Callable[[WeightGroup], Any],
    *receive: Callable[[WeightGroup], Any],
    deadline: float = DEADLINE,
) -> list[Future[Any]]:
    """What comes of a transfer at each rank, the sender first; all have ended."""
    met, listening = meeting(len(receive))

    def member(rank: int, work: Callable[[WeightGroup], Any]) -> Any:
        group = WeightGroup.join(
            met,
            rank,
            deadline=deadline,
            device=CPU,
            listening=None if rank else listening,
        )
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(1 + len(receive)) as pool:
        return [pool.submit(member, rank, work) for rank, work in enumerate((send, *receive))]
