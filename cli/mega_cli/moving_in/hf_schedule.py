"""Schedulers of transformers and Axolotl as `lr_schedule`.

Facts: transformers 5.23 (optimization.py, training_args.py), Axolotl 0.18 (core/builders/base.py, utils/schedulers.py). A curve
that `lr_schedule` does not support is left to be filled in, so that `mega train` rejects the file until it is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mega_cli.moving_in.hf_objective import TrainingProgramDefaults
from mega_cli.moving_in.settings_file import ForeignSettingsFile

KWARGS = "lr_scheduler_kwargs."
AXOLOTL_SHARE, AXOLOTL_MOST = 0.03, 100  # default warm-up: fraction of the steps, and the maximum
TIMESCALE = 10_000  # default of inverse_sqrt without a warm-up


@dataclass(frozen=True)
class WarmupLength:
    """Length of a learning-rate warm-up: in steps, or as a fraction of an unknown number of steps."""

    steps: int | None = 0
    share: float | None = None


@dataclass(frozen=True)
class LrScheduleDraft:
    """Learning-rate scheduler of a HuggingFace-style settings file, under translation to `lr_schedule` of run.yaml.

    Attributes:
        steps: steps of the run; None if its length is in epochs.
        lr: highest learning rate.
    """

    given: ForeignSettingsFile
    lr: float
    steps: int | None
    warmup: WarmupLength

    def set_schedule(self, name: str, origin: str, **fields: float | int | str | None) -> None:
        """Set `lr_schedule` of run.yaml: its name, fields and warm-up.
        The name is `lr_schedule.name`. The `fields` that are not None or 0 are set, and the warm-up unless `fields` has
        it; `origin` is the key's comment.
        """
        self.given.set_key("lr_schedule.name", name, origin)
        for key, value in {"warmup_steps": self.warmup.steps, "warmup_share": self.warmup.share, **fields}.items():
            self.given.set_key(f"lr_schedule.{key}", value or None, origin)

    def leave_open(self, reason: str) -> None:
        """Leave `lr_schedule` of run.yaml for the user to fill in, with a note of the reason."""
        self.given.leave_open("lr_schedule.name", f"{reason}; write the schedule of the run")

    def take_number(self, key: str, default: float) -> float:
        """Return a number of `lr_scheduler_kwargs` by key, else `default`; the key then counts as translated."""
        found = self.given.take_number(f"{KWARGS}{key}")
        return default if found is None else found

    def has_num_cycles(self, cycles: float = 0.5) -> bool:
        """Return whether num_cycles of `lr_scheduler_kwargs` is `cycles` or absent; if not, leave the schedule open.
        With it the cosine falls once, as mega's does. An open `lr_schedule` is for the user to fill in.
        """
        found = self.take_number("num_cycles", cycles)
        if found != cycles:
            self.leave_open(f"num_cycles = {found:g} has no equivalent: mega's cosine falls once")
        return found == cycles

    def minimum_learning_rate(self) -> float | None:
        """Return the minimum learning rate that a cosine schedule requires; without one, leave the schedule open, return None.
        It is `min_lr_rate` times the learning rate, else `min_lr`, of `lr_scheduler_kwargs`. An open `lr_schedule` is
        for the user to fill in.
        """
        share, lowest = self.given.take_number(f"{KWARGS}min_lr_rate"), self.given.take_number(f"{KWARGS}min_lr")
        if lowest is None and share is None:
            self.leave_open("min_lr or min_lr_rate is not in lr_scheduler_kwargs, which the scheduler requires")
        return lowest if share is None else share * self.lr


def _cosine(schedule: LrScheduleDraft, origin: str) -> None:
    if schedule.has_num_cycles():
        schedule.set_schedule("cosine", origin)


def _cosine_with_restarts(schedule: LrScheduleDraft, origin: str) -> None:
    if schedule.has_num_cycles(1):
        schedule.set_schedule("cosine", origin)


def _cosine_with_min_lr(schedule: LrScheduleDraft, origin: str) -> None:
    lowest = schedule.minimum_learning_rate()
    if lowest is not None and schedule.has_num_cycles():
        schedule.set_schedule("cosine", origin, min_lr=lowest)


def _cosine_warmup_with_min_lr(schedule: LrScheduleDraft, origin: str) -> None:
    """Set the cosine whose warm-up and decay both end one step early."""
    lowest, first = schedule.minimum_learning_rate(), schedule.given.take_number(f"{KWARGS}warmup_lr_rate")
    warmup, falls = schedule.warmup.steps, schedule.has_num_cycles()
    if schedule.steps is None or not warmup:
        schedule.leave_open(
            "cosine_warmup_with_min_lr requires max_steps and a warm-up of at least one step to translate"
        )
    elif lowest is not None and falls:
        first = (1 / warmup if first is None else first) if warmup > 1 else 0
        fields = {"min_lr": lowest, "warmup_init": first * schedule.lr, "decay_steps": schedule.steps - 1}
        schedule.set_schedule("cosine", origin, **fields, warmup_steps=warmup - 1)


def _inverse_sqrt(schedule: LrScheduleDraft, origin: str) -> None:
    warmup, given = schedule.warmup.steps, schedule.given.take_integer(f"{KWARGS}timescale")
    scale = given if warmup is None else given or warmup or TIMESCALE
    schedule.set_schedule("inverse-sqrt", origin, timescale_steps=None if scale == warmup else scale)


def _polynomial(schedule: LrScheduleDraft, origin: str) -> None:
    power, end = schedule.take_number("power", 1.0), schedule.take_number("lr_end", 1e-7)
    if power == 1:
        schedule.set_schedule("linear", origin, min_lr=end)
    else:
        schedule.leave_open(f"power = {power:g} has no equivalent: mega has power 1, which is linear")


def _warmup_stable_decay(schedule: LrScheduleDraft, origin: str) -> None:
    decay, stable = (schedule.given.take_integer(f"{KWARGS}num_{key}_steps") for key in ("decay", "stable"))
    shapes = [schedule.given.take_value(f"{KWARGS}{key}_type") for key in ("warmup", "decay")]
    lowest, warmup = schedule.take_number("min_lr_ratio", 0.0) * schedule.lr, schedule.warmup.steps
    rise, fall = ("minus-sqrt" if shape == "1-sqrt" else shape for shape in shapes)
    falls = schedule.has_num_cycles()
    if not decay or (stable is not None and warmup is None):
        schedule.leave_open(
            "warmup_stable_decay requires num_decay_steps, and with num_stable_steps a warm-up in steps"
        )
    elif falls:
        end = None if stable is None or warmup is None else warmup + stable + decay
        schedule.set_schedule(
            "wsd", origin, cooldown_steps=decay, cooldown_shape=fall or "cosine", decay_steps=end, min_lr=lowest,
            warmup_init=lowest if warmup != 0 else 0, warmup_shape=None if rise in (None, "linear") else rise,
        )  # fmt: skip


CURVES: Mapping[str, Callable[[LrScheduleDraft, str], None]] = {
    "linear": lambda schedule, origin: schedule.set_schedule("linear", origin),
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "constant": lambda schedule, origin: schedule.set_schedule(
        "constant", origin, warmup_steps=None, warmup_share=None
    ),
    "constant_with_warmup": lambda schedule, origin: schedule.set_schedule("constant", origin),
    "inverse_sqrt": _inverse_sqrt,
    "polynomial": _polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
}


def translate_hf_lr_schedule(
    given: ForeignSettingsFile, dialect: TrainingProgramDefaults, lr: float, steps: int | None
) -> None:
    """Set `lr_schedule` of run.yaml to the curve of a transformers or Axolotl scheduler, or leave it for the user to fill in."""
    found = given.take_value("lr_scheduler_type", "lr_scheduler")
    name = dialect.schedule if found is None else str(found)
    warmup = (_axolotl_warmup if dialect.program == "Axolotl" else _warmup)(given, steps)
    schedule = LrScheduleDraft(given, lr, steps, warmup)
    origin = f"lr_scheduler_type {name}" if found is not None else f"{dialect.program}'s default"
    if other := given.take_value("deepspeed.scheduler.type"):
        schedule.leave_open(f"{other} of DeepSpeed's file replaces {name}: see mega train --from-deepspeed")
    elif isinstance(given.take_value("lr_scheduler_kwargs"), str):
        schedule.leave_open("lr_scheduler_kwargs must be a mapping, found a text")
    elif given.take_value("jagged_restart_steps") is not None:
        schedule.leave_open("jagged_restart_steps: schedules with restarts have no equivalent")
    elif name not in CURVES:
        schedule.leave_open(f"{name} has no equivalent among mega's schedules")
    elif not (dialect.program == "Axolotl" and name == "cosine" and _axolotl_cosine(schedule, origin)):
        CURVES[name](schedule, origin)


def _warmup(given: ForeignSettingsFile, steps: int | None) -> WarmupLength:
    """Read transformers' warm-up, which is a fraction if below 1, rounded up."""
    count, share = given.take_number("warmup_steps"), given.take_number("warmup_ratio")
    if count is not None and 0 < count < 1:
        count, share = None, count
    if count:
        return WarmupLength(int(count))
    if not share:
        return WarmupLength()
    return WarmupLength(None, share) if steps is None else WarmupLength(math.ceil(steps * share))


def _axolotl_warmup(given: ForeignSettingsFile, steps: int | None) -> WarmupLength:
    """Read Axolotl's warm-up, which is never one step, and is rounded down if it is a fraction."""
    count, share = given.take_number("warmup_steps"), given.take_number("warmup_ratio")
    most = math.inf
    if count is None and share is None:
        share, most = AXOLOTL_SHARE, AXOLOTL_MOST
    if count is None and share and steps is None:
        text = f"is rounded up to whole steps; Axolotl rounds it down{', and stops at 100 steps' if most < math.inf else ''}"
        given.add_note("changes meaning", text, "lr_schedule.warmup_share")
        return WarmupLength(None, share)
    if count is None:
        count = min(int((share or 0) * (steps or 0)), most)
    elif 0 < count < 1:
        return WarmupLength(None, count) if steps is None else WarmupLength(math.ceil(steps * count))
    return WarmupLength(2 if count == 1 else int(count))


def _axolotl_cosine(schedule: LrScheduleDraft, origin: str) -> bool:
    """Set Axolotl's variants of the cosine; return False if the file has none."""
    given = schedule.given
    share, end = given.take_number("cosine_min_lr_ratio"), given.take_number("cosine_constant_lr_ratio")
    if given.take_value("lr_quadratic_warmup") is True:
        schedule.set_schedule("cosine", origin, warmup_shape="quadratic")
        return True
    if not share:
        return False
    if end and schedule.steps is None:
        schedule.leave_open("cosine_constant_lr_ratio is a fraction of max_steps, which is not in the file")
        return True
    last = int(schedule.steps * end) if end and schedule.steps is not None else None
    schedule.set_schedule("cosine", origin, min_lr=share * schedule.lr, decay_steps=last)
    return True
