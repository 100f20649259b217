"""The `data:` section: what its kinds ask of it."""

from __future__ import annotations

from typing import Any

import pytest

from mega_common.errors import ConfigError
from mega_data.data_config import DataConfig

MIXED = [{"path": "a", "kind": "bert"}, {"path": "b", "kind": "text"}]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"train": MIXED}, r"kind = 'text': the kinds bert and text cannot be mixed"),
        ({"train": "a", "valid": {"path": "b", "kind": "t5"}}, "the kinds t5 and text cannot be mixed"),
        (
            {"train": "a", "kind": "bert", "seq_length": 4},
            "seq_length = 4: must be at least 5 for the kind bert",
        ),
        (
            {"train": "a", "kind": "t5", "eod_mask_loss": True},
            "eod_mask_loss = true: is not supported with the kind t5",
        ),
        ({"train": "a", "kind": "t5", "order": "megatron"}, r"t5.decoder_seq_length: is required with order: megatron"),
        ({"train": "a", "kind": "fim", "fim": {"rate": 1.5}}, r"fim.rate = 1.5"),
        ({"train": "a", "kind": "fim", "fim": {"tokens": ["<a>", "<b>"]}}, "fim.tokens"),
    ],
)
def test_what_a_kind_cannot_use_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DataConfig.parse(fields)


def test_text_and_middles_may_mix() -> None:
    assert DataConfig.parse({"train": ["a", {"path": "b", "kind": "fim"}]}).dataset_kinds == {"text", "fim"}
