"""The steps of a run, one after the other, and what stands beside them: validation, lines, looks, saves, and the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from mega_common.log import logger
from mega_data.dataset import BlendedDataset
from mega_data.loader import Loader, StepBatch
from mega_trainer.batch import MicroBatch, micro_batches
from mega_trainer.build import dtype_of
from mega_trainer.comm import all_reduce
from mega_trainer.evaluation import evaluate
from mega_trainer.job.faults import faults_told
from mega_trainer.job.garbage import Garbage
from mega_trainer.job.guard import StopSignal
from mega_trainer.job.integrity import Integrity
from mega_trainer.job.layer_norms import layer_norms
from mega_trainer.job.limits import Limits
from mega_trainer.job.memory import Memory
from mega_trainer.job.metrics import Metrics, Speed
from mega_trainer.job.phases import Phases, waited
from mega_trainer.job.profile import Profiler
from mega_trainer.job.repeat import provenance
from mega_trainer.job.rollback import Remaining
from mega_trainer.job.watch import Watch
from mega_trainer.objectives.base import Objective
from mega_trainer.optim.clip import clip_factor
from mega_trainer.pipeline.run import Executor
from mega_trainer.plan.advice import Needs
from mega_trainer.ranks import Ranks
from mega_trainer.state import Saver, TrainState
from mega_trainer.step import StepResult, train_step

T = TypeVar("T")

Scorer = Callable[[Executor], Mapping[str, float]]  # numbers that say how good a model is, for metrics.jsonl


@dataclass(frozen=True)
class Job:
    """What the steps of a run are made with, on this rank."""

    state: TrainState
    executor: Executor
    train_data: BlendedDataset
    valid_data: BlendedDataset | None
    device: torch.device
    phases: Phases
    profiler: Profiler
    limits: Limits
    ranks: Ranks
    needs: Callable[[], Needs]
    store: Store | None
    memory: Memory | None
    scorer: Scorer | None
    predicted: float | None
    objective: Objective
    of_valid: Objective

    @property
    def loader(self) -> Callable[..., Loader]:
        """Makes one of this data rank's share of some samples."""
        dp = self.executor.groups.dp
        return partial(Loader, seq_length=self.state.config.data.seq_length, dp_rank=dp.rank, dp_size=dp.size)

    def micro(self, batch: StepBatch) -> list[MicroBatch]:
        """What the model is given of a batch, on the device."""
        return list(micro_batches(batch, self.state.config, self.device, self.executor.groups.cp))

    def measured(self, batch: StepBatch) -> Sequence[MicroBatch]:
        """The same of a validation's, with what the objective has to do with it."""
        return self.of_valid.prepared(batch, self.micro(batch))


def steps(job: Job) -> str | None:
    """The steps that are left, from where the state is; returns why they ended before the last, if they did.

    Raises:
        RollBack: when the run's policy for a bad step is to go back.
    """
    state, ranks, config = job.state, job.ranks, job.state.config
    speed = Speed.of(config, job.device, dtype_of(config), ranks.world_size)
    made_with = provenance(ranks.world_size, job.train_data.fingerprint) if not ranks.rank else None
    with (
        faults_told(ranks.rank, lambda: f"step {state.step + 1}", job.needs),
        watching(job),
        StopSignal() as stop,
        Saver(config, made_with) as saver,
        Garbage(config.train.gc_every) as garbage,
        Metrics(config, speed, state.step, state.consumed_samples, writes=not ranks.rank) as metrics,
    ):
        reason = Loop(job, stop, saver, garbage, metrics).run()
    world = job.executor.groups.world
    all_reduce(torch.zeros(1), world)  # leave together: a launcher ends the others soon after the first one
    return reason


class Loop:
    """One step after the other, with what is asked and told between them."""

    def __init__(self, job: Job, stop: StopSignal, saver: Saver, garbage: Garbage, metrics: Metrics) -> None:
        self._job, self._stop, self._saver, self._garbage, self._metrics = job, stop, saver, garbage, metrics
        self._state, self._config, self._executor = job.state, job.state.config, job.executor
        self._integrity = Integrity(self._config.fault, job.executor, job.state.optimizer)
        self._lr, self._own_lr = self._config.lr_curve(), self._config.decoupled_lr_curve()
        self._samples = Remaining(job.train_data, job.state.left_out)
        self._tokens: list[float] = []  # of the next step, as the numbers of the one before tell

    def run(self) -> str | None:
        """Up to the last one; returns why it was none, if it was not."""
        state, phase = self._state, self._job.profiler.phase
        loader = self._job.loader(
            self._samples, global_batch=self._config.batch.at, consumed_samples=state.consumed_samples
        )
        batches = islice(loader, self._config.train.steps - state.step)
        for batch, following in self._job.profiler.steps(waited(with_next(batches), phase), state.step + 1):
            before = state.consumed_samples
            result = self._step(batch, following)
            state.advance(result)
            self._garbage.after(state.step)
            improves = self._tell(before, result)
            if self._end_of_step(result, improves):
                return self._reason(result)
        return None

    def _step(self, batch: StepBatch, following: StepBatch | None) -> StepResult:
        state, objective = self._state, self._job.objective
        tokens = self._tokens if self._tokens and self._tokens[0] else objective.counts(batch)
        coming = objective.own_counts(following)
        self._integrity.before(state.step + 1, self._batches_of_first)

        def riders() -> list[float]:  # what all ranks are told beside the loss
            asked, terminated = self._asked(state.step + 1), self._stop.name == "SIGTERM"
            return [asked is not None, terminated, self._saver.failed, self._images(batch), *coming]

        result = train_step(
            self._executor, state.optimizer, objective.prepared(batch, self._job.micro(batch)), tokens=tokens,
            lr=self._lr(state.consumed_samples), decoupled_lr=self._decoupled_lr(state.consumed_samples),
            clip=self._config.optimizer.clip_grad, loss_scale=state.loss_scale, riders=riders, accepts=self._accepts,
            measured=objective.measured,
        )  # fmt: skip
        _, _, _, _, *self._tokens = result.riders
        return result

    def _images(self, batch: StepBatch) -> float:
        """How many this rank's samples have, shared with the ranks that have the same samples: squares, or by their features."""
        groups, vision = self._executor.groups, self._config.model.vision
        shapes = [each.shape for one in batch.images if one is not None for each in one.pixels]
        squares = vision.features_of_all(shapes) / vision.rows if vision else 0
        return squares * groups.dp.size / groups.world.size

    def _decoupled_lr(self, consumed: int) -> float | None:
        return None if self._own_lr is None else self._own_lr(consumed)

    def _accepts(self, loss: float) -> bool:
        """Just before an update."""
        self._integrity.unchanged(self._state.step + 1)
        return self._state.guard.accepts(loss)

    def _batches_of_first(self) -> list[MicroBatch]:
        """Of the next step, those of the first data rank."""
        first = self._job.loader(
            self._samples, global_batch=self._config.batch.at, consumed_samples=self._state.consumed_samples,
            dp_rank=0, prefetch=0,
        )  # fmt: skip
        return self._job.micro(next(iter(first)))

    def _asked(self, step: int) -> str | None:
        """Why this rank is to end after a step."""
        return self._stop.name or self._job.limits.reached(step)

    def _tell(self, before: int, result: StepResult) -> bool:
        """The numbers of the step that began after so many samples; returns whether a validation is the best so far."""
        job, state, config = self._job, self._state, self._config
        improves, scores = False, {**job.objective.told(result.figures, result.tokens), **self._layer_norms(result)}
        if job.valid_data is not None and config.due(state.step, config.train.eval_every):
            scores |= validate(job, job.valid_data)
            improves = state.best.improves(state.step, scores["valid_loss"])
        if job.scorer is not None and config.due(state.step, config.eval.every):
            with job.profiler.phase("evaluate"):
                state.optimizer.settle()
                scores |= job.scorer(self._executor)
        self._metrics.step(
            state.step, state.consumed_samples, self._lr(before), result, decoupled_lr=self._decoupled_lr(before),
            images=round(result.riders[3], 2) if config.model.vision else None,
            mtp_loss=result.mtp_loss, pair_loss=result.pair_loss, loss_scale=result.loss_scale, predicted_seconds=job.predicted, **result.routing, **scores,
            epochs=lambda consumed: job.train_data.epochs(state.left_out.position(consumed)), phases=job.phases.take(),
        )  # fmt: skip
        return improves

    def _layer_norms(self, result: StepResult) -> dict[str, float]:
        """Where they are asked for; of a step without an update there are none."""
        every, clip = self._config.debug.layer_norms_every, self._config.optimizer.clip_grad
        if not every or self._state.step % every or not result.updated:
            return {}
        clipped = clip_factor(result.grad_norm, clip)
        return layer_norms(self._state.optimizer, self._config.model, self._executor.groups.world, clipped)

    def _end_of_step(self, result: StepResult, improves: bool) -> bool:
        """Look at what ranks hold, and save, where that is due; returns whether it was the last step."""
        stopping, _, failed, *_ = result.riders
        state, settings = self._state, self._config.checkpoint
        if failed:
            self._saver.wait()
        saves = bool(stopping) or state.finished or self._config.due(state.step, settings.every)
        saves = saves or (improves and settings.best)
        self._integrity.after(state.step, saves=saves)
        self._keep_copy()
        if stopping:
            logger.info("asked to end: saving step %d (Ctrl-C once more ends at once, without)", state.step)
        if saves:
            with self._job.profiler.phase("save"):
                self._saver.save(state)
        return bool(stopping) or state.finished

    def _keep_copy(self) -> None:
        """Save the state in host memory, where that is due."""
        state, settings, memory = self._state, self._config, self._job.memory
        if memory is None or state.step % settings.checkpoint.memory_every or state.step >= settings.train.steps:
            return
        with self._job.profiler.phase("save"):
            memory.save(state.step, state.tensors(), state.numbers())

    def _reason(self, result: StepResult) -> str | None:
        """Why that step is the last one; None where the run is done."""
        stopping, terminated, *_ = result.riders
        if not stopping:
            return None
        return "SIGTERM" if terminated else self._asked(self._state.step) or "a signal or limit of another rank"


def with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Each item with the one after it, None after the last."""
    rest = iter(items)
    item = next(rest, None)
    while item is not None:
        following = next(rest, None)
        yield item, following
        item = following


@torch.no_grad()
def validate(job: Job, data: BlendedDataset) -> dict[str, float]:
    """Mean loss, and what else the objective tells, over the first `eval_steps` global batches of the validation set, the same
    ones each time: by their names in metrics.jsonl."""
    config, executor = job.state.config, job.executor
    batches = islice(job.loader(data, global_batch=config.batch.global_), config.train.eval_steps)
    with executor.evaluating(), executor.phase("evaluate"):
        loss, *figures = evaluate(executor, map(job.measured, batches), job.of_valid.totals)
    return {"valid_loss": loss, **{f"valid_{name}": value for name, value in job.of_valid.told(figures).items()}}


def watching(job: Job) -> AbstractContextManager[object]:
    """The watch over the ranks, where there are several."""
    if job.store is None:
        return nullcontext()
    state, ranks = job.state, job.ranks
    seconds, output = state.config.timeout_seconds, Path(state.config.output)
    return Watch(
        job.store, ranks.rank, ranks.world_size, lambda: state.step + 1, lambda: job.phases.current, seconds, output
    )
