"""Storage that counts the bytes read from it, and storage of a limited speed."""

import time
from multiprocessing.context import ForkContext
from typing import Final

from syncd.storage.fsio import Storage

#: After a sleep that took too long, readers can catch up at most this many seconds.
_CREDIT: Final = 0.02


class Counting(Storage):
    """Counts the bytes read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """The call, counted."""
        data = super().pread(fd, count, offset)
        self._took(len(data))
        return data

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        """The call, counted."""
        count = super().pread_into(fd, part, offset)
        self._took(count)
        return count

    def read_part(self, fd: int, count: int) -> bytes:
        """The call, counted."""
        data = super().read_part(fd, count)
        self._took(len(data))
        return data

    def copy_file_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """The call, counted."""
        copied = super().copy_file_range(source, target, count, at, to)
        self._took(copied)
        return copied

    def sendfile(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """The call, counted."""
        copied = super().sendfile(source, target, count, at, to)
        self._took(copied)
        return copied

    def _took(self, count: int) -> None:
        self.bytes_read += count


class Bucket:
    """A token bucket that processes share: together they get ``rate`` bytes per second."""

    def __init__(self, context: ForkContext, rate: float) -> None:
        self._rate = rate
        #: The time, on the monotonic clock, at which all bytes so far have passed.
        self._passed = context.Value("d", 0.0)

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes have passed."""
        with self._passed.get_lock():
            now = time.monotonic()
            begin = max(self._passed.value, now - _CREDIT)
            self._passed.value = end = begin + count / self._rate
        time.sleep(max(0.0, end - now))


class Throttled(Counting):
    """Reads at the rate of its bucket; writes are not limited."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self._bucket = bucket

    def _took(self, count: int) -> None:
        super()._took(count)
        self._bucket.take(count)
