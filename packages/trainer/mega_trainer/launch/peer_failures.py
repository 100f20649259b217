"""End of a rank when another rank of its job has failed.

A collective of NCCL never returns when a peer has ended, and the threads of NCCL do not notice before their own timeout. So
the first rank that fails writes its error into the job's store. A thread of every rank looks for it, and ends its rank some
seconds later, which is time for a rank with an error of its own to report that one. The store itself may end with the rank
that holds it: then a rank ends when it only waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from torch.distributed.distributed_c10d import Store

from mega_common.progress_logging import logger
from mega_trainer.job.rank_position import main_thread_position, read_thread_stacks

KEY = "failed"  # of the first error, in the job's store
POLL_SECONDS, GRACE_SECONDS = 1.0, 5.0
ANNOUNCE_SECONDS = 2.0  # for a store that may not answer


def find_failed_rank(store: Store) -> int | None:
    """Return the rank whose error was the job's first, or None if no rank has announced one."""
    return int(store.get(KEY).decode().split()[1]) if store.check([KEY]) else None


class PeerFailureWatch:
    """Context manager whose thread ends this rank after another rank of the job has failed.
    An error in the `with` block is announced to the other ranks.

    Args:
        store: a connection to the job's key-value store, used only by this object.
        rank: of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._main = threading.main_thread().ident or 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch_loop, name="peers", daemon=True)

    def __enter__(self) -> PeerFailureWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(ANNOUNCE_SECONDS)  # a request to the store does not return while its process is stopped

    def announce_failure(self, error: BaseException) -> None:
        """Write the error of this rank into the store, if it is the job's first."""
        message = f"rank {self._rank} on {socket.gethostname()} failed: {type(error).__name__}: {error}"
        writer = threading.Thread(target=self._write_failure, args=(message,), daemon=True)
        writer.start()
        writer.join(ANNOUNCE_SECONDS)

    def _write_failure(self, message: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(KEY, "", message)

    def _watch_loop(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            try:
                if not self._store.check([KEY]):
                    continue
                message = self._store.get(KEY).decode()
            except RuntimeError:
                self._end_when_stuck()
                return
            if not self._done.wait(GRACE_SECONDS):
                self._end_rank(message)

    def _end_when_stuck(self) -> None:
        """End this rank once its main thread has waited for other ranks for some seconds: the process that held the
        store has ended, after an error or because its work was done.
        """
        since = time.monotonic()
        while not self._done.wait(POLL_SECONDS):
            if not main_thread_position(read_thread_stacks(), self._main, "").waits:
                since = time.monotonic()
            elif time.monotonic() - since > GRACE_SECONDS:
                self._end_rank("the process that holds the job's store has ended")

    def _end_rank(self, cause: str) -> None:
        logger.error("error: this rank ends because another one has ended\n  %s", cause.replace("\n", "\n  "))
        os._exit(1)
