"""Micro-batches: the samples of one step as tensors on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_common.model_config import ModelConfig
from mega_common.vision_config import VisionConfig
from mega_data.batch_loader import StepBatch
from mega_data.images.image_geometry import compute_mrope_positions
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.batch_images import BatchImages, ImageBlock, find_image_blocks
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.device import to_device
from mega_trainer.parallel.context_parallel import rank_token_indices
from mega_trainer.parallel.expert_routing import RoutingReplay

LabelWeighting = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SequenceBounds:
    """Host-side bounds of documents and bidirectional blocks in a batch, so that no kernel waits for the device.

    Attributes:
        lengths: of each sequence, one more than its largest position.
        document_starts: int64 [B, S], where the document begins that a token belongs to, if attention is closed at its end.
        bidirectional_blocks: tokens that see those of their block behind them, too: images under `VisionConfig.bidirectional`.
    """

    lengths: list[int]
    document_starts: np.ndarray | None = None
    bidirectional_blocks: Sequence[ImageBlock] = ()

    @classmethod
    def from_positions(
        cls, positions: np.ndarray, documents: np.ndarray | None, bidirectional: np.ndarray | None = None
    ) -> SequenceBounds:
        """Return the bounds of sequences from their positions and document ids, int [B, S]; `images` bool [B, S] marks
        tokens of bidirectional blocks.
        """
        begins = None
        if documents is not None:
            new = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
            begins = np.maximum.accumulate(np.where(new, np.arange(documents.shape[1]), 0), axis=1)
        blocks = () if bidirectional is None else find_image_blocks(bidirectional, begins)
        return cls((positions.max(axis=1) + 1).tolist(), begins, blocks)

    @classmethod
    def from_padded_rows(cls, lengths: np.ndarray, width: int) -> SequenceBounds:
        """Return the bounds of rows of `width` tokens whose first int [B] tokens are no padding; padding becomes a
        document of its own.
        """
        positions = np.broadcast_to(np.arange(width), (len(lengths), width))
        padding = positions >= lengths[:, None]
        return cls.from_positions(positions, padding.astype(np.int32) if padding.any() else None)


@dataclass(frozen=True)
class MtpTargets:
    """Inputs and targets of the multi-token prediction (MTP) layer that predicts the token k positions after the next.

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
class TeacherSoftLabels:
    """Soft labels of a teacher: its K most likely next tokens at each position.

    Attributes:
        ids: int64 [B, S, K].
        log_probs: [B, S, K], in fp32 or fp64, by the teacher at temperature 1.
        temperature: that both are compared at.
    """

    ids: Tensor
    log_probs: Tensor
    temperature: float


@dataclass(frozen=True)
class HeadTargets:
    """Labels and weights for the output head; the fields are those of `MicroBatch`."""

    labels: Tensor
    weights: Tensor
    weight_fn: LabelWeighting | None = None
    soft_labels: TeacherSoftLabels | None = None


@dataclass(frozen=True)
class EncoderBatch:
    """Encoder input: all E tokens of each sample, or those of one context rank.

    Attributes:
        tokens, positions: int64 [B, E].
        sequence_bounds: of the whole samples; what is padding is a document of its own, so that no token sees it.
        attention_mask: as in `model.cross.Source`.
    """

    tokens: Tensor
    positions: Tensor
    sequence_bounds: SequenceBounds
    attention_mask: Tensor | None


@dataclass(frozen=True)
class RetrievedNeighbors:
    """Retrieved neighbours of each of the L chunks of each sample: K neighbours of 2 m tokens.

    Attributes:
        tokens: int64 [B, L, K, 2 m], 0 where there is none.
        sequence_bounds: of the neighbours, B L K rows; what is no token is a document of its own, so that no token sees it.
        attention_mask: bool [B L, 1, 1, 2 m K], where there is a token; None: everywhere.
    """

    tokens: Tensor
    sequence_bounds: SequenceBounds
    attention_mask: Tensor | None


@dataclass(frozen=True)
class SegmentOrderTargets:
    """Targets of segment order prediction for samples of two segments.

    Attributes:
        labels: int64 [B], 1 where they are swapped.
        weights: fp32 [B], of each label in the loss.
    """

    labels: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass on one rank: all of their S tokens, or those of one context rank.

    Attributes:
        tokens, labels, positions: int64 [B, S].
        weights: fp32 [B, S], the weight of each label in the loss (0 where it does not count).
        sequence_bounds: of the whole samples: where documents begin, when attention is closed at their ends.
        samples: the global number of each sample.
        mtp_targets: for each of the model's layers that predict further tokens.
        affects_loss_mask: bool [B, S], tokens with a label that counts at or behind them, in their document where attention is
            closed at its end; the others influence nothing. None: not
            asked for, without experts.
        token_indices: int64 [S], where the tokens stand in the whole samples; None when they are those.
        weight_fn: makes of the labels' log-probabilities [B, S] the weights of their losses, in place of `weights`: those by which
            the gradient of the weighted losses is that of some other function of the log-probabilities.
        soft_labels: what the tokens are held against in place of their labels.
        routes: of a model with experts, those that are chosen elsewhere, or to be told.
        images: of a model that sees, even where there are none.
        source: of an encoder-decoder, whose decoder the rest is about.
        neighbors: of a model with retrieval.
        token_types: int64 [B, S], of their segments; None: all are 0.
        segment_order: for a model that tells the order of segments, where there are two.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    sequence_bounds: SequenceBounds
    samples: Sequence[int]
    mtp_targets: Sequence[MtpTargets] = ()
    affects_loss_mask: Tensor | None = None
    token_indices: Tensor | None = None
    weight_fn: LabelWeighting | None = None
    soft_labels: TeacherSoftLabels | None = None
    routes: RoutingReplay | None = None
    images: BatchImages | None = None
    source: EncoderBatch | None = None
    neighbors: RetrievedNeighbors | None = None
    token_types: Tensor | None = None
    segment_order: SegmentOrderTargets | None = None

    @property
    def head_targets(self) -> HeadTargets:
        """Labels and weights for the output head."""
        return HeadTargets(self.labels, self.weights, self.weight_fn, self.soft_labels)

    def select_tokens(self, indices: Tensor) -> MicroBatch:
        """Return the micro-batch with only the tokens at some indices of the whole samples."""
        tokens, labels, weights, positions = (
            t[:, indices] for t in (self.tokens, self.labels, self.weights, self.positions)
        )
        return replace(
            self, tokens=tokens, labels=labels, weights=weights, positions=positions, token_indices=indices,
            affects_loss_mask=None if self.affects_loss_mask is None else self.affects_loss_mask[:, indices],
            token_types=None if self.token_types is None else self.token_types[:, indices],
            mtp_targets=[MtpTargets(one.tokens[:, indices], one.labels[:, indices], one.weights[:, indices]) for one in self.mtp_targets],
            images=None if self.images is None else self.images.select_positions(indices),
        )  # fmt: skip


def split_micro_batches(
    batch: StepBatch, config: RunConfig, device: torch.device, context: CommGroup | None = None
) -> Iterator[MicroBatch]:
    """Cut a step's samples into micro-batches of `config.batch.micro`, in order, each with the tokens of this context
    rank.

    Raises:
        DataError: for a token that the model's vocabulary does not have.
    """
    known = [batch.tokens, batch.labels, *([] if batch.source is None else [batch.source.tokens])]
    known += [] if batch.neighbors is None else [batch.neighbors]
    size, top = config.batch.micro, max(tokens.max() for tokens in known)
    if top >= config.model.vocab_size:
        raise DataError(
            f"one of the samples {batch.sample_ids.min()} to {batch.sample_ids.max()} has the token {top}, but model.vocab_size is "
            f"{config.model.vocab_size}",
            hint="the data were made with another tokenizer, or model.vocab_size is too small",
        )
    matters = _affects_loss(batch) if config.model.moe else None
    if matters is not None and config.model.score:  # at a text's last token, behind all labels
        matters = np.ones_like(matters)
    vision = config.model.vision
    further = [_mtp_arrays(batch, places) for places in range(1, config.model.mtp_layers + 1)]
    retrieved = _check_neighbors(batch, config.model)
    own = None
    if context is not None and context.size > 1:
        own = to_device(rank_token_indices(batch.tokens.shape[1], context), device)
    for start in range(0, len(batch.sample_ids), size):
        part = slice(start, start + size)

        def to_device_tensor(array: np.ndarray, part: slice = part) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(array[part])), device)

        whole = MicroBatch(
            tokens=to_device_tensor(batch.tokens),
            labels=to_device_tensor(batch.labels),
            weights=to_device_tensor(batch.loss_weights),
            positions=to_device_tensor(batch.position_ids),
            sequence_bounds=SequenceBounds.from_positions(
                batch.position_ids[part],
                None if batch.document_ids is None else batch.document_ids[part],
                batch.tokens[part] == vision.image_token if vision and vision.bidirectional else None,
            ),
            samples=[int(sample) for sample in batch.sample_ids[part]],
            mtp_targets=[MtpTargets(*map(to_device_tensor, arrays)) for arrays in further],
            affects_loss_mask=None if matters is None else to_device_tensor(matters),
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


def _collect_images(batch: StepBatch, part: slice, vision: VisionConfig, device: torch.device) -> BatchImages:
    """Return the images of some samples, one after another, with their features in the order of `BatchImages.rows`."""
    rows, size = np.full(batch.tokens[part].shape, -1), vision.image_size
    turned = None if vision.native is None else np.stack([batch.position_ids[part]] * 3)
    seen: list[np.ndarray] = []
    count = 0
    for number, sample in enumerate(batch.images[part]):
        if sample is not None:
            rows[number, sample.placeholder_positions] = count + sample.features
            count += vision.count_total_features(one.shape for one in sample.pixels)
            seen += sample.pixels
            if turned is not None:
                grids = [vision.get_feature_grid(*one.shape[1:]) for one in sample.pixels]
                turned[:, number] = compute_mrope_positions(
                    turned[0, number], sample.placeholder_positions, sample.features, grids
                )
    where = to_device(torch.from_numpy(rows), device)
    if turned is not None:
        return BatchImages([*map(torch.from_numpy, seen)], where, positions=to_device(torch.from_numpy(turned), device))
    pixels = np.stack(seen) if seen else np.empty((0, 3, size, size), np.float32)
    return BatchImages(torch.from_numpy(pixels), where)


def build_encoder_batch(
    token_ids: np.ndarray, lengths: np.ndarray, device: torch.device, context: CommGroup
) -> EncoderBatch:
    """Return the encoder tokens of a rank of `context`, from samples int64 [n, E] whose first int64 [n] tokens are no
    padding.
    """
    tokens, width = torch.from_numpy(token_ids), token_ids.shape[1]
    own, outline, seen = rank_token_indices(width, context), SequenceBounds.from_padded_rows(lengths, width), None
    if outline.document_starts is not None:
        order = torch.cat([rank_token_indices(width, replace(context, rank=rank)) for rank in range(context.size)])
        seen = to_device((order < torch.from_numpy(lengths)[:, None])[:, None, None], device)
    return EncoderBatch(
        to_device(tokens[:, own], device), to_device(own.expand(len(tokens), -1).contiguous(), device), outline, seen
    )


def build_neighbor_batch(neighbors: np.ndarray, device: torch.device) -> RetrievedNeighbors:
    """Return the neighbours int64 [B, L, K, 2 m] as a batch; -1 marks positions without a token."""
    rows, there = neighbors.reshape(-1, neighbors.shape[-1]), neighbors >= 0
    documents = np.cumsum(np.diff(rows >= 0, axis=1, prepend=rows[:, :1] >= 0), axis=1, dtype=np.int32)
    positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    return RetrievedNeighbors(
        to_device(torch.from_numpy(np.maximum(neighbors, 0)), device),
        SequenceBounds.from_positions(positions, documents if documents.any() else None),
        None if there.all() else to_device(torch.from_numpy(there.reshape(-1, 1, 1, neighbors[0, 0].size)), device),
    )


def _check_neighbors(batch: StepBatch, model: ModelConfig) -> np.ndarray | None:
    """Return the neighbours of a model with retrieval, int64 [n, L, K, 2 m]; None for other models."""
    retro, found = model.retro, batch.neighbors
    if retro is None:
        return None
    if found is None:
        raise DataError(
            "the samples have no neighbours, which model.retro reads", hint="data with neighbours, or no model.retro"
        )
    shape = (len(batch.tokens), batch.tokens.shape[1] // retro.chunk_length, retro.neighbors, retro.neighbor_length)
    if found.shape != shape:
        raise DataError(
            f"the samples have neighbours of shape {found.shape}, but model.retro reads {shape}: samples, chunks, neighbours, tokens",
            hint="retrieve with the model's chunk_length and neighbors",
        )
    return found


def _segment_targets(labels: Tensor) -> SegmentOrderTargets:
    return SegmentOrderTargets(labels, torch.ones_like(labels, dtype=torch.float32))


def _affects_loss(batch: StepBatch) -> np.ndarray:
    """Return which tokens affect the loss, bool [n, S]; see `MicroBatch.affects_loss_mask`."""
    counts = batch.loss_weights > 0
    left = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]  # labels that count, from each token to the end of its row
    if batch.document_ids is None:
        return left > 0
    ends = np.diff(batch.document_ids, axis=1, append=-1) != 0
    behind = np.where(ends, left - counts, -1)  # of each document's last token: those of the documents behind it
    return left > np.maximum.accumulate(behind[:, ::-1], axis=1)[:, ::-1]


def _mtp_arrays(batch: StepBatch, offset: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the fields of `MtpTargets` for all samples; positions past a sample's end have token 0 and weight 0."""
    return _shift_left(batch.tokens, offset), _shift_left(batch.labels, offset), mtp_label_weights(batch, offset)


def mtp_label_weights(batch: StepBatch, offset: int) -> np.ndarray:
    """Return the loss weight of each label `offset` positions ahead, fp32 [n, S]."""
    weights = _shift_left(batch.loss_weights, offset)
    if batch.document_ids is not None:
        weights *= _shift_left(batch.document_ids, offset) == batch.document_ids
    return weights


def _shift_left(array: np.ndarray, offset: int) -> np.ndarray:
    return np.pad(array[:, offset:], ((0, 0), (0, offset)))
