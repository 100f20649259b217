"""Batches of random tokens for verification, which depend on the step alone, not on the layout.

Documents, loss weights, source texts, images and retrieved neighbors have uneven lengths.
"""

from __future__ import annotations

import numpy as np

from mega_common.retro_config import RetroConfig
from mega_common.vision_config import VisionConfig
from mega_data.batch_loader import EncoderInput, StepBatch
from mega_data.images.image_pixels import compute_native_size, map_placeholders_to_features
from mega_data.kinds.dataset_kind import SampleImages
from mega_trainer.config.run_config import RunConfig


def make_synthetic_batch(config: RunConfig, step: int, rank: int, ranks: int, closed: bool = True) -> StepBatch:
    """Return random samples of data rank `rank` of `ranks` data ranks for one step.

    Tokens are random, documents have uneven lengths, and labels uneven loss weights.

    Args:
        closed: attention is restricted to documents.
    """
    begin, length = config.batch.samples_after_steps(step), config.target_length
    count = config.batch.batch_size_after_samples(begin)
    rng = np.random.default_rng([7, step])
    tokens = rng.integers(0, config.model.vocab_size, (count, length + 1))
    documents = np.cumsum(rng.random((count, length)) < 0.15, axis=1).astype(np.int32)
    keep = rng.random((count, 1)) * 0.9 + 0.05  # from nearly none to nearly all of a sample's tokens count
    kept = rng.random((count, length)) < keep
    sizes = rng.choice([0.5, 1.0, 2.0], (count, length)).astype(np.float32)
    weights = np.where(kept, sizes, np.float32(0))
    starts = np.array([[np.flatnonzero(row == row[i])[0] for i in range(length)] for row in documents])
    own = slice(rank * count // ranks, (rank + 1) * count // ranks)
    model = config.model
    types = rng.integers(0, model.token_types, (count, length))[own] if model.token_types else None
    pairs = rng.integers(0, 2, count)[own] if model.sentence_pairs else None
    vision = config.model.vision
    images = [] if vision is None else [draw_sample_images(rng, row, vision) for row in tokens[:, :-1]]
    return StepBatch(
        tokens=tokens[own, :-1],
        labels=tokens[own, 1:],
        loss_weights=weights[own],
        position_ids=(np.arange(length) - starts)[own],
        document_ids=documents[own] if closed else None,
        sample_ids=np.arange(begin, begin + count)[own],
        images=images[own],
        source=_draw_source(config, step, own, count) if config.model.encoder else None,
        token_types=types,
        pair_labels=pairs,
        neighbors=None if model.retro is None else _draw_neighbors(config, model.retro, step, count)[own],
    )


def draw_sample_images(rng: np.random.Generator, tokens: np.ndarray, vision: VisionConfig) -> SampleImages | None:
    """Draw none (None), one or two images in a sample, the first possibly truncated; write placeholders to `tokens`.

    Images in tiles or at native resolution have several sizes, and so different numbers of placeholders.
    """
    count, size = int(rng.integers(3)), vision.image_size
    if not count:
        return None
    cut = int(rng.integers(2))
    if vision.module is not None:
        return _draw_module_images(rng, tokens, vision, count, cut)
    rows, features = 0, np.zeros(0, np.int64)
    shapes: list[tuple[int, int]] = []
    for _ in range(count):
        sides = rng.integers(1, 9, 2) if vision.has_variable_tokens else (size, size)
        found = map_placeholders_to_features(vision, int(sides[0]), int(sides[1]))
        features = np.append(features, rows + found)
        whole = [compute_native_size(vision, int(sides[0]), int(sides[1]))] if vision.native else []
        shapes += whole or [(size, size)] * (1 + found.max() // vision.features_per_tile)
        rows = sum(vision.count_image_features(*one) for one in shapes)
    features = features[cut:][: len(tokens)]
    positions = np.sort(rng.choice(len(tokens), len(features), replace=False))
    tokens[positions] = vision.image_token
    return SampleImages([rng.standard_normal((3, *shape), np.float32) for shape in shapes], positions, features)


def _draw_module_images(
    rng: np.random.Generator, tokens: np.ndarray, vision: VisionConfig, count: int, cut: int
) -> SampleImages:
    """Draw images that the model's processor of transformers prepares; `cut` features of the first one are left out."""
    from PIL import Image

    from mega_data.images.module_images import ModuleImageProcessor

    assert vision.module is not None
    processor, found = ModuleImageProcessor(vision.module), []
    for _ in range(count):
        pixels = rng.integers(0, 256, (*rng.integers(6, 20, 2), 3), np.uint8)
        found.append(processor.prepare(Image.fromarray(pixels))[0])
    features = np.arange(vision.count_features_of_images(one.shape for one in found))[cut:][: len(tokens)]
    positions = np.sort(rng.choice(len(tokens), len(features), replace=False))
    tokens[positions] = vision.image_token
    return SampleImages(found, positions, features)


def _draw_source(config: RunConfig, step: int, own: slice, count: int) -> EncoderInput:
    """Return the encoder's input: sequences of uneven length, padded."""
    rng = np.random.default_rng([8, step])
    length = config.data.seq_length
    tokens = rng.integers(0, config.model.vocab_size, (count, length))
    return EncoderInput(tokens[own], rng.integers(length // 4, length + 1, count)[own])


def _draw_neighbors(config: RunConfig, retro: RetroConfig, step: int, count: int) -> np.ndarray:
    """Return retrieved neighbors; some chunks have none, and some neighbors are short."""
    rng = np.random.default_rng([9, step])
    shape = (count, config.data.seq_length // retro.chunk_length, retro.neighbors, retro.neighbor_length)
    tokens = rng.integers(0, config.model.vocab_size, shape)
    lengths = rng.integers(1, 2 * retro.neighbor_length, shape[:-1]) * (rng.random((*shape[:2], 1)) < 0.7)
    return np.where(np.arange(retro.neighbor_length) < lengths[..., None], tokens, -1)
