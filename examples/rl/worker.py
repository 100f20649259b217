"""The trainer as the training half of a reinforcement-learning framework, by the names that verl's engines have.

A worker is one rank. It holds the policy, computes log-probabilities, takes steps by a loss that the framework gives, and streams
its weights to whatever generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

import mega_trainer

Loss = Callable[[list[Tensor]], Tensor]


class EngineWorker:
    """What verl's `BaseEngine` asks of a trainer, of `mega_trainer.TrainingEngine`.

    There `forward_backward_batch` and `optimizer_step` are two calls; here a step is one, at the former, for the sums over
    ranks run beside the backward. So the latter returns what the step computed, and there are no gradients to set to zero.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def initialize(self) -> None:
        """Build the model on this rank; the process group is there already."""
        self.engine = mega_trainer.TrainingEngine(self._config)

    def train_mode(self) -> AbstractContextManager[None]:
        """Steps are taken in training mode and log-probabilities computed in evaluation mode by themselves."""
        return nullcontext()

    eval_mode = train_mode

    def forward_backward_batch(
        self, data: Sequence[Sequence[int]], loss_function: Loss | None, forward_only: bool = False
    ) -> list[Tensor] | float:
        """Log-probabilities of all tokens but the first of each sequence; or a step, and the value of its loss."""
        if forward_only or loss_function is None:
            return self.engine.log_probs(data)
        self._told = self.engine.train_step(data, loss_function)
        return self._told.loss

    def optimizer_step(self) -> float:
        """The norm of the step's gradient, before the clip."""
        return self._told.grad_norm

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under HuggingFace's names, whole, one after another."""
        for bucket in self.engine.stream_weights():
            yield from bucket

    def to(self, device: str) -> None:
        """Give the device's memory to whatever generates ("cpu"), or take it back."""
        if device == "cpu":
            self.engine.offload()
        else:
            self.engine.reload()

    def save_checkpoint(self, path: str) -> None:
        """Everything, in a form that any layout goes on from."""
        self.engine.save(path)

    def load_checkpoint(self, path: str) -> None:
        """Go on from there."""
        self.engine.resume(path)

    def get_data_parallel_rank(self) -> int:
        """Every rank is given all sequences, and deals them itself: so there is one, of size one."""
        return 0

    def get_data_parallel_size(self) -> int:
        """See above."""
        return 1

    @property
    def rank(self) -> int:
        """This process's."""
        return dist.get_rank() if dist.is_initialized() else 0
