"""Samples of each step as a pure function of the samples consumed so far. No torch.

During a ramp-up the batch grows in equal increments, each after an equal share of the ramp-up's samples, as in
Megatron-LM.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pydantic import Field, PositiveInt

from mega_common.strict_config import MOST_BATCH_SIZES, ConfigProblem, SampleCount, StrictConfig


class BatchRampupConfig(StrictConfig):
    """Ramp-up of the global batch size from `start` by `increment` at a time to `batch.global`, reached at `samples`."""

    start: PositiveInt = Field(description="samples of the first step")
    increment: PositiveInt = Field(description="samples by which a step grows")
    samples: PositiveInt = Field(description="consumed samples after which a step has batch.global")


class BatchStageConfig(StrictConfig):
    """Stage of a staged global batch size: a step that begins before `until` consumed samples has `size` samples."""

    until: PositiveInt = Field(description="number of consumed samples at which the next stage begins")
    size: PositiveInt = Field(description="samples of a step, at most batch.global")


class BatchConfig(StrictConfig):
    """Batch sizes in samples: `micro` of one forward pass on one rank, `global` of an optimizer step over all ranks.

    `rampup` or `stages` make the first steps smaller than `global`.
    """

    micro: SampleCount = 1
    global_: SampleCount = Field(1, alias="global")
    rampup: BatchRampupConfig | None = Field(
        None, description="growth of the batch over the first steps; default: none"
    )
    stages: list[BatchStageConfig] = Field(
        [],
        description="batch sizes of the first steps, in order, instead of rampup; after the last stage a step has batch.global",
    )

    def batch_size_after_samples(self, consumed: int) -> int:
        """Return the global batch size, in samples, of the step that begins after `consumed` samples."""
        ramp = self.rampup
        if ramp is None or consumed > ramp.samples:
            return next((stage.size for stage in self.stages if consumed < stage.until), self.global_)
        # the quotients are Megatron's, in floating point: the batch grows at the same step, rounding included
        grown = int(consumed / (ramp.samples / self._increments))
        return min(ramp.start + grown * ramp.increment, self.global_)

    def iterate_rampup_sizes(self, consumed: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (batch size, number of steps) of each stage of `rampup` or `stages`, in order, from `consumed` samples on."""
        ramp = self.rampup
        while ramp is not None and (size := self.batch_size_after_samples(consumed)) < self.global_:
            beyond = range(1, ramp.samples // size + 2)
            steps = 1 + bisect_left(
                beyond, True, key=lambda n: self.batch_size_after_samples(consumed + n * size) > size
            )
            yield size, steps
            consumed += steps * size
        for stage in self.stages:
            if consumed < stage.until:
                steps = -(-(stage.until - consumed) // stage.size)
                yield stage.size, steps
                consumed += steps * stage.size

    def samples_after_steps(self, steps: int, samples: int = 0) -> int:
        """Return the total of consumed samples after `steps` optimizer steps that begin at `samples` samples."""
        for size, count in self.iterate_rampup_sizes(samples):
            taken = min(count, steps)
            samples, steps = samples + taken * size, steps - taken
        return samples + steps * self.global_

    def steps_for_samples(self, samples: int) -> int:
        """Return the number of whole steps that `samples` samples suffice for: the inverse of `samples_after_steps`."""
        steps = 0
        for size, count in self.iterate_rampup_sizes():
            taken = min(count, samples // size)
            samples, steps = samples - taken * size, steps + taken
            if taken < count:
                return steps
        return steps + samples // self.global_

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield batch sizes that are not multiples of `micro`, and invalid settings of the ramp-up or the stages."""
        yield from self.find_divisibility_problems(self.micro, f"batch.micro = {self.micro}")
        yield from self._stage_problems()
        yield from self._rampup_problems(self.rampup) if self.rampup is not None else ()

    def _rampup_problems(self, ramp: BatchRampupConfig) -> Iterator[ConfigProblem]:
        """Yield ramp-ups that do not reach the global batch in whole increments."""
        if ramp.start >= self.global_:
            rule, smaller = f"must be below batch.global = {self.global_}", self.global_ // 2 // self.micro * self.micro
            hint = f"set batch.rampup.start={smaller} and batch.rampup.increment={self.global_ - smaller}"
            yield ConfigProblem("rampup.start", rule, ramp.start, hint if smaller else "remove batch.rampup")
            return
        growth = self.global_ - ramp.start
        if growth % ramp.increment:
            rule = f"must divide batch.global - batch.rampup.start = {growth}"
            fits = [n for n in range(self.micro, growth + 1, self.micro) if growth % n == 0] or [growth]
            nearest = min(fits, key=lambda n: abs(n - ramp.increment))
            hint = f"set batch.rampup.increment={nearest}"
            yield ConfigProblem("rampup.increment", rule, ramp.increment, hint)
        elif self._increments > MOST_BATCH_SIZES:
            rule = f"must make at most {MOST_BATCH_SIZES} batch sizes, found {self._increments}"
            yield ConfigProblem("rampup.increment", rule, ramp.increment, f"set batch.rampup.increment={growth}")

    def _stage_problems(self) -> Iterator[ConfigProblem]:
        """Yield stages that are out of order, larger than the global batch, or combined with a ramp-up."""
        if self.stages and self.rampup is not None:
            hint = "remove batch.stages, or remove batch.rampup"
            yield ConfigProblem("stages", "conflicts with batch.rampup", hint=hint)
        before = 0
        for index, stage in enumerate(self.stages):
            path = f"stages.{index}"
            if stage.until <= before:
                rule = f"must be larger than {before}, that of the stage before"
                yield ConfigProblem(f"{path}.until", rule, stage.until, f"set batch.{path}.until={before + 1}")
            if stage.size > self.global_:
                rule = f"must be at most batch.global = {self.global_}"
                yield ConfigProblem(f"{path}.size", rule, stage.size, f"set batch.{path}.size={self.global_}")
            before = stage.until

    def find_divisibility_problems(self, unit: int, description: str) -> Iterator[ConfigProblem]:
        """Yield a problem for each configured batch size that is not a multiple of `unit` samples.
        `description` says in the message where that number comes from.
        """
        sizes = {"global": self.global_}
        if self.rampup is not None:
            sizes |= {"rampup.start": self.rampup.start, "rampup.increment": self.rampup.increment}
        sizes |= {f"stages.{index}.size": stage.size for index, stage in enumerate(self.stages)}
        for path, size in sizes.items():
            if size % unit:
                fits = max(unit, round(size / unit) * unit)
                yield ConfigProblem(path, f"must be a multiple of {description}", size, f"set batch.{path}={fits}")

    @property
    def _increments(self) -> int:
        assert self.rampup is not None
        return max(1, (self.global_ - self.rampup.start) // self.rampup.increment)
