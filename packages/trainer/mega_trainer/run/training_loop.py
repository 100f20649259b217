"""Training loop of a run: steps with validation, metrics, integrity checks, checkpoints, and the end of the run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from mega_common.progress_logging import logger
from mega_data.batch_loader import BatchLoader, StepBatch
from mega_data.blended_dataset import BlendedDataset
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.job.corruption_check import CorruptionCheck
from mega_trainer.job.error_translation import translate_errors
from mega_trainer.job.hang_watchdog import HangWatchdog
from mega_trainer.job.layer_norms import compute_layer_norms
from mega_trainer.job.memory_checkpoint import MemoryCheckpoint
from mega_trainer.job.metrics_log import MetricsLogger, UtilizationModel
from mega_trainer.job.phase_timer import PhaseTimer, time_data_waits
from mega_trainer.job.profiler import StepProfiler
from mega_trainer.job.rollback import UnskippedSamples
from mega_trainer.job.step_replay import collect_provenance
from mega_trainer.job.stop_conditions import RunLimits
from mega_trainer.job.training_guard import StopSignalHandler
from mega_trainer.launch.local_ranks import RankInfo
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.optim.gradient_clipping import gradient_clip_factor
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.plan.memory_advice import MemoryNeeds
from mega_trainer.run.build_components import compute_dtype
from mega_trainer.run.train_state import CheckpointSaver, TrainState
from mega_trainer.run.train_step import StepResult, train_step
from mega_trainer.run.validation import evaluate_losses


class GarbageCollection:
    """Restricts Python's garbage collection in a `with` block to the end of each `every`-th step; 0 leaves it to
    Python.

    What is there at the start is taken to stay, and not looked at again.
    """

    def __init__(self, every: int) -> None:
        self._every, self._was_on = every, gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._every:
            gc.unfreeze()
            if self._was_on:
                gc.enable()

    def collect_after_step(self, step: int) -> None:
        """Collect garbage if it is due after this step."""
        if self._every and step % self._every == 0:
            gc.collect()


T = TypeVar("T")

TaskScorer = Callable[
    [PipelineExecutor], Mapping[str, float]
]  # numbers that say how good a model is, for metrics.jsonl


@dataclass(frozen=True)
class TrainingContext:
    """Everything the training loop needs on this rank."""

    state: TrainState
    executor: PipelineExecutor
    train_data: BlendedDataset
    valid_data: BlendedDataset | None
    device: torch.device
    phases: PhaseTimer
    profiler: StepProfiler
    limits: RunLimits
    ranks: RankInfo
    memory_needs: Callable[[], MemoryNeeds]
    store: Store | None
    memory: MemoryCheckpoint | None
    scorer: TaskScorer | None
    predicted_seconds: float | None
    objective: TrainingObjective
    valid_objective: TrainingObjective

    @property
    def loader_factory(self) -> Callable[..., BatchLoader]:
        """Factory of loaders for this data rank's share of some samples."""
        dp = self.executor.parallel_groups.dp
        return partial(BatchLoader, seq_length=self.state.config.data.seq_length, dp_rank=dp.rank, dp_size=dp.size)

    def make_micro_batches(self, batch: StepBatch) -> list[MicroBatch]:
        """Return the micro-batches of a batch, on the device."""
        return list(split_micro_batches(batch, self.state.config, self.device, self.executor.parallel_groups.cp))

    def make_validation_batches(self, batch: StepBatch) -> Sequence[MicroBatch]:
        """Return the micro-batches of a validation batch, with objective-specific targets."""
        return self.valid_objective.prepare_micro_batches(batch, self.make_micro_batches(batch))


def run_training_loop(job: TrainingContext) -> str | None:
    """Run the remaining steps; return the reason for an early stop, else None.

    Raises:
        RollBack: when the run's policy for a bad step is to go back.
    """
    state, ranks, config = job.state, job.ranks, job.state.config
    speed = UtilizationModel.for_run(config, job.device, compute_dtype(config), ranks.world_size)
    made_with = collect_provenance(ranks.world_size, job.train_data.fingerprint) if not ranks.rank else None
    with (
        translate_errors(ranks.rank, lambda: f"step {state.step + 1}", job.memory_needs),
        hang_watchdog(job),
        StopSignalHandler() as stop,
        CheckpointSaver(config, made_with) as saver,
        GarbageCollection(config.train.gc_every) as garbage,
        MetricsLogger(config, speed, state.step, state.consumed_samples, writes=not ranks.rank) as metrics,
    ):
        reason = TrainingLoop(job, stop, saver, garbage, metrics).run_steps()
    world = job.executor.parallel_groups.world
    all_reduce(torch.zeros(1), world)  # leave together: a launcher ends the others soon after the first one
    return reason


class TrainingLoop:
    """Runs training steps; validates, logs and checkpoints between them."""

    def __init__(
        self,
        job: TrainingContext,
        stop: StopSignalHandler,
        saver: CheckpointSaver,
        garbage: GarbageCollection,
        metrics: MetricsLogger,
    ) -> None:
        self._job, self._stop, self._saver, self._garbage, self._metrics = job, stop, saver, garbage, metrics
        self._state, self._config, self._executor = job.state, job.state.config, job.executor
        self._integrity = CorruptionCheck(self._config.fault, job.executor, job.state.optimizer)
        self._lr, self._own_lr = self._config.build_lr_curve(), self._config.build_decoupled_lr_curve()
        self._samples = UnskippedSamples(job.train_data, job.state.skipped_ranges)
        self._tokens: list[float] = []  # of the next step, as the numbers of the one before tell

    def run_steps(self) -> str | None:
        """Run all steps; return the reason for an early stop, else None."""
        state, phase = self._state, self._job.profiler.time_phase
        loader = self._job.loader_factory(
            self._samples, global_batch=self._config.batch.batch_size_at, consumed_samples=state.consumed_samples
        )
        batches = islice(loader, self._config.train.steps - state.step)
        for batch, following in self._job.profiler.profile_steps(
            time_data_waits(pair_with_next(batches), phase), state.step + 1
        ):
            before = state.consumed_samples
            result = self._run_step(batch, following)
            state.advance_step(result)
            self._garbage.collect_after_step(state.step)
            improves = self._log_step(before, result)
            if self._finish_step(result, improves):
                return self._run_stop_reason(result)
        return None

    def _run_step(self, batch: StepBatch, following: StepBatch | None) -> StepResult:
        state, objective = self._state, self._job.objective
        tokens = self._tokens if self._tokens and self._tokens[0] else objective.count_step_terms(batch)
        coming = objective.count_local_terms(following)
        self._integrity.check_before_step(state.step + 1, self._first_rank_batches)

        def extra_scalars() -> list[float]:  # what all ranks are told beside the loss
            asked, terminated = self._stop_reason(state.step + 1), self._stop.name == "SIGTERM"
            return [asked is not None, terminated, self._saver.has_failed, self._count_images(batch), *coming]

        result = train_step(
            self._executor, state.optimizer, objective.prepare_micro_batches(batch, self._job.make_micro_batches(batch)), tokens=tokens,
            lr=self._lr(state.consumed_samples), decoupled_lr=self._decoupled_lr(state.consumed_samples),
            clip=self._config.optimizer.clip_grad, loss_scale=state.loss_scale, extra_scalars=extra_scalars, accepts_loss=self._accepts_loss,
            measure_losses=objective.measure_losses,
        )  # fmt: skip
        _, _, _, _, *self._tokens = result.extra_scalars
        return result

    def _count_images(self, batch: StepBatch) -> float:
        """Return the images of this rank's samples in units of squares or by features, divided among the ranks with the
        same samples.
        """
        groups, vision = self._executor.parallel_groups, self._config.model.vision
        shapes = [each.shape for one in batch.images if one is not None for each in one.pixels]
        squares = vision.count_total_features(shapes) / vision.features_per_square if vision else 0
        return squares * groups.dp.size / groups.world.size

    def _decoupled_lr(self, consumed: int) -> float | None:
        return None if self._own_lr is None else self._own_lr(consumed)

    def _accepts_loss(self, loss: float) -> bool:
        """Check integrity just before an update, and return whether the guard accepts the loss."""
        self._integrity.check_before_update(self._state.step + 1)
        return self._state.guard.accepts_loss(loss)

    def _first_rank_batches(self) -> list[MicroBatch]:
        """Return the micro-batches of data rank 0 for the next step."""
        first = self._job.loader_factory(
            self._samples, global_batch=self._config.batch.batch_size_at, consumed_samples=self._state.consumed_samples,
            dp_rank=0, prefetch=0,
        )  # fmt: skip
        return self._job.make_micro_batches(next(iter(first)))

    def _stop_reason(self, step: int) -> str | None:
        """Return the reason for this rank to end after a step, or None."""
        return self._stop.name or self._job.limits.reached_limit(step)

    def _log_step(self, before: int, result: StepResult) -> bool:
        """Log a finished step that began after `before` samples; return whether its validation loss is the lowest so
        far.
        """
        job, state, config = self._job, self._state, self._config
        improves, scores = (
            False,
            {**job.objective.metrics(result.objective_metrics, result.tokens), **self._layer_norms(result)},
        )
        if job.valid_data is not None and config.is_due(state.step, config.train.eval_every):
            scores |= run_validation(job, job.valid_data)
            improves = state.best.record_validation(state.step, scores["valid_loss"])
        if job.scorer is not None and config.is_due(state.step, config.eval.every):
            with job.profiler.time_phase("evaluate"):
                state.optimizer.wait_for_params()
                scores |= job.scorer(self._executor)
        self._metrics.log_step(
            state.step, state.consumed_samples, self._lr(before), result, decoupled_lr=self._decoupled_lr(before),
            images=round(result.extra_scalars[3], 2) if config.model.vision else None,
            mtp_loss=result.mtp_loss, pair_loss=result.pair_loss, loss_scale=result.loss_scale, predicted_seconds=job.predicted_seconds, **result.routing, **scores,
            epochs=lambda consumed: job.train_data.count_epochs_by_path(state.skipped_ranges.data_position(consumed)), phases=job.phases.take_durations(),
        )  # fmt: skip
        return improves

    def _layer_norms(self, result: StepResult) -> dict[str, float]:
        """Return the layer norms if they are due; a step without an update has none."""
        every, clip = self._config.debug.layer_norms_every, self._config.optimizer.clip_grad
        if not every or self._state.step % every or not result.updated:
            return {}
        clipped = gradient_clip_factor(result.grad_norm, clip)
        return compute_layer_norms(
            self._state.optimizer, self._config.model, self._executor.parallel_groups.world, clipped
        )

    def _finish_step(self, result: StepResult, improves: bool) -> bool:
        """Check integrity and save if due; return whether this was the last step."""
        stopping, _, failed, *_ = result.extra_scalars
        state, settings = self._state, self._config.checkpoint
        if failed:
            self._saver.wait_for_save()
        saves = bool(stopping) or state.is_finished or self._config.is_due(state.step, settings.every)
        saves = saves or (improves and settings.best)
        self._integrity.check_after_step(state.step, saves=saves)
        self._save_memory_copy()
        if stopping:
            logger.info("asked to end: saving step %d (Ctrl-C once more ends at once, without)", state.step)
        if saves:
            with self._job.profiler.time_phase("save"):
                self._saver.save_checkpoint(state)
        return bool(stopping) or state.is_finished

    def _save_memory_copy(self) -> None:
        """Copy the state to host memory if due."""
        state, settings, memory = self._state, self._config, self._job.memory
        if memory is None or state.step % settings.checkpoint.memory_every or state.step >= settings.train.steps:
            return
        with self._job.profiler.time_phase("save"):
            memory.save_copies(state.step, state.checkpoint_tensors(), state.checkpoint_state())

    def _run_stop_reason(self, result: StepResult) -> str | None:
        """Return the reason for an early stop after this step, or None if the run is complete."""
        stopping, terminated, *_ = result.extra_scalars
        if not stopping:
            return None
        return "SIGTERM" if terminated else self._stop_reason(self._state.step) or "a signal or limit of another rank"


def pair_with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Yield each item with its successor, None after the last."""
    rest = iter(items)
    item = next(rest, None)
    while item is not None:
        following = next(rest, None)
        yield item, following
        item = following


@torch.no_grad()
def run_validation(job: TrainingContext, data: BlendedDataset) -> dict[str, float]:
    """Return the mean loss and the objective's further metrics over the first `eval_steps` global batches of the
    validation set, equal at every call, under their metrics.jsonl names.
    """
    config, executor = job.state.config, job.executor
    batches = islice(job.loader_factory(data, global_batch=config.batch.global_), config.train.eval_steps)
    with executor.evaluation_mode(), executor.phase("evaluate"):
        loss, *figures = evaluate_losses(
            executor, map(job.make_validation_batches, batches), job.valid_objective.validation_totals
        )
    return {
        "valid_loss": loss,
        **{f"valid_{name}": value for name, value in job.valid_objective.metrics(figures).items()},
    }


def hang_watchdog(job: TrainingContext) -> AbstractContextManager[object]:
    """Return the watchdog over the ranks, or a null context for a single rank."""
    if job.store is None:
        return nullcontext()
    state, ranks = job.state, job.ranks
    seconds, output = state.config.timeout_seconds, Path(state.config.output)
    return HangWatchdog(
        job.store, ranks.rank, ranks.world_size, lambda: state.step + 1, lambda: job.phases.current, seconds, output
    )
