"""What the ranks of a job tell of themselves, each in one place in the run's folder.

errors.jsonl    what ended ranks, a line each: `time`, `rank` (none: the launcher), `host`, `error`, `stack`
ranks.json      how they are, as the watch of rank 0 last saw them
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from mega_common.errors import Interrupted, MegaError

ERRORS, RANKS = "errors.jsonl", "ranks.json"
DEEPEST = 12  # lines of a stack


def record_error(output: Path, rank: int | None, error: str, stack: Sequence[str] = ()) -> None:
    """Add a line, by a rank or a launcher; a disk that is full or gone is told of elsewhere."""
    line = {"time": time.time(), "rank": rank, "host": socket.gethostname(), "error": error, "stack": list(stack)}
    with contextlib.suppress(OSError), open(output / ERRORS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def errors_recorded(output: Path, rank: int) -> Iterator[None]:
    """Record what ends this rank in the block, but for what it was asked to; of errors that are none of mega's the stack."""
    try:
        yield
    except Interrupted:
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
