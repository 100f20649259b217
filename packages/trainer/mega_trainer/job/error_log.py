"""Error log and rank states of a job, in files of the run's folder.

errors.jsonl    errors that ended ranks, a line each: `time`, `rank` (null: the launcher), `host`, `error`, `stack`
ranks.json      state of all ranks, written by the watchdog of rank 0
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from mega_common.errors import MegaError, TrainingInterrupted

ERRORS, RANKS = "errors.jsonl", "ranks.json"
DEEPEST = 12  # lines of a stack


def record_error(output: Path, rank: int | None, error: str, stack: Sequence[str] = ()) -> None:
    """Append an error of a rank or of the launcher to errors.jsonl in the run's folder.
    `output` is the folder; `rank` is None for a launcher. Errors of the disk are ignored.
    """
    line = {"time": time.time(), "rank": rank, "host": socket.gethostname(), "error": error, "stack": list(stack)}
    with contextlib.suppress(OSError), open(output / ERRORS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def record_rank_errors(output: Path, rank: int) -> Iterator[None]:
    """Record the error that ends this rank in the `with` block in errors.jsonl of the run's folder.
    Requested interruptions are not recorded; errors that are not mega's are recorded with the stack.
    """
    try:
        yield
    except TrainingInterrupted:
        raise
    except MegaError as error:
        record_error(output, rank, str(error))
        raise
    except Exception as error:
        words = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        frames = traceback.extract_tb(error.__traceback__)[-DEEPEST:]
        record_error(
            output, rank, "\n  ".join(words), [f"{line.filename}:{line.lineno} {line.name}" for line in frames]
        )
        raise
