"""Prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_common.vision import VisionConfig
from mega_data.images.native import rotary_positions
from mega_eval.text import Text
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.vision.images import Images, image_blocks


@dataclass(frozen=True)
class Pictured:
    """A text with a placeholder for each of some images, which are the content of their files."""

    text: str
    pictures: Sequence[bytes]

    def read(self, model: Decoder, tokenizer: Text) -> tuple[list[int], Images]:
        """Its tokens, with as many placeholders as images have features, and these.

        Raises:
            DataError: when the model sees nothing, an image cannot be read, or there are more or fewer than placeholders.
        """
        from mega_data.images.pixels import picture_of  # here: text wants no Pillow

        vision = model.config.vision
        if vision is None:
            raise DataError(
                "the model sees no images", hint="one that does has a section `vision` in its configuration"
            )
        text = _framed(self.text, vision, tokenizer)
        tokens = np.array(tokenizer.encode(text, add_special_tokens=True), np.int64)
        here = tokens == vision.image_token
        if here.sum() != len(self.pictures):
            mark = vision.image_token if vision.begin_token is None or vision.native else vision.begin_token
            name = tokenizer.decode([mark])
            raise DataError(
                f"{len(self.pictures)} image(s), and {here.sum()} placeholders {name} in the text",
                hint=f"write {name} where an image belongs",
            )
        pictures = [picture_of(one, vision) for one in self.pictures]
        times = np.ones(tokens.size, np.int64)
        times[here] = [one.features.size for one in pictures]
        tokens = np.repeat(tokens, times)
        rows = np.full(tokens.size, -1)
        before = np.cumsum([0, *(vision.features_of_all(each.shape for each in one.pixels) for one in pictures)])
        rows[tokens == vision.image_token] = np.concatenate(
            [one.features + first for one, first in zip(pictures, before, strict=False)]
        )
        pixels = [torch.from_numpy(one) for picture in pictures for one in picture.pixels]
        where = torch.from_numpy(rows)[None]
        if vision.native is None:
            return tokens.tolist(), seen(model, Images(torch.stack(pixels), where))
        places, grids = np.flatnonzero(rows >= 0), [vision.grid(*one.shape[1:]) for one in pixels]
        turned = rotary_positions(np.arange(tokens.size), places, rows[places], grids)
        return tokens.tolist(), seen(model, Images(pixels, where, positions=torch.from_numpy(turned)[:, None]))


def _framed(text: str, vision: VisionConfig, tokenizer: Text) -> str:
    """A text in which each image has its placeholder between what begins and what ends an image, where the model wants that:
    as Gemma 3's processor writes it, with two ends of lines around.
    """
    if vision.begin_token is None or vision.end_token is None or vision.native:
        return text
    begin, image, end = (tokenizer.decode([one]) for one in (vision.begin_token, vision.image_token, vision.end_token))
    return text if image in text else text.replace(begin, vision.framed(begin, image, end))


@torch.inference_mode()
def seen(model: Decoder, images: Images) -> Images:
    """The same with their features, where the model's stage has the tower."""
    return images if model.vision is None else images.known(model.vision.see(images, model.device))


def seen_together(tokens: Sequence[int], vision: VisionConfig) -> list[range]:
    """The places of a row's images, where their tokens see one another and not only those before them."""
    places = np.array([tokens]) == vision.image_token
    return [block for _, block in image_blocks(places)] if vision.bidirectional else []


def columns(parts: Sequence[tuple[Images | None, int, int]], device: torch.device) -> Images | None:
    """What some tokens of several rows see, each of them a row of its own: of each row the images, the first token, how many."""
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
        positions = torch.cat([_turned(*part) for part in parts], 1)[..., None].to(device)
    known = torch.cat(features) if features else None
    return Images(every[0].pixels, torch.cat(rows)[:, None].to(device), known, positions)


def _turned(images: Images | None, first: int, number: int) -> Tensor:
    """What some tokens of a row are turned by, int64 [3, number]: those behind the prompt go on from its last one."""
    places = torch.arange(first, first + number).expand(3, -1)
    if images is None or images.positions is None:
        return places
    told, length = images.positions[:, 0], images.positions.shape[-1]
    return torch.where(places < length, told[:, places[0].clamp(max=length - 1)], places + told.max() + 1 - length)
