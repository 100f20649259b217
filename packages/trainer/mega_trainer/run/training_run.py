"""Training run, from configuration to last checkpoint; `train_in_run_folder` reads in the order things happen.

The initial weights and optimizer state are fresh, those of another model, of a checkpoint or of a memory copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from mega_ckpt.canonical_tensors import TASK_HEADS
from mega_ckpt.checkpoint_folders import latest_checkpoint
from mega_ckpt.lora_adapter import check_initial_adapter, fingerprint_base_model
from mega_ckpt.lora_tensors import adapted_modules
from mega_ckpt.source import (
    WeightSource,
    init_dora_magnitudes,
    load_adapter_weights,
    open_weights_with_adapter,
    warn_of_unsupported_parts,
)
from mega_ckpt.store import Location
from mega_common.errors import ConfigError
from mega_common.lora_config import is_adapter_tensor
from mega_common.progress_logging import logger
from mega_data.tokenizer import Tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import find_run_tokenizer, open_initial_weights
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.device import deterministic_mode, select_rank_device
from mega_trainer.distributed.process_groups import (
    ParallelGroups,
    RankInfo,
    list_communicating_groups,
    warm_up_nccl_communicators,
)
from mega_trainer.job.environment import format_environment
from mega_trainer.job.error_log import record_rank_errors
from mega_trainer.job.error_translation import convert_oom_and_lost_rank_errors
from mega_trainer.job.memory_checkpoint import MemoryCheckpoint, TrainingStateCopy, should_keep_memory_copies
from mega_trainer.job.phase_timer import PhaseTimer
from mega_trainer.job.profiler import StepProfiler
from mega_trainer.job.resume import (
    convert_epochs_to_steps,
    find_newer_memory_copy,
    find_start_checkpoint,
    inherit_data_order,
    read_saved_state,
)
from mega_trainer.job.run_folder import claim_run_folders, make_run_folder, record_run_start
from mega_trainer.job.training_guard import LossGuard, RollbackRequested, RunLimits
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler, should_compile
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.objectives.policy_objective import Rollout, RolloutGenerator
from mega_trainer.parallel.parameter_shards import ShardedStage
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.plan.memory_advice import PredictedMemoryNeeds
from mega_trainer.run.build_components import (
    build_optimizer,
    build_pipeline_stages,
    build_schedule,
    choose_kernels,
    connect_parallel_groups,
    initial_loss_scale,
    load_datasets,
    make_layer_builder,
    shard_pipeline_stages,
)
from mega_trainer.run.objective_builder import build_objectives
from mega_trainer.run.run_summary import log_run_end, log_run_size, predict_step_seconds
from mega_trainer.run.train_state import TrainState, collect_stage_weights, load_stage_weights
from mega_trainer.run.training_context import TaskScorer, TrainingContext
from mega_trainer.run.training_loop import run_training_loop


def run_training(
    config: RunConfig,
    ranks: RankInfo,
    store: Store | None = None,
    scorer: TaskScorer | None = None,
    generate: RolloutGenerator | None = None,
) -> TrainState:
    """Train a run as configured, from start or resume to the end; return the final state of this rank.

    Args:
        store: of the job; with it a rank that hangs is named.
        scorer: called by all ranks together every `eval.every` steps.
        generate: samples answers of the model in training, called by all ranks together; required by `objective.kind: grpo`.

    Raises:
        TrainingInterrupted: when a signal or a limit ended the run before its last step; the step done is saved.
        MegaError: ConfigError, DataError or CheckpointError for user errors, TrainingError for failures of training.
    """
    groups = connect_parallel_groups(config, ranks)
    needs = partial(PredictedMemoryNeeds.predict_for_rank, config, ranks.world_size, groups.pp.rank)
    with (
        record_rank_errors(Path(config.output), ranks.rank),
        claim_run_folders(config, ranks, groups.world),
        convert_oom_and_lost_rank_errors(ranks.rank, lambda: "before the first step", needs),
        deterministic_mode(config.deterministic),
    ):
        return train_in_run_folder(config, ranks, groups, needs, store, scorer, generate)


def train_in_run_folder(
    config: RunConfig,
    ranks: RankInfo,
    groups: ParallelGroups,
    needs: Callable[[], PredictedMemoryNeeds],
    store: Store | None,
    scorer: TaskScorer | None = None,
    generate: RolloutGenerator | None = None,
) -> TrainState:
    """Train a run whose folders this job has locked; `needs` returns the memory estimate for out-of-memory errors."""
    checkpoint, memory = find_start_checkpoint(config), open_memory_checkpoint(config, groups)
    start = find_newer_memory_copy(config, checkpoint, memory) or checkpoint
    config = inherit_data_order(config, read_saved_state(start))
    limits, device = RunLimits(config.train), prepare_device(config, ranks, groups)
    phases = PhaseTimer(device)
    profiler = StepProfiler(config, device, ranks.rank, phases)

    tokenizer = find_run_tokenizer(config.data, config.model.vocab_size)
    train_data, valid_data = load_datasets(config, tokenizer)
    config = config if config.train.epochs is None else convert_epochs_to_steps(config, train_data.samples_per_epoch)

    state, executor = build_training_state_and_executor(config, groups, device, profiler.time_phase)
    state.count_samples_read = train_data.count_samples_by_path
    state.find_stream_positions = train_data.find_stream_positions
    loading_began = time.monotonic()
    initialize_training_state(state, start, groups.world, tokenizer)
    if not has_steps_left(state, start):
        return state
    begin_run_records(state, ranks, groups, start, tokenizer, time.monotonic() - loading_began)

    objective, valid_objective = build_objectives(
        config, executor, device, state.consumed_samples, train_data, valid_data,
        None if generate is None else partial(generate_with_gathered_weights, generate, state),
    )  # fmt: skip
    if config.objective.ask_only:
        logger.info("teacher outputs of all samples are written; nothing is trained (objective.ask_only = true)")
        return state
    context = TrainingContext(
        state=state,
        executor=executor,
        train_data=train_data,
        valid_data=valid_data,
        objective=objective,
        valid_objective=valid_objective,
        scorer=scorer,
        device=device,
        ranks=ranks,
        store=store,
        memory=memory,
        memory_needs=needs,
        phases=phases,
        profiler=profiler,
        limits=limits,
        predicted_seconds=predict_step_seconds(config, ranks.world_size) if ranks.rank == 0 else None,
    )
    reason = train_with_rollbacks(context)
    if memory is not None:
        memory.remove_folder()
    log_run_end(state, reason)
    return state


def begin_run_records(
    state: TrainState,
    ranks: RankInfo,
    groups: ParallelGroups,
    start: Location | TrainingStateCopy | None,
    tokenizer: Tokenizer | None,
    loading_seconds: float,
) -> None:
    """Make the run's folder and record the run's start on rank 0, and log the size of the run."""
    if ranks.rank == 0:
        make_run_folder(state.config, tokenizer)
    log_run_size(state, groups.world.size)
    record_run_start(state.config, ranks, state.step, start, loading_seconds)


def generate_with_gathered_weights(
    generate: RolloutGenerator,
    state: TrainState,
    executor: PipelineExecutor,
    prompts: Sequence[tuple[int, Sequence[int]]],
) -> list[Rollout]:
    """Sample answers once the weights of the last update have been gathered."""
    state.optimizer.wait_for_params()
    return generate(executor, prompts)


def train_with_rollbacks(context: TrainingContext) -> str | None:
    """Run the training loop, again after each rollback; return the reason for an early stop, else None."""
    while True:
        try:
            return run_training_loop(context)
        except RollbackRequested as request:
            if context.memory is not None:
                context.memory.remove_run_copies()
            context.state.roll_back(request, context.executor.parallel_groups.world)


def open_memory_checkpoint(config: RunConfig, groups: ParallelGroups) -> MemoryCheckpoint | None:
    """Return the object that keeps memory copies of the run's state in host memory, or None if the run keeps none."""
    if not should_keep_memory_copies(config, os.environ):
        return None
    return MemoryCheckpoint(config.output, groups.world, os.environ, os.getppid())


def prepare_device(config: RunConfig, ranks: RankInfo, groups: ParallelGroups) -> torch.device:
    """Return this rank's device; on a GPU, create all communicators first, before the model fills its memory."""
    device = select_rank_device(config.device, ranks.local_rank)
    if device.type == "cuda":
        logger.info("environment: %s", format_environment(config, os.environ))
        warm_up_nccl_communicators(groups, list_communicating_groups(groups, config), device)
    return device


def build_training_state_and_executor(
    config: RunConfig,
    groups: ParallelGroups,
    device: torch.device,
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> tuple[TrainState, PipelineExecutor]:
    """Return the run's training state, uninitialised, and the executor that runs batches through the model.
    The state has the model with gradients, and the optimizer.
    """
    schedule = build_schedule(config, groups)
    choice, leaves = (
        choose_kernels(config, device),
        FusibleFunctionCompiler(compiled=should_compile(config.compile, device)),
    )
    added = ", ".join(
        f"{kernel.operation} {name}"
        for name, kernel in zip(
            config.kernels.functions, config.registry.select_kernels(config.kernels.functions), strict=True
        )
    )
    logger.info("%s%s", choice, f", of extensions: {added}" if added else "")
    builder = make_layer_builder(config, groups, device, choice, leaves)
    stages = build_pipeline_stages(config, builder, schedule)
    sharded = shard_pipeline_stages(config, stages)
    optimizer = build_optimizer(config, sharded, groups, leaves)
    state = TrainState(config, stages, optimizer, LossGuard(config.train), loss_scale=initial_loss_scale(config))
    executor = PipelineExecutor(
        schedule, stages, groups.pp, config.train.seed, partial(reduce_during_backward, sharded), phase,
        builder.interleaver,
    )  # fmt: skip
    return state, executor


def reduce_during_backward(sharded: Mapping[int, ShardedStage], stage: int, last: bool) -> AbstractContextManager[None]:
    """Return the context in which a micro-batch's backward reduces its gradients over data ranks.
    The backward is in stage number `stage`; `last` marks the step's last micro-batch.
    """
    return sharded[stage].backward_context(last)


def initialize_training_state(
    state: TrainState, start: Location | TrainingStateCopy | None, world: CommGroup, tokenizer: Tokenizer | None
) -> None:
    """Load the weights and the optimizer state that a run starts from into the training state.

    Args:
        start: the checkpoint or memory copy that the run resumes from; None for a new run, which begins with the
            weights of `init_from`, or with random ones.
    """
    config = state.config
    if start is None:
        for stage in state.stages.values():
            initialize_weights(stage, config.train.seed, config.init_factor_of)
    if config.init_from is not None and (start is None or config.lora is not None):
        _load_initial_weights(state, config.init_from, world, tokenizer, fresh=start is None)
    if isinstance(start, TrainingStateCopy):
        state.restore_memory_copy(start)
    elif start is not None:
        for line in state.restore_checkpoint(start, world.process_group):
            logger.info("  changed since it was saved: %s", line)
    else:
        state.optimizer.load_main_from_model()
        state.optimizer.initialize_weight_ema()


def has_steps_left(state: TrainState, start: Location | TrainingStateCopy | None) -> bool:
    """Return whether a run has steps to do after its state was initialised from `start`.

    Raises:
        ConfigError: for a new run from another run's checkpoint that has no steps left.
    """
    if not state.is_finished:
        return True
    if latest_checkpoint(state.config.checkpoint_root) is None:
        raise ConfigError(
            f"train.steps = {state.config.train.steps} must be larger than the step of {start}, which is {state.step}",
            hint="train.steps counts from the start of the run that is resumed",
        )
    logger.info("finished at step %d; nothing is changed; a larger train.steps continues the run", state.step)
    return False


def _load_initial_weights(
    state: TrainState, path: str, world: CommGroup, tokenizer: Tokenizer | None, *, fresh: bool
) -> None:
    """Load the weights of `init_from`: for a new run, or at every start for the frozen base of an adapter. A `fresh`
    run also loads its initial adapter.
    """
    original, source = open_initial_weights(state.config, path, tokenizer)
    if world.rank == 0:
        warn_of_unsupported_parts(source, training=True)
    stored = {*source.tensor_names()}

    def is_stored(name: str) -> bool:  # a language model has no reward or task head
        return not is_adapter_tensor(name) and (name in stored or not name.startswith(TASK_HEADS))

    load_stage_weights(source, state.stages, is_stored)
    logger.info("starting from the weights of %s", path)
    if source is not original:
        logger.info("  rows of new tokens start as the mean of the other rows")
    lora = state.config.lora
    if lora is None:
        return
    state.adapter_base = fingerprint_base_model(path, source)
    if fresh:
        _load_initial_adapter(state, path, source)


def _load_initial_adapter(state: TrainState, base: str, source: WeightSource) -> None:
    """Load the adapter of `lora.init_from`; without one, initialise DoRA magnitudes from the base weights `source`."""
    lora, model = state.config.lora, state.config.model
    assert lora is not None
    modules, trained = adapted_modules(model, lora), collect_stage_weights(state.stages, trainable_only=True)
    if lora.init_from is None:
        init_dora_magnitudes(source, modules, trained)
        return
    adapter = open_weights_with_adapter(str(lora.init_from), base).adapter
    check_initial_adapter(adapter, modules, state.config.is_trainable, str(lora.init_from))
    load_adapter_weights(adapter, trained)
    logger.info("starting from the adapter of %s", lora.init_from)
