"""Search for the largest micro-batch that fits this machine, by training a few steps with candidates.

Each trial is a separate `mega train` process, so that the search survives a rank that the kernel kills for its memory.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_common.errors import ConfigError, TrainingError
from mega_common.progress_logging import logger
from mega_trainer.config.run_config import RunConfig

STEPS = 3  # the first creates the optimizer state, the second has it in memory together with activations
OUT_OF_MEMORY = ("out of memory", "signal 9")


@dataclass(frozen=True)
class MicroBatchTrial:
    """Result of a trial run with a micro-batch size that fits the memory.
    It has the peak memory in bytes, and the tokens per second of the last step.
    """

    memory: int
    rate: float

    def __str__(self) -> str:
        return f"fits: {self.memory / 2**30:.2f} GiB, {self.rate:.0f} tokens/s"


def candidate_micro_batch_sizes(config: RunConfig, world_size: int) -> list[int]:
    """Return the micro-batch sizes that divide a data rank's share of a step's samples, the smallest first."""
    share = config.batch.global_ // config.data_parallel_size(world_size)
    return [n for n in range(1, share + 1) if share % n == 0]


def search_largest_fit(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of the ascending `sizes` that fits, by doubling and then bisection; None if none fits.
    If a size fits, all smaller sizes must also fit.
    """
    best, end = -1, len(sizes)
    index = 0
    while best + 1 < end:
        if fits(sizes[index]):
            best = index
        else:
            end = index
        if end == len(sizes):
            index = next((i for i, n in enumerate(sizes) if n >= 2 * sizes[best]), end - 1)
        else:
            index = (best + end) // 2
    return sizes[best] if best >= 0 else None


def find_micro_batch(
    config: RunConfig, run: Path, overrides: Sequence[str], command: Sequence[str], world_size: int
) -> int:
    """Return the largest `batch.micro` with which trial runs train without running out of memory.
    The trial runs have `STEPS` steps and are started as processes by `command`.

    Args:
        config: configuration of `run` with `overrides`.
        command: of `mega train` with the number of ranks, without the run and its settings.
        world_size: number of ranks.

    Raises:
        ConfigError: when not even a micro-batch of one sample fits.
        TrainingError: when the smallest trial fails for another reason.
    """
    found: set[int] = set()
    sizes = candidate_micro_batch_sizes(config, world_size)
    logger.info("batch.micro: trying some of %s, %d steps each", sizes, STEPS)

    def trial_fits(size: int) -> bool:
        trial = _run_trial([*command, str(run), *_trial_options(config, overrides, size, world_size)], bool(found))
        logger.info("batch.micro = %d: %s", size, trial)
        if isinstance(trial, MicroBatchTrial):
            found.add(size)
        return size in found

    best = search_largest_fit(sizes, trial_fits)
    if best is None:
        raise ConfigError(
            f"batch.micro = {sizes[0]}, the smallest of {run}, does not fit this machine",
            hint=f"run mega train {run} --set batch.micro={sizes[0]} for the memory by owner and settings that free it",
        )
    return best


def _trial_options(config: RunConfig, overrides: Sequence[str], size: int, world_size: int) -> list[str]:
    """Return the options of a short run with that micro-batch: with as many micro-batches in flight as in the real run,
    without loading or saving weights.
    """
    parallel, dp = config.parallel, config.data_parallel_size(world_size)
    count = min(config.batch.global_ // (size * dp), 2 * parallel.pp * parallel.virtual_stages)
    settings = [
        f"batch={{micro: {size}, global: {size * dp * count}}}", f"train={{steps: {STEPS}, seed: {config.train.seed}}}",
        "lr_schedule={name: constant}", "log={tensorboard: false}", "init_from=null",
        "checkpoint={save: false}",
    ]  # fmt: skip
    return [f"--set={setting}" for setting in [*overrides, *settings]]


def _run_trial(command: Sequence[str], smaller_fits: bool) -> MicroBatchTrial | str:
    """Return the result of a trial, or the reason why it is too large.

    Libraries may crash or raise any error when memory is exhausted, so every failure counts if a smaller size has trained.
    """
    with tempfile.TemporaryDirectory(prefix="mega-trial-") as folder:
        done = subprocess.run([*command, f"--set=output={folder}"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            last = json.loads((Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
            return MicroBatchTrial(int(last["memory_bytes"]), last["tokens_per_second"])
    if done.returncode == -signal.SIGKILL or any(words in done.stderr for words in OUT_OF_MEMORY):
        return "out of memory"
    words = "\n".join(f"  | {line}" for line in done.stderr.strip().splitlines()[-12:])
    if smaller_fits:
        return f"too large, while a smaller one trains: exit status {done.returncode}:\n{words}"
    raise TrainingError(f"a trial ended with exit status {done.returncode}:\n{words}")
