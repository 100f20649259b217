"""Where the ranks of a run come from: a launcher that is there already (torchrun, Slurm, Kubernetes), or ours.

Ours is torchrun's elastic agent in this process: it starts the local ranks, watches them, and when one dies ends the
others. Each rank's output goes to `<output>/logs/`; the first one's is shown as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from mega_ckpt.folders import latest, saved_at
from mega_ckpt.remote import Place
from mega_common.errors import ConfigError, TrainingError

SAVE_SECONDS = 600  # after a signal the ranks have this long to save before they are killed


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def ranks_of(environment: Mapping[str, str]) -> Ranks | None:
    """This process's place, as torchrun's variables tell; None outside of a launched job.

    Raises:
        ConfigError: when only some of the variables are there.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environment]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if missing:
        raise ConfigError(
            f"a launcher set some of {', '.join(names)}, but not {', '.join(missing)}", hint="use torchrun"
        )
    return Ranks(*(int(environment[name]) for name in names[:3]))


@contextlib.contextmanager
def joined(ranks: Ranks, device: str, timeout_seconds: float) -> Iterator[Store | None]:
    """Be a rank of the job while the block runs; gives the job's store. A rank alone needs no group and no store.

    Args:
        ranks: this process's place.
        device: as in the configuration: auto, cpu or cuda.
        timeout_seconds: how long a collective may wait for another rank before the job is ended.
    """
    if ranks.world_size == 1:
        yield None
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(ranks.local_rank)
    store = next(rendezvous("env://"))[0]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("groups", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=2 * timeout_seconds),  # the watch, which knows whom to blame, comes first
    )
    try:
        yield store.clone()
    finally:
        dist.destroy_process_group()


def default_ranks(model_ranks: int, dp: int | None, device: str) -> int:
    """How many local ranks to start when nobody says: one a GPU, or on CPU as many as the layout asks for."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else model_ranks * (dp or 1)


def start_local_ranks(command: Sequence[str], count: int, output: Path, checkpoints: Place) -> None:
    """Run `command`, which saves to `checkpoints`, on `count` ranks of this machine and wait for them.

    Raises:
        TrainingError: when a rank failed, with its rank, host, exit status and last words; its `exit_status` is the
            rank's. Also when a signal ended the run before it could save.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
    logs = output / "logs"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid4().hex[:8],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(str(logs), redirects=Std.ALL, tee=Std.ALL, local_ranks_filter={0}),
        role="",
        log_line_prefix_template="${role_name}",  # that is, none: one rank is shown, and its lines are its own
    )
    begun = time.time()
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        raise _first_failure(error, logs) from None
    except SignalException as error:
        newest = latest(checkpoints)
        if newest is None or saved_at(newest) < begun:
            raise TrainingError(f"{error.sigval.name}: the run ended before it had saved a checkpoint") from None


def _first_failure(error: ChildFailedError, logs: Path) -> TrainingError:
    """The rank that died first, and what it last said. One that was killed comes before those that missed it."""
    rank, failure = min(
        error.failures.items(), key=lambda item: (item[1].exitcode != -signal.SIGKILL, item[1].timestamp)
    )
    found = sorted(logs.glob(f"*/attempt_0/{failure.local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    said = found[-1].read_text(errors="replace").strip().splitlines()[-12:] if found else []
    how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    told = TrainingError(
        f"rank {rank} on {socket.gethostname()} ended with {how}; its last words:\n"
        + "\n".join(f"  | {line}" for line in said),
        hint=f"all output is in {logs}",
    )
    told.exit_status = failure.exitcode if failure.exitcode > 0 else 1  # type: ignore[misc]
    return told
