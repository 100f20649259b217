"""Schedulers of transformers and Axolotl as `lr_schedule`.

Facts: transformers 5.23 (optimization.py, training_args.py), Axolotl 0.18 (core/builders/base.py, utils/schedulers.py). A curve
that `lr_schedule` does not have is left to be filled in, so that the translation does not load with another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mega_cli.moving_in.dialects import ToolDefaults
from mega_cli.moving_in.given import Given

KWARGS = "lr_scheduler_kwargs."
AXOLOTL_SHARE, AXOLOTL_MOST = 0.03, 100  # of the steps, and at most so many, without a warm-up in the file
TIMESCALE = 10_000  # of inverse_sqrt without a warm-up


@dataclass(frozen=True)
class Warmup:
    """Length of a warm-up: in steps, or as a share of steps that are not known yet."""

    steps: int | None = 0
    share: float | None = None


@dataclass(frozen=True)
class ScheduleDraft:
    """A scheduler that is being translated.

    Attributes:
        steps: steps of the run; None where it is counted in epochs.
        lr: highest learning rate.
    """

    given: Given
    lr: float
    steps: int | None
    warmup: Warmup

    def put(self, name: str, origin: str, **fields: float | int | str | None) -> None:
        """Set the schedule's name, the fields that are not None or 0, and the warm-up unless `fields` has it."""
        self.given.put("lr_schedule.name", name, origin)
        for key, value in {"warmup_steps": self.warmup.steps, "warmup_share": self.warmup.share, **fields}.items():
            self.given.put(f"lr_schedule.{key}", value or None, origin)

    def ask(self, reason: str) -> None:
        """Leave the schedule to be filled in."""
        self.given.ask("lr_schedule.name", f"{reason}; write the schedule that the run is to have")

    def number(self, key: str, default: float) -> float:
        """Return a number of lr_scheduler_kwargs."""
        found = self.given.number(f"{KWARGS}{key}")
        return default if found is None else found

    def halves(self, cycles: float = 0.5) -> bool:
        """Return whether the cosine falls once; leave the schedule open if it does not."""
        found = self.number("num_cycles", cycles)
        if found != cycles:
            self.ask(f"num_cycles = {found:g} has no equivalent: mega's cosine falls once")
        return found == cycles

    def floor(self) -> float | None:
        """Return the lowest rate of the cosines with one; leave the schedule open without one."""
        share, lowest = self.given.number(f"{KWARGS}min_lr_rate"), self.given.number(f"{KWARGS}min_lr")
        if lowest is None and share is None:
            self.ask("min_lr or min_lr_rate is not in lr_scheduler_kwargs, which the scheduler requires")
        return lowest if share is None else share * self.lr


def _cosine(schedule: ScheduleDraft, origin: str) -> None:
    if schedule.halves():
        schedule.put("cosine", origin)


def _cosine_with_restarts(schedule: ScheduleDraft, origin: str) -> None:
    if schedule.halves(1):
        schedule.put("cosine", origin)


def _cosine_with_min_lr(schedule: ScheduleDraft, origin: str) -> None:
    lowest = schedule.floor()
    if lowest is not None and schedule.halves():
        schedule.put("cosine", origin, min_lr=lowest)


def _cosine_warmup_with_min_lr(schedule: ScheduleDraft, origin: str) -> None:
    """Set the cosine whose warm-up is at the top a step early, and whose decay is at the bottom a step early."""
    lowest, first = schedule.floor(), schedule.given.number(f"{KWARGS}warmup_lr_rate")
    warmup, falls = schedule.warmup.steps, schedule.halves()
    if schedule.steps is None or not warmup:
        schedule.ask("cosine_warmup_with_min_lr requires max_steps and a warm-up of at least one step to translate")
    elif lowest is not None and falls:
        first = (1 / warmup if first is None else first) if warmup > 1 else 0
        fields = {"min_lr": lowest, "warmup_init": first * schedule.lr, "decay_steps": schedule.steps - 1}
        schedule.put("cosine", origin, **fields, warmup_steps=warmup - 1)


def _inverse_sqrt(schedule: ScheduleDraft, origin: str) -> None:
    warmup, given = schedule.warmup.steps, schedule.given.whole(f"{KWARGS}timescale")
    scale = given if warmup is None else given or warmup or TIMESCALE
    schedule.put("inverse-sqrt", origin, timescale_steps=None if scale == warmup else scale)


def _polynomial(schedule: ScheduleDraft, origin: str) -> None:
    power, end = schedule.number("power", 1.0), schedule.number("lr_end", 1e-7)
    if power == 1:
        schedule.put("linear", origin, min_lr=end)
    else:
        schedule.ask(f"power = {power:g} has no equivalent: mega has power 1, which is linear")


def _warmup_stable_decay(schedule: ScheduleDraft, origin: str) -> None:
    decay, stable = (schedule.given.whole(f"{KWARGS}num_{key}_steps") for key in ("decay", "stable"))
    shapes = [schedule.given.get(f"{KWARGS}{key}_type") for key in ("warmup", "decay")]
    lowest, warmup = schedule.number("min_lr_ratio", 0.0) * schedule.lr, schedule.warmup.steps
    rise, fall = ("minus-sqrt" if shape == "1-sqrt" else shape for shape in shapes)
    falls = schedule.halves()
    if not decay or (stable is not None and warmup is None):
        schedule.ask("num_decay_steps, and a warm-up in steps beside num_stable_steps, are required to translate it")
    elif falls:
        end = None if stable is None or warmup is None else warmup + stable + decay
        schedule.put(
            "wsd", origin, cooldown_steps=decay, cooldown_shape=fall or "cosine", decay_steps=end, min_lr=lowest,
            warmup_init=lowest if warmup != 0 else 0, warmup_shape=None if rise in (None, "linear") else rise,
        )  # fmt: skip


CURVES: Mapping[str, Callable[[ScheduleDraft, str], None]] = {
    "linear": lambda schedule, origin: schedule.put("linear", origin),
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "constant": lambda schedule, origin: schedule.put("constant", origin, warmup_steps=None, warmup_share=None),
    "constant_with_warmup": lambda schedule, origin: schedule.put("constant", origin),
    "inverse_sqrt": _inverse_sqrt,
    "polynomial": _polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
}


def put_schedule(given: Given, dialect: ToolDefaults, lr: float, steps: int | None) -> None:
    """Set `lr_schedule` to the curve of the file's scheduler, or leave it to be filled in."""
    found = given.get("lr_scheduler_type", "lr_scheduler")
    name = dialect.schedule if found is None else str(found)
    warmup = (_axolotl_warmup if dialect.program == "Axolotl" else _warmup)(given, steps)
    schedule = ScheduleDraft(given, lr, steps, warmup)
    origin = f"lr_scheduler_type {name}" if found is not None else f"{dialect.program}'s default"
    if other := given.get("deepspeed.scheduler.type"):
        schedule.ask(f"{other} of DeepSpeed's file takes the place of {name}: see mega train --from-deepspeed")
    elif isinstance(given.get("lr_scheduler_kwargs"), str):
        schedule.ask("lr_scheduler_kwargs is one text; write it as a mapping")
    elif given.get("jagged_restart_steps") is not None:
        schedule.ask("jagged_restart_steps: schedules with restarts have no equivalent")
    elif name not in CURVES:
        schedule.ask(f"{name} has no equivalent among mega's schedules")
    elif not (dialect.program == "Axolotl" and name == "cosine" and _axolotl_cosine(schedule, origin)):
        CURVES[name](schedule, origin)


def _warmup(given: Given, steps: int | None) -> Warmup:
    """Read transformers' warm-up, which is a share where it is below 1, rounded up."""
    count, share = given.number("warmup_steps"), given.number("warmup_ratio")
    if count is not None and 0 < count < 1:
        count, share = None, count
    if count:
        return Warmup(int(count))
    if not share:
        return Warmup()
    return Warmup(None, share) if steps is None else Warmup(math.ceil(steps * share))


def _axolotl_warmup(given: Given, steps: int | None) -> Warmup:
    """Read Axolotl's warm-up, which is never one step, and is rounded down where it is a share."""
    count, share = given.number("warmup_steps"), given.number("warmup_ratio")
    most = math.inf
    if count is None and share is None:
        share, most = AXOLOTL_SHARE, AXOLOTL_MOST
    if count is None and share and steps is None:
        text = f"is rounded up to whole steps; Axolotl rounds it down{', and stops at 100 steps' if most < math.inf else ''}"
        given.tell("changes meaning", text, "lr_schedule.warmup_share")
        return Warmup(None, share)
    if count is None:
        count = min(int((share or 0) * (steps or 0)), most)
    elif 0 < count < 1:
        return Warmup(None, count) if steps is None else Warmup(math.ceil(steps * count))
    return Warmup(2 if count == 1 else int(count))


def _axolotl_cosine(schedule: ScheduleDraft, origin: str) -> bool:
    """Set Axolotl's own variants of the cosine; return False where the file has none of them."""
    given = schedule.given
    share, end = given.number("cosine_min_lr_ratio"), given.number("cosine_constant_lr_ratio")
    if given.get("lr_quadratic_warmup") is True:
        schedule.put("cosine", origin, warmup_shape="quadratic")
        return True
    if not share:
        return False
    if end and schedule.steps is None:
        schedule.ask("cosine_constant_lr_ratio is a share of max_steps, which is not in the file")
        return True
    last = int(schedule.steps * end) if end and schedule.steps is not None else None
    schedule.put("cosine", origin, min_lr=share * schedule.lr, decay_steps=last)
    return True
