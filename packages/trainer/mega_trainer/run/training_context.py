"""Context of a training loop: everything that it needs on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.distributed_c10d import Store

from mega_data.batch_loader import BatchLoader, StepBatch
from mega_data.blended_dataset import BlendedDataset
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.memory_checkpoint import MemoryCheckpoint
from mega_trainer.job.phase_timer import PhaseTimer
from mega_trainer.job.profiler import StepProfiler
from mega_trainer.job.training_guard import RunLimits
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.plan.memory_advice import PredictedMemoryNeeds
from mega_trainer.run.train_state import TrainState

TaskScorer = Callable[[PipelineExecutor], Mapping[str, float]]  # returns scores of the model for metrics.jsonl


@dataclass(frozen=True)
class TrainingContext:
    """Everything that the training loop needs on this rank.
    It has the state, executor, data, objectives, device, timers and run limits.

    Attributes:
        phases, profiler: timers of the phases of a step, and the profiler that times them.
        memory: copies of the state in host memory, if the run keeps any.
        memory_needs: returns the memory estimate for out-of-memory errors.
        store: of the job, for the hang watchdog.
        predicted_seconds: step time that `mega plan` predicts, for a known machine.
    """

    state: TrainState
    executor: PipelineExecutor
    train_data: BlendedDataset
    valid_data: BlendedDataset | None
    objective: TrainingObjective
    valid_objective: TrainingObjective
    scorer: TaskScorer | None
    device: torch.device
    ranks: RankInfo
    store: Store | None
    memory: MemoryCheckpoint | None
    memory_needs: Callable[[], PredictedMemoryNeeds]
    phases: PhaseTimer
    profiler: StepProfiler
    limits: RunLimits
    predicted_seconds: float | None

    @property
    def loader_factory(self) -> Callable[..., BatchLoader]:
        """Constructor of `BatchLoader`s that read this data rank's share of given samples."""
        dp = self.executor.parallel_groups.dp
        return partial(BatchLoader, seq_length=self.state.config.data.seq_length, dp_rank=dp.rank, dp_size=dp.size)

    def make_micro_batches(self, batch: StepBatch) -> list[MicroBatch]:
        """Return the micro-batches of a step's batch, on the device."""
        return list(split_micro_batches(batch, self.state.config, self.device, self.executor.parallel_groups.cp))

    def make_training_batches(self, batch: StepBatch) -> Sequence[MicroBatch]:
        """Return the micro-batches of a training batch, with targets of the training objective."""
        return self.objective.prepare_micro_batches(batch, self.make_micro_batches(batch))

    def make_validation_batches(self, batch: StepBatch) -> Sequence[MicroBatch]:
        """Return the micro-batches of a validation batch, with targets of the validation objective."""
        return self.valid_objective.prepare_micro_batches(batch, self.make_micro_batches(batch))
