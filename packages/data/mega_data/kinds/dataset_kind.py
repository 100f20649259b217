"""Interface of dataset kinds: a kind builds samples from one data set. A blend may mix kinds with one sample type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_common.vision_config import VisionConfig
from mega_data.data_config import DataConfig
from mega_data.images.image_inputs import ImageInputs
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.tokenizer import Tokenizer

Sample_co = TypeVar("Sample_co", covariant=True)


@dataclass(frozen=True)
class SampleImages:
    """Images of a training sample, the positions of their placeholder tokens, and the feature that replaces each.

    Attributes:
        pixels: fp32 [3, H, W] per image, or per tile of each image, normalised; or the inputs of a module of transformers.
        placeholder_positions: int64 [k], positions of the placeholders in the sample.
        features: int64 [k], row of the concatenated image features for each placeholder.
    """

    pixels: Sequence[npt.NDArray[np.float32] | ImageInputs]
    placeholder_positions: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingSample:
    """One training sequence of S input tokens with labels, loss weights, positions and document ids.

    Attributes:
        tokens: int64 [S].
        labels: int64 [S], the token that follows each.
        loss_weights: fp32 [S], weight of each label in the loss; 0 for labels without loss.
        position_ids: int64 [S].
        document_ids: int32 [S], number of the document within the sample, from 0; None if attention is not reset.
        token_types: int64 [S], segment of each token, 0 or 1; None for samples of one segment.
        pair_label: 1 if the two segments are swapped, else 0; None for samples of one segment.
        images: images of the sample; None if the data set has none.
        neighbors: int64 [S / m, K, 2m], tokens of the K neighbors of each chunk, -1 for a missing neighbor; None
            without retrieval.
        targets: fp32 [S], label of each token, or of its text; None without labels.
        group_size: number of consecutive documents that are a group of texts; None without groups.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_weights: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32] | None
    token_types: npt.NDArray[np.int64] | None = None
    pair_label: int | None = None
    images: SampleImages | None = None
    neighbors: npt.NDArray[np.int64] | None = None
    targets: npt.NDArray[np.float32] | None = None
    group_size: int | None = None


class DatasetSamples(Protocol[Sample_co]):
    """Interface of the samples of one data set, whose files are read lazily.
    Samples are `TrainingSample`s, or of the sample type of the data set's kind.
    """

    @property
    def content_key(self) -> str:
        """Text that names everything the samples depend on; a resumed run compares its digest to detect changed data."""

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over the data set."""

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """Return the approximate attention work of samples: their numbers of attended (query, key) token pairs.
        The samples are `numbers`; the result is int64 [len(numbers)], computed without reading tokens.

        S squared, unless attention is limited to documents. Used to balance the samples of a step over the data ranks.
        """

    def __getitem__(self, k: int, /) -> Sample_co: ...


@dataclass(frozen=True)
class DatasetContext:
    """Settings shared by all data sets of one split of a run, passed to the builders of samples.

    Attributes:
        eod: end-of-document token, or None.
        cache: folder of the index cache.
        known_tokenizer: tokenizer of the data, if it is loaded already.
        vision: vision encoder of the model, or None.
    """

    config: DataConfig
    seed: int
    eod: int | None
    cache: Path
    known_tokenizer: Tokenizer | None = None
    vision: VisionConfig | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data, for dataset kinds that need one; a ConfigError if none is configured.
        It is `known_tokenizer`, else the one at the configuration's `tokenizer` path.

        Raises:
            ConfigError: if there is neither.
        """
        if self.known_tokenizer is not None:
            return self.known_tokenizer
        if self.config.tokenizer is None:
            raise ConfigError(
                f"data.kind = {self.config.kind}: requires the tokenizer of the data",
                hint="set data.tokenizer to its folder",
            )
        return Tokenizer(self.config.tokenizer)

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        """Tokenizer of the data that encodes special tokens spelled in a text as ordinary text."""
        return Tokenizer(self.tokenizer.path, specials_as_text=True)


DatasetFactory: TypeAlias = Callable[[DatasetPart, DatasetContext, int], DatasetSamples[Any]]
"""Builder of the samples of a data set part. The last argument is the number of samples that the run reads, used only by
order `megatron`. Raises DataError if the data set is not of this kind, or the part is empty."""
