"""Models that see against transformers: logits, losses and gradients, folders that go to mega and back, greedy text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
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
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from mega_ckpt.convert import convert_checkpoint
from mega_common.errors import DataError
from mega_common.vision_config import VisionConfig
from mega_data.images.image_pixels import map_placeholders_to_features, prepare_image
from mega_eval import generate as generating
from mega_eval.generate import generate_completions
from mega_eval.image_prompts import ImagePrompt
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.text_stream import GenerationLimits
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.model.decoder import Decoder

BEGIN, IMAGE, VOCAB = 48, 50, 64
SIZES = [(30, 17), (9, 31), (14, 13)]  # heights and widths of images
TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "initializer_range": 0.2,
}  # fmt: skip
GRIDS = [[12, 24], [24, 12], [24, 24], [36, 12], [12, 36]]
CASES: dict[str, dict[str, Any]] = {
    "llava 1.5": {"tower": CLIPVisionConfig(**TOWER), "text": "llama"},
    "class token, another layer, other activations": {
        "tower": CLIPVisionConfig(**TOWER, hidden_act="gelu", layer_norm_eps=1e-3), "text": "qwen2",
        "vision_feature_layer": 1, "vision_feature_select_strategy": "full", "projector_hidden_act": "gelu_pytorch_tanh",
        "multimodal_projector_bias": False,
    },
    "a tied gemma, an early layer": {
        "tower": CLIPVisionConfig(**TOWER), "text": "gemma", "vision_feature_layer": -3,
    },
    "gemma 3": {
        "tower": SiglipVisionConfig(**TOWER | {"image_size": 16}, vision_use_head=False), "text": "gemma3_text",
        "mm_tokens_per_image": 4, "boi_token_index": BEGIN, "eoi_token_index": BEGIN + 1,
    },
    "llava next": {"tower": CLIPVisionConfig(**TOWER), "text": "mistral", "image_grid_pinpoints": GRIDS},
    "next, siglip, another layer, no biases": {
        "tower": SiglipVisionConfig(**TOWER), "text": "qwen2", "image_grid_pinpoints": [[12, 24], [36, 24]],
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu_pytorch_tanh",
    },
    "siglip": {
        "tower": SiglipVisionConfig(**TOWER), "text": "phi3", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}  # fmt: skip


def reference(name: str, folder: Path) -> Any:
    """One of the models, drawn and saved."""
    given = dict(CASES[name])
    kind = given.pop("text")
    more: dict[str, Any] = {"pad_token_id": 0} if kind == "phi3" else {}
    more |= {"head_dim": 8} if kind.startswith("gemma") else {}
    more |= {"sliding_window": 7, "sliding_window_pattern": 2} if kind == "gemma3_text" else {}
    text = AutoConfig.for_model(kind, **TEXT, **more, num_key_value_heads=2)
    torch.manual_seed(0)
    whole: tuple[Any, Any] = LlavaConfig, LlavaForConditionalGeneration
    if kind == "gemma3_text":
        whole = Gemma3Config, Gemma3ForConditionalGeneration
    if "image_grid_pinpoints" in given:
        whole = LlavaNextConfig, LlavaNextForConditionalGeneration
    model = whole[1](
        whole[0](vision_config=given.pop("tower"), text_config=text, image_token_index=IMAGE, **given)
    ).eval()
    with torch.no_grad():  # numbers by which each part is seen in the result
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def hf_inputs(name: str, tokens: Tensor, pixels: Tensor, sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """What transformers is told of images [n, 3, H, W]: of those in tiles all of one after another, with black ones behind;
    and where tokens are that see one another.
    """
    if name == "gemma 3":
        return {"pixel_values": pixels, "token_type_ids": (tokens == IMAGE).long()}
    if "image_grid_pinpoints" not in CASES[name]:
        return {"pixel_values": pixels}
    parts = pixels.split([squares_of(CASES[name]["image_grid_pinpoints"], size) for size in sizes])
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True),
        "image_sizes": torch.tensor(sizes),
    }


def squares_of(grids: Any, size: tuple[int, int]) -> int:
    """The whole and its tiles, as transformers counts them."""
    return int(image_size_to_num_patches(list(size), grids, TOWER["image_size"]))


def inputs(vision: VisionConfig) -> tuple[Tensor, Tensor, BatchImages]:
    """Two rows of tokens, with one image and with two, their pixels, and what the house is given of them."""
    size = vision.image_size
    draw = torch.Generator().manual_seed(3)
    found = [torch.from_numpy(map_placeholders_to_features(vision, *sides)) for sides in SIZES]
    squares = [1 if vision.pinpoints is None else squares_of([*map(list, vision.pinpoints)], sides) for sides in SIZES]
    a, b, c = map(len, found)
    tokens = torch.randint(1, BEGIN, (2, max(a, b + c) + 7), generator=draw)
    tokens[0, 2 : 2 + a] = IMAGE
    tokens[1, 1 : 1 + b] = tokens[1, 3 + b : 3 + b + c] = IMAGE
    pixels = torch.randn(sum(squares), 3, size, size, generator=draw)
    rows = torch.full(tokens.shape, -1)
    before = [sum(squares[:number]) * vision.features_per_tile for number in range(3)]
    rows[tokens == IMAGE] = torch.cat([one + first for one, first in zip(found, before, strict=True)])
    return tokens, pixels, BatchImages(pixels, rows)


def logits_of(model: Decoder, tokens: Tensor, images: BatchImages) -> Tensor:
    positions = torch.arange(tokens.shape[1])[None]
    context = model.make_forward_context(positions, sequence_bounds=outline_of(model, tokens))
    x = model.embed_inputs(tokens, positions, images=model.encode_images(images))
    return model.compute_logits(model(x, context))


def outline_of(model: Decoder, tokens: Tensor) -> DocumentBounds:
    together = model.config.vision is not None and model.config.vision.bidirectional
    places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return DocumentBounds.from_positions(places, None, tokens.numpy() == IMAGE if together else None)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_a_round_trip(tmp_path: Path, name: str) -> None:
    theirs = reference(name, tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf")
    assert ours.config.vision is not None
    tokens, pixels, images = inputs(ours.config.vision)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **hf_inputs(name, tokens, pixels, SIZES)).logits
        found = logits_of(ours, tokens, images)
        blind = theirs(input_ids=tokens, **hf_inputs(name, tokens, torch.zeros_like(pixels), SIZES)).logits
    assert (expected - blind).abs().max() > 0.1, "images that say nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", to="mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", to="hf")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


def test_a_folder_with_published_names_and_few_keys(tmp_path: Path) -> None:
    """As llava-hf/llava-1.5-7b-hf has it: a level of names more, and absent keys that mean transformers' defaults."""
    theirs = reference("llava 1.5", tmp_path / "new")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(tmp_path / "new" / "model.safetensors").items()
    }
    renamed["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(10)[None]
    config = theirs.config.to_dict()
    for key in ("hidden_act", "layer_norm_eps", "num_channels"):
        del config["vision_config"][key]
    for key in ("image_seq_length", "multimodal_projector_bias", "vision_feature_layer"):
        del config[key]
    (tmp_path / "old").mkdir()
    theirs.config.from_dict(config).save_pretrained(tmp_path / "old")
    save_file(renamed, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    ours = load_inference_model(tmp_path / "old")
    tokens, pixels, images = inputs(ours.config.vision)
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(ours, tokens, images), theirs(input_ids=tokens, pixel_values=pixels).logits, rtol=0, atol=1e-5
        )
    convert_checkpoint(tmp_path / "old", tmp_path / "mega", to="mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", to="hf")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "old" / "model.safetensors"
    ).read_bytes()


class Numbers:
    """A tokenizer of no text."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f" {one} " for one in ids)


def picture(number: int, size: tuple[int, int] = (20, 15)) -> bytes:
    noise, stream = np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8), io.BytesIO()
    PIL.Image.fromarray(noise).save(stream, "png")
    return stream.getvalue()


@pytest.mark.parametrize("name", ["llava 1.5", "llava next", "gemma 3"])
def test_greedy_text_image_by_image(tmp_path: Path, name: str) -> None:
    """Several prompts at once, in chunks that cut images where these may be, which share no pages though their tokens are the same."""
    theirs = reference(name, tmp_path)
    model = load_inference_model(tmp_path)
    vision = model.config.vision
    assert vision is not None
    mark = IMAGE if vision.begin_token is None else vision.begin_token
    text = " ".join(map(str, [*range(1, 20), mark, 3, 4]))
    prompts = [ImagePrompt(text, [picture(number)]) for number in (1, 2, 3)] + [
        ImagePrompt(f"{text} {mark} 7", [picture(4), picture(5, SIZES[1])])
    ]
    sizes = [[(20, 15)]] * 3 + [[(20, 15), SIZES[1]]]
    found = generate_completions(model, Numbers(), [*prompts, [5, 6, 7]], GenerationLimits(12))
    with mock.patch.object(generating, "InferenceEngine", partial(InferenceEngine, chunk_tokens=5)):
        chunked = generate_completions(model, Numbers(), prompts, GenerationLimits(12), draft="none")
    assert [one.tokens for one in chunked] == [one.tokens for one in found[:-1]]
    for prompt, one, each_size in zip(prompts, found, sizes, strict=False):
        tokens, _ = prompt.encode_prompt(model, Numbers())
        pixels = torch.from_numpy(np.concatenate([prepare_image(each, vision).pixels for each in prompt.pictures]))
        assert (vision.begin_token in tokens) == (name == "gemma 3")
        row = theirs.generate(
            torch.tensor([tokens]), do_sample=False, max_new_tokens=12, eos_token_id=None,
            **hf_inputs(name, torch.tensor([tokens]), pixels, each_size),
        )  # fmt: skip
        assert one.tokens == row[0, len(tokens) :].tolist()
    assert len({tuple(one.tokens) for one in found[:3]}) > 1, "images that say nothing"
    with pytest.raises(DataError, match=r"prompt 1 .*one placeholder  \d+  for each of its 2 image.s., but has 1"):
        generate_completions(model, Numbers(), [ImagePrompt(text, [picture(1), picture(2)])], GenerationLimits(1))


@pytest.mark.parametrize("name", ["llava 1.5", "llava next", "gemma 3"])
def test_loss_and_gradients_without_the_layer_that_is_for_nothing(tmp_path: Path, name: str) -> None:
    theirs = reference(name, tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf").requires_grad_(True)
    assert ours.config.vision is not None
    assert ours.vision is not None
    tokens, pixels, images = inputs(ours.config.vision)
    labels = torch.where(tokens == IMAGE, -100, tokens)
    expected = theirs(input_ids=tokens, labels=labels, **hf_inputs(name, tokens, pixels, SIZES)).loss
    expected.backward()
    positions = torch.arange(tokens.shape[1] - 1)[None]
    weights = (labels[:, 1:] >= 0).float()
    context = ours.make_forward_context(positions, sequence_bounds=outline_of(ours, tokens[:, :-1]))
    part = ours.encode_images(images.select_positions(slice(-1)))
    x = ours(ours.embed_inputs(tokens[:, :-1], positions, images=part), context)
    loss, _ = ours.compute_token_loss(x, tokens[:, 1:], weights / weights.sum())
    loss.backward()
    projector = theirs.model.multi_modal_projector
    found = {
        "patches": (ours.vision.tower.patches.weight, theirs.model.vision_tower.embeddings.patch_embedding.weight),
        "embedding": (ours.embedding.weight, theirs.model.language_model.embed_tokens.weight),
        "projector": (ours.vision.projector.out.weight, projector.mm_input_projection_weight)
        if name == "gemma 3"
        else (ours.vision.projector.into.weight, projector.linear_1.weight),
    }
    if name == "llava next":
        torch.testing.assert_close(
            ours.vision.projector.newline.grad, theirs.model.image_newline.grad, rtol=1e-4, atol=1e-6
        )
    for part, (mine, other) in found.items():
        gradient = other.grad.T if (part, name) == ("projector", "gemma 3") else other.grad.flatten(1)
        torch.testing.assert_close(mine.grad, gradient, rtol=1e-4, atol=1e-6)
    assert np.isclose(loss.item(), expected.item(), rtol=1e-5)
    assert (ours.vision.tower.norm.weight.grad is None) == (name != "gemma 3")
