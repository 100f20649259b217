"""Cross entropy with a z-loss (arXiv:2204.02311, section 5): a penalty on the logarithm of the softmax normalizer.

    loss = -log p + weight (log Z)^2

The penalty keeps the logits near zero, which keeps low precision stable. The validation loss stays the cross entropy. The
callback `output` logs the largest weight of the output matrix, `output/largest_weight`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mega_trainer.extend import Callback, Extension, FinishedStep, NoOptions, Objective, StrictConfig


class ZLossOptions(StrictConfig):
    """Settings of `objective.options`."""

    weight: float = 1e-4


def z_loss(log_probs: Tensor, log_normalizers: Tensor, *, options: ZLossOptions) -> Tensor:
    """Return the loss of each token [n] from the log-probability of its label and log Z, both [n]."""
    return -log_probs + options.weight * log_normalizers.square()


class LargestWeight:
    """Callback that logs the largest absolute weight of this rank's output matrix, as a sign of growing logits."""

    def __init__(self, options: NoOptions) -> None:
        self.options = options

    def __call__(self, finished: FinishedStep) -> Mapping[str, float]:
        """Return the number for metrics.jsonl; a pipeline stage without an output matrix has none."""
        head = next((stage for stage in finished.executor.stages.values() if stage.stage.heads), None)
        return {} if head is None else {"largest_weight": float(head.output_weight.abs().max())}


EXTENSION = Extension(
    name="z-loss",
    version="1.0",
    api=1,
    objectives={"z_loss": Objective(z_loss, ZLossOptions)},
    callbacks={"output": Callback(LargestWeight)},
)
