"""A training run, from configuration to last checkpoint. `run` reads in the order things happen."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.distributed_c10d import Store

from mega_ckpt.adapter import base_of
from mega_ckpt.folders import latest
from mega_ckpt.lora import adapted, adapter_tensors
from mega_ckpt.names import tensors_of
from mega_ckpt.source import load_adapter, load_weights, open_adapted, open_source, tell_unread
from mega_ckpt.store import Place, step_folder
from mega_common.errors import ConfigError, Interrupted, Terminated
from mega_common.log import human, logger
from mega_common.lora import is_adapter
from mega_data.dataset import BlendedDataset
from mega_data.loader import Loader
from mega_data.tokenizer import Tokenizer
from mega_trainer.batch import MicroBatch, micro_batches
from mega_trainer.build import (
    build_dispatcher,
    build_optimizer,
    build_schedule,
    build_stages,
    choose_kernels,
    connect,
    dtype_of,
    load_data,
    loss_scale_of,
    make_kernels,
    share_stages,
)
from mega_trainer.comm import Group, all_reduce
from mega_trainer.config import RunConfig
from mega_trainer.device import deterministic, machine_here, pick_device
from mega_trainer.environment import told
from mega_trainer.faults import faults_told
from mega_trainer.garbage import Garbage
from mega_trainer.guard import Guard, StopSignal
from mega_trainer.integrity import Integrity
from mega_trainer.kernels.leaves import Leaves, compiles
from mega_trainer.limits import Limits
from mega_trainer.memory import Copy, Memory, keeps_copies
from mega_trainer.mesh import Groups, warm_up
from mega_trainer.metrics import Metrics, Speed
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.init import init_weights
from mega_trainer.parallel.shared import SharedStage
from mega_trainer.phases import Phases, waited
from mega_trainer.pipeline.run import Executor
from mega_trainer.plan.advice import Needs
from mega_trainer.plan.flops import count_parameters
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.search import planned
from mega_trainer.profile import Profiler
from mega_trainer.ranks import Ranks
from mega_trainer.repeat import provenance
from mega_trainer.rollback import Remaining, RollBack
from mega_trainer.run_folder import claimed, make_run_folder, record_start
from mega_trainer.state import (
    Saver,
    TrainState,
    continued,
    newer_copy,
    starting_point,
    state_of,
    weights_of,
    with_epochs,
)
from mega_trainer.step import count_tokens, evaluate, own_counts, train_step
from mega_trainer.tokens import check_init_tokenizer, run_tokenizer
from mega_trainer.watch import Watch

T = TypeVar("T")


Scorer = Callable[[Decoder], Mapping[str, float]]  # numbers that say how good a model is, for metrics.jsonl


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
    builder = Builder(
        config.model, groups, make_kernels(choice, leaves), leaves,
        sp=config.parallel.sp, cp_kind=config.parallel.cp_kind, dispatcher=build_dispatcher(config, groups, leaves),
        dispatch_bound=config.parallel.dispatch_bound, dtype=dtype_of(config), device=device,
        adapts={} if config.lora is None else adapted(config.model, config.lora),
    )  # fmt: skip
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
    if keeps_copies(config, ranks, os.environ):
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
    job = Job(
        state, executor, train_data, valid_data, device, phases, profiler, limits, ranks, needs, store, memory, scorer,
        predicted_seconds(config, ranks),
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
        memory.clear()
    conclude(state, reason)
    return state


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


def steps(job: Job) -> str | None:
    """The steps that are left, from where the state is; returns why they ended before the last, if they did.

    Raises:
        RollBack: when the run's policy for a bad step is to go back.
    """
    state, executor, device, ranks = job.state, job.executor, job.device, job.ranks
    config, groups, profiler, valid_data = state.config, executor.groups, job.profiler, job.valid_data
    curve, decoupled = config.lr_curve(), config.decoupled_lr_curve()
    speed = Speed.of(config, device, dtype_of(config), ranks.world_size)
    further, integrity = config.model.mtp_layers, Integrity(config.fault, executor, state.optimizer)
    loader = partial(Loader, seq_length=config.data.seq_length, dp_rank=groups.dp.rank, dp_size=groups.dp.size)
    with (
        faults_told(ranks.rank, lambda: f"step {state.step + 1}", job.needs),
        watching(job),
        StopSignal() as stop,
        Saver(config, provenance(ranks.world_size, job.train_data.fingerprint) if not ranks.rank else None) as saver,
        Garbage(config.train.gc_every) as garbage,
        Metrics(config, speed, state.step, state.consumed_samples, writes=groups.world.rank == 0) as metrics,
    ):

        def asked(step: int) -> str | None:  # why this rank is to end after that step
            return stop.name or job.limits.reached(step)

        def riders(coming: Sequence[float]) -> list[float]:  # what all ranks are told beside the loss
            return [asked(state.step + 1) is not None, stop.name == "SIGTERM", saver.failed, *coming]

        def save() -> None:
            with profiler.phase("save"):
                saver.save(state)

        samples = Remaining(job.train_data, state.left_out)

        def accepts(loss: float) -> bool:  # just before an update
            integrity.unchanged(state.step + 1)
            return state.guard.accepts(loss)

        def batches_of_first() -> list[MicroBatch]:  # of the next step, those of the first data rank
            first = loader(
                samples, global_batch=config.batch.at, consumed_samples=state.consumed_samples, dp_rank=0, prefetch=0
            )
            batch = next(iter(first))
            return list(micro_batches(batch, config, device, groups.cp))

        left, stopping, terminated, tokens = config.train.steps - state.step, 0.0, 0.0, [0.0]
        batches = loader(samples, global_batch=config.batch.at, consumed_samples=state.consumed_samples)
        items = waited(with_next(islice(batches, left)), profiler.phase)
        for batch, following in profiler.steps(items, state.step + 1):
            tokens = tokens if any(tokens) else count_tokens(batch, further, groups)
            coming = own_counts(following, further, groups)
            integrity.before(state.step + 1, batches_of_first)
            lr = curve(state.consumed_samples)
            own_lr = None if decoupled is None else decoupled(state.consumed_samples)
            micro = list(micro_batches(batch, config, device, groups.cp))
            result = train_step(
                executor, state.optimizer, micro, tokens=tokens,
                lr=lr, decoupled_lr=own_lr, clip=config.optimizer.clip_grad, loss_scale=state.loss_scale,
                riders=partial(riders, coming), accepts=accepts,
            )  # fmt: skip
            state.advance(result)
            garbage.after(state.step)
            valid_loss, improves = None, False
            if valid_data is not None and config.due(state.step, config.train.eval_every):
                valid_loss = validate(executor, partial(loader, valid_data), config, device)
                improves = state.best.improves(state.step, valid_loss)
            scores: Mapping[str, float] = {}
            if job.scorer is not None and config.due(state.step, config.eval.every):
                with profiler.phase("evaluate"):
                    scores = job.scorer(executor.model)
            metrics.step(
                state.step, state.consumed_samples, lr, result, decoupled_lr=own_lr,
                valid_loss=valid_loss,
                mtp_loss=result.mtp_loss, loss_scale=result.loss_scale, predicted_seconds=job.predicted, **result.routing, **scores,
                epochs=lambda consumed: job.train_data.epochs(state.left_out.position(consumed)), phases=job.phases.take(),
            )  # fmt: skip
            stopping, terminated, failed, *tokens = result.riders
            if failed:
                saver.wait()
            saves = bool(stopping) or state.finished or config.due(state.step, config.checkpoint.every)
            saves = saves or (improves and config.checkpoint.best)
            integrity.after(state.step, saves=saves)
            keep_copy(job)
            if stopping:
                logger.info("asked to end: saving step %d (Ctrl-C once more ends at once, without)", state.step)
            if saves:
                save()
            if stopping or state.finished:
                break
    all_reduce(torch.zeros(1), groups.world)  # leave together: a launcher ends the others soon after the first one
    if not stopping:
        return None
    return "SIGTERM" if terminated else asked(state.step) or "a signal or limit of another rank"


def keep_copy(job: Job) -> None:
    """Save the state in host memory, where that is due."""
    state, settings = job.state, job.state.config
    if job.memory is None or state.step % settings.checkpoint.memory_every or state.step >= settings.train.steps:
        return
    with job.profiler.phase("save"):
        job.memory.save(state.step, state.tensors(), state.numbers())


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
    if name is None or config.batch.rampup is not None:
        return None
    step = planned(config, ranks.world_size, load_machine(name)).time()
    parts = sorted(step.parts, key=lambda part: -step.parts[part])[:3]
    told = ", ".join(f"{part} {100 * step.parts[part] / step.seconds:.0f} %" for part in parts)
    logger.info("predicted on %s: %.4g s a step (%s)", name, step.seconds, told)
    return step.seconds


def with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Each item with the one after it, None after the last."""
    rest = iter(items)
    item = next(rest, None)
    while item is not None:
        following = next(rest, None)
        yield item, following
        item = following


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
        human(config.batch.at(state.consumed_samples) * config.data.seq_length),
    )
    if growing := list(config.batch.plateaus(state.consumed_samples)):
        steps, sizes = sum(steps for _, steps in growing), [size for size, _ in growing]
        logger.info("  the batch grows from %d to %d samples in %d steps", sizes[0], config.batch.global_, steps)
    return True


def load_start(state: TrainState, path: str, world: Group, tokenizer: Tokenizer | None, *, fresh: bool) -> None:
    """The weights that a run starts from, or that its adapter is beside, at every start; a `fresh` run's adapter too."""
    source, lora = open_source(path), state.config.lora
    check_init_tokenizer(state.config, source, tokenizer)
    if world.rank == 0:
        tell_unread(source)
    held = weights_of(state.stages)
    load_weights(source, {name: boxes for name, boxes in held.items() if not is_adapter(name)})
    logger.info("starting from the weights of %s", path)
    if lora is None:
        return
    state.base = base_of(path, source)
    if fresh and lora.init_from is not None:
        load_adapter(open_adapted(lora.init_from, path).adapter, weights_of(state.stages, moving=True))
        logger.info("going on with the adapter of %s", lora.init_from)


def trained_share(config: RunConfig) -> str:
    """How many of the parameters are trained, where not all are."""
    modules = {} if config.lora is None else adapted(config.model, config.lora)
    shapes = tensors_of(config.model) | adapter_tensors(modules)
    moving = sum(math.prod(shape) for name, shape in shapes.items() if config.trains(name))
    return "" if len(shapes) == len([*filter(config.trains, shapes)]) else f" of which {human(moving)} are trained"


def validate(executor: Executor, loader: Callable[..., Loader], config: RunConfig, device: torch.device) -> float:
    """Mean loss per token over the first `eval_steps` global batches of the validation set, the same ones each time."""
    batches = islice(loader(global_batch=config.batch.global_), config.train.eval_steps)
    with executor.evaluating(), executor.phase("evaluate"):
        return evaluate(executor, (list(micro_batches(batch, config, device, executor.groups.cp)) for batch in batches))


def around_backward(shared: Mapping[int, SharedStage], stage: int, last: bool) -> AbstractContextManager[None]:
    """What takes a stage's gradients while a micro-batch's backward runs, and sums them over the ranks."""
    return shared[stage].backward(last)


def watching(job: Job) -> AbstractContextManager[object]:
    """The watch over the ranks, where there are several."""
    if job.store is None:
        return nullcontext()
    state, ranks = job.state, job.ranks
    seconds, logs = state.config.timeout_seconds, Path(state.config.output) / "logs"
    return Watch(
        job.store, ranks.rank, ranks.world_size, lambda: state.step + 1, lambda: job.phases.current, seconds, logs
    )
