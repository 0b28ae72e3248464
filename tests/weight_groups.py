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


def meeting(receivers: int, generation: int = 1) -> tuple[Rendezvous, socket.socket]:
    """Where a trainer and explorers of one worker each meet, on a free port."""
    listening = listen("127.0.0.1", 0)
    address, port = listening.getsockname()[:2]
    members = tuple(
        GroupMember(name=f"e{number}", session=f"s{number}", rank_offset=number)
        for number in range(1, receivers + 1)
    )
    rendezvous = Rendezvous(
        offer="0123456789ab",
        generation=generation,
        group_name=f"test-{generation}",
        address=address,
        port=port,
        world_size=receivers + 1,
        backend="gloo",
        members=members,
        save_id="run-1-0",
    )
    return rendezvous, listening


def transfer(
    send: Callable[[WeightGroup], Any],
    *receive: Callable[[WeightGroup], Any],
    deadline: float = DEADLINE,
) -> list[Future[Any]]:
    """What comes of a transfer at each rank, the sender first; all have ended."""
    rendezvous, listening = meeting(len(receive))

    def member(rank: int, work: Callable[[WeightGroup], Any]) -> Any:
        group = WeightGroup.join(
            rendezvous,
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
