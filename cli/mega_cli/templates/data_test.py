"""The kind of data `my_extension`: its samples."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np

from mega_trainer.extend import TrainingSample, load_extensions

ENTRY = load_extensions([str(Path(__file__).parent / "my_extension.py")]).entries("data_kinds")["my_extension"]
LateLossSamples = inspect.getmodule(ENTRY.build).LateLossSamples  # type: ignore[union-attr]


class Windows:
    """Windows of eight tokens, all of which count."""

    content_key = "eight"

    def __getitem__(self, k: int) -> TrainingSample:
        return TrainingSample(np.arange(8), np.arange(1, 9), np.ones(8, np.float32), np.arange(8), None)


def test_only_the_end_of_a_window_counts() -> None:
    assert LateLossSamples(Windows(), 0.25)[3].loss_weights.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


def test_another_share_is_other_data() -> None:
    assert LateLossSamples(Windows(), 0.25).content_key != LateLossSamples(Windows(), 0.5).content_key
