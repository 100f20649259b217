"""Silent corruption: a device or memory that changes bits without a word (arXiv:2102.11245), found by what ranks have alike.

Three looks. One compares hashes of what several ranks hold alike: weights, main weights and moments as far as ZeRO leaves
copies of them. One compares hashes of all that a rank holds, taken after an update and just before the next: nothing may
have written there, and a slice of ZeRO's, which has no copies, would carry its flipped bit to all ranks. And one has all data
ranks compute the same micro-batch, and compares the loss and each gradient before they are summed. Of three ranks or more
the one that differs from the majority is named; of two, both.

A hash is the XOR of the bits of all elements, which one flipped bit always changes.
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
from mega_trainer.batch import MicroBatch
from mega_trainer.comm import Group, all_gather, raised_alike
from mega_trainer.optim.zero import Optimizer
from mega_trainer.parallel.grads import FlatStage
from mega_trainer.parallel.param import info_of, local_of
from mega_trainer.parallel.shared import copies
from mega_trainer.pipeline.run import Executor
from mega_trainer.sections import FaultConfig

SHOWN = 4  # tensors that are named
HINT = (
    "nothing was saved since; take the machine out that has other bits, and the same command goes on from the last "
    "checkpoint; mega train --replay STEP makes a step again elsewhere"
)


Held = tuple[tuple[Group, ...], str, Tensor]  # with the groups over whose ranks it lies alike


@dataclass
class Integrity:
    """Looks for corruption as a run's `fault` section says."""

    config: FaultConfig
    executor: Executor
    optimizer: Optimizer
    _rest: Tensor | None = None  # hashes of all that this rank holds, since the last update

    def before(self, step: int, batches: Callable[[], Sequence[MicroBatch]]) -> None:
        """Before a step, whose first data rank has these micro-batches: compare how ranks compute, where it is due.

        Raises:
            TrainingError: on every rank, when some differ.
        """
        every = self.config.recompute_every
        if every and step % every == 0 and self.executor.groups.dp.size > 1:
            self._computed_alike(step, batches())

    def after(self, step: int, *, saves: bool) -> None:
        """After a step, and before a save: compare what ranks hold, where it is due.

        Raises:
            TrainingError: on every rank, when some differ.
        """
        every = self.config.hash_every
        if not every or (step % every and not saves):
            return
        self.optimizer.settle()
        held = [*self._weights(), *self._state()]
        alike: dict[tuple[Group, ...], dict[str, Tensor]] = defaultdict(dict)
        for groups, name, tensor in held:
            if math.prod(group.size for group in groups) > 1:
                alike[groups][name] = tensor
        self._rest = _hashes([tensor for _, _, tensor in held])
        self._refuse(
            f"after step {step} ranks hold other bits of what they should have alike",
            lambda: [line for groups, named in alike.items() for line in outliers(named, groups)],
        )

    def unchanged(self, step: int) -> None:
        """In a step, just before its update: nothing has changed since the one before, where that was looked at.

        Raises:
            TrainingError: on every rank, when something has on some.
        """
        if self._rest is None:
            return
        self.optimizer.settle()
        held, (rest, self._rest) = [*self._weights(), *self._state()], (self._rest, None)
        now = _hashes([tensor for _, _, tensor in held])
        self._refuse(
            f"in step {step} bits have changed where nothing has written",
            lambda: [f"{_here(now)}: {held[index][1]}" for index in (rest != now).nonzero().view(-1).tolist()],
        )

    def _weights(self) -> Iterator[Held]:
        for stage in self.executor.stages.values():
            for parameter in stage.parameters():
                info, own = info_of(parameter), local_of(parameter)
                if own.numel():
                    groups = copies(info, sharded=isinstance(parameter, DTensor))
                    yield groups, "+".join(piece.name for piece in info.pieces), own

    def _state(self) -> Iterator[Held]:
        for kind, pairs in self.optimizer.state():
            for slot, values in pairs:
                names = [piece.name for part in slot.shard.parts for piece in part.pieces]
                if names:  # a slice may be padding alone
                    own = values[: len(slot.shard.weights)]
                    yield copies(slot.kind, sharded=slot.sharded), f"{kind} from {names[0]} to {names[-1]}", own

    def _computed_alike(self, step: int, batches: Sequence[MicroBatch]) -> None:
        executor, stages = self.executor, self.optimizer.stages
        for stage in stages:
            stage.begin_step()
        apart = replace(executor, around_backward=lambda stage, last: executor.around_backward(stage, False))
        named = {"the loss": apart.run(batches[: executor.groups.pp.size], 1.0)}
        for stage in stages:
            assert isinstance(stage, FlatStage)
            for parameter, gradient in stage.own_gradients():
                info = info_of(parameter)
                if info.data is executor.groups.dp_cp:  # experts compute for other ranks' tokens, too
                    named["the gradient of " + "+".join(piece.name for piece in info.pieces)] = gradient
        self._refuse(
            f"step {step}: ranks that computed the same have other bits",
            lambda: list(outliers(named, (executor.groups.dp,))),
        )

    def _refuse(self, what: str, find: Callable[[], Sequence[str]]) -> None:
        """Raise on all ranks what any of them finds, each of itself."""
        with raised_alike(self.executor.groups.world):
            if found := find():
                more = [f"  and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
                raise TrainingError("\n".join([what, *found[:SHOWN], *more]), hint=HINT)


def outliers(named: dict[str, Tensor], groups: Sequence[Group]) -> Iterator[str]:
    """A line for each tensor of which this rank has other bits than most ranks of the groups; where there is no such
    majority, all of them tell."""
    rank, hashed = dist.get_rank(), _hashes(list(named.values()))
    rows = torch.cat([hashed.new_tensor([rank]), hashed]).view(1, -1)
    for group in groups:
        rows = all_gather(rows, group)
    ranks, *columns = rows.t().tolist()
    for name, values in zip(named, columns, strict=True):
        (most, count), *others = [*Counter(values).most_common(), (None, 0)]
        own = values[ranks.index(rank)]
        if count > others[0][1] and own != most:
            yield f"{_here(hashed)}: {name}, where {count} other ranks agree"
        elif count == others[0][1]:
            yield f"  {' or '.join(f'rank {one}' for one in ranks)}: {name}, with no majority"


def _here(tensor: Tensor) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"  rank {rank} on {socket.gethostname()} ({tensor.device})"


def _hashes(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [n]: of each tensor the XOR of all elements' bits; where the first one is."""
    device = tensors[0].device
    return torch.stack([torch.hash_tensor(each.detach()).view(torch.int64).to(device) for each in tensors])
