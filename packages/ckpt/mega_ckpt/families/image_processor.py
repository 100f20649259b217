"""Image preprocessing settings of a HuggingFace folder and the matching fields of `VisionConfig`, both ways.

The settings are in transformers' `preprocessor_config.json` or, from version 5, in the section `image_processor` of
`processor_config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mega_ckpt.families.config_entries import ConfigDict
from mega_common.errors import CheckpointError, ConfigError
from mega_common.strict_config import format_setting_value
from mega_common.vision_config import VisionConfig

FILE, TOKENIZER_FILE = "preprocessor_config.json", "tokenizer_config.json"
PROCESSOR_FILE, SECTION = "processor_config.json", "image_processor"
_FILTERS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def read_image_processor_settings(read: Callable[[str], ConfigDict]) -> ConfigDict:
    """Return the image processor settings of a HuggingFace folder.
    `read` returns the content of the JSON file of a given name, empty if the file is missing.
    """
    section = read(PROCESSOR_FILE).get(SECTION)
    return section if isinstance(section, Mapping) else read(FILE)


def add_image_prompt_text_settings(vision: VisionConfig, read: Callable[[str], ConfigDict]) -> VisionConfig:
    """Return `vision` with a folder's processor settings and tokens for the text of an image; unchanged without a module.
    The module is a vision encoder of transformers, the special tokens are the tokenizer's. `read` is as in
    `read_image_processor_settings`.
    """
    if vision.module is None:
        return vision
    tokenizer = read(TOKENIZER_FILE)
    more = tokenizer.get("extra_special_tokens")
    named = {**tokenizer, **(more if isinstance(more, Mapping) else {})}
    tokens = {key: _token_text(value) for key, value in named.items() if key.endswith("_token") and _token_text(value)}
    processor = {key: value for key, value in read(PROCESSOR_FILE).items() if key != SECTION}
    update = {"processor": processor, "tokens": tokens}
    return vision.model_copy(update={"module": vision.module.model_copy(update=update)})


def _token_text(value: Any) -> str:
    """Return the spelling of a token in a tokenizer_config.json, which is a text or an object; empty if it is neither."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def update_config_from_image_processor(vision: VisionConfig, raw: ConfigDict) -> VisionConfig:
    """Return the vision configuration updated with preprocessing settings of an image processor.
    `raw` is the content of the image processor's configuration.

    Raises:
        CheckpointError: for invalid values.
    """
    if vision.module is not None:
        module = vision.module.model_copy(update={"image_processor": dict(raw)})
        return vision.model_copy(update={"module": module})
    fields: dict[str, Any] = {}
    for key, name in (("image_mean", "mean"), ("image_std", "std")):
        if raw.get(key) is not None:
            fields[name] = raw[key] if isinstance(raw[key], list) else [raw[key]] * 3
    if isinstance(raw.get("resample"), int) and raw["resample"] in _FILTERS:
        fields["resample"] = _FILTERS[raw["resample"]]
    if vision.native is not None:
        fields["native"] = vision.native.model_dump() | _pixel_bounds(raw)
    elif vision.pinpoints is None and (raw.get("do_center_crop") is not None or "height" in _image_size(raw)):
        fields["resize"] = "crop" if raw.get("do_center_crop") else "stretch"
    try:
        return VisionConfig.parse(vision.model_dump() | fields, source=FILE)
    except ConfigError as error:
        raise CheckpointError(error.message, hint=error.hint) from None


def find_unsupported_image_settings(vision: VisionConfig, raw: ConfigDict) -> Iterator[str]:
    """Yield the settings of an image processor that mega does not support, each as "key = value".
    `raw` is the content of the image processor's configuration.
    """
    if vision.module is not None:  # the image processor of transformers follows all of them
        return
    supported: dict[str, tuple[Any, ...]] = {
        "do_resize": (True,), "do_rescale": (True,), "do_normalize": (True,), "do_pan_and_scan": (False,),
        "do_pad": (True, False) if vision.pinpoints else (False,), "resample": tuple(_FILTERS),
    }  # fmt: skip
    side = vision.image_size
    square = {"height": side, "width": side}
    if vision.native is not None:
        native = vision.native
        sizes = {"patch_size": vision.patch_size, "merge_size": native.merge, "temporal_patch_size": native.frames}
        supported |= {key: (size,) for key, size in sizes.items()}
    elif vision.resize == "crop" or vision.pinpoints is not None:
        supported |= {"size": (square, side, {"shortest_edge": side}), "crop_size": (square, side)}
    else:
        supported["size"] = (square, side)
    yield from (
        f"{key} = {format_setting_value(raw[key])}"
        for key, values in supported.items()
        if raw.get(key) is not None and raw[key] not in values
    )


def build_preprocessor_config(vision: VisionConfig) -> dict[str, Any]:
    """Return the content of HuggingFace's `preprocessor_config.json` for a model's vision configuration."""
    if vision.module is not None:
        return dict(vision.module.image_processor)
    side = vision.image_size
    square = {"height": side, "width": side}
    kind = "SiglipImageProcessor" if vision.resize == "stretch" else "CLIPImageProcessor"
    sizes: dict[str, Any] = {"size": square, "do_center_crop": False}
    if vision.native is not None:
        native, kind = vision.native, "Qwen2VLImageProcessor"
        sizes = {
            "min_pixels": native.min_pixels, "max_pixels": native.max_pixels, "patch_size": vision.patch_size,
            "merge_size": native.merge, "temporal_patch_size": native.frames,
        }  # fmt: skip
    elif vision.pinpoints is not None:
        kind = "LlavaNextImageProcessor"
        sizes = {"do_pad": True, "image_grid_pinpoints": [list(size) for size in vision.pinpoints]}
    elif vision.bidirectional:
        kind = "Gemma3ImageProcessor"
    if vision.native is None and (vision.pinpoints or vision.resize == "crop"):
        sizes |= {"size": {"shortest_edge": side}, "crop_size": square, "do_center_crop": True}
    filters = {name: number for number, name in _FILTERS.items()}
    return {
        "image_processor_type": kind, "do_convert_rgb": True, "do_resize": True, "resample": filters[vision.resample],
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(vision.mean),
        "image_std": list(vision.std), **sizes,
    }  # fmt: skip


def _pixel_bounds(raw: ConfigDict) -> dict[str, int]:
    """Return the minimum and maximum pixels of an image that keeps its aspect ratio, under either pair of names."""
    given = {
        "min_pixels": raw.get("min_pixels", _image_size(raw).get("shortest_edge")),
        "max_pixels": raw.get("max_pixels", _image_size(raw).get("longest_edge")),
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _image_size(raw: ConfigDict) -> ConfigDict:
    """Return the section `size` if it has named sides, else an empty mapping."""
    size = raw.get("size")
    return size if isinstance(size, Mapping) else {}
