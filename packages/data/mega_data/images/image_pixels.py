"""Conversion of image files to the input pixels of a vision encoder, as in transformers' processors of CLIP, SigLIP and
LLaVA-NeXT.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError, MissingPackageError
from mega_common.vision_config import VisionConfig
from mega_data.images.image_geometry import (
    compute_native_size,
    fit_to_resolution,
    list_placeholder_features,
    select_tile_resolution,
)

try:
    from PIL import Image
except ImportError:
    raise MissingPackageError("images need the package pillow", hint="pip install 'mega-data[images]'") from None

Pixels = npt.NDArray[np.float32]

MOST_PIXELS = 89_478_485  # of an image, and of its resized form: a quarter of a GiB in RGB, where Pillow begins to warn

# Pillow's errors for damaged images, and for those of more pixels than its limit against decompression bombs
UNREADABLE = (
    OSError, ValueError, SyntaxError, EOFError, struct.error, OverflowError,
    Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip


@dataclass(frozen=True)
class PreparedImage:
    """Image as input of a vision encoder.

    Attributes:
        pixels: fp32 [n, 3, H, W], of the whole, and with `vision.pinpoints` of its tiles behind it.
        features: int64 [k], see `list_placeholder_features`.
        animated: whether the file has further frames, which are not used.
    """

    pixels: Pixels
    features: npt.NDArray[np.int64]
    animated: bool = False


def prepare_image(content: bytes, vision: VisionConfig) -> PreparedImage:
    """Decode an image to RGB, resize it and normalize it to (x / 255 - mean) / std.

    Raises:
        DataError: when it is not an image that Pillow reads, or has more than `MOST_PIXELS`.
    """
    try:
        with _opened(content) as image:
            # Photos in MPO have previews beside the photo, which are no frames.
            animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
            image.seek(0)
            whole = image.convert("RGB")
            squares = [_resize_image(whole, vision), *_cut_tiles(whole, vision)]
    except UNREADABLE as error:
        raise DataError(f"no image that can be read ({error})") from None
    scaled = np.stack([np.asarray(one, np.float32) for one in squares]) / np.float32(255)
    normal = (scaled - np.array(vision.mean, np.float32)) / np.array(vision.std, np.float32)
    features = list_placeholder_features(vision, whole.height, whole.width)
    return PreparedImage(np.ascontiguousarray(normal.transpose(0, 3, 1, 2)), features, animated)


def count_placeholders(content: bytes, vision: VisionConfig) -> int:
    """Return the number of placeholders of an image in a text, from the size in its file header.

    Raises:
        DataError: when it is no image that Pillow reads.
    """
    try:
        with _opened(content) as image:
            return len(list_placeholder_features(vision, image.height, image.width))
    except UNREADABLE as error:
        raise DataError(f"no image that can be read ({error})") from None


@contextlib.contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """Open an image, of which only the header is read, and close it again.

    Raises:
        DataError: when it has more than `MOST_PIXELS`.
    """
    with Image.open(io.BytesIO(content)) as image:
        _check_pixels(image.width, image.height, "the image has")
        yield image


def _check_pixels(width: int, height: int, subject: str) -> None:
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{subject} {width:,} x {height:,} pixels, more than the {MOST_PIXELS:,} that are read",
            hint="make the image smaller",
        )


def _cut_tiles(image: Image.Image, vision: VisionConfig) -> list[Image.Image]:
    """Return the tiles of an image in row order, after resizing it to its best resolution with black padding."""
    if vision.pinpoints is None:
        return []
    size, (most_high, most_wide) = vision.image_size, select_tile_resolution(vision, image.height, image.width)
    height, width = fit_to_resolution((most_high, most_wide), image.height, image.width)
    filled = Image.new("RGB", (most_wide, most_high))
    resized = image.resize((width, height), Image.Resampling[vision.resample.upper()])
    filled.paste(resized, ((most_wide - width) // 2, (most_high - height) // 2))
    corners = [(x, y) for y in range(0, most_high, size) for x in range(0, most_wide, size)]
    return [filled.crop((x, y, x + size, y + size)) for x, y in corners]


def _resize_image(image: Image.Image, vision: VisionConfig) -> Image.Image:
    """Resize an image to native resolution, to a stretched square, or to its central square; missing area is black, as
    in transformers.
    """
    size, (width, height) = vision.image_size, image.size
    filtered = Image.Resampling[vision.resample.upper()]
    if vision.native is not None:
        high, wide = compute_native_size(vision, height, width)
        _check_pixels(wide, high, "resized, the image has")
        return image.resize((wide, high), filtered)
    if vision.resize == "stretch":
        return image.resize((size, size), filtered)
    longer = int(size * max(width, height) / min(width, height))
    width, height = (size, longer) if width <= height else (longer, size)
    _check_pixels(width, height, f"resized to {size} pixels on its short side, the image has")
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), filtered)
    return image.crop((left, top, left + size, top + size))
