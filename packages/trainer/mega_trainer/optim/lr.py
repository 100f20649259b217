"""The learning rate as a pure function of how many samples have been consumed. No torch.

Positions are counted in samples (those of so many steps) and the end of the decay is absolute, so a run that
stops and resumes, also with another batch size, goes on along the same curve. The curves are Megatron-LM's, except
that `inverse-sqrt` has no end at which it falls to `min_lr`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mega_common.config import Config, Problem
from mega_trainer.batch_size import BatchConfig

Shape = Literal["linear", "cosine", "exponential", "minus-sqrt"]


class LRSchedule(Config):
    """How the learning rate rises to `optimizer.lr` and then falls towards `min_lr`.

    `wsd` (warm up, stay, decay: arXiv:2404.06395, arXiv:2405.18392) stays at the top until the cooldown, which ends
    where the other schedules' decay does.
    """

    name: Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt"] = "cosine"
    warmup_steps: NonNegativeInt = Field(0, description="steps in which the rate rises linearly from warmup_init")
    warmup_samples: NonNegativeInt | None = Field(None, description="the same in samples, instead of warmup_steps")
    warmup_init: NonNegativeFloat = Field(0.0, description="the rate that the warmup starts from")
    min_lr: NonNegativeFloat = Field(0.0, description="the rate that the decay ends at, and stays at")
    decoupled_min_lr: NonNegativeFloat | None = Field(
        None, description="the same where optimizer.decoupled_lr applies; default: min_lr"
    )
    decay_steps: PositiveInt | None = Field(None, description="step of the run that ends the decay; default: its last")
    cooldown_steps: PositiveInt | None = Field(None, description="wsd: steps of decay before its end")
    cooldown_share: float | None = Field(
        None, gt=0, le=1, description="wsd: the same as a share of all steps up to there; default: 0.1"
    )
    cooldown_shape: Shape = Field("linear", description="wsd: how the rate falls")

    def problems(self) -> Iterator[Problem]:
        """Rules between fields."""
        if self.warmup_steps and self.warmup_samples is not None:
            yield Problem("warmup_samples", "given beside warmup_steps", self.warmup_samples, "leave one of them out")
        if self.cooldown_steps and self.cooldown_share is not None:
            yield Problem("cooldown_share", "given beside cooldown_steps", self.cooldown_share, "leave one of them out")

    def run_problems(self, *, lr: float, steps: int, batch: BatchConfig) -> Iterator[Problem]:
        """What does not fit a run of `steps` steps of `batch` with the highest rate `lr`."""
        if self.min_lr > lr:
            yield Problem("min_lr", f"must be at most optimizer.lr = {lr:g}", self.min_lr)
        if self.warmup_init > lr:
            yield Problem("warmup_init", f"must be at most optimizer.lr = {lr:g}", self.warmup_init)
        if self.name in ("constant", "inverse-sqrt"):
            return
        curve = self.curve(lr=lr, steps=steps, batch=batch)
        if curve.warmup >= curve.end:
            key = "warmup_steps" if self.warmup_samples is None else "warmup_samples"
            hint = "for the beginning of a longer run, set decay_steps to that run's steps"
            rule = f"the warmup must end before the decay does, at step {self.decay_steps or steps}"
            yield Problem(key, rule, getattr(self, key), hint)
        elif self.name == "wsd" and curve.start < curve.warmup:
            key = "cooldown_steps" if self.cooldown_steps else "cooldown_share"
            yield Problem(key, "the cooldown would start before the warmup ends", getattr(self, key), "make it less")

    def curve(self, *, lr: float, steps: int, batch: BatchConfig) -> LRCurve:
        """The curve for a run of `steps` steps of `batch` with the highest rate `lr`."""
        warmup = self.warmup_samples if self.warmup_samples is not None else batch.consumed(self.warmup_steps)
        last = self.decay_steps or steps
        end = batch.consumed(last)
        start, shape = warmup, self.cooldown_shape
        if self.name == "wsd":
            share = self.cooldown_share or 0.1
            start = (
                batch.consumed(max(0, last - self.cooldown_steps))
                if self.cooldown_steps
                else end - max(1, round(share * end))
            )
        elif self.name in ("cosine", "linear"):
            shape = self.name
        return LRCurve(
            self.name, shape, self.warmup_init, lr, self.min_lr, warmup, start, end, root=max(warmup, batch.at(0))
        )


@dataclass(frozen=True)
class LRCurve:
    """A learning-rate schedule with all positions in samples. Call it with the samples consumed before a step.

    Attributes:
        name, shape: of the schedule and of its decay.
        first: the rate that the warmup starts from.
        highest, lowest: the rates between which it moves after the warmup.
        warmup: samples over which the rate rises.
        start, end: between these the rate decays.
        root: for `inverse-sqrt`, the samples up to which the rate is the highest.
    """

    name: str
    shape: Shape
    first: float
    highest: float
    lowest: float
    warmup: int
    start: int
    end: int
    root: int

    def __call__(self, samples: int) -> float:
        """The learning rate of the step that starts when `samples` samples have been consumed."""
        if samples < self.warmup:
            return self.first + (self.highest - self.first) * samples / self.warmup
        if self.name == "constant":
            return self.highest
        if self.name == "inverse-sqrt":
            return max(self.lowest, self.highest * math.sqrt(self.root / max(samples, self.root)))
        done = min(max(0.0, (samples - self.start) / (self.end - self.start)), 1.0)
        return self.lowest + (self.highest - self.lowest) * _left(self.shape, done)


def _left(shape: Shape, done: float) -> float:
    """What is left of the way down, 1 to 0, after the share `done` of the decay."""
    match shape:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        case "exponential":
            return math.exp2(1.0 - done) - 1.0
        case "minus-sqrt":
            return 1.0 - math.sqrt(done)
