"""Conversion of image files to pixels for a vision encoder, as in transformers' CLIP, SigLIP and LLaVA-NeXT processors."""

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
    raise MissingPackageError(
        "reading images requires the package pillow", hint="pip install 'mega-data[images]'"
    ) from None

Pixels = npt.NDArray[np.float32]

MAX_PIXELS = 89_478_485  # of an image, and of its resized form: a quarter of a GiB in RGB, where Pillow begins to warn

# Pillow's errors for damaged images, and for images over its limit against decompression bombs
UNREADABLE = (
    OSError, ValueError, SyntaxError, EOFError, struct.error, OverflowError,
    Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip


@dataclass(frozen=True)
class PreparedImage:
    """Decoded, resized and normalized image as input of a vision encoder, with its placeholders' feature indices.

    Attributes:
        pixels: fp32 [n, 3, H, W], of the whole image, followed by its tiles with `vision.pinpoints`.
        features: int64 [k], see `list_placeholder_features`.
        animated: whether the file has more frames, which are ignored.
    """

    pixels: Pixels
    features: npt.NDArray[np.int64]
    animated: bool = False


def prepare_image(content: bytes, vision: VisionConfig) -> PreparedImage:
    """Decode the image file bytes `content` to RGB, resize the image and normalize it to (x / 255 - mean) / std, with
    tiles if `vision` has them.

    Raises:
        DataError: if Pillow cannot read it, or it has more than `MAX_PIXELS`.
    """
    try:
        with _opened(content) as image:
            # MPO files have previews in addition to the photo, which are not frames.
            animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
            image.seek(0)
            whole = image.convert("RGB")
            squares = [_resize_image(whole, vision), *_cut_tiles(whole, vision)]
    except UNREADABLE as error:
        raise DataError(f"the image cannot be read ({error})") from None
    scaled = np.stack([np.asarray(square, np.float32) for square in squares]) / np.float32(255)
    normal = (scaled - np.array(vision.mean, np.float32)) / np.array(vision.std, np.float32)
    features = list_placeholder_features(vision, whole.height, whole.width)
    return PreparedImage(np.ascontiguousarray(normal.transpose(0, 3, 1, 2)), features, animated)


def count_placeholders(content: bytes, vision: VisionConfig) -> int:
    """Return the number of placeholder tokens that an image takes in a text, from the size in the header of its file
    bytes `content`.

    Raises:
        DataError: if Pillow cannot read it.
    """
    try:
        with _opened(content) as image:
            return len(list_placeholder_features(vision, image.height, image.width))
    except UNREADABLE as error:
        raise DataError(f"the image cannot be read ({error})") from None


@contextlib.contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """Open an image, reading only its header, and close it on exit.

    Raises:
        DataError: if it has more than `MAX_PIXELS`.
    """
    with Image.open(io.BytesIO(content)) as image:
        _check_pixels(image.width, image.height, "the image has")
        yield image


def _check_pixels(width: int, height: int, subject: str) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{subject} {width:,} x {height:,} pixels, more than the maximum of {MAX_PIXELS:,}",
            hint="reduce the size of the image",
        )


def _cut_tiles(image: Image.Image, vision: VisionConfig) -> list[Image.Image]:
    """Return the tiles of an image in row order, after resizing it to its best resolution with black padding."""
    if vision.pinpoints is None:
        return []
    size, (full_height, full_width) = vision.image_size, select_tile_resolution(vision, image.height, image.width)
    height, width = fit_to_resolution((full_height, full_width), image.height, image.width)
    padded = Image.new("RGB", (full_width, full_height))
    resized = image.resize((width, height), Image.Resampling[vision.resample.upper()])
    padded.paste(resized, ((full_width - width) // 2, (full_height - height) // 2))
    corners = [(x, y) for y in range(0, full_height, size) for x in range(0, full_width, size)]
    return [padded.crop((x, y, x + size, y + size)) for x, y in corners]


def _resize_image(image: Image.Image, vision: VisionConfig) -> Image.Image:
    """Resize an image to native resolution, to a stretched square, or to its central square.

    Missing area is black, as in transformers.
    """
    size, (width, height) = vision.image_size, image.size
    resampling = Image.Resampling[vision.resample.upper()]
    if vision.native is not None:
        high, wide = compute_native_size(vision, height, width)
        _check_pixels(wide, high, "resized, the image has")
        return image.resize((wide, high), resampling)
    if vision.resize == "stretch":
        return image.resize((size, size), resampling)
    longer = int(size * max(width, height) / min(width, height))
    width, height = (size, longer) if width <= height else (longer, size)
    _check_pixels(width, height, f"resized to {size} pixels on its short side, the image has")
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), resampling)
    return image.crop((left, top, left + size, top + size))
