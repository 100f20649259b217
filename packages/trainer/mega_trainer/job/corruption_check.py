"""Checks for silent data corruption: bits that a device or memory changes without an error (arXiv:2102.11245), found by
comparing replicated data.

There are three checks:

- Replicated tensors (weights, and main weights and moments that ZeRO does not shard) are hashed and compared among ranks.
- All tensors of a rank are hashed after an update and just before the next, as nothing may change them in between. This also
  covers ZeRO shards, which have no replica and would spread a flipped bit to all ranks.
- All data ranks compute the same micro-batch, and the loss and each gradient are compared before the reduction.

With three or more ranks the rank that differs from the majority is named; with two, both are.

A hash depends on the bits of all elements and on their positions (`hash_tensor_bits`). The padding of flat buffers is left out, as it
has no influence on a parameter.

The hash of words x_0, x_1, ... is the sum of x_i times an odd pseudorandom multiplier of position i, modulo 2^64. One
flipped bit always changes it, whatever the position. Several changes (equal flips in two elements, two elements that are
swapped) cancel with a probability of about 2^-32, where an XOR of all elements does not see them at all. A sum of integers
has the same bits in any order, so the hash of a tensor is the same on every device.
"""

from __future__ import annotations

import math
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mega_common.errors import TrainingError
from mega_trainer.config.sections import CorruptionCheckConfig
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import CommGroup, all_gather, raise_on_all_ranks
from mega_trainer.distributed.device import to_host
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel.parameter_info import (
    get_local_values,
    get_parameter_info,
    get_quantized_weight,
    iterate_saved_buffers,
)
from mega_trainer.parallel.parameter_shards import replica_groups
from mega_trainer.parallel.zero_buffers import FlatBufferStage
from mega_trainer.pipeline.executor import PipelineExecutor

CHUNK = 1 << 20  # words hashed at once; the scratch memory is 8 bytes for each
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def hash_tensor_bits(tensors: Sequence[Tensor]) -> Tensor:
    """Return a hash of the bits of each tensor, int64 [number of tensors].
    The hashes are on the device of the first tensor; the host does not wait for the device.
    """
    words = [_words(tensor) for tensor in tensors]
    scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for device in {each.device for each in words}:
        length = min(CHUNK, max(len(each) for each in words if each.device == device))
        multipliers = _multipliers(length, device)
        scratch[device] = multipliers, torch.empty_like(multipliers)
    hashes = [_hash(each, *scratch[each.device]).to(words[0].device) for each in words]
    return torch.stack(hashes)


def _words(tensor: Tensor) -> Tensor:
    """View a tensor as a vector of integers of at most four bytes, so that no multiplier loses a flip of the sign."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(WORDS[min(flat.element_size(), 4)])


def _hash(words: Tensor, multipliers: Tensor, products: Tensor) -> Tensor:
    """Hash a vector of words with the multipliers of a chunk; `products` is scratch memory of the same length."""
    sums = [
        torch.mul(chunk, multipliers[: len(chunk)], out=products[: len(chunk)]).sum()
        for chunk in torch.split(words, CHUNK)
    ]
    if len(sums) == 1:
        return sums[0]
    return (torch.stack(sums) * _multipliers(len(sums), words.device)).sum()


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return an odd pseudorandom int64 for each position: the finalizer of SplitMix64 (doi:10.1145/2660193.2660195)."""
    mixed = torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift int64 values to the right as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


MAX_SHOWN = 4  # tensors named in a message
HINT = (
    "remove the machine with different bits and run the same command again to resume from the last checkpoint, which is "
    "intact; mega train --replay STEP repeats a step on another machine"
)


HashedTensor = tuple[tuple[CommGroup, ...], str, Tensor]  # groups that replicate the tensor, its name, the tensor


@dataclass
class CorruptionCheck:
    """Checks of a run for silent data corruption, as the `fault` section of run.yaml configures them."""

    config: CorruptionCheckConfig
    executor: PipelineExecutor
    optimizer: ShardedOptimizer
    _rest: Tensor | None = None  # hashes of all tensors of this rank since the last update

    def check_recomputed_gradients(self, step: int, batches: Callable[[], Sequence[MicroBatch]]) -> None:
        """Raise `TrainingError` if loss or gradients of one micro-batch differ bitwise among data ranks, if due at `step`.

        The micro-batch is the first of data rank 0; with a pipeline, it is the first `pp` ones.

        Raises:
            TrainingError: on every rank, when some differ.
        """
        every = self.config.recompute_every
        if every and step % every == 0 and self.executor.parallel_groups.dp.size > 1:
            self._compare_computation(step, batches())

    def compare_replicas_after_step(self, step: int, *, saves: bool) -> None:
        """Raise `TrainingError` if replicated weights or optimizer state differ among ranks, if due or before a save.

        Raises:
            TrainingError: on every rank, when some differ.
        """
        every = self.config.hash_every
        if not every or (step % every and not saves):
            return
        self.optimizer.wait_for_params()
        tensors = list(self._checked_tensors())
        replicated: dict[tuple[CommGroup, ...], dict[str, Tensor]] = defaultdict(dict)
        for groups, name, tensor in tensors:
            if math.prod(group.size for group in groups) > 1:
                replicated[groups][name] = tensor
        self._rest = hash_tensor_bits([tensor for _, _, tensor in tensors])
        self._raise_findings(
            f"after step {step} replicated tensors differ among ranks",
            lambda: [
                line
                for groups, named in replicated.items()
                for line in find_corrupt_tensors(named, groups, self._device)
            ],
        )

    def check_unchanged_before_update(self, step: int) -> None:
        """Raise `TrainingError` if, just before an update, a weight or optimizer state has changed since the previous one.

        Nothing is checked without the hashes that `compare_replicas_after_step` took after the previous update.

        Raises:
            TrainingError: on every rank, when something has changed on some rank.
        """
        if self._rest is None:
            return
        self.optimizer.wait_for_params()
        tensors, (rest, self._rest) = list(self._checked_tensors()), (self._rest, None)
        now = hash_tensor_bits([tensor for _, _, tensor in tensors])
        self._raise_findings(
            f"in step {step} bits changed in tensors that nothing has written to",
            lambda: [
                f"{_rank_location(now)}: {tensors[index][1]}"
                for index in to_host(rest != now).nonzero().view(-1).tolist()
            ],
        )

    @property
    def _device(self) -> torch.device:
        """Device of this rank's model, which may have its optimizer state in host memory."""
        return next(parameter.device for stage in self.executor.stages.values() for parameter in stage.parameters())

    def _checked_tensors(self) -> Iterator[HashedTensor]:
        yield from self._replicated_weights()
        yield from self._replicated_state()
        groups = self.executor.parallel_groups
        for stage in self.executor.stages.values():
            for values, pieces in iterate_saved_buffers(stage):
                yield (groups.tp, groups.cp, groups.dp), pieces[0].name, values

    def _replicated_weights(self) -> Iterator[HashedTensor]:
        for stage in self.executor.stages.values():
            for parameter in stage.parameters():
                info, own = get_parameter_info(parameter), get_local_values(parameter)
                if own.numel():
                    groups = replica_groups(info, sharded=isinstance(parameter, DTensor))
                    name = "+".join(piece.name for piece in info.pieces)
                    yield groups, name, own
                    if packed := get_quantized_weight(parameter):
                        yield groups, f"scales of {name}", packed.scales

    def _replicated_state(self) -> Iterator[HashedTensor]:
        # main weights in the model's precision with separate memory: in host memory, or longer than the shard
        separate_main = [
            (slot, slot.main)
            for slot in self.optimizer.slots
            if slot.has_separate_main_weights and not slot.has_higher_precision
        ]
        for kind, pairs in [*self.optimizer.state_tensors(), ("main", separate_main)]:
            for slot, values in pairs:
                names = [piece.name for part in slot.shard.parts for piece in part.pieces]
                if names:  # a shard may be padding only
                    own = values[: len(slot.shard.weights)]
                    yield replica_groups(slot.kind, sharded=slot.sharded), f"{kind} from {names[0]} to {names[-1]}", own

    def _compare_computation(self, step: int, batches: Sequence[MicroBatch]) -> None:
        executor, stages = self.executor, self.optimizer.stages
        for stage in stages:
            stage.begin_step()
        without_reduction = replace(
            executor, around_backward=lambda stage, last: executor.around_backward(stage, False)
        )
        named = {"the loss": without_reduction.run_operations(batches[: executor.parallel_groups.pp.size], 1.0)}
        for stage in stages:
            assert isinstance(stage, FlatBufferStage)
            for parameter, gradient in stage.local_gradients():
                info = get_parameter_info(parameter)
                if info.data is executor.parallel_groups.dp_cp:  # experts also compute tokens of other ranks
                    named["the gradient of " + "+".join(piece.name for piece in info.pieces)] = gradient
        self._raise_findings(
            f"in step {step} ranks got different bits from the same computation",
            lambda: list(find_corrupt_tensors(named, (executor.parallel_groups.dp,), self._device)),
        )

    def _raise_findings(self, problem: str, find: Callable[[], Sequence[str]]) -> None:
        """Raise on all ranks the findings of any rank about itself."""
        with raise_on_all_ranks(self.executor.parallel_groups.world):
            if found := find():
                more = [f"  and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
                raise TrainingError("\n".join([problem, *found[:MAX_SHOWN], *more]), hint=HINT)


def find_corrupt_tensors(named: dict[str, Tensor], groups: Sequence[CommGroup], device: torch.device) -> Iterator[str]:
    """Yield a line of text for each tensor whose bits on this rank differ from the majority of the ranks.
    The majority is among the ranks of `groups`; without a majority, every rank yields one. `named` has the tensors by name.

    Hashes are gathered on `device`, wherever the tensors are: groups of GPUs (NCCL) take no tensors in host memory.
    """
    rank, hashed = dist.get_rank(), hash_tensor_bits(list(named.values())).to(device)
    rows = torch.cat([hashed.new_tensor([rank]), hashed]).view(1, -1)
    for group in groups:
        rows = all_gather(rows, group)
    ranks, *columns = to_host(rows).t().tolist()
    for name, values in zip(named, columns, strict=True):
        (most, count), *others = [*Counter(values).most_common(), (None, 0)]
        own = values[ranks.index(rank)]
        if count > others[0][1] and own != most:
            yield f"{_rank_location(hashed)}: {name}, where {count} other ranks agree"
        elif count == others[0][1]:
            yield f"  {' or '.join(f'rank {each}' for each in ranks)}: {name}, with no majority"


def _rank_location(tensor: Tensor) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"  rank {rank} on {socket.gethostname()} ({tensor.device})"
