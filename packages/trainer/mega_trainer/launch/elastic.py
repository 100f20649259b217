"""torchrun with exit statuses that a scheduler can act on: run `python -m mega_trainer.launch.elastic` with torchrun's
arguments.

torchrun exits with 1 whatever the exit statuses of its ranks. This program exits as its ranks did: 75 when they saved and
stopped before the last step, 2 for a user error, 128 + the number of a signal. It also exits when it loses the other
machines, where torchrun waits for the timeout of TCP, about 15 minutes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from mega_trainer.distributed.comm import connection_error_reason
from mega_trainer.job.environment import STATUS_NOTE

# Exit codes of ranks without a fault of their own: interrupted after a save, or stopped because another rank ended.
STOPPED = (os.EX_TEMPFAIL, -signal.SIGTERM)
UNSEEN_SECONDS = 30.0  # until an agent, which polls ten times a second, must have noticed the end of a rank


def main(arguments: Sequence[str]) -> int:
    """Run torchrun and return an exit status that follows the exit statuses of the ranks.
    `arguments` are torchrun's; torchrun itself exits with 1 for all failures.
    """
    with tempfile.TemporaryDirectory(prefix="mega-") as folder:
        note = Path(folder) / "status"
        os.environ[STATUS_NOTE] = str(note)  # inherited by the ranks
        done = threading.Event()
        threading.Thread(target=_exit_when_stuck, args=(done,), daemon=True).start()
        try:
            return _run_torchrun(arguments, note)
        finally:
            done.set()
            del os.environ[STATUS_NOTE]


def _run_torchrun(arguments: Sequence[str], note: Path) -> int:
    try:
        torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        status = merge_exit_codes(failure.exitcode for failure in failures)
        if status != os.EX_TEMPFAIL:
            print(error, file=sys.stderr)
        return status
    except RendezvousTimeoutError:
        return _print_failure("--nnodes requires more machines than have joined within --rdzv-conf join_timeout")
    except RendezvousConnectionError as error:
        return _print_failure(f"the machine of --rdzv-endpoint cannot be reached ({error.__cause__ or error})")
    except DistError as error:
        where = "at --master-addr (or --rdzv-endpoint)"
        return _print_failure(
            f"the machines of the job do not reach each other {where}: {connection_error_reason(error)}"
        )
    except SignalException as error:
        return int(note.read_text()) if note.exists() else 128 + error.sigval
    return 0


def _print_failure(problem: str) -> int:
    hint = "run the same command on enough machines to resume from the last checkpoint"
    print(f"error: {problem}\n  {hint}", file=sys.stderr, flush=True)
    return 1


def _exit_when_stuck(done: threading.Event) -> None:
    """End this process when its agent does not notice that a rank has ended, because the rendezvous store does not
    answer.
    """
    pid, since = 0, time.monotonic()
    while not done.wait(1):
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # no child processes
            found = None
        if found is None or found.si_pid != pid:
            pid, since = found.si_pid if found else 0, time.monotonic()
        elif time.monotonic() - since > UNSEEN_SECONDS:
            os._exit(_print_failure("a rank has ended, and the machine of --rdzv-endpoint does not answer"))


def merge_exit_codes(exit_codes: Iterable[int]) -> int:
    """Return the exit status of a job: that of the first rank that failed, not counting ranks that were stopped.

    The codes are in order of failure; negative codes are signals.

    >>> merge_exit_codes([75, -15, 75]), merge_exit_codes([75, 2, 1]), merge_exit_codes([-9, 75])
    (75, 2, 137)
    """
    codes = list(exit_codes)
    first = next((code for code in codes if code not in STOPPED), max(codes))
    return first if first >= 0 else 128 - first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
