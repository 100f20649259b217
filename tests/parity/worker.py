"""What a rank of the parity suite does: train a few steps in some layout and hold everything against one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mega_ckpt.pieces import Box, Sharded, copy_overlap
from mega_data.loader import StepBatch
from mega_trainer.batch import micro_batches
from mega_trainer.build import (
    build_optimizer,
    build_schedule,
    build_stages,
    connect,
    dtype_of,
    loss_scale_of,
    share_stages,
)
from mega_trainer.comm import CommLog
from mega_trainer.config import RunConfig
from mega_trainer.guard import Guard
from mega_trainer.mesh import GroupMaker, Groups
from mega_trainer.model.builder import Builder
from mega_trainer.model.init import init_weights
from mega_trainer.optim.zero import Optimizer
from mega_trainer.pipeline.run import Executor
from mega_trainer.ranks import Ranks
from mega_trainer.state import TrainState
from mega_trainer.step import StepResult, train_step
from mega_trainer.train import around_backward

STEPS = 3


@dataclass
class Outcome:
    """What some steps computed: numbers by step, and tensors by canonical name as this rank's boxes."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Sharded] = field(default_factory=dict)
    weights: dict[str, Sharded] = field(default_factory=dict)


@dataclass
class Trainer:
    """The parts of a run that the trainer itself is made of, on synthetic batches."""

    config: RunConfig
    groups: Groups
    executor: Executor
    optimizer: Optimizer
    state: TrainState

    @classmethod
    def make(
        cls, raw: Mapping[str, Any], ranks: Ranks, maker: GroupMaker | None = None, log: CommLog | None = None
    ) -> Trainer:
        config = RunConfig.parse(raw)
        groups = connect(config, ranks, maker, log)
        schedule = build_schedule(config, groups)
        stages = build_stages(
            config, Builder(config.model, groups, sp=config.parallel.sp, dtype=dtype_of(config)), schedule
        )
        shared = share_stages(config, stages)
        optimizer = build_optimizer(config, shared, groups)
        for stage in stages.values():
            init_weights(stage, config.train.seed)
        optimizer.reload_main()
        executor = Executor(schedule, stages, groups.pp, config.train.seed, partial(around_backward, shared))
        state = TrainState(config, stages, optimizer, Guard(config.train), loss_scale=loss_scale_of(config))
        return cls(config, groups, executor, optimizer, state)

    def step(self, number: int) -> StepResult:
        batch = synthetic(self.config, number, self.groups.dp.rank, self.groups.dp.size)
        micro = list(micro_batches(batch, self.config, torch.device("cpu")))
        clip = self.config.optimizer.clip_grad
        return train_step(
            self.executor, self.optimizer, micro,
            lr=1e-2, clip=clip, data=self.groups.dp_cp, loss_scale=self.state.loss_scale,
        )  # fmt: skip

    def run(self, steps: int = STEPS) -> Outcome:
        out = Outcome()
        for number in range(steps):
            result = self.step(number)
            out.losses.append(result.loss)
            out.norms.append(result.grad_norm)
            if number == 0:  # as clipped: the clip's norm is under test too
                out.gradients = clone(self.optimizer.gradients())
        weights = self.state.tensors()
        out.weights = clone({name: held for name, held in weights.items() if name.startswith("weights/")})
        return out


def synthetic(config: RunConfig, step: int, rank: int, ranks: int) -> StepBatch:
    """Samples that depend on the step alone: random tokens, documents of uneven length, uneven loss masks."""
    count, length = config.batch.global_, config.data.seq_length
    rng = np.random.default_rng([7, step])
    tokens = rng.integers(0, config.model.vocab_size, (count, length + 1))
    documents = np.cumsum(rng.random((count, length)) < 0.15, axis=1).astype(np.int32)
    keep = rng.random((count, 1)) * 0.9 + 0.05  # from nearly none to nearly all of a sample's tokens count
    mask = rng.random((count, length)) < keep
    starts = np.array([[np.flatnonzero(row == row[i])[0] for i in range(length)] for row in documents])
    own = slice(rank * count // ranks, (rank + 1) * count // ranks)
    return StepBatch(
        tokens=tokens[own, :-1],
        labels=tokens[own, 1:],
        loss_mask=mask[own],
        position_ids=(np.arange(length) - starts)[own],
        document_ids=documents[own],
        sample_ids=np.arange(step * count, (step + 1) * count)[own],
    )


def clone(tensors: Mapping[str, Sharded]) -> dict[str, Sharded]:
    return {
        name: Sharded(held.shape, [Box(box.offset, box.tensor.detach().clone()) for box in held.boxes])
        for name, held in tensors.items()
    }


def difference(mine: Mapping[str, Sharded], reference: Mapping[str, Sharded]) -> tuple[float, str]:
    """Largest error of any box against the reference's whole tensors, relative to each tensor's largest element."""
    worst, where = 0.0, ""
    for name, held in mine.items():
        whole = torch.zeros(held.shape, dtype=torch.float64)
        for box in reference[name].boxes:
            copy_overlap(Box((0,) * whole.dim(), whole), Box(box.offset, box.tensor.double()))
        scale = whole.abs().max().item() or 1.0
        for box in held.boxes:
            part = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))]
            error = ((box.tensor.double() - part).abs().max() / scale).item() if part.numel() else 0.0
            if not error <= worst:
                worst, where = error, name
    return worst, where


def compare(mine: Outcome, reference: Outcome) -> dict[str, float]:
    """Relative errors: of the losses, the gradient norms, the gradients of step one, the weights at the end."""
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(mine.losses, reference.losses, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(mine.norms, reference.norms, strict=True)),
        "gradients": difference(mine.gradients, reference.gradients)[0],
        "weights": difference(mine.weights, reference.weights)[0],
    }


def sweep(cases: list[dict[str, Any]], models: dict[str, dict[str, Any]]) -> list[dict[str, float]]:
    """On each of the ranks: every case in turn, by the first ranks it needs. Returns the errors of this rank's part."""
    rank, maker, references, errors = dist.get_rank(), GroupMaker(), {}, []
    for case in cases:
        raw = {**models[case["model"]], **{k: v for k, v in case.items() if k in ("parallel", "recompute", "batch")}}
        single = {k: v for k, v in raw.items() if k not in ("parallel", "recompute")}
        key = (case["model"], str(case.get("batch")))
        if key not in references:
            references[key] = Trainer.make(single, Ranks()).run()
        size = case["ranks"]
        if rank < size:
            errors.append(compare(Trainer.make(raw, Ranks(rank, size), maker).run(), references[key]))
        else:
            errors.append({})
    return errors
