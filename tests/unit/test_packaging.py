"""What is installed is what is in the tree: no module is left out, and nothing else comes along."""

import os
import shutil
import subprocess
import sys
from email.parser import HeaderParser
from importlib.metadata import requires
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import syncd
from tests.places import ROOT
from tests.programs import completed

_PACKAGES = ("syncd", "trainer_hooks", "explorer_hooks")
_BUILD = "import sys; from setuptools import build_meta; build_meta.{}('out')"
#: What git would add.
_NEW = ("-o", "--exclude-standard")
#: Made by the build itself.
_OF_AN_SDIST = ("PKG-INFO", "syncd.egg-info/")


def _in_git(*options: str) -> set[str]:
    """What is in the repository; nothing where this is no clone.

    Args:
        options: ``-o --exclude-standard``: what is not, and would be once all is added.
    """
    if shutil.which("git") is None:
        return set()
    # The owner of a checkout may be another user than this one, in a container for example.
    listed = completed(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", *(options or ("-c",))], cwd=ROOT
    )
    return {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}


def _files(folder: Path, *tops: str) -> set[str]:
    return {
        str(found.relative_to(folder))
        for top in tops
        for found in (folder / top).rglob("*")
        # Not by its suffix: what is being written there now has another one.
        if "__pycache__" not in found.parts and found.is_file()
    }


def _build(tree: Path, what: str) -> Path:
    """A wheel or a source distribution, by the backend alone: nothing is downloaded."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = completed([sys.executable, "-c", _BUILD.format(what)], cwd=tree, env=environment)
    assert done.returncode == 0, done.stderr
    (made,) = (tree / "out").iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked source distribution of this tree."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    for name in _in_git() | _in_git(*_NEW) or _files(ROOT, "."):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name, follow_symlinks=False)
    # By tar: the safe way of tarfile came with Python 3.11.4.
    subprocess.run(["tar", "-xzf", str(_build(tree, "build_sdist")), "-C", str(folder)], check=True)
    return folder / f"syncd-{syncd.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> ZipFile:
    """The wheel that is built from the source distribution."""
    return ZipFile(_build(sdist, "build_wheel"))


@pytest.mark.slow
def test_a_source_distribution_is_what_git_has(sdist: Path) -> None:
    tracked = _in_git()
    if not tracked:
        pytest.skip("not a clone: nothing says which files are the repository's")
    found = {name for name in _files(sdist, ".") if not name.startswith(_OF_AN_SDIST)}
    assert tracked - found == set()
    # Of files that are new, and of notes that somebody keeps beside them, either is right.
    assert found - tracked - _in_git(*_NEW) == set()


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_packages_and_no_other(wheel: ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == _files(ROOT, *_PACKAGES)
    assert {f"{package}/py.typed" for package in _PACKAGES} <= held


@pytest.mark.slow
def test_a_wheel_says_what_it_is(wheel: ZipFile) -> None:
    info = f"syncd-{syncd.__version__}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "syncd"
    assert metadata["Version"] == syncd.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    assert "syncd = syncd.cli:main" in commands
    assert "follow = explorer_hooks.follow:command" in commands


@pytest.mark.slow
def test_only_extras_bring_torch_and_numpy(wheel: ZipFile) -> None:
    info = f"syncd-{syncd.__version__}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{info}/METADATA").decode())
    needs = [Requirement(one) for one in metadata.get_all("Requires-Dist", [])]
    heavy = {"torch", "numpy"}
    assert heavy.isdisjoint(one.name for one in needs if one.marker is None)

    def brought(extra: str) -> set[str]:
        found = set()
        for one in needs:
            if one.marker is not None and one.marker.evaluate({"extra": extra}):
                found |= {one.name}.union(*map(brought, one.extras))
        return found

    for extra in ("torch", "transformers", "test", "dev"):
        assert heavy <= brought(extra)


def test_the_units_of_the_top_level_are_those_that_are_installed() -> None:
    names = sorted(path.name for path in (ROOT / "systemd").iterdir())
    assert names == sorted(path.name for path in (ROOT / "syncd" / "units").glob("*.service"))
    for name in names:
        units = (ROOT / "systemd" / name, ROOT / "syncd" / "units" / name)
        assert units[0].read_bytes() == units[1].read_bytes()


def test_what_the_constraints_pin_is_something_that_is_required() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    asked = {one.name: one.specifier for one in map(Requirement, requires("syncd") or ())}
    for pin in pinned:
        (version,) = (str(one.version) for one in pin.specifier)
        assert asked[pin.name].contains(version)


def test_the_map_of_the_rooms_has_each_of_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in (*_PACKAGES, "tests")
        for path in (ROOT / top).rglob("*.py")
    }
    assert [folder for folder in sorted(folders) if f"`{folder}`" not in text] == []
