"""The ways of the model (tip.py) from versions and whole tips to saves, by deltas."""

from dataclasses import dataclass, field

from .tip_state import BAD, WRONG, Delta, Latest, Rules, State


@dataclass(frozen=True)
class Ways:
    """The bounds and the rules, and what can be made of what."""

    faults: tuple[str, ...] = ()
    """Which one may happen, once: the beginnings of its names in `_faults`."""
    readers: str = ""
    """One letter a reader: c has a copy of version 1, n none, o is c of 0.3, p has no stage."""
    times: int = 1
    """How many faults may happen."""
    saves: int = 3
    rooms: int = 2
    lag: int = 2
    """How many changes of records, or of folders, an old cache may miss."""
    again: bool = True
    """Whether a run may save one step twice."""
    nan: bool = False
    """Whether one save may have NaN."""
    rollback: bool = False
    kinds: str = "fd"
    """What a save may be: d a delta, w whole, f a full checkpoint, whose weights may be a delta."""
    eager: bool = False
    """Whether the run does not end with the last save, which is full."""
    tips: tuple[bool, ...] = (True,)
    """Whether whole saves can be tips (True), or must be merged first (False)."""
    old: bool = False
    """Whether a daemon of 0.3 may take over, once."""
    keeps: str = ""
    """Who keeps: s if people pin a step, v a version, b if an explorer builds a step."""
    rules: Rules = field(default_factory=Rules)

    def _same(self, state: State, one: int, other: int) -> bool:
        by_step = not self.rules.by_save_id and state.saves[one].step == state.saves[other].step
        return one == other or by_step

    def lead(
        self, state: State, latest: Latest, save: int, below: int = 99, *, old: bool = False
    ) -> int | None:
        """The root of the deltas to a save: a whole tip above LATEST, or 0 for its version.

        None if they do not lead to it.
        """
        while save:
            folder = state.folder_of(save, latest.sequence, below)
            if folder and folder.whole and not old:
                return folder.number if save != state.disk.refused else None
            if self._same(state, save, latest.save):
                return 0
            if folder is None or folder.whole:
                return None
            save, below = state.saves[save].base, folder.number
        return None

    def chain_to(self, state: State) -> list[int] | None:
        """The saves in the chain back from the pointer's; the last one is published, or 0."""
        published = {version.save for version in state.disk.published}
        save, chain = state.pointed(), list[int]()
        while save not in published:
            has_delta = state.folder_of(save) is not None
            if not has_delta and not state.written(save):
                return None
            if not has_delta or self.rules.keeps_until_full:
                chain.append(save)
            save = state.saves[save].base
            if not save:
                break
        return [*chain, save]

    def path(self, state: State, save: int, above: int = 0, below: int = 99) -> list[Delta]:
        """The folders in deltas/ that lead to a save, at best from a whole tip, newest first."""
        path = list[Delta]()
        while save:
            folder = state.folder_of(save, above, below)
            if folder is None:
                break
            path.append(folder)
            below = folder.number
            save = 0 if folder.whole else state.saves[save].base
        return path

    def fetched(self, state: State, save: int) -> int:
        """The bytes that a whole tip and the deltas on it make; 0 if there is none."""
        path = self.path(state, save)
        if not path or not path[-1].whole:
            return 0
        root = path[-1]
        if state.saves[root.save].unfit or root.files != root.save:
            return BAD
        return self.made(state, root.save, save)

    def made(self, state: State, base: int, save: int) -> int:
        """The bytes that deltas make of a base; 0 if they do not lead to the save."""
        path = list[Delta]()
        while not self._same(state, save, base):
            delta = next((d for d in state.disk.deltas if d.save == save and not d.whole), None)
            if delta is None:
                return 0
            path.append(delta)
            save = state.saves[save].base
        for delta in reversed(path):
            found = state.saves[delta.save]
            if base != found.base or found.against not in (0, base):
                return WRONG
            if delta.files != delta.save:
                return BAD
            base = delta.save
        return base

    def available(self, state: State, save: int) -> bool:
        """Whether a save can be made from what is on disk."""
        if any(version.save == save for version in state.disk.published):
            return True
        found, delta = state.saves[save], state.folder_of(save)
        written = state.written(save) and found.base == found.base_1
        if (written and found.full and not found.nan and not found.unfit) or (
            delta and delta.whole
        ):
            return True
        there = written or (delta is not None and delta.files == save)
        return there and found.base > 0 and self.available(state, found.base)
