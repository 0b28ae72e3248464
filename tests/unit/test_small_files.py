"""Small files never stop weights: they fail in the constructor, or the last good ones stay."""

import errno
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from torch import nn

from tests import tiny_language
from tests.hooks import written
from tests.jobs import SmallJob
from tests.refusals import invalid, save_fails
from tests.storages import RuledStorage
from trainer_hooks import SaveSettings, TrainerHook, WeightStream
from trainer_hooks.settings import SaveLayout
from trainer_hooks.trinity import CheckpointCoordinator

DOORS = ("sharded", "full", "stream")


class PanicError(BaseException):
    """As a panic in Rust: no Exception."""


@dataclass
class Run:
    """A trainer with a language model; a stream publishes the small files of a folder."""

    job: SmallJob
    door: str
    folder: Path
    stack: ExitStack
    patch: pytest.MonkeyPatch
    model: Any = field(default_factory=tiny_language.model)
    tokenizer: Any = field(default_factory=tiny_language.tokenizer)

    def __post_init__(self) -> None:
        self.model.config.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)
        self.source: Any = self.folder

    def open(self) -> None:
        if self.door == "stream":
            made = WeightStream(self.job.root, model_files=self.source)
        else:
            saving = SaveSettings(layout=SaveLayout(self.door), final=False)
            made = TrainerHook(self.job.root, self.model, tokenizer=self.tokenizer, saving=saving)
        self.trainer = self.stack.enter_context(made)

    def save(self, step: int) -> dict[str, bytes]:
        """Save a step; return its small files."""
        if self.door == "stream":
            self.trainer.save(step, self.model.state_dict())
            self.trainer.wait()
        else:
            self.trainer.save_state_dict(step)
            written(self.trainer)
        folder = self.job.actor(step) / "huggingface"
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def fails(kind: type[BaseException]) -> Callable[[Run], object]:
    """Break what writes a tokenizer; a stream's folder is a tokenizer then."""

    def save_pretrained(*_: object, **__: object) -> None:
        raise kind("broken")

    return lambda run: run.patch.setattr(run.tokenizer, "save_pretrained", save_pretrained)


def unwritable(part: str, kind: Callable[[], object]) -> Callable[[Run], object]:
    return lambda run: setattr(getattr(run.model, part), "more", kind())


Table = dict[str, tuple[str, Callable[[Run], object], tuple[str, ...]]]
#: What breaks → words of the error, what breaks it, and the doors.
BROKEN: Table = {
    **{
        kind.__name__: (f"(tokenizer|model_files) .* {kind.__name__}: broken", fails(kind), DOORS)
        for kind in (ValueError, OSError, RecursionError, SystemExit, PanicError)
    },
    "template": (
        "tokenizer", lambda run: setattr(run.tokenizer, "chat_template", object()), DOORS[:2],
    ),
    "config": ("model.config .* object is not JSON", unwritable("config", object), DOORS[:2]),
    "copy": ("model.config .* pickle", unwritable("config", Lock), DOORS[:2]),
    "generation": ("model.generation_config", unwritable("generation_config", object), DOORS[:2]),
    "link": ("nowhere", lambda run: (run.folder / "nowhere").symlink_to("nothing"), DOORS[2:]),
    "folder": ("folder", lambda run: shutil.rmtree(run.folder), DOORS[2:]),
    "scratch": (
        "model_files .*/none/",
        lambda run: run.patch.setattr(tempfile, "tempdir", str(run.folder / "none")), DOORS,
    ),
}  # fmt: skip
#: What is an error only if it was there before.
GONE: Table = {
    "no config": ("config.json", lambda run: setattr(run.model, "config", object()), DOORS[:2]),
    "file": ("tokenizer.json", lambda run: (run.folder / "tokenizer.json").unlink(), DOORS[2:]),
}


def cases(table: Table) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("door", "words", "spoil"),
        [
            pytest.param(door, words, spoil, id=f"{name}-{door}")
            for name, (words, spoil, doors) in table.items()
            for door in doors
        ],
    )


@pytest.fixture
def run(
    job: SmallJob, door: str, spoil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    with ExitStack() as stack:
        made = Run(job, door, tmp_path / "folder", stack, monkeypatch)
        if spoil.__qualname__.startswith("fails"):
            made.source = made.tokenizer
        yield made


@cases(BROKEN)
def test_a_constructor_names_what_cannot_be_written(run: Run, words: str, spoil: Any) -> None:
    spoil(run)
    with invalid(words):
        run.open()
    assert not list(run.job.root.rglob("config.json"))


@cases(BROKEN | GONE)
def test_what_fails_later_stays_as_it_was(
    run: Run, words: str, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run.open()
    good = run.save(1)
    spoil(run)
    assert run.save(2) == run.save(3) == good
    (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert re.search(words, warning.message)


@cases(BROKEN | GONE)
def test_what_fails_beside_other_tensors_fails_the_save(run: Run, words: str, spoil: Any) -> None:
    run.open()
    spoil(run)
    run.save(1)  # they are those of the constructor
    run.model.bfloat16()
    reason = "was F32" if run.door == "stream" else f"step 2 failed: .*{words}"
    with save_fails(reason):
        run.save(2)
    run.model.float()
    run.save(3)


@pytest.mark.parametrize(("door", "spoil"), [(door, fails(ValueError)) for door in DOORS])
def test_a_good_write_replaces_the_last_one(run: Run, spoil: Any) -> None:
    run.open()
    good = run.save(1)
    run.tokenizer.add_tokens("more")
    spoil(run)
    assert run.save(2) == good
    run.patch.undo()
    assert b"more" in run.save(3)["tokenizer.json"]


def test_storage_that_refuses_a_small_file_fails_the_save(
    job: SmallJob, storage: RuledStorage
) -> None:
    with TrainerHook(job.root, tiny_language.model(), storage=storage) as hook:
        storage.refuse("rename", errno.EACCES, where="huggingface/config.json")
        hook.after_step(1)
        with save_fails(r"could not write .*huggingface/"):
            written(hook)
        storage.rules.clear()


def test_a_coordinator_keeps_what_its_functions_wrote(job: SmallJob) -> None:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(texts.pop())

    texts, model = ["{}"], nn.Linear(2, 2)
    with CheckpointCoordinator(job.root) as trainer:
        for step in (1, 2):
            trainer.save_model(model, step, model_files=(write,))
            trainer.wait_all()
    assert (job.actor(2) / "huggingface" / "config.json").read_text() == "{}"
