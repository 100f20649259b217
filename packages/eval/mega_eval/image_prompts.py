"""Prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_common.progress_logging import logger
from mega_common.vision_config import VisionConfig
from mega_data.images.image_geometry import compute_mrope_positions
from mega_eval.text_stream import TextTokenizer
from mega_trainer.data.batch_images import BatchImages, find_image_blocks
from mega_trainer.model.decoder import Decoder


@dataclass(frozen=True)
class ImagePrompt:
    """Prompt text with one placeholder for each image, and the bytes of the image files."""

    text: str
    pictures: Sequence[bytes]

    def encode_prompt(self, model: Decoder, tokenizer: TextTokenizer) -> tuple[list[int], BatchImages]:
        """Return the prompt's tokens, with one placeholder token for each image feature, and its images.

        Raises:
            DataError: when the model sees nothing, an image cannot be read, or there are more or fewer than placeholders.
        """
        from mega_data.images.image_pixels import prepare_image  # here: text wants no Pillow

        vision = model.config.vision
        if vision is None:
            raise DataError(
                "the model sees no images", hint="one that does has a section `vision` in its configuration"
            )
        text = _add_image_frames(self.text, vision, tokenizer)
        tokens = np.array(tokenizer.encode(text, add_special_tokens=True), np.int64)
        here = tokens == vision.image_token
        if here.sum() != len(self.pictures):
            mark = vision.image_token if vision.begin_token is None or vision.native else vision.begin_token
            name = tokenizer.decode([mark])
            raise DataError(
                f"{len(self.pictures)} image(s), and {here.sum()} placeholders {name} in the text",
                hint=f"write {name} where an image belongs",
            )
        pictures = [prepare_image(one, vision) for one in self.pictures]
        for number, picture in enumerate(pictures, 1):
            if picture.animated:
                logger.warning("image %d of the prompt is animated: the first frame is used", number)
        times = np.ones(tokens.size, np.int64)
        times[here] = [one.features.size for one in pictures]
        tokens = np.repeat(tokens, times)
        rows = np.full(tokens.size, -1)
        before = np.cumsum([0, *(vision.count_total_features(each.shape for each in one.pixels) for one in pictures)])
        rows[tokens == vision.image_token] = np.concatenate(
            [one.features + first for one, first in zip(pictures, before, strict=False)]
        )
        pixels = [torch.from_numpy(one) for picture in pictures for one in picture.pixels]
        where = torch.from_numpy(rows)[None]
        if vision.native is None:
            return tokens.tolist(), attach_image_features(model, BatchImages(torch.stack(pixels), where))
        places, grids = np.flatnonzero(rows >= 0), [vision.get_feature_grid(*one.shape[1:]) for one in pixels]
        turned = compute_mrope_positions(np.arange(tokens.size), places, rows[places], grids)
        return tokens.tolist(), attach_image_features(
            model, BatchImages(pixels, where, positions=torch.from_numpy(turned)[:, None])
        )


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
    """Return the images with their features, if this rank's stage has the vision encoder."""
    return images if model.vision is None else images.with_features(model.vision.encode_images(images, model.device))


def find_image_ranges(tokens: Sequence[int], vision: VisionConfig) -> list[range]:
    """Return the position ranges of a row's images whose tokens attend to each other in both directions."""
    places = np.array([tokens]) == vision.image_token
    return [block for _, block in find_image_blocks(places)] if vision.bidirectional else []


def gather_token_images(
    parts: Sequence[tuple[BatchImages | None, int, int]], device: torch.device
) -> BatchImages | None:
    """Return the images of some tokens of several rows, each token as a batch row; each part is (images of the row,
    first token, count).
    """
    every = [one for one, _, _ in parts if one is not None]
    if not every:
        return None
    rows: list[Tensor] = []
    features: list[Tensor] = []
    count, positions = 0, None
    for one, first, number in parts:
        own = torch.full((number,), -1)
        if one is not None and one.features is not None:
            there = one.rows[0, first : first + number]
            own[: len(there)] = torch.where(there < 0, there, there + count)
            features.append(one.features)
            count += len(one.features)
        rows.append(own)
    if any(one.positions is not None for one in every):
        positions = torch.cat([_rotary_columns(*part) for part in parts], 1)[..., None].to(device)
    known = torch.cat(features) if features else None
    return BatchImages(every[0].pixels, torch.cat(rows)[:, None].to(device), known, positions)


def _rotary_columns(images: BatchImages | None, first: int, number: int) -> Tensor:
    """Return the rotary positions of some tokens of a row, int64 [3, number]; tokens after the prompt continue from its
    last position.
    """
    places = torch.arange(first, first + number).expand(3, -1)
    if images is None or images.positions is None:
        return places
    told, length = images.positions[:, 0], images.positions.shape[-1]
    return torch.where(places < length, told[:, places[0].clamp(max=length - 1)], places + told.max() + 1 - length)
