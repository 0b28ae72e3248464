"""``MirrorStore``: the objects below a URL: S3, Google Cloud Storage, Azure, or a folder."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from syncd.deltas.needs import missing_extra
from syncd.protocol.errors import InvalidSettingsError, ProtocolMismatchError, RecordError
from syncd.protocol.mirrored import (
    OBJECTS,
    VERSIONS,
    MirroredFile,
    MirroredVersion,
    expired,
    sequence_of,
    unneeded,
    version_key,
)
from syncd.protocol.names import printable
from syncd.protocol.records import encode, parse

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

#: Bytes of a part: what a request moves. Four are under way at a time, each in memory twice.
PART: Final = 8 * 1024 * 1024
_AT_A_TIME: Final = 4
#: The most parts of an upload, by the rules of S3.
_MOST_PARTS: Final = 9_000
#: What an address can hold besides: a user and a password, and a query with a signature.
_SECRET: Final = re.compile(r"(?<=://)[^/\s@]*@|(?<=\S)\?[^\s\"')>]*")
#: What may be told of an answer; others of its elements have tokens and keys.
_TOLD: Final = re.compile(r"<(?:Code|Message)>([^<]*)<")
_PROBE: Final = "probe"


class StoreError(OSError):
    """Raised if the object store fails, or refuses; the next try may succeed."""


class ObjectGoneError(StoreError):
    """Raised if an object is not there (any more)."""


class Rate:
    """Lets bytes pass at a limited rate; None for no limit. Several threads may share one."""

    def __init__(
        self,
        limit: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._limit, self._clock, self._sleep = limit, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, count: int, check: Callable[[], object]) -> None:
        """Wait until ``count`` more bytes may pass; ``check`` raises an error to stop."""
        if self._limit is None:
            return
        with self._lock:
            at = max(self._free_at, self._clock())
            self._free_at = at + count / self._limit
        while (left := at - self._clock()) > 0:
            check()
            self._sleep(min(left, 0.5))


class MirrorStore:
    """The objects of one mirror. Its methods raise :class:`StoreError` if the store fails.

    Args:
        url: ``s3://``, ``gs://``, ``az://`` or ``file://``; credentials come from the environment,
            as obstore finds them.
        rate: limits the bytes of objects in both directions together.
        check: called before each request for a part; raises an error to stop.

    Attributes:
        moved: the bytes of objects that were sent or received.

    Raises:
        InvalidSettingsError: obstore is missing, or does not understand the URL.
    """

    def __init__(
        self,
        url: str,
        *,
        rate: Rate | None = None,
        check: Callable[[], object] = lambda: None,
        store: ObjectStore | None = None,
    ) -> None:
        try:
            import obstore  # noqa: PLC0415 - an extra, of 16 MB
            from obstore.store import LocalStore, from_url  # noqa: PLC0415 - likewise
        except ModuleNotFoundError as error:
            raise InvalidSettingsError("a mirror needs obstore: pip install 'syncd[s3]'") from error
        if (why := missing_extra()) is not None:
            raise InvalidSettingsError(f"a mirror needs deltas, but {why}")
        self._obstore = obstore
        self.url = _SECRET.sub("", url)
        if ":" in url.partition("://")[2].partition("/")[0].rpartition("@")[0]:
            raise InvalidSettingsError(
                f"the URL {printable(self.url)} must have no credentials: set their variables"
            )

        def opened(retries: int, patience: float) -> ObjectStore:
            return store or from_url(
                url,
                # The scheme is that of the endpoint in the environment.
                client_options={"allow_http": True, "connect_timeout": "10s", "timeout": "120s"},
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=patience),
                },
            )

        try:
            self._store = opened(5, 30.0)
            self._patient = opened(20, 240.0)  # for the parts of files: what was sent is sent again
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise InvalidSettingsError(
                f"{printable(self.url)} cannot be used as the URL of a mirror: {_one_line(error)}"
            ) from error
        folder = self._store.prefix if isinstance(self._store, LocalStore) else None
        self._folder = None if folder is None else Path(folder)
        self._rate, self._check = rate or Rate(None), check
        self.moved = 0

    def check_conditions(self) -> None:
        """Refuse a store in which a second writer could replace an object.

        Raises:
            InvalidSettingsError: the store has no conditional writes.
        """
        key = f"{_PROBE}/{secrets.token_hex(8)}"
        try:
            self._create(key, b"1")
            if not self._create(key, b"2") and self._read(key) == b"1":
                return
        except NotImplementedError:
            pass
        finally:
            self._discard(key)
        raise InvalidSettingsError(
            f"{printable(self.url)} has no conditional writes (If-None-Match), so two pushers "
            "could replace each other's versions: use a store that has them"
        )

    # -- versions ----------------------------------------------------------------------------------

    def newest(self, newer_than: int = 0) -> MirroredVersion | None:
        """The newest version above ``newer_than``; None if there is none."""
        for found in sorted(self._sequences(newer_than), reverse=True):
            try:
                return self.version(found)
            except ProtocolMismatchError:
                raise
            except (RecordError, ObjectGoneError) as error:
                log.warning("v%d is left out: %s", found, error)
        return None

    def version(self, sequence: int) -> MirroredVersion:
        """Read a version's record.

        Raises:
            ObjectGoneError: it is not there any more, so there is a newer one.
            RecordError: it is damaged, or of a newer syncd.
        """
        key = version_key(sequence)
        return parse(MirroredVersion, self._read(key), f"{self.url}/{key}")

    def add(self, version: MirroredVersion) -> bool:
        """Add a version, whose objects must be there; False if another pusher has."""
        return self._create(version_key(version.last.sequence), encode(version))

    # -- objects -----------------------------------------------------------------------------------

    def has(self, file: MirroredFile, min_age: timedelta, now: datetime) -> bool:
        """True if the object is there, and too young to be removed before it is needed."""
        try:
            with self._doing(f"looking for {file.key}"):
                found = self._obstore.head(self._store, file.key)
        except ObjectGoneError:
            return False
        return found["size"] == file.size and found["last_modified"] > now - min_age / 2

    def is_whole(self, version: MirroredVersion) -> bool:
        """False if an object of a version is not there, for example because a rule expired it."""
        return {file.key for file in version.files()} <= {key for key, _ in self._listed(OBJECTS)}

    def put(self, file: MirroredFile, content: Iterable[bytes | memoryview]) -> None:
        """Make an object, which is there only once it is whole."""
        part = max(PART, -(-file.size // _MOST_PARTS))
        with self._doing(f"writing {file.key}"):
            self._obstore.put(
                self._patient,
                file.key,
                self._sent(file, content),
                use_multipart=file.size > part,
                chunk_size=part,
                max_concurrency=_AT_A_TIME,
            )

    def get(self, file: MirroredFile) -> Iterator[memoryview]:
        """Yield the bytes of an object, part by part; they count only once all have come.

        Raises:
            ObjectGoneError: it is not there any more.
            StoreError: it is not what its name says.
        """
        hasher = xxhash.xxh3_128()
        starts = iter(range(0, file.size, PART))
        with ThreadPoolExecutor(_AT_A_TIME, "syncd-mirror") as pool:
            coming: deque[Future[memoryview]] = deque()
            try:
                while True:
                    while len(coming) < _AT_A_TIME and (start := next(starts, None)) is not None:
                        length = min(PART, file.size - start)
                        coming.append(pool.submit(self._part, file.key, start, length))
                    if not coming:
                        break
                    content = coming.popleft().result()
                    hasher.update(content)
                    yield content
            finally:
                for one in coming:
                    one.cancel()
        if hasher.hexdigest() != file.digest:
            raise StoreError(f"{self.url}/{file.key} does not have the bytes that its name says")

    def sweep(self, *, keep: int, min_age: timedelta) -> int:
        """Remove versions beyond the newest ``keep``, and objects that none needs; count them."""
        now = self.now()
        made = {}
        for key, at in self._listed(VERSIONS):
            if (sequence := sequence_of(key)) is not None:
                made[sequence] = at
        old = expired(made, keep=keep, min_age=min_age, now=now)
        self._delete([version_key(sequence) for sequence in old])
        # Read before the objects are listed: a later version needs only what is young, or is
        # needed by one of these.
        kept = [self.version(sequence) for sequence in made.keys() - set(old)]
        objects = {**dict(self._listed(OBJECTS)), **dict(self._listed(_PROBE))}
        gone = unneeded(objects, kept, min_age=min_age, now=now)
        self._delete(gone)
        return len(old) + len(gone) + self._sweep_torn(now - min_age)

    def _sweep_torn(self, before: datetime) -> int:
        """Remove what killed pushes left in a folder; obstore does not list it."""
        count = 0
        for path in self._folder.glob(f"{OBJECTS}/*#*") if self._folder else ():
            with suppress(FileNotFoundError):  # another pusher has
                if path.stat().st_mtime < before.timestamp():
                    path.unlink()
                    count += 1
        return count

    def now(self) -> datetime:
        """The time by the store's clock."""
        key = f"{_PROBE}/{secrets.token_hex(8)}"
        with self._doing(f"writing {key}"):
            self._obstore.put(self._store, key, b"")
            found = self._obstore.head(self._store, key)
        self._discard(key)
        return found["last_modified"]

    # -- requests ----------------------------------------------------------------------------------

    def _sequences(self, newer_than: int) -> Iterator[int]:
        after = version_key(newer_than)
        for key, _ in self._listed(VERSIONS, after):
            sequence = sequence_of(key)
            if sequence is not None and sequence > newer_than:
                yield sequence

    def _listed(self, folder: str, after: str | None = None) -> Iterator[tuple[str, datetime]]:
        with self._doing(f"listing {folder}"):
            for page in self._obstore.list(self._store, f"{folder}/", offset=after):
                for one in page:
                    yield one["path"], one["last_modified"]

    def _create(self, key: str, content: bytes) -> bool:
        try:
            with self._doing(f"writing {key}"):
                self._obstore.put(self._store, key, content, mode="create")
        except FileExistsError:
            with self._doing(f"writing {key}"):  # S3 says the same while another request goes on
                self._obstore.head(self._store, key)
            return False
        return True

    def _read(self, key: str) -> bytes:
        with self._doing(f"reading {key}"):
            return bytes(self._obstore.get(self._store, key).bytes())

    def _part(self, key: str, start: int, length: int) -> memoryview:
        self._check()
        self._rate.take(length, self._check)
        with self._doing(f"reading {key}"):
            found = memoryview(
                self._obstore.get_range(self._patient, key, start=start, length=length)
            )
        if len(found) != length:
            raise StoreError(f"{self.url}/{key} is shorter than its name says")
        self.moved += length
        return found

    def _sent(
        self, file: MirroredFile, content: Iterable[bytes | memoryview]
    ) -> Iterator[bytes | memoryview]:
        hasher = xxhash.xxh3_128()
        for part in content:
            self._check()
            self._rate.take(len(part), self._check)
            hasher.update(part)
            yield part
            self.moved += len(part)
        if hasher.hexdigest() != file.digest:
            raise StoreError(f"{file.name} changed while it was sent")

    def _delete(self, keys: Sequence[str]) -> None:
        # In a folder, what another pusher has deleted is an error.
        with suppress(ObjectGoneError), self._doing("deleting objects"):
            self._obstore.delete(self._store, keys)

    def _discard(self, probe: str) -> None:
        with suppress(StoreError):  # a sweep tells, and tries it again
            self._delete([probe])

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Turn the store's errors into those of this class."""
        errors = self._obstore.exceptions
        try:
            yield
        except FileNotFoundError as error:
            if error.filename:  # a file of the job's, while it is sent
                raise
            answer = _one_line(error).partition("status code: ")[2].rstrip(":")  # or no bucket
            raise ObjectGoneError(
                f"{self.url}: {what}: it is not there{answer and f' ({answer})'}"
            ) from error
        except errors.AlreadyExistsError as error:
            raise FileExistsError(what) from error
        except errors.NotSupportedError as error:
            raise NotImplementedError(what) from error
        except errors.BaseError as error:
            raise StoreError(f"{self.url}: {what} failed: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """An error in one line, without what can hold keys, tokens or signatures."""
    text, _, debug = str(error).partition("\n\nDebug source")
    if text.endswith("error sending request"):  # the innermost reason is last
        text += ": " + re.split(r'["({]|: ', debug.rstrip(' ,(){}"\n'))[-1].strip()
    text = _SECRET.sub("", text)
    text, answer, rest = text.partition("<")
    text += ": ".join(_TOLD.findall(answer + rest))
    return printable(" ".join(text.split()))[:400]
