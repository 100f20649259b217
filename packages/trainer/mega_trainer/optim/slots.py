"""What an optimizer works on: stretches of weights that this rank owns, whichever way they are shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_ckpt.pieces import Sharded, boxes_of_range, merge
from mega_trainer.parallel.shared import Buffer, Kind, Shard


@dataclass(eq=False)
class Slot:
    """One shard with the tensors that the optimizer works on.

    Attributes:
        kind, sharded, shard: as in `Buffer`.
        main: what is updated: the shard's own weights, or a copy of them in fp32 or in host memory.
        grads: the gradient, where `main` is: the shard's own, or a copy.
    """

    kind: Kind
    sharded: bool
    shard: Shard
    main: Tensor
    grads: Tensor

    @classmethod
    def of(cls, buffer: Buffer, shard: Shard, *, offload: bool = False) -> Slot:
        """Weights in low precision get main weights in fp32; with `offload` all get copies in host memory."""
        weights, grads = shard.weights.detach(), shard.grads
        main = weights if weights.dtype == grads.dtype else weights.to(grads.dtype)
        if offload:
            main, grads = _in_host_memory(main), _in_host_memory(grads)
        return cls(buffer.kind, buffer.sharded, shard, main, grads)

    @property
    def precise(self) -> bool:
        """Whether the main weights say more than what the model computes with."""
        return self.main.dtype != self.kind.dtype

    def take_gradient(self) -> None:
        """Bring the gradient to where the main weights are."""
        if self.grads is not self.shard.grads:
            self.grads.copy_(self.shard.grads, non_blocking=True)

    def to_model(self) -> None:
        """Bring the updated weights to the model."""
        if self.main.data_ptr() != self.shard.weights.data_ptr():
            self.shard.weights.copy_(self.main, non_blocking=True)

    def from_model(self) -> None:
        """Take the weights that the model computes with."""
        self.main.copy_(self.shard.weights.to(self.kind.dtype))


def _in_host_memory(tensor: Tensor) -> Tensor:
    """A copy, pinned where it is to be copied from and to a device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


class Rule(Protocol):
    """How some slots are updated."""

    def step(self, lr: float) -> None:
        """Update the main weights of the slots from their gradients."""

    def state(self) -> dict[str, list[tuple[Slot, Tensor]]]:
        """By kind, each slot's tensor of that kind, as long as its shard."""


def boxes_of_slots(pairs: Iterable[tuple[Slot, Tensor]]) -> dict[str, Sharded]:
    """Tensors of slots, each as long as its shard, by canonical name."""
    return merge(
        boxes_of_range(values[part.place], part.pieces, part.shape, part.start)
        for slot, values in pairs
        for part in slot.shard.parts
    )
