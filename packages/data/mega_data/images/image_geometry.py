"""Sizes, tiles and token positions of images at native resolution (Qwen2.5-VL, arXiv:2409.12191) and in tiles (LLaVA-
NeXT).

Legend: H, W height and width of an image in pixels, S tokens of a sample, k placeholders.

The image is resized, keeping its shape, to the best of a model's resolutions (`VisionConfig.pinpoints`) and cut in squares; the
whole as one square comes before them. Its placeholders are those of the whole, and then the lines of patches across all
tiles, without those that only fill up, behind each line one more (llava-vl.github.io/blog/2024-01-30-llava-next).

Legend: H, W height and width of an image, P patches of a square, k placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig

LONGEST = 200  # sides of an image as multiples of one another


def compute_native_size(vision: VisionConfig, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) to which an image [H, W] is resized: whole features, within the pixel limits, with
    about its aspect ratio.

    Raises:
        DataError: when one side is more than 200 times the other.
    """
    native = vision.native
    assert native is not None
    if max(height, width) > LONGEST * min(height, width):
        raise DataError(f"an image of {height} x {width} pixels is longer than {LONGEST} times its other side")
    side = vision.patch_size * native.merge
    high, wide = (round(one / side) * side for one in (height, width))
    if high * wide > native.max_pixels:
        scale = math.sqrt(height * width / native.max_pixels)
        return max(side, math.floor(height / scale / side) * side), max(side, math.floor(width / scale / side) * side)
    if high * wide < native.min_pixels:
        scale = math.sqrt(native.min_pixels / (height * width))
        return math.ceil(height * scale / side) * side, math.ceil(width * scale / side) * side
    return high, wide


def compute_mrope_positions(
    positions: npt.NDArray[np.int64],
    placeholder_positions: npt.NDArray[np.int64],
    features: npt.NDArray[np.int64],
    grids: Sequence[tuple[int, int]],
) -> npt.NDArray[np.int64]:
    """Return the time, row and column positions of tokens for multimodal RoPE: int64 [3, S].

    All three are a token's position but in an image: there its feature's line and column come to those of the image's first
    one, and the text behind goes on from the longer side of the image, not from its number of tokens.

    Args:
        positions: int64 [S], 0 where a document begins.
        places, features: int64 [k], as in `SampleImages`.
        grids: features of each image from top to bottom, and from left to right.
    """
    found = np.stack([positions] * 3)
    ends = np.cumsum([high * wide for high, wide in grids])
    numbers = np.searchsorted(ends, features, side="right")
    for number in np.unique(numbers):
        (high, wide), here = grids[number], placeholder_positions[numbers == number]
        inside = features[numbers == number] - (ends[number] - high * wide)
        begin, behind = found[0, here[0]], slice(here[-1] + 1, _find_document_end(positions, here[-1]))
        found[:, here] = begin + np.stack([np.zeros_like(inside), *np.divmod(inside, wide)])
        found[:, behind] += max(high, wide) - (here[-1] + 1 - here[0])
    return found


def _find_document_end(positions: npt.NDArray[np.int64], place: int) -> int:
    """Return the end of the document that contains the token at `place`."""
    new = np.flatnonzero(positions[place + 1 :] == 0)
    return place + 1 + int(new[0]) if new.size else len(positions)


def select_tile_resolution(vision: VisionConfig, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) that keeps the most of an image [H, W], on ties the one with the least padding."""
    assert vision.pinpoints is not None

    def worth(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(vision.pinpoints, key=worth)


def fit_to_resolution(resolution: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) of an image [H, W] scaled to fit into a resolution with its aspect ratio."""
    most_high, most_wide = resolution
    across, down = most_wide / width, most_high / height
    if across < down:
        return min(math.ceil(height * across), most_high), most_wide
    return most_high, min(math.ceil(width * down), most_wide)


def list_placeholder_features(vision: VisionConfig, height: int, width: int) -> npt.NDArray[np.int64]:
    """Return the features of the placeholders of an image [H, W], as indices into the features of its squares: int64
    [k].

    A square has `vision.rows` of them: P, and where there are tiles the end of a line.
    """
    if vision.native is not None:
        return np.arange(vision.count_features(*compute_native_size(vision, height, width)))
    whole = np.arange(vision.tokens_per_image)
    if vision.pinpoints is None:
        return whole
    high, wide = (side // vision.image_size for side in select_tile_resolution(vision, height, width))
    side = vision.image_size // vision.patch_size
    tiles = 1 + np.arange(high * wide).reshape(high, 1, wide, 1)
    patches = np.arange(side * side).reshape(1, side, 1, side)
    lines = _crop_padding(
        (tiles * vision.features_per_square + patches).reshape(high * side, wide * side), height, width
    )
    ends = np.full((len(lines), 1), vision.tokens_per_image)  # that of the first square: all are the same
    return np.concatenate([whole, np.concatenate([lines, ends], 1).ravel()])


def _crop_padding(grid: npt.NDArray[np.int64], height: int, width: int) -> npt.NDArray[np.int64]:
    """Return the patches [h, w] of a grid that a centered image [H, W] covers; sides are rounded as in the reference
    model.
    """
    high, wide = grid.shape
    if width / height > wide / high:
        margin = (high - int(round(height * (wide / width), 7))) // 2
        return grid[margin : high - margin]
    margin = (wide - int(round(width * (high / height), 7))) // 2
    return grid[:, margin : wide - margin]
