"""The pages: their links, the code that they have people paste, and the commands in it."""

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest

from syncd.cli import cli
from tests import examples
from tests.commands import invoke
from tests.doc_blocks import BLOCKS, PAGES, PASTED, Block, fenced, text_of
from tests.doc_links import ROOT, anchors, broken, is_outer, links, pages, slug

MARKDOWN = [str(page) for page in pages()]
#: Every block that someone could paste.
ALL = [block for page in PAGES for block in fenced(page) if block.language in PASTED]


def of(*languages: str) -> list[object]:
    return [
        pytest.param(block, id=f"{block.page}-{block.number}")
        for block in ALL
        if block.language in languages
    ]


# -- links -----------------------------------------------------------------------------------------


each_page = pytest.mark.parametrize("page", MARKDOWN)


@each_page
def test_every_link_inside_the_project_leads_to_a_file_and_a_heading(page: str) -> None:
    assert {one: why for one in links(Path(page)) if (why := broken(Path(page), one))} == {}


def test_every_link_to_the_web_is_one_that_a_browser_takes_and_encrypted() -> None:
    for page in pages():
        for target in filter(is_outer, links(page)):
            parts = urlsplit(target)
            assert parts.scheme == "https", f"{page}: {target}"
            assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]{2,}", parts.netloc), f"{page}: {target}"


def test_a_heading_is_named_as_github_names_it() -> None:
    assert slug("What systemd is told") == "what-systemd-is-told"
    assert slug("Beside a server: `syncd follow`") == "beside-a-server-syncd-follow"
    assert slug("`SaveSettings(lora=…)`") == "savesettingslora"
    assert slug("NFS, `ESTALE` & [caches](x.md)") == "nfs-estale--caches"
    assert "lora-peft" in anchors(Path("docs/peft.md"))


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = Path("docs/peft.md")
    assert broken(page, "trainer.md#faults") is None
    assert broken(page, "trainer.md#fault") == "names no heading there"
    assert broken(page, "trainers.md") == "leads nowhere"
    assert broken(page, f"../../{tmp_path.name}") == "leads out of the repository"
    assert broken(page, "#which-adapter") == "names no heading there"


def test_every_page_is_in_the_index() -> None:
    index = {target.partition("#")[0] for target in links(Path("docs/README.md"))}
    there = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert there - index == set()


def test_a_picture_is_small_and_loads_nothing() -> None:
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        text = picture.read_text()
        assert len(text) < 20_000, picture
        assert re.findall(r"url\([^#]|(?:href|src)\W", text) == [], picture


# -- what is pasted --------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_on_the_list_with_who_runs_it_or_why_nobody_does(page: str) -> None:
    """The list is ``BLOCKS`` in ``tests/doc_blocks.py``; a path on it is of a file that has it."""
    there = Counter(block.language for block in ALL if block.page == page)
    listed = {language: len(told) for language, told in BLOCKS.get(page, {}).items()}
    assert dict(there) == listed
    for told in BLOCKS.get(page, {}).values():
        for runs in told:
            if runs.startswith("tests/"):
                assert Path(page).name in (ROOT / runs).read_text()
            else:
                assert runs.startswith("not run: ")


@pytest.mark.parametrize("page", examples.PAGES, ids=lambda page: page.name)
def test_a_page_shows_its_examples_as_the_files_are(page: Path) -> None:
    """``python -m tests.generated`` writes them there."""
    assert page.read_text() == examples.with_examples(page.read_text())


def test_every_example_is_short_and_on_a_page() -> None:
    files = {path.name: path.read_text() for path in examples.FOLDER.glob("*.py")}
    shown = {name for page in examples.PAGES for name in examples.shown_in(page.read_text())}
    assert shown == files.keys()
    assert all(len(text.splitlines()) <= 70 for text in files.values())


def test_nothing_is_on_the_list_that_is_not_there() -> None:
    assert BLOCKS.keys() - set(PAGES) == set()


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", of("toml"))
def test_a_configuration_can_be_used(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(block.text)
    said = invoke("config", "check", path)
    assert said.exit_code == 0, said.output


# -- commands --------------------------------------------------------------------------------------


def command_lines(block: str) -> Iterator[list[str]]:
    """The words behind ``syncd`` of each command of a shell's block, or of a session with one."""
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # what a program prints, or a line of a text that goes on
        command: list[str] = []
        for word in [*words, ";"]:
            if re.fullmatch(r"[|&;()<>]+", word):
                if command:
                    yield command[1:]
                command = []
            elif command or word == "syncd":
                command.append(word)


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """See that the command takes these words; nothing is run, and no file need be there."""
    group = cli
    rest = words
    context = click.Context(cli, info_name="syncd")
    while isinstance(group, click.Group) and rest and not rest[0].startswith("-"):
        found = group.get_command(context, rest[0])
        assert found is not None, f"there is no command {rest[0]}"
        context = click.Context(found, info_name=rest[0], parent=context)
        group, rest = found, rest[1:]
    for parameter in group.params:
        if isinstance(parameter.type, click.Path):
            monkeypatch.setattr(parameter.type, "exists", False)
    try:
        group.make_context(group.name, list(rest))
    except click.exceptions.Exit:
        pass  # --help and --version


@each_page
def test_every_command_line_is_one_that_syncd_takes(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shells = [block for block in fenced(page) if block.language in {"sh", "bash", "console"}]
    indented = re.findall(r"^    syncd .*$", text_of(page), re.MULTILINE)
    for text in (*(block.text for block in shells), *indented):
        for words in command_lines(text.replace("\n    syncd", "\nsyncd")):
            try:
                understood(words, monkeypatch)
            except click.UsageError as error:
                pytest.fail(f"{page}: syncd {shlex.join(words)}: {error.format_message()}")


def test_a_command_line_is_found_wherever_it_stands() -> None:
    block = (
        "mkdir -p x && A=1 syncd run job \\\n    --keep 3  # a comment\n"
        "cd y; syncd status | less\nsyncd-follow@x\n$ syncd verify x\njob   it's what is printed\n"
    )
    assert list(command_lines(block)) == [
        ["run", "job", "--keep", "3"],
        ["status"],
        ["verify", "x"],
    ]


@pytest.mark.parametrize("wrong", ["run job --kepe 3", "merge one", "follow job", "rum job"])
def test_a_command_line_that_is_wrong_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        understood(wrong.split(), monkeypatch)


@each_page
def test_every_option_that_a_sentence_gives_a_command_is_one_of_it(page: str) -> None:
    """``syncd follow JOB --name N …`` in code: what is left out there cannot be checked."""
    for told in re.findall(r"`syncd ([^`\n]+)`", text_of(page)):
        group = cli
        words = told.replace("[", " ").replace("]", " ").split()
        while isinstance(group, click.Group) and words and re.fullmatch(r"[a-z]+", words[0]):
            group = group.get_command(click.Context(group), words.pop(0))
            assert group is not None, f"{page}: `syncd {told}`: there is no such command"
        assert group is not None
        known = {"--help", "--version"} | {
            word for one in group.params for word in (*one.opts, *one.secondary_opts)
        }
        given = {word.partition("=")[0].rstrip(",;:.)") for word in words if word.startswith("--")}
        assert given <= known, f"{page}: `syncd {told}`"


# -- what pages say of the code -------------------------------------------------------------------

ROOMS = ("tests/", "syncd/", "trainer_hooks/", "explorer_hooks/", "benchmarks/", "docs/", ".ci/")
TESTS = list((ROOT / "tests").rglob("test_*.py"))
FUNCTIONS = {
    name
    for path in TESTS
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}


@each_page
def test_every_test_and_every_file_that_a_page_names_is_there(page: str) -> None:
    """``tests/…`` and the other folders by their paths, ``…/test_….py`` by the end of its path."""
    named = re.findall(r"`([\w./-]+)`", text_of(page))
    paths = {one for one in named if one.startswith(ROOMS)}
    assert {one for one in paths if not any(ROOT.glob(one.rstrip("/")))} == set()
    files = {one for one in named if re.fullmatch(r"([a-z]+/)*test_\w+\.py", one)}
    assert {one for one in files if not any(path.match(one) for path in TESTS)} == set()
    assert {one for one in named if re.fullmatch(r"test_\w+", one)} - FUNCTIONS == set()


def test_every_function_of_the_architecture_is_in_the_file_beside_it() -> None:
    named = re.findall(r"`([\w.]+)`,\s+`([\w/]+)\.py`", text_of("docs/architecture.md"))
    for name, path in named:
        attrgetter(name)(import_module(path.replace("/", ".")))
    assert len(named) > 20
