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
from mega_ckpt.source import copy_assets, write_file_durably
from mega_common.atomic_files import lock_folder, open_atomic_file
from mega_common.errors import CheckpointError, ConfigError
from mega_common.object_store import Location, ObjectStoreError
from mega_data.tokenizer import Tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import TOKENIZER_FILES, find_tokenizer_files, open_initial_weights
from mega_trainer.distributed.comm import CommGroup, raise_on_all_ranks
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.environment import describe_environment
from mega_trainer.job.memory_checkpoint import TrainingStateCopy


@contextlib.contextmanager
def claim_run_folders(config: RunConfig, ranks: RankInfo, world: CommGroup) -> Iterator[None]:
    """Lock the run's output and checkpoint folders for the `with` block.
    Before that, check on every machine that they are writable.

    Raises:
        ConfigError: the same on every rank, when another run holds a folder or one cannot be written to.
        CheckpointError: on every rank, when `checkpoint.resume` is false and the folder holds a run.
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
        reason = f"{error.filename or folder}: {error.strerror}" if isinstance(error, OSError) else error.message
        raise ConfigError(f"{key} must be writable: {reason}", hint=f"fix that, or set another {key}") from error


def _check_unused(output: Path, checkpoints: Location) -> None:
    """Reject a folder that holds another run, whose checkpoints and metrics would be mixed with those of this run."""
    metrics, newest = output / "metrics.jsonl", latest_checkpoint(checkpoints)
    if newest is not None or (metrics.exists() and metrics.stat().st_size):
        raise CheckpointError(
            f"checkpoint.resume = false requires an unused output folder, found {newest or metrics}",
            hint="set another output, move the old run, or remove checkpoint.resume to resume it",
        )


def make_run_folder(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Write the files of a new run's output folder: `run.yaml` and `assets/`.
    `<output>/run.yaml` has every setting; `<output>/assets/` has the files that are copied along with a model, such as
    its tokenizer.
    """
    folder = Path(config.output)
    with open_atomic_file(folder / "run.yaml", text=True) as stream:
        yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), stream, sort_keys=False)
    assets = folder / "assets"
    if not assets.exists():
        _write_assets(config, tokenizer, assets)
        if config.data.raw.chat_template is not None:  # the model is used with the template that it was trained with
            write_file_durably(assets / "chat_template.jinja", config.data.raw.chat_template)


def _write_assets(config: RunConfig, tokenizer: Tokenizer | None, assets: Path) -> None:
    if config.init_from is not None:
        copy_assets(open_initial_weights(config, config.init_from, tokenizer)[1], assets)
        if not config.data.allow_other_tokenizer:
            return
        for path in [path for glob in TOKENIZER_FILES for path in assets.glob(glob)]:
            path.unlink()
    if tokenizer is not None:
        for name, content in find_tokenizer_files(tokenizer).items():
            write_file_durably(assets / name, content)


def record_run_start(config: RunConfig, ranks: RankInfo, step: int, start: object, state_seconds: float) -> None:
    """Append a line about the start of a run to `<output>/starts.jsonl`, on rank 0.
    The line has the step after which the run starts or resumes, time, machine and parallel layout.

    The duration of a start is recorded in parts, to find the cost of a fault: `process_seconds` since this rank's process
    began, of which `state_seconds` to load the state `from` disk, memory or nowhere. The time between the last line of
    metrics.jsonl and the start of the process is the launcher's.
    """
    if ranks.rank:
        return
    source = "nowhere" if start is None else "memory" if isinstance(start, TrainingStateCopy) else "disk"
    durations = {"from": source, "process_seconds": process_age_seconds(), "state_seconds": state_seconds}
    layout = {"ranks": ranks.world_size, **config.parallel.model_dump(mode="json", exclude_defaults=True)}
    line = {"time": time.time(), "step": step, **durations, "layout": layout, **describe_environment()}
    with open(Path(config.output) / "starts.jsonl", "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def process_age_seconds() -> float:
    """Return the seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
