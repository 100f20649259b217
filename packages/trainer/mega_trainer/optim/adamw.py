"""AdamW (arXiv:1711.05101), torch's fused implementation, on one tensor per slot; decoupled weight decay on matrices
only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_trainer.optim.optimizer_slots import OptimizerOffloadTransfers, OptimizerSlot

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWUpdateRule:
    """AdamW update of main weights, which are held in one slot per parameter shard.

    Args:
        slots: slots to update.
        betas, eps, weight_decay: as in the paper.
    """

    def __init__(
        self, slots: Sequence[OptimizerSlot], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.slots = list(slots)
        groups = [
            {
                "params": [slot.main for slot in slots if _param_group_key(slot) == treatment],
                "weight_decay": weight_decay if decay else 0.0,
                "decoupled": decoupled,
                "lr_factor": lr_factor,
            }
            for treatment in dict.fromkeys(map(_param_group_key, slots))
            for decay, decoupled, lr_factor in [treatment]
        ]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        for slot in slots:
            self._adamw.state[slot.main] = {
                "step": torch.zeros((), dtype=torch.float32, device=slot.main.device),
                **{moment: torch.zeros_like(slot.main) for moment in MOMENTS},
            }

    def update_slots(self, transfers: OptimizerOffloadTransfers, lr: float, decoupled_lr: float | None = None) -> None:
        """Update the main weights of all shards (slots) by AdamW at rate `lr`, or `decoupled_lr` if decoupled.
        Decoupled param groups are the embedding and the output layer.
        """
        for group in self._adamw.param_groups:
            rate = decoupled_lr if group["decoupled"] and decoupled_lr is not None else lr
            group["lr"] = rate * group["lr_factor"]
        for slots in [[slot] for slot in self.slots] if transfers.one_by_one else [self.slots]:
            with transfers.overlap_copies_with_update(slots):
                for slot in slots:
                    slot.main.grad = slot.grads
                self._adamw.step()  # updates only the slots with a gradient
                for slot in slots:
                    slot.main.grad = None

    def state_tensors(self) -> dict[str, list[tuple[OptimizerSlot, Tensor]]]:
        """Return AdamW's two moments, {name of the moment: one tensor for each parameter shard (slot)}."""
        return {moment: [(slot, self._adamw.state[slot.main][moment]) for slot in self.slots] for moment in MOMENTS}

    @property
    def update_count(self) -> int:
        """Number of optimizer updates so far, which the bias correction uses."""
        return int(self._adamw.state[self.slots[0].main]["step"].item())

    @update_count.setter
    def update_count(self, value: int) -> None:
        """Set the number of updates so far, which the bias correction uses."""
        for slot in self.slots:
            self._adamw.state[slot.main]["step"].fill_(value)


def _param_group_key(slot: OptimizerSlot) -> tuple[bool, bool, float]:
    """Return the settings that define an AdamW param group."""
    return slot.kind.decay, slot.kind.decoupled, slot.kind.lr_factor
