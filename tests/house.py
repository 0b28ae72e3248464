"""The shape of the product, counted: ``python -m tests.house``.

It reads the sources and runs one small merge; it takes a few seconds. ``tests/unit/test_house.py``
holds what must stay so.
"""

from __future__ import annotations

import ast
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple
from unittest.mock import patch

from tests.jobs import SmallJob
from tests.storages import Clock

_ROOT: Final = Path(__file__).resolve().parents[1]
_STORED: Final = _ROOT / "tests" / "fixtures" / "torch-2.15.0" / "fsdp2"
#: The calls of :class:`~syncd.storage.fsio.Storage` that put merged bytes into a file.
_WRITES: Final = frozenset({"pwrite", "copy_file_range", "sendfile", "clone_range"})
_TOPS: Final = ("syncd", "trainer_hooks", "explorer_hooks")


class Parameters(NamedTuple):
    """A function, and how many parameters it has without ``self`` and ``cls``."""

    number: int
    where: str


class House:
    """The sources of the three packages, parsed once.

    Attributes:
        trees: dotted module name → its syntax tree.
        lines: module → how many lines it has.
        imports: module → the modules of the product that it imports, packages left out.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        files = [path for top in _TOPS for path in sorted((root / top).rglob("*.py"))]
        sources = {_module(path.relative_to(root)): path.read_text() for path in files}
        self.lines = {name: source.count("\n") for name, source in sources.items()}
        self.trees = {name: ast.parse(source) for name, source in sources.items()}
        self.packages = {_module(p.relative_to(root)) for p in files if p.name == "__init__.py"}
        self.imports = {name: set(self._imported(tree)) for name, tree in self.trees.items()}

    def _imported(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found = full if full in self.trees else node.module
                    if found in self.trees and found not in self.packages:
                        yield found

    def docstring(self, module: str) -> str | None:
        """A module's docstring; None if it has none."""
        return ast.get_docstring(self.trees[module])

    def importers(self) -> dict[str, set[str]]:
        """Module → the modules that import it."""
        found: dict[str, set[str]] = defaultdict(set)
        for module, imported in self.imports.items():
            for name in imported:
                found[name].add(module)
        return found

    def repeated_classes(self) -> dict[str, list[str]]:
        """Public class names that are defined in more than one module, with those modules."""
        homes: dict[str, list[str]] = defaultdict(list)
        for module, tree in self.trees.items():
            for node in ast.iter_child_nodes(tree):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(module)
        return {name: where for name, where in homes.items() if len(where) > 1}

    def repeated_modules(self) -> dict[str, list[str]]:
        """Module names that occur twice in a package; commands are named as users type."""
        homes: dict[tuple[str, str], list[str]] = defaultdict(list)
        for module in self.trees.keys() - self.packages:
            top, leaf = module.split(".")[0], module.rsplit(".", 1)[-1]
            if not module.startswith("syncd.cli.") and leaf != "__main__":
                homes[top, leaf].append(module)
        return {leaf: sorted(where) for (_, leaf), where in homes.items() if len(where) > 1}

    def widest(self) -> list[Parameters]:
        """All functions and constructors, those with the most parameters first."""
        found = [
            Parameters(_parameters(node), f"{module}.{name}")
            for module, tree in self.trees.items()
            for name, node in _functions(tree)
        ]
        return sorted(found, reverse=True)

    def arrows(self, room: str) -> int:
        """How many pairs of parts of a room import one another; an inner room is one part."""

        def part(module: str) -> str:
            return module.removeprefix(f"{room}.").split(".")[0]

        inside = {name for name in self.trees if name.startswith(f"{room}.")}
        pairs = {(part(a), part(b)) for a in inside for b in self.imports[a] & inside}
        return sum(a != b for a, b in pairs)


class Merge(NamedTuple):
    """One merge by a daemon's loop: the modules and functions that it enters, and its depth."""

    modules: int
    functions: int
    frames: int


def traced_merge() -> Merge:
    """Let a loop publish a stored save of four FSDP2 ranks, and trace that thread's calls.

    ``frames`` is how many frames of syncd lie above the system call that writes merged bytes.
    """
    entered: set[tuple[str, str]] = set()
    depth = deepest = 0

    def is_ours(frame: FrameType) -> bool:
        return str(frame.f_globals.get("__name__", "")).startswith("syncd.")

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, deepest
        if event not in {"call", "return"} or not is_ours(frame):
            return
        depth += 1 if event == "call" else -1
        code = frame.f_code
        entered.add((frame.f_globals["__name__"], code.co_qualname))
        if code.co_name in _WRITES:
            deepest = max(deepest, depth)

    with tempfile.TemporaryDirectory() as folder:
        job = SmallJob(Path(folder))
        actor = job.actor(1)
        (actor / "huggingface").mkdir(parents=True)
        (actor / "huggingface" / "config.json").write_text("{}")
        for shard in _STORED.glob("model_*.pt"):
            shutil.copy(shard, actor)
        job.point(1)
        clock = Clock()
        here = "syncd.checkpoint.merging.merge.threads_here"
        with patch(here, return_value=1), job.daemon(clock=clock) as loop:
            sys.setprofile(note)
            try:
                for _ in range(4):  # it has no receipts: it must lie still first
                    loop.run_once()
                    clock.advance(10)
            finally:
                sys.setprofile(None)
        assert job.versions, "the merge that is traced did not take place"
    return Merge(len({module for module, _ in entered}), len(entered), deepest)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _functions(
    tree: ast.AST, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield within + node.name, node
            yield from _functions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{within}{node.name}.")


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    told = node.args
    names = [one.arg for one in (*told.posonlyargs, *told.args, *told.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])


def _print() -> None:
    house = House()
    importers = house.importers()
    single = [name for name, found in importers.items() if len(found) == 1]
    print(f"files                        {len(house.trees)}")
    print(f"lines                        {sum(house.lines.values())}")
    print(f"modules with one importer    {len(single)}")
    print(f"class names more than once   {len(house.repeated_classes())}")
    print(f"module names more than once  {len(house.repeated_modules())}")
    merge = traced_merge()
    print(f"a merge: modules entered     {merge.modules}")
    print(f"a merge: functions entered   {merge.functions}")
    print(f"a merge: frames at a write   {merge.frames}")
    for room in sorted(house.packages - {"syncd"}):
        print(f"arrows in {room:<32} {house.arrows(room):4}")
    for number, where in house.widest()[:10]:
        print(f"{number:3} parameters: {where}")


if __name__ == "__main__":
    _print()
