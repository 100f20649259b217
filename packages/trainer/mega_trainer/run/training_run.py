"""Training run, from configuration to last checkpoint. `run_training` reads in the order things happen."""

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

from mega_ckpt.canonical_tensors import SCORE, canonical_tensors
from mega_ckpt.checkpoint_folders import latest_checkpoint
from mega_ckpt.lora_adapter import check_adapter_start, fingerprint_base
from mega_ckpt.lora_tensors import adapted_modules, adapter_tensor_shapes
from mega_ckpt.source import (
    init_dora_magnitudes,
    load_adapter_weights,
    load_with_adapter,
    open_weight_source,
    warn_of_unsupported_parts,
)
from mega_ckpt.store import Location, step_folder
from mega_common.errors import ConfigError, TrainingInterrupted, TrainingTerminated
from mega_common.lora_config import is_adapter_tensor
from mega_common.progress_logging import format_number, logger
from mega_data.tokenizer import Tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import extend_vocabulary, find_run_tokenizer
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.device import detect_machine, deterministic_mode, select_rank_device
from mega_trainer.distributed.process_groups import ParallelGroups, warm_up_groups
from mega_trainer.job.environment import format_environment
from mega_trainer.job.error_log import record_rank_errors
from mega_trainer.job.error_translation import translate_errors
from mega_trainer.job.memory_checkpoint import MemoryCheckpoint, MemoryCopy, should_keep_copies
from mega_trainer.job.phase_timer import PhaseTimer
from mega_trainer.job.profiler import StepProfiler
from mega_trainer.job.rollback import RollbackRequested
from mega_trainer.job.run_folder import claim_run_folders, make_run_folder, record_run_start
from mega_trainer.job.stop_conditions import RunLimits
from mega_trainer.job.training_guard import LossGuard
from mega_trainer.kernels.leaf_compiler import LeafCompiler, should_compile
from mega_trainer.launch.local_ranks import RankInfo
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.objectives.objective_builder import build_objectives
from mega_trainer.parallel.parameter_shards import ShardedStage
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.plan.flops import count_parameters_by_layer
from mega_trainer.plan.layout_search import make_planned_run
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import MemoryNeeds
from mega_trainer.run.build_components import (
    build_optimizer,
    build_schedule,
    build_stages,
    choose_kernels,
    connect_groups,
    initial_loss_scale,
    load_datasets,
    make_layer_builder,
    shard_stages,
)
from mega_trainer.run.train_state import (
    TrainState,
    collect_weights,
    find_newer_copy,
    find_start_checkpoint,
    inherit_data_order,
    load_stage_weights,
    read_saved_state,
    resolve_epochs,
)
from mega_trainer.run.training_loop import TaskScorer, TrainingContext, run_training_loop


def run_training(
    config: RunConfig, ranks: RankInfo, store: Store | None = None, scorer: TaskScorer | None = None
) -> TrainState:
    """Train as `config` says; returns the final state. With the job's `store`, a rank that hangs is named.

    The `scorer` is asked by all ranks together, every `eval.every` steps.

    Raises:
        Interrupted: when a signal or a limit asked to end before the last step, and the step done is saved.
        MegaError: ConfigError, DataError or CheckpointError for what the user can mend, TrainingError when the numbers
            go wrong.
    """
    groups = connect_groups(config, ranks)
    needs = partial(MemoryNeeds.predict_for_rank, config, ranks.world_size, groups.pp.rank)
    with (
        record_rank_errors(Path(config.output), ranks.rank),
        claim_run_folders(config, ranks, groups.world),
        translate_errors(ranks.rank, lambda: "before the first step", needs),
        deterministic_mode(config.deterministic),
    ):
        return train_in_run_folder(config, ranks, groups, needs, store, scorer)


def assemble_training(
    config: RunConfig,
    groups: ParallelGroups,
    device: torch.device,
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> tuple[TrainState, PipelineExecutor]:
    """Return the run's model with gradients and optimizer, uninitialised, and the executor that runs batches through
    it.
    """
    schedule = build_schedule(config, groups)
    choice, leaves = choose_kernels(config, device), LeafCompiler(compiled=should_compile(config.compile, device))
    logger.info("%s", choice)
    builder = make_layer_builder(config, groups, device, choice, leaves)
    stages = build_stages(config, builder, schedule)
    shared = shard_stages(config, stages)
    optimizer = build_optimizer(config, shared, groups, leaves)
    state = TrainState(config, stages, optimizer, LossGuard(config.train), loss_scale=initial_loss_scale(config))
    executor = PipelineExecutor(
        schedule, stages, groups.pp, config.train.seed, partial(reduce_during_backward, shared), phase
    )
    return state, executor


def train_in_run_folder(
    config: RunConfig,
    ranks: RankInfo,
    groups: ParallelGroups,
    needs: Callable[[], MemoryNeeds],
    store: Store | None,
    scorer: TaskScorer | None = None,
) -> TrainState:
    """Train in run folders that this run has claimed; `needs` gives the memory estimate for out-of-memory errors."""
    checkpoint = find_start_checkpoint(config)
    memory = None
    if should_keep_copies(config, os.environ):
        memory = MemoryCheckpoint(config.output, groups.world, os.environ, os.getppid())
    start = find_newer_copy(config, checkpoint, memory) or checkpoint
    config = inherit_data_order(config, read_saved_state(start))
    limits, device = RunLimits(config.train), prepare_device(config, ranks, groups)
    phases = PhaseTimer(device)
    profiler = StepProfiler(config, device, ranks.rank, phases)
    tokenizer = find_run_tokenizer(config.data, config.model.vocab_size)
    train_data, valid_data = load_datasets(config, tokenizer)
    config = config if config.train.epochs is None else resolve_epochs(config, train_data.samples_per_epoch)
    state, executor = assemble_training(config, groups, device, profiler.time_phase)
    state.count_samples_read = train_data.count_samples_by_path
    begun = time.monotonic()
    if not initialize_state(state, start, groups.world, tokenizer):
        return state
    record_run_start(config, ranks, state.step, start, time.monotonic() - begun)
    objective, of_valid = build_objectives(config, executor, device, state.consumed_samples, train_data, valid_data)
    if config.objective.ask_only:
        logger.info("all samples are told, and nothing is trained, as objective.ask_only = true asks")
        return state
    job = TrainingContext(
        state, executor, train_data, valid_data, device, phases, profiler, limits, ranks, needs, store, memory, scorer,
        predict_step_seconds(config, ranks) if ranks.rank == 0 else None, objective, of_valid,
    )  # fmt: skip
    while True:
        try:
            reason = run_training_loop(job)
            break
        except RollbackRequested as back:
            if memory is not None:
                memory.remove_run_copies()
            state.roll_back(back, groups.world)
    if memory is not None:
        memory.remove_folder()
    conclude_run(state, reason)
    return state


def prepare_device(config: RunConfig, ranks: RankInfo, groups: ParallelGroups) -> torch.device:
    """Return this rank's device, with communicators created before the model fills its memory."""
    device = select_rank_device(config.device, ranks.local_rank)
    if device.type == "cuda":
        logger.info("environment: %s", format_environment(config, os.environ))
        warm_up_groups(groups, device)
    return device


def predict_step_seconds(config: RunConfig, ranks: RankInfo) -> float | None:
    """Return the step time that `mega plan` predicts for a known machine; None for other machines and for growing
    batches.
    """
    name = detect_machine(config)
    if name is None or config.batch.rampup is not None or config.batch.stages:
        return None
    step = make_planned_run(config, ranks.world_size, load_machine(name)).predict_step_time()
    parts = sorted(step.parts, key=lambda part: -step.parts[part])[:3]
    told = ", ".join(f"{part} {100 * step.parts[part] / step.seconds:.0f} %" for part in parts)
    logger.info("predicted on %s: %.4g s a step (%s)", name, step.seconds, told)
    return step.seconds


def conclude_run(state: TrainState, reason: str | None) -> None:
    """Log the end of a run that has saved its state.

    Raises:
        Interrupted: when it was asked to end, by `reason`, before its last step; Terminated by SIGTERM.
    """
    steps, where = state.config.train.steps, state.config.checkpoint_root
    if not state.config.checkpoint.save:
        logger.info("ended after step %d of %d; nothing is saved, as checkpoint.save = false asks", state.step, steps)
        return
    if reason is not None and state.step < steps:
        raise (TrainingTerminated if reason == "SIGTERM" else TrainingInterrupted)(
            f"{reason}: saved step {state.step} of {steps} in {where}", hint="the same command goes on from there"
        )
    if state.step < steps:
        logger.info("no lower validation loss in %d validations (train.early_stop)", state.best.since)
    if state.best.loss is not None and state.config.checkpoint.best:
        logger.info("the lowest validation loss is %.4f, of %s", state.best.loss, step_folder(where, state.best.step))
    logger.info("done: %d steps; the model is in %s", state.step, where)


def initialize_state(
    state: TrainState, checkpoint: Location | MemoryCopy | None, world: CommGroup, tokenizer: Tokenizer | None
) -> bool:
    """Load the initial weights of this run, from a checkpoint, a memory copy, another model or fresh initialisation,
    and make the run folder.

    Returns whether there are steps to do; where there are none, nothing is written.
    """
    config = state.config
    if checkpoint is None:
        for stage in state.stages.values():
            initialize_weights(stage, config.train.seed)
    if config.init_from is not None and (checkpoint is None or config.lora is not None):
        load_initial_weights(state, config.init_from, world, tokenizer, fresh=checkpoint is None)
    if isinstance(checkpoint, MemoryCopy):
        state.restore_memory_copy(checkpoint)
    elif checkpoint is not None:
        for line in state.restore_checkpoint(checkpoint, world.process_group):
            logger.info("  changed since it was saved: %s", line)
    else:
        state.optimizer.load_main_from_model()
        state.optimizer.start_weight_average()
    if state.is_finished:
        if latest_checkpoint(config.checkpoint_root) is None:
            rule = f"train.steps = {config.train.steps}: {checkpoint} is of step {state.step}, so that nothing is left to do"
            raise ConfigError(rule, hint="steps count from the beginning of the run that is gone on with; set more")
        logger.info("finished at step %d, nothing is changed: a larger train.steps goes on", state.step)
        return False
    for note in config.find_warnings():
        logger.warning(note)
    if world.rank == 0:
        make_run_folder(config, tokenizer)
    logger.info(
        "%s parameters%s, %s on %d rank(s), steps %d to %d of %s tokens",
        format_number(count_parameters_by_layer(config.model).total),
        format_trained_share(config),
        config.precision,
        world.size,
        state.step + 1,
        config.train.steps,
        format_number(config.batch.batch_size_at(state.consumed_samples) * config.tokens_per_sample),
    )
    if growing := list(config.batch.growth_plateaus(state.consumed_samples)):
        steps, sizes = sum(steps for _, steps in growing), [size for size, _ in growing]
        logger.info("  the batch grows from %d to %d samples in %d steps", sizes[0], config.batch.global_, steps)
    return True


def load_initial_weights(
    state: TrainState, path: str, world: CommGroup, tokenizer: Tokenizer | None, *, fresh: bool
) -> None:
    """Load the weights that a run starts from or that its adapter is based on, at every start; a `fresh` run loads its
    initial adapter too.
    """
    found, lora = open_weight_source(path), state.config.lora
    source = extend_vocabulary(state.config, found, tokenizer)
    if world.rank == 0:
        warn_of_unsupported_parts(source, training=True)
    fresh_head = {SCORE} - {*source.tensor_names()}  # which a language model has not got
    load_stage_weights(source, state.stages, lambda name: not is_adapter_tensor(name) and name not in fresh_head)
    logger.info("starting from the weights of %s", path)
    if source is not found:
        logger.info("  rows of new tokens begin as the mean of the others")
    if lora is None:
        return
    state.adapter_base = fingerprint_base(path, source)
    moving = collect_weights(state.stages, trainable_only=True)
    if fresh and lora.init_from is None:
        init_dora_magnitudes(source, adapted_modules(state.config.model, lora), moving)
    elif fresh:
        adapter = load_with_adapter(str(lora.init_from), path).adapter
        check_adapter_start(
            adapter, adapted_modules(state.config.model, lora), state.config.is_trainable, str(lora.init_from)
        )
        load_adapter_weights(adapter, moving)
        logger.info("going on with the adapter of %s", lora.init_from)


def format_trained_share(config: RunConfig) -> str:
    """Return a text with the number of trained parameters, empty if all are trained."""
    modules = {} if config.lora is None else adapted_modules(config.model, config.lora)
    shapes = canonical_tensors(config.model) | adapter_tensor_shapes(modules)
    moving = sum(math.prod(shape) for name, shape in shapes.items() if config.is_trainable(name))
    return (
        ""
        if len(shapes) == len([*filter(config.is_trainable, shapes)])
        else f" of which {format_number(moving)} are trained"
    )


def reduce_during_backward(shared: Mapping[int, ShardedStage], stage: int, last: bool) -> AbstractContextManager[None]:
    """Return the context that reduces a stage's gradients during the backward of a micro-batch."""
    return shared[stage].backward_context(last)
