"""Bugs of a model that sees, of who computes which image above all, for `mutations`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from parity.cases import VARIANTS, case
from parity.recurrence_mutations import Patch
from torch import Tensor
from vision_modules import read_vision

from mega_common.vision_config import PROJECTOR, TOWER
from mega_trainer.data import batch_images
from mega_trainer.data.batch_images import BatchImages, ImageBlock, add_image_features, insert_image_features
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.attention_masks import AttentionMaskBlock
from mega_trainer.model import forward_context
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.model.vision import native_resolution, vision_builder, vision_encoder, vision_module
from mega_trainer.model.vision.native_resolution import ImagePartition, PatchGrid, PatchWindowMask
from mega_trainer.model.vision.vision_encoder import ImageEmbedder
from mega_trainer.model.vision.vision_module import ModuleImagePartition
from mega_trainer.verify.layout_case import LayoutCase

swap = mock.patch.object
TP = case("vision", 2, parallel={"tp": 2, "zero": 0})
SP = case("vision", 2, parallel={"tp": 2, "sp": True}, freeze=["model.vision_tower.*"])
CP = case("vision", 4, parallel={"tp": 2, "cp": 2, "zero": 3}, variant={"tie_embeddings": True})
PIPED = case("vision", 4, layers=4, parallel={"tp": 2, "pp": 2, "schedule": "zb-h1"}, micro=2)


RING = case("vision", 2, parallel={"cp": 2}, variant=VARIANTS["vision"][3])
PROMPT = case("vision", 2, parallel={"cp": 2}, variant=VARIANTS["vision"][7])
WINDOWS = case("vision", 2, parallel={"tp": 2}, variant=VARIANTS["vision"][6])
TILES = case("vision", 2, parallel={"tp": 2}, variant=VARIANTS["vision"][2])
SHAPES = case("vision", 4, parallel={"tp": 2, "cp": 2}, variant=VARIANTS["vision"][4])
MODULE = case("vision", 2, parallel={"tp": 2}, variant={"vision": read_vision("internvl") | {"image_token": 60}})
STACKED = case("vision", 2, parallel={"tp": 2, "sp": True}, variant=VARIANTS["vision"][5])


def _within_a_chunk(blocks: Sequence[ImageBlock], queries: range, keys: range) -> list[AttentionMaskBlock]:
    """An image's tokens see none of it in a chunk behind."""
    return batch_images.make_image_block_masks(blocks, queries, keys) if queries == keys else []


def _one_dealt_twice(self: BatchImages, rank: int, ranks: int) -> Tensor:
    """The last rank computes the first one's images too."""
    assert isinstance(self.pixels, Tensor)
    count = len(self.pixels)
    return _dealt(
        replace(self, pixels=torch.cat([self.pixels[: count // 2], self.pixels[: count - count // 2]])), rank, ranks
    )


_dealt = BatchImages.select_rank_images


def _one_place_off(x: Tensor, features: Tensor, rows: Tensor) -> Tensor:
    return insert_image_features(x, features, rows.roll(1, -1))


def _of_the_first_ranks_places(self: ImageEmbedder, x: Tensor, images: BatchImages, layer: int) -> Tensor:
    """Each rank of sp adds what belongs to the first one's part of the sequence."""
    assert images.features is not None
    features = images.features[:, (1 + layer) * self.width : (2 + layer) * self.width]
    return add_image_features(x, features, images.rows[:, : x.shape[1]]) if features.shape[1] else x


def _gradient(partial: bool, axis: str) -> Patch:
    """Say of the features that the ranks of an axis have other gradients, or the same."""
    real = vision_encoder.all_gather_image_features

    def gathered(features: Tensor, group: CommGroup, **options: Any) -> Tensor:
        return real(features, group, partial=partial if group.name == axis else options["partial"])

    return lambda: swap(vision_encoder, "all_gather_image_features", gathered)


def _stays(prefix: str, owner: Any = vision_builder) -> Patch:
    """Gradients of some tensors stay with the tensor rank."""
    real = vision_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        return real(shape, pieces, **(options | {"grad_sync": ()} if pieces[0].name.startswith(prefix) else options))

    return lambda: swap(owner, "make_parameter", make)


def _places_of_the_first_chunk() -> AbstractContextManager[Any]:
    """A context rank looks for its tokens' features at the begin of the sequence."""
    real = MicroBatch.select_tokens

    def part(self: MicroBatch, places: Tensor) -> MicroBatch:
        own = real(self, places)
        assert self.images is not None
        return replace(own, images=self.images.select_positions(slice(len(places))))

    return swap(MicroBatch, "select_tokens", part)


def _by_lines(grid: PatchGrid, side: int) -> tuple[np.ndarray, list[int]]:
    """Windows as large as they should be, of features line by line."""
    order, lengths = windows_of(grid, side)
    return np.sort(order), lengths


windows_of = native_resolution.order_features_by_windows


def _without_shares(self: ImagePartition) -> Tensor:
    """Where features stood if no rank had padding."""
    return torch.from_numpy(
        np.concatenate([np.argsort(order) for order, _ in self.window_orders] or [np.zeros(1, np.int64)])
    )


def _columns_before_lines(self: BatchImages, places: Any) -> BatchImages:
    own = _part(self, places)
    assert own.positions is not None
    return replace(own, positions=own.positions[[0, 2, 1]])


_part = BatchImages.select_positions


def _images_of_the_first_rank(self: ModuleImagePartition) -> Any:
    return _of_rank(replace(self, rank=0))


_of_rank = ModuleImagePartition.module_inputs_of_rank


VISIONS: list[tuple[str, LayoutCase, Patch]] = [
    ("vision: the gradient of a module's encoder stays on its rank", MODULE, _stays(TOWER, vision_module)),
    (
        "vision: every rank encodes a module's images of the first one",
        MODULE,
        lambda: swap(ModuleImagePartition, "module_inputs_of_rank", _images_of_the_first_rank),
    ),
    ("vision: an image is dealt twice", TP, lambda: swap(BatchImages, "select_rank_images", _one_dealt_twice)),
    (
        "vision: features one place off under sp",
        SP,
        lambda: swap(vision_encoder, "insert_image_features", _one_place_off),
    ),
    ("vision: the projector's gradient stays on its rank", SP, _stays(PROJECTOR)),
    ("vision: the gradient of lines' ends stays on its rank", TILES, _stays(f"{PROJECTOR}newline")),
    ("vision: the tower's gradient stays on its rank", PIPED, _stays(TOWER)),
    ("vision: features' gradients of tensor ranks are summed without sp", TP, _gradient(True, "tp")),
    ("vision: features' gradients of tensor ranks are not summed under sp", SP, _gradient(False, "tp")),
    ("vision: features' gradients of context ranks are not summed", CP, _gradient(False, "cp")),
    (
        "vision: an image ends with its chunk",
        RING,
        lambda: swap(forward_context, "make_image_block_masks", _within_a_chunk),
    ),
    (
        "vision: a prompt ends with its chunk",
        PROMPT,
        lambda: swap(forward_context, "make_image_block_masks", _within_a_chunk),
    ),
    (
        "vision: placeholders see later ones in layers without a window, too",
        WINDOWS,
        lambda: swap(SequenceMask, "blocks_for_window", lambda self, window: self.bidirectional_blocks),
    ),
    (
        "vision: placeholders see no later ones in layers with a window",
        WINDOWS,
        lambda: swap(SequenceMask, "blocks_for_window", lambda self, window: ()),
    ),
    ("vision: context ranks look at the first places", CP, _places_of_the_first_chunk),
    (
        "vision: windows of features line by line",
        SHAPES,
        lambda: swap(native_resolution, "order_features_by_windows", _by_lines),
    ),
    (
        "vision: every layer sees the whole image",
        SHAPES,
        lambda: swap(PatchWindowMask, "mask_for_window", lambda self, window: self.images),
    ),
    (
        "vision: what a rank has no images for stays among features",
        SHAPES,
        lambda: swap(ImagePartition, "feature_rows", property(_without_shares)),
    ),
    (
        "vision: DeepStack of the first rank's places under sp",
        STACKED,
        lambda: swap(ImageEmbedder, "add_deepstack", _of_the_first_ranks_places),
    ),
    ("vision: the gradient of DeepStack mergers stays on its rank", STACKED, _stays(f"{PROJECTOR}deepstack")),
    (
        "vision: context ranks turn by columns where lines should",
        SHAPES,
        lambda: swap(BatchImages, "select_positions", _columns_before_lines),
    ),
]
