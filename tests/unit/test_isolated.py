"""Reading in a child process: what it cannot do to this one, and who is to blame for what."""

import errno
import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syncd.checkpoint.open_save import open_save
from syncd.checkpoint.placement import Position
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import read_fields
from syncd.checkpoint.sandbox import isolated, wire
from syncd.checkpoint.sandbox.isolated import IsolatedParser, ParseLimits
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.tensor_rules import PART_LIMIT
from syncd.checkpoint.torch_files.pieces import Piece, Pieces, read_pieces
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.deltas.delta_check import DeltaChecker
from syncd.protocol.errors import CancelledError, CheckpointError, ShardFormatError
from syncd.protocol.names import RECEIPTS, shard_name
from syncd.protocol.records import ReceiptFile
from tests.jobs import SmallJob, nothing, weights
from tests.places import FIXTURES
from tests.programs import completed
from tests.rank_programs import ENVIRONMENT
from tests.refusals import malformed
from tests.saved_deltas import small_delta
from tests.shards import Pickler, pickled, shard, tensor
from tests.storages import STORAGE, Clock

FIXTURES = sorted((FIXTURES).glob("*/*/model_*.pt"))
MIB = 1024 * 1024


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            pass  # a thread of an earlier test has just ended
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    # What an earlier test's threads still close is none of this test's: nothing may be added.
    before, opened = children(), set(os.listdir("/proc/self/fd"))
    yield
    for job in list(isolated._waiting):
        isolated._waiting.pop(job).close()
    assert children() <= before
    assert set(os.listdir("/proc/self/fd")) <= opened


@pytest.fixture
def child() -> Iterator[IsolatedParser]:
    with IsolatedParser(cancel=nothing, limits=ParseLimits(cpu_seconds=1)) as parser:
        yield parser


# -- the same as here --------------------------------------------------------------------------


def test_a_child_reads_what_this_process_reads(child: IsolatedParser) -> None:
    assert FIXTURES
    for path in FIXTURES:
        with ShardFile.open(STORAGE, path) as here, ShardFile.open(STORAGE, path) as there:
            assert list(there.tensors(parse=child.read_pieces).items()) == list(
                here.tensors().items()
            )
    pid = child.pid
    header = weights(1.0, 2.0, name="模型")[:-8]
    assert child.read_fields(header, "x") == read_fields(header, "x")
    assert child.pid == pid


def test_every_kind_of_piece_comes_back_as_it_was() -> None:
    for path in FIXTURES:
        with ShardFile.open(STORAGE, path) as opened:
            pieces = read_pieces(opened._pickle(), "x", intact=True)
        part = Piece("BF16", (1, 3), "7", 2, Position((4, 3), (2, 0)))
        pieces |= {"ünusual": Pieces("BF16", (4, 3), (part, part)), "": Pieces("I64", (), ())}
        frames = b"".join(wire.frames(wire.piece_row(*item) for item in pieces.items()))
        rows = []
        while frames:
            tag, length = wire.FRAME.unpack_from(frames)
            rows += wire.read_rows(frames[5 : 5 + length]) if tag == wire.ROWS else []
            frames = frames[5 + length :]
        known: dict[Any, Any] = {}
        assert dict(wire.read_piece(row, known) for row in rows) == pieces


def test_as_many_tensors_as_a_large_model_has_are_read_within_the_limits(tmp_path: Path) -> None:
    rebuild = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
        b"X\1\0\0\x000X\3\0\0\0cpuK\6tQK\0K\2\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    names = [f"model.layers.{n}.mlp.experts.gate_proj.weight".encode() for n in range(20_000)]
    items = b"".join(b"X" + struct.pack("<L", len(name)) + name + rebuild for name in names)
    (tmp_path / "shard.pt").write_bytes(pickled(b"\x80\x02}(" + items + b"u."))
    with IsolatedParser(cancel=nothing) as child:
        for _ in range(2):
            with ShardFile.open(STORAGE, tmp_path / "shard.pt") as opened:
                assert len(opened.tensors(parse=child.read_pieces)) == 20_000


# -- bombs -------------------------------------------------------------------------------------

#: A dict of 10,000 numbers, then copies of it, a few bytes each.
COPIES = (
    b"\x80\x02ccollections\nOrderedDict\nq\0}("
    + b"".join(b"M" + struct.pack("<H", number) + b"N" for number in range(10_000))
    + b"uq\1]("
    + b"h\0h\1\x85R" * 10_000
    + b"e."
)
BOMBS = {
    # A tuple of itself twice, and that again, as a key, and an equal one beside it: the hash visits
    # 2 ** 60 of them. From Python 3.14 on tuples keep their hash, and the comparison visits them.
    "doubling": (
        b"\x80\x02}" + (b")\x85" + b"q\0h\0\x86" * 60 + b"Ns") * 2 + b".",
        "more than 1 s of processor time",
    ),
    "copies": (COPIES, "more memory to read than 256 MiB"),
    "a memo index": (b"\x80\x02}r\xff\xff\xff\xff.", "more memory|cannot be read"),
    "BINBYTES8": (b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".", "more memory|cannot be read"),
    "BYTEARRAY8": (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".", "more memory|cannot be read"),
    "BINUNICODE8": (b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".", "cannot be read"),
    "LONG4": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "cannot be read"),
    "LONG4, negative": (b"\x80\x02\x8b\xff\xff\xff\xff.", "cannot be read"),
    "LONG of digits": (b"L" + b"9" * 100_000 + b"L\n.", "cannot be read"),
    "FRAME": (b"\x80\x04\x95" + b"\xff" * 8 + b".", "cannot be read"),
    # Its hash goes down a million tuples on the stack; Python 3.14 ends that with an error.
    "deep": (b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.", "SIGSEGV|more memory|RecursionError"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_an_error_that_names_the_file_and_the_next_is_read(
    child: IsolatedParser, kind: str
) -> None:
    data, match = BOMBS[kind]
    with malformed(match) as caught:
        child.read_pieces(data, "/job/shard.pt", intact=True)
    assert str(caught.value).startswith("/job/shard.pt")
    assert "ave the file again" in str(caught.value)
    assert child.read_pieces(b"\x80\x02}.", "next", intact=True) == {}


@pytest.mark.parametrize(
    "text",
    [b'{"a":' * 100_000, b"[" * 1_000_000, b'{"a": ' + b"9" * 10_000 + b"}", b"\xff", b"{}]"],
)
def test_a_header_that_is_a_bomb_is_an_error(child: IsolatedParser, text: bytes) -> None:
    header = len(text).to_bytes(8, "little") + text
    with malformed(r"^/job/model.safetensors is not a whole"):
        child.read_fields(header, "/job/model.safetensors")


def test_a_header_that_takes_too_much_memory_is_an_error() -> None:
    text = b'{"__metadata__":[' + b"[]," * 300_000 + b"0]}"
    header = len(text).to_bytes(8, "little") + text
    limits = ParseLimits(memory=2 * MIB, memory_factor=2)
    with (
        IsolatedParser(cancel=nothing, limits=limits) as child,
        malformed("its header takes more memory to read than 2 MiB"),
    ):
        child.read_fields(header, "/job/model.safetensors")


def test_the_child_is_confined_and_each_file_has_its_own_time(child: IsolatedParser) -> None:
    text = b"}." + bytes(MIB)
    spent = []
    for _ in range(2):
        child.read_pieces(text, "x", intact=True)
        limits = limits_of(child)
        user, system = map(int, Path(f"/proc/{child.pid}/stat").read_text().split()[13:15])
        spent.append((user + system) / os.sysconf("SC_CLK_TCK"))
        soft, hard = limits["Max cpu time"]
        assert int(soft) <= spent[-1] + 1 + 1  # for this file, and the second that has begun
        soft, hard = map(int, limits["Max address space"])
        assert 256 * MIB + 32 * len(text) <= soft <= 512 * MIB + 32 * len(text)
        assert hard <= 4096 * MIB + 512 * MIB
    assert_confined(child)


def test_the_child_that_checks_deltas_is_confined(tmp_path: Path) -> None:
    with DeltaChecker(nothing, ParseLimits(cpu_seconds=9)) as child:
        child.check(*small_delta(tmp_path))
        assert_confined(child)
        limits = limits_of(child)
        assert int(limits["Max address space"][0]) <= 1024 * MIB
        assert int(limits["Max cpu time"][0]) <= 20


def limits_of(child: IsolatedParser) -> dict[str, list[str]]:
    told = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
    return {line[:26].strip(): line[26:].split()[:2] for line in told[1:]}


def assert_confined(child: IsolatedParser) -> None:
    """It can write no file and start no process, and is killed first."""
    limits = limits_of(child)
    for what in ("core file size", "file size", "processes", "open files"):
        assert limits[f"Max {what}"] == ["0", "0"]
    opened = {os.readlink(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir()}
    assert len(opened) == 3
    assert "/dev/null" in opened
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd')",
        "open({written!r}, 'w')",
        "os.ftruncate(3, 1)",
        "socket.create_connection(('127.0.0.1', 9))",
        "os.fork()",
    ],
)
def test_code_in_a_confined_child_reaches_nothing(tmp_path: Path, attempt: str) -> None:
    if "fork" in attempt and os.getuid() == 0:
        pytest.skip("root may always fork")
    written = tmp_path / "written"
    with open(written, "wb") as file:
        program = (
            "import os, socket; from syncd.checkpoint.sandbox.confinement import confine; confine()"
            f"\ntry: {attempt.format(written=str(written)).replace('(3,', f'({file.fileno()},')}"
            "\nexcept OSError as error: print(type(error).__name__)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=False, capture_output=True, pass_fds=[file.fileno()], timeout=60,
        )  # fmt: skip
    assert done.stdout.endswith(b"Error\n") or done.returncode == -signal.SIGXFSZ
    assert written.read_bytes() == b""


#: A user's own limits: 3 GiB of memory, an hour of processor time.
LIMITED = """
import resource
for kind, most in ((resource.RLIMIT_AS, 3 << 30), (resource.RLIMIT_CPU, 3600)):
    resource.setrlimit(kind, (most, most))
from syncd.checkpoint.sandbox.isolated import IsolatedParser
with IsolatedParser(cancel=lambda: None) as parser:
    print(parser.read_pieces(b"\\x80\\x02}.", "x", intact=True))
"""


def test_a_user_with_lower_limits_reads_files() -> None:
    argv = [sys.executable, "-c", LIMITED]
    if os.geteuid() == 0:  # root may raise its limits
        argv = ["setpriv", "--bounding-set=-sys_resource", *argv]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "{}\n"


@pytest.mark.parametrize("receipt", [False, True], ids=["no receipt", "a forged receipt"])
def test_a_save_of_another_trainer_that_is_a_bomb_is_quarantined_and_the_next_published(
    job: SmallJob, receipt: bool
) -> None:
    actor = job.actor(4)
    (actor / RECEIPTS if receipt else actor).mkdir(parents=True)
    path = actor / shard_name(1, 0)
    job.put(path, shard({}, **{"data.pkl": COPIES}))
    if receipt:
        with ShardFile.open(job.storage, path) as bomb:
            file = ReceiptFile(
                name=path.name,
                size=bomb.size,
                digest=bomb.directory_digest,
                over="central-directory",
            )
        job.receipt(4, "run-4-0", 0, 1, file)
    job.point(4)
    with job.daemon() as loop:
        loop.rounds(3, 2)
        assert job.outcomes == {4: "quarantined"}
        reason = job.refused.reason
        assert reason.startswith(str(actor / shard_name(1, 0)))
        assert "more memory" in reason
        job.save(5, receipts=False)
        loop.rounds(3, 2)
        assert job.latest.step == 5


# -- who ends it -------------------------------------------------------------------------------


def test_cancel_is_heard_while_the_child_works() -> None:
    asked = []

    def cancel() -> None:
        asked.append(parser.pid)
        if len(asked) > 5:
            raise CancelledError("asked to stop")

    with IsolatedParser(cancel=cancel) as parser:
        with pytest.raises(CancelledError):
            parser.read_pieces(BOMBS["doubling"][0], "x", intact=True)
        assert parser.pid is None
        assert not children() & {pid for pid in asked if pid}


def opened_by(job: SmallJob, step: int) -> int | None:
    """Save a step and open it; return the child that read it."""
    job.save(step)
    actor = job.actor(step)
    with open_save(job.storage, actor, look_at_save(job.storage, actor, step)) as opened:
        return opened.parser.pid


def test_a_child_reads_all_saves_of_one_job_and_none_of_another(
    job: SmallJob, tmp_path: Path
) -> None:
    before = children()
    first = opened_by(job, 4)
    assert first is not None
    job.put(job.actor(4) / "model.safetensors", b"\2\0\0\0\0\0\0\0[]")
    save = look_at_save(job.storage, job.actor(4), 4)
    with pytest.raises(CheckpointError), open_save(job.storage, job.actor(4), save):
        pass
    assert opened_by(job, 5) == first
    other = opened_by(SmallJob(tmp_path / "other"), 4)
    assert children() - before == {other}
    assert first != other


def test_a_child_that_was_killed_while_it_waited_is_replaced(job: SmallJob) -> None:
    first = opened_by(job, 4)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert opened_by(job, 5) not in (None, first)


def test_a_fork_leaves_the_child_to_its_parent(job: SmallJob) -> None:
    first = opened_by(job, 4)
    if not (fork := os.fork()):
        os._exit(len(isolated._waiting))
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert opened_by(job, 5) == first


@pytest.mark.slow
def test_a_name_map_that_is_a_bomb_is_an_error_of_the_file() -> None:
    entry = b'{"shape": [0, 1], "pieces": [{"name": "{}", "first": 0}]}'
    many = b",".join(b'"%d": %b' % (number, entry) for number in range(PART_LIMIT + 1))
    deep = b'{"tensors": ' + b"[" * 200_000
    with IsolatedParser(cancel=nothing) as child:  # it takes more than a second
        bombs = {b'{"tensors": {%b}}' % many: " its content .* more than 250000", deep: ""}
        for text, match in bombs.items():
            with malformed(f"^/job/name_map.json.*{match}"):
                child.read_name_map(text, "/job/name_map.json")
        assert child.read_name_map(b'{"protocol": 7, "other": []}', "next") == {
            "protocol": 7, "tensors": {},
        }  # fmt: skip


def test_many_saves_are_read_at_a_time_by_many_threads() -> None:
    found: list[object] = []

    def run() -> None:
        with IsolatedParser(cancel=nothing) as parser:
            found.append(parser.read_pieces(b"\x80\x02}.", "x", intact=True))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{}] * 4


def test_a_signal_to_the_whole_service_does_not_blame_the_file(child: IsolatedParser) -> None:
    child.read_pieces(b"}.", "x", intact=True)
    pid = child.pid
    assert pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert child.read_pieces(b"}.", "x", intact=True) == {}
    assert child.pid == pid


# -- a child that was taken over, and one that cannot live -------------------------------------


def impostor(folder: Path, body: str) -> str:
    """An interpreter that says something else."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable} -IS\nimport os, signal, struct, sys, time\n{body}\n")
    path.chmod(0o755)
    return str(path)


def frame(tag: bytes, content: bytes = b"") -> bytes:
    return wire.frame(tag, content)


def rows(*given: object) -> bytes:
    return frame(wire.ROWS, json.dumps(given).encode()) + frame(wire.DONE)


GOOD: list[object] = ["w", "F32", [2], "0", 0, [[4], [2], 9]]
PARTS: list[object] = ["p", "F32", [4], [GOOD[1:], GOOD[1:]]]


def changed(at: int, value: object) -> bytes:
    return rows([*GOOD[:at], value, *GOOD[at + 1 :]])


RUBBISH = {
    "no frame": b"\0" * 99,
    "a frame over the limit": wire.FRAME.pack(wire.ROWS, 2**32 - 1),
    "no JSON": frame(wire.ROWS, b"{"),
    "deep JSON": frame(wire.ROWS, b"[" * 500_000),
    "no list": frame(wire.ROWS, b"7"),
    "no row": rows(7),
    "an empty row": rows([]),
    "a long row": rows([*GOOD, 1]),
    "a name twice": rows(GOOD, GOOD),
    "a name that is none": changed(0, "\ud800"),
    "a name that is a number": changed(0, 7),
    "a dtype that is none": changed(1, "F33"),
    "a dtype that is a list": changed(1, []),
    "a size that is a bool": changed(2, [True]),
    "a size of 2**63": changed(2, [2**63]),
    "a negative size": changed(2, [-1]),
    "a size that is a float": changed(2, [2.0]),
    "a shape of many dimensions": changed(2, [1] * 65),
    "a long key": changed(3, "0" * 201),
    "a negative offset": changed(4, -1),
    "an offset that is text": changed(4, "0"),
    "a position that is text": changed(5, "ab"),
    "a position that is 0": changed(5, 0),
    "a position of lists of lists": changed(5, [[[]], [[]], 9]),
    "a position without offsets": changed(5, [[4]]),
    "a position without a mesh": changed(5, [[4], [2]]),
    "a position of another dimension": changed(5, [[4, 4], [2, 0], 9]),
    "a position that disagrees with itself": changed(5, [[4, 4], [2], 9]),
    "an offset of 2**63": changed(5, [[4], [2**63], 9]),
    "a negative place": changed(5, [[4], [-1], 9]),
    "a mesh that is text": changed(5, [[4], [2], "9"]),
    "a negative mesh": changed(5, [[4], [2], -9]),
    "a mesh that is a list": changed(5, [[4], [2], [9]]),
    "parts that are no list": rows([*PARTS[:3], "ab"]),
    "parts that are no pieces": rows([*PARTS[:3], [7]]),
    "parts of another dtype": rows(["p", "F16", *PARTS[2:]]),
    "parts of another shape": rows(["p", "F32", [5], *PARTS[3:]]),
    "a part without a position": rows([*PARTS[:3], [[*GOOD[1:5], None]]]),
    "parts of no name": rows([7, *PARTS[1:]]),
    "parts of a dtype that is none": rows(["p", "F33", [4], []]),
    "parts of a negative shape": rows(["p", "F32", [-4], []]),
    "an error of no kind": frame(wire.FAILED, b'["SystemExit", "x"]'),
    "an error of no text": frame(wire.FAILED, b'["ShardFormatError", 7]'),
    "no error": frame(wire.FAILED, b"{}"),
    "ready again": frame(wire.READY),
}
SPEAK = "os.write(1, {ready!r}); os.read(0, 99); os.write(1, {answer!r}); {then}"


def answering(folder: Path, answer: bytes, then: str = "os.read(0, 99)") -> IsolatedParser:
    """A child that answers with this, and then does something."""
    body = SPEAK.format(ready=frame(wire.READY), answer=answer, then=then)
    return IsolatedParser(cancel=nothing, python=impostor(folder, body))


def failure(child: IsolatedParser) -> str:
    """The error with which the child reads a file."""
    with child, pytest.raises(ShardFormatError) as caught:
        child.read_pieces(b"}.", "/job/shard.pt", intact=True)
    return str(caught.value)


@pytest.mark.parametrize("kind", RUBBISH)
def test_an_answer_that_cannot_be_is_an_error_of_the_file(tmp_path: Path, kind: str) -> None:
    unread = "/job/shard.pt: its data.pkl cannot be read: the process that reads it"
    assert failure(answering(tmp_path, RUBBISH[kind])).startswith(unread)


def test_the_limit_on_tensors_is_on_their_parts(tmp_path: Path) -> None:
    (tmp_path / shard_name(1, 0)).write_bytes(shard({}))
    save = look_at_save(STORAGE, tmp_path, 1)
    with (
        answering(tmp_path, rows(PARTS)) as child,
        open_save(STORAGE, tmp_path, save, limits=ParseLimits(tensors=1)) as opened,
    ):
        opened.parser = child
        with malformed("more than 1 tensors"):
            opened.tensors(opened.shards[0])


def many(count: int) -> bytes:
    """A pickle that gives one tensor many names, in fewer bytes than an answer needs for it."""
    one = io.BytesIO()
    Pickler(one, 2).dump(tensor((0,), (1,)))
    names = (b"X" + struct.pack("<I", 9) + b"t%08d" % number for number in range(count))
    kept = b"r" + struct.pack("<I", 99)
    entries = (name + b"j" + kept[1:] for name in names)
    return b"\x80\x02" + one.getvalue()[2:-1] + kept + b"0}(" + b"".join(entries) + b"u."


@pytest.mark.slow
def test_an_answer_is_no_longer_than_what_it_is_about() -> None:
    data = many(100_000)
    with IsolatedParser(cancel=nothing) as child:
        with malformed(f"over {len(data) + MIB} bytes"):
            child.read_pieces(data, "/job/shard.pt", intact=True)
        assert len(child.read_pieces(many(1000), "next", intact=True)) == 1000


@pytest.mark.slow
def test_the_answers_about_a_save_are_of_limited_bytes() -> None:
    with IsolatedParser(cancel=nothing, limits=ParseLimits(answers=3 * MIB)) as child:
        child.read_pieces(many(50_000), "/job/first.pt", intact=True)
        with malformed(r"/job/second.pt.*longer than 3 MiB"):
            child.read_pieces(many(50_000), "/job/second.pt", intact=True)


_MEASURED = """
import atexit, sys
def tell():
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM")), flush=True)
atexit.register(tell)
from syncd.cli import main
main()
"""


@pytest.mark.slow
def test_a_tensor_without_elements_takes_a_kilobyte_of_the_process_that_merges(
    tmp_path: Path,
) -> None:
    """What it takes besides, 40 MiB at most, is Python and its modules."""
    count = 50_000
    actor = tmp_path / "actor"
    actor.mkdir()
    (actor / shard_name(1, 0)).write_bytes(pickled(many(count)))
    done = completed(
        [sys.executable, "-c", _MEASURED, "merge", actor, tmp_path / "out"],
        env=ENVIRONMENT,
        timeout=120,
        check=True,
    )
    peak = int(done.stdout.split()[-1]) * 1024
    assert peak < 40 * MIB + count * 1024, peak / MIB


def test_an_answer_as_it_should_be_is_taken(tmp_path: Path) -> None:
    with answering(tmp_path, rows(GOOD, PARTS)) as child:
        found = child.read_pieces(b"}.", "x", intact=True)
    piece = Piece("F32", (2,), "0", 0, Position((4,), (2,), 9))
    assert found == {"w": piece, "p": Pieces("F32", (4,), (piece, piece))}


def test_an_entry_of_a_header_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(1.0))
    with (
        answering(tmp_path, rows(["w", "F32", [2], 0, 9])) as child,
        malformed("its header cannot be read: the process that reads it"),
    ):
        SafetensorsFile.open(STORAGE, tmp_path / "model.safetensors", parse=child.read_fields)


def test_what_a_child_says_of_a_file_cannot_leave_its_line(tmp_path: Path) -> None:
    said = json.dumps(["ShardFormatError", "bad\n\x1b[2JERROR " + "x" * 1_000]).encode()
    told = failure(answering(tmp_path, frame(wire.FAILED, said)))
    assert told.startswith("/job/shard.pt: bad\\n")
    assert told.isprintable()


@pytest.mark.parametrize(
    ("then", "match"),
    [
        ("os._exit(3)", "exit status 3"),
        ("os._exit(0)", "exit status 0"),
        ("os._exit(70)", "more memory"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "SIGABRT"),
    ],
)
def test_a_child_that_ends_is_an_error_of_the_file(tmp_path: Path, then: str, match: str) -> None:
    assert match in failure(answering(tmp_path, b"", then))


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), 9)", "os.close(1); signal.pause()"])
def test_a_child_that_is_killed_says_nothing_about_the_file(tmp_path: Path, then: str) -> None:
    with answering(tmp_path, b"", then) as child, pytest.raises(OSError, match="memory") as caught:
        child.read_pieces(b"}.", "/job/shard.pt", intact=True)
    assert caught.value.errno == errno.EAGAIN
    assert child.pid is None


def start(python: str, clock: Callable[[], float] | None = None) -> OSError:
    more = {"clock": clock} if clock else {}
    with (
        IsolatedParser(cancel=nothing, python=python, **more) as child,
        pytest.raises(OSError, match="process") as caught,
    ):
        child.read_pieces(b"}.", "/job/shard.pt", intact=True)
    assert caught.value.filename == "/job/shard.pt"
    return caught.value


@pytest.mark.parametrize(
    "body",
    ["", "sys.exit(1)", "import nothing_of_this_name", "1 +", "os.write(1, b'\\xff' * 9)"],
)
def test_a_child_that_cannot_start_says_nothing_about_the_file(tmp_path: Path, body: str) -> None:
    assert start(impostor(tmp_path, body)).errno == errno.EAGAIN


def test_a_python_that_is_gone_is_not_a_file_that_is_gone(tmp_path: Path) -> None:
    assert start(str(tmp_path / "python")).errno == errno.EAGAIN


@pytest.mark.parametrize("ready", [b"", frame(wire.READY)])
def test_a_machine_that_stands_still_says_nothing_about_the_file(
    tmp_path: Path, ready: bytes
) -> None:
    clock = Clock()

    def hours() -> float:
        clock.advance(600)
        return clock()

    body = f"os.write(1, {ready!r}); time.sleep(600)"
    assert start(impostor(tmp_path, body), hours).errno == errno.ETIMEDOUT
