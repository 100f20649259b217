"""Images of any shape: windows and rotation are transformers', and every feature is computed once, whoever does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from mega_common.vision_config import VisionConfig
from mega_trainer.model.vision.native_resolution import ImagePartition

FIELDS: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "patch_size": 2, "image_token": 1,
    "activation": "swiglu", "class_token": False, "pre_norm": False, "feature_layer": -1, "projector": "merger",
}  # fmt: skip
grids = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5)


def dealt(shapes: list[tuple[int, int]], rank: int, ranks: int, merge: int = 2, side: int = 3) -> ImagePartition:
    """Images of so many features, whose pixels are those of no other."""
    native = {"merge": merge, "window": 2 * merge * side, "full_layers": [], "min_pixels": 1, "max_pixels": 10**6}
    vision = VisionConfig.parse({**FIELDS, "native": native}, source="test")
    sizes = [(3, 2 * merge * high, 2 * merge * wide) for high, wide in shapes]
    count = np.cumsum([0, *(int(np.prod(size)) for size in sizes)])
    images = [torch.arange(int(count[n]), int(count[n + 1])).float().view(size) for n, size in enumerate(sizes)]
    return ImagePartition(images, vision, rank, ranks)


@given(grids.filter(len), st.integers(1, 3), st.integers(1, 4))
def test_windows_and_places_are_those_of_transformers(shapes: list[tuple[int, int]], merge: int, side: int) -> None:
    one = dealt(shapes, 0, 1, merge, side)
    whole = torch.tensor([(1, merge * high, merge * wide) for high, wide in shapes])
    order, ends = get_vision_window_index(whole, merge, 2 * merge * side, 2)
    assert torch.equal(one.feature_rows, order.argsort())
    sight = one.make_patch_mask(torch.device("cpu"))
    assert sight.mask_for_window(1).lengths == tuple(ends.diff().tolist())
    assert sight.mask_for_window(None).lengths == tuple((whole[:, 1] * whole[:, 2]).tolist())
    expected = get_vision_position_ids(whole, merge).view(-1, merge**2, 2)[order].flatten(0, 1)
    assert torch.equal(one.patch_coordinates(), expected)


@given(grids, st.integers(1, 3), st.integers(1, 6), st.integers(1, 3))
def test_learned_positions_are_interpolated_as_by_torch(
    shapes: list[tuple[int, int]], merge: int, side: int, ranks: int
) -> None:
    """A table of side x side positions, resampled to each image, whose patches are those of each rank's images in turn."""
    table = torch.randn(side * side, 3, generator=torch.Generator().manual_seed(1))
    grid = table.T.view(1, 3, side, side)
    for rank in range(ranks):
        one = dealt(shapes, rank, ranks, merge)
        native = one.native_resolution.model_copy(update={"positions": side * side, "window": None})
        one = ImagePartition(one.images, one.vision.model_copy(update={"native": native}), rank, ranks)
        rows, weights = one.compute_position_interpolation()
        found, start = (table[rows] * weights[..., None]).sum(1), 0
        for number in one.image_ranges_by_rank[rank]:
            high, wide = (merge * length for length in one.feature_grids[number])
            resized = F.interpolate(grid, (high, wide), mode="bilinear", align_corners=True)[0]
            places = one.patch_coordinates()[start : start + high * wide]
            own = found[start : start + high * wide]
            torch.testing.assert_close(own, resized[:, places[:, 0], places[:, 1]].T, rtol=0, atol=1e-5)
            start += high * wide
        assert len(found) == len(one.extract_patches()) == sum(one.make_patch_mask(torch.device("cpu")).images.lengths)


@given(grids, st.integers(1, 5))
def test_every_feature_is_computed_once(shapes: list[tuple[int, int]], ranks: int) -> None:
    """Gathered, and found where `rows` says, they are those of one rank; no rank has more than an image beyond its share."""
    alone = dealt(shapes, 0, 1)
    each = [dealt(shapes, rank, ranks) for rank in range(ranks)]
    every = torch.cat([one.extract_patches() for one in each]).view(-1, 4 * alone.vision.values_per_patch)
    own = alone.extract_patches().view(-1, 4 * alone.vision.values_per_patch)
    assert torch.equal(every[each[0].feature_rows], own[alone.feature_rows])
    assert len({len(one.extract_patches()) for one in each}) == 1
    sizes = [high * wide for high, wide in shapes] or [0]
    assert max(1, -(-sum(sizes) // ranks)) <= each[0].features_per_rank <= max(1, sum(sizes) / ranks + max(sizes))
    for one in each:
        sight = one.make_patch_mask(torch.device("cpu"))
        assert (
            sum(sight.images.lengths)
            == sum(sight.windows.lengths)
            == len(one.patch_coordinates())
            == 4 * one.features_per_rank
        )
