"""How a program of this package ends: with its parent, or with its plan."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import NoReturn

EXIT_DEAD_CONTEXT = 70
EXIT_PARENT_GONE = 71
PARENT_POLL_S = 0.5


def end_with(parent: int) -> None:
    """End this process when its parent has ended, however that went."""
    try:
        waiting = os.pidfd_open(parent)
    except (AttributeError, OSError):
        while _alive(parent):
            time.sleep(PARENT_POLL_S)
    else:
        select.select([waiting], [], [])
    os._exit(EXIT_PARENT_GONE)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def leave(code: int, *, wrapped: bool) -> NoReturn:
    """Everything is on disk: tearing torch and the CUDA context down would only take time. A
    program around this one needs it: what it injected writes its last records at exit.
    """
    if wrapped:
        sys.exit(code)
    os._exit(code)
