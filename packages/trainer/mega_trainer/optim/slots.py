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
    """One shard with the tensor the optimizer updates: the shard's own weights, or an fp32 copy of them."""

    kind: Kind
    sharded: bool
    shard: Shard
    main: Tensor

    @classmethod
    def of(cls, buffer: Buffer, shard: Shard) -> Slot:
        """Weights in low precision get main weights in fp32."""
        weights = shard.weights.detach()
        main = weights if weights.dtype in (torch.float32, torch.float64) else weights.float()
        return cls(buffer.kind, buffer.sharded, shard, main)

    @property
    def precise(self) -> bool:
        """Whether the main weights say more than what the model computes with."""
        return self.main.dtype != self.kind.dtype

    def to_model(self) -> None:
        """Bring the updated weights to the model."""
        if self.main.data_ptr() != self.shard.weights.data_ptr():
            self.shard.weights.copy_(self.main)

    def from_model(self) -> None:
        """Take the weights that the model computes with."""
        self.main.copy_(self.shard.weights.to(self.kind.dtype))


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
