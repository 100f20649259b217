"""Search for the largest micro-batch that fits this machine, by training a few steps with candidates.

Each trial is a `mega train` of its own, so that a rank which the kernel ends for its memory is a finding and no end.
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

STEPS = 3  # the first makes the optimizer's state, and the second has it beside the activations
OUT_OF_MEMORY = ("out of memory", "signal 9")


@dataclass(frozen=True)
class MicroBatchTrial:
    """Result of a micro-batch that fits: peak memory in bytes, and tokens per second of the last step."""

    memory: int
    rate: float

    def __str__(self) -> str:
        return f"fits: {self.memory / 2**30:.2f} GiB, {self.rate:.0f} tokens/s"


def candidate_sizes(config: RunConfig, world_size: int) -> list[int]:
    """Return the micro-batches that divide a data rank's share of a step, the smallest first."""
    share = config.batch.global_ // config.data_parallel_size(world_size)
    return [n for n in range(1, share + 1) if share % n == 0]


def search_largest_fit(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits, if all smaller ones fit: by doubling until one does not, then by bisection."""
    best, end = -1, len(sizes)
    place = 0
    while best + 1 < end:
        if fits(sizes[place]):
            best = place
        else:
            end = place
        if end == len(sizes):
            place = next((i for i, n in enumerate(sizes) if n >= 2 * sizes[best]), end - 1)
        else:
            place = (best + end) // 2
    return sizes[best] if best >= 0 else None


def find_micro_batch(
    config: RunConfig, run: Path, overrides: Sequence[str], command: Sequence[str], world_size: int
) -> int:
    """Return the largest `batch.micro` that trains `STEPS` steps without running out of memory.

    Args:
        config: the run, as `run` and `overrides` have it.
        command: starts `mega train` with the number of ranks; the run and its settings follow.
        world_size: those ranks.

    Raises:
        ConfigError: when not even a micro-batch of one sample fits.
        TrainingError: when the smallest trial fails for another reason.
    """
    found: set[int] = set()
    sizes = candidate_sizes(config, world_size)
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
            f"{run}: not even batch.micro = {sizes[0]} fits this machine",
            hint=f"mega train {run} --set batch.micro={sizes[0]} says what takes the memory, and what would free it",
        )
    return best


def _trial_options(config: RunConfig, overrides: Sequence[str], size: int, world_size: int) -> list[str]:
    """Return the options of a short run with that micro-batch: as many in flight as in the real run, no weights read
    and none saved.
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

    Where memory ends, a library may crash, or raise anything; so whatever ends a trial counts, if a smaller one trained.
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
        return f"too large, for a smaller one trains and this one ended with exit status {done.returncode}:\n{words}"
    raise TrainingError(f"a trial ended with exit status {done.returncode}:\n{words}")
