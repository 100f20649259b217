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
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.tokenizer import Tokenizer

Made_co = TypeVar("Made_co", covariant=True)


@dataclass(frozen=True)
class SampleImages:
    """Images of a sample, and the positions of their placeholder tokens.

    Attributes:
        pixels: fp32 [3, H, W] of each, or of each tile of each, normalised.
        placeholder_positions: int64 [k], of the placeholders.
        features: int64 [k], of the rows that these become, one after another, the one that each placeholder stands for.
    """

    pixels: Sequence[npt.NDArray[np.float32]]
    placeholder_positions: npt.NDArray[np.int64]
    features: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingSample:
    """One training sequence of S inputs with its labels.

    Attributes:
        tokens: int64 [S].
        labels: int64 [S], the token that follows each.
        loss_weights: fp32 [S], the weight of each label in the loss; 0 where none is taken.
        position_ids: int64 [S].
        document_ids: int32 [S], number of the document within the sample, from 0; None where attention is not reset.
        token_types: int64 [S], which of two segments each token is in, 0 or 1; None where there is one.
        pair_label: of two segments, 1 when they are swapped.
        images: those of its documents; None where the data set has none.
        neighbors: int64 [S / m, K, 2m], the tokens of the K neighbours of each of its chunks, -1 where there is none; None:
            nothing is retrieved for it.
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


class DatasetSamples(Protocol[Made_co]):
    """Samples of one data set: `TrainingSample`, or the sample type of its kind. Files are read lazily."""

    @property
    def identity(self) -> str:
        """Description of everything that sample k depends on; a resumed run compares its digest."""

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over the data set."""

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """Return the approximate number of attended token pairs in each of some samples, int64 [n], without reading
        tokens: S squared unless attention is limited to documents. It balances the samples of a step over the data
        ranks.
        """

    def __getitem__(self, k: int, /) -> Made_co: ...


@dataclass(frozen=True)
class DatasetContext:
    """Settings shared by the data sets of a split.

    Attributes:
        eod: the token that ends a document, if the tokenizer has one.
        cache: a folder for indices.
        known_tokenizer: the tokenizer of the data, where it was found already.
        vision: what of the model sees the images of the data, if anything does.
    """

    config: DataConfig
    seed: int
    eod: int | None
    cache: Path
    known_tokenizer: Tokenizer | None = None
    vision: VisionConfig | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the data, for kinds that need one: the known tokenizer, else the one named by the run.

        Raises:
            ConfigError: when there is neither.
        """
        if self.known_tokenizer is not None:
            return self.known_tokenizer
        if self.config.tokenizer is None:
            raise ConfigError(
                f"data.kind = {self.config.kind}: needs the tokenizer of the data",
                hint="data.tokenizer names its folder",
            )
        return Tokenizer(self.config.tokenizer)

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        """Tokenizer of the data that encodes special tokens spelled in a text as text."""
        return Tokenizer(self.tokenizer.path, specials_as_text=True)


DatasetFactory: TypeAlias = Callable[[DatasetPart, DatasetContext, int], DatasetSamples[Any]]
"""Makes the samples of a part of a data set, of which the run will read so many (which only order `megatron` may
depend on). Raises DataError when the data set is not of this kind, or nothing of it is in the part."""
