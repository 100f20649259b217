"""Images that declare more pixels than they may, or are damaged, are refused in one line."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig
from mega_data.images.image_pixels import UNREADABLE, count_image_placeholder_tokens, prepare_image


def _png(width: int, height: int, pixels: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def _whole(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, kind)
    return file.getvalue()


DAMAGED = {
    "declares_4e18_pixels": _png(2**31 - 1, 2**31 - 1),
    "declares_1e9_pixels": _png(100_000, 10_000),
    "has_no_pixels": _png(64, 64),
    "empty": b"",
    "nul": b"\0" * 100,
    **{
        f"truncated_{kind}": _whole(kind)[: len(_whole(kind)) // 2]
        for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
    },
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_every_error_of_a_damaged_image_is_caught(content: bytes) -> None:
    with pytest.raises(UNREADABLE), Image.open(io.BytesIO(content)) as image:
        image.convert("RGB")


VISION = VisionConfig(
    num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, image_size=32, patch_size=8, image_token=1,
)  # fmt: skip
TOO_LARGE = {
    "89_megapixels": _png(9_460, 9_460),
    "100_megapixels": _png(10_000, 10_000),
    "178_megapixels": _png(13_370, 13_370),
    "one_line_of_100_megapixels": _png(100_000_000, 1),
    "1e9_pixels": _png(100_000, 10_000),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("content", TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.parametrize("read", [prepare_image, count_image_placeholder_tokens])
def test_an_image_of_too_many_pixels_is_refused(read: Callable[[bytes, VisionConfig], object], content: bytes) -> None:
    with pytest.raises(DataError, match="pixels"):
        read(content, VISION)


@pytest.mark.parametrize("width", [200_000, 2_000_000])
def test_a_narrow_image_is_not_resized_to_any_width(width: int) -> None:
    content = _png(width, 1, (b"\0" + bytes(3 * width)))
    with pytest.raises(DataError, match="resized to 32 pixels"):
        prepare_image(content, VISION)


def _animated(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (64, 64), color) for color in ("red", "blue", "green")]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], lossless=True)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animated_image_the_first_frame_is_read(kind: str) -> None:
    picture, still = prepare_image(_animated(kind), VISION), prepare_image(_whole("PNG"), VISION)
    assert picture.animated
    assert not still.animated
    np.testing.assert_allclose(picture.pixels, still.pixels, atol=0.05)


def test_a_photo_with_a_preview_is_not_animated() -> None:
    assert not prepare_image(_animated("MPO"), VISION).animated
