"""What can befall a rank from outside, in words: memory that is not there, and a rank that is not there any more."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from mega_common.errors import TrainingError
from mega_common.log import human

# What torch says of host memory (its allocator raises a plain RuntimeError), and gloo of a connection.
_HOST_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|\[?gloo|socket", re.IGNORECASE
)
_PLACE = re.compile(r"^\[\S+:\d+\] ")
MEMORY_HINT = (
    "lower batch.micro, set recompute (selective, then full), share more (parallel.zero 2 or 3, optimizer.offload), or split "
    "the model over more ranks (parallel.tp, pp); mega plan estimates the memory"
)
LOST_HINT = (
    "the rank that ended first says why, in the output of its own; the same command goes on from the last checkpoint"
)


@contextlib.contextmanager
def faults_told(rank: int, step: Callable[[], str]) -> Iterator[None]:
    """Turn what torch raises for lack of memory or of another rank into an error that says where, and what to do.

    Args:
        rank: this one.
        step: tells what it is at, such as "step 12".

    Raises:
        TrainingError: in its place.
    """
    where = f"rank {rank} on {socket.gethostname()}, {{}}"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(f"{where.format(step())}: {_on_device(error)}", hint=MEMORY_HINT) from error
    except MemoryError as error:
        raise TrainingError(f"{where.format(step())}: out of memory on the host", hint=MEMORY_HINT) from error
    except RuntimeError as error:
        if wanted := _HOST_MEMORY.search(str(error)):
            message = f"out of memory on the host: {human(int(wanted[1]))}B more were asked for"
            raise TrainingError(f"{where.format(step())}: {message}", hint=MEMORY_HINT) from error
        if isinstance(error, dist.DistError) or _LOST.search(str(error)):
            reason = _PLACE.sub("", str(error)).strip().splitlines()[0].split(". ")[0]
            raise TrainingError(
                f"{where.format(step())}: the other ranks cannot be reached ({reason})", hint=LOST_HINT
            ) from error
        raise


def _on_device(error: torch.OutOfMemoryError) -> str:
    """`CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...`: the first two are facts."""
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    wanted = re.search(r"allocate ([\d.]+ \w+)", str(error))
    asked = f": {wanted[1]} more were asked for" if wanted else ""
    return f"out of memory on cuda:{device}{asked}, {human(free)}B of {human(total)}B are free"
