"""Learning-rate schedule as a pure function of the number of consumed samples. No torch.

Positions are counted in samples and the end of the decay is absolute, so a run that stops and resumes, also with another
batch size, stays on the same curve. The curves are Megatron-LM's, except that `inverse-sqrt` has no end at which it falls
to `min_lr`. Delays, shares, shapes of the warmup and the time scale reproduce the curves of DeepSpeed, transformers and
Axolotl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, ExtensionName, StrictConfig
from mega_trainer.config.batch_size import BatchConfig

ScheduleName = Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt"]
DecayShape = Literal["linear", "cosine", "exponential", "minus-sqrt"]
WarmupShape = Literal["linear", "cosine", "minus-sqrt", "quadratic", "log"]


class LRSchedule(StrictConfig):
    """Schedule of the learning rate: warmup to `optimizer.lr`, then decay to `min_lr`.

    `wsd` (warmup-stable-decay: arXiv:2404.06395, arXiv:2405.18392) keeps the highest rate until the cooldown, which ends
    at the same step as the decay of the other schedules.
    """

    name: ScheduleName | ExtensionName = Field(
        "cosine", description="shape of the decay: cosine, linear, constant, wsd, inverse-sqrt, or one of an extension"
    )
    options: dict[str, Any] = Field({}, description="settings of an extension's schedule")
    warmup_steps: NonNegativeInt = Field(0, description="steps over which the rate rises from warmup_init")
    warmup_samples: NonNegativeInt | None = Field(
        None, description="length of the warmup in samples, instead of warmup_steps"
    )
    warmup_share: float | None = Field(
        None, gt=0, lt=1, description="warmup as a share of all steps, rounded up, instead of warmup_steps"
    )
    warmup_shape: WarmupShape = Field(
        "linear",
        description="shape of the warmup. cosine and minus-sqrt mirror those of cooldown_shape; quadratic: (step / N)^2; "
        "log: log(step) / log(N), with N = warmup_steps, the default of DeepSpeed's schedulers",
    )
    warmup_delay_steps: NonNegativeInt = Field(
        0,
        description="steps at warmup_init before the warmup, which then ends later by as many steps; the decay is unchanged. "
        "DeepSpeed's linear warmup has 1",
    )
    warmup_init: NonNegativeFloat = Field(0.0, description="learning rate at the start of the warmup")
    min_lr: NonNegativeFloat = Field(0.0, description="learning rate at the end of the decay and after it")
    decoupled_min_lr: NonNegativeFloat | None = Field(
        None, description="min_lr of the parameters with optimizer.decoupled_lr; default: min_lr"
    )
    decay_steps: PositiveInt | None = Field(None, description="step at which the decay ends; default: the last step")
    cooldown_steps: PositiveInt | None = Field(None, description="wsd: steps of the cooldown")
    cooldown_share: float | None = Field(
        None, gt=0, le=1, description="wsd: cooldown as a share of decay_steps; default: 0.1"
    )
    cooldown_shape: DecayShape = Field("linear", description="wsd: shape of the cooldown")
    timescale_steps: PositiveInt | None = Field(
        None,
        description="inverse-sqrt: steps T of sqrt(T / (T + step - warmup)); default: warmup_steps, or one step without",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield fields of the learning-rate schedule that conflict with each other or have no effect.
        Two different lengths of the warmup are an example of a conflict.
        """
        if self.warmup_steps and self.warmup_samples is not None:
            yield self._conflict("warmup_samples", "warmup_steps")
        if self.warmup_share and self.warmup_steps:
            yield self._conflict("warmup_share", "warmup_steps")
        if self.warmup_share and self.warmup_samples is not None:
            yield self._conflict("warmup_share", "warmup_samples")
        if self.cooldown_steps and self.cooldown_share is not None:
            yield self._conflict("cooldown_share", "cooldown_steps")
        if self.timescale_steps and self.name != "inverse-sqrt":
            rule = f"has no effect with lr_schedule.name = {self.name} (used by inverse-sqrt)"
            yield ConfigProblem("timescale_steps", rule, self.timescale_steps, "remove lr_schedule.timescale_steps")

    def _conflict(self, key: str, other: str) -> ConfigProblem:
        rule = f"conflicts with lr_schedule.{other} = {getattr(self, other)}"
        return ConfigProblem(key, rule, getattr(self, key), f"remove lr_schedule.{key}, or remove lr_schedule.{other}")

    def find_run_problems(self, *, lr: float, steps: int, batch: BatchConfig) -> Iterator[ConfigProblem]:
        """Yield settings of the learning-rate schedule that do not fit the length or batch sizes of a run.
        The run has `steps` steps with the batch sizes `batch` and the highest learning rate `lr`.
        """
        for key in ("min_lr", "warmup_init"):
            if (rate := getattr(self, key)) > lr:
                rule, hint = f"must be at most optimizer.lr = {lr:g}", f"set lr_schedule.{key}={lr}"
                yield ConfigProblem(key, rule, rate, hint)
        if self.name in ("constant", "inverse-sqrt"):
            return
        curve, last = self.make_learning_rate_curve(lr=lr, steps=steps, batch=batch), self.decay_steps or steps
        if curve.warmup >= curve.end:
            share = 0.1 if last >= 10 else "null"  # a share is at least one step
            shorter = {"warmup_steps": last // 10, "warmup_samples": curve.end // 10, "warmup_share": share}
            key = next((key for key in ("warmup_samples", "warmup_share") if getattr(self, key)), "warmup_steps")
            hint = f"set lr_schedule.{key}={shorter[key]}, or set lr_schedule.decay_steps to the steps of a longer run"
            rule = f"must end before the decay ends, at step {last}"
            yield ConfigProblem(key, rule, getattr(self, key), hint)
        elif self.name == "wsd" and curve.start < curve.warmup:
            key = "cooldown_steps" if self.cooldown_steps else "cooldown_share"
            yield ConfigProblem(
                key, "must start after the warmup ends", getattr(self, key), self._shorter_cooldown(curve, last, batch)
            )

    def _shorter_cooldown(self, curve: LearningRateCurve, last: int, batch: BatchConfig) -> str:
        """Return the hint with the longest cooldown that starts after the warmup."""
        warmup_steps = batch.steps_for_samples(curve.warmup)
        warmup_steps += batch.samples_after_steps(warmup_steps) < curve.warmup
        if self.cooldown_steps and warmup_steps < last:
            return f"set lr_schedule.cooldown_steps={last - warmup_steps}"
        share = math.floor(1000 * (curve.end - curve.warmup) / curve.end) / 1000
        if share and not self.cooldown_steps:
            return f"set lr_schedule.cooldown_share={share}"
        return "shorten the warmup"

    def make_learning_rate_curve(self, *, lr: float, steps: int, batch: BatchConfig) -> LearningRateCurve:
        """Return the learning-rate curve for a run of `steps` steps with the highest learning rate `lr`.
        `batch` gives the batch sizes of the run.
        """
        last = self.decay_steps or steps
        warmup_steps = math.ceil(self.warmup_share * last) if self.warmup_share else self.warmup_steps
        warmup = self.warmup_samples if self.warmup_samples is not None else batch.samples_after_steps(warmup_steps)
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
            shape = "cosine" if self.name == "cosine" else "linear"
        return LearningRateCurve(
            self.name, shape, self.warmup_init, lr, self.min_lr, warmup, start, end, rise=self.warmup_shape,
            rise_steps=warmup / batch.batch_size_after_samples(0), delay=batch.samples_after_steps(self.warmup_delay_steps),
            root=batch.samples_after_steps(self.timescale_steps) if self.timescale_steps else max(warmup, batch.batch_size_after_samples(0)),
            shift=warmup if self.timescale_steps else None,
        )  # fmt: skip


@dataclass(frozen=True)
class LearningRateCurve:
    """Learning rate as a function of the samples consumed before a step; all positions of the schedule are in samples.

    Attributes:
        name, shape: of the schedule and of its decay.
        first: rate at the start of the warmup.
        highest, lowest: rates at the start and at the end of the decay.
        warmup: samples over which the rate rises.
        start, end: of the decay.
        root: time scale of `inverse-sqrt` in samples.
        shift: samples at which `inverse-sqrt` starts to fall; None: at `root`.
        rise, rise_steps: shape of the warmup, and its length in steps of the first batch.
        delay: samples before the warmup starts.
        share: decay of an extension: remaining share after a share of the decay; None: that of `shape`.
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
    share: Callable[[float], float] | None = None

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
        share = _decay_share(self.shape, done) if self.share is None else self.share(done)
        return self.lowest + (self.highest - self.lowest) * share


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
