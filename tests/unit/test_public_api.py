"""What users import: pinned as text, documented, and honest about what it needs."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import explorer_hooks
from syncd.protocol import errors
from tests.doc_blocks import blocks
from tests.places import DOCS
from tests.public_api import MODULES, Callee, callees, described, public

_PIN = Path(__file__).with_name("public_api.txt")
_PAGES = ("../README.md", *sorted(path.name for path in DOCS.glob("*.md")))
#: What goes without saying, and what is a seam for tests.
_PLAIN = {"self", "message", "storage", "clock", "doubles", "transport", "cancel", "look"}
_WITHOUT_TORCH = (
    "explorer_hooks.bench",
    "explorer_hooks.engines.base",
    "explorer_hooks.engines.conformance",
    "explorer_hooks.engines.fake",
    "explorer_hooks.engines.fitting",
    "explorer_hooks.follow",
    "explorer_hooks.hook",
    "explorer_hooks.reader",
    "syncd.cli",
    "syncd.coordination",
    "syncd.daemon.service",
    "syncd.protocol.errors",
    "syncd.protocol.policy",
)


def _text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def test_names_and_signatures_are_those_that_were_agreed_on() -> None:
    assert described() == _PIN.read_text(encoding="utf-8"), (
        "the public API has changed: say so in CHANGELOG.md and docs/api.md, then "
        "python -m tests.public_api >tests/unit/public_api.txt"
    )


@pytest.mark.parametrize("module", MODULES)
def test_the_page_has_each_name_of_a_module_and_no_other(module: str) -> None:
    section = re.search(
        rf"^## `{re.escape(module)}`$(.*?)(?=^## |\Z)", _text("api.md"), re.M | re.S
    )
    assert section, f"docs/api.md has no section on {module}"
    assert sorted(re.findall(r"^- `(\w+)`[ :]", section[1], re.MULTILINE)) == sorted(public(module))


def _undocumented(callee: Callee) -> Iterator[str]:
    if not callee.docs:
        yield f"{callee.name} has no docstring"
    if callee.called is None:
        return
    names = set(inspect.signature(callee.called).parameters) - _PLAIN
    said = "\n".join(callee.docs)
    # One argument may be plain from the first sentence.
    missing = [name for name in names if len(names) > 1 and not re.search(rf"\b{name}\b", said)]
    if missing:
        yield f"{callee.name} does not say what {', '.join(sorted(missing))} is"


@pytest.mark.parametrize("module", MODULES)
def test_each_name_is_documented_with_its_arguments(module: str) -> None:
    wrong = [
        line
        for name, thing in public(module).items()
        for callee in callees(name, thing)
        for line in _undocumented(callee)
    ]
    assert not wrong


def test_every_error_is_public() -> None:
    tree = [errors.SyncdError]
    for error in tree:
        tree += error.__subclasses__()
    ours = {error.__name__ for error in tree if error.__module__ == errors.__name__}
    assert set(errors.__all__) == ours


def test_names_that_are_loaded_when_used_are_those_that_are_promised() -> None:
    assert list(explorer_hooks._HOMES) == explorer_hooks.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = explorer_hooks.Nothing  # type: ignore[attr-defined]


def _imported(page: str) -> Iterator[tuple[str, str]]:
    """What the Python blocks of a page import: module and name."""
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("page", [page for page in _PAGES if "```python\n" in _text(page)])
def test_pages_tell_users_to_import_what_is_public(page: str) -> None:
    ours = ("syncd", "trainer_hooks", "explorer_hooks")
    wrong = [
        f"from {module} import {name}"
        for module, name in _imported(page)
        if module.partition(".")[0] in ours
        and (module not in MODULES or name not in public(module))
    ]
    assert not wrong


def test_what_needs_no_torch_imports_none() -> None:
    program = (
        f"import sys, explorer_hooks, {', '.join(_WITHOUT_TORCH)}\n"
        "for name in ('ExplorerHook', 'Reader', 'Staging', 'VLLMServer', 'SGLangServer'):\n"
        "    getattr(explorer_hooks, name)\n"
        "sys.exit(' '.join({'torch', 'numpy', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
