"""Where the answers of preference pairs are in rows, and sums over them, whatever ranks share a row.

Legend: n rows, S positions, s those of a context rank, W documents that a row has room for, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_data.loader import StepBatch
from mega_trainer.batch import MicroBatch
from mega_trainer.comm import Group, all_reduce
from mega_trainer.parallel.context import place_of_tokens
from mega_trainer.pipeline.run import Executor


@dataclass(frozen=True)
class Answers:
    """The answers in n rows: of each row documents 2 i and 2 i + 1 are a pair, and one that is left over is padding.

    Attributes:
        documents: int64 [n, s], of each token its document, numbered row after row, W for each.
        weights: fp32 [n, s], of each label, 0 outside the answers.
        pairs: int64 [P], where the pairs are among the n W / 2 that there could be.
        tokens: fp64 [P, 2], how many labels count, by their weights.
        width: W.
        context: ranks that share the rows.
    """

    documents: Tensor
    weights: Tensor
    pairs: Tensor
    tokens: Tensor
    width: int
    context: Group

    @classmethod
    def of(
        cls, batch: StepBatch, rows: slice, width: int, device: torch.device, context: Group, *, scored: bool = False
    ) -> Answers:
        """Those of some rows of this data rank's; a context rank has its own tokens of them.

        Where texts are `scored`, what counts of one is its last token.
        """
        assert batch.document_ids is not None
        ids = batch.document_ids[rows].astype(np.int64)
        weights, count = batch.loss_weights[rows], len(ids)
        if scored:
            weights = (np.diff(ids, axis=1, append=-1) != 0).astype(np.float32)
        documents = ids + width * np.arange(count)[:, None]
        there = np.arange(width // 2) < counted(ids)[:, None]
        tokens = np.bincount(documents.ravel(), weights.ravel(), count * width).reshape(-1, 2)[there.ravel()]
        places = place_of_tokens(ids.shape[1], context)

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            tensor(documents[:, places]),
            tensor(weights[:, places]),
            tensor(np.flatnonzero(there)),
            tensor(tokens),
            width,
            context,
        )

    def sums(self, log_probs: Tensor) -> Tensor:
        """Of log-probabilities [n, s] those of each answer: fp64 [P, 2]. A collective call of the context ranks."""
        out = log_probs.new_zeros(len(log_probs) * self.width, dtype=torch.float64)
        out.index_add_(0, self.documents.flatten(), (log_probs.double() * self.weights).flatten())
        all_reduce(out, self.context)
        return out.view(-1, 2)[self.pairs]

    def spread(self, gradient: Tensor) -> Tensor:
        """The gradient of such sums [P, 2] as that of the log-probabilities: [n, s]."""
        out = gradient.new_zeros(len(self.weights) * self.width // 2, 2)
        out[self.pairs] = gradient
        return out.flatten()[self.documents] * self.weights


def counted(documents: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Pairs in each row of documents [n, S]: int64 [n]."""
    found: npt.NDArray[np.int64] = (documents.max(axis=1).astype(np.int64) + 1) // 2
    return found


def answered(batch: StepBatch) -> int:
    """Return the number of answers in a batch, without those that are missing."""
    assert batch.document_ids is not None
    return sum(
        len(np.unique(ids[(weights > 0) & (ids < 2 * pairs)]))
        for ids, weights, pairs in zip(batch.document_ids, batch.loss_weights, counted(batch.document_ids), strict=True)
    )


def room(batch: StepBatch) -> int:
    """W: an even number of documents that no row of the batch has more of."""
    assert batch.document_ids is not None
    return 2 * (int(batch.document_ids.max()) // 2 + 1)


def mismatched(batch: StepBatch) -> StepBatch:
    """The batch with each answer behind the question of the one after it, the last one's behind the first of its row.

    Where an answer is missing, its document stays as it is. A row's questions and answers are all there still, so that it is as long.
    """
    assert batch.document_ids is not None
    rows = [_cycled(batch, row) for row in range(len(batch.tokens))]
    tokens, labels, weights, positions, documents = (np.stack(each) for each in zip(*rows, strict=True))
    return replace(
        batch, tokens=tokens, labels=labels, loss_weights=weights, position_ids=positions, document_ids=documents
    )


def _cycled(batch: StepBatch, row: int) -> tuple[npt.NDArray[np.generic], ...]:
    assert batch.document_ids is not None
    ids = batch.document_ids[row]
    out = [each[row].copy() for each in (batch.tokens, batch.labels, batch.loss_weights, batch.position_ids)]
    documents, parts = ids.copy(), []
    for number in range(2 * int(counted(ids[None])[0])):
        own = np.flatnonzero(ids == number)
        whole = np.append(batch.tokens[row, own], batch.labels[row, own[-1]])
        counts = np.append(0, batch.loss_weights[row, own])
        first = int(np.argmax(counts > 0)) if counts.any() else len(counts)
        parts.append(((whole[:first], counts[:first]), (whole[first:], counts[first:])))
    start = 0
    there = [number for number, (_, (tokens, _)) in enumerate(parts) if len(tokens)]
    before = dict(zip(there, [*there[-1:], *there[:-1]], strict=True))
    for number, (question, _) in enumerate(parts):
        answer = parts[before.get(number, number)][1]
        whole, counts = (np.concatenate([a, b]) for a, b in zip(question, answer, strict=True))
        here = slice(start, start := start + len(whole) - 1)
        for place, value in zip(out, (whole[:-1], whole[1:], counts[1:], np.arange(len(whole) - 1)), strict=True):
            place[here] = value
        documents[here] = number
    return (*out, documents)


def answers_of(batch: StepBatch, micro: Sequence[MicroBatch], context: Group, *, scored: bool = False) -> list[Answers]:
    """Those of each micro-batch that the batch was cut into; `scored` as in `Answers.of`."""
    width, found, start = room(batch), [], 0
    for one in micro:
        rows = slice(start, start := start + len(one.samples))
        found.append(Answers.of(batch, rows, width, one.tokens.device, context, scored=scored))
    return found


@torch.no_grad()
def sums_by(executor: Executor, micro: Sequence[MicroBatch], answers: Sequence[Answers]) -> list[Tensor]:
    """What a model makes of the answers of each micro-batch, fp64 [P, 2]; zero but on the last stage."""
    with executor.evaluating():
        executor.run(micro, 1.0)
    if executor.last_stage not in executor.stages:
        return [torch.zeros_like(each.tokens) for each in answers]
    return [each.sums(-executor.losses[number]) for number, each in enumerate(answers)]


def speaks(executor: Executor) -> bool:
    """Whether this rank brings sums of answers to a sum over all ranks: one of those that have them alike."""
    groups = executor.groups
    return groups.tp.rank == 0 and groups.cp.rank == 0 and executor.last_stage in executor.stages
