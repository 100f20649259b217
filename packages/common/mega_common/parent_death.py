"""End of a child process with its parent (`prctl(2)`, PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def terminate_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have Linux send this process a signal when its parent process dies; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def kill_with_parent() -> None:
    """Have Linux kill this process (SIGKILL) when its parent process dies; does nothing on other systems."""
    terminate_with_parent(signal.SIGKILL)
