"""Callbacks of extensions, which are called on all ranks after each training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mega_trainer.config.run_config import RunConfig
from mega_trainer.job.step_result import StepResult
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.pipeline.executor import PipelineExecutor


@dataclass(frozen=True)
class FinishedStep:
    """Training step that has just ended, as a callback gets it.

    Attributes:
        step: number of the step, from 1.
        consumed_samples: samples that the run has consumed.
        result: loss, gradient norm and other numbers of the step, equal on all ranks.
        executor: this rank's part of the model, `executor.stages`, and its process groups, `executor.parallel_groups`.
        optimizer: main weights and gradients, such as `gradients_by_name()`.
    """

    step: int
    consumed_samples: int
    result: StepResult
    executor: PipelineExecutor
    optimizer: ShardedOptimizer


StepCallback = Callable[[FinishedStep], Mapping[str, float]]


def build_callbacks(config: RunConfig) -> dict[str, StepCallback]:
    """Return the callbacks of the run by name, in the order of run.yaml."""
    entries = config.registry.entries("callbacks")
    return {
        name: entries[name].build(entries[name].options.parse(options)) for name, options in config.callbacks.items()
    }


@torch.no_grad()
def run_callbacks(callbacks: Mapping[str, StepCallback], finished: FinishedStep) -> dict[str, float]:
    """Call all callbacks after a step and return their numbers as `CALLBACK/NAME` for metrics.jsonl."""
    return {
        f"{callback}/{name}": float(value)
        for callback, after_step in callbacks.items()
        for name, value in after_step(finished).items()
    }
