from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import ConfigError
from mega_trainer.config.batch_size import BatchConfig
from mega_trainer.config.lr_schedule import LRSchedule

HIGH, LOW, STEPS, BATCH = 3e-4, 3e-5, 1000, 128
SIZES = BatchConfig.model_validate({"global": BATCH})
NAMES = ["cosine", "linear", "constant", "wsd", "inverse-sqrt"]


def rate(step: float, **fields: object) -> float:
    schedule = LRSchedule.parse({"min_lr": LOW, "warmup_steps": 100, **fields})
    return schedule.make_learning_rate_curve(lr=HIGH, steps=STEPS, batch=SIZES)(round(step * BATCH))


schedules = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        "warmup_steps": st.integers(0, 300),
        "min_lr": st.floats(0, HIGH),
        "cooldown_share": st.floats(0.01, 0.6),
        "cooldown_shape": st.sampled_from(["linear", "cosine", "exponential", "minus-sqrt"]),
    }
)


@given(schedules, st.integers(0, 2 * STEPS * BATCH))
def test_it_stays_between_its_bounds_and_moves_only_the_right_way(fields, samples) -> None:
    schedule = LRSchedule.parse(fields)
    assert not list(schedule.find_run_problems(lr=HIGH, steps=STEPS, batch=SIZES))
    curve = schedule.make_learning_rate_curve(lr=HIGH, steps=STEPS, batch=SIZES)
    here, ahead = curve(samples), curve(samples + 1)
    assert 0 <= here <= HIGH * (1 + 1e-12)
    if samples < curve.warmup:
        assert ahead > here
    else:
        assert ahead <= here
        assert here >= schedule.min_lr * (1 - 1e-12)


@given(schedules, st.integers(0, 2 * STEPS * BATCH))
def test_it_makes_no_jumps(fields, samples) -> None:
    curve = LRSchedule.parse(fields).make_learning_rate_curve(lr=HIGH, steps=STEPS, batch=SIZES)
    # the steepest place is the beginning of 1 - sqrt(t): one sample of the shortest cooldown there is
    limit = HIGH * max(1 / max(1, curve.warmup), 2 / math.sqrt(max(1, curve.end - curve.start)))
    assert abs(curve(samples + 1) - curve(samples)) <= limit


@pytest.mark.parametrize("name", NAMES)
def test_warmup_is_a_straight_line_from_zero(name) -> None:
    assert rate(0, name=name) == 0
    assert rate(25, name=name) == pytest.approx(HIGH / 4)
    assert rate(100, name=name) == HIGH
    assert rate(0, name=name, warmup_steps=0) == HIGH


def test_warmup_may_start_above_zero() -> None:
    assert rate(0, warmup_init=1e-4) == 1e-4
    assert rate(25, warmup_init=1e-4) == pytest.approx(1e-4 + (HIGH - 1e-4) / 4)
    assert rate(100, warmup_init=1e-4) == HIGH


def test_warmup_may_be_given_in_samples() -> None:
    schedule = LRSchedule.parse({"warmup_samples": 1000})
    assert schedule.make_learning_rate_curve(lr=HIGH, steps=STEPS, batch=SIZES)(250) == pytest.approx(HIGH / 4)


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ("linear", 0.25),
        ("quadratic", 0.0625),
        ("cosine", (1 - math.cos(math.pi / 4)) / 2),
        ("minus-sqrt", 1 - math.sqrt(0.75)),
        ("log", math.log(25) / math.log(100)),
    ],
)
def test_warmup_rises_in_the_shape_that_is_asked_for(shape, share) -> None:
    assert rate(0, warmup_shape=shape) == 0
    assert rate(25, warmup_shape=shape) == pytest.approx(HIGH * share)
    assert rate(100, warmup_shape=shape) == HIGH
    assert rate(25, warmup_shape=shape, warmup_init=1e-4) == pytest.approx(1e-4 + (HIGH - 1e-4) * share)


def test_log_warmup_counts_steps_not_samples() -> None:
    rates = [rate(step, warmup_shape="log", warmup_steps=8) for step in (1, 2, 4, 8)]
    assert rates == pytest.approx([0, HIGH / 3, 2 * HIGH / 3, HIGH])


def test_a_delayed_warmup_ends_later_and_leaves_the_decay() -> None:
    fields = {"warmup_delay_steps": 1, "warmup_init": 1e-4}
    assert rate(0, **fields) == rate(1, **fields) == 1e-4
    assert rate(100, **fields) == pytest.approx(1e-4 + (HIGH - 1e-4) * 0.99)
    assert rate(550, **fields) == rate(550)
    assert rate(0, warmup_steps=0, warmup_delay_steps=1) == HIGH


def test_warmup_may_be_a_share_of_the_steps() -> None:
    assert rate(30, warmup_steps=0, warmup_share=0.0599) == pytest.approx(HIGH / 2)  # 59.9 steps are 60
    assert rate(25, warmup_steps=0, warmup_share=0.1, decay_steps=500) == pytest.approx(HIGH / 2)


def test_inverse_square_root_may_have_a_time_scale() -> None:
    fields = {"name": "inverse-sqrt", "timescale_steps": 300, "min_lr": 0}
    assert rate(100, **fields) == HIGH
    assert rate(1000, **fields) == pytest.approx(HIGH / 2)
    assert rate(900, **fields, warmup_steps=0) == pytest.approx(HIGH / 2)


def test_cosine() -> None:
    assert rate(550) == pytest.approx((HIGH + LOW) / 2)
    assert rate(325) == pytest.approx(LOW + (HIGH - LOW) * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(1000) == pytest.approx(LOW)
    assert rate(5000) == pytest.approx(LOW)


def test_linear() -> None:
    assert rate(325, name="linear") == pytest.approx(LOW + (HIGH - LOW) * 0.75)
    assert rate(1000, name="linear") == pytest.approx(LOW)


def test_constant() -> None:
    assert rate(999, name="constant") == rate(5000, name="constant") == HIGH


def test_inverse_square_root() -> None:
    assert rate(400, name="inverse-sqrt") == pytest.approx(HIGH / 2)
    assert rate(100 * 10_000, name="inverse-sqrt") == LOW
    assert rate(4, name="inverse-sqrt", warmup_steps=0, min_lr=0) == pytest.approx(HIGH / 2)


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("linear", 0.75),
        ("cosine", (1 + math.cos(math.pi / 4)) / 2),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus-sqrt", 0.5),
    ],
)
def test_wsd_stays_then_falls(shape, left) -> None:
    fields = {"name": "wsd", "cooldown_steps": 200, "cooldown_shape": shape}
    assert rate(800, **fields) == HIGH
    assert rate(850, **fields) == pytest.approx(LOW + (HIGH - LOW) * left)
    assert rate(1000, **fields) == pytest.approx(LOW)


def test_wsd_cools_down_in_the_last_tenth_unless_told() -> None:
    assert rate(900, name="wsd") == HIGH
    assert rate(950, name="wsd") == pytest.approx((HIGH + LOW) / 2)
    assert rate(750, name="wsd", cooldown_share=0.5) == pytest.approx((HIGH + LOW) / 2)


def test_the_end_is_absolute() -> None:
    schedule = LRSchedule.parse({"warmup_steps": 100, "decay_steps": 1000})
    short, long = (schedule.make_learning_rate_curve(lr=HIGH, steps=steps, batch=SIZES) for steps in (200, 1000))
    assert all(short(samples) == long(samples) for samples in range(0, 200 * BATCH, 777))


@pytest.mark.parametrize("steps", [100, 300, 999])
def test_consumed_samples_are_all_that_matters(steps) -> None:
    """Half the batch and twice the steps is the same curve over samples."""
    a = LRSchedule.parse({"warmup_steps": 100}).make_learning_rate_curve(lr=HIGH, steps=STEPS, batch=SIZES)
    b = LRSchedule.parse({"warmup_steps": 200}).make_learning_rate_curve(
        lr=HIGH, steps=2 * STEPS, batch=BatchConfig.model_validate({"global": BATCH // 2})
    )
    assert a(steps * BATCH) == b(steps * BATCH)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"warmup_steps": 10, "warmup_samples": 10}, "warmup_samples"),
        ({"cooldown_steps": 10, "cooldown_share": 0.1}, "cooldown_share"),
        ({"warmup_steps": 10, "warmup_share": 0.1}, "warmup_share"),
        ({"warmup_samples": 10, "warmup_share": 0.1}, "warmup_share"),
        ({"timescale_steps": 10}, "timescale_steps"),
        ({"warmup_shape": "cubic"}, "warmup_shape"),
        ({"name": "1 cosin"}, "name"),
        ({"min_lr": -1.0}, "min_lr"),
    ],
)
def test_what_contradicts_is_refused(fields, path) -> None:
    with pytest.raises(ConfigError, match=path):
        LRSchedule.parse(fields)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"min_lr": 1e-3}, "min_lr"),
        ({"warmup_init": 1e-3}, "warmup_init"),
        ({"warmup_steps": 1000}, "warmup_steps"),
        ({"warmup_samples": 1_000_000}, "warmup_samples"),
        ({"warmup_share": 0.5, "name": "wsd", "cooldown_share": 0.6}, "cooldown_share"),
        ({"warmup_steps": 100, "decay_steps": 50}, "warmup_steps"),
        ({"name": "wsd", "warmup_steps": 100, "cooldown_steps": 950}, "cooldown_steps"),
        ({"name": "wsd", "warmup_steps": 100, "cooldown_share": 0.95}, "cooldown_share"),
    ],
)
def test_what_does_not_fit_the_run_is_a_problem(fields, path) -> None:
    found = list(LRSchedule.parse(fields).find_run_problems(lr=HIGH, steps=STEPS, batch=SIZES))
    assert [problem.path for problem in found] == [path]
