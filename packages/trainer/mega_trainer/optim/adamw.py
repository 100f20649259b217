"""AdamW (arXiv:1711.05101), torch's fused one, on one tensor a slot; decoupled weight decay on matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_trainer.optim.slots import Slot, Transfers

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """A `Rule`.

    Args:
        slots: what it updates.
        betas, eps, weight_decay: as in the paper.
    """

    def __init__(self, slots: Sequence[Slot], *, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.slots = list(slots)
        groups = [
            {
                "params": [slot.main for slot in slots if _treatment(slot) == treatment],
                "weight_decay": weight_decay if decay else 0.0,
                "decoupled": decoupled,
                "lr_factor": lr_factor,
            }
            for treatment in dict.fromkeys(map(_treatment, slots))
            for decay, decoupled, lr_factor in [treatment]
        ]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        for slot in slots:
            self._adamw.state[slot.main] = {
                "step": torch.zeros((), dtype=torch.float32, device=slot.main.device),
                **{moment: torch.zeros_like(slot.main) for moment in MOMENTS},
            }

    def step(self, transfers: Transfers, lr: float, decoupled_lr: float | None = None) -> None:
        """See `Rule.step`."""
        for group in self._adamw.param_groups:
            rate = decoupled_lr if group["decoupled"] and decoupled_lr is not None else lr
            group["lr"] = rate * group["lr_factor"]
        for slots in [[slot] for slot in self.slots] if transfers.one_by_one else [self.slots]:
            with transfers.around(slots):
                for slot in slots:
                    slot.main.grad = slot.grads
                self._adamw.step()  # of what has a gradient
                for slot in slots:
                    slot.main.grad = None

    def state(self) -> dict[str, list[tuple[Slot, Tensor]]]:
        """The two moments."""
        return {moment: [(slot, self._adamw.state[slot.main][moment]) for slot in self.slots] for moment in MOMENTS}

    @property
    def steps(self) -> int:
        """Updates made so far: the bias correction counts them."""
        return int(self._adamw.state[self.slots[0].main]["step"].item())

    @steps.setter
    def steps(self, value: int) -> None:
        for slot in self.slots:
            self._adamw.state[slot.main]["step"].fill_(value)


def _treatment(slot: Slot) -> tuple[bool, bool, float]:
    """What AdamW treats alike."""
    return slot.kind.decay, slot.kind.decoupled, slot.kind.lr_factor
