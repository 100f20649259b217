"""Objective of an extension: the mean over unmasked tokens of a loss that depends on each token's logits alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mega_data.batch_loader import StepBatch
from mega_trainer.data.micro_batch import MicroBatch, TokenLossFunction
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.objectives.training_objective import TrainingObjective


class TokenLossObjective(TrainingObjective):
    """Objective of an extension: mean of a function of each label's log-probability and softmax normaliser.
    The function is f(log p, log Z), with Z the sum of the exponentials of the logits.

    Losses of multi-token prediction and the validation loss stay cross entropies.
    """

    def __init__(self, groups: ParallelGroups, mtp_layers: int, token_loss: TokenLossFunction) -> None:
        super().__init__(groups, mtp_layers)
        self._token_loss = token_loss

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of a step with the loss function of the extension."""
        return [replace(one, token_loss=self._token_loss) for one in micro]
