from __future__ import annotations

import pytest

from mega_common.errors import ConfigError
from mega_trainer.config.sections import Fp16Config
from mega_trainer.optim.loss_scale import LossScale


def test_it_halves_on_overflow_down_to_its_minimum() -> None:
    scale = LossScale(value=8.0, minimum=4.0)
    values = []
    for _ in range(3):
        scale.update_scale(overflowed=True)
        values.append(scale.value)
    assert values == [4.0, 4.0, 4.0]


def test_it_doubles_after_good_steps_in_a_row() -> None:
    scale = LossScale(value=8.0, growth_interval=3)
    values = []
    for overflowed in [False, False, True, False, False, False, False, False, False]:
        scale.update_scale(overflowed=overflowed)
        values.append(scale.value)
    assert values == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize(
    ("loss_finite", "norm_finite", "value", "mends"),
    [(True, False, 8.0, True), (True, False, 4.0, False), (False, False, 8.0, False), (True, True, 8.0, False)],
)
def test_only_a_gradient_that_overflows_is_mended(loss_finite, norm_finite, value, mends) -> None:
    assert (
        LossScale(value=value, minimum=4.0).can_fix_overflow(loss_finite=loss_finite, norm_finite=norm_finite) is mends
    )


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"initial_scale": 1000.0}, "initial_scale"),
        ({"min_scale": 0.0}, "min_scale"),
        ({"min_scale": 131072.0}, "initial_scale"),
    ],
)
def test_scales_are_powers_of_two_in_order(section, key) -> None:
    with pytest.raises(ConfigError, match=key):
        Fp16Config.parse(section)
