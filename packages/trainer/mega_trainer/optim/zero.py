"""The optimizer over this rank's shards of the weights: norm, update, publish (ZeRO-0 to ZeRO-2, arXiv:1910.02054).

In low precision every shard has fp32 main weights of its own; otherwise the weights are updated in place. What is done
with a shard is a rule's business: AdamW for all, or Muon for hidden matrices and AdamW for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mega_ckpt.pieces import Sharded
from mega_trainer.comm import Group
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.optim.adamw import AdamW
from mega_trainer.optim.clip import grad_norm
from mega_trainer.optim.slots import Rule, Slot, Transfers, boxes_of_slots, share_of_slots
from mega_trainer.parallel.shared import SharedStage


class Optimizer:
    """Updates the weights of this rank's stages.

    Args:
        stages: all of this rank's stages.
        adamw: makes the rule for ordinary slots.
        apart: makes the rule for those of buffers that are kept apart, where there are any.
        model_groups: the groups over which different ranks hold different layers, for the norm.
        offload: main weights and the rules' state live in host memory (arXiv:2101.06840).
        leaves: calls what the norm is added up by.
        ema: keep a moving average of the main weights, of which each update leaves this share.
    """

    def __init__(
        self,
        stages: Sequence[SharedStage],
        *,
        adamw: Callable[[list[Slot]], AdamW],
        apart: Callable[[list[Slot]], Rule] | None = None,
        model_groups: Sequence[Group] = (),
        offload: bool = False,
        leaves: Leaves | None = None,
        ema: float | None = None,
    ) -> None:
        self._leaves = leaves or Leaves()
        self.stages, self.model_groups = list(stages), list(model_groups)
        self.buffers = [buffer for stage in stages for buffer in stage.buffers]
        self.slots = [
            Slot.of(buffer, shard, offload=offload)
            for buffer in self.buffers
            for shard in buffer.shards
            if shard.weights.numel()
        ]
        self._share = ema
        self._averages = [] if ema is None else [slot.main.clone() for slot in self.slots]
        self._transfers = Transfers(self.slots[0].shard.weights.device if offload else None)
        self._adamw = adamw([slot for slot in self.slots if apart is None or not slot.kind.apart])
        self._rules: list[Rule] = [self._adamw]
        if apart is not None:
            self._rules.append(apart([slot for slot in self.slots if slot.kind.apart]))

    def grad_norm(self) -> Tensor:
        """L2 norm of the gradient over the whole model; fp64 scalar."""
        return grad_norm(self.buffers, self.model_groups, self._leaves)

    def update(self, lr: float, scale: float, decoupled_lr: float | None = None) -> None:
        """One step with the gradients times `scale`; the new weights are then on their way to every rank.

        `decoupled_lr` is the rate of the input embedding and the output layer, where they are kinds of their own.
        """
        self.settle()
        if scale != 1.0:
            torch._foreach_mul_([slot.shard.grads for slot in self.slots], scale)
        self._transfers.start(slot for rule in self._rules for slot in rule.slots)
        for rule in self._rules:
            rule.step(self._transfers, lr, decoupled_lr)
        if self._share is not None:
            torch._foreach_lerp_(self._averages, [slot.main for slot in self.slots], 1 - self._share)
        self._transfers.finish()
        for stage in self.stages:
            stage.publish()

    def settle(self) -> None:
        """Wait until the weights of the last update are there: before they are read other than by a forward."""
        for stage in self.stages:
            stage.settle()

    def memory(self) -> Iterator[Tensor]:
        """All that is kept from step to step: weights, gradients, main weights and the rules' state, as flat stretches."""
        for slot in self.slots:
            yield from (slot.shard.weights.detach(), slot.shard.grads, slot.main, slot.grads)
        yield from self._averages
        for rule in self._rules:
            yield from (tensor for pairs in rule.state().values() for _, tensor in pairs)

    def gradients(self) -> dict[str, Sharded]:
        """The reduced gradients by canonical name, after an update times its scale. The boxes are views."""
        return boxes_of_slots((slot, slot.shard.grads) for slot in self.slots)

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self._adamw.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._adamw.steps = value

    def tensors(self, *, to_save: bool = False) -> dict[str, Sharded]:
        """State by canonical name: `optimizer/<kind>/<name>` for each kind of the rules' state and, where the main
        weights are more precise than the model's, `optimizer/main/<name>`; averages are `optimizer/ema/<name>`. The boxes
        are views, to be filled; or, of what several ranks hold alike, this one's share `to_save`."""
        boxes = share_of_slots if to_save else boxes_of_slots
        return {f"optimizer/{kind}/{name}": held for kind, pairs in self.state() for name, held in boxes(pairs).items()}

    def state(self) -> list[tuple[str, list[tuple[Slot, Tensor]]]]:
        """By kind, `main` weights last, what of it each slot has: a flat tensor at least as long as its shard."""
        kinds = [kind for rule in self._rules for kind in rule.state().items()]
        if self._averages:
            kinds.append(("ema", list(zip(self.slots, self._averages, strict=True))))
        return [*kinds, ("main", [(slot, slot.main) for slot in self.slots if slot.precise])]

    def begin_average(self) -> None:
        """Begin the average of the main weights, where there is one, with what these are."""
        for slot, average in zip(self.slots, self._averages, strict=bool(self._averages)):
            average.copy_(slot.main)

    def reload_main(self) -> None:
        """Take the main weights from the model's, after those were loaded without them."""
        for slot in self.slots:
            slot.from_model()

    def use_main(self) -> None:
        """Bring the main weights to the model's, after they were loaded: under ZeRO-3 the model has no others."""
        for slot in self.slots:
            slot.to_model()
