"""How LLaVA-NeXT cuts an image of any size in tiles, and which of their features a text has placeholders for.

The image is resized, keeping its shape, to the best of a model's resolutions (`VisionConfig.pinpoints`) and cut in squares; the
whole as one square comes before them. Its placeholders are those of the whole, and then the lines of patches across all
tiles, without those that only fill up, behind each line one more (llava-vl.github.io/blog/2024-01-30-llava-next).

Legend: H, W height and width of an image, P patches of a square, k placeholders.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mega_common.vision import VisionConfig
from mega_data.images.native import size_of


def resolution_of(vision: VisionConfig, height: int, width: int) -> tuple[int, int]:
    """The (height, width) that keeps the most of an image [H, W], of several such the one with the least around it."""
    assert vision.pinpoints is not None

    def worth(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(vision.pinpoints, key=worth)


def fitted(resolution: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """The (height, width) of an image [H, W] as large as fits into a resolution, in its own shape."""
    most_high, most_wide = resolution
    across, down = most_wide / width, most_high / height
    if across < down:
        return min(math.ceil(height * across), most_high), most_wide
    return most_high, min(math.ceil(width * down), most_wide)


def features_of(vision: VisionConfig, height: int, width: int) -> npt.NDArray[np.int64]:
    """int64 [k]: the features that the placeholders of an image [H, W] stand for, among those of its squares one after another.

    A square has `vision.rows` of them: P, and where there are tiles the end of a line.
    """
    if vision.native is not None:
        return np.arange(vision.features(*size_of(vision, height, width)))
    whole = np.arange(vision.tokens)
    if vision.pinpoints is None:
        return whole
    high, wide = (side // vision.image_size for side in resolution_of(vision, height, width))
    side = vision.image_size // vision.patch_size
    tiles = 1 + np.arange(high * wide).reshape(high, 1, wide, 1)
    patches = np.arange(side * side).reshape(1, side, 1, side)
    lines = _without_filling((tiles * vision.rows + patches).reshape(high * side, wide * side), height, width)
    ends = np.full((len(lines), 1), vision.tokens)  # that of the first square: all are the same
    return np.concatenate([whole, np.concatenate([lines, ends], 1).ravel()])


def _without_filling(grid: npt.NDArray[np.int64], height: int, width: int) -> npt.NDArray[np.int64]:
    """The patches [h, w] of a grid that an image [H, W] in its middle reaches; sides are rounded as its model does."""
    high, wide = grid.shape
    if width / height > wide / high:
        margin = (high - int(round(height * (wide / width), 7))) // 2
        return grid[margin : high - margin]
    margin = (wide - int(round(width * (high / height), 7))) // 2
    return grid[:, margin : wide - margin]
