"""Where a rank stands, told from the stacks of its threads; a step does no more for it than name its groups.

What is read: the innermost line of mega's own code, and, where it waits for other ranks, the function and the group that was
last asked for something. A main thread that waits for autograd's, whose hooks talk to other ranks, stands where that does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
from pydantic import BaseModel

from mega_trainer.comm import Group
from mega_trainer.job.job_log import DEEPEST

# Where a host waits: for other ranks' hosts, or for its device, and that for theirs.
COMM, DEVICE = "mega_trainer/comm.py", "mega_trainer/device.py"
WAITING = (COMM, DEVICE)
THREAD, LINE = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)"), re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Standing(BaseModel):
    """Where a rank is.

    Attributes:
        where: the innermost line of mega's code, such as `mega_trainer/comm.py:77 all_reduce`.
        phase: of the step, as in `phases`; "" between them.
        waits: for whom, such as `all_reduce in dp of ranks 0, 2`; empty while it works.
    """

    where: str
    phase: str
    waits: str = ""

    def __str__(self) -> str:
        return f"in {self.phase or 'the step'}, at {self.where}" + (f", waiting: {self.waits}" if self.waits else "")


class Line(NamedTuple):
    """Of a thread's stack."""

    file: str
    number: int
    name: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.number} {self.name}"


def stacks() -> dict[int, list[Line]]:
    """Of all threads by their numbers, the innermost line first.

    By faulthandler, which reads them in one go. Python code that goes from frame to frame may be interrupted half-way while
    another thread runs: a frame that has returned meanwhile has been seen to lead to what is no frame any more (CPython 3.11.7).
    """
    found: dict[int, list[Line]] = {}
    with _in_memory() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    for part in text.split("\n\n"):
        head, *lines = part.strip().splitlines() or [""]
        if thread := THREAD.match(head):
            found[int(thread[1], 16)] = [Line(m[1], int(m[2]), m[3]) for line in lines if (m := LINE.match(line))]
    return found


def _in_memory() -> IO[bytes]:
    """A file on no disk, which may be full or slow, where the system has such."""
    return open(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def standing(stacks: Mapping[int, Sequence[Line]], main: int, phase: str) -> Standing:
    """Of the main thread, which is in that phase; while it waits for autograd's, of that one."""
    own = _told(stacks.get(main, ()), phase)
    if own.waits:
        return own
    others = (_told(lines, phase) for thread, lines in stacks.items() if thread != main)
    return next((other for other in others if other.waits), own)


def stack(lines: Sequence[Line]) -> list[str]:
    """The innermost lines of a thread's stack, outermost first."""
    return [str(line) for line in reversed(lines[:DEEPEST])]


def waits_for(place: Standing) -> str:
    """Of a rank that has stood in a wait for a while: the function, and the group whose ranks it waits for, where a host does."""
    group = Group.latest
    return place.waits if group is None or place.where.startswith(DEVICE) else f"{place.waits} in {group}"


def flight_record() -> str | None:
    """What torch's flight recorder has of this process's collectives, as JSON, where this version has one."""
    distributed = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(distributed, name, None):
            text = bytes(dump()).decode()
            return text if json.loads(text).get("entries") else None
    return None


def _told(lines: Sequence[Line], phase: str) -> Standing:
    own = [line for line in lines if "/mega_" in line.file]
    if not own:
        return Standing(where="code that is not mega's", phase=phase)
    place = next((line for line in own if not _is_wait(line)), own[0])
    return Standing(where=str(place), phase=phase, waits=place.name if _short(own[0].file).startswith(WAITING) else "")


def _is_wait(line: Line) -> bool:
    """Whether it is what all who wait for a collective under way go through, which tells nothing of a place."""
    return line.name == "wait" and _short(line.file).startswith(COMM)


def _short(filename: str) -> str:
    """From the package on, for files of mega; of others the last two parts."""
    parts = Path(filename).parts
    home = next((index for index, part in enumerate(parts) if part.startswith("mega_")), None)
    return "/".join(parts[home:] if home is not None else parts[-2:])
