"""Images that keep their shape: sizes, pixels and positions are transformers'.

Images that keep their shape: sizes, pixels and positions are transformers'.

Pixels are those of transformers' processors, in all bits.
"""

from __future__ import annotations

import io
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig
from mega_data.images.image_pixels import (
    compute_mrope_positions,
    compute_native_size,
    count_image_placeholder_tokens,
    prepare_image,
)

FIELDS: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "patch_size": 4, "image_token": 1,
    "activation": "swiglu", "class_token": False, "pre_norm": False, "feature_layer": -1, "projector": "merger",
}  # fmt: skip
VISION = VisionConfig.parse(
    {**FIELDS, "native": {"window": 16, "full_layers": [], "min_pixels": 400, "max_pixels": 4000}}, source="test"
)
sides = st.integers(1, 500)


@given(sides, sides)
def test_sizes(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(DataError, match="must be at most 200"):
            compute_native_size(VISION, height, width)
        return
    assert compute_native_size(VISION, height, width) == smart_resize(height, width, 8, 400, 4000)


@pytest.mark.parametrize("size", [(50, 37), (37, 50), (400, 301), (32, 32), (1000, 20), (7, 5)])
def test_pixels(size: tuple[int, int]) -> None:
    noise, stream = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8), io.BytesIO()
    Image.fromarray(noise).save(stream, "png")
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=400, max_pixels=4000)
    theirs = processor(Image.fromarray(noise), return_tensors="np")
    ours = prepare_image(stream.getvalue(), VISION)
    (pixels,) = ours.pixels
    _, high, wide = theirs["image_grid_thw"][0]
    assert pixels.shape == (3, 4 * high, 4 * wide)
    # [rows, columns, 2, 2, 3, frames, size, size] of theirs, of which both frames are the same
    cut = theirs["pixel_values"].reshape(high // 2, wide // 2, 2, 2, 3, 2, 4, 4)[..., 0, :, :]
    np.testing.assert_array_equal(pixels, cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(pixels.shape))
    assert len(ours.features) == count_image_placeholder_tokens(stream.getvalue(), VISION) == high * wide // 4


def expected(text: str, grids: list[tuple[int, int]]) -> list[list[int]]:
    """Positions counted one by one: `t` a token of text, `i` of an image, `|` where a document begins."""
    found: list[list[int]] = []
    at, left = 0, iter(grids)
    for kind, run in groupby(text):
        if kind == "|":
            at = 0
        elif kind == "t":
            found += [[at + n] * 3 for n, _ in enumerate(run)]
            at = found[-1][0] + 1
        else:
            high, wide = next(left)
            found += [[at, at + n // wide, at + n % wide] for n in range(high * wide)]
            at += max(high, wide)
    return np.array(found).T.tolist()


@pytest.mark.parametrize(
    ("text", "grids"),
    [
        ("ttiiiiiittt", [(2, 3)]),
        ("iiiit" + "iiiiii" + "tt", [(4, 1), (3, 2)]),
        ("ttiiiit|tiiiiiit|ttt", [(2, 2), (1, 6)]),
        ("tttt", []),
    ],
)
def test_positions(text: str, grids: list[tuple[int, int]]) -> None:
    tokens = text.replace("|", "")
    positions = np.concatenate([np.arange(len(part)) for part in text.split("|")])
    places = np.array([place for place, kind in enumerate(tokens) if kind == "i"], np.int64)
    found = compute_mrope_positions(positions, places, np.arange(len(places)), grids)
    assert found.tolist() == expected(text, grids)


def test_an_image_that_is_cut_goes_on_where_its_piece_begins() -> None:
    found = compute_mrope_positions(np.arange(5), np.arange(3), np.array([3, 4, 5]), [(2, 3)])
    assert found.tolist() == [[0, 0, 0, 3, 4], [1, 1, 1, 3, 4], [0, 1, 2, 3, 4]]


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
    assert len(found.features) == expected == count_image_placeholder_tokens(stream.getvalue(), vision)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(20)])
def test_what_is_no_image(content: bytes) -> None:
    with pytest.raises(DataError, match="the image cannot be read"):
        prepare_image(content, VisionConfig(**TOWER))
