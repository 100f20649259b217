"""Elementwise optimizers, Lion, SGD and those of extensions, and the update rule that applies one to each slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mega_trainer.optim.optimizer_slots import OptimizerOffloadTransfers, OptimizerSlot


class ElementwiseUpdate(Protocol):
    """Interface of an optimizer that updates each element of the weights from its gradient and its own state.

    The tensors are flat slices of the weights, so an update must not depend on their shape. That gives it ZeRO, offload to
    host memory, checkpoints and resharding.

    Attributes:
        state: names of the state tensors, which checkpoints have as `optimizer/NAME`; all begin with zeros.
    """

    state: Sequence[str]

    def update(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """Update `weight` [n] and the tensors of `state` [n] in place from the gradient `grad` [n], all fp32 or fp64.

        Args:
            weight_decay: 0 for norms and biases.
            step: number of this update, from 1.
        """


class LionUpdate:
    """Lion update (arXiv:2302.06675), by the sign of interpolated momentum and gradient.
    Weight decay is decoupled.
    """

    state: Sequence[str] = ("exp_avg",)

    def __init__(self, betas: tuple[float, float]) -> None:
        self.betas = betas

    def update(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """Update `weight` [n] and its momentum [n] in place from the gradient `grad` [n], all fp32 or fp64."""
        momentum, (beta1, beta2) = state["exp_avg"], self.betas
        direction = momentum.lerp(grad, 1 - beta1).sign_()
        weight.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
        momentum.lerp_(grad, 1 - beta2)


class SgdUpdate:
    """Stochastic gradient descent as in torch.optim.SGD: weight decay is added to the gradient, before the momentum."""

    def __init__(self, momentum: float, *, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov
        self.state: Sequence[str] = ("momentum_buffer",) if momentum else ()

    def update(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, lr: float, weight_decay: float, step: int
    ) -> None:
        """Update `weight` [n] and its momentum [n] in place from the gradient `grad` [n], all fp32 or fp64."""
        gradient = grad.add(weight, alpha=weight_decay)
        if self.momentum:
            momentum = state["momentum_buffer"].mul_(self.momentum).add_(gradient)
            gradient = gradient.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        weight.sub_(gradient, alpha=lr)


class ElementwiseUpdateRule:
    """Update of the main weights of each slot by an elementwise optimizer, such as Lion or SGD.

    Args:
        slots: slots to update.
        rule: update of the elements of one slot.
        weight_decay: weight decay of matrices.
    """

    def __init__(self, slots: Sequence[OptimizerSlot], *, rule: ElementwiseUpdate, weight_decay: float) -> None:
        self.slots, self.update_count = list(slots), 0
        self._rule, self._weight_decay = rule, weight_decay
        self._state = [{name: torch.zeros_like(slot.main) for name in rule.state} for slot in slots]

    @torch.no_grad()
    def update_slots(self, transfers: OptimizerOffloadTransfers, lr: float, decoupled_lr: float | None = None) -> None:
        """Update the main weights of all shards (slots), and their state, at rate `lr`, or `decoupled_lr` if decoupled.
        Decoupled param groups are the embedding and the output layer.
        """
        self.update_count += 1
        for slot, state in zip(self.slots, self._state, strict=True):
            rate = decoupled_lr if slot.kind.decoupled and decoupled_lr is not None else lr
            with transfers.overlap_copies_with_update([slot]):
                self._rule.update(
                    slot.main,
                    slot.grads,
                    state,
                    lr=rate * slot.kind.lr_factor,
                    weight_decay=self._weight_decay if slot.kind.decay else 0.0,
                    step=self.update_count,
                )

    def state_tensors(self) -> dict[str, list[tuple[OptimizerSlot, Tensor]]]:
        """Return the optimizer state, {name: one tensor for each parameter shard (slot)}."""
        return {
            name: [(slot, state[name]) for slot, state in zip(self.slots, self._state, strict=True)]
            for name in self._rule.state
        }
