"""torchrun, with exit statuses that a scheduler can act on: `python -m mega_trainer.elastic`, with torchrun's arguments.

torchrun itself ends with 1 whatever its ranks ended with. This ends as they did: 75 when they saved and stopped before
the end, 2 for a mistake of the user's, 128 + the number of a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mega_trainer.environment import STATUS_NOTE

# How ranks end that did nothing wrong themselves: interrupted after a save, or stopped because another had ended.
STOPPED = (os.EX_TEMPFAIL, -signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with `arguments`; returns the exit status to end with."""
    with tempfile.TemporaryDirectory(prefix="mega-") as folder:
        note = Path(folder) / "status"
        os.environ[STATUS_NOTE] = str(note)  # which ranks inherit
        try:
            return _run(arguments, note)
        finally:
            del os.environ[STATUS_NOTE]


def _run(arguments: Sequence[str], note: Path) -> int:
    try:
        torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        status = status_of(failure.exitcode for failure in failures)
        if status != os.EX_TEMPFAIL:
            print(error, file=sys.stderr)
        return status
    except SignalException as error:
        return int(note.read_text()) if note.exists() else 128 + error.sigval
    return 0


def status_of(exit_codes: Iterable[int]) -> int:
    """The exit status for ranks that ended with these, the first to fail first; negative codes are signals.

    >>> status_of([75, -15, 75]), status_of([75, 2, 1]), status_of([-9, 75])
    (75, 2, 137)
    """
    codes = list(exit_codes)
    first = next((code for code in codes if code not in STOPPED), max(codes))
    return first if first >= 0 else 128 - first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
