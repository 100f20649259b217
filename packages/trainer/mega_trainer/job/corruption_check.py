"""Checks for silent data corruption: bits that a device or memory changes without an error (arXiv:2102.11245), found by
comparing replicated data.

There are three checks:

- Replicated tensors (weights, and main weights and moments that ZeRO does not shard) are hashed and compared among ranks.
- All tensors of a rank are hashed after an update and just before the next, as nothing may change them in between. This also
  covers ZeRO shards, which have no replica and would spread a flipped bit to all ranks.
- All data ranks compute the same micro-batch, and the loss and each gradient are compared before the reduction.

With three or more ranks the rank that differs from the majority is named; with two, both are.

A hash depends on the bits of all elements and on their positions (`bit_hash`). The padding of flat buffers is left out, as it
has no influence on a parameter.
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
from mega_trainer.job.bit_hash import hash_tensor_bits
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel.parameter_info import (
    get_local_values,
    get_packed_weight,
    get_parameter_info,
    non_trainable_buffers,
)
from mega_trainer.parallel.parameter_shards import replica_groups
from mega_trainer.parallel.zero_buffers import FlatBufferStage
from mega_trainer.pipeline.executor import PipelineExecutor

MAX_SHOWN = 4  # tensors named in a message
HINT = (
    "remove the machine with different bits and run the same command again to resume from the last checkpoint, which is "
    "intact; mega train --replay STEP repeats a step on another machine"
)


HashedTensor = tuple[tuple[CommGroup, ...], str, Tensor]  # groups that replicate the tensor, its name, the tensor


@dataclass
class CorruptionCheck:
    """Checks of a run for silent data corruption (bits that devices or memory change without an error), as the `fault`
    section of run.yaml configures them.
    """

    config: CorruptionCheckConfig
    executor: PipelineExecutor
    optimizer: ShardedOptimizer
    _rest: Tensor | None = None  # hashes of all tensors of this rank since the last update

    def check_before_step(self, step: int, batches: Callable[[], Sequence[MicroBatch]]) -> None:
        """If due, let all data ranks compute the micro-batches of data rank 0 for this step, and compare their losses
        and gradients bit by bit.

        Raises:
            TrainingError: on every rank, when some differ.
        """
        every = self.config.recompute_every
        if every and step % every == 0 and self.executor.parallel_groups.dp.size > 1:
            self._compare_computation(step, batches())

    def check_after_step(self, step: int, *, saves: bool) -> None:
        """If due, or if the step `saves` a checkpoint, compare the weights and optimizer state that ranks hold in
        common, bit by bit.

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

    def check_before_update(self, step: int) -> None:
        """Check just before an update that no weight or optimizer state has changed since the previous update, if
        `check_after_step` took hashes then.

        Raises:
            TrainingError: on every rank, when something has on some.
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
            for values, pieces in non_trainable_buffers(stage):
                yield (groups.tp, groups.cp, groups.dp), pieces[0].name, values

    def _replicated_weights(self) -> Iterator[HashedTensor]:
        for stage in self.executor.stages.values():
            for parameter in stage.parameters():
                info, own = get_parameter_info(parameter), get_local_values(parameter)
                if own.numel():
                    groups = replica_groups(info, sharded=isinstance(parameter, DTensor))
                    name = "+".join(piece.name for piece in info.pieces)
                    yield groups, name, own
                    if packed := get_packed_weight(parameter):
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
    """Yield a line of text for each named tensor whose bits on this rank differ from the majority of the ranks of
    `groups`; without a majority, every rank yields one.

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
