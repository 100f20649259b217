"""Micro-batches: the samples of one step as tensors on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_common.model_config import ModelConfig
from mega_common.vision_config import VisionConfig
from mega_data.batch_loader import StepBatch
from mega_data.images.image_pixels import compute_mrope_positions
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.batch_images import BatchImages, ImageBlock, check_bidirectional_prompt, find_image_blocks
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.device import to_device
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.parallel.expert_routing import RoutingReplay

LabelWeighting = Callable[[Tensor], Tensor]
TokenLossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DocumentBounds:
    """Bounds of documents and bidirectional blocks in a batch of token rows.
    They are in host memory, so that no attention kernel waits for the device.

    Attributes:
        lengths: of each sequence, one more than its largest position.
        document_starts: int64 [B, S], start of each token's document, if attention does not cross documents.
        bidirectional_blocks: blocks of tokens with bidirectional attention: images under `VisionConfig.bidirectional`.
    """

    lengths: list[int]
    document_starts: np.ndarray | None = None
    bidirectional_blocks: Sequence[ImageBlock] = ()

    @classmethod
    def from_positions(
        cls, positions: np.ndarray, documents: np.ndarray | None, bidirectional: np.ndarray | None = None
    ) -> DocumentBounds:
        """Return the document bounds of token rows from position and document ids, int [B, S].
        The bounds have the sequences' lengths, the start of each token's document, and the bidirectional blocks;
        `bidirectional`, bool [B, S], marks tokens of such blocks.
        """
        starts = None if documents is None else _find_document_starts(documents)
        blocks = () if bidirectional is None else find_image_blocks(bidirectional, starts)
        return cls((positions.max(axis=1) + 1).tolist(), starts, blocks)

    @classmethod
    def from_padded_rows(cls, lengths: np.ndarray, width: int) -> DocumentBounds:
        """Return the document bounds of rows of `width` tokens; the padding of each is a separate document.
        The first `lengths` (int [B]) tokens of a row are real.
        """
        positions = np.broadcast_to(np.arange(width), (len(lengths), width))
        padding = positions >= lengths[:, None]
        return cls.from_positions(positions, padding.astype(np.int32) if padding.any() else None)


def _find_document_starts(documents: np.ndarray) -> np.ndarray:
    """Return the position of the first token of each token's document from document ids, both int64 [B, S]."""
    new = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    starts: np.ndarray = np.maximum.accumulate(np.where(new, np.arange(documents.shape[1]), 0), axis=1)
    return starts


@dataclass(frozen=True)
class MtpTargets:
    """Inputs and targets of one multi-token prediction (MTP) layer, for the token k positions after the next.

    Attributes:
        tokens, labels: int64 [B, S], shifted by k positions.
        weights: fp32 [B, S], of each label; 0 also past the end of the sample, and in another document if attention
            does not cross documents.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class TeacherSoftLabels:
    """Soft labels of a distillation teacher: its K most likely next tokens at each position, with log-probabilities.

    Attributes:
        ids: int64 [B, S, K].
        log_probs: [B, S, K], fp32 or fp64, of the teacher at temperature 1.
        temperature: of the loss, for both models.
    """

    ids: Tensor
    log_probs: Tensor
    temperature: float


@dataclass(frozen=True)
class HeadTargets:
    """Targets of the output head for a batch of tokens: labels, loss weights and soft labels.
    A function that computes loss weights from log-probabilities, and the soft labels of a teacher, are optional.
    """

    labels: Tensor
    weights: Tensor
    weight_fn: LabelWeighting | None = None
    soft_labels: TeacherSoftLabels | None = None
    token_loss: TokenLossFunction | None = None


@dataclass(frozen=True)
class EncoderBatch:
    """Encoder input of an encoder-decoder model: all E encoder tokens of each sample, or the share of one context rank.

    Attributes:
        tokens, positions: int64 [B, E].
        sequence_bounds: of the whole samples; padding is a separate document, to which no token attends.
        attention_mask: bool [B, 1, 1, E], False at padding; None without padding.
    """

    tokens: Tensor
    positions: Tensor
    sequence_bounds: DocumentBounds
    attention_mask: Tensor | None


@dataclass(frozen=True)
class RetrievedNeighbors:
    """Retrieved neighbors (RETRO) of each of the L chunks of a sample.
    A chunk has K neighbors of 2 m tokens, where m is the chunk length.

    Attributes:
        tokens: int64 [B, L, K, 2 m], 0 at padding.
        sequence_bounds: of the neighbors, B L K rows; padding is a separate document, to which no token attends.
        attention_mask: bool [B L, 1, 1, 2 m K], False at padding; None without padding.
    """

    tokens: Tensor
    sequence_bounds: DocumentBounds
    attention_mask: Tensor | None


@dataclass(frozen=True)
class SegmentOrderTargets:
    """Labels and loss weights of BERT-style segment order prediction, one per sample of two segments.

    Attributes:
        labels: int64 [B], 1 for swapped segments.
        weights: fp32 [B], of each label in the loss.
    """

    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass on one rank: all of their S tokens, or the share of one context rank.

    Attributes:
        tokens, labels, positions: int64 [B, S].
        weights: fp32 [B, S], loss mask: the weight of each label in the loss.
        sequence_bounds: of the whole samples.
        samples: the global number of each sample.
        mtp_targets: of each MTP layer.
        affects_loss_mask: bool [B, S], tokens with an unmasked label at or after them (in their document, if attention does
            not cross documents); the others have no influence on the loss. None without experts.
        token_indices: int64 [S], positions of the tokens in the whole samples; None without context parallelism.
        weight_fn: returns, for the labels' log-probabilities [B, S], the weights of their losses, in place of `weights`: with
            these the gradient of the weighted losses equals that of another function of the log-probabilities.
        soft_labels: of a teacher, in place of labels.
        token_loss: loss of each token from the log-probability of its label and the log-sum-exp of its logits, in place of
            the cross entropy.
        routes: expert ids of rollout routing replay (R3), given or to record.
        images: of a vision-language model, possibly none.
        source: encoder input of an encoder-decoder; the other fields are of the decoder.
        neighbors: of a retrieval model.
        token_types: int64 [B, S], segment ids; None: all 0.
        segment_order: targets of samples of two segments.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    sequence_bounds: DocumentBounds
    samples: Sequence[int]
    mtp_targets: Sequence[MtpTargets] = ()
    affects_loss_mask: Tensor | None = None
    token_indices: Tensor | None = None
    weight_fn: LabelWeighting | None = None
    soft_labels: TeacherSoftLabels | None = None
    token_loss: TokenLossFunction | None = None
    routes: RoutingReplay | None = None
    images: BatchImages | None = None
    source: EncoderBatch | None = None
    neighbors: RetrievedNeighbors | None = None
    token_types: Tensor | None = None
    segment_order: SegmentOrderTargets | None = None

    @property
    def head_targets(self) -> HeadTargets:
        """Labels and loss weights of this micro-batch for the output head."""
        return HeadTargets(self.labels, self.weights, self.weight_fn, self.soft_labels, self.token_loss)

    def select_tokens(self, indices: Tensor) -> MicroBatch:
        """Return the micro-batch with only the tokens at `indices` into the whole samples."""
        tokens, labels, weights, positions = (
            t[:, indices] for t in (self.tokens, self.labels, self.weights, self.positions)
        )
        return replace(
            self, tokens=tokens, labels=labels, weights=weights, positions=positions, token_indices=indices,
            affects_loss_mask=None if self.affects_loss_mask is None else self.affects_loss_mask[:, indices],
            token_types=None if self.token_types is None else self.token_types[:, indices],
            mtp_targets=[MtpTargets(t.tokens[:, indices], t.labels[:, indices], t.weights[:, indices]) for t in self.mtp_targets],
            images=None if self.images is None else self.images.select_positions(indices),
        )  # fmt: skip


def split_micro_batches(
    batch: StepBatch, config: RunConfig, device: torch.device, context: CommGroup | None = None
) -> Iterator[MicroBatch]:
    """Yield a rank's samples of a step as micro-batches on `device`, of `batch.micro` samples and this context rank's tokens.
    The samples stay in order; `context` is the context-parallel group.

    Raises:
        DataError: for a token that the model's vocabulary does not have; for positions of packed documents that a module
            of the transformers library cannot separate.
    """
    _check_token_ids(batch, config.model.vocab_size)
    if config.model.transformers is not None:
        _check_document_positions(batch)
    _check_token_types(batch, config.model.token_types)
    affects = _affects_loss(batch) if config.model.moe else None
    if affects is not None and (config.model.score or config.model.task_head):  # outputs other than next tokens
        affects = np.ones_like(affects)
    vision = config.model.vision
    together = find_bidirectional_tokens(batch, config.model) if vision and vision.bidirectional else None
    mtp_arrays = [_mtp_arrays(batch, offset) for offset in range(1, config.model.mtp_layers + 1)]
    retrieved = _check_neighbors(batch, config.model)
    own = None
    if context is not None and context.size > 1:
        own = to_device(get_context_rank_token_indices(batch.tokens.shape[1], context), device)
    for start in range(0, len(batch.sample_ids), config.batch.micro):
        part = slice(start, start + config.batch.micro)

        def to_device_tensor(array: np.ndarray, part: slice = part) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(array[part])), device)

        whole = MicroBatch(
            tokens=to_device_tensor(batch.tokens),
            labels=to_device_tensor(batch.labels),
            weights=to_device_tensor(batch.loss_weights),
            positions=to_device_tensor(batch.position_ids),
            sequence_bounds=DocumentBounds.from_positions(
                batch.position_ids[part],
                None if batch.document_ids is None else batch.document_ids[part],
                together[part] if together is not None else None,
            ),
            samples=[int(sample) for sample in batch.sample_ids[part]],
            mtp_targets=[MtpTargets(*map(to_device_tensor, arrays)) for arrays in mtp_arrays],
            affects_loss_mask=None if affects is None else to_device_tensor(affects),
            images=None if vision is None else _collect_images(batch, part, vision, device),
            source=None
            if batch.source is None
            else build_encoder_batch(
                batch.source.tokens[part], batch.source.lengths[part], device, context or CommGroup("cp")
            ),
            neighbors=None if retrieved is None else build_neighbor_batch(retrieved[part], device),
            token_types=None
            if batch.token_types is None or not config.model.token_types
            else to_device_tensor(batch.token_types),
            segment_order=_segment_targets(to_device_tensor(batch.pair_labels))
            if batch.pair_labels is not None and config.model.sentence_pairs
            else None,
        )
        yield whole if own is None else whole.select_tokens(own)


def _check_token_ids(batch: StepBatch, vocab_size: int) -> None:
    inputs = [batch.tokens, batch.labels, *([] if batch.source is None else [batch.source.tokens])]
    inputs += [] if batch.neighbors is None else [batch.neighbors]
    if (top := max(tokens.max() for tokens in inputs)) >= vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size} must be larger than every token id, found {top} in one of the samples "
            f"{batch.sample_ids.min()} to {batch.sample_ids.max()}",
            hint="use data made with the model's tokenizer, or raise model.vocab_size",
        )


def _check_document_positions(batch: StepBatch) -> None:
    starts = DocumentBounds.from_positions(batch.position_ids, batch.document_ids).document_starts
    if starts is not None and not np.array_equal(batch.position_ids, np.arange(starts.shape[1]) - starts):
        raise DataError(
            "positions must restart at each document with model.implementation = transformers",
            hint="set data.reset_position_ids=true",
        )


def _check_token_types(batch: StepBatch, count: int) -> None:
    """Reject segments that a model with segment types does not have."""
    if count and batch.token_types is not None and (top := int(batch.token_types.max())) >= count:
        raise DataError(
            f"model.token_types = {count} must be larger than every segment, found {top} in one of the samples "
            f"{batch.sample_ids.min()} to {batch.sample_ids.max()}",
            hint="use data made with the model's tokenizer",
        )


def _collect_images(batch: StepBatch, part: slice, vision: VisionConfig, device: torch.device) -> BatchImages:
    """Return the images of some samples, one after another, with their features in the order of `BatchImages.rows`."""
    rows, size = np.full(batch.tokens[part].shape, -1), vision.image_size
    mrope = None if not vision.uses_mrope_grid_positions else np.stack([batch.position_ids[part]] * 3)
    images: list[Any] = []
    count = 0
    for number, sample in enumerate(batch.images[part]):
        if sample is not None:
            rows[number, sample.placeholder_positions] = count + sample.features
            count += vision.count_features_of_images(pixels.shape for pixels in sample.pixels)
            images += sample.pixels
            if mrope is not None:
                grids = [vision.get_feature_grid(*pixels.shape[1:]) for pixels in sample.pixels]
                mrope[:, number] = compute_mrope_positions(
                    mrope[0, number], sample.placeholder_positions, sample.features, grids
                )
    where = to_device(torch.from_numpy(rows), device)
    positions = None if mrope is None else to_device(torch.from_numpy(mrope), device)
    if vision.module is not None:
        return BatchImages(images, where, positions=positions)
    if positions is not None:
        return BatchImages([*map(torch.from_numpy, images)], where, positions=positions)
    pixels = np.stack(images) if images else np.empty((0, 3, size, size), np.float32)
    return BatchImages(torch.from_numpy(pixels), where)


def build_encoder_batch(
    token_ids: np.ndarray, lengths: np.ndarray, device: torch.device, context: CommGroup
) -> EncoderBatch:
    """Return the encoder tokens of this rank of the context-parallel group, from padded samples.
    `token_ids` are int64 [n, E], of which the first `lengths` (int64 [n]) tokens are real; `context` is the group.
    """
    tokens, width = torch.from_numpy(token_ids), token_ids.shape[1]
    own, bounds, mask = (
        get_context_rank_token_indices(width, context),
        DocumentBounds.from_padded_rows(lengths, width),
        None,
    )
    if bounds.document_starts is not None:
        order = torch.cat(
            [get_context_rank_token_indices(width, replace(context, rank=rank)) for rank in range(context.size)]
        )
        mask = to_device((order < torch.from_numpy(lengths)[:, None])[:, None, None], device)
    return EncoderBatch(
        to_device(tokens[:, own], device), to_device(own.expand(len(tokens), -1).contiguous(), device), bounds, mask
    )


def build_neighbor_batch(neighbors: np.ndarray, device: torch.device) -> RetrievedNeighbors:
    """Return retrieved neighbors (RETRO), int64 [samples, chunks, neighbors, tokens], as a batch on `device`.
    The value -1 marks positions without a token.
    """
    rows, mask = neighbors.reshape(-1, neighbors.shape[-1]), neighbors >= 0
    documents = np.cumsum(np.diff(rows >= 0, axis=1, prepend=rows[:, :1] >= 0), axis=1, dtype=np.int32)
    positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    return RetrievedNeighbors(
        to_device(torch.from_numpy(np.maximum(neighbors, 0)), device),
        DocumentBounds.from_positions(positions, documents if documents.any() else None),
        None if mask.all() else to_device(torch.from_numpy(mask.reshape(-1, 1, 1, neighbors[0, 0].size)), device),
    )


def _check_neighbors(batch: StepBatch, model: ModelConfig) -> np.ndarray | None:
    """Return the neighbors of a model with retrieval, int64 [n, L, K, 2 m]; None for other models."""
    retro, found = model.retro, batch.neighbors
    if retro is None:
        return None
    if found is None:
        raise DataError(
            "model.retro requires samples with neighbors, found none",
            hint="use data with neighbors, or remove model.retro",
        )
    shape = (len(batch.tokens), batch.tokens.shape[1] // retro.chunk_length, retro.neighbors, retro.neighbor_length)
    if found.shape != shape:
        raise DataError(
            f"model.retro requires neighbors of shape {shape} (samples, chunks, neighbors, tokens), found {found.shape}",
            hint="run mega data retrieve with the model's chunk_length and neighbors",
        )
    return found


def _segment_targets(labels: Tensor) -> SegmentOrderTargets:
    return SegmentOrderTargets(labels, torch.ones_like(labels, dtype=torch.float32))


def find_bidirectional_tokens(batch: StepBatch, model: ModelConfig) -> np.ndarray:
    """Return which tokens attend to later ones, bool [n, S]: those of images, or of the prompts of documents with images.
    A prompt ends with the first token whose next token counts in the loss. Raises DataError for a prompt that is longer
    than a sliding window.
    """
    assert model.vision is not None
    images: np.ndarray = batch.tokens == model.vision.image_token
    if not model.vision.bidirectional_prompt:
        return images
    documents = np.zeros_like(batch.tokens) if batch.document_ids is None else batch.document_ids
    starts, counts = _find_document_starts(documents), batch.loss_weights != 0
    before = np.cumsum(counts, axis=1) - counts
    numbers = starts + np.arange(len(starts))[:, None] * starts.shape[1]  # a number for each document
    found: np.ndarray = before == np.take_along_axis(before, starts, 1)
    found &= np.bincount(numbers.ravel(), images.ravel(), numbers.size)[numbers] > 0
    check_bidirectional_prompt(model, int(np.bincount(numbers.ravel(), found.ravel()).max()))
    return found


def _affects_loss(batch: StepBatch) -> np.ndarray:
    """Return which tokens affect the loss, bool [n, S]; see `MicroBatch.affects_loss_mask`."""
    counts = batch.loss_weights > 0
    left = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # unmasked labels from each token to the end of its row
    if batch.document_ids is None:
        return left > 0
    ends = np.diff(batch.document_ids, axis=1, append=-1) != 0
    later = np.where(ends, left - counts, -1)  # at a document's last token: unmasked labels of later documents
    return left > np.maximum.accumulate(later[:, ::-1], axis=1)[:, ::-1]


def _mtp_arrays(batch: StepBatch, offset: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the fields of `MtpTargets` for all samples; positions past a sample's end have token 0 and weight 0."""
    return _shift_left(batch.tokens, offset), _shift_left(batch.labels, offset), mtp_label_weights(batch, offset)


def mtp_label_weights(batch: StepBatch, offset: int) -> np.ndarray:
    """Return the loss weights, fp32 [n, S], of MTP labels `offset` positions further on, 0 past a document's end.
    The label of multi-token prediction (MTP) is the one `offset` positions after the next-token label; without document
    ids, a sample is one document.
    """
    weights = _shift_left(batch.loss_weights, offset)
    if batch.document_ids is not None:
        weights *= _shift_left(batch.document_ids, offset) == batch.document_ids
    return weights


def _shift_left(array: np.ndarray, offset: int) -> np.ndarray:
    return np.pad(array[:, offset:], ((0, 0), (0, offset)))
