"""Samples of conversations: packed ones with images, whose tokens contain the placeholders, and preference pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.progress_logging import logger
from mega_common.vision_config import VisionConfig
from mega_data.images.image_inputs import ImageInputs
from mega_data.kinds.dataset_kind import DatasetContext, SampleImages, TrainingSample
from mega_data.kinds.packed_documents import (
    PackedSamples,
    WholeDocumentSamples,
    build_packed_samples,
    find_document_bounds,
    reject_megatron_order,
)
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.dataset_info import ImagesInfo, read_dataset_info
from mega_data.token_files.image_references import ImageReferences, has_images
from mega_data.token_files.loss_mask import LossWeights

Pixels = npt.NDArray[np.float32] | ImageInputs


class ImageChatSamples(PackedSamples):
    """Packed training samples of conversations with images, as a function of the sample number and the image files.

    Raises:
        DataError: if the images were prepared for another vision encoder; for a sample with an image that cannot be
            read, unless `data.on_bad_sample` is skip.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext, *, weights: LossWeights) -> None:
        super().__init__(part, setting, weights=weights)
        info, prefix = read_dataset_info(part.reader.prefix), part.reader.prefix
        images = None if info is None else info.images
        if images is None:
            raise DataError(
                f"{prefix}: has images, but the section `images` of its .info is missing",
                hint="build the data set again with mega data preprocess --images",
            )
        if setting.vision is None:
            raise DataError(
                f"{prefix}: has images, which requires a model with a vision encoder", hint="set model.vision"
            )
        self._vision: VisionConfig = setting.vision
        _check_vision(prefix, images, setting.vision)
        self._references = ImageReferences(part.reader, setting.config.image_folder or Path(images.folder))
        self._animation_logged = False

    @property
    def _packing_rule(self) -> str:
        vision = self._vision
        tiles = "" if vision.pinpoints is None else f" {vision.pinpoints}"
        bilinear = "" if vision.resample == "bicubic" else f" {vision.resample}"
        size = vision.image_size if vision.native_size_limits is None else vision.native_size_limits
        return (
            f"packed images={self._references.fingerprint} {size} {vision.resize} {vision.mean} {vision.std}"
            + bilinear
            + tiles
            + (f" {vision.module.image_processor}" if vision.module else "")
        )

    @cached_property
    def _document_starts(self) -> npt.NDArray[np.int64]:
        """First token position of each document of the data set."""
        return find_document_bounds(self._part.reader, 0, len(self._part.reader))[0]

    def __getitem__(self, k: int, /) -> TrainingSample:
        sample = super().__getitem__(k)
        try:
            return replace(sample, images=self._load_images(*self._locate_pieces(k)))
        except DataError as error:
            message = f"sample {k} of {self._part.reader.prefix}: {error.message}"
            if self._setting.config.on_bad_sample == "stop":
                raise DataError(message, hint="repair the image, or set data.on_bad_sample: skip") from None
            logger.warning("%s; the sample does not count in the loss", message)
            return replace(sample, loss_weights=np.zeros_like(sample.loss_weights))

    def _load_images(self, starts: list[int], sizes: list[int]) -> SampleImages | None:
        """Return the images of the documents at tokens `starts`; for a split document, those of the piece."""
        tokens = self._part.reader.tokens
        pixels: list[Pixels] = []
        positions, features = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        at = 0
        for start, size in zip(starts, sizes, strict=True):
            here = np.flatnonzero(self._mark_features(tokens[start : start + size]))
            if here.size:
                document = int(np.searchsorted(self._document_starts, start, side="right")) - 1
                before = int(self._mark_features(tokens[self._document_starts[document] : start]).sum())
                numbers = before + np.arange(here.size)
                positions.append(at + here)
                document_pixels, document_features = self._load_document_images(document, numbers)
                features.append(document_features + self._count_features(pixels))
                pixels += document_pixels
            at += size
        return SampleImages(pixels, np.concatenate(positions), np.concatenate(features)) if pixels else None

    def _mark_features(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return which tokens stand for image features."""
        return np.isin(tokens, self._vision.feature_tokens)

    def _count_features(self, pixels: list[Pixels]) -> int:
        """Return the number of features of some squares or images."""
        return self._vision.count_features_of_images(image.shape for image in pixels)

    def _load_document_images(
        self, document: int, numbers: npt.NDArray[np.int64]
    ) -> tuple[list[Pixels], npt.NDArray[np.int64]]:
        """Return the images of some of a document's placeholders, and the feature index of each placeholder.

        Returns:
            Squares or whole images, fp32 [3, H, W] each; feature indices, int64 [k].
        """
        from mega_data.images.image_pixels import prepare_image  # local, because text data does not require Pillow

        references, tokens = self._references.get_image_references(document)
        counts = np.array(tokens or [self._vision.tokens_per_image] * len(references), np.int64)
        ends = np.cumsum(counts)
        first, last = np.searchsorted(ends, numbers[[0, -1]], side="right").tolist()
        pixels: list[Pixels] = []
        features: list[npt.NDArray[np.int64]] = []
        for number in range(first, last + 1):
            try:
                image = prepare_image(self._references.read_image_file(references[number]), self._vision)
                if len(image.features) != counts[number]:
                    raise DataError(
                        f"the size of the image has changed: {len(image.features)} features, {counts[number]} placeholders"
                    )
            except DataError as error:
                name = f"image {number} of document {document}, {references[number]}"
                raise DataError(f"{name}: {error.message}") from None
            if image.animated and not self._animation_logged:
                self._animation_logged = True
                logger.warning(
                    "image %d of document %d, %s: is animated; only the first frame of animated images is used",
                    number, document, references[number],
                )  # fmt: skip
            features.append(image.features + self._count_features(pixels))
            pixels += list(image.pixels)
        return pixels, np.concatenate(features)[numbers - (ends[first] - counts[first])]


def _check_vision(prefix: Path, images: ImagesInfo, vision: VisionConfig) -> None:
    """Reject images that were prepared for another vision encoder.

    Raises:
        DataError: naming the differences.
    """
    expected = vision.image_token, vision.pinpoints, vision.native_size_limits
    same_count = vision.native or vision.module or images.tokens == vision.tokens_per_image
    if same_count and (images.token, images.pinpoints, images.sizes) == expected:
        return
    tiles = "" if images.pinpoints == vision.pinpoints else f", and other tiles: {vision.pinpoints}"
    tiles += "" if images.sizes == vision.native_size_limits else f", and other sizes: {vision.native_size_limits}"
    raise DataError(
        f"{prefix}: has {images.tokens} placeholders {images.token} per image, but the model has "
        f"{vision.tokens_per_image} features and vision.image_token = {vision.image_token}{tiles}",
        hint="prepare the data for this model: mega data preprocess --images --image-model",
    )


def build_conversation_samples(part: DatasetPart, setting: DatasetContext, num_samples: int) -> PackedSamples:
    """Return the packed samples of conversations in one data set's share of a split.
    The dataset kind is `conversations`. Samples have images if the data set has them.

    Raises:
        ConfigError: in order `megatron`, which does not support packing.
        DataError: on the first sample, without a loss mask, or if it selects no token or every token; for images that
            the model does not support.
    """
    if has_images(part.reader.prefix):
        reject_megatron_order(part, setting)
        return ImageChatSamples(part, setting, weights=LossWeights(part.reader))
    return build_packed_samples(part, setting, num_samples, weights=LossWeights(part.reader))


class PreferencePairSamples(WholeDocumentSamples):
    """Packed samples of whole preference pairs (chosen and rejected answer).
    Pairs that do not fit a sample are skipped and counted.
    """

    _sequences = _texts = 2
    _noun = "pairs"
    _fit_hint = "increase data.seq_length: both answers of a pair, each with its prompt, are in one sample"

    @property
    def _packing_rule(self) -> str:
        return "pairs to the last token"

    def _read_label_weights(self, at: int, size: int) -> npt.NDArray[np.float32]:
        return np.append(super()._read_label_weights(at, size - 1), np.float32(0))


def build_preference_pairs(part: DatasetPart, setting: DatasetContext, _: int) -> PreferencePairSamples:
    """Return the packed samples of preference pairs in one data set's share of a split (dataset kind `pairs`).

    Raises:
        ConfigError: as `reject_megatron_order`.
        DataError: on the first sample, without a loss mask, or if it selects no token.
    """
    reject_megatron_order(part, setting)
    return PreferencePairSamples(part, setting, weights=LossWeights(part.reader))
