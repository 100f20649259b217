"""Vision encoder for images of any shape, and its patch mergers: Qwen2.5-VL's (arXiv:2502.13923) and Qwen3-VL's
(arXiv:2511.21631).

An image is cut into patches, and the projector makes one feature of each square of m x m patches. In layers with windows
patches attend only to their window, so a rank's patches are ordered window by window, images concatenated, like packed
documents. The outputs of L other layers may be merged to features as well (DeepStack, arXiv:2406.04334).

Legend: U features of this rank's images, P = m^2 U patches, C vision encoder width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_common.vision_config import PROJECTOR, TOWER, NativeResolutionConfig, VisionConfig
from mega_trainer.distributed.device import to_device
from mega_trainer.kernels.attention_masks import ALL, AttentionMaskSpec, PackedDocumentMask
from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import Norm
from mega_trainer.model.rotary_embedding import RotaryEmbedding
from mega_trainer.model.transformer_layer import TransformerLayer
from mega_trainer.model.vision.vision_builder import VisionLayerBuilder

PatchGrid = tuple[int, int]  # features of an image from top to bottom, and from left to right


@dataclass(frozen=True)
class ImagePartition:
    """Partition of a micro-batch's images among ranks, in contiguous shares of about equally many features.
    Features are merged patches; images are whole.

    Every rank has the same number of features, padded, and at least one: if one rank has a gradient of the vision encoder,
    all ranks must.

    Attributes:
        images: fp32 [3, H, W] each, in host memory; or `ImageInputs` of a module of transformers.
        rank, ranks: this rank, and the number of ranks that share the images.
    """

    images: Sequence[Any]
    vision: VisionConfig
    rank: int
    ranks: int

    @cached_property
    def native_resolution(self) -> NativeResolutionConfig:
        """Native-resolution settings of the vision encoder."""
        assert self.vision.native is not None
        return self.vision.native

    @cached_property
    def feature_grids(self) -> list[PatchGrid]:
        """Number of features of each image as (rows, columns)."""
        return [self.vision.get_feature_grid(*image.shape[1:]) for image in self.images]

    @cached_property
    def image_ranges_by_rank(self) -> list[range]:
        """Range of image indices that each rank encodes."""
        sizes = np.array([high * wide for high, wide in self.feature_grids], np.int64)
        middles = sizes.cumsum() - sizes / 2
        owners = np.minimum(middles * self.ranks // max(1, sizes.sum()), self.ranks - 1)
        return [range(*np.searchsorted(owners, [rank, rank + 1]).tolist()) for rank in range(self.ranks)]

    @cached_property
    def features_per_rank(self) -> int:
        """Number of features per rank, equal on all ranks because of padding."""
        return max(
            1,
            *(
                sum(high * wide for high, wide in self.feature_grids[part.start : part.stop])
                for part in self.image_ranges_by_rank
            ),
        )

    @cached_property
    def window_orders(self) -> list[tuple[np.ndarray, list[int]]]:
        """Feature numbers of every image ordered by attention window, and the number of features of each window.
        The feature numbers are int64 [h w]. Without windows, an image is one window.
        """
        window = self.native_resolution.window
        if window is None:
            return [order_features_by_windows(grid, max(grid)) for grid in self.feature_grids]
        side = window // (self.vision.patch_size * self.native_resolution.merge)
        return [order_features_by_windows(grid, side) for grid in self.feature_grids]

    @cached_property
    def feature_rows(self) -> Tensor:
        """Row of each feature, line by line and image by image, in the concatenated outputs of all ranks: int64 [n]."""
        found = [np.zeros(0 if len(self.images) else 1, np.int64)]  # at least one row; unused without images
        for rank, part in enumerate(self.image_ranges_by_rank):
            first = rank * self.features_per_rank
            for order, _ in self.window_orders[part.start : part.stop]:
                found.append(first + np.argsort(order))
                first += len(order)
        return torch.from_numpy(np.concatenate(found))

    def extract_patches(self) -> Tensor:
        """Return the pixels of this rank's patches, ordered by window: fp32 [P, 3 frames size size]."""
        part, each = self.image_ranges_by_rank[self.rank], self.native_resolution.merge**2
        own = [self._cut_patches(self.images[number])[self.window_orders[number][0]].flatten(0, 1) for number in part]
        cut = torch.cat(own) if own else torch.empty(0, self.vision.values_per_patch)
        return F.pad(cut, (0, 0, 0, self.features_per_rank * each - len(cut)))

    def patch_coordinates(self) -> Tensor:
        """Return the line and column of each of this rank's P patches in its image: int64 [P, 2]."""
        part, merge = self.image_ranges_by_rank[self.rank], self.native_resolution.merge
        inner = np.indices((merge, merge)).reshape(2, -1).T
        own = [np.zeros((0, 2), np.int64)]
        for number in part:
            units = np.stack(np.divmod(self.window_orders[number][0], self.feature_grids[number][1]), -1)
            own.append((units[:, None] * merge + inner).reshape(-1, 2))
        found = np.concatenate(own)
        return torch.from_numpy(np.pad(found, ((0, self.features_per_rank * merge**2 - len(found)), (0, 0))))

    def compute_position_interpolation(self) -> tuple[Tensor, Tensor]:
        """Return the rows of the learned position table that each of this rank's patches uses, and their weights.
        The rows are int64 [P, 4], the bilinear weights fp32 [P, 4]. The corners of the table are at the corners of the
        image.
        """
        side, merge = isqrt(self.native_resolution.positions), self.native_resolution.merge
        grids = [self.feature_grids[number] for number in self.image_ranges_by_rank[self.rank]]
        steps = np.repeat(np.array(grids, np.int64).reshape(-1, 2), [high * wide * merge**2 for high, wide in grids], 0)
        coordinates = self.patch_coordinates().numpy()
        steps = np.pad(steps * merge, ((0, len(coordinates) - len(steps)), (0, 0))) - 1
        exact = coordinates * (side - 1) / np.maximum(steps, 1)
        below = np.floor(exact).astype(np.int64)
        (top, left), (down, right) = below.T, np.minimum(below + 1, side - 1).T
        high, wide = (exact - below).T
        rows = np.stack([top * side + left, top * side + right, down * side + left, down * side + right], 1)
        weights = np.stack([(1 - high) * (1 - wide), (1 - high) * wide, high * (1 - wide), high * wide], 1)
        return torch.from_numpy(rows), torch.from_numpy(weights.astype(np.float32))

    def make_patch_mask(self, device: torch.device) -> PatchWindowMask:
        """Return the attention mask of this rank's patches; padding patches are in separate windows."""
        part, each = self.image_ranges_by_rank[self.rank], self.native_resolution.merge**2
        windows = [length * each for number in part for length in self.window_orders[number][1]]
        images = [high * wide * each for high, wide in self.feature_grids[part.start : part.stop]]
        padding = self.features_per_rank * each - sum(images)
        window = self.native_resolution.window
        largest = max(1, padding) if window is None else (window // self.vision.patch_size) ** 2
        filled = [largest] * (padding // largest) + ([padding % largest] if padding % largest else [])
        return PatchWindowMask(
            *(PackedDocumentMask.from_lengths(lengths + filled, ALL, device) for lengths in (images, windows))
        )

    def _cut_patches(self, image: Tensor) -> Tensor:
        """Cut an image [3, H, W] into patches, those of a feature together: [h w, m^2, 3 frames size size]."""
        size, merge, frames = self.vision.patch_size, self.native_resolution.merge, self.native_resolution.frames
        high, wide = self.vision.get_feature_grid(*image.shape[1:])
        cut = image.reshape(3, high, merge, size, wide, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
        return cut.unsqueeze(-3).expand(*(-1,) * 5, frames, -1, -1).reshape(high * wide, merge**2, -1)


@dataclass(frozen=True)
class PatchWindowMask:
    """Attention mask of image patches within windows or images.
    It is an `AttentionMask`: a patch attends within its window in layers with windows, else within its image.
    """

    images: PackedDocumentMask
    windows: PackedDocumentMask

    def mask_for_window(self, window: int | None) -> AttentionMaskSpec:
        """Return the attention mask of image patches by windows, or for `window` None by images."""
        return self.images if window is None else self.windows


def order_features_by_windows(grid: PatchGrid, side: int) -> tuple[np.ndarray, list[int]]:
    """Return the feature numbers of a grid ordered by windows of side x side, and each window's number of features.
    The feature numbers are int64 [h w].
    """
    numbers = np.arange(grid[0] * grid[1]).reshape(grid)
    found = [
        numbers[top : top + side, left : left + side].ravel()
        for top in range(0, grid[0], side)
        for left in range(0, grid[1], side)
    ]
    return np.concatenate(found), [len(window) for window in found]


class NativeVisionEncoder(nn.Module):
    """Vision encoder for images at native resolution (as in Qwen2.5-VL and Qwen3-VL): patches to the outputs of layers.
    They are the output of the last layer, and with DeepStack those of some other layers.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        vision = build.config.vision
        assert vision is not None
        own = VisionLayerBuilder.from_layer_builder(build, TOWER)
        self.saved, self.dtype, self.deepstack = own.saved, build.dtype, vision.deepstack_layers
        self.patches = own.build_linear_layer(
            "embed_patches", (vision.hidden_size, vision.values_per_patch), bias=vision.patch_bias
        )
        assert vision.native is not None
        shape, std = (vision.native.positions, vision.hidden_size), own.config.init_std
        self.positions = own.build_replicated("model.embed_positions.weight", shape, std=std) if shape[0] else None
        self.layers = nn.ModuleList(TransformerLayer(own, layer) for layer in range(vision.num_layers))
        self.rotary = RotaryEmbedding(own.config.rope, own.config.query_key_head_dim // 2, 1)

    def forward(self, partition: ImagePartition, device: torch.device) -> list[Tensor]:
        """Encode this rank's P patches to features [P, C], of the last layer and then of the DeepStack layers.
        C is the encoder's width.
        """
        rotation = self._rotate_patches(to_device(partition.patch_coordinates(), device))
        context = ForwardContext(partition.make_patch_mask(device), rotation, rotation)
        patches = to_device(partition.extract_patches().to(self.dtype), device)
        x: Tensor = self.patches(patches.unsqueeze(0))
        if self.positions is not None:
            rows, weights = (to_device(each, device) for each in partition.compute_position_interpolation())
            x = x + (F.embedding(rows, self.positions) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        stacked = []
        for index, layer in enumerate(self.layers):
            x = self.saved.run_layer(index, layer, x, context)
            if index in self.deepstack:
                stacked.append(x.squeeze(0))
        return [x.squeeze(0), *stacked]

    def _rotate_patches(self, coordinates: Tensor) -> RotaryAngles:
        """Return the rotation of patches: half of a head's pairs by the patch's line, half by its column."""
        angles = [self.rotary.compute_rotation(each[None], self.dtype) for each in coordinates.unbind(1)]
        return RotaryAngles(torch.cat([each.cos for each in angles], -1), torch.cat([each.sin for each in angles], -1))


class PatchMerger(nn.Module):
    """Patch merger W2 gelu(W1 x + b1) + b2, where x concatenates the m^2 normalised patches of one feature.

    Args:
        build: builder of the model's layers.
        prefix: prefix of the parameters' names after that of the projector.
        joined_norm: normalise the concatenated patches together instead of each patch.
    """

    def __init__(self, build: LayerBuilder, prefix: str = "", *, joined_norm: bool = False) -> None:
        super().__init__()
        vision, width = build.config.vision, build.config.hidden_size
        assert vision is not None
        assert vision.native is not None
        own = VisionLayerBuilder.from_layer_builder(build, PROJECTOR)
        self.joined, self.joined_norm = vision.hidden_size * vision.native.merge**2, joined_norm
        shape, layer = (self.joined if joined_norm else vision.hidden_size,), vision.native.norm == "layernorm"
        weight = own.build_replicated(f"model.{prefix}norm.weight", shape, fill=1.0)
        bias = own.build_replicated(f"model.{prefix}norm.bias", shape) if layer else None
        self.norm = Norm(own.kernels, weight, bias, vision.norm_eps, layer=layer)
        self.into = own.build_linear_layer(f"{prefix}linear_1", (self.joined, self.joined), bias=True)
        self.out = own.build_linear_layer(f"{prefix}linear_2", (width, self.joined), bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Merge patches [P, C] to features [P / m^2, D], with D the language model's width."""
        x = x.view(-1, self.joined) if self.joined_norm else x
        y: Tensor = self.out(F.gelu(self.into(self.norm(x).view(-1, self.joined))))
        return y


class MergerProjector(PatchMerger):
    """Patch mergers of a vision encoder: one for its last layer and, with DeepStack, one for each of L other layers."""

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__(build)
        assert build.config.vision is not None
        self.deepstack = nn.ModuleList(
            PatchMerger(build, f"deepstack.{index}.", joined_norm=True)
            for index in range(len(build.config.vision.deepstack_layers))
        )

    def merge_layers(self, outputs: Sequence[Tensor]) -> Tensor:
        """Merge the patches [P, C] of the last layer and of the L DeepStack layers to features [P / m^2, (1 + L) D].
        D is the language model's width.
        """
        last, *others = outputs
        return torch.cat([self(last), *(merge(x) for merge, x in zip(self.deepstack, others, strict=True))], -1)
