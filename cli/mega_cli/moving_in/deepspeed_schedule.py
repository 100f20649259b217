"""DeepSpeed's schedulers as `lr_schedule`. Facts: DeepSpeed 0.19 (runtime/lr_schedules.py, runtime/engine.py).

The engine advances a scheduler after a step, and the scheduler counts from -1: step k of a run (from 0) has the rate of the
scheduler's iteration k - 1, and step 0 has the lowest rate. So the logarithmic warm-up of N steps is log(k) / log(N), a
linear warm-up starts one step late, and the linear decay of WarmupDecayLR ends one step after total_num_steps.
"""

from __future__ import annotations

from mega_cli.moving_in.settings_file import SettingsFile

PARAMS = "scheduler.params."
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "wsd", "WarmupCosineLR": "cosine"}
WARMUP_STEPS, DECAY_RATE, COSINE_FLOOR = 1000, 1e-3, 1e-4  # DeepSpeed's defaults


def set_deepspeed_schedule(given: SettingsFile, lr: float | None) -> None:
    """Set `lr_schedule` of run.yaml to the curve of a DeepSpeed file's scheduler, or leave it for the user to fill in.

    Args:
        lr: learning rate of the optimizer; None if the training program sets it.
    """
    name = given.take_value("scheduler.type")
    if name is None:
        text = "the file has no scheduler; if the training program creates one, write it here"
        given.add_note("open", text, "lr_schedule.name: constant")
        given.set_key("lr_schedule.name", "constant", "no scheduler")
        return
    keys = (
        "warmup_num_steps",
        "total_num_steps",
        "warmup_max_lr",
        "warmup_min_lr",
        "warmup_min_ratio",
        "cos_min_ratio",
    )
    auto = [f"{PARAMS}{key}" for key in keys if given.is_automatic(f"{PARAMS}{key}")]
    if name not in SCHEDULES or auto:
        reason = f"{', '.join(auto)}: auto" if auto else f"{name} has no equivalent among mega's schedules"
        given.leave_open("lr_schedule.name", f"{reason}; write the schedule of the run")
        return
    _put_warmup(given)
    if name == "WarmupCosineLR":
        _put_cosine(given, lr)
    else:
        _set_warmup_rates(given, name)


def _put_warmup(given: SettingsFile) -> None:
    steps = given.take_integer(f"{PARAMS}warmup_num_steps")
    given.set_key("lr_schedule.warmup_steps", max(2, WARMUP_STEPS if steps is None else steps), "warmup_num_steps")
    if given.take_value(f"{PARAMS}warmup_type") == "linear":
        given.set_key("lr_schedule.warmup_delay_steps", 1, "DeepSpeed's first step is before its schedule")
    else:
        given.set_key("lr_schedule.warmup_shape", "log", "warmup_type, by default log")


def _set_warmup_rates(given: SettingsFile, name: str) -> None:
    """Set the rates of WarmupLR and WarmupDecayLR: the second decays to the lowest rate of its warm-up."""
    lowest, highest = given.take_number(f"{PARAMS}warmup_min_lr"), given.take_number(f"{PARAMS}warmup_max_lr")
    if highest is None and name == "WarmupDecayLR":
        highest = DECAY_RATE
    given.set_key("optimizer.lr", highest, "warmup_max_lr")
    given.set_key("lr_schedule.warmup_init", lowest or None, "warmup_min_lr")
    given.set_key("lr_schedule.name", SCHEDULES[name], f"scheduler.type {name}")
    if name == "WarmupLR":
        return
    given.set_key("lr_schedule.min_lr", lowest or None, "warmup_min_lr")
    _set_decay_end(given, late=1)


def _put_cosine(given: SettingsFile, lr: float | None) -> None:
    shares = {
        "warmup_init": given.take_number(f"{PARAMS}warmup_min_ratio"),
        "min_lr": given.take_number(f"{PARAMS}cos_min_ratio"),
    }
    if lr is None:
        given.leave_open("lr_schedule.name", "its rates are fractions of optimizer.lr, which is not in the file")
        return
    given.set_key("lr_schedule.name", "cosine", "scheduler.type WarmupCosineLR")
    floor = COSINE_FLOOR if shares["min_lr"] is None else shares["min_lr"]
    given.set_key("lr_schedule.min_lr", lr * floor or None, "cos_min_ratio")
    if shares["warmup_init"]:
        given.set_key("lr_schedule.warmup_init", lr * shares["warmup_init"], "warmup_min_ratio")
        text = "is also the rate of the first step; DeepSpeed's first step has the rate 0"
        given.add_note("changes meaning", text, "lr_schedule.warmup_init")
    _set_decay_end(given, late=0)


def _set_decay_end(given: SettingsFile, *, late: int) -> None:
    """Set the end of the decay, and of WarmupDecayLR (`late` = 1) its length: it begins a step after the warm-up."""
    total, warmup = given.take_integer(f"{PARAMS}total_num_steps"), given.current_value("lr_schedule.warmup_steps")
    if total is None or total <= warmup:
        reason = "is not in the file" if total is None else f"= {total} must be above the warm-up of {warmup} steps"
        given.leave_open("lr_schedule.decay_steps", f"scheduler.params.total_num_steps {reason}")
        return
    given.set_key("lr_schedule.decay_steps", total + late, "total_num_steps")
    given.set_key("lr_schedule.cooldown_steps", total - warmup if late else None, "total_num_steps - warmup_num_steps")
