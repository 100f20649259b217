"""Prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_common.progress_logging import logger
from mega_common.vision_config import VisionConfig
from mega_data.images.image_pixels import compute_mrope_positions
from mega_eval.text_stream import TextTokenizer
from mega_trainer.data.batch_images import BatchImages, find_image_blocks
from mega_trainer.model.decoder import Decoder

if TYPE_CHECKING:
    from mega_data.images.image_pixels import PreparedImage


@dataclass(frozen=True)
class ImagePrompt:
    """Prompt text with one placeholder for each image, and the bytes of the image files (`pictures`)."""

    text: str
    pictures: Sequence[bytes]

    def encode_prompt(self, model: Decoder, tokenizer: TextTokenizer) -> tuple[list[int], BatchImages]:
        """Return the prompt's token ids and its prepared images.
        Each image has one placeholder token per image feature.

        Raises:
            DataError: when the model has no vision encoder, an image cannot be read, or the numbers of images and
                placeholders differ.
        """
        from mega_data.images.image_pixels import prepare_image  # imported here, so that text alone needs no Pillow

        vision = model.config.vision
        if vision is None:
            raise DataError(
                "images are not supported by this model, which has no vision encoder",
                hint="use a vision-language model, or a prompt without images",
            )
        pictures = [prepare_image(data, vision) for data in self.pictures]
        tokens, images = assemble_image_prompt(self.text, pictures, vision, tokenizer, special=True)
        return tokens, attach_image_features(model, images)


def assemble_image_prompt(
    text: str, pictures: Sequence[PreparedImage], vision: VisionConfig, tokenizer: TextTokenizer, *, special: bool
) -> tuple[list[int], BatchImages]:
    """Return the token ids of a prompt and its images, without features.
    Each image has one placeholder token per image feature; `special` adds the special tokens that the tokenizer puts
    around a text.

    Raises:
        DataError: when the numbers of images and placeholders differ.
    """
    if vision.module is not None:
        return _assemble_module_prompt(text, pictures, vision, tokenizer, special=special)
    text = _add_image_frames(text, vision, tokenizer)
    tokens = np.array(tokenizer.encode(text, add_special_tokens=special), np.int64)
    is_placeholder = tokens == vision.image_token
    if is_placeholder.sum() != len(pictures):
        mark = vision.image_token if vision.begin_token is None or vision.native else vision.begin_token
        name = tokenizer.decode([mark])
        raise DataError(
            f"the prompt must have one placeholder {name} for each of its {len(pictures)} image(s), "
            f"but has {is_placeholder.sum()}",
            hint=f"write {name} where an image belongs",
        )
    _warn_of_animations(pictures)
    repeats = np.ones(tokens.size, np.int64)
    repeats[is_placeholder] = [picture.features.size for picture in pictures]
    tokens = np.repeat(tokens, repeats)
    rows = np.full(tokens.size, -1)
    counts = [vision.count_features_of_images(part.shape for part in picture.pixels) for picture in pictures]
    rows[tokens == vision.image_token] = np.concatenate(
        [picture.features + first for picture, first in zip(pictures, np.cumsum([0, *counts]), strict=False)]
    )
    pixels = [torch.from_numpy(part) for picture in pictures for part in picture.pixels]
    feature_rows = torch.from_numpy(rows)[None]
    if vision.native is None:
        return tokens.tolist(), BatchImages(torch.stack(pixels), feature_rows)
    image_columns, grids = np.flatnonzero(rows >= 0), [vision.get_feature_grid(*part.shape[1:]) for part in pixels]
    rotary = compute_mrope_positions(np.arange(tokens.size), image_columns, rows[image_columns], grids)
    return tokens.tolist(), BatchImages(pixels, feature_rows, positions=torch.from_numpy(rotary)[:, None])


def _warn_of_animations(pictures: Sequence[PreparedImage]) -> None:
    for number, picture in enumerate(pictures, 1):
        if picture.animated:
            logger.warning("image %d of the prompt is animated; only its first frame is used", number)


def _assemble_module_prompt(
    text: str, pictures: Sequence[PreparedImage], vision: VisionConfig, tokenizer: TextTokenizer, *, special: bool
) -> tuple[list[int], BatchImages]:
    """Return the token ids and images of a prompt for a vision encoder that is a module of transformers.
    Each placeholder is replaced by the text that the model's processor writes for its image.
    """
    texts = [picture.text for picture in pictures if picture.text is not None]
    placeholder = texts[0].placeholder if texts else tokenizer.decode([vision.image_token])
    parts = text.split(placeholder)
    if len(parts) - 1 != len(pictures):
        raise DataError(
            f"the prompt must have one placeholder {placeholder} for each of its {len(pictures)} image(s), "
            f"but has {len(parts) - 1}",
            hint=f"write {placeholder} where an image belongs",
        )
    _warn_of_animations(pictures)
    if special and texts and vision.bidirectional_prompt and vision.module is not None:
        # as PaliGemma's processor writes a prompt
        parts[-1], special = f"{vision.module.tokens.get('bos_token', '')}{parts[-1]}\n", False
    whole = parts[0] + "".join(one.text + part for one, part in zip(texts, parts[1:], strict=True))
    tokens = np.array(tokenizer.encode(whole, add_special_tokens=special), np.int64)
    rows = np.where(tokens == vision.image_token, np.cumsum(tokens == vision.image_token) - 1, -1)
    if (features := sum(one.features for one in texts)) != rows.max(initial=-1) + 1:
        raise DataError(
            f"the tokenizer makes {rows.max(initial=-1) + 1} tokens {vision.image_token} of the text of images with "
            f"{features} features",
            hint="use the tokenizer of the model",
        )
    inputs, positions = [part for one in pictures for part in one.pixels], None
    if vision.uses_mrope_grid_positions:
        columns, grids = np.flatnonzero(rows >= 0), [(one.shape[1], one.shape[2]) for one in inputs]
        positions = torch.from_numpy(compute_mrope_positions(np.arange(tokens.size), columns, rows[columns], grids))[
            :, None
        ]
    return tokens.tolist(), BatchImages(inputs, torch.from_numpy(rows)[None], positions=positions)


def _add_image_frames(text: str, vision: VisionConfig, tokenizer: TextTokenizer) -> str:
    """Return the text with each image placeholder between the begin and end tokens of an image, as Gemma 3's processor
    writes it.
    """
    if vision.begin_token is None or vision.end_token is None or vision.native:
        return text
    begin, image, end = (tokenizer.decode([one]) for one in (vision.begin_token, vision.image_token, vision.end_token))
    return text if image in text else text.replace(begin, vision.wrap_image_tokens(begin, image, end))


@torch.inference_mode()
def attach_image_features(model: Decoder, images: BatchImages) -> BatchImages:
    """Return the images with features computed by the vision encoder.
    On a pipeline rank without the vision encoder they are unchanged.
    """
    encoded = model.encode_images(images)
    assert encoded is not None
    return encoded


def find_image_ranges(tokens: Sequence[int], vision: VisionConfig) -> list[range]:
    """Return the position ranges of images, or of the whole prompt, whose tokens attend to each other in both directions.
    `tokens` are those of a prompt with images; the list is empty for models without this attention.
    """
    if vision.bidirectional_prompt:
        return [range(len(tokens))]
    is_image = np.array([tokens]) == vision.image_token
    return [block for _, block in find_image_blocks(is_image)] if vision.bidirectional else []


def gather_token_images(
    parts: Sequence[tuple[BatchImages | None, int, int]], device: torch.device
) -> BatchImages | None:
    """Return the images for a forward pass in which each token is a batch row of its own, or None.
    None means without images; each part is (images of a prompt, index of its first token, number of tokens).
    """
    every = [images for images, _, _ in parts if images is not None]
    if not every:
        return None
    rows: list[Tensor] = []
    features: list[Tensor] = []
    count, positions = 0, None
    for images, first, number in parts:
        feature_rows = torch.full((number,), -1)
        if images is not None and images.features is not None:
            own = images.rows[0, first : first + number]
            feature_rows[: len(own)] = torch.where(own < 0, own, own + count)
            features.append(images.features)
            count += len(images.features)
        rows.append(feature_rows)
    if any(images.positions is not None for images in every):
        positions = torch.cat([_rotary_columns(*part) for part in parts], 1)[..., None].to(device)
    joined = torch.cat(features) if features else None
    return BatchImages(every[0].pixels, torch.cat(rows)[:, None].to(device), joined, positions)


def _rotary_columns(images: BatchImages | None, first: int, number: int) -> Tensor:
    """Return the rotary positions of some tokens of a row, int64 [3, number]; tokens after the prompt continue from its
    last position.
    """
    columns = torch.arange(first, first + number).expand(3, -1)
    if images is None or images.positions is None:
        return columns
    prompt, length = images.positions[:, 0], images.positions.shape[-1]
    after = columns + prompt.max() + 1 - length
    return torch.where(columns < length, prompt[:, columns[0].clamp(max=length - 1)], after)
