"""``MirrorStore`` on folders and in memory, and on stores that refuse or replace."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import xxhash

pytest.importorskip("obstore")

from obstore.store import LocalStore, MemoryStore, S3Store

from syncd.mirror.object_store import PART, MirrorStore, ObjectGoneError, StoreError
from syncd.protocol.errors import CancelledError
from syncd.protocol.mirrored import MirroredFile, MirroredSave, MirroredVersion, version_key
from tests.ports import free_port, listening
from tests.programs import completed
from tests.rank_programs import ROOT
from tests.refusals import invalid

SIZES = (0, 5, PART + 5)
NO_AGE = timedelta(0)
LONG_AGE = timedelta(hours=1)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MirrorStore:
    store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
    return MirrorStore(f"file://{tmp_path}?sig=secret", store=store)


def content(size: int, byte: bytes = b"x") -> Iterator[bytes]:
    """In chunks, as a file is read."""
    for start in range(0, size, 1024 * 1024):
        yield byte * min(1024 * 1024, size - start)


def file(size: int = 5, byte: bytes = b"x") -> MirroredFile:
    digest = xxhash.xxh3_128_hexdigest(byte * size)
    return MirroredFile(name="model.safetensors", size=size, digest=digest)


def version(sequence: int, *files: MirroredFile) -> MirroredVersion:
    save = MirroredSave(sequence=sequence, step=sequence, save_id=f"r-{sequence}-1", files=files)
    return MirroredVersion(job="job", kind="full", saves=(save,))


def names(store: MirrorStore) -> list[str]:
    return sorted(
        key for folder in ("objects", "versions", "probe") for key, _ in store._listed(folder)
    )


def put(store: MirrorStore, *bytes_: bytes) -> list[MirroredFile]:
    """Objects of five bytes each."""
    files = [file(byte=byte) for byte in bytes_]
    for each, byte in zip(files, bytes_, strict=True):
        store.put(each, content(5, byte))
    return files


@pytest.mark.parametrize("size", SIZES)
def test_bytes_come_back_as_they_were_put(store: MirrorStore, size: int) -> None:
    store.put(file(size), content(size))
    assert b"".join(store.get(file(size))) == b"x" * size
    assert store.moved == 2 * size
    assert store.has(file(size), LONG_AGE, store.now())
    assert not store.has(file(size), NO_AGE, store.now())  # it may be removed before its use
    assert not store.has(file(size + 1), LONG_AGE, store.now())


def _stopped(size: int) -> Iterator[bytes]:
    yield from content(size - 1)
    raise CancelledError("stopped")


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (_stopped, CancelledError, "stopped"),
        (lambda size: content(size, b"y"), StoreError, "model.safetensors changed while"),
        (lambda size: content(size - 1), StoreError, "changed while"),
        (lambda size: content(size + 1), StoreError, "changed while"),
    ],
    ids=["stopped", "other bytes", "short", "long"],
)
def test_an_object_is_there_only_once_all_its_bytes_are(
    store: MirrorStore, size: int, sent: Any, error: type[Exception], words: str
) -> None:
    """Nor is it seen while it is written."""

    def watched() -> Iterator[bytes]:
        for part in sent(size):
            yield part
            with ThreadPoolExecutor() as another:  # obstore is busy in this one
                assert not another.submit(names, store).result()

    with pytest.raises(error, match=words):
        store.put(file(size), watched())
    assert not names(store)
    with pytest.raises(ObjectGoneError, match="it is not there") as raised:
        b"".join(store.get(file(size)))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("there", [-1, 0])
def test_wrong_bytes_are_refused_at_the_end(store: MirrorStore, size: int, there: int) -> None:
    wrong = b"x" * (size + there - 1) + b"y"
    store._obstore.put(store._store, file(size).key, wrong)
    with pytest.raises(StoreError, match=r"bytes that its name says|shorter than"):
        b"".join(store.get(file(size)))


def test_a_check_ends_a_transfer_before_its_next_part(store: MirrorStore) -> None:
    put(store, b"a")

    def stop() -> None:
        raise CancelledError("stopped")

    store._check = stop
    with pytest.raises(CancelledError):
        store.put(file(), content(5))
    with pytest.raises(CancelledError):
        b"".join(store.get(file(byte=b"a")))
    assert names(store) == [file(byte=b"a").key]


def test_a_version_is_added_once_and_the_newest_is_found(store: MirrorStore) -> None:
    assert store.newest() is None
    for sequence in (9, 10, 2):
        assert store.add(version(sequence, file()))
        assert not store.add(version(sequence, file(byte=b"y")))
    assert store.newest() == version(10, file())
    assert store.newest(9) == version(10, file())
    assert store.newest(10) is None
    with pytest.raises(ObjectGoneError):
        store.version(3)


def test_a_newest_version_that_goes_gives_way(store: MirrorStore) -> None:
    for sequence in (1, 2):
        store.add(version(sequence, file()))
    listed = store._listed

    def late(*given: Any) -> Iterator[Any]:
        yield from list(listed(*given))
        store._delete([version_key(2)])
        store.add(version(3, file()))

    store._listed = late  # type: ignore[method-assign] # between two requests
    assert store.newest() == version(1, file())
    assert store.newest() == version(3, file())


def test_a_damaged_record_is_left_out(store: MirrorStore) -> None:
    store.add(version(1, file()))
    store._obstore.put(store._store, version_key(2), b"{}")
    assert store.newest() == version(1, file())
    assert store.newest(1) is None


def test_a_sweep_leaves_what_the_newest_versions_need(store: MirrorStore) -> None:
    files = put(store, *(bytes([97 + number]) for number in range(6)))
    shared = files[0]
    for sequence, each in enumerate(files[1:5], 1):
        store.add(version(sequence, shared, each))
    before = names(store)
    assert store.sweep(keep=2, min_age=LONG_AGE) == 0  # all are young
    assert names(store) == before
    assert store.sweep(keep=2, min_age=-LONG_AGE) == 5  # as if all were old
    kept = [shared, *files[3:5]]
    assert names(store) == sorted([*(each.key for each in kept), *map(version_key, (3, 4))])
    assert store.newest() == version(4, shared, files[4])


#: Dies while it writes an object, once the folder has a part of it.
_KILLED = """
import os, sys, time
from pathlib import Path
from syncd.mirror.object_store import PART, MirrorStore
from tests.unit.test_mirror_store import content, file

def some():
    yield from content(2 * PART)
    while not any(Path(sys.argv[1]).glob("objects/*")):
        time.sleep(0.01)
    os._exit(9)

MirrorStore(f"file://{sys.argv[1]}").put(file(3 * PART), some())
"""


def test_a_sweep_removes_what_a_killed_push_left_in_a_folder(tmp_path: Path) -> None:
    dead = completed([sys.executable, "-c", _KILLED, tmp_path], cwd=ROOT)
    assert dead.returncode == 9, dead.stderr
    store = MirrorStore(f"file://{tmp_path}")
    assert os.listdir(tmp_path / "objects") != []
    assert names(store) == []
    assert store.sweep(keep=1, min_age=LONG_AGE) == 0  # it may still be written
    assert store.sweep(keep=1, min_age=-LONG_AGE) == 1
    assert os.listdir(tmp_path / "objects") == []


@contextmanager
def _replacing(put: int = 200, head: int = 200, deletes: bytes = b"Deleted") -> Iterator[int]:
    """A store that answers every request, and does not know conditions; its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            self._read()
            self._answer(put)

        def do_HEAD(self) -> None:
            self._answer(head)

        def do_POST(self) -> None:
            key = self._read().partition(b"<Key>")[2].partition(b"<")[0]
            answer = b"<Key>%b</Key><Code>AccessDenied</Code><Message>No</Message>" % key
            self._answer(200, b"<D><%b>%b</%b></D>" % (deletes, answer, deletes))

        def _read(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Tue, 01 Dec 2026 12:00:00 GMT")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with listening(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield server.server_port


def s3_at(port: int, bucket: str = "jobs", **options: Any) -> S3Store:
    """A bucket of a server on this host that takes any key."""
    return S3Store(
        bucket,
        access_key_id="any",
        secret_access_key="any",  # noqa: S106 - of nothing
        region="us-east-1",
        client_options={"allow_http": True},
        **{"endpoint": f"http://127.0.0.1:{port}", **options},
    )


def test_the_reason_is_told_why_a_store_cannot_be_reached() -> None:
    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=5)}
    with _replacing() as port:  # which answers without TLS
        for url, reason in (
            (f"https://127.0.0.1:{port}", "InvalidContentType"),
            (f"http://127.0.0.1:{free_port()}", "Connection refused"),
        ):
            store = s3_at(port, endpoint=url, retry_config=retries)
            with pytest.raises(StoreError, match=rf"{reason}$"):
                MirrorStore("s3://jobs", store=store).now()


@pytest.mark.parametrize("options", [{}, {"conditional_put": "disabled"}])
def test_a_store_without_conditional_writes_is_refused(options: Any) -> None:
    with _replacing() as port, invalid("no conditional writes"):
        store = s3_at(port, **options)
        MirrorStore("s3://store", store=store).check_conditions()


def test_a_write_that_another_request_disturbed_is_tried_again() -> None:
    """S3 answers 409 then, as if an object were there."""
    with _replacing(put=409, head=404) as port:
        store = MirrorStore("s3://store", store=s3_at(port))
        for write in (store.check_conditions, lambda: store.add(version(1))):
            with pytest.raises(StoreError, match="it is not there"):
                write()


def test_a_probe_that_cannot_be_deleted_stops_no_push() -> None:
    with _replacing(deletes=b"Error") as port:
        store = MirrorStore("s3://store", store=s3_at(port))
        assert store.now().hour == 12
        with pytest.raises(StoreError, match="AccessDenied"):
            store._delete(["x"])


def test_conditional_writes_are_found_and_leave_no_probe(store: MirrorStore) -> None:
    store.check_conditions()
    assert not names(store)


@pytest.mark.parametrize(
    "url", ["nothing", "ftp://host/folder", "s3://", "file://host/folder?sig=secret"]
)
def test_other_urls_are_refused_without_their_query(url: str) -> None:
    with invalid("cannot be used as the URL of a mirror") as raised:
        MirrorStore(url)
    assert "secret" not in str(raised.value)
