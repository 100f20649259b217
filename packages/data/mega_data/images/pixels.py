"""An image's file to the pixels that a vision tower is given, as transformers' CLIP and SigLIP processors make them."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError, MissingPackageError
from mega_common.vision import VisionConfig

try:
    from PIL import Image
except ImportError:
    raise MissingPackageError("images need the package pillow", hint="pip install 'mega-data[images]'") from None

Pixels = npt.NDArray[np.float32]


def pixels_of(content: bytes, vision: VisionConfig) -> Pixels:
    """fp32 [3, H, W]: red, green and blue, resized, then (x / 255 - mean) / std.

    Raises:
        DataError: when it is no image that Pillow reads.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            square = _resized(image.convert("RGB"), vision)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"no image that can be read ({error})") from None
    scaled = np.asarray(square, np.float32) / np.float32(255)
    normal = (scaled - np.array(vision.mean, np.float32)) / np.array(vision.std, np.float32)
    return np.ascontiguousarray(normal.transpose(2, 0, 1))


def _resized(image: Image.Image, vision: VisionConfig) -> Image.Image:
    """A square: all of the image, stretched, or its middle. What does not reach its edges is black, as in transformers."""
    size, (width, height) = vision.image_size, image.size
    filtered = Image.Resampling[vision.resample.upper()]
    if vision.resize == "stretch":
        return image.resize((size, size), filtered)
    longer = int(size * max(width, height) / min(width, height))
    width, height = (size, longer) if width <= height else (longer, size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), filtered)
    return image.crop((left, top, left + size, top + size))
