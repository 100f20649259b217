"""Schedule-free AdamW (arXiv:2405.15682): no learning-rate decay, and no length of training that is known in advance.

    y = (1 - beta1) z + beta1 x          the weights of the model, where the gradient is taken
    z = z - lr (gradient / sqrt(v) + weight_decay y)
    x = (1 - c) x + c z                  c = 1 / step: x is the mean of all z

The trainer keeps y, and this optimizer z and v; x follows from both. Use it with `lr_schedule: {name: constant}` and a warmup.
The method evaluates x. The weights that a run validates and exports are y, which come near x as the steps z become small
against their mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mega_trainer.extend import Extension, Optimizer, StrictConfig


class ScheduleFreeOptions(StrictConfig):
    """Settings of `optimizer.options`."""

    beta1: float = 0.9  # share of the mean x in y
    beta2: float = 0.99
    eps: float = 1e-8


class ScheduleFreeAdamW:
    """Update of flat slices of the weights."""

    state = ("z", "exp_avg_sq")

    def __init__(self, settings: object, options: ScheduleFreeOptions) -> None:
        self.options = options

    def update(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """Update `weight` (y) and the state [n] in place; see `ElementwiseUpdate`."""
        beta1, beta2, z, second = self.options.beta1, self.options.beta2, state["z"], state["exp_avg_sq"]
        if step == 1:
            z.copy_(weight)  # x = y = z at the start
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = (second / (1 - beta2**step)).sqrt_().add_(self.options.eps)
        direction = (grad / scale).add_(weight, alpha=weight_decay)
        mean = (weight - (1 - beta1) * z).div_(beta1)  # x
        z.sub_(direction, alpha=lr)
        mean.lerp_(z, 1 / step)
        weight.copy_(mean.lerp_(z, 1 - beta1))


EXTENSION = Extension(
    name="schedule-free", version="1.0", api=1,
    optimizers={"schedule_free_adamw": Optimizer(ScheduleFreeAdamW, ScheduleFreeOptions)},
)  # fmt: skip
