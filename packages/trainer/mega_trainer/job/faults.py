"""What can befall a rank from outside, in words: memory that is not there, and a rank that is not there any more."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from mega_common.errors import MegaError, TrainingError
from mega_common.log import human
from mega_trainer.job.metrics import memory_in_use
from mega_trainer.plan.advice import Needs

# What torch says of host memory (its allocator raises a plain RuntimeError), and gloo of a connection.
OUT_OF_MEMORY = "out of memory"
_HOST_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|\[?gloo|socket", re.IGNORECASE
)
_PLACE = re.compile(r"^\[\S+:\d+\] ")
ADVICES = 6  # of those that free most
LOST_HINT = (
    "the rank that ended first says why, in the output of its own; the same command goes on from the last checkpoint"
)


@contextlib.contextmanager
def faults_told(rank: int, step: Callable[[], str], needs: Callable[[], Needs]) -> Iterator[None]:
    """Turn what torch raises for lack of memory or of another rank into an error that says where, and what to do.

    Args:
        rank: this one.
        step: tells what it is at, such as "step 12".
        needs: tells what the run should take on this rank.

    Other errors, which are ours, get a note that says where.

    Raises:
        TrainingError: in its place.
    """
    where = f"rank {rank} on {socket.gethostname()}, {{}}"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _exhausted(f"{where.format(step())}: {_on_device(error)}", needs(), _held_on_device()) from error
    except MemoryError as error:
        message = f"{where.format(step())}: {OUT_OF_MEMORY} on the host"
        raise _exhausted(message, _without_offload(needs()), _held_on_host()) from error
    except RuntimeError as error:
        if wanted := _HOST_MEMORY.search(str(error)):
            message = f"{OUT_OF_MEMORY} on the host: {human(int(wanted[1]))}B more were asked for"
            raise _exhausted(
                f"{where.format(step())}: {message}", _without_offload(needs()), _held_on_host()
            ) from error
        if isinstance(error, dist.DistError) or _LOST.search(str(error)):
            reason = _PLACE.sub("", str(error)).strip().splitlines()[0].split(". ")[0]
            raise TrainingError(
                f"{where.format(step())}: the other ranks cannot be reached ({reason})", hint=LOST_HINT
            ) from error
        _place(error, where.format(step()))
        raise
    except Exception as error:
        _place(error, where.format(step()))
        raise


def _place(error: Exception, where: str) -> None:
    if not isinstance(error, MegaError) and not hasattr(error, "__notes__"):
        error.add_note(where)


def _exhausted(message: str, needs: Needs, held: Mapping[str, int]) -> TrainingError:
    """With what is held, by whom as far as it is known, and beside it what the planner counts and would change."""
    held = {**held, "other than predicted": max(0, next(iter(held.values())) - sum(needs.predicted.values()))}
    lines = [message, f"  held: {_sizes(held)}", f"  predicted for this rank at its most: {_sizes(needs.predicted)}"]
    most = [f"{' '.join(advice.settings)} ({human(advice.freed)}B)" for advice in needs.advices[:ADVICES]]
    hint = f"what would free most on a rank, as predicted: --set {', '.join(most)}" if most else "take more ranks"
    return TrainingError("\n".join(lines), hint=f"{hint}; mega train --find-micro-batch tries what fits")


def _without_offload(needs: Needs) -> Needs:
    """Without advice that would take more of the host's memory."""
    return replace(needs, advices=[advice for advice in needs.advices if "offload" not in " ".join(advice.settings)])


def _sizes(kinds: Mapping[str, int]) -> str:
    return ", ".join(
        f"{kind} {human(size)}B" for kind, size in sorted(kinds.items(), key=lambda pair: -pair[1]) if size
    )


def _held_on_host() -> dict[str, int]:
    return {"by this process": memory_in_use()}


def _held_on_device() -> dict[str, int]:
    """By tensors; free in blocks that torch holds, but too small; and by communicators, CUDA and other processes."""
    free, total = torch.cuda.mem_get_info(torch.cuda.current_device())
    tensors, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {
        "tensors": tensors, "torch's free blocks": reserved - tensors,
        "communicators, CUDA and other processes": total - free - reserved,
    }  # fmt: skip


def _on_device(error: torch.OutOfMemoryError) -> str:
    """`CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...`: the first two are facts."""
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    wanted = re.search(r"allocate ([\d.]+ \w+)", str(error))
    asked = f": {wanted[1]} more were asked for" if wanted else ""
    return f"{OUT_OF_MEMORY} on cuda:{device}{asked}, {human(free)}B of {human(total)}B are free"
