"""Ranks that share a model for evaluation or serving."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mega_common.errors import ConfigError

if TYPE_CHECKING:
    from mega_eval.multi_rank_inference import ReplicaLayout
    from mega_trainer.distributed.rank_info import RankInfo


@contextmanager
def join_model_ranks(sharing: ReplicaLayout, nproc: int | None, device: str, wait_seconds: float) -> Iterator[RankInfo]:
    """Join the process group of the ranks that share copies of a model, and yield this process's rank; the other ranks
    wait up to `wait_seconds` for rank 0.

    If this process is not a rank and several are needed, it starts the same command on them and exits with their status.

    Raises:
        ConfigError: if their number does not divide into whole copies of the model.
    """
    from mega_common.progress_logging import configure_logging
    from mega_trainer.distributed.rank_info import RankInfo
    from mega_trainer.launch.local_ranks import join_process_group, rank_from_environment

    ranks = rank_from_environment(os.environ)
    count = ranks.world_size if ranks else nproc or sharing.ranks_per_copy
    if count % sharing.ranks_per_copy or sharing.ranks_per_stage % min(sharing.tp, sharing.ep):
        raise ConfigError(
            f"{count} ranks do not fit the layout tp {sharing.tp}, ep {sharing.ep}, pp {sharing.pp}",
            hint="pp * max(tp, ep) must divide the number of ranks, and min(tp, ep) must divide max(tp, ep)",
        )
    if ranks is None and count > 1:
        raise typer.Exit(_start_ranks(count))
    ranks = ranks or RankInfo()
    if ranks.world_size > 1:
        configure_logging(rank=ranks.rank, world_size=ranks.world_size)
    with join_process_group(ranks, device, wait_seconds):
        yield ranks


def _start_ranks(count: int) -> int:
    """Start this command on several ranks; their logs are kept if one fails."""
    from mega_trainer.launch.local_ranks import run_local_ranks

    folder = Path(tempfile.mkdtemp(prefix="mega-eval-"))
    status = run_local_ranks([sys.executable, "-m", "mega_cli.main", *sys.argv[1:]], count, folder)
    if status == 0:
        shutil.rmtree(folder)
    return status
