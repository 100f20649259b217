"""An image's file to the pixels that a vision tower is given, as transformers' processors of CLIP, SigLIP and LLaVA-NeXT make them."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError, MissingPackageError
from mega_common.vision import VisionConfig
from mega_data.images.native import size_of
from mega_data.images.tiles import features_of, fitted, resolution_of

try:
    from PIL import Image
except ImportError:
    raise MissingPackageError("images need the package pillow", hint="pip install 'mega-data[images]'") from None

Pixels = npt.NDArray[np.float32]

# Pillow's errors for damaged images, and for those of more pixels than its limit against decompression bombs
UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, OverflowError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Picture:
    """An image as a model sees it.

    Attributes:
        pixels: fp32 [n, 3, H, W], of the whole, and with `vision.pinpoints` of its tiles behind it.
        features: int64 [k], see `features_of`.
    """

    pixels: Pixels
    features: npt.NDArray[np.int64]


def picture_of(content: bytes, vision: VisionConfig) -> Picture:
    """Red, green and blue, resized, then (x / 255 - mean) / std.

    Raises:
        DataError: when it is no image that Pillow reads.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            whole = image.convert("RGB")
            squares = [_resized(whole, vision), *_tiles(whole, vision)]
    except UNREADABLE as error:
        raise DataError(f"no image that can be read ({error})") from None
    scaled = np.stack([np.asarray(one, np.float32) for one in squares]) / np.float32(255)
    normal = (scaled - np.array(vision.mean, np.float32)) / np.array(vision.std, np.float32)
    features = features_of(vision, whole.height, whole.width)
    return Picture(np.ascontiguousarray(normal.transpose(0, 3, 1, 2)), features)


def placeholders_of(content: bytes, vision: VisionConfig) -> int:
    """How many an image has in a text: what its size says, which is before the pixels in its file.

    Raises:
        DataError: when it is no image that Pillow reads.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            return len(features_of(vision, image.height, image.width))
    except UNREADABLE as error:
        raise DataError(f"no image that can be read ({error})") from None


def _tiles(image: Image.Image, vision: VisionConfig) -> list[Image.Image]:
    """Squares of an image that is resized to its best resolution, in its own shape and black around, line by line."""
    if vision.pinpoints is None:
        return []
    size, (most_high, most_wide) = vision.image_size, resolution_of(vision, image.height, image.width)
    height, width = fitted((most_high, most_wide), image.height, image.width)
    filled = Image.new("RGB", (most_wide, most_high))
    resized = image.resize((width, height), Image.Resampling[vision.resample.upper()])
    filled.paste(resized, ((most_wide - width) // 2, (most_high - height) // 2))
    corners = [(x, y) for y in range(0, most_high, size) for x in range(0, most_wide, size)]
    return [filled.crop((x, y, x + size, y + size)) for x, y in corners]


def _resized(image: Image.Image, vision: VisionConfig) -> Image.Image:
    """Its own shape, or a square: all of the image, stretched, or its middle. What does not reach its edges is black, as in transformers."""
    size, (width, height) = vision.image_size, image.size
    filtered = Image.Resampling[vision.resample.upper()]
    if vision.native is not None:
        high, wide = size_of(vision, height, width)
        return image.resize((wide, high), filtered)
    if vision.resize == "stretch":
        return image.resize((size, size), filtered)
    longer = int(size * max(width, height) / min(width, height))
    width, height = (size, longer) if width <= height else (longer, size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), filtered)
    return image.crop((left, top, left + size, top + size))
