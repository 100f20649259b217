"""Training of one case on this rank: the trainer's own components on synthetic batches, a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast
from unittest import mock

import torch
import torch.distributed as dist

from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_data.batch_loader import StepBatch
from mega_data.blended_dataset import BlendedDataset
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.distributed.comm import CommTrafficCounter
from mega_trainer.distributed.process_groups import (
    ParallelGroups,
    ProcessGroupCache,
    RankInfo,
    build_parallel_groups,
    get_device_process_group_backend,
)
from mega_trainer.job.step_result import StepResult
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.run import build_components, training_run
from mega_trainer.run.objective_builder import build_objectives
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.train_step import train_step
from mega_trainer.verify.layout_case import STEPS, LayoutCase
from mega_trainer.verify.synthetic_batches import make_synthetic_batch

CPU = torch.device("cpu")
LEARNING_RATE = 1e-2
NamedTensors = Mapping[str, ShardedTensor]  # by canonical name, as this rank's boxes
# Batch of a step: configuration, number of the step, data rank, data ranks, whether attention is restricted to documents.
BatchFunction = Callable[[RunConfig, int, int, int, bool], StepBatch]


@dataclass
class CaseOutcome:
    """Results of training steps in a tested layout: losses and norms by step, and this rank's slices of each tensor.

    Attributes:
        losses, norms: of all steps, further losses included.
        gradients: of the first step, as clipped.
        tensors: weights and optimizer state after the last step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: NamedTensors = field(default_factory=dict)
    tensors: NamedTensors = field(default_factory=dict)

    def tensors_by_kind(self) -> dict[str, NamedTensors]:
        """Return the outcome's tensors grouped as gradients, weights and optimizer moments."""
        state = {name: held for name, held in self.tensors.items() if name.startswith("optimizer/")}
        weights = {name: held for name, held in self.tensors.items() if name not in state}
        return {"gradients": self.gradients, "weights": weights, "moments": state}


@dataclass
class CaseTrainer:
    """Trainer of one tested layout on this rank: components of a run with random weights, and its batches."""

    case: LayoutCase
    config: RunConfig
    groups: ParallelGroups
    executor: PipelineExecutor
    optimizer: ShardedOptimizer
    state: TrainState
    batches: BatchFunction
    device: torch.device = CPU

    @classmethod
    def build(
        cls,
        case: LayoutCase,
        rank: int = 0,
        maker: ProcessGroupCache | None = None,
        log: CommTrafficCounter | None = None,
        batches: BatchFunction | None = None,
        device: torch.device = CPU,
    ) -> CaseTrainer:
        """Return this rank's trainer of a tested layout. A collective call of its ranks."""
        config = case.config
        groups = build_components.connect_parallel_groups(config, RankInfo(rank, case.ranks), maker, log)
        dtype = torch.float64 if case.wide else build_components.get_compute_dtype(config)
        with mock.patch.object(build_components, "get_compute_dtype", return_value=dtype):
            state, executor = training_run.build_training_state_and_executor(config, groups, device)
        for stage in state.stages.values():
            initialize_weights(stage, config.train.seed, config.init_factor_of)
        state.optimizer.load_main_from_model()
        return cls(case, config, groups, executor, state.optimizer, state, batches or make_synthetic_batch, device)

    def make_micro_batches(self, number: int) -> tuple[Sequence[MicroBatch], Sequence[float]]:
        """Return this rank's micro-batches of step `number`, and the numbers of loss terms of the step."""
        batch = self.batches(self.config, number, self.groups.dp.rank, self.groups.dp.size, self.case.closed)
        micro = list(split_micro_batches(batch, self.config, self.device, self.groups.cp))
        no_data = cast(BlendedDataset, None)  # objectives that read data are replaced in the case's run.yaml
        objective, _ = build_objectives(self.config, self.executor, self.device, 0, no_data, None)
        return objective.prepare_micro_batches(batch, micro), objective.count_step_terms(batch)

    def step(self, number: int | None = None, *, lr: float = LEARNING_RATE) -> StepResult:
        """Train on the batch of the next step, or of step `number`, and return the step's result."""
        micro, tokens = self.make_micro_batches(self.state.step if number is None else number)
        settings = self.config.optimizer
        result = train_step(
            self.executor, self.optimizer, micro, tokens=tokens,
            lr=lr, decoupled_lr=settings.decoupled_lr, clip=settings.clip_grad,
            loss_scale=self.state.loss_scale,
        )  # fmt: skip
        self.state.advance_step(result)
        return result

    def run(self, steps: int = STEPS) -> CaseOutcome:
        """Train the tested layout for some steps and return their results."""
        out = CaseOutcome()
        for number in range(steps):
            result = self.step()
            out.losses += [loss for loss in (result.loss, result.mtp_loss, result.pair_loss) if loss is not None]
            out.norms.append(result.grad_norm)
            if number == 0:
                out.gradients = copy_sharded_tensors_to_host(self.optimizer.gradients_by_name())
        out.tensors = copy_sharded_tensors_to_host(self.state.checkpoint_tensors())
        return out


def copy_sharded_tensors_to_host(tensors: NamedTensors) -> dict[str, ShardedTensor]:
    """Return copies of sharded tensors in host memory, which later steps do not change."""
    return {
        name: ShardedTensor(
            held.shape, [TensorBox(box.offset, box.tensor.detach().to("cpu", copy=True)) for box in held.boxes]
        )
        for name, held in tensors.items()
    }


class _GroupListing(ProcessGroupCache):
    """Cache that lists the process groups that would be made."""

    def get_process_group(self, ranks: Sequence[int]) -> None:
        if len(ranks) > 1:
            self.groups_by_ranks[tuple(ranks)] = None  # type: ignore[assignment]


def make_case_process_groups(cases: Iterable[LayoutCase]) -> ProcessGroupCache:
    """Return a cache with new process groups for all cases. A collective call of the whole world.

    Torch names a group that its members alone ask for by how many groups each has made before, so that ranks which went
    through different layouts would wait for each other; here all ranks make all groups in one order.
    """
    listing = _GroupListing()
    for case in cases:
        config = case.config
        p = config.parallel
        layout = ParallelLayout(
            tp=p.tp, pp=p.pp, cp=p.cp, dp=config.data_parallel_size(case.ranks), ep=p.ep, expert_tp=p.expert_tp
        )
        for rank in range(case.ranks):
            build_parallel_groups(
                layout, rank, heads=config.model.shared_head_counts, shard=p.zero3_shard, maker=listing
            )
    maker = ProcessGroupCache()
    for ranks in sorted(listing.groups_by_ranks):
        if len(ranks) == dist.get_world_size():
            maker.groups_by_ranks[ranks] = dist.group.WORLD  # type: ignore[assignment]
        else:
            maker.groups_by_ranks[ranks] = dist.new_group(
                list(ranks), timeout=timedelta(seconds=60), backend=get_device_process_group_backend()
            )
    return maker


class SingleProcessOutcomes:
    """Reference results of each tested layout's model in one process, computed once.

    Making the object is a collective call of all ranks, which share the work.
    """

    def __init__(
        self,
        cases: Iterable[tuple[LayoutCase, int]],
        single: Callable[[LayoutCase], LayoutCase] = lambda case: case.single,
        batches: BatchFunction | None = None,
        device: torch.device = CPU,
    ) -> None:
        work = {_outcome_key(one, steps): (single(one), steps) for one, steps in cases}
        self._made = dict(zip(work, train_cases_in_one_process(list(work.values()), batches, device), strict=True))

    def get_outcome(self, case: LayoutCase, steps: int = STEPS) -> CaseOutcome:
        """Return the results of training the model of `case` in one process for `steps` steps."""
        return self._made[_outcome_key(case, steps)]


def _outcome_key(case: LayoutCase, steps: int) -> str:
    return f"{case.single.raw} {case.closed} {steps}"


def get_rank_and_world() -> tuple[int, int]:
    """Return this rank's number and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train_cases_in_one_process(
    work: Sequence[tuple[LayoutCase, int]], batches: BatchFunction | None = None, device: torch.device = CPU
) -> list[CaseOutcome]:
    """Train each case in one process for a number of steps; the ranks share the work. A collective call of all ranks."""
    rank, ranks = get_rank_and_world()
    own = [CaseTrainer.build(one, batches=batches, device=device).run(steps) for one, steps in work[rank::ranks]]
    everyone = [own]
    if ranks > 1:
        everyone = [[]] * ranks
        dist.all_gather_object(everyone, own)
    return [everyone[number % ranks][number // ranks] for number in range(len(work))]
