"""The optimizer over this rank's shards of the flat buffers: clip, update, publish (ZeRO-0 to ZeRO-2).

In low precision every shard has fp32 main weights of its own; otherwise the weights are updated in place. AdamW is
torch's fused one, on one tensor a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_ckpt.pieces import Sharded, boxes_of_range, merge
from mega_trainer.comm import Group, all_reduce
from mega_trainer.parallel.grads import FlatBuffer, FlatStage, Shard
from mega_trainer.parallel.param import info_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(eq=False)
class Slot:
    """One shard with the tensor the optimizer updates: the shard's own weights, or an fp32 copy of them."""

    buffer: FlatBuffer
    shard: Shard
    main: Tensor

    @property
    def copied(self) -> bool:
        """Whether the main weights are a tensor of their own."""
        return self.main.data_ptr() != self.shard.weights.data_ptr()


class Optimizer:
    """AdamW (arXiv:1711.05101) with decoupled weight decay on matrices, and the global gradient norm.

    Args:
        stages: all of this rank's stages.
        betas, eps, weight_decay: as in the paper.
        model_groups: the groups over which different ranks hold different parameters (tp, pp), for the norm.
    """

    def __init__(
        self,
        stages: Sequence[FlatStage],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        model_groups: Sequence[Group] = (),
    ) -> None:
        self.stages, self.model_groups = list(stages), list(model_groups)
        self.buffers = [buffer for stage in stages for buffer in stage.buffers]
        self.slots = [Slot(b, shard, _main_of(shard)) for b in self.buffers for shard in b.shards]
        groups = [
            {"params": [s.main for s in self.slots if s.buffer.decay == decay], "weight_decay": rate}
            for decay, rate in ((True, weight_decay), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=True)
        for slot in self.slots:
            slot.main.grad = slot.shard.grads
            self.adamw.state[slot.main] = {
                "step": torch.zeros((), dtype=torch.float32, device=slot.main.device),
                **{moment: torch.zeros_like(slot.main) for moment in MOMENTS},
            }

    def grad_norm(self) -> Tensor:
        """L2 norm of the gradient over the whole model, each canonical element counted once; fp64 scalar.

        Partial sums are made per slice in every ZeRO level and added in one order, so that the levels agree in bits.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.slots[0].main.device)
        for buffer in self.buffers:
            if buffer.counts_here:
                total += self._squares(buffer)
        for group in self.model_groups:
            all_reduce(total, group)
        return total.sqrt()

    def _squares(self, buffer: FlatBuffer) -> Tensor:
        ranks = buffer.data.size
        slices = torch.zeros(len(buffer.shards), ranks, dtype=torch.float64, device=buffer.weights.device)
        for row, shard in zip(slices, buffer.shards, strict=True):
            if buffer.sharded:
                row[buffer.data.rank] = torch.linalg.vector_norm(shard.grads, dtype=torch.float64).square()
            else:
                for index, part in enumerate(shard.grads.chunk(ranks)):
                    row[index] = torch.linalg.vector_norm(part, dtype=torch.float64).square()
        if buffer.sharded:
            all_reduce(slices, buffer.data)  # one non-zero term a slot: exact in any order
        return slices.sum()

    def update(self, lr: float, scale: float) -> None:
        """One AdamW step with the gradients times `scale`; the new weights are then on their way to every rank."""
        self.settle()
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if scale != 1.0:
            torch._foreach_mul_([slot.shard.grads for slot in self.slots], scale)
        self.adamw.step()
        for slot in self.slots:
            if slot.copied:
                slot.shard.weights.copy_(slot.main)
        for stage in self.stages:
            stage.publish()

    def settle(self) -> None:
        """Wait until the weights of the last update are there: before they are read other than by a forward."""
        for stage in self.stages:
            stage.settle()

    def gradients(self) -> dict[str, Sharded]:
        """The reduced gradients by canonical name, after an update times its scale. The boxes are views."""
        return boxes_of_slots((slot, slot.shard.grads) for slot in self.slots)

    @property
    def steps(self) -> int:
        """Updates made so far (AdamW's bias correction counts them)."""
        return int(self.adamw.state[self.slots[0].main]["step"].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for slot in self.slots:
            self.adamw.state[slot.main]["step"].fill_(value)

    def tensors(self) -> dict[str, Sharded]:
        """State by canonical name: `optimizer/exp_avg/<name>`, `optimizer/exp_avg_sq/<name>` and, where the main
        weights are not the model's own, `optimizer/main/<name>`. The boxes are views, to be saved or filled."""
        kinds = [(moment, [(s, self.adamw.state[s.main][moment]) for s in self.slots]) for moment in MOMENTS]
        kinds.append(("main", [(s, s.main) for s in self.slots if s.copied]))
        return {
            f"optimizer/{kind}/{name}": held for kind, pairs in kinds for name, held in boxes_of_slots(pairs).items()
        }

    def reload_main(self) -> None:
        """Take the main weights from the model's, after those were loaded without them."""
        for slot in self.slots:
            if slot.copied:
                slot.main.copy_(slot.shard.weights)


def _main_of(shard: Shard) -> Tensor:
    weights = shard.weights.detach()
    return weights if weights.dtype in (torch.float32, torch.float64) else weights.float()


def boxes_of_slots(pairs: Iterable[tuple[Slot, Tensor]]) -> dict[str, Sharded]:
    """Tensors of slots, each as long as its shard, by canonical name."""
    return merge(
        boxes_of_range(values[place], info_of(parameter).pieces, tuple(parameter.shape), start)
        for slot, values in pairs
        for parameter, start, place in slot.buffer.parts(slot.shard)
    )
