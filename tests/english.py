"""The rates of some words in the texts of syncd, per 1,000 words: ``python -m tests.english``.

Code text is docstrings, comments, and the strings that are raised, logged or shown as help. Text of
pages is everything in them except fenced blocks and the addresses of links.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
#: The folders whose modules a reader of the code opens.
CODE: Final = ("syncd", "trainer_hooks", "explorer_hooks", "benchmarks")
#: The heading of a column → the words that it counts.
COUNTED: Final = {
    "what/who": r"what(?:ever)?|who(?:ever|m|se)?",
    "where": r"wherever|where",
    "if": r"if",
    "because": r"because",
    "you": r"your?",
}
#: First words of a docstring that say a question instead of naming a thing.
QUESTIONS: Final = re.compile(r"(?:What|Who|Whether|Which|Where|How|When)")
_LOGGED: Final = frozenset({"debug", "info", "warning", "error", "critical", "exception", "log"})
_HELP: Final = frozenset({"help", "description", "epilog", "title"})
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE_SPAN: Final = re.compile(r"``[^`]+``|`[^`\n]+`")
_FENCE: Final = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_ADDRESS: Final = re.compile(r"\]\([^)]*\)")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules() -> Iterator[Path]:
    """All modules of the product and the benchmarks."""
    for top in CODE:
        yield from sorted((ROOT / top).rglob("*.py"))


def pages() -> list[Path]:
    """The pages for people: those at the root of the repository, and ``docs/``."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def module_docstring(path: Path) -> str:
    """The docstring of a module; empty if it has none."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def code_text(source: str) -> str:
    """The docstrings, comments and messages of a module, without code in backticks."""
    read = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token.string.lstrip("#: ") for token in read if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            found.append(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Raise) or _is_log_call(node):
            found.append(_strings(node))
        elif isinstance(node, ast.keyword) and node.arg in _HELP:
            found.append(_strings(node.value))
    return _CODE_SPAN.sub(" ", "\n".join(found))


def page_text(source: str) -> str:
    """The prose of a page."""
    return _CODE_SPAN.sub(" ", _ADDRESS.sub("]", _FENCE.sub(" ", source)))


def rates(text: str) -> dict[str, float]:
    """Heading → how often its words occur, per 1,000 words; and ``words``, how many there are."""
    words = len(_WORD.findall(text))
    found = {"words": float(words)}
    for heading, pattern in COUNTED.items():
        number = len(re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))
        found[heading] = 1000 * number / max(words, 1)
    return found


def _is_log_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _LOGGED
    )


def _strings(node: ast.AST) -> str:
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return " ".join(value for value in constants if isinstance(value, str))


def _row(name: str, text: str) -> str:
    found = rates(text)
    return f"{name:<28} {found['words']:8.0f} " + " ".join(
        f"{found[heading]:8.1f}" for heading in COUNTED
    )


def _print(each: bool) -> None:
    code = {str(p.relative_to(ROOT)): code_text(p.read_text()) for p in modules()}
    prose = {str(p.relative_to(ROOT)): page_text(p.read_text()) for p in pages()}
    print(f"{'per 1,000 words':<28} {'words':>8} " + " ".join(f"{one:>8}" for one in COUNTED))
    for name, texts in (("code", code), ("pages", prose)):
        print(_row(name, "\n".join(texts.values())))
    if each:
        for name, text in (code | prose).items():
            print(_row(name, text))
        return
    rooms: dict[str, list[str]] = {}
    for name, text in code.items():
        parts = name.split("/")
        rooms.setdefault("/".join(parts[: 2 if len(parts) > 2 else 1]), []).append(text)
    for room, found in sorted(rooms.items()):
        print(_row(room, "\n".join(found)))


if __name__ == "__main__":
    _print(each="--each" in sys.argv[1:])
