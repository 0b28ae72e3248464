"""What ``tests/multiprocess/resume_ranks.py`` checks, without its imports."""

from itertools import product

#: What is saved, and on how many ranks.
SAVED = (
    ("fsdp2", 2), ("fsdp1", 2), ("fsdp1_mesh", 2), ("ddp", 2), ("plain", 1),
    ("fsdp2_tp", 4), ("hsdp", 4), ("fsdp1_hybrid", 4),
)  # fmt: skip
#: What each of these is resumed as, besides as itself.
RESUMED = {
    1: ("plain",), 2: ("fsdp2", "fsdp1"), 3: ("fsdp2",), 4: ("fsdp2_tp", "hsdp", "fsdp1_mesh"),
}  # fmt: skip
#: What changes between a save on two ranks and its resumption on one, two and three: whether ``up``
#: is frozen in each step and when resumed, and the optimizer's parameters, at the save and then.
CHANGES = {
    "frozen later": ((False, True, True), "all", "all"),
    "frozen and removed later": ((False, True, True), "all", "trained"),
    "frozen at the save, trained later": ((False, True, False), "all", "all"),
    "warmed up without": ((True, True, False), "all", "all"),
    "updated later": ((True, True, False), "trained", "all"),
    "a group added later": ((True, True, True), "trained", "added"),
    "frozen, removed later": ((True, True, True), "all", "trained"),
}
#: How the models that change are wrapped.
CHANGED = ("ddp", "fsdp2", "fsdp1_units", "fsdp1_mesh")
#: The checks of what fails; on two ranks.
FAILING = (
    "a file of one rank is missing",
    "a file that one rank reads is damaged",
    "a file of one rank is torn",
    "one rank has another model",
    "one rank did not write its part",
    "experts by one name, by other ranks",
    "a user state of one rank cannot be saved",
    "one rank has no room",
    "an optimizer that FSDP1 saves and cannot load",
    "a first checkpoint that could not be resumed",
)
#: Saved by two ranks as one full state dict, and resumed by two, and by one.
FULL = ("fsdp2", "fsdp1", "ddp")
#: Trained in fp32 with mixed precision, and cast for explorers; on two ranks.
CAST = ("fsdp2_mixed", "fsdp1_mixed", "fsdp1_mesh_mixed")
#: Several optimizers: saved on two ranks as this kind, and resumed as these on 1, 2 and 3.
SEVERAL = {
    ("muon", "fsdp2"): ("plain", "fsdp2", "fsdp2"),
    ("muon", "ddp"): ("plain", "fsdp2", "ddp"),
    ("idle", "fsdp1_mesh_units"): ("plain", "fsdp2", "fsdp1_mesh_units"),
}
#: On four ranks.
EXPERTS = "experts by one name, by the same ranks"
#: What is left of the program when all ranks of all world sizes have ended well.
ENDED = "all ranks have ended"


def is_usual(saved: tuple[str, int], other: str, others: int) -> bool:
    """Whether this way to resume runs without ``--deep``.

    On each number of ranks each save is resumed once, and as each kind is some save.
    """
    ways, number = RESUMED[others], SAVED.index(saved)
    return other == ways[(number + (others == 2)) % len(ways)]  # on two, not as itself


def exact(kind: str, world_size: int) -> str:
    return f"{kind}-{world_size} goes on"


def resharded(kind: str, world_size: int, other: str, others: int) -> str:
    return f"{kind}-{world_size} as {other}-{others}"


def full(kind: str, world_size: int) -> str:
    return f"{kind}, gathered, on {world_size}"


def cast(kind: str, work: str) -> str:
    return f"{kind}, cast for explorers, {work}"


def several(rule: str, kind: str, world_size: int) -> str:
    return f"{rule} and AdamW, {kind}, on {world_size}"


def checks() -> dict[str, bool]:
    """The names of all checks, and whether each runs without ``--deep``."""
    resumed = {
        resharded(*saved, other, size): is_usual(saved, other, size)
        for saved in SAVED
        for size in RESUMED
        for other in RESUMED[size]
    }
    usual = [
        *(exact(*saved) for saved in SAVED),
        *(full(kind, size) for kind in FULL for size in (1, 2)),
        *(cast(kind, work) for kind in CAST for work in ("published", "resumed")),
        *(
            f"{kind}, {change}, on {size}"
            for kind, change, size in product(CHANGED, CHANGES, (1, 2, 3))
        ),
        *(several(*saved, size) for saved in SEVERAL for size in (1, 2, 3)),
        *FAILING,
        EXPERTS,
        ENDED,
    ]
    return resumed | dict.fromkeys(usual, True)
