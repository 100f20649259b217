"""How many files a process may have open: a data set takes two, and many systems allow a thousand at first."""

from __future__ import annotations

import contextlib
import resource

SPARE = 512  # for the rest of the process: libraries, sockets, logs


def allow_open_files(count: int) -> None:
    """Let this process open `count` files more, as far as the system allows it to without asking anyone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS names no limit and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
