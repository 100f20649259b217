"""What the watch over the ranks costs: steps while it looks where they are beside the same steps without it.

    python benchmarks/watch.py [--pairs 150]

One small model on this machine, and the watch as it is by default: a look twice a second, and in each block of steps its
start and first sign, which a run pays once and every five seconds. Pairs of blocks follow each other, the first of a pair
changing sides, in processor time of all threads; the figure is the median of the differences over the median of the blocks.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import phases as model
import record
import torch
from torch.distributed import HashStore

from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.hang_watchdog import HangWatchdog
from mega_trainer.job.phase_timer import PhaseTimer
from mega_trainer.run import build_components
from mega_trainer.run.train_step import train_step
from mega_trainer.run.training_run import build_training_state_and_executor

STEPS = 12  # in a second or two, so that a machine is as fast in both halves of a pair


def measure(pairs: int, logs: Path) -> dict[str, float]:
    """Milliseconds of processor time a step without, and the share that the watch adds."""
    torch.set_num_threads(1)
    config, device = RunConfig.parse(model.RUN), torch.device("cpu")
    groups, phases = build_components.connect_parallel_groups(config, RankInfo()), PhaseTimer(device)
    state, executor = build_training_state_and_executor(config, groups, device, phases.time_phase)
    shape = (model.MICRO_BATCHES, model.LENGTH)
    tokens, places = np.ones((shape[0], shape[1] + 1), np.int64), np.tile(np.arange(shape[1]), (shape[0], 1))
    batch = StepBatch(tokens[:, 1:], tokens[:, :-1], np.ones(shape, bool), places, None, np.arange(shape[0]))
    micro = list(split_micro_batches(batch, config, device, groups.cp))

    def block(*, watched: bool) -> float:
        watch = HangWatchdog(HashStore(), 0, 1, lambda: 1, lambda: phases.current, config.timeout_seconds, logs)
        begin = time.process_time()
        with watch if watched else nullcontext():
            for _ in range(STEPS):
                train_step(executor, state.optimizer, micro, tokens=[float(shape[0] * shape[1])], lr=1e-4, clip=1.0)
                phases.take_phase_durations()
        return time.process_time() - begin

    block(watched=True)
    whole, (overhead, *interval) = model.paired(lambda watched: block(watched=watched), pairs)
    found = {"step_ms": 1000 * whole / STEPS, "overhead_percent": overhead, "pairs": pairs}
    return found | dict(zip(("percent_from", "percent_to"), interval, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=150)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(parser.parse_args().pairs, Path(folder))
    print(
        f"{found['step_ms']:.2f} ms a step, {found['overhead_percent']:+.2f} % with the watch "
        f"({found['percent_from']:+.2f} to {found['percent_to']:+.2f})"
    )
    record.write("watch", found, ["torch"])


if __name__ == "__main__":
    main()
