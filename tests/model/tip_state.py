"""What a state of the model of the tip is, and the rules that can be left out (see tip.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

BAD = -1
"""Bytes that are no save's, because a file is damaged; digests show it."""
WRONG = -2
"""What a delta makes of another base than its own; it must never come to this."""


class Save(NamedTuple):
    """What the ranks mean to write."""

    run: int
    step: int
    full: bool
    base: int = 0
    """The base in rank 0's message, 0 for none. A full save with a base is a delta, too."""
    base_1: int = 0
    """The base in the receipt of rank 1."""
    against: int = 0
    """The save against which rank 1 wrote its changes; 0 if its part is whole."""
    nan: bool = False
    unfit: bool = False
    """Whether a merge of it fails for good."""


class Latest(NamedTuple):
    """LATEST. `number` and `tip` are the sequence and the save of the tip, 0 for none."""

    sequence: int = 0
    save: int = 0
    number: int = 0
    tip: int = 0
    root: int = 0
    """The number of the whole tip at which the tip's chain begins; 0 for LATEST's version."""
    no_deltas: bool = False
    instead_of: int = 0
    """What a rollback replaced; 0 if LATEST's version is none."""
    rollback: int = 0
    """The number of the last rollback."""

    def newest(self, follows: bool = True) -> tuple[int, int]:
        """The number and the save that a reader is to serve, if it follows the tip."""
        return (self.number, self.tip) if self.tip and follows else (self.sequence, self.save)

    def without_tip(self) -> Latest:
        """After a failure that no later try can heal."""
        return self._replace(number=0, tip=0, root=0)


class Version(NamedTuple):
    """published/vN, with what its manifest says of a rollback."""

    sequence: int = 0
    save: int = 0
    instead_of: int = 0


class Delta(NamedTuple):
    """deltas/dN, a delta or a whole tip: its save, and the one that wrote the files in it."""

    number: int
    save: int
    files: int
    whole: bool = False


Folder = Literal["", "state", "published", "deltas"]
Rename: TypeAlias = tuple[Folder, Latest | Version | Delta]
"""A rename that is not synced: the LATEST that went, or the version or the delta that came."""


class Disk(NamedTuple):
    """The job. `folders` has for each step the saves whose files and receipts the ranks wrote."""

    latest: Latest
    pointer: int
    folders: tuple[tuple[int, int], ...]
    published: tuple[Version, ...]
    deltas: tuple[Delta, ...] = ()
    room: int = 1
    refused: int = 0
    """The save in quarantine, 0 for none."""
    unsynced: tuple[Rename, ...] = ()
    aside: tuple[int, tuple[int, int]] = (0, (0, 0))
    """The step whose folder is in trash/, 0 for none, and its files."""

    def write(self, step: int, parts: tuple[int, int]) -> Disk:
        """Change the files of a step folder."""
        return self._replace(folders=(*self.folders[:step], parts, *self.folders[step + 1 :]))

    def sync(self, *folders: Folder) -> Disk:
        """Fsync folders."""
        return self._replace(unsynced=tuple(r for r in self.unsynced if r[0] not in folders))

    def without(self, what: Version | Delta) -> Disk:
        """Take a version or a delta away."""
        return self._replace(
            published=tuple(version for version in self.published if version != what),
            deltas=tuple(delta for delta in self.deltas if delta != what),
        )

    def seen(self, records: bool, old: Disk) -> Disk:
        """The disk to a client whose cache has old records, or old folders."""
        if records:
            return self._replace(latest=old.latest, pointer=old.pointer)
        return self._replace(folders=old.folders, published=old.published, deltas=old.deltas)


class Trainer(NamedTuple):
    """`last` is the last planned save; `copy` the one of which rank 1 has a copy."""

    run: int = 1
    step: int = 1
    last: int = 1
    copy: int = 1
    announced: bool = True
    stage: Literal["idle", "planned", "rank 0 wrote", "all wrote", "dead"] = "idle"


class Make(NamedTuple):
    """What a child makes beside the daemon's steps: a version of a save, of deltas, or of a tip."""

    save: int = 0
    sequence: int = 0
    """Its number, 0 while it has none."""
    base: int = 0
    """The sequence of a fold's base; 0 for a merge."""
    is_done: bool = False
    """Whether a merge waits to be published; nothing else does."""
    of_tip: bool = False


class Prepare(NamedTuple):
    """What the other child prepares: a delta, or a whole tip."""

    save: int = 0
    number: int = 0
    parts: tuple[int, int] = (0, 0)
    """The ranks' files that it has linked."""
    whole: bool = False


class Daemon(NamedTuple):
    """One daemon; a kill loses all of it."""

    place: Literal["away", "read", "ready", "naming", "set aside", "looked"] = "away"
    room: int = 0
    latest: Latest = Latest()
    floor: int = 0
    """The highest number that it knows."""
    make: Make = Make()
    prepare: Prepare = Prepare()
    dirty: Folder = ""
    """The folder that it will sync next."""
    then: Latest = Latest()
    """What LATEST is to be."""
    old: bool = False
    """Whether it is of 0.3, which knows no whole tips."""

    def ready(self, latest: Latest, dirty: Folder = "") -> Daemon:
        """Have nothing in hand."""
        return self._replace(place="ready", latest=latest, dirty=dirty, then=Latest())


class Reader(NamedTuple):
    """An explorer with a stage, or one without, which reads LATEST's version in place."""

    stage: bool
    sequence: int = 0
    serves: int = 0
    damaged: bool = False
    """Whether its host's copy of what it serves is damaged."""
    goal: tuple[int, int] = (0, 0)
    """The sequence and the save that it wants, 0 for none."""
    leases: tuple[int, int] = (0, 0)
    """The versions that it has leased, because it serves one, and to reach its goal."""
    old: bool = False
    """Whether it is of 0.3, which follows only deltas on LATEST's version."""
    restarts: bool = False
    """Whether its engine has lost the weights that it served."""

    def wants(self, latest: Latest) -> tuple[int, int]:
        """The number and the save that LATEST lets it serve."""
        return latest.newest(self.stage and not (self.old and latest.root))


PinAt = Literal["", "step", "trash", "leases"]


class Pin(NamedTuple):
    """What people pin: a step, or a version."""

    number: int = 0
    """0 for none."""
    at: PinAt = ""
    """Where the file is."""
    is_sure: bool = False
    """Whether `syncd pin` has succeeded."""


class Bench(NamedTuple):
    """An explorer that builds a step, to evaluate it."""

    save: int = 0
    """What it saw in the step's folder, 0 for none."""
    pins: bool = False
    """Whether the folder of its build is made."""
    parts: tuple[int, int] = (0, 0)
    """The saves whose files it has read."""
    is_built: bool = False


class State(NamedTuple):
    """Everything. Processes know less than `saves`, but find a save's base in its receipts."""

    saves: tuple[Save, ...]
    disk: Disk
    trainer: Trainer
    daemons: tuple[Daemon, ...]
    readers: tuple[Reader, ...]
    faults: int
    rollbacks: int
    agains: int
    nans: int
    """How often each may still happen."""
    asked: bool = False
    """Whether people ask for a rollback."""
    replaced: int = 0
    """The save that they rolled back, and the number of the rollback."""
    rolled: int = 0
    olds: int = 0
    """How often a daemon of 0.3 may still take over."""
    named: tuple[int, ...] = ()
    """What each number has ever meant; empty once a daemon of 0.3 has taken over."""
    pin: Pin = Pin()
    bench: Bench = Bench()
    stale: tuple[str, bool, Disk, int] | None = None
    """A client with an old cache, whether of records (else of folders), what it sees, for how long.

    The last counts the changes of these on the server.
    """

    def by(self, number: int, daemon: Daemon, disk: Disk | None = None) -> State:
        """Let a daemon do something."""
        daemons = (*self.daemons[:number], daemon, *self.daemons[number + 1 :])
        return self._replace(daemons=daemons, disk=disk or self.disk)

    def to(self, client: str) -> State:
        """What a client sees."""
        if self.stale is None or self.stale[0] != client:
            return self
        return self._replace(disk=self.disk.seen(*self.stale[1:3]))

    def pointed(self) -> int:
        """The save that the pointer names, if it is complete."""
        first, second = self.disk.folders[self.disk.pointer]
        return first if first == second else 0

    def written(self, save: int) -> bool:
        """Whether all files and receipts of a save are in its step folder."""
        return save > 0 and self.disk.folders[self.saves[save].step] == (save, save)

    def folder_of(self, save: int, above: int = 0, below: int = 99) -> Delta | None:
        """The whole tip of a save, or else its delta, with a number between these."""
        found = [d for d in self.disk.deltas if d.save == save and above < d.number < below]
        return max(found, key=lambda d: (d.whole, d.number), default=None)

    def version(self, sequence: int) -> Version | None:
        """What is at published/vN."""
        return next((v for v in self.disk.published if v.sequence == sequence), None)


@dataclass(frozen=True)
class Rules:
    """The design, one switch a rule. All on is what syncd does."""

    # The trainer plans a delta only if ...
    last_is_announced: bool = True
    """... the last planned save is announced;"""
    not_stopped: bool = True
    """... LATEST has no `no_deltas`;"""
    close_is_full: bool = True
    """... it is not the last save of the run;"""
    above_base: bool = True
    """... its step is above the step of its base;"""
    finite_root: bool = True
    """... its base is no full save with NaN that has no delta."""
    base_in_message: bool = True
    """Rank 0 tells the base, instead of each rank taking its own last copy."""
    whole_without_copy: bool = True
    """A rank whose copy is not the base writes its part whole."""
    # The daemon
    walks_back: bool = True
    """It takes all saves in the chain back from the pointer, instead of only the pointer's."""
    merges_passed_root: bool = True
    """It merges the full save at the end of this chain, even if the pointer has passed it."""
    by_save_id: bool = True
    """A base is a save, instead of any save of its step."""
    index_digests: bool = True
    """The files that it has taken are those of the receipts."""
    nan_never_tip: bool = True
    """A save with NaN becomes a delta, but the tip never names it."""
    stops: bool = True
    """If a save cannot be taken as a delta, or a delta is damaged, LATEST gets `no_deltas`."""
    keeps_chain: bool = True
    """A step in the chain back from the pointer is kept while its save is no delta;"""
    keeps_until_full: bool = True
    """... and while it is not published: a rollback ends the deltas."""
    unknown_keeps_all: bool = True
    """If the chain back cannot be followed, nothing that may be in it is pruned."""
    keeps_root: bool = True
    """The version at which the chain back ends is kept, also below LATEST."""
    keeps_deltas_of_chain: bool = True
    """A delta in the chain back is kept, also below LATEST."""
    keeps_way: bool = True
    """So is what leads to the tip."""
    keeps_fetched: bool = True
    """So is what a live reader fetches."""
    keeps_highest: bool = True
    """So is what has a higher number than all that LATEST names."""
    replaced_is_no_root: bool = True
    """What people rolled back is no root either."""
    number_first: bool = True
    """A merge gets its number when it begins, instead of when it is published."""
    above_latest: bool = True
    """A version is published only above LATEST's."""
    checks_again: bool = True
    """When a tip is renamed, its base leads, and it is not refused;"""
    number_again: bool = True
    """... its number is above all that LATEST names;"""
    prepares_if_needed: bool = True
    """... the pointer has not gone back to what is served."""
    waits_no_longer: bool = True
    """A root is made after some time, even if a reader does not serve the tip."""
    adopts: bool = True
    """If its version is there, because LATEST could not be written, LATEST names it."""
    merges_damaged: bool = True
    """If its folder in deltas/ is damaged, its step is merged, with the same number,"""
    merges_root: bool = True
    """... and this merge is dropped by no pointer."""
    drops_refused: bool = True
    """If it cannot be made, LATEST gets no tip, and `no_deltas`."""
    keeps_tip: bool = True
    """A new version below the tip keeps the tip."""
    merges_if_needed: bool = True
    """What is merged is dropped if the pointer has gone back to what is served or can be linked."""
    keeps_made: bool = True
    """What is being made is kept: a step, or a whole tip."""
    quarantines: bool = True
    """A save whose merge fails for good is not tried again."""
    rollback_first: bool = True
    """While people ask for a rollback, nothing else is taken, named, or committed."""
    rollback_ends_tip: bool = True
    """A rollback writes LATEST without the tip."""
    rollback_of_tip: bool = True
    """`instead_of` is the tip's save, if there is one."""
    rollback_to_latest: bool = True
    """LATEST itself can be the target while there is a tip."""
    keeps_rollback: bool = True
    """LATEST keeps the number of the last rollback."""
    folds: bool = True
    """Full versions are made of deltas, under the tip's sequence."""
    fold_reads_full: bool = True
    """A fold of a full save reads its shards, not the deltas."""
    digests: bool = True
    """Readers and folds check the digest of every piece."""
    fence: bool = True
    """Each commit is a rename out of the daemon's own room."""
    syncs_first: bool = True
    """What LATEST will name is synced before."""
    take_over_syncs: bool = True
    """A take-over syncs published/, deltas/ and .syncd/ before it relies on them."""
    # Who keeps a step, or a version
    pins_count: bool = True
    """A step in trash/ is looked at once more: if it is pinned, it is put back;"""
    benches_count: bool = True
    """... and if a bench has it."""
    puts_back: bool = True
    """A take-over puts back what is in trash/."""
    pin_looks_again: bool = True
    """A pin succeeds only if its file is then found by its name, or its version is there."""
    pins_before_reading: bool = True
    """A bench reads a step only after the folder of its build is made."""
    builds_one_save: bool = True
    """A build whose files are not all of the save that it saw is begun again."""
    # A reader
    never_back: bool = True
    """... serves only what has a higher sequence;"""
    falls_back: bool = True
    """... reads LATEST's version if the deltas do not lead from its copy;"""
    gives_up: bool = True
    """... forgets a goal whose files are missing, and reads LATEST again."""
    looks_again: bool = True
    """... looks at LATEST before it serves a tip, for a rollback;"""
    drops_rolled_back: bool = True
    """... and before it serves an old copy again."""
