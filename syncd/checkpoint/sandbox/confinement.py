"""The limits that a child process sets itself before it reads what others wrote."""

from __future__ import annotations

import resource
import signal
from typing import Final

_PAGE: Final = resource.getpagesize()


def confine() -> None:
    """Drop rights that parsing does not need; be the first to be killed if memory is short.

    Call this after all imports.
    """
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")
    except OSError:
        pass  # a container without /proc: then the kernel chooses by size
    nothing = resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC
    for kind in (*nothing, resource.RLIMIT_NOFILE):  # the pipes stay open
        resource.setrlimit(kind, (0, 0))
    ignore_signals()
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGXCPU})


def ignore_signals() -> None:
    """Leave signals to a whole service, or from a terminal, to the parent.

    Only the kernel and the parent may end this child.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def limit(kind: int, amount: int, *, for_good: bool = False) -> None:
    """Set a soft limit, and the hard one ``for_good``. Only root may raise the hard one."""
    _, hard = resource.getrlimit(kind)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (amount, amount if for_good else hard))


def address_space() -> int:
    """The bytes of this process's address space."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[0]) * _PAGE
    except OSError:
        return 256 * 1024 * 1024  # no /proc: more than this process has
