"""What another process or user may leave in a job: none of it stops, misleads or leads out."""

import errno
import json
import os
import shutil
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from explorer_hooks.reader import Reader
from syncd.daemon.config import DaemonConfig
from syncd.daemon.loop import Loop
from syncd.daemon.service import Service
from syncd.protocol.errors import (
    JobUnavailableError,
    RecordError,
    SupersededError,
    SyncdError,
    VerificationError,
    WaitTimeoutError,
)
from syncd.protocol.names import CHECKPOINT_POINTER
from syncd.protocol.records import encode
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage
from syncd.storage.job import Job
from syncd.storage.judge import sweep_broken
from tests.commands import invoke
from tests.jobs import SmallJob, nothing
from tests.products import product
from tests.storages import Clock, Rule, RuledStorage, refuse

GIGABYTE = 1024**3
ROUNDS = 4

Hostile = Callable[[Path, Path], None]


class Anchored(RuledStorage):
    """Storage as a daemon has it, links refused below the job, that a rule may disturb."""

    def __init__(self, root: Path, *rules: Rule) -> None:
        super().__init__(*rules)
        Storage.__init__(self, root, durable=False)


def remove(path: Path) -> None:
    """Whatever is there, and nothing behind a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- what may be put where something else is expected ----------------------------------------------


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "folder")


def dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def link_to_itself(path: Path, outside: Path) -> None:  # noqa: ARG001 # as the others are called
    path.symlink_to(path.name)


def pipe(path: Path, outside: Path) -> None:  # noqa: ARG001
    os.mkfifo(path)


def unix_socket(path: Path, outside: Path) -> None:  # noqa: ARG001
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def folder(path: Path, outside: Path) -> None:  # noqa: ARG001
    path.mkdir()
    (path / "precious").write_text("kept by someone")


def empty_file(path: Path, outside: Path) -> None:  # noqa: ARG001
    path.touch()


def rubbish(path: Path, outside: Path) -> None:  # noqa: ARG001
    path.write_bytes(bytes(range(256)) * 40)


def sparse_gigabyte(path: Path, outside: Path) -> None:  # noqa: ARG001
    path.touch()
    os.truncate(path, GIGABYTE)


def hard_link(path: Path, outside: Path) -> None:
    os.link(outside / "file", path)


THINGS: tuple[Hostile, ...] = (
    link_to_file, link_to_folder, link_to_itself, pipe, unix_socket, folder, empty_file, rubbish,
    sparse_gigabyte, hard_link,
)  # fmt: skip
#: What differs for a name that is expected to be a folder.
NO_FOLDERS: tuple[Hostile, ...] = (link_to_folder, link_to_itself, pipe, rubbish)
#: Groups where files are expected.
FILES = ("LATEST", "announced", "records", "manifest of LATEST", "inside actor", "locks", "asked")
#: One thing for each way in which reading a file can fail: it is a link, reading it would block,
#: it is a folder, it is no record, it is too long. The others fail in one of these ways, and are
#: tried where every kind of record is, in "records".
WAYS: tuple[Hostile, ...] = (link_to_folder, pipe, folder, rubbish, sparse_gigabyte)


DEEP = b"[" * 10_000 + b"]" * 10_000
#: Files with these bytes.
CONTENTS: dict[str, bytes] = {
    "nested": b'{"x":' + DEEP + b"}",
    "big numbers": (
        b'{"sequence":1%b,"step":1%b,"folder":"v000001","time":1e999,"lease_time":1%b}'
        % ((b"0" * 30,) * 3)
    ),
    "not a number": b'{"sequence":NaN,"step":NaN,"time":NaN,"steps":{"1":NaN}}',
    "keys twice": b'{"sequence":1,"sequence":-1,"step":1,"step":-1,"folder":"v000001"}',
    "lone surrogate": b'{"name":"\\ud800","folder":"\\ud800","run_id":"\\ud800"}',
    "steps without end": (
        b'{"steps":{"1%b":{"identity":"x","outcome":"published"},"-1":{}}}' % (b"0" * 300)
    ),
    "mistakes only": b'{"files":[' + b"1," * 50_000 + b"1]}",
}


# -- a job that others use -------------------------------------------------------------------------


class Shared:
    """A job with something of everything in it, and something outside of it.

    Versions 1 (leased) to 4 (LATEST), steps 1 (full), 2 (can be resumed from), 3 and 4 (idle).
    """

    def __init__(self, tmp_path: Path, template: Path) -> None:
        shutil.copytree(template, tmp_path, dirs_exist_ok=True, symlinks=True)
        self.outside = tmp_path / "outside"
        self.root = tmp_path / "job"
        self.job = SmallJob(self.root)
        self.layout = self.job.layout
        self.job.storage = Anchored(self.root)
        self.clock = Clock()
        self.before = self.seen_outside()

    def seen_outside(self) -> list[tuple[str, int, bytes]]:
        """Everything that is not the job's, with times and bytes."""
        parts = [self.outside, *sorted(self.outside.rglob("*"))]
        return [
            (str(path), path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in parts
        ] + [(str(sorted(path.name for path in self.outside.parent.iterdir())), 0, b"")]

    def path(self, place: str) -> Path:
        return self.root / place

    def put(self, thing: Hostile | str, place: str) -> None:
        path = self.path(place)
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(thing, str):
            path.write_bytes(CONTENTS[thing])
        else:
            thing(path, self.outside)

    @contextmanager
    def daemon(self) -> Iterator[Loop]:
        """A daemon that takes over."""
        sweep_broken(Job(self.job.storage, self.layout))
        with self.job.daemon(DaemonConfig(keep=1), clock=self.clock) as loop:
            yield loop

    def rounds(self, loop: Loop) -> list[Exception]:
        """As the service does: what storage refuses in one round is tried again in the next."""
        refused: list[Exception] = []
        for _ in range(ROUNDS):
            try:
                loop.run_once()
            except (OSError, JobUnavailableError) as error:
                refused.append(error)
            self.clock.advance(2.0)
        return refused

    def reader(self) -> Reader:
        return Reader(self.root, "explorer", poll=0.01, storage=Anchored(self.root))

    def who_begin(self) -> tuple[Callable[[], object], ...]:
        """A trainer, a daemon and an explorer."""
        storage = Anchored(self.root)
        return (
            Job(storage, self.layout).open,
            Service(self.root, DaemonConfig(), storage=storage).open,
            self.reader,
        )

    def reads(self, step: int) -> None:
        with self.reader() as reader:
            version = reader.next_version(0, 0)
            assert version.step == step
            version.verify()
            version.release()

    def kept_what_it_must(self, places: tuple[str, ...] = ()) -> None:
        """Nothing leased, full or resumable went, and nothing outside of the job."""
        assert self.seen_outside() == self.before
        needed = (
            self.layout.version(1) / "model.safetensors",
            self.layout.lease_folder(1) / "explorer.held",
            self.layout.step(1) / ".full_checkpoint",
            self.layout.actor(1) / "model.safetensors",
            self.layout.actor(2) / "optim_world_size_1_rank_0.pt",
            self.layout.actor(2) / "model.safetensors",
        )
        hostile = {self.path(place) for place in places}
        for path in needed:
            assert os.path.lexists(path) or not hostile.isdisjoint([path, *path.parents]), path

    def commands_work(self) -> None:
        """Status and a dry run end well, or with one clear line and an exit code of ours."""
        for arguments in (
            ["status", str(self.root)],
            ["status", str(self.root), "--json"],
            ["history", str(self.root), "--json"],
            ["prune", str(self.root), "--dry-run"],
        ):
            result = invoke(*arguments)
            assert result.exception is None or isinstance(result.exception, SyncdError), (
                arguments,
                result.exc_info,
            )
            if isinstance(result.exception, SyncdError):
                assert result.exception.exit_code < 64
                assert str(result.exception).isprintable()
            elif "--json" in arguments:
                assert json.loads(result.output)["job"] == str(self.root)


REPORT = ExplorerReport(name="e", session="s", status="running", sequence=1, step=1, time=0.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What :class:`Shared` is a copy of."""
    template = tmp_path_factory.mktemp("template")
    outside = template / "outside"
    (outside / "folder" / "global_step_9").mkdir(parents=True)
    (outside / "file").write_text("not the job's")
    (outside / "folder" / "also").write_text("not the job's")
    job = SmallJob(template / "job")
    layout = job.layout
    with job.daemon(DaemonConfig(keep=9, prune_steps=False)) as loop:
        loop.publish(1, 2, 3, 4)
    (layout.step(1) / ".full_checkpoint").touch()
    (layout.actor(2) / "optim_world_size_1_rank_0.pt").touch()
    job.point(1, CHECKPOINT_POINTER)
    announced = TrainerReport(run_id="run", world_size=1, status="running", step=99, time=0.0)
    job.put_record(layout.trainer_report, announced)
    job.put_record(layout.explorer("e"), REPORT)
    layout.session("held").touch()
    job.lease(1, "held")
    return template


@pytest.fixture
def shared(tmp_path: Path, template: Path) -> Shared:
    return Shared(tmp_path, template)


def named(things: object) -> str:
    return getattr(things, "__name__", str(things)).replace(" ", "-")


# -- the properties --------------------------------------------------------------------------------

#: Places in a job, by what looks at them; all of one group at once.
PLACES = {
    "LATEST": (".syncd/LATEST",),
    "announced": (".syncd/trainer.json",),
    "records": (
        ".syncd/saves.json",
        ".syncd/daemon.json",
        ".syncd/publish.lock",
        ".syncd/explorers/e.json",
        ".syncd/explorers/other.json",
        ".syncd/audit.jsonl",
        ".syncd/audit.older.jsonl",
        ".syncd/journal.jsonl",
        ".syncd/journal.older.jsonl",
        ".syncd/quarantine/step_1-abc.json",
        "published/v000003/manifest.json",
        "published/v000009/manifest.json",
        "global_step_3/actor/.receipts/rank_0.json",
    ),
    "manifest of LATEST": ("published/v000004/manifest.json",),
    "asked": (
        ".syncd/requests/a.json",
        ".syncd/requests/b",
        ".syncd/leases/v000003/.pinned",
        "global_step_3/.pinned",
        "global_step_0/remote_sampler_path.txt",
    ),
    "requests": (".syncd/requests",),
    "steps": ("latest_checkpointed_iteration.txt", "global_step_0", "global_step_3"),
    "inside a step": ("global_step_0/actor", "global_step_3/actor"),
    "inside actor": (
        "global_step_3/actor/.receipts",
        "global_step_3/actor/model.safetensors",
        "global_step_3/actor/huggingface",
    ),
    "versions": ("published/v000003", "published/v000005", "published/v000009"),
    "leases": (".syncd/leases/v000003", ".syncd/leases/v000005", ".syncd/leases/v000009"),
    "locks": (
        ".syncd/leases/v000003/explorer.gone",
        ".syncd/leases/v000003/neither",
        ".syncd/sessions/held.lock",
        ".syncd/sessions/gone.lock",
        ".syncd/sessions/x.broken-y",
        ".syncd/x.broken-y",
        ".syncd/drafts",
    ),
    "rooms": (".syncd/epoch/1-00000000", ".syncd/epoch/9-00000000"),
    "inside a room": (
        ".syncd/epoch/9-00000000/building",
        ".syncd/epoch/9-00000000/trash",
        ".syncd/epoch/9-00000000/doomed",
        ".syncd/epoch/9-00000000/other",
    ),
    "deep in a room": (
        ".syncd/epoch/9-00000000/building/v000005",
        ".syncd/epoch/9-00000000/trash/global_step_2-abc",
        ".syncd/epoch/9-00000000/trash/global_step_3-abc",
        ".syncd/epoch/9-00000000/trash/global_step_8-abc",
        ".syncd/epoch/9-00000000/trash/..-abc",
        ".syncd/epoch/9-00000000/doomed/global_step_8-abc",
    ),
}
#: Where nothing can be read, everything that it might say is kept.
NO_STEP_GOES = {"announced"}
THE_THIRD_STAYS = {"records", "steps", "inside a step", "inside actor", "versions", "leases",
                   "locks", "deep in a room", "asked"}  # fmt: skip


#: What is a record nevertheless: then it matters whose. What is none fails in the parser, one for
#: all kinds of record, and is tried with each kind in "records".
BELIEVED = ("big numbers", "keys twice", "lone surrogate")
STAND_INS = [
    *product(THINGS, FILES, usual=lambda thing, group: thing in WAYS or group == "records"),
    *product(
        NO_FOLDERS,
        sorted(PLACES.keys() - set(FILES)),
        # A link to itself is a link: refused by its type, before anybody sees where it leads.
        usual=lambda thing, group: thing is not link_to_itself or group == "steps",
    ),
    *product(
        CONTENTS,
        ("LATEST", "records", "manifest of LATEST", "asked"),
        usual=lambda said, group: said in BELIEVED or group == "records",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("thing", "group"), STAND_INS, ids=named)
def test_whatever_stands_in_for_a_name_or_a_record_the_rest_is_served(
    shared: Shared, thing: Hostile | str, group: str
) -> None:
    """A daemon takes over with it there, meets it again while it works, and the next one too."""
    places = PLACES[group]

    def put_all() -> None:
        for place in places:
            shared.put(thing, place)

    def work(step: int, before: Callable[[], None]) -> list[Exception]:
        with shared.daemon() as loop:
            before()
            shared.job.save(step)
            return shared.rounds(loop)

    put_all()
    shared.commands_work()
    refused: list[Exception] = []
    for step, meanwhile in ((5, nothing), (6, put_all)):
        before = meanwhile
        for _ in range(2):  # where a name is taken, it stands by, and takes over again
            try:
                refused = work(step, before)
                break
            except SupersededError:
                before = nothing
        assert shared.job.latest.step == step, refused
        shared.reads(step)
    shared.kept_what_it_must(places)
    shared.commands_work()
    steps = [4] if group in THE_THIRD_STAYS else [3, 4]
    versions = [2] if group in THE_THIRD_STAYS else [2, 3]
    gone = [shared.layout.version(sequence) for sequence in versions]
    if group not in NO_STEP_GOES:
        gone += [shared.layout.step(step) for step in steps]
    assert [path.name for path in gone if os.path.lexists(path)] == []


@pytest.mark.parametrize("receipts", [True, False], ids=["ours", "foreign"])
@pytest.mark.parametrize(
    ("thing", "word"),
    [(empty_file, "file"), (pipe, "pipe"), (unix_socket, "socket"), (link_to_folder, "link")],
    ids=named,
)
def test_what_stands_in_for_the_folder_of_the_model_s_config_is_named(
    shared: Shared, thing: Hostile, word: str, *, receipts: bool
) -> None:
    place = shared.layout.actor(5) / "huggingface"
    with shared.daemon() as loop:
        shared.job.save(5, receipts=receipts)
        shutil.rmtree(place)
        thing(place, shared.outside)
        shared.rounds(loop)
        records = "".join(path.read_text() for path in shared.layout.quarantine.iterdir())
        said = records or loop._journal.waiting_for
        assert str(place) in said
        assert word in said
        assert "disappeared while" not in said
        place.unlink()
        shared.job.save(5, counter=1, receipts=receipts)
        shared.rounds(loop)
        assert shared.job.latest.step == 5
    assert shared.seen_outside() == shared.before


def test_a_foreign_save_is_served_once_nothing_stands_in_for_that_folder(
    job: SmallJob, clock: Clock
) -> None:
    with job.daemon(clock=clock) as loop:
        job.save(1, receipts=False)
        place = job.actor(1) / "huggingface"
        shutil.rmtree(place)
        place.touch()
        loop.rounds(4, 5)
        assert job.versions == []
        place.unlink()
        for _ in range(4):
            clock.advance(100)  # a quarantined save is looked at now and then
            loop.run_once()
    assert job.latest.step == 1


# -- names -----------------------------------------------------------------------------------------

NAMES = (
    b"two\nlines", b"x" * 255, b"not utf-8 \xff\xfe", b"...", b"..-abc", b".-abc", b"-abc",
    b"global_step_" + b"9" * 240, b"global_step_01", b"global_step_999999999999999999",
    b"v0000001", b"v000001x", b"v999999999999999999", b".tmp-x", b"x.broken-y", b"[red]\x1b[2J",
)  # fmt: skip
FOLDERS = (
    "", "published", "published/v000003", ".syncd", ".syncd/epoch", ".syncd/leases",
    ".syncd/leases/v000004", ".syncd/sessions", ".syncd/explorers", ".syncd/quarantine",
    ".syncd/drafts", ".syncd/requests", "global_step_3", "global_step_3/actor",
    "global_step_3/actor/.receipts",
    "global_step_3/actor/huggingface", ".syncd/epoch/9-00000000", ".syncd/epoch/9-00000000/trash",
    ".syncd/epoch/9-00000000/doomed", ".syncd/epoch/9-00000000/building",
)  # fmt: skip


@pytest.mark.parametrize("thing", [rubbish, folder, link_to_folder, pipe], ids=named)
def test_names_that_are_none_of_ours_are_let_be_in_every_folder(
    shared: Shared, thing: Hostile
) -> None:
    for place in FOLDERS:
        shared.path(place).mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            thing(shared.path(place) / os.fsdecode(name), shared.outside)
    shared.commands_work()
    serves(shared)
    assert shared.job.latest.sequence == 5
    shared.commands_work()
    assert not shared.layout.version(2).exists()
    assert not shared.layout.step(4).exists()
    assert all(os.path.lexists(shared.root / os.fsdecode(name)) for name in NAMES)


# -- what was made to mislead ----------------------------------------------------------------------


def serves(shared: Shared) -> None:
    with shared.daemon() as loop:
        shared.job.save(5)
        refused = shared.rounds(loop)
    assert shared.job.latest.step == 5, refused
    shared.reads(5)
    shared.kept_what_it_must()


@pytest.mark.parametrize("told", [2**63 - 1, 10**18 - 1, 10**17])
def test_a_number_that_nobody_came_to_uses_up_no_numbers(shared: Shared, told: int) -> None:
    report = encode(REPORT.model_copy(update={"sequence": told}))
    shared.job.put(shared.layout.explorer("e"), report)
    name = f"v{min(told, 10**18 - 1)}"
    shared.layout.daemon_report.write_bytes(report)
    for place in (shared.layout.leases, shared.layout.published):
        (place / name).mkdir()
        (place / name / "x.y").touch()
    serves(shared)
    assert shared.job.latest.sequence == 5
    assert (shared.layout.published / name / "x.y").exists()


@pytest.mark.parametrize("named_by", ["LATEST", "a room"])
def test_the_last_number_of_all_pauses_and_says_which_file(shared: Shared, named_by: str) -> None:
    if named_by == "LATEST":
        said = shared.layout.latest.read_bytes()
        last = b'{"sequence":%d,"step":4,"folder":"v%d","save_id":"s"}' % ((10**18 - 1,) * 2)
        shared.job.put(shared.layout.latest, last)
        with shared.daemon() as loop:
            shared.job.save(5)
            assert any("the highest possible number" in str(error) for error in shared.rounds(loop))
        shared.job.put(shared.layout.latest, said)
    else:
        room = shared.layout.epochs / "999999999999999999-ffffffff"
        room.mkdir()
        with (
            pytest.raises(JobUnavailableError, match=rf"{room.name} .*: remove it"),
            shared.daemon(),
        ):
            pass
        room.rmdir()
    serves(shared)


def test_a_folder_that_was_set_aside_by_no_daemon_leads_nowhere(shared: Shared) -> None:
    trash = shared.layout.epochs / "9-00000000" / "trash"
    for name in ("..-x", ".-x", "-x", "published-x", ".syncd-x"):
        (trash / name / "planted").mkdir(parents=True)
        (trash / name / "planted" / "file").touch()
    serves(shared)
    assert {path.name for path in shared.root.parent.iterdir()} == {"job", "outside"}
    assert not list(shared.root.glob("planted"))
    assert not list(shared.layout.published.glob("planted"))


def test_a_tree_deeper_than_the_stack_is_removed(shared: Shared) -> None:
    at = os.open(shared.layout.step(4), os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    serves(shared)
    assert not shared.layout.step(4).exists()
    assert not any(shared.layout.epochs.glob("*/doomed/*"))


@pytest.mark.parametrize("step", [3, 5])
def test_a_step_that_is_a_link_out_of_the_job_is_neither_published_nor_deleted(
    shared: Shared, step: int
) -> None:
    aside = shared.outside / "folder" / "save"
    shared.job.save(5)
    os.rename(shared.layout.step(step), aside)
    shared.before = shared.seen_outside()
    shared.layout.step(step).symlink_to(aside)
    with shared.daemon() as loop:
        shared.rounds(loop)
        assert shared.job.latest.step == (5 if step == 3 else 4)
        shared.job.save(6)
        shared.rounds(loop)
    assert shared.job.latest.step == 6
    assert shared.layout.step(step).is_symlink()
    shared.kept_what_it_must()


def test_a_link_in_the_trash_or_among_the_condemned_is_unlinked_and_never_followed(
    shared: Shared,
) -> None:
    room = shared.layout.epochs / "9-00000000"
    for name in ("doomed/global_step_8-a", "doomed/v000001-a", "building/x", "x"):
        (room / name).parent.mkdir(parents=True, exist_ok=True)
        (room / name).symlink_to(shared.outside / "folder")
    (room / "doomed" / "global_step_9-a").mkdir()
    (room / "doomed" / "global_step_9-a" / "in").symlink_to(shared.outside / "folder")
    serves(shared)
    assert not any(path.is_symlink() for path in shared.layout.epochs.rglob("*"))


@pytest.mark.parametrize(
    "where",
    [
        ".syncd/trainer.json",
        "leases/v000003",
        "global_step_3",
        "explorers/e.json",
        "sessions/held.lock",
        "LATEST",
    ],
)
def test_what_this_user_may_not_read_keeps_nobody_from_the_rest(shared: Shared, where: str) -> None:
    if where == "LATEST":  # what may not be read is not taken for lost: it is waited for
        shared.job.storage = Anchored(shared.root, refuse("open_read", errno.EACCES, where=where))
        with pytest.raises(PermissionError), shared.daemon():
            pass
        shared.job.storage = Anchored(shared.root)
    else:
        rules = (refuse(call, errno.EACCES, where=where) for call in ("open_read", "names"))
        shared.job.storage = Anchored(shared.root, *rules)
    serves(shared)
    assert not shared.layout.version(2).exists()
    assert shared.layout.step(3).exists() is (where in {".syncd/trainer.json", "global_step_3"})


# -- where it cannot go on: which file, and what to do ---------------------------------------------

STANDING = ("published", ".syncd/epoch", ".syncd/leases", ".syncd/sessions", ".syncd")


@pytest.mark.parametrize("place", STANDING)
@pytest.mark.parametrize("thing", [link_to_folder, dangling_link, pipe], ids=named)
def test_a_folder_of_ours_that_is_none_is_named_and_nothing_is_written_through_it(
    shared: Shared, place: str, thing: Hostile
) -> None:
    service = Service(shared.root, DaemonConfig(), storage=Anchored(shared.root))
    service.open()
    whole = shared.path(place)
    aside = shared.root / "aside"
    os.rename(whole, aside)
    thing(whole, shared.outside)
    for begin in (*shared.who_begin(), service._stand_by_and_serve):
        with pytest.raises((JobUnavailableError, OSError), match=whole.name):
            begin()
    assert shared.seen_outside() == shared.before
    shared.commands_work()
    whole.unlink()
    os.rename(aside, whole)
    serves(shared)


@pytest.mark.parametrize("thing", [link_to_file, pipe, unix_socket, folder, rubbish], ids=named)
def test_a_format_that_is_none_is_an_error_of_ours_that_names_it(
    shared: Shared, thing: Hostile
) -> None:
    said = shared.layout.format.read_bytes()
    shared.put(thing, ".syncd/format.json")
    for begin in shared.who_begin():
        with pytest.raises((JobUnavailableError, RecordError), match=r"format\.json"):
            begin()
    shared.commands_work()
    remove(shared.layout.format)
    shared.layout.format.write_bytes(said)
    serves(shared)


# -- explorers -------------------------------------------------------------------------------------


each_thing = pytest.mark.parametrize("thing", [*THINGS, *CONTENTS], ids=named)


@each_thing
@pytest.mark.parametrize("name", [".syncd/LATEST", "published/v000004/manifest.json"])
def test_an_explorer_takes_no_version_whose_latest_or_manifest_is_none(
    shared: Shared, name: str, thing: Hostile | str
) -> None:
    with shared.reader() as reader:
        shared.put(thing, name)
        with pytest.raises((VerificationError, RecordError, WaitTimeoutError)):
            reader.next_version(0, 0)
        assert os.listdir(shared.layout.lease_folder(4)) == []


@pytest.mark.parametrize("thing", [link_to_folder, pipe, rubbish], ids=named)
@pytest.mark.parametrize("place", ["published/v000004", ".syncd/leases/v000004"])
def test_an_explorer_waits_for_a_version_whose_folder_is_none(
    shared: Shared, place: str, thing: Hostile
) -> None:
    with shared.reader() as reader:
        shared.put(thing, place)
        with pytest.raises((VerificationError, WaitTimeoutError)):
            reader.next_version(0, 0)
    assert shared.seen_outside() == shared.before


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [4096, LONG_RECORD_LIMIT])
def test_a_sparse_gigabyte_is_not_loaded(shared: Shared, limit: int) -> None:
    path = shared.root / "sparse"
    sparse_gigabyte(path, shared.outside)
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG) + "|longer than"):
            shared.job.storage.read(path, limit)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024**2
    finally:
        tracemalloc.stop()


# -- what people see -------------------------------------------------------------------------------


def test_status_shows_what_others_wrote_as_text_on_its_own_line(shared: Shared) -> None:
    report = {
        "name": "[/bold] \x1b[2J\nlatest   v99",
        "session": "s", "status": "running", "refused": "[red]", "time": 1e300,
    }  # fmt: skip
    shared.layout.explorer("x").write_text(json.dumps(report))
    (shared.layout.lease_folder(4) / os.fsdecode(b"[x]\n\xff")).touch()
    (shared.layout.quarantine / "[bold]\nlatest   v99").touch()
    result = invoke("status", shared.root)
    assert result.exception is None, result.exc_info
    assert "\x1b" not in result.output
    assert [line for line in result.output.splitlines() if line.startswith("latest")] == [
        "latest   v4, step 4 (F32)"
    ]
    assert "[/bold]" in result.output
