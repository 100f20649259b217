"""Images that declare more pixels than they may, or are damaged, are refused in one line."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from mega_data.images.image_pixels import UNREADABLE


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
