"""Children that do some work, and may be killed in the middle of it."""

import os
import signal
import traceback
from collections.abc import Callable

#: A guard against a child that hangs, in seconds.
_HANGS = 60


def child(act: Callable[[], object]) -> int:
    """Begin the work in a child; its pid."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(_HANGS)
            act()
            status = 0
        except BaseException:  # noqa: BLE001 - a child must never go on as a second pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def was_killed(pid: int, when: object) -> bool:
    """Wait for a child; False where it came to its end before it was killed."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"it hung at {when}"
        return True
    assert os.WEXITSTATUS(status) == 0, f"the work itself failed before {when}"
    return False
