"""Position of a rank, read from the stacks of its threads, without extra work in a step.

A position is the innermost line of mega's own code and, while it waits for other ranks, the function and the last used group.
A rank also waits while a host waits for its device, whose kernels may wait for other ranks: in `distributed/device.py`, through
which all copies to the host go, and in torch's own calls that wait for streams, events or ranks, whoever calls them.
While the main thread waits for autograd's thread, whose hooks communicate, the position is that of autograd's thread.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from pydantic import BaseModel

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.job.error_log import DEEPEST

# Files in which a host waits for other ranks, or for its device.
COMM, DEVICE = "mega_trainer/distributed/comm.py", "mega_trainer/distributed/device.py"
WAITING = (COMM, DEVICE)
# Functions of torch in which a thread waits: for the device (streams, events), and for ranks (collectives of FSDP and saves).
TORCH_WAITS = {
    "torch/cuda/streams.py": re.compile(r"synchronize$"),
    "torch/cuda/__init__.py": re.compile(r"synchronize$"),
    "torch/distributed/distributed_c10d.py": re.compile(r""),
}


class RankCodePosition(BaseModel):
    """Position of a rank: innermost line of mega's code, phase of the step, and the group that it waits for.

    Attributes:
        where: the innermost line of mega's code, such as `mega_trainer/distributed/comm.py:77 all_reduce`.
        phase: of the step, as in `phase_timer`; "" between phases.
        waits: what it waits for, such as `all_reduce in dp of ranks 0, 2`; empty while it works.
    """

    where: str
    phase: str
    waits: str = ""

    def __str__(self) -> str:
        return f"in {self.phase or 'the step'}, at {self.where}" + (f", waiting: {self.waits}" if self.waits else "")


class StackLine(NamedTuple):
    """One line of a thread's stack: file, line number and function."""

    file: str
    number: int
    name: str

    def __str__(self) -> str:
        return f"{_short_path(self.file)}:{self.number} {self.name}"


def read_thread_stacks() -> dict[int, list[StackLine]]:
    """Return the stacks of all threads of this process by thread number, the innermost line first.

    `faulthandler`, which prints stacks of all threads, reads them without the interpreter's lock of its list of threads: a
    thread of C++ that enters Python meanwhile, as autograd's and gloo's do, ends the process with a segmentation fault.
    """
    return {thread: _read_stack(thread) for thread in list(chain.from_iterable(_current_frames()))}


def _read_stack(thread: int) -> list[StackLine]:
    """Return the stack of a thread, empty if it has ended.

    Each frame is read and left inside one call of a C function, in which no other thread can take the interpreter: with a
    frame held while its thread goes on and returns from it, torch's replacement of the frame evaluation frees its memory.
    """
    frames = accumulate(chain(map(itemgetter(thread), _current_frames()), repeat("f_back")), getattr)
    read = deque[tuple[CodeType, int | None]]()
    with contextlib.suppress(
        KeyError, AttributeError
    ):  # of a thread that has ended; of None, after the outermost frame
        read.extend(map(attrgetter("f_code", "f_lineno"), frames))
    return [StackLine(code.co_filename, number or 0, code.co_name) for code, number in read]


def _current_frames() -> Iterator[dict[int, FrameType]]:
    """Iterate once over the innermost frames of all threads, read when the iterator advances."""
    return map(methodcaller("_current_frames"), [sys])


def main_thread_position(stacks: Mapping[int, Sequence[StackLine]], main: int, phase: str) -> RankCodePosition:
    """Return the position of the thread `main`, or of one that waits for ranks on its behalf, such as autograd's."""
    own = _thread_position(stacks.get(main, ()), phase)
    if own.waits:
        return own
    others = (_thread_position(lines, phase) for thread, lines in stacks.items() if thread != main)
    return next((other for other in others if other.waits), own)


def format_stack(lines: Sequence[StackLine]) -> list[str]:
    """Return the 12 innermost lines of a thread's stack as text, outermost first."""
    return [str(line) for line in reversed(lines[:DEEPEST])]


def describe_wait(position: RankCodePosition) -> str:
    """Return text that names the function in which a rank waits, and the group that it waits for.
    The group, whose ranks it waits for, is named if the host waits for a group.
    """
    group = CommGroup.latest
    for_device = position.where.startswith(DEVICE) or position.waits == "synchronize"
    return position.waits if group is None or for_device else f"{position.waits} in {group}"


def read_flight_record() -> str | None:
    """Return the records of torch's flight recorder about this process's collectives, as JSON, or None.
    It is None if there are none or this torch version has no recorder.
    """
    distributed = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(distributed, name, None):
            text = bytes(dump()).decode()
            return text if json.loads(text).get("entries") else None
    return None


def _thread_position(lines: Sequence[StackLine], phase: str) -> RankCodePosition:
    own = [line for line in lines if "/mega_" in line.file]
    if not own:
        return RankCodePosition(where="code outside of mega", phase=phase)
    position = next((line for line in own if not _is_wait_line(line)), own[0])
    waits = position.name if _short_path(own[0].file).startswith(WAITING) else _torch_wait(lines)
    return RankCodePosition(where=str(position), phase=phase, waits=waits)


def _torch_wait(lines: Sequence[StackLine]) -> str:
    """Return the function of torch in which a thread waits for its device or for other ranks; "" if in none."""
    for line in lines:
        if "/mega_" in line.file:
            break
        waits = next((names for file, names in TORCH_WAITS.items() if line.file.endswith(file)), None)
        if waits is not None and waits.match(line.name):
            return line.name
    return ""


def _is_wait_line(line: StackLine) -> bool:
    """Return whether the line is the common wait of all pending collectives, which does not identify a position."""
    return line.name == "wait" and _short_path(line.file).startswith(COMM)


def _short_path(filename: str) -> str:
    """Return the path from the package on, for files of mega; the last two parts for others."""
    parts = Path(filename).parts
    home = next((index for index, part in enumerate(parts) if part.startswith("mega_")), None)
    return "/".join(parts[home:] if home is not None else parts[-2:])
