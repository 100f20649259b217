"""Training loop of a run: steps with validation, metrics, integrity checks, checkpoints, and the end of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mega_common.progress_logging import logger
from mega_data.batch_loader import StepBatch
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.job.corruption_check import CorruptionCheck
from mega_trainer.job.error_translation import convert_oom_and_lost_rank_errors
from mega_trainer.job.garbage_collection import GarbageCollectionSchedule
from mega_trainer.job.hang_watchdog import HangWatchdog
from mega_trainer.job.metrics_log import MetricsLogger, MfuCalculator, compute_norms_by_layer
from mega_trainer.job.phase_timer import time_data_waits
from mega_trainer.job.step_replay import collect_provenance
from mega_trainer.job.step_result import StepResult, StepScalars
from mega_trainer.job.training_guard import SampleSkippingDataset, StopSignalHandler
from mega_trainer.optim.gradient_clipping import gradient_clip_factor
from mega_trainer.run.build_components import get_compute_dtype
from mega_trainer.run.step_callbacks import FinishedStep, build_callbacks, run_callbacks
from mega_trainer.run.train_state import CheckpointSaver
from mega_trainer.run.train_step import StepHooks, run_validation, train_step
from mega_trainer.run.training_context import TrainingContext

T = TypeVar("T")


def run_training_loop(context: TrainingContext) -> str | None:
    """Run the remaining training steps of `context`; return the reason for an early stop, else None.

    Raises:
        RollbackRequested: when the run's policy for a bad step is to return to an earlier checkpoint.
    """
    state, ranks, config = context.state, context.ranks, context.state.config
    utilization = MfuCalculator.for_run(config, context.device, get_compute_dtype(config), ranks.world_size)
    is_leader = ranks.rank == 0
    provenance = collect_provenance(ranks.world_size, context.train_data.fingerprint) if is_leader else None
    with (
        convert_oom_and_lost_rank_errors(ranks.rank, lambda: f"step {state.step + 1}", context.memory_needs),
        make_hang_watchdog(context),
        StopSignalHandler() as stop_signal,
        CheckpointSaver(config, provenance) as saver,
        GarbageCollectionSchedule(config.train.gc_every) as garbage,
        MetricsLogger(config, utilization, state.step, state.consumed_samples, writes=is_leader) as metrics,
    ):
        reason = TrainingLoop(context, stop_signal, saver, garbage, metrics).run_steps()
    # all ranks leave together: a launcher ends the others soon after the first one
    all_reduce(torch.zeros(1), context.executor.parallel_groups.world)
    return reason


class TrainingLoop:
    """Loop that runs the training steps of a run, and validates, logs and saves checkpoints between them."""

    def __init__(
        self,
        context: TrainingContext,
        stop_signal: StopSignalHandler,
        saver: CheckpointSaver,
        garbage: GarbageCollectionSchedule,
        metrics: MetricsLogger,
    ) -> None:
        self._context, self._saver, self._garbage, self._metrics = context, saver, garbage, metrics
        self._stop_signal = stop_signal
        self._state, self._config, self._executor = context.state, context.state.config, context.executor
        self._integrity = CorruptionCheck(self._config.fault, context.executor, context.state.optimizer)
        self._lr_curve = self._config.build_lr_curve()
        self._decoupled_lr_curve = self._config.build_decoupled_lr_curve()
        self._callbacks = build_callbacks(self._config)
        self._samples = SampleSkippingDataset(context.train_data, context.state.skipped_ranges)
        self._next_tokens: Sequence[float] = ()  # of the next step, from the scalars of the step before

    def run_steps(self) -> str | None:
        """Run all remaining steps; return the reason for an early stop, else None."""
        state, profiler = self._state, self._context.profiler
        loader = self._context.loader_factory(
            self._samples,
            global_batch=self._config.batch.batch_size_after_samples,
            consumed_samples=state.consumed_samples,
        )
        batches = time_data_waits(
            pair_with_next(islice(loader, self._config.train.steps - state.step)), profiler.time_phase
        )
        initial = self._evaluate_initial_weights()
        for batch, following in profiler.profile_steps(batches, state.step + 1):
            before = state.consumed_samples
            result = self._run_step(batch, following)
            state.advance_step(result)
            self._garbage.collect_after_step(state.step)
            scores = initial | self._layer_norms(result) | self._evaluate() | self._call_callbacks(result)
            initial = {}
            self._log_step(before, result, scores)
            improves = "valid_loss" in scores and state.best.record_validation(state.step, scores["valid_loss"])
            if self._finish_step(result, improves):
                return self._run_stop_reason(result)
        return None

    def _run_step(self, batch: StepBatch, following: StepBatch | None) -> StepResult:
        context, consumed = self._context, self._state.consumed_samples
        known = self._next_tokens and self._next_tokens[0]
        tokens = self._next_tokens if known else context.objective.count_step_terms(batch)
        hooks = LoopStepHooks(
            context,
            self._stop_signal,
            self._saver,
            self._integrity,
            batch,
            context.objective.count_local_terms(following),
        )
        self._integrity.check_recomputed_gradients(self._state.step + 1, self._first_rank_batches)
        result = train_step(
            self._executor,
            self._state.optimizer,
            context.make_training_batches(batch),
            tokens=tokens,
            lr=self._lr_curve(consumed),
            decoupled_lr=self._decoupled_lr(consumed),
            clip=self._config.optimizer.clip_grad,
            loss_scale=self._state.loss_scale,
            hooks=hooks,
        )
        self._next_tokens = result.scalars.next_tokens
        return result

    def _decoupled_lr(self, consumed: int) -> float | None:
        return None if self._decoupled_lr_curve is None else self._decoupled_lr_curve(consumed)

    def _first_rank_batches(self) -> list[MicroBatch]:
        """Return the micro-batches of data rank 0 for the next step."""
        first = self._context.loader_factory(
            self._samples,
            global_batch=self._config.batch.batch_size_after_samples,
            consumed_samples=self._state.consumed_samples,
            dp_rank=0,
            prefetch=0,
        )
        return self._context.make_micro_batches(next(iter(first)))

    def _evaluate_initial_weights(self) -> dict[str, float]:
        """Return the validation loss before the first step of a run, if `train.eval_first` is set."""
        data = self._context.valid_data
        if data is None or self._state.step or not self._config.train.eval_first:
            return {}
        return {"initial_valid_loss": run_validation(self._context, data)["valid_loss"]}

    def _evaluate(self) -> dict[str, float]:
        """Return the validation losses and task scores that are due after this step."""
        context, config, state = self._context, self._config, self._state
        scores: dict[str, float] = {}
        if context.valid_data is not None and config.is_periodic_action_due(state.step, config.train.eval_every):
            scores |= run_validation(context, context.valid_data)
        if context.scorer is not None and config.is_periodic_action_due(state.step, config.eval.every):
            with context.profiler.time_phase("evaluate"):
                state.optimizer.wait_for_params()
                scores |= context.scorer(self._executor)
        return scores

    def _log_step(self, before: int, result: StepResult, scores: Mapping[str, float]) -> None:
        """Log a finished step that began after `before` samples."""
        context, skipped = self._context, self._state.skipped_ranges
        self._metrics.log_step(
            self._state.step,
            self._state.consumed_samples,
            self._lr_curve(before),
            result,
            phases=context.phases.take_phase_durations(),
            epochs=lambda consumed: context.train_data.count_epochs_by_path(skipped.data_position(consumed)),
            decoupled_lr=self._decoupled_lr(before),
            images=round(result.scalars.images, 2) if self._config.model.vision else None,
            mtp_loss=result.mtp_loss,
            pair_loss=result.pair_loss,
            loss_scale=result.loss_scale,
            predicted_seconds=context.predicted_seconds,
            **result.routing,
            **context.objective.metrics(result.objective_metrics, result.tokens),
            **scores,
        )

    def _layer_norms(self, result: StepResult) -> dict[str, float]:
        """Return the layer norms if they are due; a step without an update has none."""
        every, clip = self._config.debug.layer_norms_every, self._config.optimizer.clip_grad
        if not every or self._state.step % every or not result.updated:
            return {}
        clip_factor = gradient_clip_factor(result.grad_norm, clip)
        world = self._executor.parallel_groups.world
        return compute_norms_by_layer(self._state.optimizer, self._config.model, world, clip_factor)

    def _call_callbacks(self, result: StepResult) -> dict[str, float]:
        """Return the numbers of the extensions' callbacks after this step."""
        state = self._state
        finished = FinishedStep(state.step, state.consumed_samples, result, self._executor, state.optimizer)
        return run_callbacks(self._callbacks, finished)

    def _finish_step(self, result: StepResult, improves: bool) -> bool:
        """Check integrity and save if due; return whether this was the last step."""
        state, settings, stopping = self._state, self._config.checkpoint, bool(result.scalars.stop_requested)
        if result.scalars.save_failed:
            self._saver.wait_for_save()
        saves = stopping or state.is_finished or self._config.is_periodic_action_due(state.step, settings.every)
        saves = saves or (improves and settings.best)
        self._integrity.compare_replicas_after_step(state.step, saves=saves)
        self._save_memory_copy()
        if stopping:
            logger.info(
                "stop requested: saving step %d (press Ctrl-C again to end at once, without saving)", state.step
            )
        if saves:
            with self._context.profiler.time_phase("save"):
                self._saver.save_checkpoint(state)
        return stopping or state.is_finished

    def _save_memory_copy(self) -> None:
        """Copy the state to host memory if due."""
        state, config, memory = self._state, self._config, self._context.memory
        if memory is None or state.step % config.checkpoint.memory_every or state.step >= config.train.steps:
            return
        with self._context.profiler.time_phase("save"):
            memory.save_copies(state.step, state.checkpoint_tensors(), state.checkpoint_state())

    def _run_stop_reason(self, result: StepResult) -> str | None:
        """Return the reason for an early stop after this step, or None if the run is complete."""
        if not result.scalars.stop_requested:
            return None
        if result.scalars.terminated:
            return "SIGTERM"
        reason = self._stop_signal.name or self._context.limits.reached_limit(self._state.step)
        return reason or "a signal or limit of another rank"


@dataclass(frozen=True)
class LoopStepHooks(StepHooks):
    """Hooks by which the training loop extends `train_step`.
    They add objective metrics, the scalars of this rank, and the checks before an update.
    """

    context: TrainingContext
    stop_signal: StopSignalHandler
    saver: CheckpointSaver
    integrity: CorruptionCheck
    batch: StepBatch
    next_tokens: Sequence[float]

    @property
    def _step(self) -> int:
        return self.context.state.step + 1

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        """Return this rank's loss sums `sums` [2] with the sums of the objective's metrics appended."""
        return self.context.objective.append_metric_sums(sums)

    def local_scalars(self) -> StepScalars:
        """Return this rank's scalars that are summed over all ranks together with the loss.
        They are stop requests, a failed save, images of this step and token counts of the next.
        """
        stops = self.stop_signal.name or self.context.limits.reached_limit(self._step)
        return StepScalars(
            stop_requested=stops is not None,
            terminated=self.stop_signal.name == "SIGTERM",
            save_failed=self.saver.has_failed,
            images=self._count_images(),
            next_tokens=self.next_tokens,
        )

    def accepts_loss(self, loss: float) -> bool:
        """Check tensors for silent corruption, and return whether the policy for loss spikes allows an update."""
        self.integrity.check_unchanged_before_update(self._step)
        return self.context.state.guard.accepts_loss(loss)

    def _count_images(self) -> float:
        """Return the images of this rank's samples in units of squares or by features, divided among the ranks with the
        same samples.
        """
        groups, vision = self.context.executor.parallel_groups, self.context.state.config.model.vision
        if vision is None:
            return 0.0
        shapes = [pixels.shape for images in self.batch.images if images is not None for pixels in images.pixels]
        squares = vision.count_features_of_images(shapes) / vision.features_per_tile
        return squares * groups.dp.size / groups.world.size


def pair_with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Yield each item with its successor, None for the last item."""
    rest = iter(items)
    item = next(rest, None)
    while item is not None:
        following = next(rest, None)
        yield item, following
        item = following


def make_hang_watchdog(context: TrainingContext) -> AbstractContextManager[object]:
    """Return the watchdog that ends the job if ranks hang, as a context manager; a null context for a single rank."""
    if context.store is None:
        return nullcontext()
    state, ranks = context.state, context.ranks
    return HangWatchdog(
        context.store,
        ranks.rank,
        ranks.world_size,
        lambda: state.step + 1,
        lambda: context.phases.current,
        state.config.timeout_seconds,
        Path(state.config.output),
    )
