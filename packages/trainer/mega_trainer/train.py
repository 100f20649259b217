"""A training run, from configuration to last checkpoint. `run` reads in the order things happen."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from mega_ckpt.adapter import base_of, check_start
from mega_ckpt.folders import latest
from mega_ckpt.lora import adapted, adapter_tensors
from mega_ckpt.names import SCORE, tensors_of
from mega_ckpt.source import load_adapter, load_magnitudes, open_adapted, open_source, tell_unread
from mega_ckpt.store import Place, step_folder
from mega_common.errors import ConfigError, Interrupted, Terminated
from mega_common.log import human, logger
from mega_common.lora import is_adapter
from mega_data.tokenizer import Tokenizer
from mega_trainer.build import (
    build_optimizer,
    build_schedule,
    build_stages,
    choose_kernels,
    connect,
    load_data,
    loss_scale_of,
    make_builder,
    share_stages,
)
from mega_trainer.comm import Group
from mega_trainer.config import RunConfig
from mega_trainer.device import deterministic, machine_here, pick_device
from mega_trainer.job.environment import told
from mega_trainer.job.faults import faults_told
from mega_trainer.job.guard import Guard
from mega_trainer.job.job_log import errors_recorded
from mega_trainer.job.limits import Limits
from mega_trainer.job.memory import Copy, Memory, keeps_copies
from mega_trainer.job.phases import Phases
from mega_trainer.job.profile import Profiler
from mega_trainer.job.rollback import RollBack
from mega_trainer.job.run_folder import claimed, make_run_folder, record_start
from mega_trainer.kernels.leaves import Leaves, compiles
from mega_trainer.loop import Job, Scorer, steps
from mega_trainer.mesh import Groups, warm_up
from mega_trainer.model.init import init_weights
from mega_trainer.objectives.build import make_objectives
from mega_trainer.parallel.shared import SharedStage
from mega_trainer.pipeline.run import Executor
from mega_trainer.plan.advice import Needs
from mega_trainer.plan.flops import count_parameters
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.search import planned
from mega_trainer.ranks import Ranks
from mega_trainer.state import (
    TrainState,
    continued,
    load_stages,
    newer_copy,
    starting_point,
    state_of,
    weights_of,
    with_epochs,
)
from mega_trainer.tokens import run_tokenizer, with_vocabulary


def run(config: RunConfig, ranks: Ranks, store: Store | None = None, scorer: Scorer | None = None) -> TrainState:
    """Train as `config` says; returns the final state. With the job's `store`, a rank that hangs is named.

    The `scorer` is asked by all ranks together, every `eval.every` steps.

    Raises:
        Interrupted: when a signal or a limit asked to end before the last step, and the step done is saved.
        MegaError: ConfigError, DataError or CheckpointError for what the user can mend, TrainingError when the numbers
            go wrong.
    """
    groups = connect(config, ranks)
    needs = partial(Needs.of, config, ranks.world_size, groups.pp.rank)
    with (
        errors_recorded(Path(config.output), ranks.rank),
        claimed(config, ranks, groups.world),
        faults_told(ranks.rank, lambda: "before the first step", needs),
        deterministic(config.deterministic),
    ):
        return train(config, ranks, groups, needs, store, scorer)


def assemble(
    config: RunConfig,
    groups: Groups,
    device: torch.device,
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> tuple[TrainState, Executor]:
    """The run's model with its gradients and optimizer, not yet initialised; and what takes a batch through the model."""
    schedule = build_schedule(config, groups)
    choice, leaves = choose_kernels(config, device), Leaves(compiled=compiles(config.compile, device))
    logger.info("%s", choice)
    builder = make_builder(config, groups, device, choice, leaves)
    stages = build_stages(config, builder, schedule)
    shared = share_stages(config, stages)
    optimizer = build_optimizer(config, shared, groups, leaves)
    state = TrainState(config, stages, optimizer, Guard(config.train), loss_scale=loss_scale_of(config))
    executor = Executor(schedule, stages, groups.pp, config.train.seed, partial(around_backward, shared), phase)
    return state, executor


def train(
    config: RunConfig,
    ranks: Ranks,
    groups: Groups,
    needs: Callable[[], Needs],
    store: Store | None,
    scorer: Scorer | None = None,
) -> TrainState:
    """The run itself, in folders that are its own; `needs` is what a message about full memory tells."""
    checkpoint = starting_point(config)
    memory = None
    if keeps_copies(config, os.environ):
        memory = Memory(config.output, groups.world, os.environ, os.getppid())
    start = newer_copy(config, checkpoint, memory) or checkpoint
    config = continued(config, state_of(start))
    limits, device = Limits(config.train), ready_device(config, ranks, groups)
    phases = Phases(device)
    profiler = Profiler(config, device, ranks.rank, phases)
    tokenizer = run_tokenizer(config.data, config.model.vocab_size)
    train_data, valid_data = load_data(config, tokenizer)
    config = config if config.train.epochs is None else with_epochs(config, train_data.samples_per_epoch)
    state, executor = assemble(config, groups, device, profiler.phase)
    state.read = train_data.read
    begun = time.monotonic()
    if not begin(state, start, groups.world, tokenizer):
        return state
    record_start(config, ranks, state.step, start, time.monotonic() - begun)
    objective, of_valid = make_objectives(config, executor, device, state.consumed_samples, train_data, valid_data)
    if config.objective.ask_only:
        logger.info("all samples are told, and nothing is trained, as objective.ask_only = true asks")
        return state
    job = Job(
        state, executor, train_data, valid_data, device, phases, profiler, limits, ranks, needs, store, memory, scorer,
        predicted_seconds(config, ranks) if ranks.rank == 0 else None, objective, of_valid,
    )  # fmt: skip
    while True:
        try:
            reason = steps(job)
            break
        except RollBack as back:
            if memory is not None:
                memory.clear()
            state.roll_back(back, groups.world)
    if memory is not None:
        memory.close()
    conclude(state, reason)
    return state


def ready_device(config: RunConfig, ranks: Ranks, groups: Groups) -> torch.device:
    """This rank's device, its communicators made before anything fills its memory."""
    device = pick_device(config.device, ranks.local_rank)
    if device.type == "cuda":
        logger.info("environment: %s", told(config, os.environ))
        warm_up(groups, device)
    return device


def predicted_seconds(config: RunConfig, ranks: Ranks) -> float | None:
    """What `mega plan` says of a step, on a machine that is known; nothing is predicted for others, nor for batches that grow."""
    name = machine_here(config)
    if name is None or config.batch.rampup is not None or config.batch.stages:
        return None
    step = planned(config, ranks.world_size, load_machine(name)).time()
    parts = sorted(step.parts, key=lambda part: -step.parts[part])[:3]
    told = ", ".join(f"{part} {100 * step.parts[part] / step.seconds:.0f} %" for part in parts)
    logger.info("predicted on %s: %.4g s a step (%s)", name, step.seconds, told)
    return step.seconds


def conclude(state: TrainState, reason: str | None) -> None:
    """The last word of a run, that has saved.

    Raises:
        Interrupted: when it was asked to end, by `reason`, before its last step; Terminated by SIGTERM.
    """
    steps, where = state.config.train.steps, state.config.checkpoints
    if not state.config.checkpoint.save:
        logger.info("ended after step %d of %d; nothing is saved, as checkpoint.save = false asks", state.step, steps)
        return
    if reason is not None and state.step < steps:
        raise (Terminated if reason == "SIGTERM" else Interrupted)(
            f"{reason}: saved step {state.step} of {steps} in {where}", hint="the same command goes on from there"
        )
    if state.step < steps:
        logger.info("no lower validation loss in %d validations (train.early_stop)", state.best.since)
    if state.best.loss is not None and state.config.checkpoint.best:
        logger.info("the lowest validation loss is %.4f, of %s", state.best.loss, step_folder(where, state.best.step))
    logger.info("done: %d steps; the model is in %s", state.step, where)


def begin(state: TrainState, checkpoint: Place | Copy | None, world: Group, tokenizer: Tokenizer | None) -> bool:
    """Bring the weights to where this run starts: the checkpoint's, or that of a copy in memory, another model's, or fresh
    ones; make the run folder.

    Returns whether there are steps to do; where there are none, nothing is written.
    """
    config = state.config
    if checkpoint is None:
        for stage in state.stages.values():
            init_weights(stage, config.train.seed)
    if config.init_from is not None and (checkpoint is None or config.lora is not None):
        load_start(state, config.init_from, world, tokenizer, fresh=checkpoint is None)
    if isinstance(checkpoint, Copy):
        state.restore_copy(checkpoint)
    elif checkpoint is not None:
        for line in state.restore(checkpoint, world.handle):
            logger.info("  changed since it was saved: %s", line)
    else:
        state.optimizer.reload_main()
        state.optimizer.begin_average()
    if state.finished:
        if latest(config.checkpoints) is None:
            rule = f"train.steps = {config.train.steps}: {checkpoint} is of step {state.step}, so that nothing is left to do"
            raise ConfigError(rule, hint="steps count from the beginning of the run that is gone on with; set more")
        logger.info("finished at step %d, nothing is changed: a larger train.steps goes on", state.step)
        return False
    for note in config.notes():
        logger.warning(note)
    if world.rank == 0:
        make_run_folder(config, tokenizer)
    logger.info(
        "%s parameters%s, %s on %d rank(s), steps %d to %d of %s tokens",
        human(count_parameters(config.model).total),
        trained_share(config),
        config.precision,
        world.size,
        state.step + 1,
        config.train.steps,
        human(config.batch.at(state.consumed_samples) * config.sample_tokens),
    )
    if growing := list(config.batch.plateaus(state.consumed_samples)):
        steps, sizes = sum(steps for _, steps in growing), [size for size, _ in growing]
        logger.info("  the batch grows from %d to %d samples in %d steps", sizes[0], config.batch.global_, steps)
    return True


def load_start(state: TrainState, path: str, world: Group, tokenizer: Tokenizer | None, *, fresh: bool) -> None:
    """The weights that a run starts from, or that its adapter is beside, at every start; a `fresh` run's adapter too."""
    found, lora = open_source(path), state.config.lora
    source = with_vocabulary(state.config, found, tokenizer)
    if world.rank == 0:
        tell_unread(source, training=True)
    fresh_head = {SCORE} - {*source.keys()}  # which a language model has not got
    load_stages(source, state.stages, lambda name: not is_adapter(name) and name not in fresh_head)
    logger.info("starting from the weights of %s", path)
    if source is not found:
        logger.info("  rows of new tokens begin as the mean of the others")
    if lora is None:
        return
    state.base = base_of(path, source)
    moving = weights_of(state.stages, moving=True)
    if fresh and lora.init_from is None:
        load_magnitudes(source, adapted(state.config.model, lora), moving)
    elif fresh:
        adapter = open_adapted(str(lora.init_from), path).adapter
        check_start(adapter, adapted(state.config.model, lora), state.config.trains, str(lora.init_from))
        load_adapter(adapter, moving)
        logger.info("going on with the adapter of %s", lora.init_from)


def trained_share(config: RunConfig) -> str:
    """How many of the parameters are trained, where not all are."""
    modules = {} if config.lora is None else adapted(config.model, config.lora)
    shapes = tensors_of(config.model) | adapter_tensors(modules)
    moving = sum(math.prod(shape) for name, shape in shapes.items() if config.trains(name))
    return "" if len(shapes) == len([*filter(config.trains, shapes)]) else f" of which {human(moving)} are trained"


def around_backward(shared: Mapping[int, SharedStage], stage: int, last: bool) -> AbstractContextManager[None]:
    """What takes a stage's gradients while a micro-batch's backward runs, and sums them over the ranks."""
    return shared[stage].backward(last)
