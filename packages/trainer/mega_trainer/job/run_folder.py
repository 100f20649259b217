"""Folders a run writes to: claimed for the run, tested before the first step, and their files other than checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from mega_ckpt.checkpoint_folders import latest_checkpoint, make_durable_folder
from mega_ckpt.source import copy_assets, open_weight_source, write_file_durably
from mega_common.atomic_files import lock_folder, open_atomic_file
from mega_common.errors import CheckpointError, ConfigError
from mega_common.object_store import Location, ObjectStoreError
from mega_data.tokenizer import Tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import TOKENIZER_FILES, extend_vocabulary, list_tokenizer_files
from mega_trainer.distributed.comm import CommGroup, raise_on_all_ranks
from mega_trainer.distributed.rank_info import RankInfo
from mega_trainer.job.environment import describe_environment
from mega_trainer.job.memory_checkpoint import MemoryCopy


@contextlib.contextmanager
def claim_run_folders(config: RunConfig, ranks: RankInfo, world: CommGroup) -> Iterator[None]:
    """Lock the run's folders for the block, after checking on every machine that they are writable.

    Raises:
        ConfigError: the same on every rank, when another run holds a folder or one cannot be written to.
        CheckpointError: likewise, when a run that is not to resume finds one there.
    """
    output, checkpoints = Path(config.output), config.checkpoint_root
    with contextlib.ExitStack() as locks:
        with raise_on_all_ranks(world):
            if ranks.local_rank == 0:
                _check_writable("output" if config.checkpoint.path is None else "checkpoint.path", checkpoints)
            if ranks.rank == 0:
                _check_writable("output", output)
                own = {output.resolve()}
                if config.checkpoint.path is not None and isinstance(checkpoints, Path):
                    own.add(checkpoints.resolve())
                for folder in sorted(own):
                    locks.enter_context(lock_folder(folder))
                if not config.checkpoint.resume:
                    _check_unused(output, checkpoints)
        yield


def _check_writable(key: str, folder: Location) -> None:
    """Write a byte to the folder and remove it again."""
    if not isinstance(folder, Path):
        probe = folder / ".writable"
        probe.write_bytes(b"\n")
        with contextlib.suppress(ObjectStoreError):
            probe.delete_objects()
        return
    try:
        make_durable_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as stream:
            stream.write(b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except (OSError, CheckpointError) as error:
        told = f"{error.filename or folder}: {error.strerror}" if isinstance(error, OSError) else error.message
        raise ConfigError(f"{key} cannot be written to: {told}", hint=f"mend that, or set another {key}") from error


def _check_unused(output: Path, checkpoints: Location) -> None:
    """Refuse to start a new run where one exists: its checkpoints would be taken for this one's, and its metrics cut
    off.
    """
    metrics, newest = output / "metrics.jsonl", latest_checkpoint(checkpoints)
    if newest is not None or (metrics.exists() and metrics.stat().st_size):
        raise CheckpointError(
            f"checkpoint.resume = false, but there is a run already: {newest or metrics}",
            hint="set another output, move the old run away, or leave checkpoint.resume out to go on with it",
        )


def make_run_folder(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Write `<output>/run.yaml` with every setting, and the files that travel with the model (`assets/`: its
    tokenizer).
    """
    folder = Path(config.output)
    with open_atomic_file(folder / "run.yaml", text=True) as stream:
        yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), stream, sort_keys=False)
    assets = folder / "assets"
    if assets.exists():
        return
    if config.init_from is not None:
        copy_assets(extend_vocabulary(config, open_weight_source(config.init_from), tokenizer), assets)
        if not config.data.allow_other_tokenizer:
            return
        for name in TOKENIZER_FILES:
            (assets / name).unlink(missing_ok=True)
    if tokenizer is not None:
        for path in list_tokenizer_files(tokenizer):
            write_file_durably(assets / path.name, path)


def record_run_start(config: RunConfig, ranks: RankInfo, step: int, start: object, state_seconds: float) -> None:
    """Append a line to `<output>/starts.jsonl`, on rank 0: the step after which the run starts or resumes, time,
    machine and layout.

    What a start took is told by its parts, so that what a fault cost is known: `process_seconds` since this rank's process
    began, of which `state_seconds` to bring the state `from` where it was (disk, memory, or nowhere); what is between the last
    line of metrics.jsonl and that process was the launcher's.
    """
    if ranks.rank:
        return
    source = "nowhere" if start is None else "memory" if isinstance(start, MemoryCopy) else "disk"
    took = {"from": source, "process_seconds": process_age_seconds(), "state_seconds": state_seconds}
    layout = {"ranks": ranks.world_size, **config.parallel.model_dump(mode="json", exclude_defaults=True)}
    line = {"time": time.time(), "step": step, **took, "layout": layout, **describe_environment()}
    with open(Path(config.output) / "starts.jsonl", "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def process_age_seconds() -> float:
    """Return the seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
