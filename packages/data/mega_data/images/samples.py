"""Samples of conversations with images: packed as others are, the placeholders of each image in the tokens already."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.log import logger
from mega_common.vision import VisionConfig
from mega_data.files.info import read_info
from mega_data.files.mask import LossWeights
from mega_data.images.references import References
from mega_data.kinds.base import Sample, SampleImages, Setting
from mega_data.kinds.packed import PackedSamples, document_bounds
from mega_data.order.parts import Part

Pixels = npt.NDArray[np.float32]


class SeeingSamples(PackedSamples):
    """See `PackedSamples`. What a sample's images are is a function of its number too, as long as their files stay.

    Raises:
        DataError: when the images are not those that the model sees; for a sample with an image that cannot be read,
            where `data.on_bad_sample` is not skip.
    """

    def __init__(self, part: Part, setting: Setting, *, weights: LossWeights) -> None:
        super().__init__(part, setting, weights=weights)
        info, prefix = read_info(part.reader.prefix), part.reader.prefix
        told = None if info is None else info.images
        if told is None or setting.vision is None:
            raise DataError(
                f"{prefix}: has images, "
                + ("which its .info says nothing of" if told is None else "and the model sees none"),
                hint="model.vision says what a model sees with",
            )
        self._vision: VisionConfig = setting.vision
        vision = self._vision
        if (told.token, told.pinpoints, told.sizes) != (vision.image_token, vision.pinpoints, vision.sizes) or (
            told.tokens != vision.tokens and not vision.native
        ):
            tiles = "" if told.pinpoints == vision.pinpoints else f", or other tiles: {vision.pinpoints}"
            tiles += "" if told.sizes == vision.sizes else f", or other sizes: {vision.sizes}"
            raise DataError(
                f"{prefix}: {told.tokens} placeholders {told.token} stand for an image, and the model has "
                f"{vision.tokens} features and vision.image_token = {vision.image_token}{tiles}",
                hint="prepare the data for this model: mega data preprocess --images --image-model",
            )
        self._references = References(part.reader, setting.config.image_folder or Path(told.folder))

    @property
    def _rule(self) -> str:
        vision = self._vision
        tiles = "" if vision.pinpoints is None else f" {vision.pinpoints}"
        bilinear = "" if vision.resample == "bicubic" else f" {vision.resample}"
        size = vision.image_size if vision.sizes is None else vision.sizes
        return (
            f"packed images={self._references.fingerprint} {size} {vision.resize} {vision.mean} {vision.std}"
            + bilinear
            + tiles
        )

    @cached_property
    def _begins(self) -> npt.NDArray[np.int64]:
        """Where each document of the data set begins among the tokens."""
        return document_bounds(self._part.reader, 0, len(self._part.reader))[0]

    def __getitem__(self, k: int, /) -> Sample:
        sample = super().__getitem__(k)
        try:
            return replace(sample, images=self._images(*self._place(k)))
        except DataError as error:
            told = f"sample {k} of {self._part.reader.prefix}: {error.message}"
            if self._setting.config.on_bad_sample == "stop":
                raise DataError(
                    told, hint="mend the image, or data.on_bad_sample: skip leaves such samples out"
                ) from None
            logger.warning("%s; nothing of the sample counts", told)
            return replace(sample, loss_weights=np.zeros_like(sample.loss_weights))

    def _images(self, starts: list[int], sizes: list[int]) -> SampleImages | None:
        """The images of the documents that begin at some tokens; of a document that is cut those of the piece."""
        tokens = self._part.reader.tokens
        pixels: list[Pixels] = []
        places, features = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        at = 0
        for start, size in zip(starts, sizes, strict=True):
            here = np.flatnonzero(tokens[start : start + size] == self._vision.image_token)
            if here.size:
                document = int(np.searchsorted(self._begins, start, side="right")) - 1
                before = int((tokens[self._begins[document] : start] == self._vision.image_token).sum())
                numbers = before + np.arange(here.size)
                places.append(at + here)
                found, seen = self._seen(document, numbers)
                features.append(seen + self._count(pixels))
                pixels += found
            at += size
        return SampleImages(pixels, np.concatenate(places), np.concatenate(features)) if pixels else None

    def _count(self, pixels: list[Pixels]) -> int:
        """Features of some squares or images."""
        return self._vision.features_of_all(one.shape for one in pixels)

    def _seen(self, document: int, numbers: npt.NDArray[np.int64]) -> tuple[list[Pixels], npt.NDArray[np.int64]]:
        """The squares, or whole, fp32 [3, H, W] of the images that some of a document's placeholders are of, and which of their rows each
        of these int64 [k] stands for.
        """
        from mega_data.images.pixels import picture_of  # here: text wants no Pillow

        references, told = self._references.of(document)
        counts = np.array(told or [self._vision.tokens] * len(references), np.int64)
        ends = np.cumsum(counts)
        first, last = np.searchsorted(ends, numbers[[0, -1]], side="right").tolist()
        pixels: list[Pixels] = []
        features: list[npt.NDArray[np.int64]] = []
        for number in range(first, last + 1):
            try:
                picture = picture_of(self._references.read(references[number]), self._vision)
                if len(picture.features) != counts[number]:
                    raise DataError(
                        f"it has another size now: {len(picture.features)} features, {counts[number]} placeholders"
                    )
            except DataError as error:
                where = f"image {number} of document {document}, {references[number]}"
                raise DataError(f"{where}: {error.message}") from None
            features.append(picture.features + self._count(pixels))
            pixels += list(picture.pixels)
        return pixels, np.concatenate(features)[numbers - (ends[first] - counts[first])]
