"""Objectives of task heads: labels of texts and tokens, and contrastive learning of text embeddings.

As for preference losses, the last stage has the outputs of a micro-batch's tokens before it computes their gradient, so a
loss of these outputs reduces to a weight on each (`MicroBatch.weight_fn`).

Legend: B rows, s positions of a context rank, K outputs per token, D width of a vector, N texts, G groups, W texts of a
group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from mega_common.errors import DataError
from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import CommGroup, all_gather, all_reduce
from mega_trainer.distributed.device import to_device
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.pipeline.executor import PipelineExecutor

LabelLoss = Literal["cross_entropy", "mse", "bce"]


def compute_label_losses(outputs: Tensor, labels: Tensor, loss: LabelLoss) -> Tensor:
    """Return the cross entropy, squared error or binary cross entropy (`loss`) of n outputs [n, K] and labels [n].
    The last two are for K = 1: regression, and labels from 0 to 1 (reranking).
    """
    if loss == "cross_entropy":
        return F.cross_entropy(outputs, labels.long(), reduction="none")
    values, labels = outputs.squeeze(-1), labels.to(outputs.dtype)
    if loss == "mse":
        return (values - labels).square()
    return F.binary_cross_entropy_with_logits(values, labels, reduction="none")


def select_labeled_tokens(batch: StepBatch, pooling: str, *, by_token: bool) -> npt.NDArray[np.bool_]:
    """Return the mask of tokens whose outputs have a label: all with a weight, or the first or last of each text.
    It is bool [n, S].
    """
    counts: npt.NDArray[np.bool_] = batch.loss_weights > 0
    if by_token:
        return counts
    assert batch.document_ids is not None
    edge: dict[str, Any] = {"prepend": -1} if pooling == "first" else {"append": -1}
    counts &= np.diff(batch.document_ids.astype(np.int64), axis=1, **edge) != 0
    return counts


class TaskObjective(TrainingObjective):
    """Base of the objectives of task heads, which sum their losses and metrics over terms on this rank.

    Args:
        config: configuration of the run.
        executor: executor of the trained model.
        device: device of this rank's part of the model.
    """

    term_name = "labels"

    def __init__(self, config: RunConfig, executor: PipelineExecutor, device: torch.device) -> None:
        super().__init__(executor.parallel_groups, 0)
        self.config, self.executor, self.device = config, executor, device
        self._has_outputs = executor.last_stage_index in executor.stages
        self._sums = torch.zeros(2 + len(self.metric_names), dtype=torch.float64, device=device)  # the last is a count

    def count_terms(self, batch: StepBatch) -> int:
        """Return the number of terms of the loss in this data rank's batch."""
        raise NotImplementedError

    def count_step_terms(self, batch: StepBatch) -> list[float]:
        """Return the number of terms of the step's loss over all data ranks."""
        counts = torch.tensor(self.count_local_terms(batch), dtype=torch.float64)
        all_reduce(counts, self.groups.world)
        return counts.tolist()

    def count_local_terms(self, batch: StepBatch | None) -> list[float]:
        """Return this rank's share of the step's number of terms; the sum over all ranks is the total."""
        if batch is None or any(group.rank for group in (self.groups.tp, self.groups.cp, self.groups.pp)):
            return [0.0]
        return [float(self.count_terms(batch))]

    def add_loss_and_metric_sums(self, losses: Tensor, *metrics: Tensor) -> None:
        """Add losses [n] and metrics [n] to this rank's sums, on the first tensor-parallel rank only.
        Each context rank has terms of its own.
        """
        if self.groups.tp.rank == 0:
            values = [losses, *metrics, torch.ones_like(losses)]
            self._sums += torch.stack([value.detach().double().sum() for value in values])

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        """Return this rank's sums of a step with the task's loss in place of the first, and metrics appended."""
        return torch.cat([self._sums[:1], sums[1:], self._sums[1:-1]])

    def validation_totals(self, executor: PipelineExecutor, sums: Tensor, micro: Sequence[MicroBatch]) -> Tensor:
        """Return this rank's sums of a validation's losses and metrics over terms, and the number of terms."""
        return self._sums.clone()

    def metrics(self, figures: Sequence[float], count: float | None = None) -> Mapping[str, float]:
        """Return the means over terms to write to metrics.jsonl and, for a step, the number of terms."""
        return {**super().metrics(figures, count), **({} if count is None else {self.term_name: count})}

    def split_rows_by_micro_batch(
        self, arrays: Sequence[npt.NDArray[Any]], micro: Sequence[MicroBatch]
    ) -> list[list[Tensor]]:
        """Return arrays [n, S] of a step as tensors [B, s] by micro-batch, with this context rank's tokens only."""
        own, start, found = get_context_rank_token_indices(arrays[0].shape[1], self.groups.cp).numpy(), 0, []
        for one in micro:
            rows = slice(start, start := start + len(one.samples))
            found.append(
                [to_device(torch.from_numpy(np.ascontiguousarray(each[rows][:, own])), self.device) for each in arrays]
            )
        return found


class ClassificationObjective(TaskObjective):
    """Objective of a classification or regression head: mean loss over labeled texts or tokens.
    The loss is that of `compute_label_losses`.
    """

    def __init__(self, config: RunConfig, executor: PipelineExecutor, device: torch.device) -> None:
        head = config.model.task_head
        assert head is not None
        self.loss, self._head = config.objective.get_label_loss(head.labels), head
        self.metric_names = () if self.loss == "mse" else ("accuracy",)
        super().__init__(config, executor, device)

    def _select_tokens(self, batch: StepBatch) -> npt.NDArray[np.bool_]:
        return select_labeled_tokens(batch, self.config.model.text_pooling, by_token=self._head.kind == "token")

    def count_terms(self, batch: StepBatch) -> int:
        """Return the number of labels in this data rank's batch."""
        return int(self._select_tokens(batch).sum())

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches with a function that weights each output by its gradient.

        Raises:
            DataError: for a label that the head does not have.
        """
        assert batch.targets is not None
        selected = self._select_tokens(batch)
        self._check_labels(batch.targets[selected], batch)
        self._sums.zero_()
        return [
            replace(one, weight_fn=partial(self.compute_token_weights, selected=labeled, labels=labels))
            for one, (labeled, labels) in zip(
                micro, self.split_rows_by_micro_batch([selected, batch.targets], micro), strict=True
            )
        ]

    def _check_labels(self, labels: npt.NDArray[np.float32], batch: StepBatch) -> None:
        """Reject labels that are not classes of the head, or for bce not between 0 and 1."""
        limit = self._head.labels - 1 if self.loss == "cross_entropy" else 1
        whole = self.loss != "cross_entropy" or (labels == np.floor(labels)).all()
        if self.loss != "mse" and labels.size and not (whole and labels.min() >= 0 and labels.max() <= limit):
            found = next(label for label in labels.tolist() if not 0 <= label <= limit or (not whole and label % 1))
            raise DataError(
                f"model.task_head.labels = {self._head.labels}, with objective.loss = {self.loss}, requires labels from 0 to "
                f"{limit}, found {found:g} in one of the samples {batch.sample_ids.min()} to {batch.sample_ids.max()}",
                hint="set model.task_head.labels to the number of labels, or objective.loss=mse for numbers",
            )

    def compute_token_weights(self, outputs: Tensor, selected: Tensor, labels: Tensor) -> Tensor:
        """Return minus the gradient of the losses in the outputs [B, s, K], and add losses to this objective's sums."""
        with torch.enable_grad():
            chosen = outputs[selected].requires_grad_()
            losses = compute_label_losses(chosen, labels[selected], self.loss)
            (gradient,) = torch.autograd.grad(losses.sum(), chosen)
        right = chosen.argmax(-1) if self.loss == "cross_entropy" else (chosen.squeeze(-1) > 0)
        metrics = [right == labels[selected].round()] if self.metric_names else []
        self.add_loss_and_metric_sums(losses, *metrics)
        weights = torch.zeros_like(outputs)
        weights[selected] = -gradient
        return weights


@dataclass(frozen=True)
class TextPooling:
    """Pooling of the outputs of a micro-batch's tokens to vectors of its N texts.

    Attributes:
        texts: int64 [B, s], number of each token's text.
        weights: fp32 [B, s], weight of a token in its text's vector.
        count: N.
        context: context-parallel ranks that share the rows.
    """

    texts: Tensor
    weights: Tensor
    count: int
    context: CommGroup

    def pool_outputs(self, outputs: Tensor) -> Tensor:
        """Return the vectors [N, D] of the texts, weighted sums of the outputs [B, s, D] of their tokens.
        A collective call of the context ranks.
        """
        out = outputs.new_zeros(self.count, outputs.shape[-1])
        out.index_add_(0, self.texts.flatten(), (outputs * self.weights.to(outputs.dtype)[..., None]).flatten(0, 1))
        all_reduce(out, self.context)
        return out

    def spread_gradient(self, gradient: Tensor) -> Tensor:
        """Map the gradient of the vectors [N, D] to the gradient of the outputs [B, s, D]."""
        return gradient[self.texts] * self.weights.to(gradient.dtype)[..., None]


def compute_pooling_weights(batch: StepBatch, pooling: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the number of each token's text in its row, and the token's weight in the text's vector.
    They are int64 [n, S] (0 for padding) and fp32 [n, S].
    """
    assert batch.document_ids is not None
    valid = batch.loss_weights > 0
    texts = np.where(valid, batch.document_ids, 0).astype(np.int64)
    if pooling != "mean":
        return texts, select_labeled_tokens(batch, pooling, by_token=False).astype(np.float32)
    sizes = np.stack([np.bincount(row, mask, texts.max() + 1) for row, mask in zip(texts, valid, strict=True)])
    return texts, (valid / np.maximum(np.take_along_axis(sizes, texts, 1), 1)).astype(np.float32)


def info_nce_losses(vectors: Tensor, temperature: float, dimensions: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Return the InfoNCE loss of each of G queries, and whether its positive is the nearest candidate.
    They are [G] in the dtype of the vectors, and bool [G] (arXiv:1807.03748).

    The candidates of a query are the positives and the negatives of all groups; similarity is the cosine divided by
    `temperature`. With `dimensions`, the losses of the first d elements of the vectors are added for each d (Matryoshka,
    arXiv:2205.13147); the highest similarity is by the last of them.

    Args:
        vectors: [G, W, D]: query, positive and negatives of each group.
    """
    losses = vectors.new_zeros(len(vectors))
    right = torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    for size in dimensions or (vectors.shape[-1],):
        unit = F.normalize(vectors[..., :size], dim=-1)
        candidates = unit[:, 1:].transpose(0, 1).flatten(0, 1)  # positives first: the positive of query i is number i
        scores = unit[:, 0] @ candidates.T / temperature
        labels = torch.arange(len(vectors), device=vectors.device)
        losses = losses + F.cross_entropy(scores, labels, reduction="none")
        right = scores.argmax(-1) == labels
    return losses, right


class ContrastiveObjective(TaskObjective):
    """Objective of text embeddings: mean of `info_nce_losses` over the groups of a step.
    The negatives come from all data ranks and micro-batches of the step.

    A forward without gradients gives the vectors of all texts; the loss's gradient in them then weights the outputs of the
    step's forwards and backwards, as in GradCache (arXiv:2101.06983). So memory holds one micro-batch.
    """

    metric_names, term_name = ("accuracy",), "groups"

    def count_terms(self, batch: StepBatch) -> int:
        """Return the number of groups in this data rank's batch."""
        assert batch.document_ids is not None
        assert batch.group_size is not None
        texts = np.where(batch.loss_weights > 0, batch.document_ids, -1).max(axis=1) + 1
        return int(texts.sum()) // batch.group_size

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Embed all texts without gradients; return micro-batches whose outputs are weighted by the loss's gradient.
        A collective call of all ranks.
        """
        self._sums.zero_()
        poolings = self._make_poolings(batch, micro)
        with torch.no_grad():
            self.executor.run_operations(micro, 1.0)
        if not self._has_outputs:
            return micro
        outputs = [-self.executor.losses[number] for number in range(len(micro))]
        vectors = torch.cat([each.pool_outputs(one) for each, one in zip(poolings, outputs, strict=True)])
        assert batch.group_size is not None
        gradients = torch.split(self._compute_gradients(vectors, batch.group_size), [each.count for each in poolings])
        return [
            replace(one, weight_fn=_PoolingWeights(pooling, gradient))
            for one, pooling, gradient in zip(micro, poolings, gradients, strict=True)
        ]

    def _make_poolings(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> list[TextPooling]:
        """Return the pooling of each micro-batch, whose texts are numbered row by row."""
        texts, weights = compute_pooling_weights(batch, self.config.model.text_pooling)
        counts = np.where(batch.loss_weights > 0, texts, -1).max(axis=1) + 1
        found, start = [], 0
        for one, (own, weight) in zip(micro, self.split_rows_by_micro_batch([texts, weights], micro), strict=True):
            rows = counts[start : start + len(one.samples)]
            start += len(rows)
            before = torch.from_numpy(np.cumsum(rows) - rows).to(self.device)
            found.append(TextPooling(own + before[:, None], weight, int(rows.sum()), self.groups.cp))
        return found

    def _compute_gradients(self, vectors: Tensor, width: int) -> Tensor:
        """Return the gradient of the step's losses in this data rank's vectors [N, D], and add its losses to the sums."""
        dp = self.groups.dp
        counts = all_gather(torch.tensor([len(vectors)], device=self.device), dp).tolist()
        padded = F.pad(vectors, (0, 0, 0, max(counts) - len(vectors)))
        gathered = torch.split(all_gather(padded, dp), max(counts))
        every = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
        settings = self.config.objective
        with torch.enable_grad():
            every.requires_grad_()
            losses, right = info_nce_losses(
                every.view(-1, width, every.shape[-1]), settings.effective_temperature, settings.dimensions
            )
            (gradient,) = torch.autograd.grad(losses.sum(), every)
        first = sum(counts[: dp.rank])
        own = slice(first // width, (first + len(vectors)) // width)
        if self.groups.cp.rank == 0:
            self.add_loss_and_metric_sums(losses[own], right[own])
        return gradient[first : first + len(vectors)]


@dataclass(frozen=True)
class _PoolingWeights:
    """Weight function of a micro-batch; see `MicroBatch.weight_fn`."""

    pooling: TextPooling
    gradient: Tensor

    def __call__(self, outputs: Tensor) -> Tensor:
        return -self.pooling.spread_gradient(self.gradient).to(outputs.dtype)
