"""Where a rank stands, told from the stacks of its threads: nothing is added to a step for it.

What is read: the innermost line of mega's own code, and, where it waits for other ranks, the collective and its group. A main thread that waits for autograd's, whose hooks talk to other ranks, stands where that
does.
"""

from __future__ import annotations

import json
import linecache
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import torch
from pydantic import BaseModel

from mega_trainer.comm import Group

# Where a host waits: for other ranks' hosts, or for its device, and that for theirs. Elsewhere in the folders of what talks
# to other ranks it does where it says so.
WAITING = ("mega_trainer/comm.py", "mega_trainer/device.py")
WAITING_LINES = ("mega_trainer/parallel/", "mega_trainer/pipeline/")
DEEPEST = 12  # lines of a stack that are told
NEAR = 3  # frames whose variables are looked at: what is looked at of one lives until that returns


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


def standing(frames: Mapping[int, FrameType], main: int, phase: str) -> Standing:
    """Of the main thread, which is in that phase; while it waits for autograd's, of that one."""
    own = _told(frames.get(main), phase)
    if own.waits:
        return own
    others = (_told(frame, phase) for thread, frame in frames.items() if thread != main)
    return next((other for other in others if other.waits), own)


def stack(frame: FrameType | None) -> list[str]:
    """The innermost lines of a thread's stack, outermost first."""
    if frame is None:
        return []
    lines = traceback.extract_stack(frame)[-DEEPEST:]
    return [f"{_short(line.filename)}:{line.lineno} {line.name}" for line in lines]


def flight_record() -> str | None:
    """What torch's flight recorder has of this process's collectives, as JSON, where this version has one."""
    distributed = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(distributed, name, None):
            text = bytes(dump()).decode()
            return text if json.loads(text).get("entries") else None
    return None


def _told(frame: FrameType | None, phase: str) -> Standing:
    own = list(_own(frame))
    if not own:
        return Standing(where="code that is not mega's", phase=phase)
    innermost = own[0]
    where = f"{_short(innermost.f_code.co_filename)}:{innermost.f_lineno} {innermost.f_code.co_name}"
    return Standing(where=where, phase=phase, waits=_waits(own) if _is_waiting(innermost, where) else "")


def _own(frame: FrameType | None) -> Iterator[FrameType]:
    """Those of mega's code, the innermost first."""
    while frame is not None:
        if "/mega_" in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def _is_waiting(frame: FrameType, where: str) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return where.startswith(WAITING) or (where.startswith(WAITING_LINES) and ".wait()" in line)


def _waits(own: list[FrameType]) -> str:
    """What is waited for: the function that does, and the first group that it, or who called it, knows."""
    for frame in own[:NEAR]:
        known = frame.f_locals
        for holder in (known, *(vars(known[name]) for name in ("self", "ctx") if hasattr(known.get(name), "__dict__"))):
            group = next((holder[name] for name in ("group", "data") if isinstance(holder.get(name), Group)), None)
            if group is not None:
                ranks = ", ".join(map(str, group.ranks[:8])) + (", ..." if group.size > 8 else "")
                return f"{own[0].f_code.co_name} in {group.name} of ranks {ranks}"
    return f"{own[0].f_code.co_name}"


def _short(filename: str) -> str:
    """From the package on, for files of mega; of others the last two parts."""
    parts = Path(filename).parts
    home = next((index for index, part in enumerate(parts) if part.startswith("mega_")), None)
    return "/".join(parts[home:] if home is not None else parts[-2:])
