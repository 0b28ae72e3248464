"""Long work on a terminal: a bar with rate and time left, or a word that it goes on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from syncd.checkpoint.merge import Progress, unheard


@contextmanager
def bar(name: str) -> Iterator[Progress]:
    """A bar of bytes on standard error; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield unheard
        return
    # Imported here: it takes a tenth of a second, which a script need not wait for.
    from rich import progress as bars  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=None),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(
        *columns, console=Console(stderr=True), transient=True, expand=True
    ) as shown:
        task = shown.add_task(name, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """A word on standard error for as long as it takes; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415 - as above

    with Console(stderr=True).status(what):
        yield


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave through the ``finally`` blocks, which remove what is half made.

    The process ends as a shell says that it was killed: 128 and the signal's number.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
