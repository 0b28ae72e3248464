"""Storage that counts the bytes read from it."""

from syncd.storage.fsio import Storage


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
