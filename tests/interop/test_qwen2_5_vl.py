"""Qwen2.5-VL against transformers: logits of images of several shapes, losses and gradients, folders both ways, greedy text."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from interop.test_hf_vision import Numbers, picture
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.formats.hf_write import plan_hf_folder
from mega_ckpt.source import open_weight_source
from mega_common.vision_config import VisionConfig
from mega_data.images.image_pixels import compute_mrope_positions
from mega_eval import generate as generating
from mega_eval.generate import generate_completions
from mega_eval.image_prompts import ImagePrompt
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.text_stream import GenerationLimits
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.vision.native_resolution import ImagePartition

IMAGE, VOCAB = 50, 64
SIZES = [(40, 24), (16, 56), (8, 8)]  # heights and widths of images
TOWER = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4, "window_size": 16,
    "fullatt_block_indexes": [1], "out_hidden_size": 32,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "initializer_range": 0.2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "tied, windows of one feature, one frame": {
        "tie_word_embeddings": True, "tower": {"window_size": 8, "temporal_patch_size": 1, "fullatt_block_indexes": []},
    },
    "features of nine patches, windows in the text": {
        "tower": {"spatial_merge_size": 3, "window_size": 24, "fullatt_block_indexes": [0, 2]}, "sizes": [(60, 24), (24, 48), (12, 12)],
        "text": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    },
}  # fmt: skip


def reference(name: str, folder: Path) -> tuple[Any, list[tuple[int, int]]]:
    """One of the models, drawn and saved, and the sizes of its images."""
    given = dict(CASES[name])
    sizes = given.pop("sizes", SIZES)
    tower, text = TOWER | given.pop("tower", {}), TEXT | given.pop("text", {})
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(vision_config=tower, text_config=text, image_token_id=IMAGE, **given)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():  # numbers by which each part is seen in the result
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model, sizes


def hf_inputs(vision: VisionConfig, tokens: Tensor, images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers is told of images [3, H, W]: their patches, and how many."""
    alone = [ImagePartition([image], vision, 0, 1) for image in images]
    grids = [[1, *(side // vision.patch_size for side in image.shape[1:])] for image in images]
    return {
        "pixel_values": torch.cat([deal._cut_patches(image).flatten(0, 1) for deal, image in zip(alone, images, strict=True)]),
        "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": (tokens == IMAGE).int(),
    }  # fmt: skip


def inputs(vision: VisionConfig, sizes: list[tuple[int, int]]) -> tuple[Tensor, list[Tensor], BatchImages]:
    """Two rows of tokens, with one image and with two, their pixels, and what the house is given of them."""
    draw = torch.Generator().manual_seed(3)
    a, b, c = (vision.count_image_features(*size) for size in sizes)
    tokens = torch.randint(1, IMAGE - 1, (2, max(a, b + c) + 7), generator=draw)
    tokens[0, 2 : 2 + a] = IMAGE
    tokens[1, 1 : 1 + b] = tokens[1, 3 + b : 3 + b + c] = IMAGE
    pixels = [torch.randn(3, *size, generator=draw) for size in sizes]
    rows = torch.full(tokens.shape, -1)
    rows[tokens == IMAGE] = torch.arange(a + b + c)
    grids = [vision.get_feature_grid(*size) for size in sizes]
    turned = []
    for row, own in zip(rows.numpy(), (grids[:1], grids[1:]), strict=True):
        places = np.flatnonzero(row >= 0)
        turned.append(compute_mrope_positions(np.arange(len(row)), places, row[places] - row[places[0]], own))
    return tokens, pixels, BatchImages(pixels, rows, positions=torch.from_numpy(np.stack(turned, 1)))


def logits_of(model: Decoder, tokens: Tensor, images: BatchImages) -> Tensor:
    assert images.positions is not None
    encoded = model.encode_images(images)
    context = replace(model.make_forward_context(images.positions), images=encoded)
    return model.compute_logits(model(model.embed_inputs(tokens, images.positions[0], images=encoded), context))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_a_round_trip(tmp_path: Path, name: str) -> None:
    theirs, sizes = reference(name, tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf")
    assert ours.config.vision is not None
    tokens, pixels, images = inputs(ours.config.vision, sizes)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **hf_inputs(ours.config.vision, tokens, pixels)).logits
        found = logits_of(ours, tokens, images)
        black = hf_inputs(ours.config.vision, tokens, [torch.zeros_like(one) for one in pixels])
        assert (expected - theirs(input_ids=tokens, **black).logits).abs().max() > 0.1, "images that say nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", to="mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", to="hf")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


def test_positions_are_transformers(tmp_path: Path) -> None:
    theirs, sizes = reference("as published", tmp_path / "hf")
    vision = load_inference_model(tmp_path / "hf").config.vision
    assert vision is not None
    tokens, pixels, images = inputs(vision, sizes)
    seen = hf_inputs(vision, tokens, pixels)
    expected, _ = theirs.model.get_rope_index(tokens, seen["mm_token_type_ids"], seen["image_grid_thw"])
    assert images.positions is not None
    assert torch.equal(images.positions, expected)


def test_a_folder_as_it_was_first_published(tmp_path: Path) -> None:
    """The text model's keys beside the tower's, a rotation of kind mrope, names without a level."""
    theirs, sizes = reference("as published", tmp_path / "new")
    config = theirs.config.to_dict()
    text, tower = config.pop("text_config"), config.pop("vision_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    text["rope_theta"] = 1_000_000.0
    tower |= {"model_type": "qwen2_5_vl", "in_chans": 3, "spatial_patch_size": 4}
    old = (
        text
        | config
        | {"vision_config": {key: tower[key] for key in tower if key not in ("in_channels", "rope_parameters")}}
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(old))
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    save_file(tensors, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    inside = {
        "model.visual." + name.removeprefix("visual.")
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name: tensor
        for name, tensor in tensors.items()
    }
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "config.json").write_bytes((tmp_path / "new" / "config.json").read_bytes())
    save_file(inside, tmp_path / "inside" / "model.safetensors", {"format": "pt"})
    for folder in ("old", "inside"):
        ours = load_inference_model(tmp_path / folder)
        assert ours.config.vision is not None
        tokens, pixels, images = inputs(ours.config.vision, sizes)
        with torch.no_grad():
            expected = theirs(input_ids=tokens, **hf_inputs(ours.config.vision, tokens, pixels)).logits
            torch.testing.assert_close(logits_of(ours, tokens, images), expected, rtol=0, atol=1e-5)
        convert_checkpoint(tmp_path / folder, tmp_path / f"{folder}.mega", to="mega")
        convert_checkpoint(tmp_path / f"{folder}.mega", tmp_path / f"{folder}.back", to="hf")
        there, back = (tmp_path / name / "model.safetensors" for name in (folder, f"{folder}.back"))
        assert back.read_bytes() == there.read_bytes()


def test_greedy_text_image_by_image(tmp_path: Path) -> None:
    """Several prompts at once, in chunks that cut images, and behind an image positions that are fewer than tokens."""
    theirs, _ = reference("as published", tmp_path)
    model = load_inference_model(tmp_path)
    vision = model.config.vision
    assert vision is not None
    assert vision.native is not None
    text = " ".join(map(str, [*range(1, 20), IMAGE, 3, 4]))
    shapes = [[(60, 75)], [(75, 60)], [(90, 80)], [(60, 70), (57, 99)]]
    prompts = [
        ImagePrompt(
            " ".join([text, *([f"{IMAGE} 7"] if len(own) > 1 else [])]),
            [picture(7 * n + m, one) for m, one in enumerate(own)],
        )
        for n, own in enumerate(shapes)
    ]
    found = generate_completions(model, Numbers(), [*prompts, [5, 6, 7]], GenerationLimits(12))
    with mock.patch.object(generating, "InferenceEngine", partial(InferenceEngine, chunk_tokens=5)):
        chunked = generate_completions(model, Numbers(), prompts, GenerationLimits(12), draft="none")
    assert [one.tokens for one in chunked] == [one.tokens for one in found[:-1]]
    for prompt, one in zip(prompts, found, strict=False):
        tokens, images = prompt.encode_prompt(model, Numbers())
        row = torch.tensor([tokens])
        seen = theirs.generate(
            row, do_sample=False, max_new_tokens=12, eos_token_id=None, **hf_inputs(vision, row, list(images.pixels))
        )
        assert one.tokens == seen[0, len(tokens) :].tolist()
    assert len({tuple(one.tokens) for one in found[:3]}) > 1, "images that say nothing"
    alone = theirs.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert found[-1].tokens == alone[0, 3:].tolist()


def test_loss_and_gradients(tmp_path: Path) -> None:
    theirs, sizes = reference("as published", tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf").requires_grad_(True)
    assert ours.config.vision is not None
    assert ours.vision is not None
    tokens, pixels, images = inputs(ours.config.vision, sizes)
    labels = torch.where(tokens == IMAGE, -100, tokens)
    expected = theirs(input_ids=tokens, labels=labels, **hf_inputs(ours.config.vision, tokens, pixels)).loss
    expected.backward()
    weights = (labels[:, 1:] >= 0).float()
    part = ours.encode_images(images.select_positions(slice(-1)))
    x = ours(
        ours.embed_inputs(tokens[:, :-1], part.positions[0], images=part), ours.make_forward_context(part.positions)
    )
    loss, _ = ours.compute_token_loss(x, tokens[:, 1:], weights / weights.sum())
    loss.backward()
    assert np.isclose(loss.item(), expected.item(), rtol=1e-5)
    visual = theirs.model.visual
    for mine, other in (
        (ours.vision.tower.patches.weight, visual.patch_embed.proj.weight),
        (ours.vision.projector.into.weight, visual.merger.mlp[0].weight),
        (ours.vision.projector.norm.weight, visual.merger.ln_q.weight),
        (ours.embedding.weight, theirs.model.language_model.embed_tokens.weight),
    ):
        torch.testing.assert_close(
            mine.grad, other.grad.flatten(1) if mine.dim() > 1 else other.grad, rtol=1e-4, atol=1e-6
        )


def test_the_sizes_of_images_travel_with_the_weights(tmp_path: Path) -> None:
    """As the folder's image processor has them, and into it where a run changed them."""
    reference("as published", tmp_path / "hf")
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 256, "max_pixels": 4096}
    (tmp_path / "hf/preprocessor_config.json").write_text(json.dumps(processor))
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", to="mega")
    vision = open_weight_source(tmp_path / "mega").model.vision
    assert vision is not None
    assert vision.native is not None
    assert (vision.native.min_pixels, vision.native.max_pixels) == (256, 4096)
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", to="hf")
    for file in ("config.json", "preprocessor_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    source = open_weight_source(tmp_path / "mega")
    smaller = vision.model_copy(update={"native": vision.native.model_copy(update={"max_pixels": 2048})})
    with mock.patch.object(source, "model", source.model.model_copy(update={"vision": smaller})):
        content = plan_hf_folder(source).others["preprocessor_config.json"]
    assert isinstance(content, bytes)
    found = json.loads(content)
    assert (found["min_pixels"], found["max_pixels"]) == (256, 2048)
