"""What an optimizer works on: stretches of weights that this rank owns, whichever way they are shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_ckpt.pieces import Sharded, boxes_of_range, merge
from mega_trainer.parallel.grads import FlatBuffer, Shard
from mega_trainer.parallel.param import info_of


@dataclass(eq=False)
class Slot:
    """One shard with the tensor the optimizer updates: the shard's own weights, or an fp32 copy of them."""

    buffer: FlatBuffer
    shard: Shard
    main: Tensor

    @classmethod
    def of(cls, buffer: FlatBuffer, shard: Shard) -> Slot:
        """Weights in low precision get main weights in fp32."""
        weights = shard.weights.detach()
        return cls(buffer, shard, weights if weights.dtype in (torch.float32, torch.float64) else weights.float())

    @property
    def copied(self) -> bool:
        """Whether the main weights are a tensor of their own."""
        return self.main.data_ptr() != self.shard.weights.data_ptr()


class Rule(Protocol):
    """How some slots are updated."""

    def step(self, lr: float) -> None:
        """Update the main weights of the slots from their gradients."""

    def state(self) -> dict[str, list[tuple[Slot, Tensor]]]:
        """By kind, each slot's tensor of that kind, as long as its shard."""


def boxes_of_slots(pairs: Iterable[tuple[Slot, Tensor]]) -> dict[str, Sharded]:
    """Tensors of slots, each as long as its shard, by canonical name."""
    return merge(
        boxes_of_range(values[place], info_of(parameter).pieces, tuple(parameter.shape), start)
        for slot, values in pairs
        for parameter, start, place in slot.buffer.parts(slot.shard)
    )
