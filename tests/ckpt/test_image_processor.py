"""What a folder says of its images is what transformers' own processors make of it, and what we write they make, too."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from mega_ckpt.families.image_processor import (
    FILE,
    PROCESSOR_FILE,
    build_preprocessor_config,
    find_unsupported_image_settings,
    read_image_processor_settings,
    update_config_from_image_processor,
)
from mega_ckpt.formats.hf_weight_files import decode_json_mapping
from mega_common.errors import CheckpointError
from mega_common.vision_config import CLIP_MEAN, VisionConfig
from mega_data.images.image_pixels import prepare_image

TOWER: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1, "image_size": 32, "patch_size": 8,
    "image_token": 1,
}  # fmt: skip
HALF = (0.5, 0.5, 0.5)
NATIVE = {
    **TOWER, "native": {"window": 16, "full_layers": [], "min_pixels": 1024, "max_pixels": 4096}, "projector": "merger",
    "activation": "swiglu", "class_token": False, "patch_bias": False, "pre_norm": False, "feature_layer": -1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "cropped": TOWER | {"mean": HALF, "resample": "bilinear"},
    "stretched": TOWER | {"resize": "stretch", "mean": HALF, "std": (0.2, 0.3, 0.4)},
    "gemma3": TOWER | {"resize": "stretch", "bidirectional": True, "resample": "bilinear"},
    "tiles": TOWER | {"resize": "stretch", "pinpoints": [[32, 64], [64, 32]], "std": HALF},
    "native": NATIVE | {"hidden_size": 16, "num_attention_heads": 2, "mean": HALF},
    "qwen3": NATIVE | {
        "hidden_size": 16, "num_attention_heads": 2, "mean": HALF, "std": HALF, "patch_size": 16, "activation": "gelu_tanh",
        "patch_bias": True, "native": {
            "norm": "layernorm", "window": None, "positions": 9, "deepstack": [0], "min_pixels": 65_536,
            "max_pixels": 16_777_216,
        },
    },
}  # fmt: skip


def read_unsupported(folder: Path) -> Any:
    return read_image_processor_settings(
        lambda name: json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    )


@pytest.mark.parametrize("name", CASES)
def test_written_for_transformers_and_read_from_it(tmp_path: Path, name: str) -> None:
    vision = VisionConfig(**CASES[name])
    (tmp_path / FILE).write_text(json.dumps(build_preprocessor_config(vision)))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for size in ((50, 37), (40, 90), (9, 8)):
        noise, stream = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8), io.BytesIO()
        Image.fromarray(noise).save(stream, "png")
        theirs = processor(Image.fromarray(noise), return_tensors="np")
        found = prepare_image(stream.getvalue(), vision).pixels
        if vision.native:
            patches = [side // vision.patch_size for side in found.shape[2:]]
            assert theirs["image_grid_thw"].tolist() == [[1, *patches]]
            np.testing.assert_allclose(np.sort(found, None), np.sort(theirs["pixel_values"], None)[::2], atol=1e-6)
        else:
            expected = theirs["pixel_values"]
            np.testing.assert_array_equal(found, expected[0] if vision.pinpoints else expected)
    usual = VisionConfig(
        **TOWER | {key: CASES[name][key] for key in ("pinpoints", "bidirectional") if key in CASES[name]}
    )
    if vision.native:
        usual = VisionConfig(**{key: value for key, value in CASES[name].items() if key not in ("mean", "std")})
    if vision.pinpoints:
        usual = usual.model_copy(update={"resize": "stretch"})
    (tmp_path / FILE).unlink()
    processor.save_pretrained(tmp_path)
    assert (
        update_config_from_image_processor(usual, read_unsupported(tmp_path))
        == update_config_from_image_processor(vision, build_preprocessor_config(vision))
        == vision
    )
    assert not list(find_unsupported_image_settings(vision, read_unsupported(tmp_path)))


def test_the_section_of_a_processor_goes_first(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"image_mean": 0.5}))
    assert update_config_from_image_processor(VisionConfig(**TOWER), read_unsupported(tmp_path)).mean == HALF
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps({"image_seq_length": 3}))
    assert update_config_from_image_processor(VisionConfig(**TOWER), read_unsupported(tmp_path)).mean == HALF
    (tmp_path / PROCESSOR_FILE).write_text(json.dumps({"image_processor": {"image_mean": list(CLIP_MEAN)}}))
    assert update_config_from_image_processor(VisionConfig(**TOWER), read_unsupported(tmp_path)) == VisionConfig(
        **TOWER
    )


@pytest.mark.parametrize(
    ("raw", "listed"),
    [
        ({"resample": []}, ["resample = []"]),
        ({"do_pan_and_scan": True}, ["do_pan_and_scan = true"]),
        ({"resample": 1, "do_pad": True}, ["do_pad = true", "resample = 1"]),
        ({"size": {"shortest_edge": 48}, "crop_size": 32}, ["size = {'shortest_edge': 48}"]),
        ({"size": 32, "do_pad": False, "do_pan_and_scan": None, "do_rescale": True}, []),
    ],
)
def test_unsupported_settings_are_listed(raw: dict[str, Any], listed: list[str]) -> None:
    vision = update_config_from_image_processor(VisionConfig(**TOWER), raw)
    assert list(find_unsupported_image_settings(vision, raw)) == listed


@pytest.mark.parametrize("raw", [{"image_mean": [1, 2]}, {"image_std": "x"}])
def test_what_no_image_could_be_made_by(raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=FILE):
        update_config_from_image_processor(VisionConfig(**TOWER), raw)


@pytest.mark.parametrize("content", [b"[]", b"{", b"3"])
def test_what_is_no_mapping(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=FILE):
        read_image_processor_settings(lambda name: decode_json_mapping(content, name) if name == FILE else {})
