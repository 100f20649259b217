"""Recognition of errors of torch and gloo about lost connections to ranks or to the job's store."""

from __future__ import annotations

import re

import torch.distributed as dist

# gloo raises a plain RuntimeError
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|\[?gloo|socket", re.IGNORECASE
)
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether torch raised `error` because another rank, or the job's key-value store, does not answer."""
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


def connection_error_reason(error: RuntimeError) -> str:
    """Return the first sentence of a torch error's message, without the source location and the stack that torch
    appends.
    """
    return _SOURCE_LINE.sub("", str(error)).strip().splitlines()[0].split(". ")[0]
