"""A step's samples as tensors, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mega_data.loader import StepBatch


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass on one rank.

    Attributes:
        tokens, labels, positions: int64 [B, S].
        weights: fp32 [B, S], the weight of each label in the loss (0 where it does not count).
        documents: int32 [B, S], which document each token belongs to, when attention is closed at document ends.
        samples: the global number of each sample.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    documents: Tensor | None
    samples: Sequence[int]


def micro_batches(batch: StepBatch, size: int, device: torch.device) -> Iterator[MicroBatch]:
    """Cut a step's samples into micro-batches of `size`, in order."""
    for start in range(0, len(batch.sample_ids), size):
        part = slice(start, start + size)

        def tensor(array: np.ndarray, part: slice = part) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array[part])).to(device, non_blocking=True)

        yield MicroBatch(
            tokens=tensor(batch.tokens),
            labels=tensor(batch.labels),
            weights=tensor(batch.loss_mask).float(),
            positions=tensor(batch.position_ids),
            documents=None if batch.document_ids is None else tensor(batch.document_ids),
            samples=[int(sample) for sample in batch.sample_ids[part]],
        )
