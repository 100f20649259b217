"""How many files a process may have open: a data set takes two, and many systems allow a thousand at first."""

from __future__ import annotations

import contextlib
import resource

SPARE = 512  # for the rest of the process: libraries, sockets, logs


def allow_open_files(count: int) -> int:
    """Let this process open `count` files more, as far as the system allows it to without asking anyone.

    Returns:
        How many of them it may; at least 16, for who cannot do with fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS names no limit and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return max(16, min(count, soft - SPARE))
