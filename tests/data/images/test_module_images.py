"""Conversations with images for vision encoders that are modules of transformers: tokens and inputs are its processor's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig
from mega_data.blended_dataset import build_blended_datasets
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.data_config import DataConfig
from mega_data.images.image_inputs import ImageInputs
from mega_data.images.image_preprocessing import ImageOptions, preprocess_image_chats
from mega_data.images.module_images import ModuleImageProcessor

WORDS = [
    "[UNK]",
    "<|IMG_PATCH|>",
    "<user>",
    "<end>",
    "what",
    "is",
    "it",
    "red",
    "blue",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} "
    "{% else %}{% generation %}{{ m.content }} <end>{% endgeneration %}{% endif %}{% endfor %}"
)
TILES = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "crop_to_patches": True, "max_patches": 4}  # fmt: skip
FIELDS: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 4, "ffn_hidden_size": 4, "num_attention_heads": 1, "image_size": 16, "patch_size": 4,
    "image_token": 1, "feature_layer": -1, "module": {
        "config": {"model_type": "aya_vision"}, "tensors": {}, "image_processor": TILES,
        "processor": {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
    },
}  # fmt: skip
VISION = VisionConfig.model_validate(FIELDS)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True) for word in (*WORDS[1:4], *WORDS[9:])])
    (tmp_path / "tok").mkdir()
    made.save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
    return tmp_path / "tok"


def prepare(tmp_path: Path, tokenizer: Path, records: list[tuple[list[str], str]], **more: Any) -> Any:
    lines = [
        {"image": images, "conversations": [{"from": "human", "value": f"{'<image> ' * 2}what is it"}, {"from": "gpt", "value": answer}]}
        for images, answer in records
    ]  # fmt: skip
    (tmp_path / "chats.json").write_text(json.dumps(lines))
    options = ImageOptions(tmp_path, VISION.tokens_per_image, vision=VISION)
    return preprocess_image_chats(
        [tmp_path / "chats.json"], tokenizer, tmp_path / "data", ChatOptions(), options, **more
    )


def test_samples_have_the_tokens_and_the_inputs_of_the_processor(tmp_path: Path, tokenizer: Path) -> None:
    assert VISION.module is not None
    processor = ModuleImageProcessor(VISION.module)
    draw = np.random.default_rng(0)
    pictures = {
        name: Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8))
        for name, size in (("a.png", (12, 31)), ("b.png", (20, 9)))
    }
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
    prepare(tmp_path, tokenizer, [(["a.png", "b.png"], "red"), (["b.png", "b.png"], "blue")])
    expected = {name: processor.prepare(picture) for name, picture in pictures.items()}
    assert len({text.features for _, text in expected.values()}) == 2, "images of equal sizes"
    raw = {
        "train": str(tmp_path / "data"),
        "kind": "conversations",
        "split": "1",
        "seq_length": 160,
        "cache": str(tmp_path / "c"),
    }
    data = build_blended_datasets(DataConfig.parse(raw), seed=1, samples={"train": 1}, eod=3, vision=VISION)[0]
    sample = data[0]
    assert sample.images is not None
    names = ["a.png", "b.png", "b.png", "b.png"]
    if sample.labels[np.flatnonzero(sample.loss_weights)[0]] == WORDS.index("blue"):  # the order of documents is drawn
        names = names[2:] + names[:2]
    features = sum(expected[name][1].features for name in names)
    assert sample.images.placeholder_positions.tolist() == np.flatnonzero(sample.tokens == 1).tolist()
    assert sample.images.features.tolist() == list(range(features))
    assert (sample.tokens == WORDS.index("<|START_OF_IMG|>")).sum() == len(names)
    for inputs, name in zip(sample.images.pixels, names, strict=True):
        assert isinstance(inputs, ImageInputs)
        assert inputs.shape == expected[name][0].shape
        np.testing.assert_array_equal(inputs.arrays["pixel_values"], expected[name][0].arrays["pixel_values"])
    pictures["b.png"].resize((16, 16)).save(tmp_path / "b.png")
    with pytest.raises(DataError, match=r"b\.png: the size of the image has changed"):
        data[0]


def test_a_text_with_another_number_of_images_is_a_bad_line(tmp_path: Path, tokenizer: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"chats\.json:1: 1 image\(s\), but the text has <\|IMG_PATCH\|> 2 times"):
        prepare(tmp_path, tokenizer, [(["a.png"], "red")])
