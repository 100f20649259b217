"""How many samples a step has, as a pure function of how many have been consumed. No torch.

While it ramps up the batch grows in equal steps, each for an equal share of the ramp-up's samples, as Megatron-LM's does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pydantic import Field, PositiveInt

from mega_common.config import Config, Problem
from mega_common.counts import MOST_BATCH_SIZES, SampleCount


class Rampup(Config):
    """A global batch that begins at `start` and grows by `increment` at a time over `samples` consumed samples."""

    start: PositiveInt = Field(description="samples of the first step")
    increment: PositiveInt = Field(description="samples by which a step grows")
    samples: PositiveInt = Field(description="consumed samples after which a step has batch.global")


class BatchStage(Config):
    """A size of the global batch for the steps that begin before a number of consumed samples."""

    until: PositiveInt = Field(description="consumed samples from which on a step has the next size")
    size: PositiveInt = Field(description="samples of a step, at most batch.global")


class BatchConfig(Config):
    """Sizes in samples: of one forward pass on one rank, and of one optimizer step over all ranks."""

    micro: SampleCount = 1
    global_: SampleCount = Field(1, alias="global")
    rampup: Rampup | None = Field(None, description="smaller steps at first; default: none")
    stages: list[BatchStage] = Field(
        [],
        description="sizes of the first steps, in order, instead of rampup; after the last one a step has batch.global",
    )

    def at(self, consumed: int) -> int:
        """Samples of the step that begins when `consumed` samples have been."""
        ramp = self.rampup
        if ramp is None or consumed > ramp.samples:
            return next((stage.size for stage in self.stages if consumed < stage.until), self.global_)
        # the quotients are Megatron's, in floating point: the batch grows at the same step, rounding included
        grown = int(consumed / (ramp.samples / self._increments))
        return min(ramp.start + grown * ramp.increment, self.global_)

    def plateaus(self, consumed: int = 0) -> Iterator[tuple[int, int]]:
        """Each size before the last, from a number of consumed samples on, and how many steps have it."""
        ramp = self.rampup
        while ramp is not None and (size := self.at(consumed)) < self.global_:
            beyond = range(1, ramp.samples // size + 2)
            steps = 1 + bisect_left(beyond, True, key=lambda n: self.at(consumed + n * size) > size)
            yield size, steps
            consumed += steps * size
        for stage in self.stages:
            if consumed < stage.until:
                steps = -(-(stage.until - consumed) // stage.size)
                yield stage.size, steps
                consumed += steps * stage.size

    def consumed(self, steps: int, samples: int = 0) -> int:
        """The samples consumed after `steps` steps, when `samples` have been before them."""
        for size, count in self.plateaus(samples):
            taken = min(count, steps)
            samples, steps = samples + taken * size, steps - taken
        return samples + steps * self.global_

    def steps(self, samples: int) -> int:
        """Whole steps that a run makes of so many samples: the inverse of `consumed`."""
        steps = 0
        for size, count in self.plateaus():
            taken = min(count, samples // size)
            samples, steps = samples - taken * size, steps + taken
            if taken < count:
                return steps
        return steps + samples // self.global_

    def problems(self) -> Iterator[Problem]:
        """Whole micro-batches, and whole increments up to the full size."""
        yield from self.uneven(self.micro, f"batch.micro = {self.micro}")
        yield from self._stage_problems()
        ramp = self.rampup
        if ramp is None:
            return
        if ramp.start >= self.global_:
            yield Problem("rampup.start", f"must be below batch.global = {self.global_}", ramp.start)
        elif (self.global_ - ramp.start) % ramp.increment:
            rule = f"must divide batch.global - start = {self.global_ - ramp.start}"
            yield Problem("rampup.increment", rule, ramp.increment)
        elif self._increments > MOST_BATCH_SIZES:
            rule = f"makes {self._increments} batch sizes, and at most {MOST_BATCH_SIZES} are supported"
            yield Problem("rampup.increment", rule, ramp.increment, "a larger increment")

    def _stage_problems(self) -> Iterator[Problem]:
        """Yield stages out of order, of more than the global batch, or beside a ramp-up."""
        if self.stages and self.rampup is not None:
            yield Problem("stages", "must not be given beside batch.rampup", hint="leave one of them out")
        before = 0
        for index, stage in enumerate(self.stages):
            if stage.until <= before:
                yield Problem(f"stages.{index}.until", f"must be above {before}, the stage before it", stage.until)
            if stage.size > self.global_:
                yield Problem(f"stages.{index}.size", f"must be at most batch.global = {self.global_}", stage.size)
            before = stage.until

    def uneven(self, unit: int, told: str) -> Iterator[Problem]:
        """The sizes that are no multiples of `unit`, which is `told`."""
        sizes = {"global": self.global_}
        if self.rampup is not None:
            sizes |= {"rampup.start": self.rampup.start, "rampup.increment": self.rampup.increment}
        sizes |= {f"stages.{index}.size": stage.size for index, stage in enumerate(self.stages)}
        for path, size in sizes.items():
            if size % unit:
                fits = max(unit, round(size / unit) * unit)
                yield Problem(path, f"must be a multiple of {told}", size, str(fits))

    @property
    def _increments(self) -> int:
        assert self.rampup is not None
        return max(1, (self.global_ - self.rampup.start) // self.rampup.increment)
