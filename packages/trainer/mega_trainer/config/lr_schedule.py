"""Learning-rate schedule as a pure function of the number of consumed samples. No torch.

Positions are counted in samples (those of so many steps) and the end of the decay is absolute, so a run that
stops and resumes, also with another batch size, goes on along the same curve. The curves are Megatron-LM's, except
that `inverse-sqrt` has no end at which it falls to `min_lr`. Delays, shares, shapes of the warmup and the time scale are
there for the curves of DeepSpeed, transformers and Axolotl.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, StrictConfig
from mega_trainer.config.batch_size import BatchConfig

DecayShape = Literal["linear", "cosine", "exponential", "minus-sqrt"]
WarmupShape = Literal["linear", "cosine", "minus-sqrt", "quadratic", "log"]


class LRSchedule(StrictConfig):
    """Schedule of the learning rate: the rise to `optimizer.lr`, and the decay towards `min_lr`.

    `wsd` (warm up, stay, decay: arXiv:2404.06395, arXiv:2405.18392) stays at the top until the cooldown, which ends
    where the other schedules' decay does.
    """

    name: Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt"] = "cosine"
    warmup_steps: NonNegativeInt = Field(0, description="steps in which the rate rises from warmup_init")
    warmup_samples: NonNegativeInt | None = Field(None, description="the same in samples, instead of warmup_steps")
    warmup_share: float | None = Field(
        None, gt=0, lt=1, description="warmup as a share of all steps, rounded up, instead of warmup_steps"
    )
    warmup_shape: WarmupShape = Field(
        "linear",
        description="shape of the rise. cosine and minus-sqrt mirror those of cooldown_shape; quadratic: (step / N)^2; "
        "log: log(step) / log(N), with N = warmup_steps, as DeepSpeed's schedulers rise by default",
    )
    warmup_delay_steps: NonNegativeInt = Field(
        0,
        description="steps at warmup_init before the rise, which ends as many steps later; the decay does not move. "
        "DeepSpeed's linear warmup has 1",
    )
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
    cooldown_shape: DecayShape = Field("linear", description="wsd: how the rate falls")
    timescale_steps: PositiveInt | None = Field(
        None,
        description="inverse-sqrt: steps T of sqrt(T / (T + step - warmup)); default: warmup_steps, or one step without",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules between fields."""
        if self.warmup_steps and self.warmup_samples is not None:
            yield ConfigProblem(
                "warmup_samples", "given beside warmup_steps", self.warmup_samples, "leave one of them out"
            )
        if self.warmup_share and (self.warmup_steps or self.warmup_samples is not None):
            yield ConfigProblem(
                "warmup_share",
                "given beside warmup_steps or warmup_samples",
                self.warmup_share,
                "leave one of them out",
            )
        if self.timescale_steps and self.name != "inverse-sqrt":
            yield ConfigProblem(
                "timescale_steps", f"is read by inverse-sqrt, not by {self.name}", self.timescale_steps, "leave it out"
            )
        if self.cooldown_steps and self.cooldown_share is not None:
            yield ConfigProblem(
                "cooldown_share", "given beside cooldown_steps", self.cooldown_share, "leave one of them out"
            )

    def find_run_problems(self, *, lr: float, steps: int, batch: BatchConfig) -> Iterator[ConfigProblem]:
        """Yield settings that do not fit a run of `steps` steps of `batch` with the highest rate `lr`."""
        if self.min_lr > lr:
            yield ConfigProblem("min_lr", f"must be at most optimizer.lr = {lr:g}", self.min_lr)
        if self.warmup_init > lr:
            yield ConfigProblem("warmup_init", f"must be at most optimizer.lr = {lr:g}", self.warmup_init)
        if self.name in ("constant", "inverse-sqrt"):
            return
        curve = self.make_curve(lr=lr, steps=steps, batch=batch)
        if curve.warmup >= curve.end:
            key = next((key for key in ("warmup_samples", "warmup_share") if getattr(self, key)), "warmup_steps")
            hint = "for the beginning of a longer run, set decay_steps to that run's steps"
            rule = f"the warmup must end before the decay does, at step {self.decay_steps or steps}"
            yield ConfigProblem(key, rule, getattr(self, key), hint)
        elif self.name == "wsd" and curve.start < curve.warmup:
            key = "cooldown_steps" if self.cooldown_steps else "cooldown_share"
            yield ConfigProblem(
                key, "the cooldown would start before the warmup ends", getattr(self, key), "make it less"
            )

    def make_curve(self, *, lr: float, steps: int, batch: BatchConfig) -> LearningRateCurve:
        """Return the curve for a run of `steps` steps of `batch` with the highest rate `lr`."""
        last = self.decay_steps or steps
        risen = math.ceil(self.warmup_share * last) if self.warmup_share else self.warmup_steps
        warmup = self.warmup_samples if self.warmup_samples is not None else batch.samples_after_steps(risen)
        end = batch.samples_after_steps(last)
        start, shape = warmup, self.cooldown_shape
        if self.name == "wsd":
            share = self.cooldown_share or 0.1
            start = (
                batch.samples_after_steps(max(0, last - self.cooldown_steps))
                if self.cooldown_steps
                else end - max(1, round(share * end))
            )
        elif self.name in ("cosine", "linear"):
            shape = self.name
        return LearningRateCurve(
            self.name, shape, self.warmup_init, lr, self.min_lr, warmup, start, end, rise=self.warmup_shape,
            rise_steps=warmup / batch.batch_size_at(0), delay=batch.samples_after_steps(self.warmup_delay_steps),
            root=batch.samples_after_steps(self.timescale_steps) if self.timescale_steps else max(warmup, batch.batch_size_at(0)),
            shift=warmup if self.timescale_steps else None,
        )  # fmt: skip


@dataclass(frozen=True)
class LearningRateCurve:
    """Learning-rate schedule with all positions in samples. Call it with the samples consumed before a step.

    Attributes:
        name, shape: of the schedule and of its decay.
        first: the rate that the warmup starts from.
        highest, lowest: the rates between which it moves after the warmup.
        warmup: samples over which the rate rises.
        start, end: between these the rate decays.
        root: time scale of `inverse-sqrt` in samples, up to which the rate is the highest.
        shift: samples at which `inverse-sqrt` begins to fall; None: at `root`.
        rise, rise_steps: shape of the warmup, and its length in steps of the first batch.
        delay: samples before the rise begins.
    """

    name: str
    shape: DecayShape
    first: float
    highest: float
    lowest: float
    warmup: int
    start: int
    end: int
    root: int
    shift: int | None = None
    rise: WarmupShape = "linear"
    rise_steps: float = 0.0
    delay: int = 0

    def __call__(self, samples: int) -> float:
        """Return the learning rate of the step that starts when `samples` samples have been consumed."""
        if samples < self.warmup + (self.delay if self.warmup else 0):
            passed, rise = max(0, samples - self.delay), self.highest - self.first
            if self.rise == "linear":
                return self.first + rise * passed / self.warmup
            return self.first + rise * _warmup_share(self.rise, passed / self.warmup, self.rise_steps)
        if self.name == "constant":
            return self.highest
        if self.name == "inverse-sqrt":
            since = samples if self.shift is None else samples - self.shift + self.root
            return max(self.lowest, self.highest * math.sqrt(self.root / max(since, self.root)))
        done = min(max(0.0, (samples - self.start) / (self.end - self.start)), 1.0)
        return self.lowest + (self.highest - self.lowest) * _decay_share(self.shape, done)


def _warmup_share(shape: WarmupShape, done: float, steps: float) -> float:
    """Return the share of the rise, 0 to 1, after the share `done` of a warmup of `steps` steps."""
    match shape:
        case "quadratic":
            return done * done
        case "log":  # log(step) / log(steps), for step = done * steps
            return max(0.0, 1.0 + math.log(done) / math.log(steps)) if done > 0 and steps > 1 else 0.0
        case _:
            return _decay_share(shape, 1.0 - done)


def _decay_share(shape: DecayShape, done: float) -> float:
    """Return the remaining share of the decay, 1 to 0, after the share `done` of it."""
    match shape:
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        case "exponential":
            return math.exp2(1.0 - done) - 1.0
        case "minus-sqrt":
            return 1.0 - math.sqrt(done)
