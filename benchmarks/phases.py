"""What it costs to record where a step's time goes: steps with phases beside the same steps without, of a run on this machine.

    python benchmarks/phases.py [--pairs 200]

One small model, so small that its steps are shorter than any that is trained: what is recorded costs the same in a long one.
Pairs of steps follow each other, the first of a pair changing sides, in processor time; one figure is the median of the
differences over the median of the steps. It is smaller than what steps differ by anyway, so that the other one is the time of
all that telling does in a step, done by itself many times over, as a share of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import record
import torch

from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.goodput import GoodputCounter
from mega_trainer.job.phase_timer import PhaseTimer
from mega_trainer.run import build_components
from mega_trainer.run.train_step import train_step
from mega_trainer.run.training_run import build_training_state_and_executor

LENGTH, MICRO_BATCHES = 256, 4
RUN = {
    "model": {
        "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 4, "vocab_size": 1024,
        "max_position": LENGTH,
    },
    "data": {"train": [{"path": "none"}], "seq_length": LENGTH},
    "batch": {"micro": 1, "global": MICRO_BATCHES}, "precision": "fp32", "device": "cpu",
}  # fmt: skip


def measure(pairs: int) -> dict[str, float]:
    """Milliseconds of processor time a step without, and the share that telling adds."""
    torch.set_num_threads(1)
    config, device = RunConfig.parse(RUN), torch.device("cpu")
    groups = build_components.connect_parallel_groups(config, RankInfo())
    state, executor = build_training_state_and_executor(config, groups, device)
    shape = (MICRO_BATCHES, LENGTH)
    tokens, places = np.ones((MICRO_BATCHES, LENGTH + 1), np.int64), np.tile(np.arange(LENGTH), (MICRO_BATCHES, 1))
    batch = StepBatch(tokens[:, 1:], tokens[:, :-1], np.ones(shape, bool), places, None, np.arange(MICRO_BATCHES))
    micro = list(split_micro_batches(batch, config, device, groups.cp))
    phases, goodput = PhaseTimer(device), GoodputCounter(time.time())

    def step(*, told: bool) -> float:
        executor.phase = phases.time_phase if told else lambda name: nullcontext()
        begin = time.process_time()
        train_step(executor, state.optimizer, micro, tokens=[float(LENGTH * MICRO_BATCHES)], lr=1e-4, clip=1.0)
        if told:
            goodput.add_lost_phases(phases.take_phase_durations())
            goodput.metrics_fields(time.time())
        return time.process_time() - begin

    names: list[str] = []
    executor.phase = lambda name: nullcontext(names.append(name))
    train_step(executor, state.optimizer, micro, tokens=[float(LENGTH * MICRO_BATCHES)], lr=1e-4, clip=1.0)

    def tell() -> float:
        begin = time.process_time()
        for _ in range(1000):
            for name in names:
                with phases.time_phase(name):
                    pass
            goodput.add_lost_phases(phases.take_phase_durations())
            goodput.metrics_fields(time.time())
        return (time.process_time() - begin) / 1000

    for _ in range(5):
        step(told=True)
    whole, (more, *_) = paired(lambda told: step(told=told), pairs)
    alone = min(tell() for _ in range(5))
    return {
        "step_ms": 1000 * whole, "pairs": pairs, "paired_percent": more,
        "phases": len(names), "alone_us": 1e6 * alone, "alone_percent": 100 * alone / whole,
    }  # fmt: skip


def paired(run: Callable[[bool], float], pairs: int) -> tuple[float, list[float]]:
    """Seconds of a run without something, and how many percent more one with it takes: medians over pairs, each in turn first.

    The percents are the median and the ends of its 95 % interval, by ranks of the differences.
    """
    differences, plain = [], []
    for number in range(pairs):
        order = (True, False) if number % 2 else (False, True)
        taken = {having: run(having) for having in order}
        differences.append(taken[True] - taken[False])
        plain.append(taken[False])
    whole, differences = statistics.median(plain), sorted(differences)
    low = max(0, int(pairs / 2 - 0.98 * pairs**0.5))
    found = statistics.median(differences), differences[low], differences[pairs - 1 - low]
    return whole, [100 * difference / whole for difference in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    found = measure(parser.parse_args().pairs)
    print(
        f"{found['step_ms']:.2f} ms a step; its {found['phases']} phases take {found['alone_us']:.0f} us to tell, "
        f"{found['alone_percent']:.3f} %; in pairs {found['paired_percent']:+.2f} %"
    )
    record.write("phases", found, ["torch"])


if __name__ == "__main__":
    main()
