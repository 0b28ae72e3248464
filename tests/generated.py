"""The parts of pages that come from the code: ``python -m tests.generated`` writes them anew.

A part stands below a heading, between ``<!-- generated -->`` and ``<!-- end -->``.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import StrEnum

import click

from syncd.cli import cli
from syncd.daemon.config import KEYS, LIVE_KEYS, RunConfig
from syncd.daemon.configuration import toml_value, written
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import Latest, Manifest, Receipt
from syncd.protocol.reports import DaemonReport, ExplorerReport, TrainerReport
from tests import doc_lists, examples
from tests.doc_blocks import text_of
from tests.doc_links import ROOT
from tests.doc_lists import filled, item, listed

_PART = re.compile(
    r"(^#+ (?P<heading>[^\n]*)\n(?:(?!#)[^\n]*\n)*?<!-- generated -->\n).*?(?=^<!-- end -->)",
    re.DOTALL | re.MULTILINE,
)
#: What stands in code on a page, and not in the text of ``--help``.
_CODE = re.compile(r"(?<![`\w])'(syncd [^']*)'|(?<![`\w-])(--[a-z][\w-]*(?:=[\w-]+)?)(?![\w`-])")
_DEFAULT = re.compile(r"\[default: (.*?)\]")
#: The default and the bounds, at the end.
_ASIDE = re.compile(r"(\s*\[[^\]]*\])*$")


def generated(page: str) -> str:
    """A page as it should be."""
    return _PART.sub(lambda part: part[1] + PARTS[page](part["heading"]), text_of(page))


def keys(_heading: str) -> str:
    """The keys of the configuration."""
    defaults = written(RunConfig())
    items = []
    for key, hint in sorted(KEYS.items(), key=lambda item: item[0] not in {"job", "root"}):
        default = f"`{toml_value(defaults[key])}`" if defaults[key] != "" else ""
        aside = ", ".join(filter(None, (default, "live" * (key in LIVE_KEYS))))
        items.append(item([key], aside, as_code(str(hint.marks[-1]))))
    return listed(items)


def settings(_heading: str) -> str:
    """The fields of ``SyncSettings``, with the meanings in its docstring."""
    doc = inspect.getdoc(SyncSettings) or ""
    said = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", doc, re.MULTILINE)
    meanings = {name: meaning for names, meaning in said for name in names.split(", ")}
    return listed(
        item([field.name], shown(field.default), as_code(meanings[field.name].replace("``", "`")))
        for field in fields(SyncSettings)
    )


def records(_heading: str) -> str:
    """The keys of records."""
    kinds = {
        "LATEST": Latest,
        "manifest.json": Manifest,
        "rank_R.json": Receipt,
        "daemon.json": DaemonReport,
        "trainer.json": TrainerReport,
        "explorers/NAME.json": ExplorerReport,
    }
    return listed(
        item(
            [name],
            "",
            item(
                [
                    *(it.alias or key for key, it in kind.model_fields.items()),
                    *kind.model_computed_fields,
                ],
                "",
            ),
        )
        for name, kind in kinds.items()
    )


def usage(heading: str) -> str:
    """A command: how it is called, the first paragraph of its help, and its options."""
    command = find(heading)
    options = options_of(heading)
    options.pop("as_json", None)
    pieces = command.collect_usage_pieces(click.Context(command))
    words = " ".join([heading, *(piece for piece in pieces if options or piece != "[OPTIONS]")])
    said = as_code((command.help or "").partition("\n\n")[0])
    line = f"`{words}`: {said[0].lower()}{said[1:]}"
    return f"{filled(line)}\n\n" + listed(items_of(heading, options))


def items_of(heading: str, options: dict[str, click.Option]) -> Iterator[str]:
    """The items of a command's options; the keys of the configuration have a page of their own."""
    others = ["syncd run", "syncd convert", "syncd rollback", heading]
    same: dict[tuple[str, str], list[str]] = {}
    for name, option in options.items():
        words = [*option.opts, *option.secondary_opts]
        amount = option.metavar or option.type.name.upper()
        words[-1] += f" {amount}" if option.metavar or amount in {"SECONDS", "BYTES"} else ""
        help_ = as_code(option.help or "")
        default = "".join(_DEFAULT.findall(help_)) or shown(option.default)
        meaning = _ASIDE.sub("", help_)
        if option.secondary_opts:
            default = "on" if option.default else "off"
        elif option.is_flag:
            default = ""
        elif default and isinstance(option.default, str):
            default = f"`{default}`"
        first = next(one for one in others if help_in(one, name) == option.help)
        if first != heading:
            default, meaning = "", f"as for `{first}`"
        elif heading == "syncd run" and name in KEYS:
            continue
        same.setdefault((default, meaning if not default else name), [meaning]).extend(words)
    for (default, _), (meaning, *words) in same.items():
        yield item(words, default, meaning)


def help_in(command: str, name: str) -> str | None:
    """The help of a command's option; None if it has no such option."""
    option = options_of(command).get(name)
    return option.help if option else None


def find(name: str) -> click.Command:
    """The command with a name such as ``syncd config show``."""
    command = cli
    for word in name.split()[1:]:
        assert isinstance(command, click.Group)
        inner = command.get_command(click.Context(command), word)
        assert inner is not None, f"there is no command {name}"
        command = inner
    return command


def options_of(name: str) -> dict[str, click.Option]:
    """The options of a command, by the names of their parameters."""
    return {one.name or "": one for one in find(name).params if isinstance(one, click.Option)}


def shown(default: object) -> str:
    """A default, as a table shows it."""
    if isinstance(default, StrEnum):
        return f"`{default.value}`"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, int) and default and default % 2**20 == 0:
        return f"{default // 2**20} MiB"
    return str(default) if isinstance(default, int | str) else ""


def as_code(text: str) -> str:
    """Text of ``--help`` as Markdown."""
    return _CODE.sub(lambda word: f"`{word[1] or word[2]}`", " ".join(text.split()))


#: page → how a part is made of the heading above it.
PARTS: dict[str, Callable[[str], str]] = {
    "docs/cli.md": usage,
    "docs/configuration.md": lambda heading: (
        keys(heading) if heading == "Keys" else settings(heading)
    ),
    "docs/protocol.md": records,
}

if __name__ == "__main__":
    for name in PARTS:
        (ROOT / name).write_text(generated(name), encoding="utf-8")
    for name in doc_lists.PAGES:
        (doc_lists.DOCS / name).write_text(doc_lists.page(name), encoding="utf-8")
    for path in examples.PAGES:
        path.write_text(examples.with_examples(path.read_text()))
