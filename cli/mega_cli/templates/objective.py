"""Training objective `my_extension`: the focal loss (arXiv:1708.02002). Change it to yours.

    loss = -(1 - p)^gamma log p          p is the probability of the label

A loss is a function of the log-probability of each token's label and of log Z, the log-sum-exp of its logits. Its gradient is
taken by autograd, and the vocabulary may be split over tensor ranks.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from mega_trainer.extend import Extension, Objective, StrictConfig


class FocalOptions(StrictConfig):
    """Settings of `objective.options` in run.yaml."""

    gamma: float = Field(1.0, ge=0, description="0 is the cross entropy; larger values leave out what is known")


def token_loss(log_probs: Tensor, log_normalizers: Tensor, *, options: FocalOptions) -> Tensor:
    """Return the loss of each token [n] from the log-probability of its label and log Z, both [n]."""
    return -((1 - log_probs.exp()) ** options.gamma) * log_probs


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, objectives={"my_extension": Objective(token_loss, FocalOptions)}
)
