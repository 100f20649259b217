"""Optimizer `my_extension`: Lion (arXiv:2302.06675). Change it to yours.

    w = w - lr (sign(beta1 m + (1 - beta1) g) + weight_decay w)        m = beta2 m + (1 - beta2) g

The tensors are flat slices of the weights, so the update of an element depends on its own gradient and state alone. ZeRO,
checkpoints, resharding and offload to host memory need nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mega_trainer.extend import Extension, Optimizer, OptimizerConfig, StrictConfig


class LionOptions(StrictConfig):
    """Settings of `optimizer.options` in run.yaml."""

    beta1: float = 0.9
    beta2: float = 0.99


class Lion:
    """Lion optimizer for flat slices of the weights; checkpoints have its state by the names in `state`."""

    state = ("momentum",)

    def __init__(self, settings: OptimizerConfig, options: LionOptions) -> None:
        self.options = options

    def update(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """Update `weight` [n] and its state [n] in place; `step` counts from 1, and all state begins with zeros."""
        momentum = state["momentum"]
        direction = momentum.lerp(grad, 1 - self.options.beta1).sign_()
        momentum.lerp_(grad, 1 - self.options.beta2)
        weight.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, optimizers={"my_extension": Optimizer(Lion, LionOptions)}
)
