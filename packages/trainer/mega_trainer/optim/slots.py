"""What an optimizer works on: stretches of weights that this rank owns, whichever way they are shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_ckpt.pieces import Sharded, boxes_of_range, merge
from mega_ckpt.staging import host_memory
from mega_trainer.comm import Group
from mega_trainer.parallel.buckets import SLICE_ELEMENTS
from mega_trainer.parallel.shared import Buffer, Kind, Shard, copies, share_of_copies


@dataclass(eq=False)
class Slot:
    """One shard with the tensors that the optimizer works on.

    Attributes:
        kind, sharded, shard: as in `Buffer`.
        main: what is updated: the shard's own weights, or a copy of them in fp32 or in host memory. Its length is a
            multiple of `SLICE_ELEMENTS`, so that no element is updated in a remainder of vectors; what is past the
            shard's end means nothing.
        grads: the gradient, where `main` is, as long: the shard's own, or a copy.
    """

    kind: Kind
    sharded: bool
    shard: Shard
    main: Tensor
    grads: Tensor

    @classmethod
    def of(cls, buffer: Buffer, shard: Shard, *, offload: bool = False) -> Slot:
        """Weights in low precision get main weights in fp32; with `offload` all get copies in host memory.

        So do, where they are, those whose length needs it: rows of ZeRO-3, as a rule of no more than norms and biases.
        """
        weights, grads = shard.weights.detach(), shard.grads
        main = weights if weights.dtype == grads.dtype else weights.to(grads.dtype)
        if offload or len(main) % SLICE_ELEMENTS:
            main, grads = _copied(main, to_host=offload), _copied(grads, to_host=offload)
        return cls(buffer.kind, buffer.sharded, shard, main, grads)

    @property
    def precise(self) -> bool:
        """Whether the main weights say more than what the model computes with."""
        return self.main.dtype != self.kind.dtype

    def take_gradient(self) -> None:
        """Bring the gradient to where the main weights are."""
        if self.grads is not self.shard.grads:
            self._own(self.grads).copy_(self.shard.grads, non_blocking=True)

    def to_model(self) -> None:
        """Bring the updated weights to the model."""
        if self.main.data_ptr() != self.shard.weights.data_ptr():
            self.shard.weights.copy_(self._own(self.main), non_blocking=True)

    def from_model(self) -> None:
        """Take the weights that the model computes with."""
        self._own(self.main).copy_(self.shard.weights.to(self.kind.dtype))

    def _own(self, values: Tensor) -> Tensor:
        return values[: len(self.shard.weights)]


def _copied(tensor: Tensor, *, to_host: bool) -> Tensor:
    """A copy up to the next multiple of `SLICE_ELEMENTS`; in host memory pinned, if it is copied from and to a device."""
    length = -(-len(tensor) // SLICE_ELEMENTS) * SLICE_ELEMENTS
    if to_host:
        copy = host_memory(length * tensor.element_size(), pinned=tensor.is_cuda).view(tensor.dtype).zero_()
    else:
        copy = torch.zeros(length, dtype=tensor.dtype, device=tensor.device)
    copy[: len(tensor)].copy_(tensor)
    return copy


class Rule(Protocol):
    """How some slots are updated."""

    def step(self, lr: float, decoupled_lr: float | None = None) -> None:
        """Update the main weights of the slots from their gradients, those of decoupled kinds at a rate of their own."""

    def state(self) -> dict[str, list[tuple[Slot, Tensor]]]:
        """By kind, each slot's tensor of that kind, as long as its main weights."""


def boxes_of_slots(pairs: Iterable[tuple[Slot, Tensor]]) -> dict[str, Sharded]:
    """Tensors of slots, each at least as long as its shard, by canonical name."""
    return merge(
        boxes_of_range(values[part.place], part.pieces, part.shape, part.start)
        for slot, values in pairs
        for part in slot.shard.parts
    )


def share_of_slots(pairs: Iterable[tuple[Slot, Tensor]]) -> dict[str, Sharded]:
    """The same, of what several ranks hold alike no more than this one is to save."""
    alike: dict[tuple[Group, ...], list[tuple[Slot, Tensor]]] = defaultdict(list)
    for slot, values in pairs:
        alike[copies(slot.kind, sharded=slot.sharded)].append((slot, values))
    return merge(share_of_copies(boxes_of_slots(held), groups) for groups, held in alike.items())
