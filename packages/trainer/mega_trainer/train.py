"""A training run, from configuration to last checkpoint. `run` reads in the order things happen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import yaml
from mega_ckpt.source import load_weights, open_source
from mega_common.files import atomic_file
from mega_common.log import human, logger
from mega_data.gpt_dataset import GPTDataset, build_datasets
from mega_data.loader import Loader
from torch import nn

from mega_trainer.batch import micro_batches
from mega_trainer.comm import Group, all_reduce
from mega_trainer.config import RunConfig
from mega_trainer.guard import Guard, StopSignal
from mega_trainer.mesh import Groups, Layout, build_groups
from mega_trainer.metrics import Metrics, Speed
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder, Recompute, Stage
from mega_trainer.model.init import init_weights
from mega_trainer.optim.lr import learning_rate
from mega_trainer.optim.zero import Optimizer
from mega_trainer.parallel.grads import FlatBuffer, build_buffers
from mega_trainer.pipeline.run import Executor
from mega_trainer.pipeline.schedules import Schedule, make_schedule
from mega_trainer.pipeline.stages import stage_layers
from mega_trainer.precision import dtype_of, pick_device
from mega_trainer.state import Saver, TrainState, starting_point, weights_of
from mega_trainer.step import evaluate_step, train_step


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def run(config: RunConfig, ranks: Ranks = Ranks()) -> TrainState:
    """Train as `config` says; returns the final state.

    Raises:
        MegaError: ConfigError, DataError or CheckpointError for what the user can mend, TrainingError when the numbers
            go wrong.
    """
    device, dtype = pick_device(config.device, ranks.local_rank), dtype_of(config)
    groups = connect(config, ranks)
    schedule = make_schedule_of(config, groups)
    stages = build_stages(config, groups, schedule, Builder(config.model, groups, sp=config.parallel.sp, dtype=dtype, device=device))
    buffers = {index: build_buffers(stage, sharded=config.parallel.zero > 0) for index, stage in stages.items()}
    optimizer = build_optimizer(config, buffers, groups)
    state = TrainState(config, stages, optimizer, Guard(config.train))
    begin(state, groups)
    train_data, valid_data = load_data(config)
    executor = Executor(
        schedule, stages, groups.pp, dropout_seed=config.train.seed, on_last_backward=partial(expect_last, buffers)
    )
    speed = Speed.of(config, device, dtype, ranks.world_size)
    write_run_folder(config, groups.world)
    with (
        StopSignal() as stop,
        Saver(config, groups.world.handle, assets=None) as saver,
        Metrics(config, speed, start=state.step, writes=groups.world.rank == 0) as metrics,
    ):
        loader = Loader(
            train_data, global_batch=config.batch.global_, seq_length=config.data.seq_length,
            dp_rank=groups.dp.rank, dp_size=groups.dp.size, consumed_samples=state.consumed_samples,
        )  # fmt: skip
        for batch in islice(loader, max(0, config.train.steps - state.step)):
            lr = learning_rate(config.lr_schedule, config, state.consumed_samples)
            micro = list(micro_batches(batch, config.batch.micro, device))
            result = train_step(executor, optimizer, micro, lr=lr, clip=config.optimizer.clip_grad, data=groups.dp_cp)
            state.step += 1
            state.consumed_samples += config.batch.global_
            state.guard.check(state.step, result)
            valid = None
            if valid_data is not None and due(state.step, config.train.eval_every, config):
                valid = evaluate(executor, valid_data, config, groups, device)
            metrics.step(state.step, state.consumed_samples, lr, result, valid_loss=valid)
            stopping = agreed(stop.name is not None, groups.world, device)
            if stopping or due(state.step, config.checkpoint.every, config):
                saver.save(state)
            if stopping:
                break
    tell_end(state, stop)
    return state
