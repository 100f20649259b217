"""A step's samples as tensors, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_data.loader import StepBatch
from mega_trainer.comm import Group
from mega_trainer.config import RunConfig
from mega_trainer.device import to_device
from mega_trainer.model.context import Outline
from mega_trainer.parallel.context import place_of_tokens


@dataclass(frozen=True)
class Ahead:
    """What a layer that predicts the token k places after the next is given and asked.

    Attributes:
        tokens: int64 [B, S], those k places on.
        labels: int64 [B, S], likewise.
        weights: fp32 [B, S], of each label; 0 also where it is past the sample, or in another document while attention
            is closed at document ends.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass on one rank: all of their S tokens, or those of one context rank.

    Attributes:
        tokens, labels, positions: int64 [B, S].
        weights: fp32 [B, S], the weight of each label in the loss (0 where it does not count).
        outline: of the whole samples: where documents begin, when attention is closed at their ends.
        samples: the global number of each sample.
        ahead: for each of the model's layers that predict further tokens.
        matters: bool [B, S], tokens with a label that counts at or behind them, in their document where attention is
            closed at its end; the others influence nothing. None: not
            asked for, without experts.
        places: int64 [S], where the tokens stand in the whole samples; None when they are those.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    outline: Outline
    samples: Sequence[int]
    ahead: Sequence[Ahead] = ()
    matters: Tensor | None = None
    places: Tensor | None = None

    def part(self, places: Tensor) -> MicroBatch:
        """The tokens at some places of whole samples."""
        tokens, labels, weights, positions = (
            t[:, places] for t in (self.tokens, self.labels, self.weights, self.positions)
        )
        return replace(
            self, tokens=tokens, labels=labels, weights=weights, positions=positions, places=places,
            matters=None if self.matters is None else self.matters[:, places],
            ahead=[Ahead(one.tokens[:, places], one.labels[:, places], one.weights[:, places]) for one in self.ahead],
        )  # fmt: skip


def micro_batches(
    batch: StepBatch, config: RunConfig, device: torch.device, context: Group | None = None
) -> Iterator[MicroBatch]:
    """Cut a step's samples into micro-batches of `config.batch.micro`, in order; of each the tokens of this context rank.

    Raises:
        DataError: for a token that the model's vocabulary does not have.
    """
    size, top = config.batch.micro, max(batch.tokens.max(), batch.labels.max())
    if top >= config.model.vocab_size:
        raise DataError(
            f"one of the samples {batch.sample_ids.min()} to {batch.sample_ids.max()} has the token {top}, but model.vocab_size is "
            f"{config.model.vocab_size}",
            hint="the data were made with another tokenizer, or model.vocab_size is too small",
        )
    matters = _matters(batch) if config.model.moe else None
    further = [_ahead(batch, places) for places in range(1, config.model.mtp_layers + 1)]
    own = None
    if context is not None and context.size > 1:
        own = to_device(place_of_tokens(config.data.seq_length, context), device)
    for start in range(0, len(batch.sample_ids), size):
        part = slice(start, start + size)

        def tensor(array: np.ndarray, part: slice = part) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(array[part])), device)

        whole = MicroBatch(
            tokens=tensor(batch.tokens),
            labels=tensor(batch.labels),
            weights=tensor(batch.loss_weights),
            positions=tensor(batch.position_ids),
            outline=Outline.of(
                batch.position_ids[part], None if batch.document_ids is None else batch.document_ids[part]
            ),
            samples=[int(sample) for sample in batch.sample_ids[part]],
            ahead=[Ahead(*map(tensor, arrays)) for arrays in further],
            matters=None if matters is None else tensor(matters),
        )
        yield whole if own is None else whole.part(own)


def _matters(batch: StepBatch) -> np.ndarray:
    """See `MicroBatch.matters`: bool [n, S]."""
    counts = batch.loss_weights > 0
    left = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # labels that count, from each token to the end of its row
    if batch.document_ids is None:
        return left > 0
    ends = np.diff(batch.document_ids, axis=1, append=-1) != 0
    behind = np.where(ends, left - counts, -1)  # of each document's last token: those of the documents behind it
    return left > np.maximum.accumulate(behind[:, ::-1], axis=1)[:, ::-1]


def _ahead(batch: StepBatch, places: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of `Ahead` for all samples. What is past a sample's end is token 0, and does not count."""
    return _shifted(batch.tokens, places), _shifted(batch.labels, places), further_weights(batch, places)


def further_weights(batch: StepBatch, places: int) -> np.ndarray:
    """fp32 [n, S], the weight of each label those places on."""
    weights = _shifted(batch.loss_weights, places)
    if batch.document_ids is not None:
        weights *= _shifted(batch.document_ids, places) == batch.document_ids
    return weights


def _shifted(array: np.ndarray, places: int) -> np.ndarray:
    return np.pad(array[:, places:], ((0, 0), (0, places)))
