"""What a power loss leaves: storage that keeps, beside the disk, what of it would survive one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.storages import FastStorage

#: Path in the job → the inode behind it, and its bytes; None instead of bytes for a folder.
Tree = dict[str, tuple[int, bytes | None]]
#: What becomes of a file that was not synced: (durable bytes, bytes in memory) → bytes found.
Fate = Callable[[bytes, bytes], bytes]
ROOT = 0


class Killed(BaseException):
    """The process is gone: no call that changes storage is done any more."""


@dataclass(slots=True)
class File:
    """A file's bytes: as processes see them, and as of its last fsync."""

    now: bytes = b""
    durable: bytes = b""


@dataclass(slots=True)
class Folder:
    """A folder's names: as processes see them, and as they would be after a power loss."""

    now: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of names that is not durable yet.

    Attributes:
        home: the folder whose sync makes it durable.
        entries: (folder, name, inode from now on), all of them or none.
        emptied: a folder that ends: what was taken out of it is out of it before that.
    """

    home: int
    entries: tuple[tuple[int, str, int | None], ...]
    emptied: int | None = None

    def needs(self, earlier: Change) -> bool:
        """Whether this cannot have happened without a change before it."""
        mine = {entry[:2] for entry in self.entries}
        return any(entry[:2] in mine or entry[0] == self.emptied for entry in earlier.entries)


class Disk:
    """Inodes with two states each. What is on the real disk when this is made is durable.

    A folder's own changes are durable once it was synced, a file's bytes once it was. A rename
    belongs to the folder that it leads into, and is done or undone as a whole. A change takes with
    it those before it of the same names.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: list[File | Folder] = [Folder()]
        self.pending: dict[int, Change] = {}
        self._needed: dict[int, frozenset[int]] = {}
        self._import(root, ROOT)

    def _import(self, path: Path, node: int) -> None:
        folder = self.folder(node)
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                made = Folder()
            else:
                content = Path(entry.path).read_bytes()
                made = File(content, content)
            self.nodes.append(made)
            folder.now[entry.name] = folder.durable[entry.name] = number = len(self.nodes) - 1
            if isinstance(made, Folder):
                self._import(Path(entry.path), number)

    # -- looking ---------------------------------------------------------------------------------

    def covers(self, path: Path) -> bool:
        return f"{path}/".startswith(f"{self.root}/")

    def folder(self, node: int) -> Folder:
        found = self.nodes[node]
        assert isinstance(found, Folder)
        return found

    def file(self, node: int) -> File:
        found = self.nodes[node]
        assert isinstance(found, File)
        return found

    def find(self, path: Path) -> int | None:
        """The inode behind a path, as processes see it."""
        node = ROOT
        for name in path.relative_to(self.root).parts:
            if node is None:
                return None
            node = self.folder(node).now.get(name)
        return node

    def at(self, path: Path) -> int:
        node = self.find(path)
        assert node is not None, f"{path} came past the seam"
        return node

    def below(self, path: Path) -> Tree:
        """Everything below a folder, as processes see it, by paths in it."""
        return dict(_walk(self, self.at(path), {}, lambda _, now: now))

    # -- changing --------------------------------------------------------------------------------

    def new(self, path: Path, node: File | Folder) -> int:
        self.nodes.append(node)
        number = len(self.nodes) - 1
        self.enter(path, number)
        return number

    def enter(self, path: Path, node: int) -> None:
        self._do(Change(self.at(path.parent), ((self.at(path.parent), path.name, node),)))

    def remove(self, path: Path) -> None:
        node, home = self.at(path), self.at(path.parent)
        emptied = node if isinstance(self.nodes[node], Folder) else None
        self._do(Change(home, ((home, path.name, None),), emptied))

    def rename(self, source: Path, target: Path) -> None:
        node, old, new = self.at(source), self.at(source.parent), self.at(target.parent)
        replaced = self.find(target)
        if replaced == node:
            return
        emptied = replaced
        if replaced is not None and isinstance(self.nodes[replaced], File):
            emptied = None
        self._do(Change(new, ((old, source.name, None), (new, target.name, node)), emptied))

    def sync_folder(self, path: Path) -> None:
        home = self.at(path)
        done = self.closed(number for number, c in self.pending.items() if c.home == home)
        for number in sorted(done):
            for folder, name, node in self.pending.pop(number).entries:
                _set(self.folder(folder).durable, name, node)

    def _do(self, change: Change) -> None:
        for folder, name, node in change.entries:
            _set(self.folder(folder).now, name, node)
        number = len(self._needed)
        self._needed[number] = frozenset(n for n, c in self.pending.items() if change.needs(c))
        self.pending[number] = change

    def closed(self, chosen: Iterable[int]) -> set[int]:
        """Pending changes, by number, and those that they cannot have happened without."""
        done: set[int] = set()
        due = set(chosen)
        while due:
            done |= due
            due = {n for number in due for n in self._needed[number] if n in self.pending} - done
        return done

    # -- losing power ----------------------------------------------------------------------------

    def after_loss(self, survived: Iterable[int], fate: Fate) -> Tree:
        """What is found after a power loss in which some pending changes made it anyway."""
        changed: dict[int, dict[str, int]] = {}
        for number in sorted(self.closed(survived)):
            for folder, name, node in self.pending[number].entries:
                if folder not in changed:
                    changed[folder] = dict(self.folder(folder).durable)
                _set(changed[folder], name, node)
        names = {
            node: changed.get(node, found.durable)
            for node, found in enumerate(self.nodes)
            if isinstance(found, Folder)
        }
        return dict(_walk(self, ROOT, names, fate))


def _set(names: dict[str, int], name: str, node: int | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _walk(
    disk: Disk, node: int, names: dict[int, dict[str, int]], fate: Fate, below: str = ""
) -> Iterator[tuple[str, tuple[int, bytes | None]]]:
    found = names[node] if names else disk.folder(node).now
    for name, child in found.items():
        inode = disk.nodes[child]
        if isinstance(inode, File):
            yield below + name, (child, fate(inode.durable, inode.now))
        else:
            yield below + name, (child, None)
            yield from _walk(disk, child, names, fate, f"{below}{name}/")


# -- what may become of a file that was not synced -------------------------------------------------


def dropped(durable: bytes, _: bytes) -> bytes:
    """Nothing that was not synced is there."""
    return durable


def kept(_: bytes, now: bytes) -> bytes:
    """It was written in time."""
    return now


def by_chance(chance: random.Random) -> Fate:
    """Each file by itself: dropped, kept, half of it, or as many zeros."""

    def fate(durable: bytes, now: bytes) -> bytes:
        if durable == now:
            return now
        half = now[: max(len(durable), len(now) // 2)]
        return chance.choice([durable, now, half, durable + bytes(len(now) - len(durable))])

    return fate


# -- the seam --------------------------------------------------------------------------------------

#: A call that changes storage, after it was done: (number, method, its path).
Watch = Callable[[int, str, Path], None]
#: Says of a sync (method, path) whether it is left out.
Forgotten = Callable[[str, Path], bool]


def none_forgotten(_method: str, _path: Path) -> bool:
    return False


C = TypeVar("C", bound=Callable[..., Any])


def recorded(call: C) -> C:
    """A call before which the process may be killed, and of which ``watch`` is told."""

    @wraps(call)
    def method(self: RecordingStorage, *given: Any) -> Any:
        if self.kill_at and self.calls + 1 >= self.kill_at:
            raise Killed
        path = given[-1]
        if not isinstance(path, Path):
            fd = given[1] if len(given) == 5 else given[0]  # copies have a source too
            _, path = self._opened.get(fd, (None, Path()))
        result = call(self, *given)
        self.calls += 1
        self.watch(self.calls, call.__name__, path)
        return result

    return cast("C", method)


class RecordingStorage(FastStorage):
    """Does everything on the real disk, and keeps a :class:`Disk` beside it.

    filelock's heartbeats do not come through here: ``foreign`` says which names are not known.

    Attributes:
        watch: told of each call when it is done.
        kill_at: the number of the call before which the process is killed; 0 for never.
        forgotten: the syncs that a broken product would leave out.
    """

    def __init__(self, root: Path, *, foreign: Callable[[Path], bool]) -> None:
        super().__init__()
        self.disk = Disk(root)
        self.calls = 0
        self.kill_at = 0
        self.watch: Watch = lambda *_: None
        self.forgotten: Forgotten = none_forgotten
        self._foreign = foreign
        self._opened: dict[int, tuple[int, Path]] = {}

    def _known(self, path: Path) -> bool:
        return self.disk.covers(path) and not (self._foreign(path) and self.disk.find(path) is None)

    @recorded
    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        if self._known(path):
            self.disk.new(path, Folder())

    @recorded
    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        if self._known(path):
            self.disk.remove(path)

    @recorded
    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if self._known(source):
            self.disk.rename(source, target)

    @recorded
    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        if self._known(source) and self.disk.covers(target):
            self.disk.enter(target, self.disk.at(source))

    @recorded
    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self._known(path):
            self.disk.remove(path)

    @recorded
    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._opened.pop(fd, None)
        if self.disk.covers(path):
            self._opened[fd] = (self.disk.new(path, File()), path)
        return fd

    @recorded
    def open_append(self, path: Path, flag: int = os.O_APPEND) -> int:
        fd = super().open_append(path, flag)
        node = self.disk.find(path)
        if node is None:
            node = self.disk.new(path, File())
        self._opened[fd] = (node, path)
        return fd

    @recorded
    def write(self, fd: int, data: bytes | memoryview) -> int:
        count = super().write(fd, data)
        end = os.lseek(fd, 0, os.SEEK_CUR)
        return self._wrote(fd, bytes(memoryview(data).cast("B")[:count]), end - count)

    @recorded
    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        count = super().pwrite(fd, data, offset)
        return self._wrote(fd, bytes(memoryview(data).cast("B")[:count]), offset)

    @recorded
    def copy_file_range(self, *given: int) -> int:
        return self._copied(super().copy_file_range(*given), *given)

    @recorded
    def clone_range(self, *given: int) -> None:
        super().clone_range(*given)
        self._copied(given[2], *given)

    @recorded
    def sendfile(self, *given: int) -> int:
        return self._copied(super().sendfile(*given), *given)

    def _copied(self, done: int, source: int, target: int, _: int, at: int, to: int) -> int:
        return self._wrote(target, os.pread(source, done, at), to)

    def _wrote(self, fd: int, data: bytes, at: int) -> int:
        node, _ = self._opened.get(fd, (None, Path()))
        if node is not None:
            file = self.disk.file(node)
            before = file.now.ljust(at, b"\0")
            file.now = before[:at] + data + before[at + len(data) :]
        return len(data)

    @recorded
    def fsync(self, fd: int) -> None:
        node, path = self._opened.get(fd, (None, Path()))
        if node is not None and not self.forgotten("fsync", path):
            file = self.disk.file(node)
            file.durable = file.now

    @recorded
    def close(self, fd: int) -> None:
        super().close(fd)
        self._opened.pop(fd, None)

    @recorded
    def sync_folder(self, path: Path) -> None:
        os.close(self._beneath.open_folder(path))
        if self.disk.covers(path) and not self.forgotten("sync_folder", path):
            self.disk.sync_folder(path)


# -- crash states ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """What one power loss leaves.

    Attributes:
        name: after which call, and what made it.
        tree: what is on the disk.
        heartbeats: those of filelock, with their bytes.
    """

    name: str
    tree: Tree
    heartbeats: dict[str, bytes]

    @property
    def key(self) -> frozenset[tuple[str, bytes | None]]:
        """What two losses share that cannot be told from each other."""
        return frozenset(
            [*((path, content) for path, (_, content) in self.tree.items()),
             *self.heartbeats.items()]
        )  # fmt: skip

    def content(self, path: str) -> bytes | None:
        """A file's bytes; None where there is no such file."""
        return self.tree.get(path, (0, None))[1]

    def below(self, folder: str) -> dict[str, bytes]:
        """The files below a folder, by paths in it."""
        prefix = f"{folder}/"
        return {
            path[len(prefix) :]: content
            for path, (_, content) in self.tree.items()
            if content is not None and path.startswith(prefix)
        }

    def onto(self, root: Path) -> None:
        """Make it real, in a new folder."""
        root.mkdir(parents=True)
        linked: dict[int, Path] = {}
        for name, (node, content) in self.tree.items():  # folders come before what is in them
            path = root / name
            if content is None:
                path.mkdir()
            elif node in linked:
                os.link(linked[node], path)
            elif content.strip(b"\0"):
                path.write_bytes(content)
                linked[node] = path
            else:
                with path.open("wb") as file:
                    file.truncate(len(content))
                linked[node] = path
        for name, content in self.heartbeats.items():
            if (root / name).parent.is_dir():
                (root / name).write_bytes(content)


def losses(
    disk: Disk,
    name: str,
    heartbeats: dict[str, bytes],
    chance: random.Random,
    by_chance_too: int,
) -> Iterator[Loss]:
    """What a power loss at this moment may leave: the two extremes, and some in between."""
    everything = list(disk.pending)
    yield Loss(f"{name}: nothing unsynced survived", disk.after_loss((), dropped), {})
    yield Loss(
        f"{name}: all names survived, no bytes", disk.after_loss(everything, dropped), heartbeats
    )
    for number in range(by_chance_too):
        likely = chance.choice([0.1, 0.5, 0.9])
        some = [change for change in everything if chance.random() < likely]
        beats = {
            path: chance.choice([content, b""])
            for path, content in heartbeats.items()
            if chance.random() < 0.5
        }
        tree = disk.after_loss(some, by_chance(chance))
        yield Loss(f"{name}: some of it survived ({number})", tree, beats)
