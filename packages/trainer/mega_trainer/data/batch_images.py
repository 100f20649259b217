"""Images of a forward pass: their split among ranks, and the positions of their features among the tokens.

Legend: n images or tiles of images, P features of each, B batch, S sequence, R ranks that share a micro-batch's images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_common.errors import DataError
from mega_common.model_config import ModelConfig
from mega_trainer.distributed.comm import CommGroup, all_gather, reduce_scatter
from mega_trainer.kernels.attention_masks import ALL, AttentionMaskBlock, BandMask

ImageBlock = tuple[int, range]  # a row, and a range of its tokens with bidirectional attention

IMAGES = 0  # axis of [n, P, D] that is split among ranks


@dataclass(frozen=True)
class BatchImages:
    """All images of a micro-batch, and for each token the row of the image features that replaces its embedding.

    Attributes:
        pixels: fp32 [n, 3, H, W] in host memory, normalised; a list of [3, H, W] for images of different shapes; a list of
            `ImageInputs` of a module of transformers.
        rows: int64 [B, S], index into all features [n P] for each token; -1 for text.
        features: [n P, D], once computed; with DeepStack [n P, (1 + L) D]: the features that replace embeddings, and those
            that are added to the outputs of the first L decoder layers.
        positions: int64 [3, B, S], time, line and column of each token for M-RoPE; None: the positions in the text.
    """

    pixels: Tensor | Sequence[Any]
    rows: Tensor
    features: Tensor | None = None
    positions: Tensor | None = None

    def with_features(self, features: Tensor) -> BatchImages:
        """Return a copy of the image batch with precomputed image features.
        The model does not encode the images again.
        """
        return replace(self, features=features)

    def select_positions(self, indices: Any) -> BatchImages:
        """Return a copy of the image batch for only the tokens at `indices` of the sequences.
        All images stay.
        """
        positions = None if self.positions is None else self.positions[:, :, indices]
        return replace(self, rows=self.rows[:, indices], positions=positions)

    def select_rank_images(self, rank: int, ranks: int) -> Tensor:
        """Return the images that rank `rank` of `ranks` ranks encodes: an equal share, at least one, padded with zeros.

        At least one, because all ranks must have a gradient of the vision encoder if one has.
        """
        assert isinstance(self.pixels, Tensor)
        share = max(1, -(-len(self.pixels) // ranks))
        own = self.pixels[rank * share : (rank + 1) * share]
        return F.pad(own, (0, 0, 0, 0, 0, 0, 0, share - len(own)))


def get_combined_rank_and_size(groups: Sequence[CommGroup]) -> tuple[int, int]:
    """Return this rank's index in, and the size of, the product of several communication groups.
    The order is row-major: the last of the `groups` varies fastest.
    """
    rank, ranks = 0, 1
    for group in groups:
        rank, ranks = rank * group.size + group.rank, ranks * group.size
    return rank, ranks


def find_image_blocks(images: np.ndarray, starts: np.ndarray | None = None) -> list[ImageBlock]:
    """Return the blocks of at least two adjacent image tokens, as (row, range of its tokens); none crosses a document.
    `images`, bool [B, S], marks image tokens with True; `starts` gives the start of each token's document.
    """
    found: list[ImageBlock] = []
    for row, own in enumerate(np.where(images, 0 if starts is None else starts, -1)):
        cuts = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
        found += [(row, range(a, b)) for a, b in pairwise(cuts) if own[a] >= 0 and b - a > 1]
    return found


def check_bidirectional_prompt(model: ModelConfig, length: int) -> None:
    """Raise DataError for a prompt of `length` tokens that is longer than a sliding window, if it is bidirectional.
    In transformers such a prompt ignores the window.
    """
    windowed = model.vision is not None and model.vision.bidirectional_prompt and model.has_attention_windows
    if windowed and model.sliding_window is not None and length > model.sliding_window:
        raise DataError(
            f"a prompt with images has {length} tokens, more than sliding_window = {model.sliding_window}, which is not "
            "supported with vision.bidirectional_prompt",
            hint="use shorter prompts, or a model for smaller images",
        )


def make_image_block_masks(blocks: Sequence[ImageBlock], queries: range, keys: range) -> list[AttentionMaskBlock]:
    """Return attention masks that let each query attend to the later keys of its own image block.
    The blocks are bidirectional. Each mask is for a rectangle of queries and keys and applies also outside attention
    windows; `queries` must equal `keys` or all precede them.
    """
    found = []
    for row, block in blocks:
        from_queries, to_keys = (
            range(max(block.start, tokens.start), min(block.stop, tokens.stop)) for tokens in (queries, keys)
        )
        band = ALL
        if queries == keys:  # each token attends to the ones after it
            from_queries, to_keys, band = from_queries[:-1], to_keys[1:], BandMask(left=0)
        if from_queries and to_keys:
            found.append(AttentionMaskBlock(slice(row, row + 1), from_queries, to_keys, band))
    return found


def insert_image_features(x: Tensor, features: Tensor, rows: Tensor) -> Tensor:
    """Return token embeddings [B, S, D] with image placeholders overwritten by image features.
    `x` are the embeddings, `features` the features [images x patches, D]; `rows` [B, S] is the feature row of each
    token, negative for text.
    """
    return torch.where((rows < 0).unsqueeze(-1), x, features[rows.clamp(min=0)].to(x.dtype))


def add_image_features(x: Tensor, features: Tensor, rows: Tensor) -> Tensor:
    """Return hidden states [B, S, D] with image features added at the image placeholders; see `insert_image_features`."""
    return torch.where((rows < 0).unsqueeze(-1), x, x + features[rows.clamp(min=0)].to(x.dtype))


def all_gather_image_features(features: Tensor, group: CommGroup, *, partial: bool) -> Tensor:
    """All-gather the image features that the ranks of a group encoded: [n/R, P, D] -> [n, P, D].
    R is the number of ranks of `group`, P the number of features per image, and n the number of images in all.

    Args:
        partial: each rank has the gradient of its own tokens only, to be reduced; else all ranks have the same gradient.
    """
    if group.size == 1:
        return features
    y: Tensor = _AllGatherFeatures.apply(features, group, partial)  # type: ignore[no-untyped-call]
    return y


class _AllGatherFeatures(Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, group: CommGroup, partial: bool) -> Tensor:
        ctx.group, ctx.partial = group, partial
        return all_gather(features, group, IMAGES)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        group: CommGroup = ctx.group
        if ctx.partial:
            return reduce_scatter(dy, group, IMAGES), None, None
        share = len(dy) // group.size
        return dy[group.rank * share : (group.rank + 1) * share].contiguous(), None, None
