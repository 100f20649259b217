"""The bubble of each pipeline schedule, measured on ranks whose stages sleep instead of computing.

    python benchmarks/bubble.py [--pp 4] [--milliseconds 100] [--rounds 5]

The trainer's own executor runs each schedule on processes that talk over gloo. Forward, input gradient and weight
gradient of all layers of a rank take one unit of time each, however many stages the rank has. The bubble is the share of
the step in which the ranks do not sleep; beside it stand the simulated one and the closed formula.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.parallel_linear import DeferredWgradQueue
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.pipeline.schedules import (
    compute_closed_form_bubble,
    make_pipeline_schedule,
    simulate_pipeline_schedule,
)

SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zbv", 2)]  # with stages per rank
MICROBATCHES = [4, 8, 16, 32]
CONFIG = ModelConfig(
    num_layers=1, hidden_size=2, ffn_hidden_size=2, num_attention_heads=1, vocab_size=2, position="none"
)
Case = tuple[str, int, int]  # schedule, stages per rank, micro-batches


class Sleeper(Decoder):
    """A stage without layers; its forward and both halves of its backward sleep for `seconds` each."""

    def __init__(self, seconds: float, *, splits_backward: bool) -> None:
        super().__init__(
            LayerBuilder(CONFIG, deferred=DeferredWgradQueue() if splits_backward else None),
            PipelineStageLayers(0, 0, heads=False),
        )
        self.weight, self.seconds, self.slept = nn.Parameter(torch.ones(1)), seconds, 0.0

    def sleep(self) -> None:
        begin = time.perf_counter()
        time.sleep(self.seconds)
        self.slept += time.perf_counter() - begin

    def weight_gradient(self) -> Tensor:
        self.sleep()
        return torch.ones_like(self.weight)

    def embed_inputs(self, tokens: Tensor, *rest: object) -> Tensor:
        return torch.zeros(*tokens.shape, CONFIG.hidden_size)

    def forward(self, x: Tensor, context: object) -> Tensor:
        return _Sleep.apply(x, self.weight, self)

    def compute_objective(self, x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return x.sum(), torch.zeros(2)


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Sleeper) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.stage = stage
        stage.sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        stage: Sleeper = ctx.stage
        stage.sleep()
        if stage.deferred is None:
            return dy, stage.weight_gradient(), None
        stage.deferred.defer_wgrad(ctx.saved_tensors[0], stage.weight_gradient)
        return dy, None, None


def measure(case: Case, seconds: float) -> float:
    """The share of a step, from the first rank's start to the last one's end, in which the ranks do not sleep."""
    name, virtual_stages, count = case
    rank, pp = dist.get_rank(), dist.get_world_size()
    schedule = make_pipeline_schedule(name, pp=pp, microbatches=count, virtual_stages=virtual_stages)
    stages = {
        stage: Sleeper(seconds / virtual_stages, splits_backward=schedule.splits_backward)
        for stage in schedule.stages_of_rank(rank)
    }
    executor = PipelineExecutor(schedule, stages, CommGroup("pp", tuple(range(pp)), rank, dist.group.WORLD))
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens, tokens.float(), tokens, None, range(1)) for _ in range(count)]
    dist.barrier()
    begin = time.monotonic()
    executor.run_operations(batches, 1.0)
    span = [None] * pp
    dist.all_gather_object(span, (begin, time.monotonic(), sum(stage.slept for stage in stages.values())))
    begins, ends, slept = zip(*span, strict=True)
    return 1 - sum(slept) / pp / (max(ends) - min(begins))


def run(rank: int, pp: int, rounds: int, seconds: float, store: str) -> None:
    """All cases in turn, `rounds` times, on each rank; rank 0 writes them down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=pp)
    cases = [(name, stages, count) for count in MICROBATCHES for name, stages in SCHEDULES]
    found: dict[Case, list[float]] = {case: [] for case in cases}
    measure(("1f1b", 1, 1), seconds)  # connections are made at the first message
    for _ in range(rounds):
        for case in cases:
            found[case].append(measure(case, seconds))
    if rank == 0:
        rows = [row(case, shares, pp) for case, shares in found.items()]
        print(*rows, sep="\n")
        results = {"pp": pp, "milliseconds": 1000 * seconds, "bubbles": rows}
        print("written to", record.write("bubble", results, ["torch"]))
    dist.destroy_process_group()


def row(case: Case, shares: list[float], pp: int) -> dict[str, Any]:
    """What was measured, beside theory. The least of the rounds: whatever else the machine does only adds."""
    name, stages, count = case
    schedule = make_pipeline_schedule(name, pp=pp, microbatches=count, virtual_stages=stages)
    formula = compute_closed_form_bubble(schedule)
    return {
        "schedule": name, "stages_per_rank": stages, "microbatches": count, "measured": round(min(shares), 4),
        "simulated": round(simulate_pipeline_schedule(schedule).mean_bubble_share, 4), "formula": formula and round(formula, 4),
        "rounds": [round(share, 4) for share in shares],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument(
        "--milliseconds", type=float, default=100.0, help="of a rank's forward, or half of its backward"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (options.pp, options.rounds, options.milliseconds / 1000, str(Path(folder) / "store"))
        torch.multiprocessing.spawn(run, given, nprocs=options.pp)


if __name__ == "__main__":
    main()
