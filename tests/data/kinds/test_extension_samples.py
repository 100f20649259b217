"""Kinds of data of extensions: what they return wrong is one sentence that names the extension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mega_common.errors import ConfigError
from mega_common.extension_entries import DataKind, NoOptions
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.extension_samples import ExtensionSampleBuilder
from mega_data.sampling.dataset_parts import DatasetPart


@dataclass
class Numbers:
    """Samples of some tokens."""

    count: int
    content_key: str = "numbers"
    samples_per_epoch: float = 3.0

    def estimate_attention_work(self, numbers: Any) -> Any:
        return numbers * 0 + self.count

    def __getitem__(self, k: int) -> TrainingSample:
        tokens = np.arange(self.count) + k
        return TrainingSample(tokens, tokens + 1, np.ones(4, np.float32), np.arange(4), None)


def build(function: Callable[..., Any]) -> Any:
    context = cast(DatasetContext, SimpleNamespace(config=SimpleNamespace(seq_length=4)))
    builder = ExtensionSampleBuilder("extension mine: numbers in data_kinds", DataKind(function), NoOptions())
    return builder(cast(DatasetPart, None), context, 10)


def test_samples_are_those_of_the_extension() -> None:
    samples = build(lambda part, context, num_samples, *, options: Numbers(4))
    assert (samples.content_key, samples.samples_per_epoch) == ("numbers", 3.0)
    assert samples[5].tokens.tolist() == [5, 6, 7, 8]
    assert samples.estimate_attention_work(np.arange(2)).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda part, context, num_samples, *, options: Numbers(5), r"tokens of sample 0 must have .* = 4 elements"),
        (
            lambda part, context, num_samples, *, options: [],
            "returned list, which has no content_key, samples_per_epoch",
        ),
        (
            lambda part, context, num_samples: Numbers(4),
            r"raised TypeError: .*unexpected keyword argument 'options' \(",
        ),
        (
            lambda part, context, num_samples, *, options: Numbers(cast(Any, None)),
            r"raised TypeError: .* \(test_extension_samples.py, line",
        ),
    ],
)
def test_what_is_wrong_is_named(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"extension mine: numbers in data_kinds:? {words}"):
        build(function)[0]
