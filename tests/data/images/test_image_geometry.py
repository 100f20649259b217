"""Images that keep their shape: sizes, pixels and positions are transformers'."""

from __future__ import annotations

import io
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig
from mega_data.images.image_geometry import compute_mrope_positions, compute_native_size
from mega_data.images.image_pixels import count_placeholders, prepare_image

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
    assert len(ours.features) == count_placeholders(stream.getvalue(), VISION) == high * wide // 4


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
