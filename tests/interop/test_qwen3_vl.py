"""Qwen3-VL, dense and with experts, against transformers: logits, losses and gradients of images of several shapes, folders both
ways, greedy text."""

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
import torch.distributed as dist
from interop.test_hf_vision import Numbers, picture
from interop.test_qwen2_5_vl import IMAGE, SIZES, VOCAB, hf_inputs, inputs, logits_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import detect_model_family
from mega_ckpt.formats.hf_write import plan_hf_folder, write_hf_folder
from mega_ckpt.source import open_weight_source, read_model_config
from mega_common.errors import CheckpointError, ConfigError
from mega_eval import generate as generating
from mega_eval.generate import generate_completions
from mega_eval.image_prompts import ImagePrompt
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.multi_rank_inference import ReplicaLayout, build_replica_groups
from mega_eval.text_stream import GenerationLimits

TOWER = {
    "depth": 4, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "initializer_range": 0.2, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}  # fmt: skip
MOE = {
    "moe": True, "text": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": True},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as published": {},
    "tied, one frame, a feature for each layer": {
        "tie_word_embeddings": True,
        "tower": {"temporal_patch_size": 1, "deepstack_visual_indexes": [1, 2, 3], "hidden_act": "gelu"},
        "text": {
            "attention_bias": True, "head_dim": 8, "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
        },
    },
    "features of nine patches, few positions, YaRN, no DeepStack": {
        "tower": {"spatial_merge_size": 3, "num_position_embeddings": 4, "deepstack_visual_indexes": []},
        "sizes": [(60, 24), (24, 48), (12, 12)],
        "text": {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mrope_section": [3, 3, 2],
                "rope_theta": 1000.0,
            },
        },
    },
    "experts": MOE,
    "experts behind a dense layer": {
        "moe": True, "tie_word_embeddings": True, "text": MOE["text"] | {"mlp_only_layers": [1], "moe_intermediate_size": 16},
    },
}  # fmt: skip


def reference(name: str, folder: Path) -> tuple[Any, list[tuple[int, int]]]:
    """One of the models, drawn and saved, and the sizes of its images."""
    given = dict(CASES[name])
    sizes, moe = given.pop("sizes", SIZES), given.pop("moe", False)
    tower, text = TOWER | given.pop("tower", {}), TEXT | given.pop("text", {})
    torch.manual_seed(0)
    of_config, of_model = (
        (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
        if moe
        else (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    )
    model = of_model(of_config(vision_config=tower, text_config=text, image_token_id=IMAGE, **given)).eval()
    with torch.no_grad():  # numbers by which each part is seen in the result
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model, sizes


@pytest.mark.parametrize("name", CASES)
def test_logits_and_a_round_trip(tmp_path: Path, name: str) -> None:
    theirs, sizes = reference(name, tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf")
    assert ours.config.vision is not None
    assert ours.config.tie_embeddings == CASES[name].get("tie_word_embeddings", False)
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
    expected, _ = theirs.model.get_rope_index(
        input_ids=tokens, mm_token_type_ids=seen["mm_token_type_ids"], image_grid_thw=seen["image_grid_thw"]
    )
    assert images.positions is not None
    assert torch.equal(images.positions, expected)


def test_experts_as_published_and_as_transformers_saves_them(tmp_path: Path) -> None:
    """Published files have an expert's matrices as (in, out), and so has a folder that is written anew."""
    theirs, sizes = reference("experts", tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    turned = {name: one.mT.contiguous() if ".experts." in name else one for name, one in tensors.items()}
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_bytes((tmp_path / "saved" / "config.json").read_bytes())
    save_file(turned, tmp_path / "published" / "model.safetensors", {"format": "pt"})
    ours = load_inference_model(tmp_path / "published")
    assert ours.config.vision is not None
    tokens, pixels, images = inputs(ours.config.vision, sizes)
    seen = hf_inputs(ours.config.vision, tokens, pixels)
    convert_checkpoint(tmp_path / "published", tmp_path / "mega", to="mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", to="hf")
    source = open_weight_source(tmp_path / "mega")
    with mock.patch.object(source, "asset_files", dict):
        plan = plan_hf_folder(source)
    (tmp_path / "anew").mkdir()
    write_hf_folder(source, plan, tmp_path / "anew", lambda _: None)
    with torch.no_grad():
        expected = theirs(input_ids=tokens, **seen).logits
        torch.testing.assert_close(logits_of(ours, tokens, images), expected, rtol=0, atol=1e-5)
        again = type(theirs).from_pretrained(tmp_path / "anew").eval()
        assert torch.equal(again(input_ids=tokens, **seen).logits, expected)
    there, back = (tmp_path / name / "model.safetensors" for name in ("published", "back"))
    assert back.read_bytes() == there.read_bytes()
    assert {name: one.shape for name, one in load_file(tmp_path / "anew" / "model.safetensors").items()} == {
        name: one.shape for name, one in turned.items()
    }


@pytest.mark.parametrize("name", ["as published", "experts"])
def test_loss_and_gradients(tmp_path: Path, name: str) -> None:
    theirs, sizes = reference(name, tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf").requires_grad_(True)
    assert ours.config.vision is not None
    assert ours.vision is not None
    tokens, pixels, images = inputs(ours.config.vision, sizes)
    labels = torch.where(tokens == IMAGE, -100, tokens)
    expected = theirs(input_ids=tokens, labels=labels, **hf_inputs(ours.config.vision, tokens, pixels)).loss
    expected.backward()
    weights = (labels[:, 1:] >= 0).float()
    part = ours.encode_images(images.select_positions(slice(-1)))
    assert part is not None
    context = replace(ours.make_forward_context(part.positions), images=part)
    x = ours(ours.embed_inputs(tokens[:, :-1], part.positions[0], images=part), context)
    loss, _ = ours.compute_token_loss(x, tokens[:, 1:], weights / weights.sum())
    loss.backward()
    assert np.isclose(loss.item(), expected.item(), rtol=1e-5)
    visual, text, tower = theirs.model.visual, theirs.model.language_model, ours.vision.tower
    stacked, mergers = ours.vision.projector.deepstack, visual.deepstack_merger_list
    for mine, other in (
        (tower.patches.weight, visual.patch_embed.proj.weight),
        (tower.patches.bias, visual.patch_embed.proj.bias),
        (tower.positions, visual.pos_embed.weight),
        (tower.layers[3].feed.work.down.weight, visual.blocks[3].mlp.linear_fc2.weight),
        (ours.vision.projector.into.weight, visual.merger.linear_fc1.weight),
        (ours.vision.projector.norm.bias, visual.merger.norm.bias),
        (stacked[0].norm.weight, mergers[0].norm.weight),
        (stacked[0].into.weight, mergers[0].linear_fc1.weight),
        (stacked[1].out.weight, mergers[1].linear_fc2.weight),
        (stacked[1].out.bias, mergers[1].linear_fc2.bias),
        (ours.embedding.weight, text.embed_tokens.weight),
        (ours.layers[1].mixer.before.weight, text.layers[1].input_layernorm.weight),
    ):
        torch.testing.assert_close(
            mine.grad, other.grad.flatten(1) if mine.dim() > 1 else other.grad, rtol=1e-4, atol=1e-5
        )


PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4,
}  # fmt: skip


def prompts_with_images() -> list[ImagePrompt]:
    text = " ".join(map(str, [*range(1, 20), IMAGE, 3, 4]))
    shapes = [[(60, 75)], [(90, 20)], [(30, 40), (57, 33)]]
    return [
        ImagePrompt(
            " ".join([text, *([f"{IMAGE} 7"] if len(own) > 1 else [])]),
            [picture(7 * n + m, one) for m, one in enumerate(own)],
        )
        for n, own in enumerate(shapes)
    ]


def tokens_on_a_rank(folder: Path, layouts: list[ReplicaLayout]) -> list[list[list[int]]]:
    """What a model that is split over all ranks writes, in each layout."""
    found, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    for layout in layouts:
        groups = build_replica_groups(read_model_config(folder), rank, ranks, layout)
        model = load_inference_model(folder, groups=groups)
        texts = generate_completions(model, Numbers(), prompts_with_images(), GenerationLimits(12), draft="none")
        found.append([one.tokens for one in texts])
    return found


def test_text_of_ranks_that_share_a_model(tmp_path: Path) -> None:
    """Features are on the ranks of the first layers alone, and each of these has all of them."""
    reference("as published", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    texts = generate_completions(load_inference_model(tmp_path), Numbers(), prompts_with_images(), GenerationLimits(12))
    layouts = [ReplicaLayout(pp=2), ReplicaLayout(tp=2)]
    for found in run_ranks(tokens_on_a_rank, 2, tmp_path, layouts):
        assert found == [[one.tokens for one in texts]] * 2
    with pytest.raises(ConfigError, match="less 1, as its first 2 must be on one rank"):
        build_replica_groups(read_model_config(tmp_path), 0, 3, ReplicaLayout(pp=3))


@pytest.mark.parametrize("name", ["as published", "experts"])
def test_greedy_text_image_by_image(tmp_path: Path, name: str) -> None:
    """Several prompts at once, and in chunks that cut images."""
    theirs, _ = reference(name, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    model, prompts = load_inference_model(tmp_path), prompts_with_images()
    vision = model.config.vision
    assert vision is not None
    found = generate_completions(model, Numbers(), [*prompts, [5, 6, 7]], GenerationLimits(20))
    with mock.patch.object(generating, "InferenceEngine", partial(InferenceEngine, chunk_tokens=5)):
        chunked = generate_completions(model, Numbers(), prompts, GenerationLimits(20), draft="none")
    assert [one.tokens for one in chunked] == [one.tokens for one in found[:-1]]
    for prompt, one in zip(prompts, found, strict=False):
        tokens, images = prompt.encode_prompt(model, Numbers())
        row = torch.tensor([tokens])
        seen = theirs.generate(
            row, do_sample=False, max_new_tokens=20, eos_token_id=None, **hf_inputs(vision, row, list(images.pixels))
        )
        assert one.tokens == seen[0, len(tokens) :].tolist()
    assert len({tuple(one.tokens) for one in found[:3]}) > 1, "images that say nothing"


REFUSED = [
    ({"vision_config": {"deepstack_visual_indexes": [2, 0]}}, "must be increasing layer numbers up to 3"),
    ({"vision_config": {"deepstack_visual_indexes": [4]}}, "must be increasing layer numbers up to 3"),
    ({"vision_config": {"num_position_embeddings": 24}}, "must be a square number"),
    ({"vision_config": {"deepstack_visual_indexes": [0, 1, 2, 3]}}, "must have at most num_layers = 3 layers"),
    ({"vision_config": {"out_hidden_size": 16}}, "out_hidden_size = 16 must equal hidden_size = 32"),
    ({"text_config": {"rope_parameters": {"mrope_interleaved": False}}}, "mrope_interleaved = false must be true"),
    ({"text_config": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}, "'dynamic' is not supported"),
    ({"text_config": {"use_sliding_window": True}}, "use_sliding_window = true is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_is_refused(changes: dict[str, dict[str, Any]], said: str) -> None:
    raw = json.loads(Qwen3VLConfig(vision_config=TOWER, text_config=TEXT, image_token_id=IMAGE).to_json_string())
    family = detect_model_family(raw)
    assert family.read_config_json(raw).vision is not None
    assert family.unread_keys(raw) == []
    for section, keys in changes.items():
        raw[section] |= keys
    with pytest.raises(CheckpointError, match=said):
        family.read_config_json(raw)
