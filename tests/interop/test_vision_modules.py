"""Vision encoders that run as modules of transformers: logits, losses, gradients, text and folders are transformers'."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor
from vision_modules import CASES, IMAGE, PREPARED, draw_inputs, draw_picture, join_inputs, save_model

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import detect_model_family
from mega_ckpt.formats.hf_source import HfSource
from mega_common.errors import CheckpointError, DataError, MissingPackageError
from mega_common.vision_config import VisionConfig
from mega_data.batch_loader import StepBatch
from mega_data.images.image_inputs import ImageInputs
from mega_data.images.image_pixels import compute_mrope_positions
from mega_data.images.module_images import ModuleImageProcessor
from mega_data.tokenizer import Tokenizer
from mega_eval.engine_requests import EngineRequest
from mega_eval.generate import generate_completions
from mega_eval.image_prompts import ImagePrompt, attach_image_features
from mega_eval.model_loading import load_inference_model
from mega_eval.text_stream import GenerationLimits, TextTokenizer
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.data.micro_batch import DocumentBounds, find_bidirectional_tokens
from mega_trainer.model.decoder import Decoder

SIZES = [(37, 50), (20, 15), (30, 31)]


def draw_images(kind: str, vision: VisionConfig) -> list[ImageInputs]:
    """Three images of different sizes, prepared by the model's processor if there is one."""
    assert vision.module is not None
    if kind not in PREPARED:
        return [draw_inputs(kind, number) for number in range(3)]
    processor = ModuleImageProcessor(vision.module)
    return [processor.prepare(draw_picture(number, size))[0] for number, size in enumerate(SIZES)]


def draw_tokens(images: list[ImageInputs]) -> tuple[Tensor, Tensor]:
    """Two rows of tokens, with one image and with two; and the feature row of each token."""
    a, b, c = (math.prod(one.shape) for one in images)
    tokens = torch.randint(3, 250, (2, 8 + max(a, b + c)), generator=torch.Generator().manual_seed(3))
    for row, first, count in ((0, 2, a), (1, 1, b), (1, 4 + b, c)):
        tokens[row, first : first + count] = IMAGE
    places = tokens == IMAGE
    return tokens, torch.where(places, places.flatten().cumsum(0).view(places.shape) - 1, -1)


# Types that differ from a quick one by the sizes of their parts alone.
RARE = {"gemma4", "glm46v", "glmga", "pp_chart2table", "qwen3_5"}
KINDS = [pytest.param(kind, marks=[pytest.mark.long] if kind in RARE else []) for kind in CASES]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_losses_gradients_and_a_round_trip(tmp_path: Path, kind: str) -> None:
    theirs = save_model(kind, tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf").requires_grad_(True)
    assert ours.config.vision is not None
    assert ours.vision is not None
    images = draw_images(kind, ours.config.vision)
    tokens, rows = draw_tokens(images)
    labels = torch.where(tokens == IMAGE, -100, tokens)
    inputs = join_inputs(kind, images, tokens)
    if ours.config.vision.bidirectional_prompt:  # an answer of four tokens
        labels[:, :-4] = -100
        inputs["token_type_ids"][:, -4:] = 1
    weights = torch.nn.functional.pad((labels[:, 1:] >= 0).float(), (0, 1))
    expected = theirs(input_ids=tokens, labels=labels, **inputs)
    others = [ImageInputs({**one.arrays, "pixel_values": -one.arrays["pixel_values"]}, one.shape) for one in images]
    with torch.no_grad():
        seen = theirs(input_ids=tokens, **join_inputs(kind, others, tokens)).logits
    assert (expected.logits - seen).abs().max() > 1e-3, "images that say nothing"
    positions, mrope = torch.arange(tokens.shape[1])[None], None
    if ours.config.vision.uses_mrope_grid_positions:
        grids = [[one.shape[1:] for one in images[:1]], [one.shape[1:] for one in images[1:]]]
        first = math.prod(images[0].shape)
        each = [
            compute_mrope_positions(
                positions[0].numpy(), np.flatnonzero(row >= 0), row[row >= 0] - first * number, grids[number]
            )
            for number, row in enumerate(rows.numpy())
        ]
        mrope = torch.from_numpy(np.stack(each, 1))
    batch = ours.encode_images(BatchImages(images, rows, positions=mrope))
    numbers = positions.expand_as(tokens).numpy()
    whole = StepBatch(tokens.numpy(), labels.numpy(), weights.numpy(), numbers, None, np.arange(2))
    together = find_bidirectional_tokens(whole, ours.config) if ours.config.vision.bidirectional else None
    bounds = DocumentBounds.from_positions(whole.position_ids, None, together)
    context = ours.make_forward_context(positions if mrope is None else mrope, sequence_bounds=bounds)
    x = ours(ours.embed_inputs(tokens, positions, images=batch), context)
    torch.testing.assert_close(ours.compute_logits(x), expected.logits, rtol=0, atol=1e-5)
    loss, _ = ours.compute_token_loss(x, tokens.roll(-1, 1), weights / weights.sum())
    assert np.isclose(loss.item(), expected.loss.item(), rtol=1e-5)
    loss.backward()
    expected.loss.backward()
    body = getattr(theirs, "model", theirs)
    found = dict(ours.vision.tower.module.named_parameters())
    assert found
    for name, parameter in body.named_parameters():
        if name in found:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name].grad, gradient, rtol=1e-3, atol=1e-5, msg=name)
    embedding = body.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.embedding.weight.grad, embedding, rtol=1e-3, atol=1e-5)
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", to="mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", to="hf")
    for file in (path.name for path in (tmp_path / "hf").iterdir()):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


def encode_png(number: int, size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    draw_picture(number, size).save(stream, "png")
    return stream.getvalue()


@dataclass(frozen=True)
class InputsPrompt(ImagePrompt):
    """A prompt whose image has been prepared."""

    image: ImageInputs

    def encode_prompt(self, model: Decoder, tokenizer: TextTokenizer) -> tuple[list[int], BatchImages]:
        tokens = [9, 8, *[IMAGE] * self.image.shape[2], 7]
        rows = torch.tensor([[-1, -1, *range(self.image.shape[2]), -1]])
        return tokens, attach_image_features(model, BatchImages([self.image], rows))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_image_by_image(tmp_path: Path, kind: str) -> None:
    theirs = save_model(kind, tmp_path)
    ours, tokenizer = load_inference_model(tmp_path), Tokenizer(tmp_path)
    assert ours.config.vision is not None
    assert ours.config.vision.module is not None
    images, prompts = draw_images(kind, ours.config.vision), list[Any]()
    if kind in PREPARED:
        mark = ModuleImageProcessor(ours.config.vision.module).prepare(draw_picture(0))[1].placeholder
        prompts = [ImagePrompt(f"what is {mark} it", [encode_png(number, SIZES[number])]) for number in range(3)]
        with pytest.raises(DataError, match=r"one placeholder .* for each of its 2 image.s., but has 1"):
            ImagePrompt(f"what {mark}", [encode_png(1, SIZES[1])] * 2).encode_prompt(ours, tokenizer)
    prompts = prompts or [InputsPrompt("", (), image) for image in images]
    found = generate_completions(ours, tokenizer, [*prompts, [5, 6, 7]], GenerationLimits(20))
    for prompt, image, one in zip(prompts, images, found, strict=False):
        tokens, _ = prompt.encode_prompt(ours, tokenizer)
        row = theirs.generate(
            torch.tensor([tokens]), do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0,
            **join_inputs(kind, [image], torch.tensor([tokens])),
        )  # fmt: skip
        assert one.tokens == row[0, len(tokens) :].tolist()


@pytest.mark.parametrize("kind", ["idefics3", "aya_vision", "lighton_ocr", "vipllava", "deepseek_vl", "paligemma"])
def test_prompts_and_inputs_are_those_of_the_whole_processor_of_transformers(tmp_path: Path, kind: str) -> None:
    """Of the types whose processor loads without torchvision."""
    save_model(kind, tmp_path)
    ours, theirs = load_inference_model(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    text = f"what {theirs.image_token} is it?{theirs.image_token}"
    pictures = [draw_picture(number, SIZES[number]) for number in (1, 2)]
    tokens, images = ImagePrompt(text, [encode_png(number, SIZES[number]) for number in (1, 2)]).encode_prompt(
        ours, Tokenizer(tmp_path)
    )
    expected = theirs(text=[text], images=[pictures] if kind == "idefics3" else pictures, return_tensors="pt")
    assert tokens == expected["input_ids"][0].tolist()
    pixels = torch.cat([torch.from_numpy(one.arrays["pixel_values"]).flatten() for one in images.pixels])
    if kind not in ("lighton_ocr",):  # padded to the largest image
        assert pixels.equal(expected["pixel_values"].flatten())
    assert images.features is not None
    assert int((images.rows >= 0).sum()) == len(images.features)


def test_kimi_as_transformers_saves_it_and_settings_that_it_does_not_follow(tmp_path: Path) -> None:
    theirs = save_model("kimi_k25", tmp_path / "published")
    theirs.save_pretrained(tmp_path / "saved")
    published, saved = (HfSource(tmp_path / name) for name in ("published", "saved"))
    assert all(saved.read_tensor(name).equal(published.read_tensor(name)) for name in published.tensor_names())
    raw = json.loads((tmp_path / "published" / "config.json").read_text())
    raw["vision_config"] |= {"vt_hidden_size": 24, "merge_type": "sd2_tpool"}
    family = detect_model_family(raw)
    assert family.read_config_json(raw).vision is not None
    assert not family.unread_keys(raw)
    for key, value in (("vt_num_hidden_layers", 5), ("pos_emb_type", "learned")):
        with pytest.raises(CheckpointError, match=rf"vision_config.{key} = .* is not supported"):
            family.read_config_json({**raw, "vision_config": {**raw["vision_config"], key: value}})


@pytest.mark.parametrize("kind", ["aya_vision", "gemma4:together"])
def test_attention_among_placeholders_is_that_of_config_json(kind: str) -> None:
    raw: dict[str, Any] = {"model_type": kind.partition(":")[0], **CASES[kind][0]}
    family = detect_model_family(raw)
    model = family.read_config_json(raw)
    assert model.vision is not None
    assert not family.unsupported_settings(model)
    other = model.vision.model_copy(update={"bidirectional": not model.vision.bidirectional})
    (problem,) = family.unsupported_settings(model.model_copy(update={"vision": other}))
    assert "as in vision.module.config" in problem


def test_prompts_end_where_the_loss_begins_and_fit_into_a_window() -> None:
    raw: dict[str, Any] = {"model_type": "paligemma", **CASES["paligemma"][0]}
    model = detect_model_family(raw).read_config_json(raw)
    tokens = np.array([[IMAGE, 5, 6, 7, 8, 9, IMAGE, 8], [5, 6, IMAGE, 7, 8, 9, 3, 4]])
    documents = np.array([[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8], np.int32)
    weights = np.array([[0, 0, 1, 0, 1, 0, 0.5, 1], [0, 0, 0, 0, 2, 0, 1, 0]], np.float32)
    batch = StepBatch(tokens, tokens, weights, np.tile(np.arange(8), (2, 1)), documents, np.arange(2))
    expected = np.array([[1, 1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0]])
    assert np.array_equal(find_bidirectional_tokens(batch, model), expected)
    narrow = model.model_copy(update={"sliding_window": 4})
    with pytest.raises(DataError, match=r"has 5 tokens, more than sliding_window = 4"):
        find_bidirectional_tokens(batch, narrow)
    images = BatchImages([], torch.zeros(1, 5))
    with pytest.raises(DataError, match=r"has 5 tokens, more than sliding_window = 4"):
        EngineRequest([5] * 5, GenerationLimits(2), images=images).check_fits_engine(narrow, (), 100)
    with pytest.raises(DataError, match=r"log-probabilities of a prompt with images are not supported"):
        EngineRequest([5] * 5, GenerationLimits(2), images=images, prompt_logprobs=True).check_fits_engine(
            model, (), 100
        )


def test_what_cannot_be_followed_is_named(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "aya_vision", **CASES["aya_vision"][0]}
    dropout = {**config, "vision_config": {**config["vision_config"], "attention_dropout": 0.1}}
    with pytest.raises(CheckpointError, match=r"vision_config.attention_dropout = 0.1 is not supported"):
        detect_model_family(dropout).read_config_json(dropout)
    for kind, reason in (("ovis2", "visual indicator"),):
        with pytest.raises(CheckpointError, match=rf"model type '{kind}' is not supported: .*{reason}"):
            detect_model_family({"model_type": kind, "vision_config": {}})
    save_model("cohere2_vision", tmp_path)
    bare = load_inference_model(tmp_path)
    prompt = ImagePrompt("what <image>", [encode_png(1, (8, 8))])
    with pytest.raises(DataError, match=r"cohere2_vision: the model's folder has no image processor"):
        prompt.encode_prompt(bare, Tokenizer(tmp_path))
    settings = {"image_processor_type": "Cohere2VisionImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(MissingPackageError, match=r"requires a package that is missing .*torchvision"):
        prompt.encode_prompt(load_inference_model(tmp_path), Tokenizer(tmp_path))
