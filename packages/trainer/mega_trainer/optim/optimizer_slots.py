"""Optimizer slots: the weight shards that this rank owns, with main weights and gradients, for any kind of sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mega_ckpt.host_staging import allocate_host_memory
from mega_ckpt.tensor_pieces import ShardedTensor, map_flat_range_to_sharded_tensors, merge_sharded_tensors
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.parallel.gradient_buckets import SLICE_ELEMENTS
from mega_trainer.parallel.parameter_shards import (
    ParameterBuffer,
    ParameterShard,
    ParamGroupKey,
    replica_groups,
    split_replicated_tensors_to_save,
)


@dataclass(eq=False)
class OptimizerSlot:
    """Unit of an optimizer update: a parameter shard with its main weights and gradients.

    Attributes:
        kind, sharded, shard: as in `ParameterBuffer`.
        main: main weights, which are updated: the shard's own weights, or a copy in fp32 or in host memory. The length
            is a multiple of `SLICE_ELEMENTS`, so that the update of every element is vectorised; values past the
            shard's end are arbitrary.
        grads: gradient, on the device and with the length of `main`: the shard's own, or a copy.
    """

    kind: ParamGroupKey
    sharded: bool
    shard: ParameterShard
    main: Tensor
    grads: Tensor

    @classmethod
    def from_shard(cls, buffer: ParameterBuffer, shard: ParameterShard, *, offload: bool = False) -> OptimizerSlot:
        """Return the optimizer slot of a parameter shard, with fp32 main weights if its weights are in low precision.
        With `offload`, main weights are in host memory.

        A shard whose length needs padding is copied too, on its device: rows of ZeRO-3, usually only norms and biases.
        """
        weights, grads = shard.weights.detach(), shard.grads
        main = weights if weights.dtype == grads.dtype else weights.to(grads.dtype)
        if offload or len(main) % SLICE_ELEMENTS:
            main, grads = _padded_copy(main, to_host=offload), _padded_copy(grads, to_host=offload)
        return cls(buffer.kind, buffer.sharded, shard, main, grads)

    @property
    def has_higher_precision(self) -> bool:
        """True if the main weights have a more precise dtype than the weights that the model computes with."""
        return self.main.dtype != self.kind.dtype

    @property
    def has_separate_main_weights(self) -> bool:
        """True if the main weights are a copy and not the memory of the model's weights."""
        return self.main.data_ptr() != self.shard.weights.data_ptr()

    def copy_grad_to_main(self) -> None:
        """Copy the gradient to the main weights' device (such as host memory), if the slot has a separate copy."""
        if self.grads is not self.shard.grads:
            self._own(self.grads).copy_(self.shard.grads, non_blocking=True)

    def copy_main_to_model(self) -> None:
        """Copy the main weights to the model's weights, rounded to their dtype; do nothing if they share memory."""
        if self.has_separate_main_weights:
            self.shard.weights.copy_(self._own(self.main), non_blocking=True)

    def load_main_from_model(self) -> None:
        """Set the main weights to the weights that the model computes with."""
        self._own(self.main).copy_(self.shard.weights.to(self.kind.dtype))

    def _own(self, values: Tensor) -> Tensor:
        return values[: len(self.shard.weights)]


def _padded_copy(tensor: Tensor, *, to_host: bool) -> Tensor:
    """Return a copy padded to a multiple of `SLICE_ELEMENTS`; in host memory it is pinned for transfers to a GPU."""
    length = -(-len(tensor) // SLICE_ELEMENTS) * SLICE_ELEMENTS
    if to_host:
        copy = allocate_host_memory(length * tensor.element_size(), pinned=tensor.is_cuda).view(tensor.dtype).zero_()
    else:
        copy = torch.zeros(length, dtype=tensor.dtype, device=tensor.device)
    copy[: len(tensor)].copy_(tensor)
    return copy


class OptimizerOffloadTransfers:
    """Copies of gradients to the main weights' device, and of updated weights back to the model.
    They are overlapped if main weights are offloaded to host memory.

    Main weights that are `offloaded` from a device are updated slot by slot. On a GPU the copies run on a second stream:
    an update waits only for its own gradient, and its weights are sent while the next update is computed.
    """

    def __init__(self, offloaded: torch.device | None = None) -> None:
        self.one_by_one = offloaded is not None
        on_gpu = offloaded is not None and offloaded.type == "cuda"
        self._stream = torch.cuda.Stream(offloaded) if on_gpu else None  # type: ignore[no-untyped-call]
        self._arrivals: dict[OptimizerSlot, torch.cuda.Event] = {}

    def start_gradient_copies(self, slots: Iterable[OptimizerSlot]) -> None:
        """Start to copy the gradients of all slots to their main weights' device, in the order of the slots."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for slot in slots:
                slot.copy_grad_to_main()
                if self._stream is not None:
                    self._arrivals[slot] = self._stream.record_event()

    @contextmanager
    def overlap_copies_with_update(self, slots: Sequence[OptimizerSlot]) -> Iterator[None]:
        """Wait for some slots' gradients, run the `with` block (their update), and start to copy their weights back."""
        for slot in slots:
            if slot in self._arrivals:
                self._arrivals.pop(slot).synchronize()
        yield
        with torch.cuda.stream(self._stream):
            for slot in slots:
                slot.copy_main_to_model()

    def wait_for_weights(self) -> None:
        """Make later work on the device wait until the updated weights have arrived."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class UpdateRule(Protocol):
    """Interface of an optimizer's update of its slots of main weights, such as AdamW's or Muon's."""

    slots: list[OptimizerSlot]
    update_count: int  # number of updates so far

    def update_slots(self, transfers: OptimizerOffloadTransfers, lr: float, decoupled_lr: float | None = None) -> None:
        """Update the main weights of all shards (slots) from their gradients at rate `lr`, or `decoupled_lr`.
        The second is for decoupled param groups, which are the embedding and the output layer.
        """

    def state_tensors(self) -> dict[str, list[tuple[OptimizerSlot, Tensor]]]:
        """Return the optimizer state by kind (such as `exp_avg`), one tensor for each parameter shard (slot).
        A tensor is as long as the slot's main weights.
        """


@runtime_checkable
class OtherStateRule(Protocol):
    """Interface of an `UpdateRule` with other state than one tensor for each slot, such as SOAP's."""

    def other_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that are kept between updates, in place of those of `state_tensors`."""

    def other_checkpoint_tensors(self, *, to_save: bool) -> dict[str, ShardedTensor]:
        """Return views of state that `state_tensors` does not have, by kind and canonical name.
        With `to_save`, only this rank's share of replicated tensors is included.
        """

    def pack_loaded_state(self) -> None:
        """Take over values that were loaded into copies of the state, if checkpoint tensors are copies."""


def collect_slot_tensors(pairs: Iterable[tuple[OptimizerSlot, Tensor]]) -> dict[str, ShardedTensor]:
    """Return the values of tensors of parameter shards (slots) as sharded tensors by canonical parameter name.
    Each tensor is at least as long as its shard.
    """
    return merge_sharded_tensors(
        map_flat_range_to_sharded_tensors(values[part.shard_slice], part.pieces, part.shape, part.start)
        for slot, values in pairs
        for part in slot.shard.parts
    )


def collect_slot_tensors_to_save(pairs: Iterable[tuple[OptimizerSlot, Tensor]]) -> dict[str, ShardedTensor]:
    """Return this rank's share of the tensors of parameter shards to save to a checkpoint, by canonical name.
    Replicated tensors are divided among the ranks.
    """
    by_replicas: dict[tuple[CommGroup, ...], list[tuple[OptimizerSlot, Tensor]]] = defaultdict(list)
    for slot, values in pairs:
        by_replicas[replica_groups(slot.kind, sharded=slot.sharded)].append((slot, values))
    return merge_sharded_tensors(
        split_replicated_tensors_to_save(collect_slot_tensors(own), groups) for groups, own in by_replicas.items()
    )
