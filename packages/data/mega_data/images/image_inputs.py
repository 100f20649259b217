"""Inputs and texts of images for vision encoders that run as modules of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True)
class ImageInputs:
    """Named input arrays of a transformers vision module for one image, and the (1, rows, columns) shape of its features.

    Attributes:
        arrays: inputs by the names of transformers, such as `pixel_values`; the first axis joins images.
        shape: (1, rows, columns) of the image's features; one row of all features where they have no grid.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class ImageText:
    """Text that stands for one image in a prompt, with its number of features.

    Attributes:
        placeholder: text that stands for an image in a prompt or chat template.
        text: text that replaces it, with one token per feature, and other tokens.
        features: number of features, and so of their placeholder tokens in `text`.
    """

    placeholder: str
    text: str
    features: int
