"""Sizes, tiles, token positions and pixels of images for vision encoders.

Native resolution follows Qwen2-VL (arXiv:2409.12191), tiles follow LLaVA-NeXT, and pixels transformers' image processors
of CLIP, SigLIP and LLaVA-NeXT.

Tiles: the image is resized, with its aspect ratio, to the best of a model's resolutions (`VisionConfig.pinpoints`), and
cut into squares; the whole image as one square comes first. Its placeholders are those of the whole image, followed by
the rows of patches across all tiles, without padding, each row with an end-of-row placeholder
(llava-vl.github.io/blog/2024-01-30-llava-next).

Legend: H, W height and width of an image in pixels, S tokens of a sample, P patches of a square, k placeholders.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError, MissingPackageError
from mega_common.vision_config import VisionConfig
from mega_data.images.image_inputs import ImageInputs, ImageText

MAX_ASPECT_RATIO = 200


def compute_native_size(vision: VisionConfig, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) in pixels to which an image is resized for a native-resolution vision encoder.
    The image has `height` x `width` pixels.

    Both are whole features within the pixel limits, with about the aspect ratio of the image.

    Raises:
        DataError: if one side is more than 200 times the other.
    """
    native = vision.native
    assert native is not None
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise DataError(
            f"the aspect ratio of an image must be at most {MAX_ASPECT_RATIO}, and its size is {height} x {width} pixels"
        )
    side = vision.patch_size * native.merge
    high, wide = (round(length / side) * side for length in (height, width))
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
    """Return the time, row and column positions [3, S] of a sample's tokens for multimodal RoPE (Qwen2.5-VL).
    The result is int64.

    For text, all three are the token's position. In an image, the row and column of the feature are added to the
    position of the image's first feature. The text after an image continues after the longer side of its grid, not
    after its number of tokens.

    Args:
        positions: int64 [S], 0 at the first token of a document.
        placeholder_positions, features: int64 [k], as in `SampleImages`.
        grids: number of feature rows and columns of each image.
    """
    mrope = np.stack([positions] * 3)
    ends = np.cumsum([high * wide for high, wide in grids])
    numbers = np.searchsorted(ends, features, side="right")
    for number in np.unique(numbers):
        (high, wide), here = grids[number], placeholder_positions[numbers == number]
        inside = features[numbers == number] - (ends[number] - high * wide)
        begin, following = mrope[0, here[0]], slice(here[-1] + 1, _find_document_end(positions, here[-1]))
        mrope[:, here] = begin + np.stack([np.zeros_like(inside), *np.divmod(inside, wide)])
        mrope[:, following] += max(high, wide) - (here[-1] + 1 - here[0])
    return mrope


def _find_document_end(positions: npt.NDArray[np.int64], token: int) -> int:
    """Return the end of the document that contains the token with index `token`."""
    starts = np.flatnonzero(positions[token + 1 :] == 0)
    return token + 1 + int(starts[0]) if starts.size else len(positions)


def select_tile_resolution(vision: VisionConfig, height: int, width: int) -> tuple[int, int]:
    """Return the tile resolution (height, width) in `vision.pinpoints` that keeps the most pixels of an image.
    The image has `height` x `width` pixels. On ties the result is the resolution with the least padding.
    """
    assert vision.pinpoints is not None

    def rate(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(vision.pinpoints, key=rate)


def compute_fitted_image_size(resolution: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) of an image scaled with its aspect ratio to fit into `resolution`.
    The image has `height` x `width` pixels; `resolution` is (height, width).
    """
    max_height, max_width = resolution
    x_scale, y_scale = max_width / width, max_height / height
    if x_scale < y_scale:
        return min(math.ceil(height * x_scale), max_height), max_width
    return max_height, min(math.ceil(width * y_scale), max_width)


def map_placeholders_to_features(vision: VisionConfig, height: int, width: int) -> npt.NDArray[np.int64]:
    """Return, for each placeholder token of an image, the index of the vision projector's feature that replaces it.
    The image has `height` x `width` pixels. Features are row indices over all its tiles: int64 [placeholders].

    A square has `vision.features_per_tile` features: P, and with tiles the end-of-row feature.
    """
    if vision.native is not None:
        return np.arange(vision.count_image_features(*compute_native_size(vision, height, width)))
    whole = np.arange(vision.tokens_per_image)
    if vision.pinpoints is None:
        return whole
    high, wide = (side // vision.image_size for side in select_tile_resolution(vision, height, width))
    side = vision.image_size // vision.patch_size
    tiles = 1 + np.arange(high * wide).reshape(high, 1, wide, 1)
    patches = np.arange(side * side).reshape(1, side, 1, side)
    lines = _crop_padding((tiles * vision.features_per_tile + patches).reshape(high * side, wide * side), height, width)
    ends = np.full((len(lines), 1), vision.tokens_per_image)  # of the first square: all squares have the same one
    return np.concatenate([whole, np.concatenate([lines, ends], 1).ravel()])


def _crop_padding(grid: npt.NDArray[np.int64], height: int, width: int) -> npt.NDArray[np.int64]:
    """Return the patches [h, w] of a grid that a centered image [H, W] covers, rounded as in the reference model."""
    high, wide = grid.shape
    if width / height > wide / high:
        margin = (high - int(round(height * (wide / width), 7))) // 2
        return grid[margin : high - margin]
    margin = (wide - int(round(width * (high / height), 7))) // 2
    return grid[:, margin : wide - margin]


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
    """Decoded, resized and normalized image as input of a vision encoder.
    It includes the feature index of each of its placeholder tokens.

    Attributes:
        pixels: fp32 [n, 3, H, W], of the whole image, followed by its tiles with `vision.pinpoints`; the inputs of a vision
            encoder that is a module of transformers.
        features: int64 [k], see `map_placeholders_to_features`.
        animated: whether the file has more frames, which are ignored.
        text: text of the image in a prompt, for a module; None: one placeholder per feature.
    """

    pixels: Pixels | list[ImageInputs]
    features: npt.NDArray[np.int64]
    animated: bool = False
    text: ImageText | None = None


def prepare_image(content: bytes, vision: VisionConfig) -> PreparedImage:
    """Decode an image file to RGB, resize the image and normalize it to (x / 255 - mean) / std.
    The file's bytes are `content`. The image is split into tiles if `vision` has them.

    Raises:
        DataError: if Pillow cannot read it, or it has more than `MAX_PIXELS`.
    """
    try:
        with _opened(content) as image:
            # MPO files have previews in addition to the photo, which are not frames.
            animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
            image.seek(0)
            whole = image.convert("RGB")
            if vision.module is not None:
                from mega_data.images.module_images import ModuleImageProcessor  # local: it requires transformers

                inputs, text = ModuleImageProcessor(vision.module).prepare(whole)
                return PreparedImage([inputs], np.arange(text.features), animated, text)
            squares = [_resize_image(whole, vision), *_cut_tiles(whole, vision)]
    except UNREADABLE as error:
        raise DataError(f"the image cannot be read ({error})") from None
    scaled = np.stack([np.asarray(square, np.float32) for square in squares]) / np.float32(255)
    normal = (scaled - np.array(vision.mean, np.float32)) / np.array(vision.std, np.float32)
    features = map_placeholders_to_features(vision, whole.height, whole.width)
    return PreparedImage(np.ascontiguousarray(normal.transpose(0, 3, 1, 2)), features, animated)


def count_image_placeholder_tokens(content: bytes, vision: VisionConfig) -> int:
    """Return the number of placeholder tokens that an image takes in a text.
    It is computed from the size in the header of the file bytes `content`; for a module of transformers from the image.

    Raises:
        DataError: if Pillow cannot read it.
    """
    if vision.module is not None:
        return len(prepare_image(content, vision).features)
    try:
        with _opened(content) as image:
            return len(map_placeholders_to_features(vision, image.height, image.width))
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
    height, width = compute_fitted_image_size((full_height, full_width), image.height, image.width)
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
