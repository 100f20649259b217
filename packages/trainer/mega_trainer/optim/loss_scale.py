"""Loss scaling, without which fp16 loses small gradients (arXiv:1710.03740)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """Dynamic loss scale for fp16: factor on the loss before it is differentiated, chosen as large as the gradients
    allow.

    The scale halves when a gradient overflows and doubles after `growth_interval` consecutive steps without overflow. A
    power of two changes no bits except those that fp16 would lose.

    Attributes:
        value: factor of the next step.
        growth_interval: steps without overflow before the scale doubles.
        minimum: lower bound.
        good_steps: steps since the scale last changed.
    """

    value: float = 65536.0
    growth_interval: int = 1000
    minimum: float = 1.0
    good_steps: int = 0

    def can_fix_overflow(self, *, loss_finite: bool, norm_finite: bool) -> bool:
        """Return whether a smaller loss scale may help: the loss is finite, the gradient norm is not, and the scale is
        above its minimum.
        """
        return loss_finite and not norm_finite and self.value > self.minimum

    def update_scale(self, *, overflowed: bool) -> None:
        """Halve the scale after a step with overflow; double it after `growth_interval` steps without."""
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value = max(self.minimum, self.value / 2)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
