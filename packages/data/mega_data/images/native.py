"""Images that keep their shape, as Qwen2.5-VL's processor makes them (arXiv:2409.12191): how large, and where their tokens stand.

Legend: H, W height and width of an image in pixels, S tokens of a sample, k placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.vision import VisionConfig

LONGEST = 200  # sides of an image as multiples of one another


def size_of(vision: VisionConfig, height: int, width: int) -> tuple[int, int]:
    """The (height, width) that an image [H, W] is resized to: whole features, within the bounds, about its own shape.

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


def rotary_positions(
    positions: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    features: npt.NDArray[np.int64],
    grids: Sequence[tuple[int, int]],
) -> npt.NDArray[np.int64]:
    """Time, line and column that tokens are turned by: int64 [3, S].

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
        (high, wide), here = grids[number], places[numbers == number]
        inside = features[numbers == number] - (ends[number] - high * wide)
        begin, behind = found[0, here[0]], slice(here[-1] + 1, _end(positions, here[-1]))
        found[:, here] = begin + np.stack([np.zeros_like(inside), *np.divmod(inside, wide)])
        found[:, behind] += max(high, wide) - (here[-1] + 1 - here[0])
    return found


def _end(positions: npt.NDArray[np.int64], place: int) -> int:
    """Where the document ends that the token at a place is of."""
    new = np.flatnonzero(positions[place + 1 :] == 0)
    return place + 1 + int(new[0]) if new.size else len(positions)
