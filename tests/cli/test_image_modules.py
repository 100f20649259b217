"""Tiny models with images, by the commands that a user types: from images and text to a folder that transformers runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from commands import typed
from transformers import AutoModelForImageTextToText
from vision_modules import CASES, draw_picture, join_inputs, save_model

from mega_cli.main import build_typer_app
from mega_data.tokenizer import Tokenizer
from mega_eval.image_prompts import ImagePrompt
from mega_eval.model_loading import load_inference_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} "
    "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
)
TOWERS = ("vision_tower", "vision_model", "vision_encoder", "visual")
LONG = ("glm4v_moe", "glm_ocr", "paligemma", "qwen3_5_moe", "video_llama_3")


@pytest.mark.parametrize("kind", ["gemma4:together", *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG)])
def test_from_images_and_text_to_a_folder_that_transformers_generates_from(tmp_path: Path, kind: str) -> None:
    base, pictures, app = tmp_path / "base", tmp_path / "pictures", build_typer_app()
    before = {name: value.clone() for name, value in save_model(kind, base).named_parameters()}
    tokenizer = json.loads((base / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    pictures.mkdir()
    records = []
    for number in range(4):
        draw_picture(number, (20 + number, 15)).save(pictures / f"{number}.png")
        said = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "the end of the story"}]
        records.append({"image": f"{number}.png", "conversations": said})
    (tmp_path / "seen.json").write_text(json.dumps(records))
    typed(
        app, "data", "preprocess", "--input", tmp_path / "seen.json", "--tokenizer", base, "--output", tmp_path / "data",
        "--kind", "conversations", "--images", pictures, "--image-model", base,
    )  # fmt: skip
    run = {
        "init_from": str(base), "model": {"from": str(base)}, "data": {"train": str(tmp_path / "data"), "kind": "conversations", "seq_length": 128, "split": "1"},
        "batch": {"micro": 2, "global": 4}, "train": {"steps": 2}, "precision": "fp32", "device": "cpu",
        "optimizer": {"lr": 1e-2}, "log": {"tensorboard": False}, "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    typed(app, "train", tmp_path / "run.yaml")
    typed(app, "ckpt", "convert", tmp_path / "run", tmp_path / "hf", "--to", "hf")

    theirs, ours = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").eval(),
        load_inference_model(tmp_path / "hf"),
    )
    moved = {name for name, value in theirs.named_parameters() if not value.equal(before[name])}
    seen = [name for name in moved if any(part in name for part in TOWERS)]
    assert seen
    assert any("embed_tokens" in name for name in moved)
    assert any("layers" in name for name in moved.difference(seen))
    mark = CASES[kind][3].get("image_token") or CASES[kind][3].get("context_image_token") or "<image>"
    prompt = ImagePrompt(f"{mark} what is it?", [(pictures / "1.png").read_bytes()])
    tokens, images = prompt.encode_prompt(ours, Tokenizer(tmp_path / "hf"))
    row = theirs.generate(
        torch.tensor([tokens]), do_sample=False, max_new_tokens=4, eos_token_id=None, pad_token_id=0,
        **join_inputs(kind, list(images.pixels), torch.tensor([tokens])),
    )  # fmt: skip
    found = typed(
        app, "generate", tmp_path / "hf", "--image", pictures / "1.png", "--prompt", f"{mark} what is it?",
        "--max-new-tokens", 4, "--device", "cpu", "--json",
    )  # fmt: skip
    answer = json.loads(found.stdout)["tokens"]
    assert answer
    assert answer == row[0, len(tokens) :].tolist()[: len(answer)]
