"""A tiny LLaVA from nothing, by the commands that a user types, learns to name coloured shapes in drawn images."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from mega_ckpt.families import find_family_expressing_model, image_processor
from mega_cli.main import build_typer_app
from mega_common.model_config import ModelConfig
from mega_eval.image_prompts import ImagePrompt
from mega_eval.language_model import LanguageModel

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220), "yellow": (230, 220, 40)}
SHAPES = ("circle", "square", "triangle")
WORDS = ["[UNK]", "<image>", "<user>", "<end>", "what", "is", "it", *COLOURS, *SHAPES]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} "
    "{% else %}{% generation %}{{ m.content }} <end>{% endgeneration %}{% endif %}{% endfor %}"
)
SIZE = 24


def drawn(rng: random.Random, colour: str, shape: str, path: Path) -> None:
    """A shape of any size anywhere on a noisy ground."""
    noise = np.random.default_rng(rng.getrandbits(32)).integers(90, 160, (SIZE, SIZE, 3), np.uint8)
    image, side = Image.fromarray(noise), rng.randrange(10, 17)
    x, y = rng.randrange(SIZE - side), rng.randrange(SIZE - side)
    pen, box = ImageDraw.Draw(image), (x, y, x + side, y + side)
    if shape == "circle":
        pen.ellipse(box, COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, COLOURS[colour])
    else:
        pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], COLOURS[colour])
    image.save(path)


def records(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    folder.mkdir()
    rng, out = random.Random(seed), []
    for number in range(count):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        drawn(rng, colour, shape, folder / f"{number}.png")
        said = [{"from": "human", "value": "<image>\nwhat is it"}, {"from": "gpt", "value": f"{colour} {shape}"}]
        out.append({"image": f"{number}.png", "conversations": said})
    return out


def mega(*args: object) -> str:
    done = CliRunner().invoke(build_typer_app(), [str(arg) for arg in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def tokenizer(folder: Path) -> Path:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True) for word in WORDS[1:4]])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
    return folder


def config(tmp_path: Path, steps: int, batch: int, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    vision = {
        "num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 96, "num_attention_heads": 4, "image_size": SIZE,
        "patch_size": 4, "image_token": 1, "feature_layer": -2, "activation": "gelu",
        **more,
    }  # fmt: skip
    return {
        "model": {
            "num_layers": 2, "hidden_size": 48, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": len(WORDS),
            "vision": vision, **text,
        },
        "data": {"train": str(tmp_path / "shapes"), "kind": "conversations", "seq_length": 48, "split": "1"},
        "batch": {"micro": batch, "global": batch}, "train": {"steps": steps}, "precision": "fp32", "device": "cpu",
        "optimizer": {"lr": 2e-3, "weight_decay": 0.01}, "lr_schedule": {"warmup_steps": steps // 20},
        "log": {"tensorboard": False, "every": 50}, "output": str(tmp_path / "run"),
    }  # fmt: skip


def trained(
    tmp_path: Path, images: int, steps: int, batch: int, text: dict[str, Any] | None = None, **more: Any
) -> Path:
    """The folder for transformers of a model that was trained on so many images."""
    words, pictures = tokenizer(tmp_path / "tok"), tmp_path / "seen"
    run, features = config(tmp_path, steps, batch, text or {}, **more), ("--image-tokens", 36)
    if more:
        model = ModelConfig.parse(run["model"])
        assert model.vision is not None
        (tmp_path / "config.json").write_text(json.dumps(find_family_expressing_model(model).write_config_json(model)))
        (tmp_path / image_processor.FILE).write_text(
            json.dumps(image_processor.build_preprocessor_config(model.vision))
        )
        features = ("--image-model", tmp_path)
    (tmp_path / "seen.json").write_text(json.dumps(records(pictures, images, 1)))
    said = mega(
        "data", "preprocess", "--input", tmp_path / "seen.json", "--tokenizer", words, "--output", tmp_path / "shapes",
        "--kind", "conversations", "--images", pictures, *features,
    )  # fmt: skip
    assert f"{images:,} conversations" in said
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert "what is it" in mega("data", "show", "--run", tmp_path / "run.yaml")
    mega("train", tmp_path / "run.yaml")
    mega("ckpt", "convert", tmp_path / "run", tmp_path / "hf", "--to", "hf")
    return tmp_path / "hf"


TILES = {"image_size": 12, "pinpoints": [[12, 24], [24, 12]], "resize": "stretch"}
DEEPSTACK = {
    "text": {"qk_norm": True, "rope": {"sections": [2, 2, 2], "sections_interleaved": True}},
    "class_token": False, "pre_norm": False, "patch_bias": True, "feature_layer": -1, "norm_eps": 1e-6, "projector": "merger",
    "native": {
        "norm": "layernorm", "window": None, "positions": 16, "deepstack": [0, 1], "min_pixels": 64, "max_pixels": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more", "features"), [("llava", {}, 36), ("llava_next", TILES, 9), ("qwen3_vl", DEEPSTACK, None)]
)
def test_the_whole_way(tmp_path: Path, kind: str, more: dict[str, Any], features: int | None) -> None:
    hf = trained(tmp_path, 8, 2, 4, **more)
    described = json.loads((hf / "config.json").read_text())
    assert (described["model_type"], described.get("image_seq_length")) == (kind, features)
    prompt = ("--prompt", "<user> <image> what is it ", "--max-new-tokens", 3, "--device", "cpu")
    said = json.loads(mega("generate", hf, "--image", tmp_path / "seen" / "0.png", *prompt, "--json"))
    assert len(said["tokens"]) <= 3
    (tmp_path / "text.png").write_text("no image")
    for wrong, told in (("text.png", "the image cannot be read"), ("none.png", "cannot be read")):
        done = CliRunner().invoke(
            build_typer_app(), ["generate", str(hf), "--image", str(tmp_path / wrong), *map(str, prompt)]
        )
        assert told in str(done.exception)


@pytest.mark.long
def test_a_tiny_llava_names_coloured_shapes_that_it_has_not_seen(tmp_path: Path) -> None:
    hf = trained(tmp_path, 6000, 1600, 32)
    others = records(tmp_path / "others", 200, 2)
    model = LanguageModel.load(hf, device="cpu")
    asked = [
        ImagePrompt("<user> <image> what is it ", [(tmp_path / "others" / one["image"]).read_bytes()]) for one in others
    ]
    found = model.generate(asked, max_new_tokens=4, batch_size=50)
    right = sum(
        answer.text.split() == one["conversations"][1]["value"].split()
        for answer, one in zip(found, others, strict=True)
    )
    print(f"{right} of {len(others)} right")
    assert right >= 0.95 * len(others)
