"""Ranks that share a model for evaluation or serving: this process is one, or starts them."""

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
    from mega_eval.replicas import Sharing
    from mega_trainer.ranks import Ranks


@contextmanager
def ranks_for(sharing: Sharing, nproc: int | None, device: str, wait_seconds: float) -> Iterator[Ranks]:
    """This process's place among ranks that share copies of a model; `wait_seconds` they wait for the first.

    Where it is no rank yet and several are asked for, it starts this very command on them, and ends with them.

    Raises:
        ConfigError: when their number is none for whole copies.
    """
    from mega_common.log import setup_log
    from mega_trainer.ranks import Ranks, joined, ranks_of

    ranks = ranks_of(os.environ)
    count = ranks.world_size if ranks else nproc or sharing.size
    if count % sharing.size or sharing.block % min(sharing.tp, sharing.ep):
        raise ConfigError(
            f"{count} ranks cannot be shared out by tp {sharing.tp}, ep {sharing.ep} and pp {sharing.pp}",
            hint="pp times the larger of tp and ep divides the number of ranks, and the smaller of these the larger",
        )
    if ranks is None and count > 1:
        raise typer.Exit(_start(count))
    ranks = ranks or Ranks()
    if ranks.world_size > 1:
        setup_log(rank=ranks.rank, world_size=ranks.world_size)
    with joined(ranks, device, wait_seconds):
        yield ranks


def _start(count: int) -> int:
    """Start this very command on so many ranks; their logs stay where it fails."""
    from mega_trainer.ranks import start_local_ranks

    folder = Path(tempfile.mkdtemp(prefix="mega-eval-"))
    status = start_local_ranks([sys.executable, "-m", "mega_cli.main", *sys.argv[1:]], count, folder)
    if status == 0:
        shutil.rmtree(folder)
    return status
