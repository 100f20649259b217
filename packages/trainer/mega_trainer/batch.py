"""A step's samples as tensors, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_common.model_config import ModelConfig
from mega_common.vision import VisionConfig
from mega_data.images.native import rotary_positions
from mega_data.loader import StepBatch
from mega_trainer.comm import Group
from mega_trainer.config import RunConfig
from mega_trainer.device import to_device
from mega_trainer.model.routing import Routes
from mega_trainer.model.vision.images import Block, Images, image_blocks
from mega_trainer.parallel.context import place_of_tokens

Weigh = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Outline:
    """What is known of whole sequences in host memory: no device need be asked.

    Attributes:
        lengths: of each sequence, one more than its largest position.
        begins: int64 [B, S], where the document begins that a token belongs to, if attention is closed at its end.
        blocks: tokens that see those of their block behind them, too: images under `VisionConfig.bidirectional`.
    """

    lengths: list[int]
    begins: np.ndarray | None = None
    blocks: Sequence[Block] = ()

    @classmethod
    def of(cls, positions: np.ndarray, documents: np.ndarray | None, images: np.ndarray | None = None) -> Outline:
        """That of sequences with these positions and documents, int [B, S], and tokens whose blocks are told, bool [B, S]."""
        begins = None
        if documents is not None:
            new = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
            begins = np.maximum.accumulate(np.where(new, np.arange(documents.shape[1]), 0), axis=1)
        blocks = () if images is None else image_blocks(images, begins)
        return cls((positions.max(axis=1) + 1).tolist(), begins, blocks)

    @classmethod
    def padded(cls, lengths: np.ndarray, width: int) -> Outline:
        """That of rows of `width` tokens, of which the first int [B] are no padding: this is a document that no text sees."""
        positions = np.broadcast_to(np.arange(width), (len(lengths), width))
        padding = positions >= lengths[:, None]
        return cls.of(positions, padding.astype(np.int32) if padding.any() else None)


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
class SoftLabels:
    """What a teacher makes of each token: of its K likeliest next ones.

    Attributes:
        ids: int64 [B, S, K].
        log_probs: [B, S, K], in fp32 or fp64, by the teacher at temperature 1.
        temperature: that both are compared at.
    """

    ids: Tensor
    log_probs: Tensor
    temperature: float


@dataclass(frozen=True)
class Targets:
    """What a head is asked of some tokens; the fields are those of `MicroBatch`."""

    labels: Tensor
    weights: Tensor
    weigh: Weigh | None = None
    soft: SoftLabels | None = None


@dataclass(frozen=True)
class SourceBatch:
    """What the encoder reads: all E tokens of each sample, or those of one context rank.

    Attributes:
        tokens, positions: int64 [B, E].
        outline: of the whole samples; what is padding is a document of its own, so that no token sees it.
        seen: as in `model.cross.Source`.
    """

    tokens: Tensor
    positions: Tensor
    outline: Outline
    seen: Tensor | None


@dataclass(frozen=True)
class NeighborBatch:
    """What was retrieved for each of the L chunks of each sample: K neighbours of 2 m tokens.

    Attributes:
        tokens: int64 [B, L, K, 2 m], 0 where there is none.
        outline: of the neighbours, B L K rows; what is no token is a document of its own, so that no token sees it.
        seen: bool [B L, 1, 1, 2 m K], where there is a token; None: everywhere.
    """

    tokens: Tensor
    outline: Outline
    seen: Tensor | None


@dataclass(frozen=True)
class Pairs:
    """Samples of two segments.

    Attributes:
        labels: int64 [B], 1 where they are swapped.
        weights: fp32 [B], of each label in the loss.
    """

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
        weigh: makes of the labels' log-probabilities [B, S] the weights of their losses, in place of `weights`: those by which
            the gradient of the weighted losses is that of some other function of the log-probabilities.
        soft: what the tokens are held against in place of their labels.
        routes: of a model with experts, those that are chosen elsewhere, or to be told.
        images: of a model that sees, even where there are none.
        source: of an encoder-decoder, whose decoder the rest is about.
        neighbors: of a model with retrieval.
        types: int64 [B, S], of their segments; None: all are 0.
        pairs: for a model that tells the order of segments, where there are two.
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
    weigh: Weigh | None = None
    soft: SoftLabels | None = None
    routes: Routes | None = None
    images: Images | None = None
    source: SourceBatch | None = None
    neighbors: NeighborBatch | None = None
    types: Tensor | None = None
    pairs: Pairs | None = None

    @property
    def targets(self) -> Targets:
        """What the model is asked of its tokens."""
        return Targets(self.labels, self.weights, self.weigh, self.soft)

    def part(self, places: Tensor) -> MicroBatch:
        """The tokens at some places of whole samples."""
        tokens, labels, weights, positions = (
            t[:, places] for t in (self.tokens, self.labels, self.weights, self.positions)
        )
        return replace(
            self, tokens=tokens, labels=labels, weights=weights, positions=positions, places=places,
            matters=None if self.matters is None else self.matters[:, places],
            types=None if self.types is None else self.types[:, places],
            ahead=[Ahead(one.tokens[:, places], one.labels[:, places], one.weights[:, places]) for one in self.ahead],
            images=None if self.images is None else self.images.part(places),
        )  # fmt: skip


def micro_batches(
    batch: StepBatch, config: RunConfig, device: torch.device, context: Group | None = None
) -> Iterator[MicroBatch]:
    """Cut a step's samples into micro-batches of `config.batch.micro`, in order; of each the tokens of this context rank.

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
    matters = _matters(batch) if config.model.moe else None
    if matters is not None and config.model.score:  # at a text's last token, behind all labels
        matters = np.ones_like(matters)
    vision = config.model.vision
    further = [_ahead(batch, places) for places in range(1, config.model.mtp_layers + 1)]
    retrieved = _retrieved(batch, config.model)
    own = None
    if context is not None and context.size > 1:
        own = to_device(place_of_tokens(batch.tokens.shape[1], context), device)
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
                batch.position_ids[part],
                None if batch.document_ids is None else batch.document_ids[part],
                batch.tokens[part] == vision.image_token if vision and vision.bidirectional else None,
            ),
            samples=[int(sample) for sample in batch.sample_ids[part]],
            ahead=[Ahead(*map(tensor, arrays)) for arrays in further],
            matters=None if matters is None else tensor(matters),
            images=None if vision is None else _images(batch, part, vision, device),
            source=None
            if batch.source is None
            else source_batch(batch.source.tokens[part], batch.source.lengths[part], device, context or Group("cp")),
            neighbors=None if retrieved is None else neighbor_batch(retrieved[part], device),
            types=None if batch.token_types is None or not config.model.token_types else tensor(batch.token_types),
            pairs=_pairs(tensor(batch.pair_labels))
            if batch.pair_labels is not None and config.model.sentence_pairs
            else None,
        )
        yield whole if own is None else whole.part(own)


def _images(batch: StepBatch, part: slice, vision: VisionConfig, device: torch.device) -> Images:
    """Those of some samples, one after another, with their features in the order of `Images.rows`."""
    rows, size = np.full(batch.tokens[part].shape, -1), vision.image_size
    turned = None if vision.native is None else np.stack([batch.position_ids[part]] * 3)
    seen: list[np.ndarray] = []
    count = 0
    for number, sample in enumerate(batch.images[part]):
        if sample is not None:
            rows[number, sample.places] = count + sample.features
            count += vision.features_of_all(one.shape for one in sample.pixels)
            seen += sample.pixels
            if turned is not None:
                grids = [vision.grid(*one.shape[1:]) for one in sample.pixels]
                turned[:, number] = rotary_positions(turned[0, number], sample.places, sample.features, grids)
    where = to_device(torch.from_numpy(rows), device)
    if turned is not None:
        return Images([*map(torch.from_numpy, seen)], where, positions=to_device(torch.from_numpy(turned), device))
    pixels = np.stack(seen) if seen else np.empty((0, 3, size, size), np.float32)
    return Images(torch.from_numpy(pixels), where)


def source_batch(found: np.ndarray, lengths: np.ndarray, device: torch.device, context: Group) -> SourceBatch:
    """What a rank of `context` reads of samples int64 [n, E], of which the first int64 [n] tokens are no padding."""
    tokens, width = torch.from_numpy(found), found.shape[1]
    own, outline, seen = place_of_tokens(width, context), Outline.padded(lengths, width), None
    if outline.begins is not None:
        order = torch.cat([place_of_tokens(width, replace(context, rank=rank)) for rank in range(context.size)])
        seen = to_device((order < torch.from_numpy(lengths)[:, None])[:, None, None], device)
    return SourceBatch(
        to_device(tokens[:, own], device), to_device(own.expand(len(tokens), -1).contiguous(), device), outline, seen
    )


def neighbor_batch(found: np.ndarray, device: torch.device) -> NeighborBatch:
    """From neighbours int64 [B, L, K, 2 m], -1 where there is no token."""
    rows, there = found.reshape(-1, found.shape[-1]), found >= 0
    documents = np.cumsum(np.diff(rows >= 0, axis=1, prepend=rows[:, :1] >= 0), axis=1, dtype=np.int32)
    positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    return NeighborBatch(
        to_device(torch.from_numpy(np.maximum(found, 0)), device),
        Outline.of(positions, documents if documents.any() else None),
        None if there.all() else to_device(torch.from_numpy(there.reshape(-1, 1, 1, found[0, 0].size)), device),
    )


def _retrieved(batch: StepBatch, model: ModelConfig) -> np.ndarray | None:
    """The neighbours of a model with retrieval, int64 [n, L, K, 2 m]."""
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


def _pairs(labels: Tensor) -> Pairs:
    return Pairs(labels, torch.ones_like(labels, dtype=torch.float32))


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
