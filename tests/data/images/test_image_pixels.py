"""Pixels are those of transformers' processors, in all bits."""

from __future__ import annotations

import io
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    SiglipImageProcessorPil,
)

from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig
from mega_data.images.image_pixels import count_placeholders, prepare_image

TOWER: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "image_size": 32, "patch_size": 8,
    "image_token": 1,
}  # fmt: skip
HALF = (0.5, 0.5, 0.5)


@pytest.mark.parametrize("size", [(50, 37), (37, 50), (400, 301), (32, 32), (1000, 200), (7, 5)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_as_clip_and_siglip(size: tuple[int, int], mode: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image, stream = Image.fromarray(noise).convert(mode), io.BytesIO()
    image.save(stream, "png")
    clip = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    siglip = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    gemma = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, do_convert_rgb=True, do_pan_and_scan=False)
    stretched = {"resize": "stretch", "mean": HALF, "std": HALF}
    for processor, fields in ((clip, {}), (siglip, stretched), (gemma, stretched | {"resample": "bilinear"})):
        expected = processor(image.convert("RGB"), return_tensors="np")["pixel_values"][0]
        (found,) = prepare_image(stream.getvalue(), VisionConfig(**TOWER, **fields)).pixels
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


GRIDS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]


@pytest.mark.parametrize(
    "size", [(50, 37), (37, 50), (400, 301), (64, 64), (1000, 200), (200, 1000), (7, 5), (96, 31), (33, 33)]
)
def test_tiles_and_placeholders_as_llava_next(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image, stream = Image.fromarray(noise), io.BytesIO()
    image.save(stream, "png")
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=GRIDS
    )
    vision = VisionConfig(**TOWER, resize="stretch", pinpoints=GRIDS)
    found = prepare_image(stream.getvalue(), vision)
    np.testing.assert_array_equal(found.pixels, processor(image, return_tensors="np")["pixel_values"][0])
    counting = SimpleNamespace(image_processor=processor, patch_size=8, num_additional_image_tokens=0)
    counting._get_unpadded_features = partial(LlavaNextProcessor._get_unpadded_features, counting)
    expected = LlavaNextProcessor._get_number_of_features(counting, size[1], size[0], 32, 32)
    assert len(found.features) == expected == count_placeholders(stream.getvalue(), vision)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(20)])
def test_what_is_no_image(content: bytes) -> None:
    with pytest.raises(DataError, match="the image cannot be read"):
        prepare_image(content, VisionConfig(**TOWER))
