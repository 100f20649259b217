"""Answers of preference pairs in packed rows, and sums over them for any split of a row among ranks.

Legend: n rows, S positions, s positions of a context rank, W bound on the documents of a row, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_data.batch_loader import StepBatch
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import CommGroup, all_reduce
from mega_trainer.distributed.device import to_device
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.pipeline.executor import PipelineExecutor


@dataclass(frozen=True)
class PreferenceAnswers:
    """Chosen and rejected answers of preference pairs in n batch rows.
    The documents 2 i and 2 i + 1 of each row are a pair, and an odd last document is padding.

    Attributes:
        documents: int64 [n, s], document of each token; row i has the numbers from i W on.
        weights: fp32 [n, s], weight of each label, 0 outside the answers.
        pairs: int64 [P], indices of the pairs among the n W / 2 possible pairs.
        tokens: fp64 [P, 2], sum of the weights of each answer's labels.
        width: W.
        context: context-parallel ranks that share the rows.
    """

    documents: Tensor
    weights: Tensor
    pairs: Tensor
    tokens: Tensor
    width: int
    context: CommGroup

    @classmethod
    def from_step_batch(
        cls,
        batch: StepBatch,
        rows: slice,
        width: int,
        device: torch.device,
        context: CommGroup,
        *,
        scored: bool = False,
    ) -> PreferenceAnswers:
        """Return the chosen and rejected answers in some rows of this data rank's batch.
        A context rank gets only its own tokens. `width` is an even number, at least the number of documents in any row.

        With `scored`, as for reward models, only the last token of each document has a weight.
        """
        assert batch.document_ids is not None
        ids = batch.document_ids[rows].astype(np.int64)
        weights, count = batch.loss_weights[rows], len(ids)
        if scored:
            weights = (np.diff(ids, axis=1, append=-1) != 0).astype(np.float32)
        documents = ids + width * np.arange(count)[:, None]
        present = np.arange(width // 2) < count_row_pairs(ids)[:, None]
        tokens = np.bincount(documents.ravel(), weights.ravel(), count * width).reshape(-1, 2)[present.ravel()]
        own_tokens = get_context_rank_token_indices(ids.shape[1], context)

        def to_device_tensor(array: npt.NDArray[Any]) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)

        return cls(
            to_device_tensor(documents[:, own_tokens]),
            to_device_tensor(weights[:, own_tokens]),
            to_device_tensor(np.flatnonzero(present)),
            to_device_tensor(tokens),
            width,
            context,
        )

    def sum_log_probs(self, log_probs: Tensor) -> Tensor:
        """Sum this rank's token log-probabilities [n, s] over each answer of P preference pairs: fp64 [P, 2].
        A collective call of the context ranks.
        """
        out = log_probs.new_zeros(len(log_probs) * self.width, dtype=torch.float64)
        out.index_add_(0, self.documents.flatten(), (log_probs.double() * self.weights).flatten())
        all_reduce(out, self.context)
        return out.view(-1, 2)[self.pairs]

    def spread_gradient(self, gradient: Tensor) -> Tensor:
        """Map the gradient of summed log-probabilities of P answer pairs, [P, 2], to that of each token of n rows, [n, s].
        The result is the gradient of each token's log-probability.
        """
        out = gradient.new_zeros(len(self.weights) * self.width // 2, 2)
        out[self.pairs] = gradient
        return out.flatten()[self.documents] * self.weights


def count_row_pairs(documents: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the number of answer pairs in each row, from the document number of each token [n, S]: int64 [n]."""
    found: npt.NDArray[np.int64] = (documents.max(axis=1).astype(np.int64) + 1) // 2
    return found


def count_answers(batch: StepBatch) -> int:
    """Return the number of answers in a batch's pairs, without answers that are missing (KTO)."""
    assert batch.document_ids is not None
    return sum(
        len(np.unique(ids[(weights > 0) & (ids < 2 * pairs)]))
        for ids, weights, pairs in zip(
            batch.document_ids, batch.loss_weights, count_row_pairs(batch.document_ids), strict=True
        )
    )


def bound_documents_per_row(batch: StepBatch) -> int:
    """Return an even number that is at least the number of documents in any row of the batch."""
    assert batch.document_ids is not None
    return 2 * (int(batch.document_ids.max()) // 2 + 1)


def pair_mismatched_answers(batch: StepBatch) -> StepBatch:
    """Return the batch with each answer moved to the question of the next document in its row (KTO's KL estimate).

    A document without an answer is unchanged. Rows keep their lengths: their questions and answers are only rearranged.
    """
    assert batch.document_ids is not None
    rows = [_cycle_row(batch, row) for row in range(len(batch.tokens))]
    tokens, labels, weights, positions, documents = (np.stack(each) for each in zip(*rows, strict=True))
    return replace(
        batch, tokens=tokens, labels=labels, loss_weights=weights, position_ids=positions, document_ids=documents
    )


def _cycle_row(batch: StepBatch, row: int) -> tuple[npt.NDArray[np.generic], ...]:
    assert batch.document_ids is not None
    ids = batch.document_ids[row]
    out = [each[row].copy() for each in (batch.tokens, batch.labels, batch.loss_weights, batch.position_ids)]
    documents, parts = ids.copy(), []
    for number in range(2 * int(count_row_pairs(ids[None])[0])):
        own = np.flatnonzero(ids == number)
        whole = np.append(batch.tokens[row, own], batch.labels[row, own[-1]])
        counts = np.append(0, batch.loss_weights[row, own])
        first = int(np.argmax(counts > 0)) if counts.any() else len(counts)
        parts.append(((whole[:first], counts[:first]), (whole[first:], counts[first:])))
    start = 0
    answered = [number for number, (_, (tokens, _)) in enumerate(parts) if len(tokens)]
    previous = dict(zip(answered, [*answered[-1:], *answered[:-1]], strict=True))
    for number, (question, _) in enumerate(parts):
        answer = parts[previous.get(number, number)][1]
        whole, counts = (np.concatenate([a, b]) for a, b in zip(question, answer, strict=True))
        span = slice(start, start := start + len(whole) - 1)
        for array, value in zip(out, (whole[:-1], whole[1:], counts[1:], np.arange(len(whole) - 1)), strict=True):
            array[span] = value
        documents[span] = number
    return (*out, documents)


def split_preference_answers(
    batch: StepBatch, micro: Sequence[MicroBatch], context: CommGroup, *, scored: bool = False
) -> list[PreferenceAnswers]:
    """Return the preference answers of each micro-batch of a step.
    `batch` has the step's samples; with `scored`, as for reward models, only each document's last token has a weight.
    """
    width, found, start = bound_documents_per_row(batch), [], 0
    for one in micro:
        rows = slice(start, start := start + len(one.samples))
        found.append(PreferenceAnswers.from_step_batch(batch, rows, width, one.tokens.device, context, scored=scored))
    return found


@torch.no_grad()
def compute_answer_log_prob_sums(
    executor: PipelineExecutor, micro: Sequence[MicroBatch], answers: Sequence[PreferenceAnswers]
) -> list[Tensor]:
    """Run a model; return each micro-batch's summed answer log-probabilities, fp64 [P, 2], zeros except on the last stage."""
    with executor.evaluation_mode():
        executor.run_operations(micro, 1.0)
    if executor.last_stage_index not in executor.stages:
        return [torch.zeros_like(each.tokens) for each in answers]
    return [each.sum_log_probs(-executor.losses[number]) for number, each in enumerate(answers)]


def contributes_answer_sums(executor: PipelineExecutor) -> bool:
    """Return whether this rank, alone among those with equal answer sums, adds them to a sum over all ranks."""
    groups = executor.parallel_groups
    return groups.tp.rank == 0 and groups.cp.rank == 0 and executor.last_stage_index in executor.stages
