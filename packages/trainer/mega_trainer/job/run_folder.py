"""The folders a run writes to: claimed for it alone, tried before the first step, and what lies in them beside checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from mega_ckpt.folders import latest, make_durable_folder
from mega_ckpt.source import copy_assets, open_source, put_file
from mega_common.errors import CheckpointError, ConfigError
from mega_common.files import atomic_file, locked
from mega_common.remote import Place, RemoteError
from mega_data.tokenizer import Tokenizer
from mega_trainer.comm import Group, raised_alike
from mega_trainer.config import RunConfig
from mega_trainer.job.environment import described
from mega_trainer.job.memory import Copy
from mega_trainer.ranks import Ranks
from mega_trainer.tokens import TOKENIZER_FILES, tokenizer_files, with_vocabulary


@contextlib.contextmanager
def claimed(config: RunConfig, ranks: Ranks, world: Group) -> Iterator[None]:
    """While the block runs, no other run writes where this one does; and this one can, on every machine.

    Raises:
        ConfigError: the same on every rank, when another run holds a folder or one cannot be written to.
        CheckpointError: likewise, when a run that is not to resume finds one there.
    """
    output, checkpoints = Path(config.output), config.checkpoints
    with contextlib.ExitStack() as locks:
        with raised_alike(world):
            if ranks.local_rank == 0:
                _try("output" if config.checkpoint.path is None else "checkpoint.path", checkpoints)
            if ranks.rank == 0:
                _try("output", output)
                own = {output.resolve()}
                if config.checkpoint.path is not None and isinstance(checkpoints, Path):
                    own.add(checkpoints.resolve())
                for folder in sorted(own):
                    locks.enter_context(locked(folder))
                if not config.checkpoint.resume:
                    _check_unused(output, checkpoints)
        yield


def _try(key: str, folder: Place) -> None:
    """Write a byte there and remove it again."""
    if not isinstance(folder, Path):
        probe = folder / ".writable"
        probe.write_bytes(b"\n")
        with contextlib.suppress(RemoteError):
            probe.remove()
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


def _check_unused(output: Path, checkpoints: Place) -> None:
    """Refuse to begin anew where a run is: its checkpoints would be taken for this one's, and its metrics cut off."""
    metrics, newest = output / "metrics.jsonl", latest(checkpoints)
    if newest is not None or (metrics.exists() and metrics.stat().st_size):
        raise CheckpointError(
            f"checkpoint.resume = false, but there is a run already: {newest or metrics}",
            hint="set another output, move the old run away, or leave checkpoint.resume out to go on with it",
        )


def make_run_folder(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """`<output>/run.yaml` with every setting, and the files that travel with the model (`assets/`: its tokenizer)."""
    folder = Path(config.output)
    with atomic_file(folder / "run.yaml", text=True) as stream:
        yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), stream, sort_keys=False)
    assets = folder / "assets"
    if assets.exists():
        return
    if config.init_from is not None:
        copy_assets(with_vocabulary(config, open_source(config.init_from), tokenizer), assets)
        if not config.data.allow_other_tokenizer:
            return
        for name in TOKENIZER_FILES:
            (assets / name).unlink(missing_ok=True)
    if tokenizer is not None:
        for path in tokenizer_files(tokenizer):
            put_file(assets / path.name, path)


def record_start(config: RunConfig, ranks: Ranks, step: int, start: object, state_seconds: float) -> None:
    """A line in `<output>/starts.jsonl`, by rank 0: after which step the run began or goes on, when, where and as what.

    What a start took is told by its parts, so that what a fault cost is known: `process_seconds` since this rank's process
    began, of which `state_seconds` to bring the state `from` where it was (disk, memory, or nowhere); what is between the last
    line of metrics.jsonl and that process was the launcher's.
    """
    if ranks.rank:
        return
    source = "nowhere" if start is None else "memory" if isinstance(start, Copy) else "disk"
    took = {"from": source, "process_seconds": process_age(), "state_seconds": state_seconds}
    layout = {"ranks": ranks.world_size, **config.parallel.model_dump(mode="json", exclude_defaults=True)}
    line = {"time": time.time(), "step": step, **took, "layout": layout, **described()}
    with open(Path(config.output) / "starts.jsonl", "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def process_age() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
