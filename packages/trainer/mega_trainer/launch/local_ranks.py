"""Ranks of a run: of an existing launcher (torchrun, Slurm, Kubernetes), or local ranks that this module starts.

Local ranks are started by the library of torchrun and watched; when one fails, the others are ended. The output of each rank
goes to `<output>/logs/`; that of rank 0 is also shown.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.rendezvous import rendezvous

from mega_common.errors import INTERRUPTED_STATUS, ConfigError, MegaError, TrainingError, TrainingInterrupted
from mega_common.progress_logging import logger
from mega_trainer.distributed.comm import connection_error_reason, is_lost_connection
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.environment import STATUS_NOTE
from mega_trainer.job.error_log import record_error
from mega_trainer.job.training_guard import KEYBOARD_STATUS, STOP_SIGNALS, StopSignalHandler
from mega_trainer.launch.peer_failures import PeerFailureWatch, find_failed_rank

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # after the first failure, for the other ranks to report theirs


def rank_from_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """Return this process's rank from torchrun's environment variables; None outside of a launched job.

    Raises:
        ConfigError: when only some of the variables are set.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environment]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if missing:
        raise ConfigError(f"a launcher must set {', '.join(names)}, found no {', '.join(missing)}", hint="use torchrun")
    return RankInfo(*(int(environment[name]) for name in names[:3]))


def warn_unsafe_restarts(environment: Mapping[str, str]) -> None:
    """Log a warning when restarted ranks of several machines may not find each other.
    Settings of torchrun in `environment` may cause this.

    With a store that torchrun shares with its ranks, attempts are separated by torchrun's restart count
    (`select_attempt_store`), which may differ between machines.
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts != "0" and shared and environment.get("GROUP_WORLD_SIZE", "1") != "1":
        logger.warning(
            "torchrun --max-restarts=%s on several machines requires --rdzv-backend=c10d and "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun; otherwise restarted ranks may not find "
            "each other, and hang or fail",
            restarts,
        )


def select_attempt_store(store: Store, environment: Mapping[str, str]) -> Store:
    """Return the key-value store of the job for this restart attempt.
    It is `store`, or a prefix of it if torchrun shares it between attempts, since it then still has the keys of earlier
    ones.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    return PrefixStore(f"attempt-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def write_exit_status_note(environment: Mapping[str, str], status: int) -> None:
    """Write the exit status that `launch.elastic` returns if a signal ends torchrun; only local rank 0 of its jobs does."""
    if (note := environment.get(STATUS_NOTE)) and environment.get("LOCAL_RANK") == "0":
        Path(note).write_text(str(status))


def terminate_torchrun(environment: Mapping[str, str], status: int) -> None:
    """Terminate torchrun, which returns `status`, if it would otherwise restart ranks; only local rank 0 does.

    For a rank that was stopped or has a permanent error, a restart would be useless.
    """
    write_exit_status_note(environment, status)
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and environment.get("LOCAL_RANK") == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun passes it on, and this rank still reports its error
        os.kill(os.getppid(), signal.SIGTERM)


@contextlib.contextmanager
def convert_unreachable_rank_errors(ranks: RankInfo) -> Iterator[None]:
    """Convert torch's errors in the `with` block about unreachable ranks into one `TrainingError`.
    The errors are about ranks, or a job's store, that do not answer.

    Communicators are made by their first message: a rank that does not come is noticed there.

    Raises:
        TrainingError: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise TrainingError(
            f"rank {ranks.rank} of {ranks.world_size} on {socket.gethostname()}: the ranks of the job do not reach each "
            f"other ({connection_error_reason(error)})",
            hint="start the same command on all machines; with one machine lost, on as many as are left",
        ) from error


@contextlib.contextmanager
def join_process_group(ranks: RankInfo, device: str, timeout_seconds: float) -> Iterator[Store | None]:
    """Join the job's torch process group for the `with` block, and yield the key-value store; None on a single rank.

    Args:
        ranks: of this process.
        device: as in the configuration: auto, cpu or cuda.
        timeout_seconds: how long a collective may wait for another rank before the job is ended.

    Raises:
        TrainingError: when another rank does not come, or the store does not answer.
    """
    if ranks.world_size == 1:
        yield None
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(ranks.local_rank)
    with convert_unreachable_rank_errors(ranks):
        store = select_attempt_store(next(rendezvous("env://"))[0], os.environ)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("groups", store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=2 * timeout_seconds),  # the watchdog, which names the rank at fault, comes first
        )
        with _leave_process_group(PeerFailureWatch(store.clone(), ranks.rank)):  # type: ignore[attr-defined]
            yield store.clone()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _leave_process_group(watch: PeerFailureWatch) -> Iterator[None]:
    """Leave the process group after the `with` block, in which `watch` ends this rank if a peer fails.

    After an error the group is not destroyed: NCCL would wait for collectives that the other ranks never join, and the
    error would not be printed.
    """
    with watch:
        try:
            yield
        except TrainingInterrupted:  # of all ranks, after a save
            dist.destroy_process_group()
            raise
        except BaseException as error:
            watch.announce_failure(error)
            raise
    dist.destroy_process_group()


def default_rank_count(layout_ranks: int, device: str) -> int:
    """Return the default number of ranks on this machine: one per GPU, or on a CPU `layout_ranks`."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else layout_ranks


def run_local_ranks(command: Sequence[str], count: int, output: Path) -> int:
    """Run a command as `count` ranks on this machine, pass signals on to them, and return the exit status of the job.

    Returns:
        0, `INTERRUPTED_STATUS` when they have saved before their end, or the status of a failure that rank 0 has shown.
    Raises:
        TrainingError: when a rank failed, with its rank, host, exit status and last output; its `exit_status` is the
            rank's. Also when a signal ended the ranks before they trained.
        KeyboardInterrupt: at a second Ctrl-C; the ranks are killed.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its messages would repeat ours
    logs = output / "logs"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = max(1, torch.get_num_threads() // count)  # ranks share the cores
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": uuid4().hex[:8],
    }  # fmt: skip
    stop = StopSignalHandler(lambda number: _signal_all(ranks, number), again=_interrupt)
    ranks = start_processes(
        name="",
        entrypoint=command[0],
        args=dict.fromkeys(range(count), tuple(command[1:])),
        envs={rank: {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)},
        logs_specs=DefaultLogsSpecs(str(logs), redirects=Std.ALL, tee=Std.ALL, local_ranks_filter={0}),
        log_line_prefixes=dict.fromkeys(range(count), ""),  # only one rank is shown
    )
    try:
        with stop:  # replaces the handlers of `start_processes`, which would end the ranks
            ended = _wait_for_ranks(ranks)
    finally:
        ranks.close(signal.SIGKILL)
    try:
        return _interpret_exit_codes(ended, stop, logs, find_failed_rank(PrefixStore("attempt-0", store)))
    except TrainingError as error:
        record_error(output, None, error.message.splitlines()[0])
        raise


def _wait_for_ranks(ranks: PContext) -> dict[int, int]:
    """Wait for the ranks and return {rank: exit status} in the order of their ends; ranks that outlive a failed one for
    long are terminated.
    """
    assert isinstance(ranks, SubprocessContext)
    processes = {rank: handler.proc for rank, handler in ranks.subprocess_handlers.items()}
    ended: dict[int, int] = {}
    deadline = math.inf
    while len(ended) < len(processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        new = {rank: process.poll() for rank, process in processes.items() if rank not in ended}
        ended |= {rank: status for rank, status in new.items() if status is not None}
        if any(ended.values()):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    rest = [rank for rank in processes if rank not in ended]
    ranks.close(signal.SIGTERM)  # and SIGKILL to a rank that no signal interrupts
    by_launcher = (-signal.SIGTERM, -signal.SIGKILL)
    statuses = {rank: processes[rank].wait() for rank in rest}
    return ended | {rank: -signal.SIGTERM if code in by_launcher else code for rank, code in statuses.items()}


def _interrupt() -> None:
    raise KeyboardInterrupt


def _signal_all(ranks: PContext, number: int) -> None:
    for pid in ranks.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _interpret_exit_codes(
    ended: Mapping[int, int], stop: StopSignalHandler, logs: Path, announced: int | None = None
) -> int:
    """Interpret the exit codes of the ranks, in the order of their ends; `announced` is the rank whose error was the
    job's first, which may end at the same time as those that lost the connection to it.
    """
    failures = {rank: status for rank, status in ended.items() if status}
    statuses = set(failures.values()) - {-signal.SIGTERM}
    if statuses == {INTERRUPTED_STATUS}:
        return INTERRUPTED_STATUS
    if stop.name is not None and failures and statuses <= {KEYBOARD_STATUS, *(-number for number in STOP_SIGNALS)}:
        raise TrainingError(f"{stop.name}: the run was stopped before the first step")
    if not failures:
        return 0
    first = announced if announced in failures else next(iter(failures))
    # a rank that a signal killed had no time to announce an error; those that lost the connection to it did
    expected = {-number for number in STOP_SIGNALS}
    rank = next((rank for rank, status in failures.items() if status < 0 and status not in expected), first)
    shown = rank == 0 or failures[rank] == failures.get(0) == MegaError.exit_status  # all ranks report a user error
    if shown and failures[rank] > 0:
        return failures[rank]
    raise _rank_failure(rank, failures, logs)


def _rank_failure(rank: int, failures: Mapping[int, int], logs: Path) -> TrainingError:
    """Return an error that names the rank that failed first, with its last output; for a killed rank the output is
    another's.
    """
    exitcode = failures[rank]
    lines, hint = (
        [f"rank {rank} on {socket.gethostname()} ended with {_format_exit_code(exitcode)}"],
        f"all output is in {logs}",
    )
    if exitcode == -signal.SIGKILL:
        hint = f"signal 9 is sent by the kernel when memory runs out (see dmesg), or by mega to hanging ranks; {hint}"
        rank = next((other for other, status in failures.items() if status > 0), rank)
    if rank and (words := _last_stderr_lines(logs, rank)):  # the output of rank 0 was shown
        lines += [f"last output of rank {rank}:", *(f"  | {line}" for line in words)]
    error = TrainingError("\n".join(lines), hint=hint)
    error.exit_status = exitcode if exitcode > 0 else 1  # type: ignore[misc]
    return error


def _format_exit_code(exitcode: int) -> str:
    return f"signal {-exitcode} ({signal.Signals(-exitcode).name})" if exitcode < 0 else f"exit status {exitcode}"


def _last_stderr_lines(logs: Path, rank: int) -> list[str]:
    found = sorted(logs.glob(f"*/attempt_0/{rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    return found[-1].read_text(errors="replace").strip().splitlines()[-12:] if found else []
