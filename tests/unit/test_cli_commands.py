"""Every command there is, those of other packages too: help, example, documentation, completion."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
import pytest

from syncd.cli import cli
from syncd.daemon.config import KEYS
from syncd.operate.history import Live, history
from syncd.operate.job_state import look
from syncd.protocol import errors
from tests.commands import invoke
from tests.doc_blocks import blocks
from tests.jobs import SmallJob
from tests.places import ROOT
from tests.programs import completed

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (syncd .*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for child in group.list_commands(context):
        found = group.get_command(context, child)
        assert found is not None
        assert found.name == child
        yield f"{name} {child}", found
        if isinstance(found, click.Group):
            yield from commands(found, f"{name} {child}")


COMMANDS = dict(commands(cli, "syncd"))


def options(command: click.Command) -> dict[str, click.Option]:
    found = [p for p in command.params if isinstance(p, click.Option)]
    return {word: option for option in found for word in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_an_example_that_it_takes_and_a_section_of_the_page(
    name: str,
) -> None:
    command = COMMANDS[name]
    assert command.help
    assert all(option.help for option in options(command).values())

    assert command.epilog
    assert command.epilog.startswith("Example: syncd ")
    example = shlex.split(command.epilog.removeprefix("Example: "))
    words = name.split()
    assert example[: len(words)] == words
    known = options(command)
    inner = COMMANDS.get(" ".join(example[: len(words) + 1]))
    if isinstance(command, click.Group):
        assert inner is not None, "an example of a group is one of its commands"
        known = options(inner)
    else:
        needed = [p for p in command.params if isinstance(p, click.Argument) and p.required]
        assert len([word for word in example[len(words) :] if word[0] != "-"]) >= len(needed)
        required = [p for p in command.params if isinstance(p, click.Option) and p.required]
        assert all(set(option.opts) & set(example) for option in required)
    assert {word for word in example if word.startswith("-")} <= set(known)

    shown = invoke(*words[1:], "--help")
    assert shown.exit_code == 0
    assert "Example:" in shown.output
    assert all(len(line) <= 80 for line in shown.output.splitlines())

    section = SECTIONS.get(name)
    assert section is not None, f"docs/cli.md has no section '## {name}'"
    assert f"`{name}" in section
    # In code, and not as the beginning of another one's name. Another page lists the keys.
    elsewhere = KEYS if name == "syncd run" else ()
    missing = [
        word
        for word, option in options(command).items()
        if option.name not in elsewhere and not re.search(rf"`{re.escape(word)}(?![\w-])", section)
    ]
    assert not missing, f"'## {name}' of docs/cli.md says nothing of {', '.join(missing)}"


def defaults(name: str) -> dict[str, str]:
    """Option → its default as the page has it, in parentheses, of the lists in its section."""
    items = re.findall(r"^- (`--(?:(?!: ).|\n  )*)", SECTIONS[name], re.MULTILINE)
    return {
        option: default.strip("`")
        for item in items
        for said in item.split(";")
        for default in re.findall(r"\((.*)\)", said)
        for option in re.findall(r"`(--[\w-]+)", said)
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_default_is_documented_as_it_is(name: str) -> None:
    for word, documented in defaults(name).items():
        option = options(COMMANDS[name])[word]
        if option.secondary_opts:
            assert documented == ("on" if option.default else "off"), word
        elif isinstance(option.default, int | float) and not option.is_flag:
            assert float(documented) == option.default, word
        elif isinstance(option.default, str | Path):
            assert documented == str(option.default), word
        elif option.is_flag:
            assert not documented, word


def test_every_key_of_what_is_printed_as_json_is_documented(job: SmallJob) -> None:
    job.save(1)
    job.run()
    (told,) = history(job, 1)
    told.live.append(Live("rollout-0", None, None, None))
    printed = {
        "syncd status": look(job).model_dump(by_alias=True),
        "syncd history": asdict(told),
    }
    for name, seen in printed.items():
        inside = [one for value in seen.values() if isinstance(value, list) for one in value]
        keys = set(seen).union(*(one for one in inside if "event" not in one))
        assert {key for key in keys if f"`{key}`" not in SECTIONS[name]} == set(), name


def test_every_command_has_json() -> None:
    leaves = {name: one for name, one in COMMANDS.items() if not isinstance(one, click.Group)}
    assert {name for name, one in leaves.items() if "--json" not in options(one)} == set()


def test_help_lists_the_commands_in_groups() -> None:
    groups = re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", invoke("--help").output, re.MULTILINE)
    listed = {group: re.findall(r"^  (\w+) ", lines, re.MULTILINE) for group, lines in groups}
    assert listed == {
        "Serve": ["run", "follow", "mirror"],
        "Look": ["status", "history", "web", "verify"],
        "Steer": ["pin", "unpin", "rollback", "pause", "resume"],
        "Offline": ["convert", "merge", "prune"],
        "Set up": ["doctor", "config", "unit", "demo"],
        "Options": [],
    }


AMOUNTS = [
    pytest.param(option, id=f"{name} {option.opts[0]}")
    for name, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option)
    and (option.metavar in {"SECONDS", "BYTES"} or option.type.name in {"seconds", "bytes"})
]


@pytest.mark.parametrize("option", AMOUNTS)
def test_every_duration_and_size_may_have_a_unit(option: click.Option) -> None:
    taken = {
        "seconds": {"1500ms": 1.5, "2 s": 2.0, "1.5": 1.5},
        "bytes": {"2kB": 2000, "7": 7},
    }
    kind = option.type.name
    for text, amount in taken[kind].items():
        found = option.type.convert(text, option, None)
        assert found == amount
        assert type(found) is type(amount)
    for wrong in ("5 parsecs", "nan", "1,5", "", "s", "1.5B" if kind == "bytes" else "1.5 B"):
        with pytest.raises(click.BadParameter, match=f"a number of {kind}, or text such as "):
            option.type.convert(wrong, option, None)
    with pytest.raises(click.BadParameter, match=r", (above 0|[\d.]+ or more)"):
        option.type.convert("-1", option, None)


def test_no_option_takes_a_bare_number_of_seconds_or_bytes_alone() -> None:
    """A number with a fraction is a duration; a count that says "bytes" is a size."""
    amounts = {id(one.values[0]) for one in AMOUNTS}
    others = [
        (name, option.opts[0])
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option)
        and id(option) not in amounts
        and (isinstance(option.default, float) or "bytes" in (option.help or "").split())
    ]
    assert others == []


def test_every_exit_code_is_documented_with_its_classes() -> None:
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- `(\w+)` \((\d+)\): ", api, re.MULTILINE)
    documented = {name: int(code) for name, code in rows}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.__name__: kind.exit_code for kind in kinds if issubclass(kind, errors.SyncdError)}
    assert {name: documented.get(name) for name in codes} == codes
    assert re.search(r"^- 1: .*`OSError`", PAGE, re.MULTILINE)


@pytest.mark.parametrize("language", ["bash", "zsh", "fish"])
def test_completion_is_to_be_had_as_the_page_says(tmp_path: Path, language: str) -> None:
    (line,) = blocks("cli.md", language)
    command = tmp_path / "syncd"
    command.write_text(f"#!{sys.executable}\nfrom syncd.cli import main\nmain()\n")
    command.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(*argv: str, **more: str) -> str:
        return completed(argv, env={**env, **more}, check=True, timeout=120).stdout

    if language == "bash":
        run("bash", "-ec", f"{line}\ncomplete -p syncd")
        words = {"COMP_WORDS": "syncd stat", "COMP_CWORD": "1"}
        assert run("syncd", _SYNCD_COMPLETE="bash_complete", **words) == "plain,status\n"
    else:
        variable = f"_SYNCD_COMPLETE={language}_source"
        assert f"{variable} syncd" in line
        assert "syncd" in run("syncd", _SYNCD_COMPLETE=f"{language}_source")
