"""Folders of tiny vision-language models of three families, images for them, and services of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from serving import service_of
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    SiglipVisionConfig,
)

from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.server.model_service import ModelService

TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12, "patch_size": 4}  # fmt: skip
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}  # fmt: skip
MARKS = ["<image>", "<start_of_image>", "<end_of_image>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ 'MARK' if part.type == 'image' else part.text }}{% endfor %}{% endif %}\n{% endfor %}"
)


def save_model(name: str, folder: Path) -> Any:
    """A tiny model of a family, with a tokenizer and a chat template."""
    train_tokenizer(["what is it? the end of the story"] * 3, 290, folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    image, begin, end = (backend.token_to_id(mark) for mark in MARKS)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", MARKS[name == "gemma3"]))
    text = {**TEXT, "vocab_size": backend.get_vocab_size()}
    torch.manual_seed(0)
    if name == "gemma3":
        config: Any = Gemma3Config(
            vision_config=SiglipVisionConfig(**TOWER | {"image_size": 16}, vision_use_head=False),
            text_config=AutoConfig.for_model("gemma3_text", **text, head_dim=8, sliding_window=7, sliding_window_pattern=2),
            image_token_index=image, boi_token_index=begin, eoi_token_index=end, mm_tokens_per_image=4,
        )  # fmt: skip
        model: Any = Gemma3ForConditionalGeneration(config)
    else:
        more = {} if name == "llava" else {"image_grid_pinpoints": [[12, 24], [24, 12], [24, 24]]}
        kind = (
            (LlavaConfig, LlavaForConditionalGeneration)
            if name == "llava"
            else (LlavaNextConfig, LlavaNextForConditionalGeneration)
        )
        model = kind[1](kind[0](vision_config=CLIPVisionConfig(**TOWER), text_config=AutoConfig.for_model("llama", **text), image_token_index=image, **more))  # fmt: skip
    with torch.no_grad():  # numbers by which each part changes the result
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.eval().save_pretrained(folder)
    return model


def picture(number: int, size: tuple[int, int] = (20, 15)) -> bytes:
    noise, stream = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8), io.BytesIO()
    PIL.Image.fromarray(noise).save(stream, "png")
    return stream.getvalue()


def make_service(folder: Path, name: str) -> ModelService:
    model, tokenizer = load_inference_model(folder), Tokenizer(folder)
    service = service_of(
        InferenceEngine(model, tokenizer, cache_tokens=4096, batch_size=4), folder, name=name, max_length=512
    )
    service.vision = model.config.vision
    return service
