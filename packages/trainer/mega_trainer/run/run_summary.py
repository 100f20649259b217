"""Log lines about a run as a whole: its size before the first step, the predicted step time, and its end."""

from __future__ import annotations

import math

import torch

from mega_ckpt.canonical_tensors import canonical_tensors, count_model_parameters
from mega_ckpt.lora_tensors import adapted_modules, adapter_tensor_shapes
from mega_ckpt.store import get_checkpoint_step_folder
from mega_common.errors import TrainingInterrupted, TrainingTerminated
from mega_common.progress_logging import format_with_decimal_unit, logger
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.flops import count_parameters_by_layer
from mega_trainer.plan.layout_search import make_planned_run
from mega_trainer.plan.machine import find_machine_name, load_machine
from mega_trainer.run.train_state import TrainState


def log_run_size(state: TrainState, world_size: int) -> None:
    """Log warnings about the configuration, then the size of the model and of the run.
    The size is the number of parameters, the remaining steps of the run and the tokens of a step.
    """
    config = state.config
    for warning in config.find_warnings():
        logger.warning(warning)
    logger.info(
        "%s parameters%s, %s on %d rank(s), steps %d to %d of %s tokens",
        format_with_decimal_unit(
            count_model_parameters(config.model)
            if config.model.transformers
            else count_parameters_by_layer(config.model).total
        ),
        format_trained_share(config),
        config.precision,
        world_size,
        state.step + 1,
        config.train.steps,
        format_with_decimal_unit(
            config.batch.batch_size_after_samples(state.consumed_samples) * config.tokens_per_sample
        ),
    )
    if growing := list(config.batch.iterate_rampup_sizes(state.consumed_samples)):
        (first, _), steps = growing[0], sum(steps for _, steps in growing)
        logger.info("  the batch grows from %d to %d samples in %d steps", first, config.batch.global_, steps)


def format_trained_share(config: RunConfig) -> str:
    """Return a text with the number of trained parameters, for a log line; empty if all are trained."""
    modules = {} if config.lora is None else adapted_modules(config.model, config.lora)
    shapes = canonical_tensors(config.model) | adapter_tensor_shapes(modules)
    trained = [math.prod(shape) for name, shape in shapes.items() if config.is_trainable(name)]
    return "" if len(trained) == len(shapes) else f" of which {format_with_decimal_unit(sum(trained))} are trained"


def predict_step_seconds(config: RunConfig, world_size: int) -> float | None:
    """Log and return the predicted seconds of a step, or return None for an unknown machine or a growing batch."""
    name = detect_machine(config)
    if name is None or config.batch.rampup is not None or config.batch.stages:
        return None
    step = make_planned_run(config, world_size, load_machine(name)).predict_step_time()
    largest = sorted(step.parts, key=lambda part: -step.parts[part])[:3]
    shares = ", ".join(f"{part} {100 * step.parts[part] / step.seconds:.0f} %" for part in largest)
    logger.info("predicted on %s: %.4g s a step (%s)", name, step.seconds, shares)
    return step.seconds


def detect_machine(config: RunConfig) -> str | None:
    """Return the name of the machine that a run configures, or that its GPU identifies, or None.
    It is None if neither is known or no time is predicted for the model.
    """
    if config.model.has_encoder or config.model.transformers is not None:
        return None
    if config.machine is not None or config.device == "cpu" or not torch.cuda.is_available():
        return config.machine
    return find_machine_name(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory)


def log_run_end(state: TrainState, reason: str | None) -> None:
    """Log the end of a run; raise `TrainingInterrupted` if it saved its state and was stopped early for `reason`.

    Raises:
        TrainingInterrupted: when the run was stopped for `reason` before its last step; TrainingTerminated by SIGTERM.
    """
    steps, root = state.config.train.steps, state.config.checkpoint_root
    if not state.config.checkpoint.save:
        logger.info("ended after step %d of %d; no checkpoint is saved (checkpoint.save = false)", state.step, steps)
        return
    if reason is not None and state.step < steps:
        raise (TrainingTerminated if reason == "SIGTERM" else TrainingInterrupted)(
            f"{reason}: saved step {state.step} of {steps} in {root}", hint="run the same command again to resume"
        )
    if state.step < steps:
        logger.info("no lower validation loss in %d validations (train.early_stop)", state.best.since)
    if state.best.loss is not None and state.config.checkpoint.best:
        logger.info(
            "the lowest validation loss is %.4f, of %s",
            state.best.loss,
            get_checkpoint_step_folder(root, state.best.step),
        )
    logger.info("done: %d steps; the model is in %s", state.step, root)
